"""Transactions written to a log as a partition does, and what the log's batches say of them, read one by one."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.errors import HeadraceError
from headrace.records import kernel
from headrace.records.batch import TRANSACTIONAL, read_header
from headrace.records.control import marker_batch, read_marker
from headrace.storage.local_log import LocalLog
from headrace.storage.log import Log
from headrace.storage.producers import NONE

NOW_MS = 1_750_000_000_000


@dataclass(slots=True)
class Writer:
    """Producers with transactions in one log; a turn for each batch."""

    sequences: dict[tuple[int, int], int] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)

    def write(self, log: Log, producer_id: int, *records: tuple[bytes, bytes | None], epoch: int = 0) -> int:
        sequence = self.sequences.get((producer_id, epoch), 0)
        built = kernel.build(
            [(NOW_MS, key, value, []) for key, value in records or ((b"k", b"v"),)],
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
            attributes=TRANSACTIONAL,
        )
        offset = log.append(memoryview(built), read_header(built), 0)
        self.sequences[producer_id, epoch] = sequence + len(records or (1,))
        return offset

    def mark(self, log: Log, producer_id: int, *, committed: bool, epoch: int = 0) -> int:
        number = self.numbers.get(producer_id, 0)
        batch, header = marker_batch(producer_id, epoch, 0, committed=committed, number=number, now_ms=NOW_MS)
        offset = log.append(memoryview(batch), header, 0)
        self.numbers[producer_id] = number + 1
        return offset


@dataclass(slots=True)
class Seen:
    """What the batches of a log say, from its start on."""

    opened: dict[int, int] = field(default_factory=dict)
    ended: list[tuple[int, int]] = field(default_factory=list)
    aborted: list[tuple[int, int, int]] = field(default_factory=list)
    """Producer id, first offset, marker's offset."""
    numbers: dict[int, int] = field(default_factory=dict)

    def undecided(self, watermark: int) -> int | None:
        late = [first for first, marker in self.ended if marker >= watermark]
        return min([*self.opened.values(), *late], default=None)


def seen(log: Log) -> Seen:
    found = Seen()
    for header, place in log.headers(log.start_offset):
        if header.is_control:
            marker = read_marker(place.read(), header)
            assert marker is not None
            first = found.opened.pop(header.producer_id, None)
            found.numbers[header.producer_id] = marker.number
            if first is not None:
                found.ended.append((first, header.base_offset))
                if not marker.committed:
                    found.aborted.append((header.producer_id, first, header.base_offset))
        elif header.is_transactional and header.record_count:
            found.opened.setdefault(header.producer_id, header.base_offset)
    return found


def check_agrees(log: Log) -> None:
    """What the log knows is what its batches say; where its start was raised it may know more, of what was before."""
    assert isinstance(log, LocalLog)
    for _ in log.producers.steps():
        pass
    known, told = log.producers.known, seen(log)
    starts = {id_: state.txn_start for id_, state in known.states.items() if state.txn_start != NONE}
    entries = {(each.producer_id, each.first_offset, each.marker_offset) for each in known.aborted}
    if log.start_offset == 0:
        assert starts == told.opened
        assert log.producers.first_undecided(log.committed_offset) == told.undecided(log.committed_offset)
        assert {each for each in entries if each[2] < log.end_offset} == set(told.aborted) or log.settings.compact
    assert told.opened.keys() <= starts.keys()
    assert all(starts[id_] <= first for id_, first in told.opened.items())
    for producer_id, first, marker in told.aborted:
        assert any((id_, at) == (producer_id, marker) and began <= first for id_, began, at in entries)
    assert all(known.states[id_].txn_number >= number for id_, number in told.numbers.items())
    for each in entries:  # readers leave out what comes behind it until they meet the marker
        assert each[2] < log.start_offset or marker_at(log, each[2])


def marker_at(log: Log, offset: int) -> bool:
    header, _ = next(log.headers(offset))
    return header.base_offset == offset and header.is_control


def ignore(_error: HeadraceError | None) -> None:
    return
