"""What a log knows of its idempotent producers: epoch, and sequence and offset of their last five batches.

A snapshot `<20-digit offset>.snapshot` stands beside the segments and holds the state of everything before its offset.
It is written when a segment begins and on a clean stop; in the layout `shared` from time to time, and where the log
begins when its start rises, because nothing else tells of what lies below. Big-endian:

    version uint16, count uint32, then per producer: id int64, epoch int16, last use in wall ms int64, batches uint8,
    then per batch: first sequence int32, last sequence int32, base offset int64; at the end CRC-32C of all uint32

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
    OutOfOrderSequence,
    StorageFailed,
)
from headrace.ports.clock import Clock
from headrace.ports.disk import Disk, read_derived
from headrace.records.batch import BatchHeader
from headrace.storage.checked_bytes import CheckBudget
from headrace.storage.folder import stem

KEPT_BATCHES: Final = 5
REFUSED_MAX: Final = 1000
"""Producers in a log whose first batch was refused; beyond these the oldest are forgotten."""
SEQUENCES: Final = 1 << 31
SNAPSHOT: Final = ".snapshot"
VERSION: Final = 1

_HEAD = struct.Struct(">HI")
_PRODUCER = struct.Struct(">qhqB")
_BATCH = struct.Struct(">iiq")


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


class RefusedBatch(NamedTuple):
    epoch: int
    first: int


class UnreadableProducers(CorruptBatch):
    """The log is damaged where it tells of its producers, at this offset."""

    def __init__(self, text: str, offset: int) -> None:
        super().__init__(text)
        self.offset = offset


Load = Generator[None, None, dict[int, ProducerState]]
"""Reads a log's producers; a step ends when the budget is spent."""


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
        self._states: dict[int, ProducerState] | None = None
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
            self._states, self._loading, self.loaded = ended.value, None, True
        except BaseException:
            self._loading = None
            raise

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
        first = header.base_sequence
        if header.producer_epoch != state.epoch:
            _check_new_epoch(header, state)
            return None
        if not state.batches:
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

    def appended(self, header: BatchHeader, base_offset: int) -> None:
        """A batch of this producer was staged at the offset."""
        if self._refused:
            self._refused.pop(header.producer_id, None)
        states = self.states
        old = states.get(header.producer_id)
        self.undo.append((header.producer_id, old))
        states[header.producer_id] = _after(old, header, base_offset, self._loads.wall_ms())

    def drop(self, header: BatchHeader) -> None:
        """Forget the producer's newest batch if it is this one, because it was not kept after all."""
        state = self.states.get(header.producer_id)
        if state and state.batches and state.batches[-1].first == header.base_sequence:
            self.states[header.producer_id] = state._replace(batches=state.batches[:-1])

    def settled(self) -> None:
        self.undo.clear()

    def take_back(self) -> None:
        for producer_id, old in reversed(self.undo):
            if old is None:
                state = self.states.pop(producer_id, None)
                if state is not None and state.batches:
                    self._await(producer_id, RefusedBatch(state.epoch, state.batches[0].first))
            else:
                self.states[producer_id] = old
        self.undo.clear()

    def learn(self, states: dict[int, ProducerState]) -> None:
        """Another replica knows these."""
        self._states = {**self.states, **states}
        self.loaded = True

    def forget(self) -> None:
        """Load again at next use."""
        self._states = None
        self.loaded = False
        self._past_damage = False
        self.left_out.clear()
        self.undo.clear()
        self.moved()

    def expire(self, before_ms: int) -> None:
        if self._states:
            for producer_id in [id_ for id_, state in self._states.items() if state.used_ms < before_ms]:
                del self._states[producer_id]


