"""How delayed records are asked for, held, carried, recalled and delivered, as bytes."""

from __future__ import annotations

import pytest

from headrace.errors import InvalidRecord
from headrace.records import delayed, kernel
from headrace.records.batch import CONTROL, TRANSACTIONAL, read_header
from headrace.records.control import read_marker
from headrace.records.delayed import DELIVER_AFTER, DELIVER_AT, DELIVERED, HeldBatch, RecalledRecords
from headrace.records.record import Header, NewRecord

NOW_MS = 1_750_000_000_000
MOST_MS = 1000


def record(value: bytes = b"value", *headers: Header) -> NewRecord:
    return NOW_MS - 5, b"key", value, list(headers)


def due_times(*records: NewRecord, codec: int = 0, attributes: int = 0) -> list[int] | None:
    batch = kernel.build(records, codec, attributes=attributes, producer_id=1, producer_epoch=0, base_sequence=0)
    return delayed.due_times(memoryview(batch), read_header(batch), NOW_MS, MOST_MS)


@pytest.mark.parametrize("codec", range(5))
def test_a_header_says_when_a_record_is_due(codec: int) -> None:
    found = due_times(
        record(b"plain"),
        record(b"after", (DELIVER_AFTER, b"7")),
        record(b"at", (DELIVER_AT, b"%d" % (NOW_MS + MOST_MS))),
        record(b"past", (DELIVER_AT, b"12")),
        codec=codec,
    )
    assert found == [NOW_MS, NOW_MS + 7, NOW_MS + MOST_MS, NOW_MS]


def test_words_of_a_header_elsewhere_delay_nothing() -> None:
    assert due_times(record(DELIVER_AT.encode())) is None
    assert due_times(record(b"value", ("headrace.deliver.attempts", b"5"))) is None
    assert due_times(record()) is None


@pytest.mark.parametrize(
    "headers",
    [
        [(DELIVER_AFTER, b"")],
        [(DELIVER_AFTER, None)],
        [(DELIVER_AFTER, b"-1")],
        [(DELIVER_AFTER, b"1.5")],
        [(DELIVER_AFTER, "٣".encode())],
        [(DELIVER_AT, b"9" * 19)],
        [(DELIVER_AFTER, b"%d" % (MOST_MS + 1))],
        [(DELIVER_AFTER, b"1"), (DELIVER_AT, b"1")],
    ],
)
def test_what_makes_no_sense_is_refused_and_named(headers: list[Header]) -> None:
    with pytest.raises(InvalidRecord) as refused:
        due_times(record(), record(b"wrong", *headers), record(b"right", (DELIVER_AFTER, b"1")))
    ((place, words),) = refused.value.record_errors
    assert place == 1
    assert words


def test_transactions_and_deliveries_of_others_are_refused() -> None:
    with pytest.raises(InvalidRecord):
        due_times(record(b"value", (DELIVER_AFTER, b"1")), attributes=TRANSACTIONAL)
    assert due_times(record(), attributes=TRANSACTIONAL) is None
    with pytest.raises(InvalidRecord):
        due_times(record(), attributes=DELIVERED)


def held_at(offset: int, *records: NewRecord) -> HeldBatch:
    produced = kernel.build(records, 3, producer_id=9, producer_epoch=2, base_sequence=40)
    batch, header = delayed.held_batch(produced, read_header(produced), NOW_MS)
    assert header == read_header(batch)
    assert header.attributes == CONTROL
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (9, 2, 40)
    assert header.last_offset_delta == len(records) - 1
    assert read_marker(batch, header) is None
    found = delayed.read_control(batch, header._replace(base_offset=offset))
    assert isinstance(found, HeldBatch)
    return found


def test_what_is_held_carried_and_delivered_is_what_was_produced() -> None:
    held = held_at(70, record(b"plain", ("a", b"b")), record(b"later", (DELIVER_AFTER, b"9"), ("c", None)))
    later = NOW_MS + 9, 71, 70
    assert held.entries() == [(NOW_MS, 70, 70), later]
    batch, header = delayed.carried_batch([(later, held.records()[71])], NOW_MS, 0)
    carried = delayed.read_control(batch, header._replace(base_offset=90))
    assert isinstance(carried, HeldBatch)
    assert carried.carried == (later,)
    assert carried.entries() == [(NOW_MS + 9, 71, 90)]
    assert carried.records()[71]._replace(offset=0) == held.records()[71]._replace(offset=0)
    batch, header = delayed.delivery_batch(
        [(held.entries()[0], held.records()[70]), (carried.entries()[0], carried.records()[71])], NOW_MS + 20, 3
    )
    assert header.attributes == DELIVERED | 3
    assert list(delayed.delivered_entries(batch)) == [(NOW_MS, 70, 70), (NOW_MS + 9, 71, 90)]
    _, found = kernel.records(batch)
    assert (found.timestamp_ms, found.key, found.value) == (NOW_MS + 20, b"key", b"later")
    headers = dict(found.headers)
    assert DELIVER_AFTER not in headers
    assert headers["c"] is None
    assert headers[delayed.DELAYED_TIMESTAMP] == b"%d" % (NOW_MS - 5)


def test_a_recall_names_handles_and_places() -> None:
    batch, header = delayed.recall_batch([(5, 3), (9, 9)], NOW_MS)
    assert delayed.read_control(batch, header) == RecalledRecords(((5, 3), (9, 9)))
