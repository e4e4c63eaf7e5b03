"""The APIs by which brokers have the states of share partitions kept, as bytes against a broker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from brokers import Broker, wait_for
from headrace.errors import ErrorCode
from headrace.kafka.share_partition_requests import KEYS_MAX
from headrace.queues.messages import SharePartitionKey
from headrace.queues.state_records import coordinator_key
from headrace.wire import api as apis
from headrace.wire.message import Message
from kafka_protocol.raw import Raw

SHARE = 2
ACQUIRED, ACKNOWLEDGED = 1, 2


class Share:
    """A share partition, asked for by bytes."""

    def __init__(self, raw: Raw, topic: str, group: str = "workers", partition: int = 0) -> None:
        self.raw = raw
        (found,) = raw.call(apis.METADATA, 12, topics=[Message(topic_id=bytes(16), name=topic)]).topics
        self.key = SharePartitionKey(group, found.topic_id, partition)

    def find(self, key: str | None = None) -> Any:
        keys = [coordinator_key(self.key) if key is None else key]
        return self.raw.call(apis.FIND_COORDINATOR, 6, key_type=SHARE, coordinator_keys=keys).coordinators[0]

    def ask(self, api_key: int, version: int, **fields: Any) -> Any:
        part = Message(partition=self.key.partition, **fields)
        topics = [Message(topic_id=self.key.topic_id, partitions=[part])]
        answer = self.raw.call(api_key, version, group_id=self.key.group, topics=topics)
        (topic,) = answer.results
        (row,) = topic.partitions
        assert (topic.topic_id, row.partition) == (self.key.topic_id, self.key.partition)
        return row

    def initialize(self, state_epoch: int = 1, start: int = 0) -> int:
        """When the coordinator has its partition."""

        def code() -> int:
            row = self.ask(apis.INITIALIZE_SHARE_GROUP_STATE, 0, state_epoch=state_epoch, start_offset=start)
            return int(row.error_code)

        retriable = (ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
        return wait_for("the coordinator", lambda: [found] if (found := code()) not in retriable else None)[0]

    def read(self, leader_epoch: int = 1, **own: Any) -> Any:
        return self.ask(apis.READ_SHARE_GROUP_STATE, 0, leader_epoch=leader_epoch, **own)

    def write(self, *batches: Message, start: int = -1, leader_epoch: int = 1, version: int = 1, **own: Any) -> int:
        fields = {"state_epoch": 1, "leader_epoch": leader_epoch, "start_offset": start}
        row = self.ask(apis.WRITE_SHARE_GROUP_STATE, version, state_batches=list(batches), **fields, **own)
        return int(row.error_code)


def batch(first: int, last: int, state: int = ACKNOWLEDGED, **own: Any) -> Message:
    return Message(first_offset=first, last_offset=last, delivery_state=state, delivery_count=1, **own)


@pytest.fixture
def share(broker: Broker, connect: Callable[[Broker], Raw], topic: str) -> Share:
    raw = connect(broker)
    raw.create(topic, 2)
    made = Share(raw, topic)
    assert made.find().error_code == ErrorCode.NONE
    assert made.initialize() == ErrorCode.NONE
    return made


def test_a_share_partition_is_kept_from_its_beginning_to_its_end(share: Share) -> None:
    assert share.write(batch(0, 4), batch(5, 9, ACQUIRED, member="m1", until_ms=77)) == ErrorCode.NONE
    assert share.write(start=3, version=0) == ErrorCode.NONE
    found = share.read()
    assert (found.error_code, found.state_epoch, found.start_offset) == (ErrorCode.NONE, 1, 3)
    done, locked = found.state_batches
    assert (done.first_offset, done.last_offset, done.delivery_state, done.member) == (3, 4, ACKNOWLEDGED, "")
    assert (locked.first_offset, locked.last_offset, locked.delivery_state) == (5, 9, ACQUIRED)
    assert (locked.member, locked.until_ms) == ("m1", 77)
    summary = share.ask(apis.READ_SHARE_GROUP_STATE_SUMMARY, 1, leader_epoch=-1)
    assert (summary.state_epoch, summary.leader_epoch, summary.start_offset) == (1, 1, 3)
    assert summary.delivery_complete_count == 2
    assert share.ask(apis.DELETE_SHARE_GROUP_STATE, 0).error_code == ErrorCode.NONE
    assert share.read().error_code == ErrorCode.INVALID_REQUEST


def test_leaders_and_loads_are_fenced(share: Share) -> None:
    assert share.read(3, load_id=70).error_code == ErrorCode.NONE
    assert share.write(batch(0, 1), leader_epoch=2) == ErrorCode.FENCED_LEADER_EPOCH
    assert share.write(batch(0, 1), leader_epoch=3, load_id=69) == ErrorCode.FENCED_LEADER_EPOCH
    assert share.write(batch(0, 1), leader_epoch=3, load_id=70) == ErrorCode.NONE
    assert share.initialize(2, 10) == ErrorCode.NONE
    assert share.write(batch(2, 3), leader_epoch=3, load_id=70) == ErrorCode.FENCED_STATE_EPOCH
    assert share.initialize(1, 0) == ErrorCode.FENCED_STATE_EPOCH


def test_what_cannot_be_is_refused(share: Share) -> None:
    unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert share.write(batch(0, 1, 5)) == share.write(batch(4, 1)) == ErrorCode.INVALID_REQUEST
    share.key = share.key._replace(partition=2)
    assert (share.read().error_code, share.initialize()) == (unknown, unknown)
    share.key = share.key._replace(partition=-1)
    assert share.read().error_code == ErrorCode.INVALID_REQUEST
    share.key = share.key._replace(topic_id=bytes(16), partition=0)
    assert share.read().error_code == ErrorCode.INVALID_REQUEST
    share.key = share.key._replace(topic_id=bytes(15) + b"\1")
    assert (share.read().error_code, share.initialize()) == (unknown, unknown)


def test_a_request_is_answered_in_its_own_order(share: Share) -> None:
    topics = [
        Message(topic_id=share.key.topic_id, partitions=[Message(partition=1), Message(partition=0)]),
        Message(topic_id=bytes(15) + b"\1", partitions=[]),
    ]
    answer = share.raw.call(apis.DELETE_SHARE_GROUP_STATE, 0, group_id="workers", topics=topics)
    assert [[row.partition for row in topic.partitions] for topic in answer.results] == [[1, 0], []]
    assert share.raw.call(apis.DELETE_SHARE_GROUP_STATE, 0, group_id="workers", topics=[]).results == []


@pytest.mark.parametrize(("count", "code"), [(KEYS_MAX, 0), (KEYS_MAX + 1, ErrorCode.INVALID_REQUEST)])
def test_a_request_with_many_more_than_brokers_ask_for_is_refused(share: Share, count: int, code: int) -> None:
    partitions = [Message(partition=number) for number in range(count)]
    topics = [Message(topic_id=bytes(15) + b"\1", partitions=partitions)]
    answer = share.raw.call(apis.DELETE_SHARE_GROUP_STATE, 0, group_id="workers", topics=topics)
    assert [row.partition for row in answer.results[0].partitions] == list(range(count))
    assert {row.error_code for row in answer.results[0].partitions} == {code}


@pytest.mark.parametrize("key", ["", "workers", "g:AAAA:0", "g:AAECAwQFBgcICQoLDA0ODw:x"])
def test_other_keys_have_no_share_coordinator(share: Share, key: str) -> None:
    assert share.find(key).error_code == ErrorCode.INVALID_REQUEST


def test_a_deleted_topic_leaves_no_share_partitions(share: Share, topic: str) -> None:
    share.raw.call(apis.DELETE_TOPICS, 5, topic_names=[topic], timeout_ms=10_000)
    gone = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    wait_for("its share partitions to go", lambda: share.read().error_code == gone)


def test_states_outlive_the_broker(
    fresh_broker: Callable[..., Broker], connect: Callable[[Broker], Raw], topic: str
) -> None:
    broker = fresh_broker(settings={"share.coordinator.state.topic.num.partitions": 2})
    raw = connect(broker)
    raw.create(topic)
    share = Share(raw, topic)
    share.find()
    assert share.initialize() == ErrorCode.NONE
    assert share.read(4, load_id=70).error_code == ErrorCode.NONE
    assert share.write(batch(0, 4), leader_epoch=4, load_id=70) == ErrorCode.NONE
    broker.kill()
    broker.start()
    share = Share(connect(broker), topic)
    share.initialize()
    assert share.read(3).error_code == ErrorCode.FENCED_LEADER_EPOCH
    assert share.write(batch(5, 6), leader_epoch=4, load_id=69) == ErrorCode.FENCED_LEADER_EPOCH
    found = share.read(4, load_id=71)
    assert [(row.first_offset, row.last_offset) for row in found.state_batches] == [(0, 4)]
    topics = raw_topics(share.raw)
    assert topics["__share_group_state"] == (2, True)


def raw_topics(raw: Raw) -> dict[str, tuple[int, bool]]:
    found = raw.call(apis.METADATA, 12, topics=None).topics
    return {one.name: (len(one.partitions), one.is_internal) for one in found}
