"""What a log knows of its producers: epoch, sequence and offset of their last five batches, and their transactions.

A snapshot `<20-digit offset>.snapshot` stands beside the segments and holds the state of everything before its offset.
It is written when a segment begins and on a clean stop; in the layout `shared` from time to time, and where the log
begins when its start rises, because nothing else tells of what lies below. Big-endian:

    version uint16, count uint32, then per producer: id int64, epoch int16, last use in wall ms int64, batches uint8,
    then per batch: first sequence int32, last sequence int32, base offset int64; at the end CRC-32C of all uint32

Where there were transactions, the version is 2. Then a producer has, before its batches: coordinator epoch int32,
number of its last marker int64, the marker's offset int64, first offset of its open transaction int64, each -1 if there
is none; and before the CRC come: up to which offset markers are decided int64 (see `transactions`), count uint32, per
transaction that has ended and is not decided first offset int64, marker's offset int64; count uint32, per file of
aborted transactions base offset int64, last marker int64, entries uint32, CRC-32C uint32 (see `aborted`).

After a crash the newest whole snapshot is taken and the batches behind it are read. Without one all batches are. A
batch is believed only if it agrees with its CRC. Reading is done in steps, so much in a turn of the loop over all logs:
until it is through, whatever wants to append hears so and tries again.

A producer that is not known may begin with any sequence, as with Kafka: its state may have expired, or the topic may
have been made anew. Only when a batch of it was refused here, later ones wait for that one: what is refused can be sent
again, and must not be overtaken. That is remembered as long as the process lives; connections last no longer.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Final, NamedTuple

from crc32c import crc32c

from headrace.errors import (
    CorruptBatch,
    DuplicateSequence,
    HeadraceError,
    InvalidProducerEpoch,
    InvalidTxnState,
    OutOfOrderSequence,
    StorageFailed,
)
from headrace.ports.clock import Clock
from headrace.ports.disk import Disk, FileSlice, read_derived
from headrace.records.batch import CONTROL, TRANSACTIONAL, BatchHeader, View
from headrace.records.control import Marker, read_marker
from headrace.storage.aborted import (
    AbortedIndex,
    AbortedTransaction,
    AbortedTransactions,
    FileOf,
    IndexedFile,
    by_count,
)
from headrace.storage.checked_bytes import CheckBudget
from headrace.storage.folder import stem
from headrace.storage.transactions import Transactions

KEPT_BATCHES: Final = 5
REFUSED_MAX: Final = 1000
"""Producers in a log whose first batch was refused; beyond these the oldest are forgotten."""
SEQUENCES: Final = 1 << 31
SNAPSHOT: Final = ".snapshot"
VERSION: Final = 1
WITH_TRANSACTIONS: Final = 2
"""Written only where there are some: a broker that does not know of it reads the rest."""
NOT_PLAIN: Final = TRANSACTIONAL | CONTROL
NONE: Final = -1
NEVER: Final = 1 << 62

_HEAD = struct.Struct(">HI")
_PRODUCER = struct.Struct(">qhqB")
_TRANSACTION = struct.Struct(">iqqq")
_BATCH = struct.Struct(">iiq")
_COUNT = struct.Struct(">I")
_DECIDED_TO = struct.Struct(">q")
_ENDED = struct.Struct(">qq")
_FILE = struct.Struct(">qqII")


class SequencedBatch(NamedTuple):
    first: int
    last: int
    base_offset: int

    @property
    def next_offset(self) -> int:
        return self.base_offset + (self.last - self.first) % SEQUENCES + 1


class ProducerState(NamedTuple):
    epoch: int
    batches: tuple[SequencedBatch, ...]
    used_ms: int
    coordinator_epoch: int = NONE
    """Of its last marker..."""
    txn_number: int = NONE
    """...which ended its transaction of this number; the greatest that was seen in this epoch..."""
    marker_offset: int = NONE
    """...and stands there."""
    txn_start: int = NONE
    """First offset of its open transaction."""


class RefusedBatch(NamedTuple):
    epoch: int
    first: int


class UnreadableProducers(CorruptBatch):
    """The log is damaged where it tells of its producers, at this offset."""

    def __init__(self, text: str, offset: int) -> None:
        super().__init__(text)
        self.offset = offset


class LogProducers:
    """What the batches of a log say, one after the other."""

    __slots__ = ("aborted", "states", "transactions")

    def __init__(
        self,
        states: dict[int, ProducerState] | None = None,
        transactions: Transactions | None = None,
        aborted: AbortedTransactions | None = None,
    ) -> None:
        self.states = {} if states is None else states
        self.transactions = open_in(self.states) if transactions is None else transactions
        self.aborted = AbortedTransactions(by_count) if aborted is None else aborted

    def take(self, header: BatchHeader, base_offset: int, marker: Marker | None, now_ms: int) -> None:
        """A batch of a producer, at this offset; and what it says if it is a marker."""
        state = _after(self.states.get(header.producer_id), header, base_offset, now_ms)
        if marker is not None:
            state = self._end(header.producer_id, state, base_offset, marker)
        elif state.txn_start < 0 and _opens(header):
            self.transactions.begin(base_offset)
            state = state._replace(txn_start=base_offset)
        self.states[header.producer_id] = state

    def _end(self, producer_id: int, state: ProducerState, offset: int, marker: Marker) -> ProducerState:
        if state.txn_start >= 0:
            self.transactions.end(state.txn_start, offset)
            if not marker.committed:
                stable = self.transactions.first_open(offset + 1)
                self.aborted.add(AbortedTransaction(producer_id, state.txn_start, offset, stable))
        number = max(state.txn_number, marker.number)
        return state._replace(
            coordinator_epoch=marker.coordinator_epoch, txn_number=number, marker_offset=offset, txn_start=NONE
        )

    def snapshot(self, offset: int) -> Snapshot:
        """What is known before the offset of transactions, and of producers now."""
        transactions = self.transactions
        ended = tuple(each for each in transactions.ended.items() if each[1] < offset)
        return Snapshot(self.states, min(transactions.decided_to, offset), ended, self.aborted.described(offset))

    def take_back(self, producer_id: int, old: ProducerState | None) -> ProducerState | None:
        """The newest batch of all was not written, and the producer is what it was before; answers what it was."""
        new = self.states.pop(producer_id, None)
        old_start, new_start = NONE if old is None else old.txn_start, NONE if new is None else new.txn_start
        if old_start < 0 <= new_start:
            self.transactions.take_back_begin(new_start)
        elif new_start < 0 <= old_start:
            self.transactions.take_back_end(old_start)
            assert new is not None
            self.aborted.remove(new.marker_offset)
        if old is not None:
            self.states[producer_id] = old
        return new


def _opens(header: BatchHeader) -> bool:
    """Whether a batch is of a transaction. One without records was left by compaction, perhaps without its marker."""
    return header.attributes & (TRANSACTIONAL | CONTROL) == TRANSACTIONAL and header.record_count > 0


Load = Generator[None, None, LogProducers]
"""Reads a log's producers; a step ends when the budget is spent."""


