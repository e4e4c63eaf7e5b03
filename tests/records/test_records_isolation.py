"""What readers of committed records pass over: batches of aborted transactions, by headers alone, in both forms."""

from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import SettingError
from headrace.records import batch, kernel
from headrace.records.batch import MOST, TRANSACTIONAL
from headrace.records.control import marker_batch
from headrace.records.isolation import NOTHING_HIDDEN, Aborted, Isolation, hidden_batches, isolation_of
from hypotheses import examples
from proving import proves

NOW_MS = 1_700_000_000_000

STEPS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["write", "plain", "commit", "abort"]), st.integers(1, 3)), max_size=40
)


class Model:
    """A log of interleaved transactions, and what a reader of committed records is to see of it."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.next_offset = 0
        self.starts: list[int] = []
        """Of batches."""
        self.committed: list[int] = []
        self.aborted: list[tuple[int, int, int]] = []
        """Producer, first offset, offset of the marker."""
        self._open: dict[int, list[int]] = {}

    def write(self, producer: int, count: int, transactional: bool) -> None:
        records = [(NOW_MS, None, b"%d" % producer, ())] * count
        attributes = TRANSACTIONAL if transactional else 0
        built = kernel.build(
            records,
            attributes=attributes,
            base_offset=self.next_offset,
            producer_id=producer,
            producer_epoch=0,
            base_sequence=0,
        )
        offsets = list(range(self.next_offset, self.next_offset + count))
        if transactional:
            self._open.setdefault(producer, []).extend(offsets)
        else:
            self.committed += offsets
        self._append(built, count)

    def end(self, producer: int, committed: bool) -> None:
        offsets = self._open.pop(producer, [])
        if committed:
            self.committed += offsets
        elif offsets:
            self.aborted.append((producer, offsets[0], self.next_offset))
        marker, _ = marker_batch(producer, 0, 0, committed=committed, now_ms=NOW_MS)
        batch.stamp(marker, self.next_offset, 0)
        self._append(marker, 1)

    def end_all(self) -> None:
        for producer in list(self._open):
            self.end(producer, committed=False)

    def aborted_from(self, offset: int) -> list[Aborted]:
        """As a broker lists them for a fetch from there on."""
        return [(producer, first) for producer, first, marker in self.aborted if marker >= offset]

    def _append(self, built: bytearray, count: int) -> None:
        self.starts.append(len(self.data))
        self.data += built
        self.next_offset += count


@proves("T3")
@given(steps=STEPS, data=st.data())
@examples(150)
def test_a_reader_of_committed_records_gets_just_those_wherever_it_begins(
    received: ModuleType, arrow: ModuleType, steps: list[tuple[int, str, int]], data: st.DataObject
) -> None:
    log = Model()
    for producer, what, count in steps:
        if what in ("write", "plain"):
            log.write(producer, count, what == "write")
        else:
            log.end(producer, what == "commit")
    log.end_all()
    begin = data.draw(st.sampled_from(log.starts)) if log.starts else 0
    records = bytes(log.data[begin:])
    from_offset = batch.read_header(records).base_offset if records else log.next_offset
    hidden = hidden_batches(records, log.aborted_from(from_offset))
    expected = sorted(offset for offset in log.committed if offset >= from_offset)
    into: list[Any] = []
    assert received.receive(records, "orders", 3, from_offset, MOST, into, True, hidden) == log.next_offset
    assert [record.offset for record in into] == expected
    rows = arrow.Decoder("orders", 3, ("offset",)).decode(records, from_offset, hidden=hidden)
    assert [offset for batch_of in rows for offset in batch_of["offset"].to_pylist()] == expected


def test_without_an_aborted_transaction_no_batch_is_looked_at() -> None:
    assert hidden_batches(b"not a batch at all" * 10, ()) is NOTHING_HIDDEN


def test_a_cut_batch_of_an_aborted_transaction_is_left_for_the_next_fetch(received: ModuleType) -> None:
    log = Model()
    log.write(7, 2, transactional=True)
    log.write(7, 2, transactional=True)
    log.end_all()
    cut = bytes(log.data[: log.starts[1] + 70])
    hidden = hidden_batches(cut, log.aborted_from(0))
    assert hidden == {0}
    assert received.receive(cut, "orders", 3, 0, MOST, [], True, hidden) == 2


def test_isolation_is_named_as_we_do_or_as_kafka_does() -> None:
    assert isolation_of("committed") is isolation_of("read_committed") is Isolation.COMMITTED
    assert isolation_of("uncommitted") is isolation_of("read_uncommitted") is Isolation.UNCOMMITTED
    with pytest.raises(SettingError, match="'committed' or 'uncommitted'"):
        isolation_of("serializable")
