from __future__ import annotations

import contextlib
import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.coordinators.record_fields import uvarint
from headrace.errors import CorruptBatch
from headrace.transactions.messages import Owner
from headrace.transactions.records import IDLE_HEAD, STATES, decode, decode_key, encode, encode_key, idle_head, is_whole
from headrace.transactions.transaction import IDLE, State, Transaction
from hypotheses import examples

_INT64 = st.integers(0, 2**63 - 1)
_INT16 = st.integers(0, 2**15 - 1)
PLACES = st.frozensets(st.tuples(st.text(min_size=1, max_size=8), st.integers(0, 2**31 - 1)), min_size=1, max_size=5)


@st.composite
def transactions(draw: st.DrawFn) -> Transaction:
    state = draw(st.sampled_from(STATES))
    has_next = state not in IDLE and draw(st.booleans())
    return Transaction(
        draw(_INT64),
        draw(_INT16),
        state,
        draw(st.integers(0, 2**31 - 1)),
        draw(_INT64),
        draw(st.just(-1) | _INT64),
        frozenset() if state in IDLE else draw(PLACES),
        draw(st.just(-1) | _INT64),
        draw(st.sampled_from([0, 1, 2])),
        draw(st.just(-1) | _INT64),
        draw(st.just(-1) | _INT16),
        draw(_INT64) if has_next else -1,
        draw(_INT16) if has_next else -1,
        Owner(draw(st.text(max_size=200)), draw(st.text(max_size=8))),
    )


def test_keys_are_laid_out_as_kafka_has_them() -> None:
    assert encode_key("my-id") == b"\0\0\0\5my-id"
    assert decode_key(b"\0\0\0\5my-id") == "my-id"
    assert decode_key(b"\0\1\0\5my-id") is None


def test_values_are_laid_out_as_kafka_has_them() -> None:
    """Bytes as Kafka's coordinator writes them: no field of ours is set."""
    empty = Transaction(11, 3, State.EMPTY, 60_000, 99)
    assert (
        encode(empty) == b"\0\1" + struct.pack(">qhib", 11, 3, 60_000, 0) + b"\0" + struct.pack(">qq", 99, -1) + b"\0"
    )
    open_one = Transaction(
        11, 3, State.ONGOING, 60_000, 99, 88, frozenset({("b", 2), ("a", 5), ("a", 1)}), -1, 2, 10, -1, 12, -1
    )
    assert encode(open_one) == (
        b"\0\1"
        + struct.pack(">qhib", 11, 3, 60_000, 1)
        + b"\3"
        + b"\2a" + b"\3" + struct.pack(">ii", 1, 5) + b"\0"
        + b"\2b" + b"\2" + struct.pack(">i", 2) + b"\0"
        + struct.pack(">qq", 99, 88)
        + b"\3" + b"\0\x08" + struct.pack(">q", 10) + b"\1\x08" + struct.pack(">q", 12) + b"\2\2" + struct.pack(">h", 2)
    )  # fmt: skip
    assert decode(encode(open_one)) == replace(open_one, next_epoch=0)


def test_values_of_version_zero_are_read() -> None:
    head = b"\0\0" + struct.pack(">qhib", 11, 3, 60_000, 2)
    topics = struct.pack(">i", 1) + b"\0\1a" + struct.pack(">iii", 2, 1, 5)
    times = struct.pack(">qq", 99, 88)
    kept = Transaction(11, 3, State.PREPARE_COMMIT, 60_000, 99, 88, frozenset({("a", 1), ("a", 5)}))
    assert decode(head + topics + times) == kept
    none = b"\0\0" + struct.pack(">qhib", 11, 3, 60_000, 0) + struct.pack(">i", -1) + times
    assert decode(none) == Transaction(11, 3, State.EMPTY, 60_000, 99, 88)


@examples(300)
@given(transactions())
def test_what_is_written_is_read(kept: Transaction) -> None:
    value = encode(kept)
    assert decode(value) == kept
    assert is_whole(value) == (kept.state in IDLE)
    head = idle_head(value)
    assert (head is not None) == (kept.state in IDLE)
    if head is not None:
        assert (head.producer_id, head.epoch, head.timeout_ms) == (kept.producer_id, kept.epoch, kept.timeout_ms)
        assert (STATES[head.state], head.update_ms, head.start_ms) == (kept.state, kept.update_ms, kept.start_ms)


@examples(300)
@given(transactions())
def test_fields_that_a_later_version_adds_are_passed_over(kept: Transaction) -> None:
    value = encode(kept)
    idle = encode(replace(kept, state=State.EMPTY, partitions=frozenset()))
    tagged = len(value) - len(idle[IDLE_HEAD.size :])
    longer = value[:tagged] + uvarint(value[tagged] + 1) + value[tagged + 1 :] + uvarint(20_000) + b"\3new"
    assert decode(longer) == kept


@examples(500)
@given(transactions(), st.data())
def test_what_is_damaged_is_refused_or_read_and_nothing_else(kept: Transaction, data: st.DataObject) -> None:
    value = bytearray(encode(kept))
    for _ in range(data.draw(st.integers(1, 3))):
        value[data.draw(st.integers(0, len(value) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(value[: data.draw(st.integers(0, len(value)))])
    for mutant in (bytes(value), cut):
        if is_whole(mutant):
            decode(mutant)  # what is left as it is until it is asked for can be read then
        with contextlib.suppress(CorruptBatch):
            decode(mutant)
    for key in (cut, bytes(value)):
        with contextlib.suppress(CorruptBatch):
            decode_key(key)


@pytest.mark.parametrize("number", [6, 7, 8, 255])
def test_states_that_are_never_written_are_refused(number: int) -> None:
    value = bytearray(encode(Transaction(1, 0)))
    value[16] = number
    with pytest.raises(CorruptBatch):
        decode(bytes(value))
    assert not is_whole(bytes(value))
    with pytest.raises(CorruptBatch, match="version 2"):
        decode(b"\0\2" + bytes(value[2:]))