def open_in(states: dict[int, ProducerState], snapshot: Snapshot | None = None) -> Transactions:
    """The transactions that producers have open, and those that a snapshot knows to have ended."""
    first_offsets = (state.txn_start for state in states.values() if state.txn_start >= 0)
    if snapshot is None:
        return Transactions(first_offsets)
    return Transactions(first_offsets, snapshot.ended, snapshot.decided_to)


class ProducerLoads:
    """Tables that are being loaded, in turn, a little in every turn of the loop."""

    def __init__(self, clock: Clock) -> None:
        self.wall_ms = clock.wall_ms
        self.budget = CheckBudget(clock)
        """Of its own, so that readers of old data do not hold up whoever wants to append."""
        self._clock = clock
        self._waiting: dict[ProducerTable, None] = {}

    def go_on(self, table: ProducerTable) -> None:
        """The budget was spent before the table was loaded."""
        if not self._waiting:
            self._clock.call_soon(self._step)
        self._waiting[table] = None

    def _step(self) -> None:
        while self._waiting and not self.budget.spent:
            table = next(iter(self._waiting))
            del self._waiting[table]
            if not table.step():
                self._waiting[table] = None
        if self._waiting:
            self._clock.call_soon(self._step)


class ProducerTable:
    """Loaded at first use. Changes of a turn can be taken back until they are `settled`."""

    __slots__ = (
        "_begin_load",
        "_failure",
        "_known",
        "_loading",
        "_loads",
        "_past_damage",
        "_refused",
        "_states",
        "left_out",
        "loaded",
        "undo",
    )

    def __init__(self, loads: ProducerLoads, begin_load: Callable[[bool], Load]) -> None:
        self._loads = loads
        self._begin_load = begin_load
        self._past_damage = False
        self.left_out: list[int] = []
        """Offsets of damage that was passed over: whom it told of is not known, or not all of it."""
        self._loading: Load | None = None
        self._failure: UnreadableProducers | None = None
        """Damage that a step found when nobody had asked."""
        self._known: LogProducers | None = None
        self._states: dict[int, ProducerState] | None = None
        """Those of what is known."""
        self.loaded = False
        """Whether there are states: asked for each batch."""
        self.undo: list[tuple[int, ProducerState | None]] = []
        """What each producer was before its batch of this turn, until that is settled."""
        self._refused: dict[int, RefusedBatch] = {}

    @property
    def states(self) -> dict[int, ProducerState]:
        """All of it, now."""
        while self._states is None:
            self._read_on()
        return self._states

    @property
    def known(self) -> LogProducers:
        """All of it, with the transactions, now."""
        while self._known is None:
            self._read_on()
        return self._known

    def first_undecided(self, watermark: int) -> int | None:
        """Where the first transaction begins that is open, or whose marker is not below the watermark. Raises what
        `load` does."""
        self.load()
        transactions = self.known.transactions
        if watermark < transactions.decided_to:  # it was lowered: what was forgotten is read again
            self.forget()
            self.load()
            transactions = self.known.transactions
        return transactions.first_undecided(watermark)

    def first_open(self, end_offset: int) -> int:
        """Where the first transaction begins that has no marker; the end if there is none. Raises what `load` does."""
        self.load()
        return self.known.transactions.first_open(end_offset)

    def steps(self) -> Iterator[None]:
        """All of it, for whoever has time between the steps."""
        while self._states is None:
            self._read_on()
            yield

    def load(self) -> None:
        """Raises StorageFailed if there is more to read than a turn may; it is read in the next ones."""
        if self._states is not None:
            return
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        while self._states is None:
            if self._loads.budget.spent:
                self._loads.go_on(self)
                raise StorageFailed("what the log says of its producers is being read: try again")
            self._read_on()

    def step(self) -> bool:
        """Read on, some time after `load` was called. True: there is nothing left to do."""
        if self._states is None:
            try:
                self._read_on()
            except UnreadableProducers as error:
                self._failure = error
                return True
            except (OSError, HeadraceError):
                return True  # whoever asks next begins anew, and hears why
        return self._states is not None

    def _read_on(self) -> None:
        if self._loading is None:
            self.left_out.clear()
            self._loading = self._begin_load(self._past_damage)
        try:
            next(self._loading)
        except StopIteration as ended:
            self._take(ended.value)
        except BaseException:
            self._loading = None
            raise

    def _take(self, known: LogProducers) -> None:
        self._known, self._states = known, known.states
        self._loading, self.loaded = None, True

    def moved(self) -> None:
        """Batches lie elsewhere, or are gone: what is being read begins anew."""
        self._loading = self._failure = None

    def pass_damage(self) -> None:
        """Nobody else can tell what damaged batches say: they are left out."""
        self._past_damage = True

    def check(self, header: BatchHeader) -> int | None:
        """None: take it. An offset: a duplicate, which was appended there. Raises OutOfOrderSequence and kin."""
        self.load()
        state = self.states.get(header.producer_id)
        if state is None:
            self._check_first(header)
            return None
        if self._refused:
            self._refused.pop(header.producer_id, None)
        if state.txn_start >= 0 and not header.attributes & TRANSACTIONAL:
            raise InvalidTxnState(f"producer {header.producer_id} has an open transaction, and sent a batch outside it")
        first = header.base_sequence
        if header.producer_epoch != state.epoch:
            _check_new_epoch(header, state)
            return None
        if first < 0:  # of a coordinator, which numbers nothing: offsets in a transaction
            return None
        if not state.batches:
            _check_after_marker(header, state)
            return None
        last = (first + header.record_count - 1) % SEQUENCES
        expected = (state.batches[-1].last + 1) % SEQUENCES
        if first == expected:
            return None
        for batch in state.batches:
            if batch.first == first and batch.last == last:
                return batch.base_offset
        if (state.batches[0].first - last - 1) % SEQUENCES < SEQUENCES // 2:
            raise _older(header, state)
        raise OutOfOrderSequence(
            f"producer {header.producer_id} sent sequence {first}, but {expected} comes next: a batch is missing"
        )

    def _check_first(self, header: BatchHeader) -> None:
        refused = self._refused.get(header.producer_id)
        if refused is None or header.producer_epoch != refused.epoch or header.base_sequence <= refused.first:
            return
        raise OutOfOrderSequence(
            f"producer {header.producer_id} sent sequence {header.base_sequence}, but {refused.first} was refused and "
            "comes before it"
        )

    def refused(self, header: BatchHeader) -> None:
        """A batch is not taken now, for no fault of its own. If it is the producer's first, it stays the first."""
        if header.base_sequence >= 0 and (self._states is None or header.producer_id not in self._states):
            self._await(header.producer_id, RefusedBatch(header.producer_epoch, header.base_sequence))

    def _await(self, producer_id: int, batch: RefusedBatch) -> None:
        known = self._refused.get(producer_id)
        if known is not None and (known.epoch > batch.epoch or (known.epoch == batch.epoch and known < batch)):
            return
        if known is None and len(self._refused) >= REFUSED_MAX:
            del self._refused[next(iter(self._refused))]
        self._refused[producer_id] = batch

    def appended(self, header: BatchHeader, base_offset: int, batch: View = b"") -> None:
        """A batch of this producer was staged at the offset."""
        if self._refused:
            self._refused.pop(header.producer_id, None)
        states = self.states
        old = states.get(header.producer_id)
        self.undo.append((header.producer_id, old))
        now_ms = self._loads.wall_ms()
        if header.attributes & NOT_PLAIN:
            marker = read_marker(batch, header) if header.is_control else None
            self.known.take(header, base_offset, marker, now_ms)
        else:
            states[header.producer_id] = _after(old, header, base_offset, now_ms)

    def drop(self, header: BatchHeader) -> None:
        """Forget the producer's newest batch if it is this one, because it was not kept after all."""
        state = self.states.get(header.producer_id)
        if state and state.batches and state.batches[-1].first == header.base_sequence:
            self.states[header.producer_id] = state._replace(batches=state.batches[:-1])

    def settled(self, committed_offset: int) -> None:
        """What was staged is written. Markers below the offset count by now."""
        self.undo.clear()
        if self._known is not None and self._known.transactions.ended:
            self._known.transactions.advance(committed_offset)

    def take_back(self) -> None:
        for producer_id, old in reversed(self.undo):
            state = self.known.take_back(producer_id, old)
            if old is None and state is not None and state.batches:
                self._await(producer_id, RefusedBatch(state.epoch, state.batches[0].first))
        self.undo.clear()

    def learn(self, states: dict[int, ProducerState]) -> None:
        """Another replica knows these; the log is empty."""
        self._take(LogProducers({**self.states, **states}, aborted=self.known.aborted))

    def forget(self) -> None:
        """Load again at next use."""
        self._known = self._states = None
        self.loaded = False
        self._past_damage = False
        self.left_out.clear()
        self.undo.clear()
        self.moved()

    def expire(self, before_ms: int) -> None:
        """Forget who has not written for long, but nobody with an open transaction."""
        if self._states:
            for producer_id in [
                id_ for id_, state in self._states.items() if state.used_ms < before_ms and state.txn_start < 0
            ]:
                del self._states[producer_id]


