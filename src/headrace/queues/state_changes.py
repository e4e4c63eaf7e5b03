"""What is kept of a share partition, step by step: each step takes what is kept and answers what is to be kept from now
on, or Kafka's code for why not. No I/O.

Two epochs fence. The state epoch rises when a group's start is set anew: nothing that was decided before counts then.
The leader epoch is that of the data partition: the read of a new leader raises it, and who led before writes nothing
any more. The load id does the same for one leader that reads again: what it wrote before, and is still on its way,
comes too late.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Final

from headrace.cluster.names import GROUP_NAME_MAX
from headrace.errors import ErrorCode
from headrace.queues.messages import (
    IN_FLIGHT_MAX,
    NO_OFFSET,
    DeliveryState,
    SharePartitionKey,
    ShareState,
    StateBatch,
)
from headrace.queues.state_records import NO_EPOCH, NO_LOAD, TOPIC_ID_BYTES, Kept, Update

RANGES_MAX: Final = IN_FLIGHT_MAX
"""Of one share partition."""
MEMBER_BYTES_MAX: Final = 255
MAY_WAIT: Final = frozenset({DeliveryState.AVAILABLE, DeliveryState.ACQUIRED})
"""For a time."""
DELIVERY_COUNT_MAX: Final = (1 << 15) - 1

_first = attrgetter("first_offset")
_last = attrgetter("last_offset")


@dataclass(frozen=True, slots=True)
class Change:
    """What is to be kept from now on, and what of it is new; without an update it begins anew."""

    kept: Kept | None
    update: Update | None = None


DELETED: Final = Change(None)

Step = Change | int
"""What is to be kept, or a code; NONE: everything is as it should be."""


def key_fault(key: SharePartitionKey) -> int:
    """Of one that no share partition can have."""
    is_possible = (
        0 < len(key.group) <= GROUP_NAME_MAX
        and len(key.topic_id) == TOPIC_ID_BYTES
        and any(key.topic_id)
        and 0 <= key.partition < 1 << 31
    )
    return ErrorCode.NONE if is_possible else ErrorCode.INVALID_REQUEST


def initialize(kept: Kept | None, state_epoch: int, start_offset: int) -> Step:
    """Who asks again with the same epoch has not heard the answer: what was written since stays."""
    if state_epoch < 0 or start_offset < NO_OFFSET:
        return ErrorCode.INVALID_REQUEST
    if kept is None:
        return Change(Kept(ShareState(state_epoch, 0, start_offset)))
    if state_epoch < kept.state.state_epoch:
        return ErrorCode.FENCED_STATE_EPOCH
    if state_epoch == kept.state.state_epoch:
        return ErrorCode.NONE
    return Change(Kept(ShareState(state_epoch, kept.state.leader_epoch, start_offset), kept.load_id))


def read(kept: Kept | None, leader_epoch: int, load_id: int) -> Step:
    if kept is None:
        return ErrorCode.INVALID_REQUEST
    if leader_epoch == NO_EPOCH:
        return ErrorCode.NONE
    if leader_epoch < kept.state.leader_epoch:
        return ErrorCode.FENCED_LEADER_EPOCH
    if load_id in (NO_LOAD, kept.load_id) and leader_epoch == kept.state.leader_epoch:
        return ErrorCode.NONE
    update = Update(leader_epoch, load_id=load_id)
    return Change(updated(kept, update), update)


def write(kept: Kept | None, changed: ShareState, load_id: int) -> Step:
    """What says nothing new is kept too: only who can still append knows that nobody else has written since."""
    fault = _write_fault(kept, changed, load_id)
    if kept is None or fault != ErrorCode.NONE:
        return fault
    epoch = max(changed.leader_epoch, kept.state.leader_epoch)
    update = Update(epoch, changed.start_offset, changed.batches, written_epoch=epoch)
    goes_back = load_id != NO_LOAD and NO_OFFSET < changed.start_offset < kept.state.start_offset
    if goes_back:  # who has read it knows: the log of the data has lost its end, and goes on from there
        kept = replace(kept, state=replace(kept.state, start_offset=changed.start_offset))
    after = updated(kept, update)
    if len(after.state.batches) > RANGES_MAX:
        return ErrorCode.POLICY_VIOLATION
    return Change(after, None if goes_back else update)


def _write_fault(kept: Kept | None, changed: ShareState, load_id: int) -> int:
    if kept is None or changed.start_offset < NO_OFFSET:
        return ErrorCode.INVALID_REQUEST
    if len(changed.batches) > RANGES_MAX:
        return ErrorCode.POLICY_VIOLATION
    if changed.leader_epoch != NO_EPOCH and changed.leader_epoch < kept.state.leader_epoch:
        return ErrorCode.FENCED_LEADER_EPOCH
    if load_id not in (NO_LOAD, kept.load_id):
        return ErrorCode.FENCED_LEADER_EPOCH
    if changed.state_epoch not in (NO_EPOCH, kept.state.state_epoch):
        return ErrorCode.FENCED_STATE_EPOCH
    return ErrorCode.NONE if all(map(_is_possible, changed.batches)) else ErrorCode.INVALID_REQUEST


def _is_possible(batch: StateBatch) -> bool:
    return (
        0 <= batch.first_offset <= batch.last_offset
        and 0 <= batch.delivery_count <= DELIVERY_COUNT_MAX
        and batch.until_ms >= 0
        and len(batch.member.encode()) <= MEMBER_BYTES_MAX
        and (batch.state is DeliveryState.ACQUIRED or not batch.member)
        and (batch.state in MAY_WAIT or not batch.until_ms)
        and (batch.letter is None or (batch.state is DeliveryState.ARCHIVING and batch.letter.sequence >= 0))
    )


# Ranges


def updated(kept: Kept, update: Update) -> Kept:
    """A start never goes back by an update: what is below it is final."""
    state = kept.state
    start_offset = max(state.start_offset, update.start_offset)
    batches = state.batches
    if update.batches or start_offset != state.start_offset:
        batches = overlaid(batches, update.batches, start_offset)
    leader_epoch = state.leader_epoch if update.leader_epoch == NO_EPOCH else update.leader_epoch
    load_id = kept.load_id if update.load_id == NO_LOAD else update.load_id
    written_epoch = kept.written_epoch if update.written_epoch == NO_EPOCH else update.written_epoch
    return Kept(ShareState(state.state_epoch, leader_epoch, start_offset, batches), load_id, written_epoch)


def overlaid(batches: Iterable[StateBatch], changed: Iterable[StateBatch], start_offset: int) -> tuple[StateBatch, ...]:
    """Ranges in order, none over another: those that have changed in the place of what was there, nothing below the
    start, and neighbours in the same state as one."""
    found = list(batches)
    for batch in changed:
        _put(found, batch)
    below = bisect_left(found, start_offset, key=_last)
    if below < len(found) and found[below].first_offset < start_offset:
        found[below] = _part(found[below], start_offset, found[below].last_offset)
    return tuple(found[below:])


def _put(batches: list[StateBatch], batch: StateBatch) -> None:
    """With its neighbours on both sides, so that those which are like it become one with it."""
    begin = bisect_left(batches, batch.first_offset, key=_last)
    end = bisect_right(batches, batch.last_offset, key=_first)
    pieces = [batch]
    if begin < end:
        first, last = batches[begin], batches[end - 1]
        if first.first_offset < batch.first_offset:
            pieces.insert(0, _part(first, first.first_offset, batch.first_offset - 1))
        if last.last_offset > batch.last_offset:
            pieces.append(_part(last, batch.last_offset + 1, last.last_offset))
    if begin > 0:
        begin -= 1
        pieces.insert(0, batches[begin])
    if end < len(batches):
        pieces.append(batches[end])
        end += 1
    joined = pieces[:1]
    for piece in pieces[1:]:
        before = joined[-1]
        if before.last_offset + 1 == piece.first_offset and _is_alike(before, piece):
            joined[-1] = _part(before, before.first_offset, piece.last_offset)
        else:
            joined.append(piece)
    batches[begin:end] = joined


def _part(batch: StateBatch, first_offset: int, last_offset: int) -> StateBatch:
    """The same of other offsets; for loads of many, much quicker than `replace`."""
    return StateBatch(
        first_offset, last_offset, batch.state, batch.delivery_count, batch.member, batch.until_ms, batch.letter
    )  # fmt: skip


def _is_alike(one: StateBatch, other: StateBatch) -> bool:
    return (one.state, one.delivery_count, one.member, one.until_ms, one.letter) == (
        other.state, other.delivery_count, other.member, other.until_ms, other.letter,
    )  # fmt: skip
