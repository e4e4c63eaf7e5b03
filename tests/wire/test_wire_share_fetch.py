"""The hand-written ShareFetch response against the compiled codec."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.wire import codec, share_fetch

SHARE_FETCH = 78
int32 = st.integers(-(2**31), 2**31 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
codes = st.integers(-1, 133)
texts = st.none() | st.text(max_size=6) | st.text("ключ-n", min_size=120, max_size=140)
ids = st.binary(min_size=16, max_size=16)


class Slice:
    """A payload that nobody may look into."""

    def __init__(self, size: int) -> None:
        self.size = size


rows = st.builds(
    share_fetch.SharedPartition,
    int32,
    codes,
    texts,
    codes,
    texts,
    st.tuples(int32, int32),
    st.none(),
    st.sampled_from([0, 0, 1, 126, 127, 128, 20_000]),
    st.lists(st.tuples(int64, int64, st.integers(0, 2**15 - 1)), max_size=3),
)
endpoints = st.lists(st.tuples(int32, st.text(max_size=6), int32, texts), max_size=2)


def frame_of(parts: list[Any]) -> bytes:
    return b"".join(bytes([7]) * part.size if isinstance(part, Slice) else part for part in parts)


@pytest.mark.parametrize("version", [1, 2])
@settings(max_examples=50, deadline=None, database=None)
@given(
    topics=st.lists(st.tuples(ids, st.lists(rows, max_size=3)), max_size=3),
    head=st.tuples(int32, codes, texts, int32),
    nodes=endpoints,
)
def test_responses_decode_by_the_compiled_codec(version: int, topics: Any, head: Any, nodes: Any) -> None:
    topics = [(topic_id, [row._replace(payload=Slice(row.payload_bytes)) for row in rows]) for topic_id, rows in topics]
    correlation_id, error_code, error_message, lock_timeout_ms = head
    parts = share_fetch.encode_response(correlation_id, error_code, error_message, lock_timeout_ms, topics, nodes)
    frame = frame_of(parts)
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    assert (int.from_bytes(frame[4:8], "big", signed=True), frame[8]) == (correlation_id, 0)
    message = codec.decode_response(SHARE_FETCH, version, memoryview(frame), 9)
    assert (message.error_code, message.error_message) == (error_code, error_message)
    assert message.acquisition_lock_timeout_ms == lock_timeout_ms
    assert [(t.topic_id, [p.partition_index for p in t.partitions]) for t in message.responses] == [
        (topic_id, [row.partition for row in rows]) for topic_id, rows in topics
    ]
    for told, row in zip(
        (p for t in message.responses for p in t.partitions), (row for _, rows in topics for row in rows), strict=True
    ):
        assert (told.error_code, told.error_message) == (row.error_code, row.error_message)
        assert (told.acknowledge_error_code, told.acknowledge_error_message) == row[3:5]
        assert (told.current_leader.leader_id, told.current_leader.leader_epoch) == row.current_leader
        assert bytes(told.records) == bytes([7]) * row.payload_bytes
        acquired = [(each.first_offset, each.last_offset, each.delivery_count) for each in told.acquired_records]
        assert acquired == list(row.acquired)
    assert [(n.node_id, n.host, n.port, n.rack) for n in message.node_endpoints] == nodes


def test_each_payload_is_a_part_of_its_own() -> None:
    slices = [Slice(10), Slice(20)]
    rows = [share_fetch.SharedPartition(nth, payload=each, payload_bytes=each.size) for nth, each in enumerate(slices)]
    parts = share_fetch.encode_response(1, 0, None, 30_000, [(bytes(16), rows)])
    assert [part for part in parts if isinstance(part, Slice)] == slices
