"""The transactional ids in one partition of `__transaction_state`, and how they are read back from its records.

There may be a million, and few have an open transaction: the others stay as the values of their records, a hundred
bytes each, until somebody asks for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from headrace.coordinators.alarms import NEVER
from headrace.coordinators.record_fields import Record
from headrace.transactions.limits import TransactionLimits
from headrace.transactions.messages import AddRequest
from headrace.transactions.records import (
    STATES,
    IdleHead,
    decode,
    decode_key,
    encode,
    idle_head,
    is_whole,
    state_number,
)
from headrace.transactions.transaction import NO_TIMEOUT_MS, OPEN, State, Transaction, doubt

AddDone = Callable[[int], None]
RECENT_MAX: Final = 100
"""Transactional ids of a partition that were used last, and are not read from their values again."""


class Entry:
    """A transactional id that is being asked for something, or has an open transaction."""

    __slots__ = (
        "adding",
        "busy",
        "confirming",
        "deadline",
        "held",
        "kept",
        "marking",
        "shard",
        "transactional_id",
        "value",
        "waking",
    )

    def __init__(
        self, shard: Shard, transactional_id: str, kept: Transaction | None = None, value: bytes | None = None
    ) -> None:
        self.shard = shard
        self.transactional_id = transactional_id
        self.kept = kept
        """As the log has it below the watermark; None for one that is not there yet."""
        self.value = value
        """The same as it is in the log."""
        self.busy = False
        """A change is on its way to the log, or a producer id is being drawn for one."""
        self.confirming = False
        """The log is being told again what it says of it, before somebody is refused."""
        self.marking = False
        """Markers are on their way to its partitions."""
        self.deadline = NEVER
        """When the open transaction is aborted."""
        self.adding: list[tuple[float, AddRequest, AddDone]] = []
        """Partitions to be added by the next append; until when each may wait."""
        self.held: list[tuple[float, Callable[[], None], Callable[[int], None]]] = []
        """Other requests that wait for it: until when, what asks again, what tells that it cannot be now."""
        self.waking = 0
        """Those who waited are being let on, one after the other: who is refused leaves the entry to the next."""

    @property
    def at_rest(self) -> bool:
        return not (self.busy or self.confirming or self.marking or self.adding or self.held or self.waking)


class Shard:
    """`loading` until all records were replayed; `gone` once this broker does not lead the partition in this epoch any
    more."""

    def __init__(self, partition: int, epoch: int) -> None:
        self.partition = partition
        self.epoch = epoch
        self.loading = True
        self.gone = False
        self.idle: dict[str, bytes] = {}
        """Without an open transaction: the values of their records."""
        self.live: dict[str, Entry] = {}
        self._recent: dict[str, Transaction] = {}
        """What the values of some idle ones say, the latest last."""
        self.buried: set[str] = set()
        """Idle ones whose tombstones are on their way."""
        self.states: Counter[State] = Counter()
        """How many are in each state."""
        self._open: dict[str, None] = {}
        self._doubted: set[str] = set()
        """Those of which later records may be lost."""
        self._counts = [0] * len(STATES)

    def __len__(self) -> int:
        return len(self.idle) + len(self.live)

    def replay(self, records: Iterable[Record]) -> None:
        """Take records in the order of the log; those of a kind that is not ours to know say nothing to us. Taking the
        same ones again changes nothing. CorruptBatch for one that cannot be read."""
        for key, value in records:
            transactional_id = decode_key(key)
            if transactional_id is None:
                continue
            if value is not None and not is_whole(value):
                kept = decode(value)
                value = encode(kept)
                if kept.state in OPEN:
                    self._open[transactional_id] = None
                else:
                    self._open.pop(transactional_id, None)
            elif self._open:
                self._open.pop(transactional_id, None)
            self._put(transactional_id, value)

    def lost(self) -> None:
        """What was replayed up to here may not be the last of it."""
        self._doubted.update(self.idle)

    def _put(self, transactional_id: str, value: bytes | None) -> None:
        self._doubted.discard(transactional_id)
        before = self.idle.get(transactional_id)
        if before is not None:
            self._counts[state_number(before)] -= 1
        if value is None:
            self.idle.pop(transactional_id, None)
        else:
            self.idle[transactional_id] = value
            self._counts[state_number(value)] += 1

    def open(self) -> list[str]:
        """The end of the log is reached: answers the ids that have an open transaction, or one that has not ended in
        every partition."""
        for name in self._doubted:
            self.idle[name] = encode(doubt(decode(self.idle[name])))
        self._doubted.clear()
        found = list(self._open)
        self._open.clear()
        self.states.update(dict(zip(STATES, self._counts, strict=True)))
        self.loading = False
        return found

    def entry(self, transactional_id: str) -> Entry | None:
        """The one that is asked for, with what is kept of it; None if nothing is."""
        entry = self.live.get(transactional_id)
        if entry is None:
            value = self.idle.pop(transactional_id, None)
            if value is not None:
                kept = self._recent.pop(transactional_id, None) or decode(value)
                entry = self.live[transactional_id] = Entry(self, transactional_id, kept, value)
        return entry

    def create(self, transactional_id: str) -> Entry:
        entry = self.live[transactional_id] = Entry(self, transactional_id)
        return entry

    def rest(self, entry: Entry) -> None:
        """Keep of it what its record has."""
        name = entry.transactional_id
        del self.live[name]
        if entry.kept is not None and entry.value is not None:
            self.idle[name] = entry.value
            self._recent[name] = entry.kept
            if len(self._recent) > RECENT_MAX:
                del self._recent[next(iter(self._recent))]

    def peek(self, transactional_id: str) -> Transaction | None:
        """What is kept of it."""
        entry = self.live.get(transactional_id)
        if entry is not None:
            return entry.kept
        value = self.idle.get(transactional_id)
        return None if value is None else decode(value)

    def idle_heads(self) -> Iterator[tuple[str, IdleHead]]:
        for name, value in self.idle.items():
            head = idle_head(value)
            if head is not None:
                yield name, head

    def expires(self, transactional_id: str, now_ms: int, limits: TransactionLimits) -> bool:
        """Whether it is idle, and nobody has used it for as long as it is kept."""
        value = self.idle.get(transactional_id)
        head = None if value is None else idle_head(value)
        if head is None:
            return False
        kept_ms = limits.expiration_ms
        if head.timeout_ms == NO_TIMEOUT_MS:
            kept_ms = min(kept_ms, limits.two_phase_expiration_ms)
        return now_ms - head.update_ms >= kept_ms

    def forget(self, names: Iterable[str]) -> None:
        """They are gone from the log."""
        for name in names:
            self._recent.pop(name, None)
            value = self.idle.pop(name, None)
            head = None if value is None else idle_head(value)
            if head is not None:
                self.states[STATES[head.state]] -= 1

    def all_live(self) -> Iterator[tuple[str, Transaction]]:
        return ((name, entry.kept) for name, entry in self.live.items() if entry.kept is not None)