def replay(
    states: dict[int, ProducerState],
    from_offset: int,
    end_offset: int,
    headers: Iterable[BatchHeader],
    now_ms: int,
    budget: CheckBudget | None = None,
) -> Load:
    """Take what the checked headers of a log say from the one offset to the other."""
    reached = from_offset
    try:
        for header in headers:
            if header.next_offset > end_offset:
                raise CorruptBatch(f"the batch with offset {header.base_offset} ends behind the log, at {end_offset}")
            if header.producer_id >= 0:
                old = states.get(header.producer_id)
                states[header.producer_id] = _after(old, header, header.base_offset, now_ms)
            reached = header.next_offset
            if budget is not None:
                budget.spend(header.size_bytes, 1)
                if budget.spent:
                    yield
    except CorruptBatch as error:
        raise UnreadableProducers(str(error), reached) from None
    return states


def before(states: dict[int, ProducerState], offset: int) -> dict[int, ProducerState]:
    """What is known of them from batches before the offset."""
    known: dict[int, ProducerState] = {}
    for producer_id, state in states.items():
        batches = tuple(batch for batch in state.batches if batch.next_offset <= offset)
        if batches or not state.batches:
            known[producer_id] = state._replace(batches=batches)
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
    if header.base_sequence != 0:
        raise OutOfOrderSequence(
            f"producer {header.producer_id} begins epoch {header.producer_epoch} with sequence {header.base_sequence}, "
            "not with 0"
        )


def _after(old: ProducerState | None, header: BatchHeader, base_offset: int, now_ms: int) -> ProducerState:
    first = header.base_sequence
    kept: tuple[SequencedBatch, ...] = ()
    if old is not None and old.epoch == header.producer_epoch:
        kept = old.batches
    if first < 0:
        return ProducerState(header.producer_epoch, kept, now_ms)
    # A compacted batch may hold fewer records than it had; its last offset still tells how many there were.
    last = (first + header.last_offset_delta) % SEQUENCES
    batch = SequencedBatch(first, last, base_offset)
    return ProducerState(header.producer_epoch, (*kept[1 - KEPT_BATCHES :], batch), now_ms)


def encode(states: dict[int, ProducerState]) -> bytes:
    parts = [_HEAD.pack(VERSION, len(states))]
    for producer_id, (epoch, batches, used_ms) in states.items():
        parts.append(_PRODUCER.pack(producer_id, epoch, used_ms, len(batches)))
        parts.extend(_BATCH.pack(*batch) for batch in batches)
    body = b"".join(parts)
    return body + crc32c(body).to_bytes(4, "big")


def decode(data: bytes) -> dict[int, ProducerState] | None:
    """None if the snapshot is not whole."""
    if len(data) < _HEAD.size + 4 or crc32c(data[:-4]) != int.from_bytes(data[-4:], "big"):
        return None
    version, count = _HEAD.unpack_from(data, 0)
    if version != VERSION:
        return None
    states: dict[int, ProducerState] = {}
    at = _HEAD.size
    for _ in range(count):
        producer_id, epoch, used_ms, batches = _PRODUCER.unpack_from(data, at)
        at += _PRODUCER.size
        found = tuple(SequencedBatch(*_BATCH.unpack_from(data, at + i * _BATCH.size)) for i in range(batches))
        at += batches * _BATCH.size
        states[producer_id] = ProducerState(epoch, found, used_ms)
    return states


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

    def write(self, offset: int, states: dict[int, ProducerState], kept: Iterable[int]) -> str:
        """State before the offset; of the others only those stay. Answers the path, to be synced. OSError: the others
        all stay."""
        path = self.path(offset)
        self._offsets.discard(offset)  # until it is whole
        file = self._disk.open(path, create=True, writable=True)
        try:
            file.truncate(0)
            file.pwritev([encode(states)], 0)
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

    def newest(self, end_offset: int) -> tuple[int, dict[int, ProducerState]] | None:
        """The newest whole one that is not beyond the end, and its offset."""
        for offset in sorted((each for each in self._offsets if each <= end_offset), reverse=True):
            try:
                data = read_derived(self._disk, self.path(offset))
            except FileNotFoundError:
                continue
            states = decode(data) if data is not None else None
            if states is not None:
                return offset, states
            log.warning("%s: not whole: left out, the log itself is read instead", self.path(offset))
        return None

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
