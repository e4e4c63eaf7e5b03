"""The hand-written Fetch path against the compiled codec, for every version."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ProtocolError, Unsupported
from headrace.wire import codec, fetch, schema
from headrace.wire.api import FETCH
from headrace.wire.decoder import MAX_ELEMENTS
from headrace.wire.message import Message
from proving import proves
from wire import fast_paths, tokens

each_version = pytest.mark.parametrize("version", range(fetch.MIN_VERSION, fetch.MAX_VERSION + 1))
int32 = st.integers(-(2**31), 2**31 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
names = st.text(max_size=6) | st.text("ключ-n", min_size=120, max_size=140)
ids = st.binary(min_size=16, max_size=16)
partitions = st.builds(
    Message,
    partition=int32,
    current_leader_epoch=int32,
    fetch_offset=int64,
    last_fetched_epoch=int32,
    log_start_offset=int64,
    partition_max_bytes=int32,
    replica_directory_id=ids,
    high_watermark=int64,
)
requests = st.builds(
    Message,
    cluster_id=st.none() | names,
    replica_id=int32,
    replica_state=st.builds(Message, replica_id=int32, replica_epoch=int64),
    max_wait_ms=int32,
    min_bytes=int32,
    max_bytes=int32,
    isolation_level=st.integers(0, 1),
    session_id=int32,
    session_epoch=int32,
    topics=st.lists(
        st.builds(Message, topic=names, topic_id=ids, partitions=st.lists(partitions, max_size=3)), max_size=3
    ),
    forgotten_topics_data=st.lists(
        st.builds(Message, topic=names, topic_id=ids, partitions=st.lists(int32, max_size=3)), max_size=3
    ),
    rack_id=names,
)


@proves("G4")
@each_version
@settings(max_examples=25, deadline=None, database=None)
@given(message=requests, before=st.binary(max_size=5), after=st.binary(max_size=40))
def test_requests_decode_as_by_the_compiled_codec(version: int, message: Message, before: bytes, after: bytes) -> None:
    body = codec.encode_request(FETCH, version, message)
    decoded = codec.decode_request(FETCH, version, memoryview(body))
    request = fetch.decode(version, memoryview(before + body + after), len(before), len(before) + len(body))
    assert request == fast_paths.fetch_of(decoded, version)


@each_version
@settings(max_examples=3, deadline=None, database=None)
@given(message=requests)
def test_cut_and_hostile_requests_are_refused(version: int, message: Message) -> None:
    pieces = list(tokens.tokens(schema.load(FETCH, version, "request"), message))
    body = b"".join(piece.data for piece in pieces)
    for length in range(len(body)):
        for spare in (b"", b"\0" * 60, b"\x02" * 60, b"\xff" * 60):
            with pytest.raises(ProtocolError):
                fetch.decode(version, memoryview(body[:length] + spare), 0, length)
    for nth, piece in enumerate(pieces):
        for hostile in piece.hostile():
            mutant = b"".join((*(p.data for p in pieces[:nth]), hostile, *(p.data for p in pieces[nth + 1 :])))
            with pytest.raises(ProtocolError, match=f"fetch v{version} request: field"):
                fetch.decode(version, memoryview(mutant), 0, len(mutant))


def test_fields_that_a_version_does_not_carry_have_their_defaults() -> None:
    message = Message(replica_id=-1, topics=[Message(topic="t", partitions=[Message(partition=3, fetch_offset=9)])])
    body = codec.encode_request(FETCH, 4, message)
    request = fetch.decode(4, memoryview(body), 0, len(body))
    assert request == fetch.FetchRequest(-1, 0, 0, 2**31 - 1, 0, 0, -1, [("t", None, [(3, -1, 9, -1, -1, 0)])], [], "")


class Slice:
    """A payload that nobody may look into."""

    def __init__(self, size: int) -> None:
        self.size = size


fetched = st.builds(
    fetch.FetchedPartition,
    int32,
    st.integers(-1, 120),
    int64,
    int64,
    int64,
    st.none() | st.lists(st.tuples(int64, int64), max_size=2),
    int32,
    st.none(),
    st.sampled_from([0, 0, 1, 126, 127, 128, 20_000]),
)
responses = st.lists(st.tuples(names, ids, st.lists(fetched, max_size=3)), max_size=3)


@proves("G4")
@each_version
@settings(max_examples=25, deadline=None, database=None)
@given(
    topics=responses,
    head=st.tuples(int32, int32, st.integers(-1, 120), int32),
    leader=st.none() | st.tuples(int32, int32),
    diverging=st.none() | st.tuples(int32, int64),
    snapshot=st.none() | st.tuples(int64, int32),
    nodes=st.lists(st.tuples(int32, names, int32, st.none() | names), max_size=2),
)
def test_responses_encode_as_by_the_compiled_codec(
    version: int,
    topics: list[tuple[str, bytes, list[fetch.FetchedPartition]]],
    head: tuple[int, int, int, int],
    leader: tuple[int, int] | None,
    diverging: tuple[int, int] | None,
    snapshot: tuple[int, int] | None,
    nodes: list[tuple[int, str, int, str | None]],
) -> None:
    tags = fetch.partition_tags(diverging, leader, snapshot)
    optional: dict[str, Any] = {
        "diverging_epoch": diverging and Message(epoch=diverging[0], end_offset=diverging[1]),
        "current_leader": leader and Message(leader_id=leader[0], leader_epoch=leader[1]),
        "snapshot_id": snapshot and Message(end_offset=snapshot[0], epoch=snapshot[1]),
    }
    optional = {name: value for name, value in optional.items() if value is not None}
    # (-1, -1) is the default of each tagged struct, which the compiled encoder leaves out.
    if any(set(vars(value).values()) == {-1} for value in optional.values()):
        return
    correlation_id, throttle_ms, error_code, session_id = head
    answer: list[fetch.ResponseTopic] = [
        (name, topic_id, [p._replace(payload=Slice(p.payload_bytes), tags=tags) for p in rows])
        for name, topic_id, rows in topics
    ]
    response_tags = fetch.response_tags(nodes) if version >= 16 else fetch.NO_TAGS
    parts = fetch.encode_response(version, correlation_id, throttle_ms, error_code, session_id, answer, response_tags)
    frame = b"".join(bytes(part.size) if isinstance(part, Slice) else part for part in parts)

    message = Message(
        throttle_time_ms=throttle_ms,
        error_code=error_code,
        session_id=session_id,
        node_endpoints=[Message(node_id=n, host=host, port=port, rack=rack) for n, host, port, rack in nodes],
        responses=[
            Message(
                topic=name,
                topic_id=topic_id,
                partitions=[
                    Message(
                        partition_index=p.partition,
                        error_code=p.error_code,
                        high_watermark=p.high_watermark,
                        last_stable_offset=p.last_stable_offset,
                        log_start_offset=p.log_start_offset,
                        aborted_transactions=p.aborted_transactions
                        and [Message(producer_id=a, first_offset=b) for a, b in p.aborted_transactions],
                        preferred_read_replica=p.preferred_read_replica,
                        records=bytes(p.payload_bytes),
                        **optional,
                    )
                    for p in rows
                ],
            )
            for name, topic_id, rows in topics
        ],
    )
    body = codec.encode_response(FETCH, version, message)
    assert frame == codec.write_response(FETCH, version, correlation_id, body)
    assert codec.decode_response(FETCH, version, memoryview(body)).throttle_time_ms == throttle_ms


@each_version
def test_payloads_pass_through_as_they_are(version: int) -> None:
    first, second = Slice(100), Slice(7)
    rows = [
        fetch.FetchedPartition(0, 0, 5, 5, 0, None, -1, first, 100),
        fetch.FetchedPartition(1, 1, -1, -1, -1, None, -1, None, 0),
        fetch.FetchedPartition(2, 0, 5, 5, 0, [], -1, second, 7),
    ]
    parts = fetch.encode_response(version, 1, 0, 0, 0, [("t", bytes(16), rows)])
    assert [part for part in parts if isinstance(part, Slice)] == [first, second]
    length = sum(part.size if isinstance(part, Slice) else len(part) for part in parts)
    assert int.from_bytes(parts[0][:4], "big") == length - 4


@pytest.mark.parametrize("version", [11, 12, 18])
def test_the_partitions_of_one_request_are_limited(version: int) -> None:
    count = MAX_ELEMENTS + 1
    topic = bytes(16) if version >= 13 else b"\x01"
    if version >= 12:
        head = bytes(21 if version >= 15 else 25)
        body = head + b"\x02" + topic + tokens.varint(count + 1) + bytes(33) * count + b"\0\x01\x01\0"
    else:
        body = bytes(25) + b"\0\0\0\1\0\0" + count.to_bytes(4, "big") + bytes(28) * count + bytes(6)
    with pytest.raises(ProtocolError, match="limit"):
        fetch.decode(version, memoryview(body), 0, len(body))


def test_versions_that_are_not_served_are_unsupported() -> None:
    for version in (0, 3, 19):
        with pytest.raises(Unsupported):
            fetch.decode(version, memoryview(b""), 0, 0)