def replay(
    known: LogProducers,
    from_offset: int,
    end_offset: int,
    batches: Iterable[tuple[BatchHeader, FileSlice]],
    now_ms: int,
    budget: CheckBudget | None = None,
) -> Load:
    """Take what the checked batches of a log say from the one offset to the other."""
    reached = from_offset
    try:
        for header, place in batches:
            if header.next_offset > end_offset:
                raise CorruptBatch(f"the batch with offset {header.base_offset} ends behind the log, at {end_offset}")
            if header.producer_id >= 0:
                marker = read_marker(place.read(), header) if header.is_control else None
                known.take(header, header.base_offset, marker, now_ms)
            reached = header.next_offset
            if budget is not None:
                budget.spend(header.size_bytes, 1)
                if budget.spent:
                    yield
    except CorruptBatch as error:
        raise UnreadableProducers(str(error), reached) from None
    return known


def before(states: dict[int, ProducerState], offset: int) -> dict[int, ProducerState]:
    """What is known of them from batches before the offset. A marker behind it says nothing of before: it may be cut,
    and must not be taken for one that was there. Nor does a transaction that began behind it."""
    known: dict[int, ProducerState] = {}
    for producer_id, state in states.items():
        batches = tuple(batch for batch in state.batches if batch.next_offset <= offset)
        earlier = state._replace(batches=batches)
        if state.marker_offset >= offset:
            earlier = earlier._replace(coordinator_epoch=NONE, txn_number=NONE, marker_offset=NONE)
        if state.txn_start >= offset:
            earlier = earlier._replace(txn_start=NONE)
        hidden = state.batches or state.marker_offset >= offset
        if batches or earlier.marker_offset >= 0 or earlier.txn_start >= 0 or not hidden:
            known[producer_id] = earlier
    return known


