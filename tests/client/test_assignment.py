"""Subscriptions and assignments are those of other Kafka clients; ranges are fair and complete."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.client import assignment
from headrace.errors import ProtocolError

TOPICS = st.text("abcdef.-", min_size=1, max_size=8)


@given(st.sets(TOPICS, max_size=5))
def test_a_subscription_is_read_back(topics: set[str]) -> None:
    assert set(assignment.decode_subscription(assignment.encode_subscription(topics))) == topics


@given(st.dictionaries(TOPICS, st.lists(st.integers(0, 2**31 - 1), max_size=6), max_size=4))
def test_an_assignment_is_read_back(given_partitions: dict[str, list[int]]) -> None:
    blob = assignment.encode_assignment(given_partitions)
    assert assignment.decode_assignment(blob) == {topic: tuple(parts) for topic, parts in given_partitions.items()}


def test_aiokafka_reads_what_we_write_and_we_read_what_it_writes() -> None:
    protocol = pytest.importorskip("aiokafka.coordinator.protocol")
    theirs = protocol.ConsumerProtocolMemberMetadata.decode(assignment.encode_subscription(["b", "a"]))
    assert list(theirs.subscription) == ["a", "b"]
    ours = assignment.encode_assignment({"t": [0, 2]})
    assert protocol.ConsumerProtocolMemberAssignment.decode(ours).assignment == [("t", [0, 2])]
    theirs = protocol.ConsumerProtocolMemberAssignment(1, [("t", [3, 4])], b"data").encode()
    assert assignment.decode_assignment(theirs) == {"t": (3, 4)}
    theirs = protocol.ConsumerProtocolMemberMetadata(1, ["x", "y"], b"data").encode() + b"later fields"
    assert assignment.decode_subscription(theirs) == ("x", "y")


@given(st.binary(max_size=60))
def test_a_malformed_blob_is_refused_and_nothing_else(blob: bytes) -> None:
    for decode in (assignment.decode_subscription, assignment.decode_assignment):
        with contextlib.suppress(ProtocolError):
            decode(blob)


def test_a_length_beyond_the_blob_allocates_nothing() -> None:
    with pytest.raises(ProtocolError):
        assignment.decode_assignment(b"\0\0" + b"\x7f\xff\xff\xff")


def test_ranges_give_the_first_members_the_extra_partitions_of_each_topic() -> None:
    ranges = assignment.assign_ranges({"b": ["x", "y"], "a": ["x"], "c": ["x", "y"]}, {"x": 7, "y": 1, "z": 4})
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
        for member, topics in assignment.assign_ranges(subscriptions, counts).items()
        for topic, partitions in topics.items()
        for partition in partitions
        if topic in subscriptions[member]
    ]
    asked = set().union(*subscriptions.values())
    assert sorted(owned) == sorted((t, p) for t, count in counts.items() if t in asked for p in range(count))
