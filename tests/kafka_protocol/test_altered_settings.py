"""Settings that are altered while the broker runs take effect at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from brokers import Broker
from headrace.wire import api as apis
from headrace.wire.message import Message
from kafka_protocol.raw import Raw, batch_of
from proving import proves

Connect = Callable[[Broker], Raw]
TOPIC, BROKER = 2, 4


def alter(raw: Raw, kind: int, name: str, setting: str, value: str) -> Any:
    change = Message(name=setting, config_operation=0, value=value)
    resource = Message(resource_type=kind, resource_name=name, configs=[change])
    answer = raw.call(apis.INCREMENTAL_ALTER_CONFIGS, 1, resources=[resource], validate_only=False)
    return answer.responses[0]


@proves("G5")
def test_acks_all_needs_the_minimum_in_sync_and_a_lower_minimum_frees_what_waited(
    broker: Broker, connect: Connect, topic: str
) -> None:
    raw = connect(broker)
    raw.create(topic, min_insync_replicas="2")
    assert raw.produce(topic, batch_of([b"a"]), acks=-1).error_code == 19
    assert raw.produce(topic, batch_of([b"b"]), acks=1).error_code == 0
    assert raw.fetch(topic).high_watermark == 0, "nobody reads what can still be lost"
    raw.send_fetch(topic, 0, wait_ms=60_000)
    other = connect(broker)
    assert alter(other, TOPIC, topic, "min.insync.replicas", "1").error_code == 0
    assert raw.receive(apis.FETCH, 12)[1].responses[0].partitions[0].high_watermark == 1


@proves("L3")
def test_topic_creation_by_naming_one_can_be_switched_off_and_on(
    fresh_broker: Callable[..., Broker], connect: Connect, topic: str
) -> None:
    raw = connect(fresh_broker())

    def named(name: str) -> int:
        asked = [Message(name=name, topic_id=bytes(16))]
        answer = raw.call(apis.METADATA, 12, topics=asked, allow_auto_topic_creation=True)
        code: int = answer.topics[0].error_code
        return code

    assert named(topic) == 0
    assert alter(raw, BROKER, "", "auto.create.topics.enable", "false").error_code == 0
    assert named(topic + "-more") == 3
    assert alter(raw, BROKER, "", "auto.create.topics.enable", "true").error_code == 0
    assert named(topic + "-more") == 0


def test_settings_that_need_a_restart_and_unknown_ones_are_refused(broker: Broker, connect: Connect) -> None:
    raw = connect(broker)
    for setting in ("frame.max.bytes", "no.such.setting"):
        refused = alter(raw, BROKER, "1", setting, "1")
        assert refused.error_code == 40
        assert setting in refused.error_message