def _older(header: BatchHeader, state: ProducerState) -> DuplicateSequence | OutOfOrderSequence:
    """A producer has at most five batches on their way, so behind five newer ones it must have been answered. Behind
    fewer it may never have come: a log that has not heard of a producer takes whichever of its batches comes first.
    """
    first, known = header.base_sequence, len(state.batches)
    if known == KEPT_BATCHES:
        return DuplicateSequence(
            f"producer {header.producer_id} sent sequence {first} again, which is older than its last {known} "
            "batches: it was written, but its offset is not known any more"
        )
    return OutOfOrderSequence(
        f"producer {header.producer_id} sent sequence {first}, but the log holds it from {state.batches[0].first} on: "
        "whether what comes before was written is not known"
    )


def _check_new_epoch(header: BatchHeader, state: ProducerState) -> None:
    if header.producer_epoch < state.epoch:
        raise InvalidProducerEpoch(
            f"producer {header.producer_id} sent epoch {header.producer_epoch}, but epoch {state.epoch} was seen: "
            "another instance has taken over"
        )
    if header.base_sequence > 0:
        raise OutOfOrderSequence(
            f"producer {header.producer_id} begins epoch {header.producer_epoch} with sequence {header.base_sequence}, "
            "not with 0"
        )


def _check_after_marker(header: BatchHeader, state: ProducerState) -> None:
    """A marker has begun the producer's epoch, and this is its first batch: nothing of it can have come before."""
    if state.marker_offset >= 0 and header.base_sequence != 0:
        raise OutOfOrderSequence(
            f"producer {header.producer_id} begins epoch {header.producer_epoch} with sequence {header.base_sequence}, "
            "not with 0"
        )


