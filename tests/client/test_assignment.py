"""Subscriptions and assignments are those of other Kafka clients; ranges are fair and complete."""

import contextlib
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.client.consumer import group_protocol
from headrace.errors import ProtocolError

TOPICS = st.text("abcdef.-", min_size=1, max_size=8)


@given(st.sets(TOPICS, max_size=5))
def test_a_subscription_is_read_back(topics: set[str]) -> None:
    assert set(group_protocol.decode_subscription(group_protocol.encode_subscription(topics)).topics) == topics


@given(st.dictionaries(TOPICS, st.lists(st.integers(0, 2**31 - 1), max_size=6), max_size=4))
def test_an_assignment_is_read_back(given_partitions: dict[str, list[int]]) -> None:
    blob = group_protocol.encode_assignment(given_partitions)
    assert group_protocol.decode_assignment(blob) == {topic: tuple(parts) for topic, parts in given_partitions.items()}


@given(
    st.sets(TOPICS, max_size=3),
    st.frozensets(st.tuples(TOPICS, st.integers(0, 99)), max_size=5),
    st.integers(-1, 2**31 - 1),
    st.text("abc", max_size=3),
    st.none() | st.binary(max_size=5),
)
def test_what_a_member_holds_is_read_back(
    topics: set[str],
    owned: frozenset[group_protocol.TopicPartition],
    generation: int,
    rack: str,
    user_data: bytes | None,
) -> None:
    blob = group_protocol.encode_subscription(
        topics, owned=owned, generation=generation, rack=rack, user_data=user_data
    )
    said = group_protocol.Subscription(tuple(sorted(topics)), owned, generation, rack, user_data)
    assert group_protocol.decode_subscription(blob) == said


def test_older_and_newer_subscriptions_are_read_as_far_as_they_go() -> None:
    whole = group_protocol.encode_subscription(["t"], owned=[("t", 1)], generation=7, rack="r", user_data=b"u")
    bare, owned = group_protocol.Subscription(("t",), user_data=b"u"), frozenset({("t", 1)})
    assert group_protocol.decode_subscription(b"\0\0" + whole[2:]) == bare
    assert group_protocol.decode_subscription(b"\0\1" + whole[2:]) == dataclasses.replace(bare, owned=owned)
    assert group_protocol.decode_subscription(b"\0\2" + whole[2:]) == dataclasses.replace(
        bare, owned=owned, generation=7
    )
    assert group_protocol.decode_subscription(b"\0\4" + whole[2:] + b"later") == group_protocol.decode_subscription(
        whole
    )


def test_kafka_python_reads_what_we_hold_and_we_read_what_it_holds() -> None:
    metadata = pytest.importorskip("kafka.protocol.consumer.metadata")
    blob = group_protocol.encode_subscription(["t"], owned=[("t", 1), ("t", 0)], generation=7, rack="r", user_data=b"u")
    theirs = metadata.ConsumerProtocolSubscription.decode(blob)
    assert [(held.topic, list(held.partitions)) for held in theirs.owned_partitions] == [("t", [0, 1])]
    assert (theirs.topics, theirs.generation_id, theirs.rack_id, theirs.user_data) == (["t"], 7, "r", b"u")
    assert metadata.ConsumerProtocolSubscription.decode(group_protocol.encode_subscription(["t"])).rack_id is None
    assert group_protocol.decode_subscription(theirs.encode()) == group_protocol.decode_subscription(blob)


def test_aiokafka_reads_what_we_write_and_we_read_what_it_writes() -> None:
    protocol = pytest.importorskip("aiokafka.coordinator.protocol")
    theirs = protocol.ConsumerProtocolMemberMetadata.decode(group_protocol.encode_subscription(["b", "a"]))
    assert list(theirs.subscription) == ["a", "b"]
    ours = group_protocol.encode_assignment({"t": [0, 2]})
    assert protocol.ConsumerProtocolMemberAssignment.decode(ours).assignment == [("t", [0, 2])]
    theirs = protocol.ConsumerProtocolMemberAssignment(1, [("t", [3, 4])], b"data").encode()
    assert group_protocol.decode_assignment(theirs) == {"t": (3, 4)}
    theirs = protocol.ConsumerProtocolMemberMetadata(0, ["x", "y"], b"data").encode() + b"later fields"
    assert group_protocol.decode_subscription(theirs).topics == ("x", "y")


@given(st.binary(max_size=60))
def test_a_malformed_blob_is_refused_and_nothing_else(blob: bytes) -> None:
    for decode in (group_protocol.decode_subscription, group_protocol.decode_assignment):
        with contextlib.suppress(ProtocolError):
            decode(blob)


def test_a_length_beyond_the_blob_allocates_nothing() -> None:
    with pytest.raises(ProtocolError):
        group_protocol.decode_assignment(b"\0\0" + b"\x7f\xff\xff\xff")


def test_ranges_give_the_first_members_the_extra_partitions_of_each_topic() -> None:
    ranges = group_protocol.assign_ranges({"b": ["x", "y"], "a": ["x"], "c": ["x", "y"]}, {"x": 7, "y": 1, "z": 4})
    assert ranges == {
        "a": {"x": (0, 1, 2)},
        "b": {"x": (3, 4), "y": (0,)},
        "c": {"x": (5, 6)},
    }


@given(
    st.dictionaries(st.text(max_size=4), st.sets(st.sampled_from("xyz")), min_size=1, max_size=6),
    st.dictionaries(st.sampled_from("xyz"), st.integers(0, 20)),
)
def test_every_partition_of_a_subscribed_topic_has_one_owner_who_asked(
    subscriptions: dict[str, set[str]], counts: dict[str, int]
) -> None:
    owned = [
        (topic, partition)
        for member, topics in group_protocol.assign_ranges(subscriptions, counts).items()
        for topic, partitions in topics.items()
        for partition in partitions
        if topic in subscriptions[member]
    ]
    asked = set().union(*subscriptions.values())
    assert sorted(owned) == sorted((t, p) for t, count in counts.items() if t in asked for p in range(count))
