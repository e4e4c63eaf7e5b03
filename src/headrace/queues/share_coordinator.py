"""The coordinator of the share partitions whose partition of `__share_group_state` this broker leads: it keeps their
states.

`state_changes.py` decides; here the decision is appended, and takes effect when the log has it below the watermark:
then memory changes and the answer leaves. One change of a share partition is under way at a time, who comes meanwhile
waits for it, in the order in which they came; so what is asked next is always decided on what the log has. A
coordinator that takes over by replaying the partition arrives at the same states. What is decided in one turn of the
loop is one batch.

A read of a data partition's leader is a change too: it fences whoever led before, and nothing that was written before
it takes effect after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import Final

from headrace import metrics
from headrace.cluster.names import SHARE_STATE_TOPIC
from headrace.coordinators.record_fields import Record
from headrace.coordinators.shard_load import ShardLoad
from headrace.coordinators.state_log import APPEND_FAULTS, Append, partition_of
from headrace.coordinators.state_partitions import StateTopic
from headrace.errors import ErrorCode
from headrace.ports.clock import Clock
from headrace.queues import state_changes
from headrace.queues.messages import (
    NO_OFFSET,
    CodeHeard,
    ReadDone,
    SharePartitionKey,
    ShareState,
    ShareSummary,
    SummaryDone,
)
from headrace.queues.state_changes import DELETED, Change, Step
from headrace.queues.state_records import NO_EPOCH, Kept, complete_count, coordinator_key
from headrace.queues.state_shard import Answer, Entry, Shard, StepOf

WAITING_MAX: Final = 100
"""Requests that wait for one share partition."""
SHARE_PARTITIONS_MAX: Final = 2_000_000
"""On this broker."""
DROPPED_PER_TURN: Final = 200
"""Share partitions of deleted topics that are deleted together."""
PAUSE_SECONDS: Final = 0.5
"""Before what could not be appended of our own accord is tried again."""
NO_COUNT: Final = -1

SHARE_STATES: Final = StateTopic(
    SHARE_STATE_TOPIC,
    "share.state.loss.accepted",
    "share partitions",
    "the states of its share partitions",
    "records that share groups have acknowledged may then be delivered again",
)
FAULTS: Final = {**APPEND_FAULTS, ErrorCode.MESSAGE_TOO_LARGE: ErrorCode.POLICY_VIOLATION}


class ShareCoordinator:
    """`knows` tells whether the cluster has this partition, by its topic's id."""

    def __init__(self, clock: Clock, append: Append, partition_count: int, knows: Callable[[bytes, int], bool]) -> None:
        self._clock = clock
        self._append_records = append
        self.partition_count = partition_count
        """Of the topic; whoever sees the cluster keeps it up to date."""
        self._knows = knows
        self._shards: dict[int, Shard] = {}

    def __len__(self) -> int:
        return sum(len(shard) for shard in self._shards.values())

    # Leadership of partitions

    def lead(self, partition: int, epoch: int) -> ShardLoad[Shard]:
        """This broker leads the partition in this epoch: its share partitions answer COORDINATOR_LOAD_IN_PROGRESS until
        they are loaded."""
        self.resign(partition)
        shard = self._shards[partition] = Shard(partition, epoch)
        return ShardLoad(shard, self._open)

    def resign(self, partition: int) -> None:
        """This broker does not lead the partition any more; everyone who waits looks for the new coordinator."""
        shard = self._shards.pop(partition, None)
        if shard is None:
            return
        shard.gone = True
        contended, shard.contended = shard.contended, set()
        for entry in contended:
            waiting, entry.waiting = entry.waiting, None
            for _step, answer in waiting or ():
                answer(ErrorCode.NOT_COORDINATOR, None)

    def drop_topics(self, ids: Collection[bytes]) -> None:
        """Topics with these ids were deleted; nobody can come back to them."""
        for shard in self._shards.values():
            if not shard.loading:
                self._drop(shard, shard.of_topics(ids), _deleted)

    def close(self) -> None:
        for partition in list(self._shards):
            self.resign(partition)

    def _open(self, shard: Shard) -> None:
        self._drop(shard, shard.open(), _deleted_if_absent)

    # Requests

    def initialize(self, key: SharePartitionKey, state_epoch: int, start_offset: int, done: CodeHeard) -> None:
        """Begin with this start offset, -1 for one that is not known yet; or again, under a higher state epoch."""

        def step(kept: Kept | None) -> Step:
            if kept is None and len(self) > SHARE_PARTITIONS_MAX:
                return ErrorCode.POLICY_VIOLATION
            return self._absence(key, kept) or state_changes.initialize(kept, state_epoch, start_offset)

        self._change(key, step, lambda code, _kept: done(code))

    def read(self, key: SharePartitionKey, leader_epoch: int, load_id: int, done: ReadDone) -> None:
        """The whole state, for the leader of the data partition in this epoch, or a later load of the same. Leader
        epoch -1: only look. Answered with the leader epoch of the last write; where nothing was written since it was
        initialized, with that of who asks."""

        def step(kept: Kept | None) -> Step:
            return self._absence(key, kept) or state_changes.read(kept, leader_epoch, load_id)

        def answer(code: int, kept: Kept | None) -> None:
            done(code, _last_written(kept) if kept is not None and code == ErrorCode.NONE else None)

        self._change(key, step, answer)

    def write(self, key: SharePartitionKey, changed: ShareState, load_id: int, done: CodeHeard) -> None:
        """Keep what has changed, for the load that has read last. Load id -1: whoever writes."""

        def step(kept: Kept | None) -> Step:
            return self._absence(key, kept) or state_changes.write(kept, changed, load_id)

        self._change(key, step, lambda code, _kept: done(code))

    def delete(self, key: SharePartitionKey, done: CodeHeard) -> None:
        shard = state_changes.key_fault(key) or self._find(key)
        if isinstance(shard, Shard) and shard.entry(key) is None:
            done(ErrorCode.NONE)
        else:
            self._change(key, _deleted, lambda code, _kept: done(code))

    def summary(self, key: SharePartitionKey, leader_epoch: int, done: SummaryDone) -> None:
        """What is kept now; nobody is fenced. Of what is not initialized there is no start offset."""
        shard = state_changes.key_fault(key) or self._find(key)
        if isinstance(shard, int):
            done(shard, None)
            return
        entry = shard.entry(key)
        kept = None if entry is None else entry.kept
        if kept is None:
            done(ErrorCode.NONE, ShareSummary(0, 0, NO_OFFSET, NO_COUNT))
        elif leader_epoch != NO_EPOCH and leader_epoch < kept.state.leader_epoch:
            done(ErrorCode.FENCED_LEADER_EPOCH, None)
        else:
            state = kept.state
            count = complete_count(state)
            done(ErrorCode.NONE, ShareSummary(state.state_epoch, state.leader_epoch, state.start_offset, count))

    def _absence(self, key: SharePartitionKey, kept: Kept | None) -> int:
        """The code for a share partition that there cannot be."""
        is_there = kept is not None or self._knows(key.topic_id, key.partition)
        return ErrorCode.NONE if is_there else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION

    # Changes

    def _change(self, key: SharePartitionKey, step: StepOf, answer: Answer) -> None:
        shard = state_changes.key_fault(key) or self._find(key)
        if isinstance(shard, int):
            answer(shard, None)
            return
        entry = shard.entry(key) or shard.create(key)
        if not entry.busy and not entry.waiting:
            self._take(shard, entry, step, answer)
        elif entry.waiting is not None and len(entry.waiting) >= WAITING_MAX:
            answer(ErrorCode.COORDINATOR_NOT_AVAILABLE, None)
        else:
            self._wait(shard, entry, step, answer)

    def _wait(self, shard: Shard, entry: Entry, step: StepOf, answer: Answer) -> None:
        if entry.waiting is None:
            entry.waiting = deque()
            shard.contended.add(entry)
        entry.waiting.append((step, answer))

    def _take(self, shard: Shard, entry: Entry, step: StepOf, answer: Answer) -> None:
        outcome = step(entry.kept)
        if isinstance(outcome, Change):
            self._store(shard, entry, outcome, answer)
        else:
            answer(outcome, entry.kept)
            shard.rest(entry)

    def _store(self, shard: Shard, entry: Entry, change: Change, answer: Answer) -> None:
        entry.busy = True

        def done(code: int) -> None:
            entry.busy = False
            if code == ErrorCode.NONE:
                entry.kept_now(change)
            else:
                entry.may_be_logged()
            answer(FAULTS.get(code, code), change.kept)
            self._go_on(shard, entry)

        if not shard.staged:
            self._clock.call_soon(partial(self._append_staged, shard))
        shard.staged.append((entry.records(change, self._clock.wall_ms()), done))

    def _append_staged(self, shard: Shard) -> None:
        """A shard that was dropped has no say any more: who loads it from the log must not miss anything."""
        staged, shard.staged = shard.staged, []
        records: list[Record] = [record for some, _done in staged for record in some]

        def done(code: int) -> None:
            for _records, heard in staged:
                heard(code)

        if shard.gone:
            done(ErrorCode.NOT_COORDINATOR)
        else:
            self._append_records(shard.partition, shard.epoch, records, done)

    def _go_on(self, shard: Shard, entry: Entry) -> None:
        """Those who waited, up to the next that changes something."""
        while entry.waiting and not entry.busy:
            step, answer = entry.waiting.popleft()
            self._take(shard, entry, step, answer)
        if not entry.waiting:
            entry.waiting = None
            shard.contended.discard(entry)
        shard.rest(entry)

    # What nobody asks for

    def _drop(self, shard: Shard, keys: list[SharePartitionKey], step: StepOf) -> None:
        """Some after the others, and again what could not be: the log keeps nothing for ever."""
        if shard.gone or not keys:
            return
        some, rest = keys[:DROPPED_PER_TURN], keys[DROPPED_PER_TURN:]
        left = len(some)
        failed: list[SharePartitionKey] = []

        def dropped(key: SharePartitionKey, code: int, _kept: Kept | None) -> None:
            nonlocal left
            left -= 1
            if code != ErrorCode.NONE:
                failed.append(key)
            if not left:
                again = partial(self._drop, shard, failed + rest, step)
                self._clock.call_later(PAUSE_SECONDS if failed else 0.0, again)

        for key in some:
            entry = shard.entry(key) or shard.create(key)
            if entry.busy or entry.waiting:
                self._wait(shard, entry, step, partial(dropped, key))
            else:
                self._take(shard, entry, step, partial(dropped, key))

    # Where it is

    def _find(self, key: SharePartitionKey) -> Shard | int:
        """The shard of this share partition, or the code that says why it cannot be asked."""
        count = self.partition_count
        shard = self._shards.get(partition_of(coordinator_key(key), count)) if count else None
        if shard is None:
            return ErrorCode.NOT_COORDINATOR
        return ErrorCode.COORDINATOR_LOAD_IN_PROGRESS if shard.loading else shard

    def samples(self) -> Iterator[metrics.Sample]:
        yield metrics.Sample(metrics.SHARE_PARTITION_STATES, (), len(self))


def _last_written(kept: Kept) -> ShareState:
    if kept.written_epoch in (NO_EPOCH, kept.state.leader_epoch):
        return kept.state
    return replace(kept.state, leader_epoch=kept.written_epoch)


def _deleted(_kept: Kept | None) -> Step:
    return DELETED


def _deleted_if_absent(kept: Kept | None) -> Step:
    """Only updates are left of it; unless it was initialized since."""
    return DELETED if kept is None else ErrorCode.NONE