def _after(old: ProducerState | None, header: BatchHeader, base_offset: int, now_ms: int) -> ProducerState:
    first, epoch = header.base_sequence, header.producer_epoch
    if old is None:
        kept: tuple[SequencedBatch, ...] = ()
        transaction = _NO_TRANSACTION
    elif old.epoch == epoch:
        kept, transaction = old.batches, old[3:]
    else:  # markers of the epoch before are told by that; those of this one may be counted anew
        kept, transaction = (), (old.coordinator_epoch, NONE, old.marker_offset, old.txn_start)
    if first >= 0:
        # A compacted batch may hold fewer records than it had; its last offset still tells how many there were.
        last = (first + header.last_offset_delta) % SEQUENCES
        kept = (*kept[1 - KEPT_BATCHES :], SequencedBatch(first, last, base_offset))
    sequences = epoch, kept, now_ms
    return _make(ProducerState, sequences + transaction)  # quicker than any other way, and this runs for every batch


_make = tuple.__new__
_NO_TRANSACTION: Final = (NONE, NONE, NONE, NONE)


class Snapshot(NamedTuple):
    """All that is known before an offset."""

    states: dict[int, ProducerState]
    decided_to: int = 0
    ended: tuple[tuple[int, int], ...] = ()
    """First offsets and markers of transactions that have ended and are not decided."""
    files: tuple[IndexedFile, ...] = ()
    """Of aborted transactions."""

    @property
    def is_plain(self) -> bool:
        """Whether there were no transactions."""
        if self.decided_to or self.ended or self.files:
            return False
        return all(state[3:] == _NO_TRANSACTION for state in self.states.values())


