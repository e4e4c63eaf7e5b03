"""What a coordinator tells of its transactional ids: lists, descriptions. There may be a million of them, so a list is
made in slices, between which the loop goes on; what changes meanwhile is told as it was or as it is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

from headrace.errors import ErrorCode
from headrace.transactions.messages import DescribedTransaction, ListedTransaction
from headrace.transactions.records import STATES, idle_head
from headrace.transactions.shard import Shard
from headrace.transactions.transaction import IDLE, NO_TIME_MS, OPEN, State, Transaction

LISTED_PER_TURN: Final = 5000
"""Transactional ids that one turn of the loop looks at for a list."""
_IDLE_NAMES: Final = frozenset(state.value for state in IDLE)


@dataclass(frozen=True, slots=True)
class ListFilter:
    """Those in any of these states and of these producers, empty for all, that are open for longer than this time, with
    such a name."""

    states: frozenset[str] = frozenset()
    producer_ids: Collection[int] = ()
    longer_than_ms: int = -1
    matches: Callable[[str], bool] | None = None

    @property
    def only_open(self) -> bool:
        return self.longer_than_ms >= 0 or (bool(self.states) and not self.states & _IDLE_NAMES)

    def takes(self, name: str, producer_id: int, state: State, age_ms: int) -> bool:
        if self.longer_than_ms >= 0 and (state not in OPEN or age_ms <= self.longer_than_ms):
            return False
        is_wanted = (not self.states or state.value in self.states) and (
            not self.producer_ids or producer_id in self.producer_ids
        )
        return is_wanted and (self.matches is None or self.matches(name))


def listed(shards: Iterable[Shard], wanted: ListFilter, now_ms: int) -> Iterator[list[ListedTransaction]]:
    """In slices; at least one."""
    rows = _rows(list(shards), wanted.only_open)
    while True:
        looked_at = list(islice(rows, LISTED_PER_TURN))
        yield [
            ListedTransaction(name, producer_id, state.value)
            for name, producer_id, state, start_ms in looked_at
            if wanted.takes(name, producer_id, state, now_ms - start_ms)
        ]
        if len(looked_at) < LISTED_PER_TURN:
            return


def _rows(shards: list[Shard], only_open: bool) -> Iterator[tuple[str, int, State, int]]:
    """Name, producer id, state and beginning of each."""
    for shard in shards:
        names = [*shard.live] if only_open else [*shard.live, *shard.idle]
        for name in names:
            entry, value = shard.live.get(name), shard.idle.get(name)
            if entry is not None and entry.kept is not None:
                yield name, entry.kept.client.producer_id, entry.kept.state, entry.kept.start_ms
            elif value is not None:
                head = idle_head(value)
                if head is not None:
                    yield name, head.producer_id, STATES[head.state], head.start_ms


def described(transactional_id: str, kept: Transaction) -> DescribedTransaction:
    return DescribedTransaction(
        ErrorCode.NONE,
        transactional_id,
        kept.state.value,
        kept.timeout_ms,
        kept.start_ms if kept.state in OPEN else NO_TIME_MS,
        *kept.client,
        tuple(sorted(kept.partitions)),
        kept.two_phase,
        kept.owner,
    )
