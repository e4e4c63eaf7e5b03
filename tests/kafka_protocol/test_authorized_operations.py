"""KIP-430: what a client may do, in each version that has room for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from brokers import Broker, wait_for
from headrace.kafka.authorized import NOT_ASKED, ON_CLUSTER, ON_GROUP, ON_TOPIC
from headrace.wire import api as apis
from headrace.wire.message import Message
from kafka_protocol.raw import Raw

Connect = Callable[[Broker], Raw]
LOADING = (14, 15, 16)


@pytest.mark.parametrize("version", range(8, 14))
@pytest.mark.parametrize("on_topic", [True, False])
@pytest.mark.parametrize("on_cluster", [True, False])
def test_metadata_tells_the_operations_that_are_asked_for(
    broker: Broker, connect: Connect, topic: str, version: int, on_topic: bool, on_cluster: bool
) -> None:
    raw = connect(broker)
    raw.create(topic)
    answer = raw.call(
        apis.METADATA,
        version,
        topics=[Message(name=topic, topic_id=bytes(16))],
        allow_auto_topic_creation=False,
        include_topic_authorized_operations=on_topic,
        include_cluster_authorized_operations=on_cluster,
    )
    assert answer.topics[0].topic_authorized_operations == (ON_TOPIC if on_topic else NOT_ASKED)
    if version <= 10:
        assert answer.cluster_authorized_operations == (ON_CLUSTER if on_cluster else NOT_ASKED)


@pytest.mark.parametrize("version", [0, 1, 2])
@pytest.mark.parametrize("asked", [True, False])
def test_the_cluster_tells_the_operations_that_are_asked_for(
    broker: Broker, connect: Connect, version: int, asked: bool
) -> None:
    answer = connect(broker).call(
        apis.DESCRIBE_CLUSTER,
        version,
        include_cluster_authorized_operations=asked,
        endpoint_type=1,
        include_fenced_brokers=False,
    )
    assert answer.cluster_authorized_operations == (ON_CLUSTER if asked else NOT_ASKED)


def test_the_bits_are_those_of_a_kafka_broker_without_an_authorizer() -> None:
    assert (ON_TOPIC, ON_GROUP, ON_CLUSTER) == (0b1101_1111_1000, 0b1101_0100_1000, 0b1_1111_1010_0000)


@pytest.mark.parametrize("version", range(3, 7))
def test_a_group_that_is_not_there_answers_as_kafka_does(broker: Broker, connect: Connect, version: int) -> None:
    raw = connect(broker)

    def described() -> Any:
        raw.call(apis.FIND_COORDINATOR, 3, key="nobody", key_type=0)
        (group,) = raw.call(apis.DESCRIBE_GROUPS, version, groups=["nobody"], include_authorized_operations=True).groups
        return group if group.error_code not in LOADING else None

    group = wait_for("the coordinator", described)
    assert group.authorized_operations == (NOT_ASKED if version >= 6 else ON_GROUP)
