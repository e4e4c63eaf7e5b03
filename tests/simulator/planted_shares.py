"""Bugs of share groups: see `planted`. They are looked for in runs of a share group alone (`scenario.draw_shared`)."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from headrace.errors import ErrorCode
from headrace.queues import share_partitions, state_changes
from headrace.queues.led_share_partition import LedSharePartition
from headrace.queues.messages import AcknowledgeType, DeliveryState, ShareState
from headrace.queues.share_coordinator import ShareCoordinator
from headrace.queues.share_partition import SharePartition
from headrace.queues.share_partitions import SharePartitions
from headrace.queues.state_records import NO_EPOCH, Kept
from headrace.queues.state_shard import Entry
from simulator.planted import found_by, plant, swap

SHARE_PLANTS: list[str] = []
DONE = (DeliveryState.ACKNOWLEDGED, DeliveryState.ARCHIVED)


def share_plant(what: Any) -> Any:
    SHARE_PLANTS.append(what.__name__)
    return plant(what)


# What is kept.


@share_plant
def share_states_answered_before_they_are_committed(stack: ExitStack) -> None:
    """The share coordinator answers when it has handed a change to its log."""
    append = ShareCoordinator._append_staged

    def at_once(self: ShareCoordinator, shard: Any) -> None:
        staged, gone = shard.staged, shard.gone
        shard.staged = [(records, lambda _code: None) for records, _done in staged]
        append(self, shard)
        for _records, done in staged:
            done(ErrorCode.NOT_COORDINATOR if gone else ErrorCode.NONE)

    swap(stack, ShareCoordinator, "_append_staged", at_once)


@share_plant
def share_writes_that_failed_are_told_as_kept(stack: ExitStack) -> None:
    """The leader of the data answers its members before it knows that what it decided is kept."""
    written = LedSharePartition._written

    def told(self: LedSharePartition, code: int) -> None:
        self._tell_under_way(ErrorCode.NONE)
        written(self, code)

    swap(stack, LedSharePartition, "_written", told)


@share_plant
def deliveries_leave_before_they_are_kept(stack: ExitStack) -> None:
    """A share fetch does not wait for the write that has what it acquired."""
    acquire = share_partitions._Acquisition._acquire

    def at_once(self: Any, place: Any, led: LedSharePartition, *rest: Any) -> bool:
        when_kept = led.when_kept

        class Hasty:
            def when_kept(self, heard: Any) -> None:
                when_kept(lambda _code: None)
                heard(ErrorCode.NONE)

            def __getattr__(self, name: str) -> Any:
                return getattr(led, name)

        return acquire(self, place, Hasty(), *rest)  # type: ignore[arg-type]

    swap(stack, share_partitions._Acquisition, "_acquire", at_once)


@share_plant
def updates_share_one_slot(stack: ExitStack) -> None:
    """Every update of a share partition has the key of the first."""
    records = Entry.records

    def in_one(self: Entry, change: Any, now_ms: int) -> Any:
        self.slot = min(self.slot, 0)
        return records(self, change, now_ms)

    swap(stack, Entry, "records", in_one)


@share_plant
def snapshots_are_older_than_their_updates(stack: ExitStack) -> None:
    """A snapshot says how things were before the change that it is written for."""
    records = Entry.records

    def older(self: Entry, change: Any, now_ms: int) -> Any:
        if change.kept is not None and self.kept is not None and (self.anew or self.slot >= 5):
            self.anew = True
            change = replace(change, kept=self.kept)
        return records(self, change, now_ms)

    swap(stack, Entry, "records", older)


# Who may write.


@share_plant
def share_leaders_are_not_fenced(stack: ExitStack) -> None:
    """Who led the data before writes on, whoever has read since."""
    write = state_changes.write

    def unfenced(kept: Kept | None, changed: ShareState, load_id: int) -> Any:
        return write(kept, replace(changed, leader_epoch=NO_EPOCH), -1)

    swap(stack, state_changes, "write", unfenced)


@found_by("tests/queues/test_share_coordinator.py")
@share_plant
def state_epochs_are_not_compared(stack: ExitStack) -> None:
    """What was decided before the group's start was set anew counts. A group whose start is set has no members, and
    nothing in flight: there is seldom anything to write."""
    write = state_changes.write

    def any_epoch(kept: Kept | None, changed: ShareState, load_id: int) -> Any:
        return write(kept, replace(changed, state_epoch=NO_EPOCH), load_id)

    swap(stack, state_changes, "write", any_epoch)


@found_by("tests/queues/test_share_coordinator.py")
@share_plant
def loads_are_not_compared(stack: ExitStack) -> None:
    """A write that its leader has given up counts after the next load of the same leader."""
    write = state_changes.write

    def any_load(kept: Kept | None, changed: ShareState, load_id: int) -> Any:
        return write(kept, changed, -1)

    swap(stack, state_changes, "write", any_load)


# Locks and counts.


@share_plant
def loads_forget_who_has_acquired(stack: ExitStack) -> None:
    """The next leader of the data has everything available that was in flight."""
    restore = SharePartition._restore

    def forgotten(self: SharePartition, batch: Any) -> None:
        if batch.state is DeliveryState.ACQUIRED:
            batch = replace(batch, state=DeliveryState.AVAILABLE, member="", until_ms=0)
        restore(self, batch)

    swap(stack, SharePartition, "_restore", forgotten)


@share_plant
def locks_end_early(stack: ExitStack) -> None:
    """What has acquired goes to others after half of its time."""
    expire = SharePartition.expire

    def early(self: SharePartition, now_ms: int) -> int:
        return expire(self, now_ms + self.config.lock_ms // 2)

    swap(stack, SharePartition, "expire", early)


@share_plant
def renewals_do_nothing(stack: ExitStack) -> None:
    """They are answered, and the lock ends when it would have ended."""
    acknowledge = SharePartition._acknowledge

    def unchanged(self: SharePartition, index: int, run: Any, until_ms: int, now_ms: int) -> int:
        if run.type == AcknowledgeType.RENEW:
            return index
        return acknowledge(self, index, run, until_ms, now_ms)

    swap(stack, SharePartition, "_acknowledge", unchanged)


@share_plant
def expired_records_ignore_the_limit(stack: ExitStack) -> None:
    """A record whose locks run out is delivered for ever."""
    give_back = SharePartition._give_back

    def unlimited(self: SharePartition, index: int, first: int, last: int, now_ms: int) -> int:
        config, self.config = self.config, replace(self.config, delivery_count_limit=1 << 15)
        try:
            return give_back(self, index, first, last, now_ms)
        finally:
            self.config = config

    swap(stack, SharePartition, "_give_back", unlimited)


@share_plant
def counts_do_not_rise(stack: ExitStack) -> None:
    """Each further delivery counts as the second."""
    change = SharePartition._change

    def changed(self: SharePartition, index: int, first: int, last: int, state: Any, count: int, *rest: Any) -> int:
        before = self._ranges[index]
        if state is DeliveryState.ACQUIRED and before.state is DeliveryState.AVAILABLE:
            count = max(1, before.count)
        return change(self, index, first, last, state, count, *rest)

    swap(stack, SharePartition, "_change", changed)


# Who has what.


@share_plant
def acknowledgements_of_any_member(stack: ExitStack) -> None:
    """Who says something of a record is taken for the one that has acquired it."""
    fault = SharePartition._run_fault

    def passed(self: SharePartition, member: str, run: Any) -> int:
        for each in self._ranges:
            if each.first <= run.last and each.last >= run.first and each.state is DeliveryState.ACQUIRED:
                member = each.member
        return fault(self, member, run)

    swap(stack, SharePartition, "_run_fault", passed)


@share_plant
def released_records_are_done_with(stack: ExitStack) -> None:
    """What a member releases is not delivered any more."""
    acknowledge = SharePartition._acknowledge

    def done(self: SharePartition, index: int, run: Any, until_ms: int, now_ms: int) -> int:
        if run.type == AcknowledgeType.RELEASE:
            run = run._replace(type=int(AcknowledgeType.ACCEPT))
        return acknowledge(self, index, run, until_ms, now_ms)

    swap(stack, SharePartition, "_acknowledge", done)


@share_plant
def closed_sessions_release_nothing(stack: ExitStack) -> None:
    """What a member had when its session ended waits for its lock."""
    swap(stack, SharePartitions, "release", lambda *_: None)


# Starts and ends.


@share_plant
def starts_pass_over_what_is_acquired(stack: ExitStack) -> None:
    """A start rises over records that somebody has acquired, if what follows them is done with."""
    advance = SharePartition._advance

    def advanced(self: SharePartition) -> None:
        advance(self)
        ranges = self._ranges
        if len(ranges) > 1 and ranges[0].state is DeliveryState.ACQUIRED and ranges[1].state in DONE:
            self._unkept.pop(ranges[0], None)
            del ranges[0]
            advance(self)

    swap(stack, SharePartition, "_advance", advanced)


@share_plant
def starts_stay_behind_the_log(stack: ExitStack) -> None:
    """A group goes on where it was, though retention has overtaken it."""
    swap(stack, SharePartition, "log_start", lambda *_: 0)


@share_plant
def gaps_are_delivered(stack: ExitStack) -> None:
    """Offsets that the log does not have are acquired with what follows them."""
    swap(stack, SharePartition, "_pass_over", lambda *_: None)