def encode(states: dict[int, ProducerState]) -> bytes:
    return encode_snapshot(Snapshot(states))


def encode_snapshot(snapshot: Snapshot) -> bytes:
    plain = snapshot.is_plain
    parts = [_HEAD.pack(VERSION if plain else WITH_TRANSACTIONS, len(snapshot.states))]
    for producer_id, state in snapshot.states.items():
        parts.append(_PRODUCER.pack(producer_id, state.epoch, state.used_ms, len(state.batches)))
        if not plain:
            parts.append(_TRANSACTION.pack(*state[3:]))
        parts.extend(_BATCH.pack(*batch) for batch in state.batches)
    if not plain:
        parts.append(_DECIDED_TO.pack(snapshot.decided_to))
        for layout, rows in ((_ENDED, snapshot.ended), (_FILE, snapshot.files)):
            parts.append(_COUNT.pack(len(rows)))
            parts.extend(layout.pack(*row) for row in rows)
    body = b"".join(parts)
    return body + crc32c(body).to_bytes(4, "big")


def decode(data: bytes) -> dict[int, ProducerState] | None:
    """The producers alone; None if the snapshot is not whole."""
    snapshot = decode_snapshot(data)
    return None if snapshot is None else snapshot.states


def decode_snapshot(data: bytes) -> Snapshot | None:
    """None if it is not whole."""
    if len(data) < _HEAD.size + 4 or crc32c(data[:-4]) != int.from_bytes(data[-4:], "big"):
        return None
    version, count = _HEAD.unpack_from(data, 0)
    if version not in (VERSION, WITH_TRANSACTIONS):
        return None
    try:
        return _decode(data, count, plain=version == VERSION)
    except struct.error:  # of another broker, perhaps: its CRC is right, and it says more than is there
        return None


def _decode(data: bytes, count: int, *, plain: bool) -> Snapshot:
    states: dict[int, ProducerState] = {}
    at = _HEAD.size
    for _ in range(count):
        producer_id, epoch, used_ms, batches = _PRODUCER.unpack_from(data, at)
        at += _PRODUCER.size
        transaction = _NO_TRANSACTION
        if not plain:
            transaction = _TRANSACTION.unpack_from(data, at)
            at += _TRANSACTION.size
        found = tuple(SequencedBatch(*_BATCH.unpack_from(data, at + i * _BATCH.size)) for i in range(batches))
        at += batches * _BATCH.size
        states[producer_id] = ProducerState(epoch, found, used_ms, *transaction)
    if plain:
        return Snapshot(states)
    (decided_to,) = _DECIDED_TO.unpack_from(data, at)
    ended, at = _rows(data, at + _DECIDED_TO.size, _ENDED)
    files, _ = _rows(data, at, _FILE)
    return Snapshot(
        states, decided_to, tuple((first, marker) for first, marker in ended), tuple(IndexedFile(*row) for row in files)
    )


