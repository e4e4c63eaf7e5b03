"""Topics made by a real client."""

from __future__ import annotations

from collections.abc import Callable

from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from brokers import Broker

MakeTopic = Callable[..., str]


def create_topic(broker: Broker, name: str, partitions: int = 1, **config: object) -> str:
    """Create a topic and give its name; settings are named with underscores for dots."""
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    settings = {key.replace("_", "."): str(value) for key, value in config.items()}
    admin.create_topics([NewTopic(name, partitions, 1, config=settings)])[name].result(30)
    return name
