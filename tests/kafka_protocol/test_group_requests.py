"""Offsets on the wire: large commits, and topics named by an id that is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from brokers import Broker, wait_for
from headrace.wire import api as apis
from headrace.wire.message import Message
from kafka_protocol.raw import Raw
from proving import proves

Connect = Callable[[Broker], Raw]
UNKNOWN_TOPIC_ID = 100
LOADING = (14, 15, 16)


def commit(raw: Raw, group: str, version: int, topics: list[Message]) -> Any:
    """The rows of the answer, once the group has its coordinator."""

    def answered() -> Any:
        raw.call(apis.FIND_COORDINATOR, 3, key=group, key_type=0)
        answer = raw.call(
            apis.OFFSET_COMMIT,
            version,
            group_id=group,
            generation_id_or_member_epoch=-1,
            member_id="",
            group_instance_id=None,
            topics=topics,
        )
        codes = {row.error_code for topic in answer.topics for row in topic.partitions}
        return answer if not codes & set(LOADING) else None

    return wait_for("the coordinator", answered)


def offset(index: int, value: int, metadata: str | None = None) -> Message:
    return Message(
        partition_index=index, committed_offset=value, committed_leader_epoch=-1, committed_metadata=metadata
    )


def topic_id(raw: Raw, name: str) -> bytes:
    asked = [Message(name=name, topic_id=bytes(16))]
    answer = raw.call(apis.METADATA, 12, topics=asked, allow_auto_topic_creation=False)
    found: bytes = answer.topics[0].topic_id
    return found


@proves("G5")
def test_a_commit_of_more_than_a_megabyte_counts_whole(broker: Broker, connect: Connect, topic: str) -> None:
    raw = connect(broker)
    raw.create(topic, 400)
    metadata = "m" * 4000
    topics = [Message(name=topic, partitions=[offset(index, index + 1, metadata) for index in range(400)])]
    answer = commit(raw, f"group-{topic}", 8, topics)
    assert [row.error_code for row in answer.topics[0].partitions] == [0] * 400
    asked = [Message(name=topic, partition_indexes=list(range(400)))]
    fetched = raw.call(apis.OFFSET_FETCH, 7, group_id=f"group-{topic}", topics=asked, require_stable=False)
    found = {row.partition_index: row.committed_offset for row in fetched.topics[0].partitions}
    assert found == {index: index + 1 for index in range(400)}
    assert {row.metadata for row in fetched.topics[0].partitions} == {metadata}


@proves("G5")
def test_offsets_of_a_topic_that_is_gone_are_refused_by_its_id(broker: Broker, connect: Connect, topic: str) -> None:
    raw = connect(broker)
    raw.create(topic)
    raw.create(topic + "-stays")
    group, gone, stays = f"group-{topic}", topic_id(raw, topic), topic_id(raw, topic + "-stays")
    both = [Message(topic_id=one, partitions=[offset(0, 7)]) for one in (gone, stays)]
    assert [t.partitions[0].error_code for t in commit(raw, group, 10, both).topics] == [0, 0]
    raw.call(apis.DELETE_TOPICS, 6, topics=[Message(name=topic, topic_id=bytes(16))], timeout_ms=5000)
    raw.create(topic)

    def fetch(topics: list[Message] | None) -> dict[bytes, tuple[int, int]]:
        groups = [Message(group_id=group, member_id=None, member_epoch=-1, topics=topics)]
        answer = raw.call(apis.OFFSET_FETCH, 10, groups=groups, require_stable=False)
        return {
            t.topic_id: (t.partitions[0].error_code, t.partitions[0].committed_offset) for t in answer.groups[0].topics
        }

    asked = [Message(topic_id=one, partition_indexes=[0]) for one in (gone, stays)]
    assert fetch(asked) == {gone: (UNKNOWN_TOPIC_ID, -1), stays: (0, 7)}
    renewed = topic_id(raw, topic)
    assert fetch([Message(topic_id=renewed, partition_indexes=[0])]) == {renewed: (0, -1)}, "a new topic begins anew"
    assert fetch(None) == {stays: (0, 7)}
    refused = commit(raw, group, 10, [Message(topic_id=gone, partitions=[offset(0, 8)])])
    assert [(t.topic_id, t.partitions[0].error_code) for t in refused.topics] == [(gone, UNKNOWN_TOPIC_ID)]


@proves("G5")
def test_many_topics_are_created_in_one_request_each_with_its_own_answer(
    broker: Broker, connect: Connect, topic: str
) -> None:
    raw = connect(broker)
    raw.create(f"{topic}-50")

    def asked(name: str, partitions: int = 1) -> Message:
        return Message(name=name, num_partitions=partitions, replication_factor=1, assignments=[], configs=[])

    names = [f"{topic}-{n}" for n in range(100)]
    topics = [*map(asked, names), asked("no/such name"), asked(f"{topic}-none", 0), *[asked(f"{topic}-twice")] * 2]
    answer = raw.call(apis.CREATE_TOPICS, 7, topics=topics, timeout_ms=30_000, validate_only=False)
    codes = {row.name: row.error_code for row in answer.topics}
    assert codes == dict.fromkeys(names, 0) | {
        f"{topic}-50": 36,
        "no/such name": 17,
        f"{topic}-none": 37,
        f"{topic}-twice": 42,
    }
    listed = raw.call(apis.METADATA, 12, topics=None, allow_auto_topic_creation=False)
    known = {one.name for one in listed.topics}
    assert known.issuperset(names)
    assert not known & {"no/such name", f"{topic}-none", f"{topic}-twice"}