def _rows(data: bytes, at: int, layout: struct.Struct) -> tuple[list[tuple[int, ...]], int]:
    (count,) = _COUNT.unpack_from(data, at)
    at += _COUNT.size
    if count * layout.size > len(data) - at:
        raise struct.error("more rows than there are bytes")
    return [layout.unpack_from(data, at + nth * layout.size) for nth in range(count)], at + count * layout.size


log = logging.getLogger(__name__)


class Snapshots:
    """The snapshot files of one partition: written when a segment begins or a start rises, read when a log is first
    used."""

    def __init__(self, disk: Disk, folder: str, offsets: Iterable[int]) -> None:
        self._disk = disk
        self._folder = folder
        self._offsets = set(offsets)

    def path(self, offset: int) -> str:
        return stem(self._folder, offset) + SNAPSHOT

    def __contains__(self, offset: int) -> bool:
        return offset in self._offsets

    def write(self, offset: int, snapshot: Snapshot, kept: Iterable[int]) -> str:
        """State before the offset; of the others only those stay. Answers the path, to be synced. OSError: the others
        all stay."""
        path = self.path(offset)
        self._offsets.discard(offset)  # until it is whole
        file = self._disk.open(path, create=True, writable=True)
        try:
            file.truncate(0)
            file.pwritev([encode_snapshot(snapshot)], 0)
        finally:
            file.close()
        self._keep(self._offsets.intersection(kept) | {offset})
        return path

    @property
    def offsets(self) -> list[int]:
        return sorted(self._offsets)

    @property
    def newest_offset(self) -> int | None:
        return max(self._offsets, default=None)

    def newest_first(self, end_offset: int) -> Iterator[tuple[int, Snapshot]]:
        """The whole ones that are not beyond the end, and their offsets."""
        for offset in sorted((each for each in self._offsets if each <= end_offset), reverse=True):
            try:
                data = read_derived(self._disk, self.path(offset))
            except FileNotFoundError:
                continue
            snapshot = decode_snapshot(data) if data is not None else None
            if snapshot is not None:
                yield offset, snapshot
            else:
                log.warning("%s: not whole: left out, the log itself is read instead", self.path(offset))

    def tells_of_none_open(self, offset: int) -> bool:
        """Whether there is one at this very offset, and no transaction was open there."""
        if offset not in self._offsets:
            return False
        found = next(self.newest_first(offset), None)
        return found is not None and found[0] == offset and not open_in(found[1].states).open_count

    def forget(self, offsets: range) -> None:
        """Their files are gone already, or going."""
        self._offsets = {offset for offset in self._offsets if offset not in offsets}

    def remove_above(self, offset: int) -> None:
        self._keep({each for each in self._offsets if each <= offset})

    def _keep(self, kept: set[int]) -> None:
        for offset in self._offsets - kept:
            if self._disk.exists(self.path(offset)):
                self._disk.remove(self.path(offset))
        self._offsets = kept


def newest_known(
    snapshots: Snapshots,
    index: AbortedIndex,
    file_of: FileOf,
    first_offset: int,
    end_offset: int,
    committed_offset: int = NEVER,
) -> tuple[int, LogProducers]:
    """What a snapshot says, and from which offset on the log has to be read as well. One from before the first offset
    says nothing of now. One is passed over if it has forgotten transactions that are not decided, as seen from a
    watermark that is lower now, or if the index of aborted ones that it was written with is not whole."""
    for offset, snapshot in snapshots.newest_first(end_offset):
        if offset < first_offset:
            break
        if snapshot.decided_to > committed_offset:
            continue
        files = index.read(snapshot.files, first_offset)
        if files is not None:
            transactions = open_in(snapshot.states, snapshot)
            return offset, LogProducers(snapshot.states, transactions, AbortedTransactions(file_of, files))
    return first_offset, LogProducers(aborted=AbortedTransactions(file_of))
