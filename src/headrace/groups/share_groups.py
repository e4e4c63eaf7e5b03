"""The share groups of a coordinator (KIP-932): their requests, and what is done for them at the share coordinator.

`groups/share_group.py` decides, `groups/coordinator.py` appends what it decides and tells it what became of that; this
is what reaches from there to the states of share partitions, through a `Persister`: they are initialized when members
subscribe, set anew and deleted from outside, deleted with their group, and shown.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Generic, TypeVar

from headrace.errors import ErrorCode
from headrace.groups.assignors import Partition
from headrace.groups.consumer_messages import JOINING, ConsumerReply, DescribedConsumerGroup, ShareHeartbeat
from headrace.groups.descriptions import modern_description
from headrace.groups.group import Moment
from headrace.groups.shard import Shard
from headrace.groups.share_group import FIRST_STATE_EPOCH, ShareGroup
from headrace.queues.messages import (
    NO_OFFSET,
    Persister,
    ReadDone,
    SharePartitionKey,
    ShareState,
    ShareSummary,
    SummaryDone,
)

T = TypeVar("T")

IN_FLIGHT_MAX: Final = 500
"""Requests of one errand to share coordinators that are under way at a time."""
NO_LEADER_EPOCH: Final = -1

Codes = Mapping[Partition, int]
Summary = tuple[int, ShareSummary | None]


@dataclass(frozen=True, slots=True)
class Host:
    """What share groups need of the coordinator that they stand in."""

    find: Callable[[str], Shard | int]
    """The shard of a group, or the code that says why it cannot be asked."""
    creation_fault: Callable[[str], int]
    make: Callable[[str], ShareGroup]
    follow: Callable[[Shard, ShareGroup], None]
    """Answer who can be answered, and see that the rest goes on."""
    now: Callable[[], Moment]


class ShareGroups:
    def __init__(self, host: Host, persister: Persister) -> None:
        self._host = host
        self._persister = persister

    # Members

    def heartbeat(self, group_id: str, request: ShareHeartbeat, reply: Callable[[ConsumerReply], None]) -> None:
        """A member joins, goes on or leaves."""
        shard = self._host.find(group_id)
        if isinstance(shard, int):
            reply(ConsumerReply(shard, member_id=request.member_id))
            return
        group = self._group(shard, group_id, creates=request.member_epoch == JOINING)
        if group is None:
            reply(ConsumerReply(ErrorCode.UNKNOWN_MEMBER_ID, member_id=request.member_id))
        elif isinstance(group, int):
            reply(ConsumerReply(group, member_id=request.member_id))
        else:
            group.heartbeat(reply, request, self._host.now())
            self._host.follow(shard, group)

    def describe(self, group_id: str) -> DescribedConsumerGroup:
        shard = self._host.find(group_id)
        if isinstance(shard, int):
            return DescribedConsumerGroup(shard, group_id)
        group = shard.groups.get(group_id)
        if not isinstance(group, ShareGroup) or group.is_dead:
            what = "there is no group" if group is None else "no share group is"
            return DescribedConsumerGroup(ErrorCode.GROUP_ID_NOT_FOUND, group_id, f"{what} {group_id!r}", "Dead")
        return modern_description(group)

    def _group(self, shard: Shard, group_id: str, *, creates: bool) -> ShareGroup | int | None:
        """The share group of this name; None if there is none; or why it cannot be asked. Whose states are being
        changed has no members, and gets none before that is over."""
        group = shard.groups.get(group_id)
        if group is None and creates:
            fault = self._host.creation_fault(group_id)
            if fault != ErrorCode.NONE:
                return fault
            shard.groups[group_id] = made = self._host.make(group_id)
            return made
        if group is None:
            return None
        if group.is_dead:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        if not isinstance(group, ShareGroup):
            return ErrorCode.GROUP_ID_NOT_FOUND
        return ErrorCode.COORDINATOR_NOT_AVAILABLE if group.is_changing_states else group

    # States of share partitions

    def initialize(self, shard: Shard, group: ShareGroup) -> None:
        """What has to be initialized now, if anything has."""
        for place in group.to_initialize(self._host.now()):
            done = partial(self._initialized, shard, group, place)
            self._persister.initialize(_key(group, place), FIRST_STATE_EPOCH, NO_OFFSET, done)

    def _initialized(self, shard: Shard, group: ShareGroup, place: Partition, code: int) -> None:
        group.state_initialized(place, code, self._host.now())
        self._host.follow(shard, group)

    def starts(
        self,
        group_id: str,
        wanted: Collection[Partition] | None,
        done: Callable[[int, Mapping[Partition, Summary]], None],
    ) -> None:
        """Where the group begins in these partitions, or in all that it has a state in. One without a state has no
        start."""
        shard = self._host.find(group_id)
        group = shard if isinstance(shard, int) else shard.groups.get(group_id)
        if isinstance(group, int) or not isinstance(group, ShareGroup) or group.is_dead:
            done(group if isinstance(group, int) else ErrorCode.GROUP_ID_NOT_FOUND, {})
            return
        places = sorted(group.initialized) if wanted is None else [one for one in wanted if one in group.initialized]
        found: dict[Partition, Summary] = dict.fromkeys(wanted or (), (ErrorCode.NONE, None))

        def ask(place: Partition, heard: Callable[[Summary], None]) -> None:
            read: SummaryDone = lambda code, state: heard((code, state))  # noqa: E731
            self._persister.summary(_key(group, place), NO_LEADER_EPOCH, read)

        Gathering(places, ask, lambda summaries: done(ErrorCode.NONE, found | summaries)).go_on()

    def set_starts(self, group_id: str, starts: Mapping[Partition, int], done: Callable[[int, Codes], None]) -> None:
        """Begin there from now on, in a group without members. One that is not there is made for it."""
        found = self._changeable(group_id, creates=True)
        if isinstance(found, int):
            done(found, {})
            return
        shard, group = found
        epoch = 0

        def ask(place: Partition, heard: Callable[[int], None]) -> None:
            self._persister.initialize(_key(group, place), epoch, starts[place], heard)

        def asked(codes: Codes) -> None:
            kept = [place for place, code in codes.items() if code == ErrorCode.NONE]
            self._end_change(shard, group, codes, done, kept=kept)

        noted = partial(self._noted, shard, group, starts, ask, asked, done)
        epoch = group.begin_change(starts.keys(), noted, self._host.now(), sets_starts=True)
        self._host.follow(shard, group)

    def delete_starts(self, group_id: str, topics: Collection[bytes], done: Callable[[int, Codes], None]) -> None:
        """Forget what is kept of these topics, in a group without members; answers all partitions of theirs that had a
        state, or may have."""
        found = self._changeable(group_id, creates=False)
        if isinstance(found, int):
            done(found, {})
            return
        shard, group = found
        self.delete_states(shard, group, [place for place in group.states() if place[0] in topics], done)

    def delete_states(
        self, shard: Shard, group: ShareGroup, places: Collection[Partition], done: Callable[[int, Codes], None]
    ) -> None:
        """Of a group without members whose states nobody else changes."""
        if not places:
            done(ErrorCode.NONE, {})
            return

        def ask(place: Partition, heard: Callable[[int], None]) -> None:
            self._persister.delete(_key(group, place), heard)

        def asked(codes: Codes) -> None:
            gone = [place for place, code in codes.items() if code == ErrorCode.NONE]
            self._end_change(shard, group, codes, done, gone=gone)

        noted = partial(self._noted, shard, group, places, ask, asked, done)
        group.begin_change(places, noted, self._host.now(), sets_starts=False)
        self._host.follow(shard, group)

    def _changeable(self, group_id: str, *, creates: bool) -> tuple[Shard, ShareGroup] | int:
        """The group, if its states can be changed from outside now; else why not."""
        shard = self._host.find(group_id)
        if isinstance(shard, int):
            return shard
        group = self._group(shard, group_id, creates=creates)
        if group is None:
            return ErrorCode.GROUP_ID_NOT_FOUND
        if isinstance(group, int):
            return group
        if group.members:
            return ErrorCode.NON_EMPTY_GROUP
        return ErrorCode.COORDINATOR_NOT_AVAILABLE if group.is_initializing else (shard, group)

    def _noted(
        self,
        shard: Shard,
        group: ShareGroup,
        places: Iterable[Partition],
        ask: Callable[[Partition, Callable[[int], None]], None],
        asked: Callable[[Codes], None],
        done: Callable[[int, Codes], None],
        reply: ConsumerReply,
    ) -> None:
        """The log has it that the states of these places may change, or will not have it."""
        if reply.error_code == ErrorCode.NONE:
            Gathering(places, ask, asked).go_on()
        else:
            group.is_changing_states = False
            self._host.follow(shard, group)
            done(reply.error_code, {})

    def _end_change(
        self,
        shard: Shard,
        group: ShareGroup,
        codes: Codes,
        done: Callable[[int, Codes], None],
        *,
        kept: Collection[Partition] = (),
        gone: Collection[Partition] = (),
    ) -> None:
        if group.is_dead:
            done(ErrorCode.NOT_COORDINATOR, {})
            return
        ticket: Callable[[ConsumerReply], None] = lambda reply: done(reply.error_code, codes)  # noqa: E731
        group.end_change(ticket, kept=kept, gone=gone)
        self._host.follow(shard, group)


def _key(group: ShareGroup, place: Partition) -> SharePartitionKey:
    return SharePartitionKey(group.group_id, *place)


class Gathering(Generic[T]):
    """The same asked of many partitions, some at a time, and all answers together."""

    def __init__(
        self,
        places: Iterable[Partition],
        ask: Callable[[Partition, Callable[[T], None]], None],
        done: Callable[[dict[Partition, T]], None],
    ) -> None:
        self._left = list(places)
        self._count = len(self._left)
        self._ask = ask
        self._done = done
        self._answers: dict[Partition, T] = {}
        self._in_flight = 0
        self._going_on = False

    def go_on(self) -> None:
        """Answers may come at once: then this is not entered again."""
        if self._going_on:
            return
        self._going_on = True
        while self._left and self._in_flight < IN_FLIGHT_MAX:
            place = self._left.pop()
            self._in_flight += 1
            self._ask(place, partial(self._heard, place))
        self._going_on = False
        if len(self._answers) == self._count:
            self._done(self._answers)

    def _heard(self, place: Partition, answer: T) -> None:
        self._in_flight -= 1
        self._answers[place] = answer
        self.go_on()


class NoPersister:
    """Where no share coordinator can be asked, as at a registry."""

    def read(self, _key: SharePartitionKey, _leader_epoch: int, done: ReadDone) -> None:
        done(ErrorCode.COORDINATOR_NOT_AVAILABLE, None)

    def write(self, _key: SharePartitionKey, _state: ShareState, done: Callable[[int], None]) -> None:
        done(ErrorCode.COORDINATOR_NOT_AVAILABLE)

    def initialize(
        self, _key: SharePartitionKey, _state_epoch: int, _start_offset: int, done: Callable[[int], None]
    ) -> None:
        done(ErrorCode.COORDINATOR_NOT_AVAILABLE)

    def delete(self, _key: SharePartitionKey, done: Callable[[int], None]) -> None:
        done(ErrorCode.COORDINATOR_NOT_AVAILABLE)

    def summary(self, _key: SharePartitionKey, _leader_epoch: int, done: SummaryDone) -> None:
        done(ErrorCode.COORDINATOR_NOT_AVAILABLE, None)
