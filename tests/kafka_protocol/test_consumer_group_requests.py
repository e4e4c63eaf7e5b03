"""ConsumerGroupHeartbeat and ConsumerGroupDescribe on the wire, by hand."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest

from brokers import Broker, wait_for
from headrace.errors import ErrorCode
from headrace.wire import api as apis
from headrace.wire.message import Message
from kafka_protocol.raw import Raw
from proving import proves

Connect = Callable[[Broker], Raw]
LOADING = (14, 15, 16)


def heartbeat(raw: Raw, group: str, member: str, epoch: int, version: int = 1, **told: Any) -> Any:
    body: dict[str, Any] = {
        "group_id": group,
        "member_id": member,
        "member_epoch": epoch,
        "instance_id": None,
        "rack_id": None,
        "rebalance_timeout_ms": -1,
        "subscribed_topic_names": None,
        "subscribed_topic_regex": None,
        "server_assignor": None,
        "topic_partitions": None,
        **told,
    }

    def answered() -> Any:
        raw.call(apis.FIND_COORDINATOR, 3, key=group, key_type=0)
        answer = raw.call(apis.CONSUMER_GROUP_HEARTBEAT, version, **body)
        return None if answer.error_code in LOADING else answer

    return wait_for("the coordinator", answered)


def join(raw: Raw, group: str, *topics: str, member: str = "", version: int = 1, **told: Any) -> Any:
    member = member or (str(uuid.uuid4()) if version else "")
    first = {"rebalance_timeout_ms": 30_000, "subscribed_topic_names": list(topics), "topic_partitions": []}
    return heartbeat(raw, group, member, 0, version, **{**first, **told})


def partitions(assignment: Any) -> list[int]:
    return sorted(index for topic in assignment.topic_partitions for index in topic.partitions)


@proves("N1")
@pytest.mark.parametrize("version", [0, 1])
def test_a_member_joins_goes_on_and_leaves(broker: Broker, connect: Connect, topic: str, version: int) -> None:
    raw = connect(broker)
    raw.create(topic, 3)
    group = f"group-{topic}"
    joined = join(raw, group, topic, version=version)
    assert (joined.error_code, joined.member_epoch, joined.heartbeat_interval_ms) == (0, 1, 5000)
    assert joined.member_id
    assert partitions(joined.assignment) == [0, 1, 2]
    again = heartbeat(raw, group, joined.member_id, 1, version)
    assert (again.error_code, again.assignment) == (0, None)
    (described,) = raw.call(
        apis.CONSUMER_GROUP_DESCRIBE, version, group_ids=[group], include_authorized_operations=True
    ).groups
    assert (described.group_state, described.group_epoch, described.assignor_name) == ("Stable", 1, "uniform")
    assert described.authorized_operations > 0
    (member,) = described.members
    assert member.subscribed_topic_names == [topic]
    assert [one.topic_name for one in member.assignment.topic_partitions] == [topic]
    assert partitions(member.target_assignment) == [0, 1, 2]
    if version >= 1:
        assert member.member_type == 1
    listed = raw.call(apis.LIST_GROUPS, 5, states_filter=[], types_filter=["consumer"]).groups
    assert (group, "Stable", "consumer") in [(one.group_id, one.group_state, one.group_type) for one in listed]
    (classic,) = raw.call(apis.DESCRIBE_GROUPS, 6, groups=[group], include_authorized_operations=False).groups
    assert (classic.error_code, classic.group_state) == (ErrorCode.GROUP_ID_NOT_FOUND, "Dead")
    left = heartbeat(raw, group, joined.member_id, -1, version)
    assert (left.error_code, left.member_epoch) == (0, -1)
    assert raw.call(apis.DELETE_GROUPS, 2, groups_names=[group]).results[0].error_code == 0
    (gone,) = raw.call(
        apis.CONSUMER_GROUP_DESCRIBE, version, group_ids=[group], include_authorized_operations=False
    ).groups
    assert gone.error_code == ErrorCode.GROUP_ID_NOT_FOUND


@pytest.mark.parametrize(
    ("told", "code"),
    [
        ({"group": ""}, ErrorCode.INVALID_REQUEST),
        ({"member": ""}, ErrorCode.INVALID_REQUEST),
        ({"instance_id": ""}, ErrorCode.INVALID_REQUEST),
        ({"rack_id": ""}, ErrorCode.INVALID_REQUEST),
        ({"epoch": -3}, ErrorCode.INVALID_REQUEST),
        ({"epoch": -2}, ErrorCode.INVALID_REQUEST),
        ({"rebalance_timeout_ms": -1}, ErrorCode.INVALID_REQUEST),
        ({"topic_partitions": None}, ErrorCode.INVALID_REQUEST),
        ({"topic_partitions": [Message(topic_id=bytes(16), partitions=[0])]}, ErrorCode.INVALID_REQUEST),
        ({"subscribed_topic_names": None}, ErrorCode.INVALID_REQUEST),
        ({"server_assignor": "fair"}, ErrorCode.UNSUPPORTED_ASSIGNOR),
        ({"subscribed_topic_regex": "(?=a)"}, ErrorCode.INVALID_REGULAR_EXPRESSION),
        ({"epoch": 1}, ErrorCode.UNKNOWN_MEMBER_ID),
        ({"epoch": -1}, ErrorCode.UNKNOWN_MEMBER_ID),
        ({"group": "x" * 300}, ErrorCode.INVALID_GROUP_ID),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(broker: Broker, connect: Connect, told: dict[str, Any], code: int) -> None:
    raw = connect(broker)
    given: dict[str, Any] = {
        "rebalance_timeout_ms": 1000,
        "subscribed_topic_names": ["t"],
        "topic_partitions": [],
        **{name: value for name, value in told.items() if name not in ("group", "member", "epoch")},
    }
    answer = heartbeat(
        raw, told.get("group", f"refused-{uuid.uuid4()}"), told.get("member", "m"), told.get("epoch", 0), **given
    )
    assert answer.error_code == code


@proves("N1")
def test_offsets_are_fetched_and_committed_by_member_epoch(broker: Broker, connect: Connect, topic: str) -> None:
    raw = connect(broker)
    raw.create(topic, 1)
    group = f"group-{topic}"
    joined = join(raw, group, topic)

    def commit(epoch: int, version: int = 9) -> int:
        row = Message(partition_index=0, committed_offset=5, committed_leader_epoch=-1, committed_metadata=None)
        answer = raw.call(
            apis.OFFSET_COMMIT,
            version,
            group_id=group,
            generation_id_or_member_epoch=epoch,
            member_id=joined.member_id,
            group_instance_id=None,
            topics=[Message(name=topic, partitions=[row])],
        )
        found: int = answer.topics[0].partitions[0].error_code
        return found

    def fetch(epoch: int) -> Any:
        topics = [Message(name=topic, partition_indexes=[0])]
        asked = Message(group_id=group, member_id=joined.member_id, member_epoch=epoch, topics=topics)
        return raw.call(apis.OFFSET_FETCH, 9, groups=[asked], require_stable=True).groups[0]

    assert commit(joined.member_epoch) == 0
    assert commit(joined.member_epoch + 1) == ErrorCode.STALE_MEMBER_EPOCH
    assert commit(joined.member_epoch, version=8) == ErrorCode.UNSUPPORTED_VERSION
    assert fetch(joined.member_epoch).topics[0].partitions[0].committed_offset == 5
    assert fetch(joined.member_epoch + 1).error_code == ErrorCode.STALE_MEMBER_EPOCH
    heartbeat(raw, group, joined.member_id, -1)


def test_clients_are_told_that_groups_are_of_version_1(broker: Broker, connect: Connect) -> None:
    answer = connect(broker).call(apis.API_VERSIONS, 3, client_software_name="x", client_software_version="1")
    assert {one.name: one.max_version_level for one in answer.finalized_features}["group.version"] == 1
