"""The hand-written Produce path against the compiled codec, for every version."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ProtocolError, Unsupported
from headrace.wire import codec, produce, schema
from headrace.wire.api import PRODUCE
from headrace.wire.decoder import MAX_ELEMENTS
from headrace.wire.message import Message
from proving import proves
from wire import fast_paths, tokens

each_version = pytest.mark.parametrize("version", range(produce.MIN_VERSION, produce.MAX_VERSION + 1))
int32 = st.integers(-(2**31), 2**31 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
names = st.text(max_size=6) | st.text("ключ-n", min_size=120, max_size=140)
texts = st.none() | names
records = st.none() | st.binary(max_size=20) | st.integers(126, 17000).map(bytes)

requests = st.builds(
    Message,
    transactional_id=st.none() | names,
    acks=st.integers(-1, 1),
    timeout_ms=int32,
    topic_data=st.lists(
        st.builds(
            Message,
            name=names,
            topic_id=st.binary(min_size=16, max_size=16),
            partition_data=st.lists(st.builds(Message, index=int32, records=records), max_size=3),
        ),
        max_size=3,
    ),
)
responses = st.lists(
    st.tuples(
        names,
        st.binary(min_size=16, max_size=16),
        st.lists(
            st.tuples(int32, st.integers(-1, 120), int64, int64, int64, texts, st.lists(st.tuples(int32, texts))),
            max_size=3,
        ),
    ),
    max_size=3,
)


@proves("G4")
@each_version
@settings(max_examples=25, deadline=None, database=None)
@given(message=requests, before=st.binary(max_size=5), after=st.binary(max_size=40))
def test_requests_decode_as_by_the_compiled_codec(version: int, message: Message, before: bytes, after: bytes) -> None:
    body = codec.encode_request(PRODUCE, version, message)
    view = memoryview(before + body + after)
    request = produce.decode(version, view, len(before), len(before) + len(body))
    assert request == fast_paths.produce_of(codec.decode_request(PRODUCE, version, memoryview(body)), version)
    for _, _, partitions in request.topics:
        assert all(piece is None or piece.obj is view.obj for _, piece in partitions)


@each_version
@settings(max_examples=4, deadline=None, database=None)
@given(message=requests)
def test_cut_and_hostile_requests_are_refused(version: int, message: Message) -> None:
    pieces = list(tokens.tokens(schema.load(PRODUCE, version, "request"), message))
    body = b"".join(piece.data for piece in pieces)
    for length in {*range(min(len(body), 60)), *range(max(0, len(body) - 60), len(body))}:
        for spare in (b"", b"\0" * 30, b"\x02" * 30, b"\xff" * 30):
            with pytest.raises(ProtocolError):
                produce.decode(version, memoryview(body[:length] + spare), 0, length)
    for nth, piece in enumerate(pieces):
        for hostile in piece.hostile():
            mutant = b"".join((*(p.data for p in pieces[:nth]), hostile, *(p.data for p in pieces[nth + 1 :])))
            with pytest.raises(ProtocolError, match=f"produce v{version} request: field"):
                produce.decode(version, memoryview(mutant), 0, len(mutant))


@pytest.mark.parametrize("version", range(9, produce.MAX_VERSION + 1))
def test_unknown_tags_are_skipped(version: int) -> None:
    tags = b"\x01\x63\x02ab"
    topic = bytes(16) if version >= 13 else b"\x02t"
    body = b"\x00\x00\x01\x00\x00\x00\x05\x02" + topic + b"\x02\x00\x00\x00\x07\x03rr" + tags * 3
    request = produce.decode(version, memoryview(body), 0, len(body))
    assert [(index, bytes(piece or b"")) for index, piece in request.topics[0][2]] == [(7, b"rr")]


@pytest.mark.parametrize("version", range(9, produce.MAX_VERSION + 1))
@pytest.mark.parametrize("null_id", [b"\0", b"\x80\0", b"\x80\x80\0"])
@pytest.mark.parametrize("null_records", [b"\0", b"\x80\0", b"\x80\x80\0"])
def test_nulls_in_more_bytes_than_they_need_are_nulls(version: int, null_id: bytes, null_records: bytes) -> None:
    topic = bytes(16) if version >= 13 else b"\x02t"
    body = null_id + b"\0\1\0\0\0\5\x02" + topic + b"\x02\0\0\0\7" + null_records + b"\0\0\0"
    request = produce.decode(version, memoryview(body), 0, len(body))
    assert (request.transactional_id, request.topics[0][2]) == (None, [(7, None)])
    assert request == fast_paths.produce_of(codec.decode_request(PRODUCE, version, memoryview(body)), version)


@each_version
@settings(max_examples=25, deadline=None, database=None)
@given(topics=responses, throttle_ms=st.integers(0, 2**31 - 1), correlation_id=int32)
def test_responses_encode_as_by_the_compiled_codec(
    version: int, topics: list[produce.ResponseTopic], throttle_ms: int, correlation_id: int
) -> None:
    message = Message(
        throttle_time_ms=throttle_ms,
        responses=[
            Message(
                name=name,
                topic_id=topic_id,
                partition_responses=[
                    Message(
                        index=index,
                        error_code=error,
                        base_offset=base,
                        log_append_time_ms=time_ms,
                        log_start_offset=start,
                        error_message=text,
                        record_errors=[Message(batch_index=at, batch_index_error_message=why) for at, why in wrong],
                    )
                    for index, error, base, time_ms, start, text, wrong in partitions
                ],
            )
            for name, topic_id, partitions in topics
        ],
    )
    body = codec.encode_response(PRODUCE, version, message)
    frame = produce.encode_response(version, correlation_id, topics, throttle_ms)
    assert frame == codec.write_response(PRODUCE, version, correlation_id, body)


@proves("G15")
@pytest.mark.parametrize("version", range(produce.WITH_LEADERS, produce.MAX_VERSION + 1))
def test_partitions_that_are_led_elsewhere_say_where(version: int) -> None:
    topic_id = bytes(range(16))
    topics: list[produce.ResponseTopic] = [("t", topic_id, [(0, 6, -1, -1, -1, None, ()), (1, 0, 7, -1, 3, None, ())])]
    leaders, ends = {(0, 0): (2, 9)}, [(2, "10.0.0.2", 9092, "east"), (3, "10.0.0.3", 9093, None)]
    frame = memoryview(produce.encode_elsewhere(version, 5, topics, leaders, ends))[4:]
    correlation_id, body = codec.read_response_header(PRODUCE, version, frame)
    answer = codec.decode_response(PRODUCE, version, frame, body)
    assert correlation_id == 5
    moved, stayed = answer.responses[0].partition_responses
    assert (moved.error_code, moved.current_leader.leader_id, moved.current_leader.leader_epoch) == (6, 2, 9)
    assert (stayed.base_offset, stayed.log_start_offset, stayed.current_leader.leader_id) == (7, 3, -1)
    assert [(end.node_id, end.host, end.port, end.rack) for end in answer.node_endpoints] == ends


@each_version
def test_the_partitions_of_one_request_are_limited(version: int) -> None:
    count = MAX_ELEMENTS + 1
    one = b"\0\0\0\0\0\0" if version >= 9 else b"\0\0\0\0\xff\xff\xff\xff"
    if version >= 9:
        topic = bytes(16) if version >= 13 else b"\x01"
        body = b"\0\0\0\0\0\0\0\x02" + topic + tokens.varint(count + 1) + one * count + b"\0\0"
    else:
        body = b"\xff\xff\0\0\0\0\0\0\0\0\0\1\0\0" + count.to_bytes(4, "big") + one * count
    with pytest.raises(ProtocolError, match="limit"):
        produce.decode(version, memoryview(body), 0, len(body))


def test_versions_that_are_not_served_are_unsupported() -> None:
    for version in (0, 2, 14):
        with pytest.raises(Unsupported):
            produce.decode(version, memoryview(b""), 0, 0)
