"""Bugs that a replicated log can have, planted one at a time in the code that the simulator runs.

Each is a patch of a few lines in the place where the real code decides; `planted(name)` is in force as long as its
context lasts. The simulator has to find each of them, or a test that is named with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from headrace.cluster import controller, controller_core, eligibility, lineage
from headrace.cluster.changes import Step
from headrace.cluster.controller_core import Batch
from headrace.cluster.election import Election
from headrace.cluster.eligibility import Eligibility
from headrace.cluster.image import NO_LEADER, Broker, Image, PartitionState
from headrace.cluster.lineage import MetadataWatch
from headrace.groups.records import OffsetAndMetadata
from headrace.partitions.leader_core import FollowerState, LeaderCore
from headrace.partitions.partition import Partition
from headrace.partitions.partitions import Partitions
from headrace.replication import follower_session, subscriptions
from headrace.replication.follower import FollowedPartition
from headrace.replication.frames import Answer, Position, Reset, Start, Subscribe
from headrace.storage import compaction, folder, rewritten, shortfall
from headrace.storage.commitlog import retention as shared_retention
from headrace.storage.compaction import CompactionFilter
from headrace.storage.group_commit import GroupCommit
from headrace.storage.local_log import LocalLog
from headrace.storage.log import Log
from headrace.storage.segments import retention
from headrace.virtual.disk import VirtualDisk

Plant = Callable[[ExitStack], None]
PLANTS: dict[str, Plant] = {}
FOUND_BY_TESTS: dict[str, str] = {}
"""Those whose harm the simulator hardly ever meets, and the test that finds them."""


def plant(what: Plant) -> Plant:
    PLANTS[what.__name__] = what
    return what


def found_by(test: str) -> Callable[[Plant], Plant]:
    """The test that has to find it instead of the simulator."""

    def noted(what: Plant) -> Plant:
        FOUND_BY_TESTS[what.__name__] = test
        return what

    return noted


@contextmanager
def planted(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        PLANTS[name](stack)
        yield


def swap(stack: ExitStack, owner: Any, name: str, value: object) -> None:
    stack.enter_context(patch.object(owner, name, value))


@plant
def acknowledge_before_the_sync(stack: ExitStack) -> None:
    """A topic with durability disk counts what is written, here and at the followers."""
    init = LeaderCore.__init__

    def built(self: LeaderCore, *args: Any, **named: Any) -> None:
        init(self, *args, **{**named, "flush_required": False})

    swap(stack, LeaderCore, "__init__", built)
    swap(stack, Partition, "local_position", lambda self: self.log.written_offset)
    swap(stack, FollowedPartition, "may_wait", lambda self: False)


@plant
def start_without_comparing_epochs(stack: ExitStack) -> None:
    """A follower whose log is not longer than the leader's begins to copy at its own end."""
    answer = subscriptions.answer

    def told(asked: Subscribe, log: Log, watermark: int) -> Answer:
        if log.start_offset <= asked.end <= log.end_offset:
            return Start(asked.subscription, asked.epoch, asked.end, watermark, log.start_offset)
        return answer(asked, log, watermark)

    swap(stack, subscriptions, "answer", told)


@plant
def watermark_ignores_a_member(stack: ExitStack) -> None:
    """The last member of the set is not waited for."""
    recount = LeaderCore._update_quorum

    def counted(self: LeaderCore) -> None:
        recount(self)
        if self.needed_followers is not None:
            self.needed_followers = self.needed_followers[:-1]

    swap(stack, LeaderCore, "_update_quorum", counted)


@plant
def elect_outside_the_set(stack: ExitStack) -> None:
    """The first replica that is alive leads, in sync or not."""
    decide, led = controller_core._decide, controller_core._led
    images: list[Image] = []

    def deciding(image: Image, *args: Any) -> Any:
        images[:] = [image]
        return decide(image, *args)

    def elected(state: PartitionState, judged: Eligibility, successors: Sequence[int]) -> PartitionState:
        after = led(state, judged, successors)
        brokers = images[0].brokers
        if state.leader in brokers and state.leader in after.isr:
            return after
        best = next((broker for broker in state.replicas if broker in brokers), NO_LEADER)
        if best in (NO_LEADER, after.leader):
            return after
        members = {**after.incarnations, best: brokers[best].incarnation}
        epoch = state.leader_epoch + 1
        return replace(after, leader=best, leader_epoch=epoch, isr=tuple(members), incarnations=members)

    swap(stack, controller_core, "_decide", deciding)
    swap(stack, controller_core, "_led", elected)


@plant
def truncate_to_the_watermark(stack: ExitStack) -> None:
    """A follower drops all that it does not know to be committed before it asks, as Kafka did before KIP-101."""
    ask = FollowedPartition.ask

    def asked(self: FollowedPartition, subscription: int) -> Subscribe:
        held = self.partition.log
        if self.partition.high_watermark < held.end_offset:
            held.truncate(self.partition.high_watermark)
            self.partition.truncated()
        return ask(self, subscription)

    swap(stack, FollowedPartition, "ask", asked)


@plant
def join_below_the_epoch_start(stack: ExitStack) -> None:
    """A follower that has the leader's watermark is in sync, whatever the epoch began with."""

    def may_join(self: LeaderCore, broker: int, follower: FollowerState, *_: Any) -> bool:
        position = follower.flushed if self.flush_required else follower.written
        return broker in self.replicas and position >= min(self.high_watermark, self.epoch_start)

    swap(stack, LeaderCore, "_judge_candidate", may_join)


@plant
@found_by("tests/partitions/test_leader_core.py")
def keep_positions_from_before_a_cut(stack: ExitStack) -> None:
    """What a follower told in an earlier subscription still counts."""
    subscribed = LeaderCore.subscribed

    def kept(self: LeaderCore, broker: int, *args: Any) -> FollowerState:
        before = self.followers.get(broker)
        follower = subscribed(self, broker, *args)
        if before is not None:
            follower.received, follower.written, follower.flushed = before.received, before.written, before.flushed
            follower.below_committed = False
        return follower

    heard = LeaderCore.position_reported

    def higher(
        self: LeaderCore, follower: FollowerState, received: int, written: int, flushed: int, *rest: Any
    ) -> bool:
        received, written = max(received, follower.received), max(written, follower.written)
        return heard(self, follower, received, written, max(flushed, follower.flushed), *rest)

    swap(stack, LeaderCore, "subscribed", kept)
    swap(stack, LeaderCore, "position_reported", higher)


@plant
def ignore_the_incarnation(stack: ExitStack) -> None:
    """A broker that returns is the member that it was, whatever its machine has lost."""
    swap(stack, eligibility, "carries_over", lambda *_: True)


@plant
def use_the_proposed_set_alone(stack: ExitStack) -> None:
    """While a change of the set is not answered, the watermark needs the new set only."""
    recount = LeaderCore._update_quorum

    def counted(self: LeaderCore) -> None:
        members, proposed = self.isr, self.proposed_isr
        if proposed is not None:
            self.isr, self.proposed_isr = dict(proposed), None
        recount(self)
        self.isr, self.proposed_isr = members, proposed

    swap(stack, LeaderCore, "_update_quorum", counted)


@plant
def control_without_fence(stack: ExitStack) -> None:
    """Who was elected controller once stays it in its own eyes, and its writes compare nothing."""
    in_transactions = controller_core.in_transactions

    def unfenced(*args: Any, **named: Any) -> Iterator[Batch]:
        for batch in in_transactions(*args, **named):
            yield Batch(Step((), batch.step.actions), batch.decisions)

    swap(stack, controller, "in_transactions", unfenced)
    swap(stack, Election, "term", property(lambda self: self._term))


@plant
def acknowledge_a_duplicate_at_once(stack: ExitStack) -> None:
    """A batch that is sent again is answered though the first one is not committed."""
    append, reached = Partition.append, Partition.reached
    duplicates: set[int] = set()

    def appended(self: Partition, *args: Any) -> Any:
        end = self.log.end_offset
        found = append(self, *args)
        duplicates.clear()
        if self.log.end_offset == end:
            duplicates.add(found[1])
        return found

    def is_reached(self: Partition, needed: int, acks: int) -> bool:
        return needed in duplicates or reached(self, needed, acks)

    swap(stack, Partition, "append", appended)
    swap(stack, Partition, "reached", is_reached)


@plant
def read_beyond_the_watermark(stack: ExitStack) -> None:
    """Consumers see what is written, committed or not."""

    def read(self: Partition, offset: int, max_bytes: int, *, warm: bool = False) -> Any:
        return self.log.read(offset, max_bytes, self.log.written_offset, warm=warm)

    swap(stack, Partition, "read", read)


@plant
def keep_the_epoch_of_a_returned_leader(stack: ExitStack) -> None:
    """A leader that restarted goes on in the epoch that it had."""
    led = controller_core._led

    def same_epoch(state: PartitionState, judged: Eligibility, successors: Sequence[int]) -> PartitionState:
        after = led(state, judged, successors)
        if after.leader == state.leader:
            return replace(after, leader_epoch=state.leader_epoch)
        return after

    swap(stack, controller_core, "_led", same_epoch)


@plant
def begin_anew_instead_of_cutting(stack: ExitStack) -> None:
    """A follower that differs drops everything and counts as a member while it copies."""
    answer = subscriptions.answer

    def told(asked: Subscribe, log: Log, watermark: int) -> Answer:
        found = answer(asked, log, watermark)
        if isinstance(found, Start) or asked.last_epoch < 0:
            return found
        return Reset(asked.subscription, asked.epoch, log.start_offset)

    swap(stack, subscriptions, "answer", told)


@plant
def believe_the_page_cache_after_a_failed_sync(stack: ExitStack) -> None:
    """What the last process could not sync is taken for safe because it can be read."""
    swap(stack, rewritten, "write_again", lambda *_: None)


@plant
def take_damage_of_our_own_for_the_leaders(stack: ExitStack) -> None:
    """A follower that cannot append because its own log is damaged waits for better records."""
    swap(stack, follower_session, "UnreadableProducers", StopIteration)  # which no append raises
    swap(stack, rewritten, "write_again", lambda *_: None)


@plant
def note_a_failed_sync_only_when_it_is_heard_of(stack: ExitStack) -> None:
    """A broker that is killed before it hears that its sync failed leaves no word of it."""
    swap(stack, VirtualDisk, "_mark", lambda *_: None)


@plant
def take_damage_for_a_torn_write(stack: ExitStack) -> None:
    """What a start has to cut counts as never synced."""
    swap(stack, shortfall, "doubtful", lambda *_: frozenset())


@plant
def leave_damage_as_it_is(stack: ExitStack) -> None:
    """A replica that finds a damaged place goes on with it."""
    swap(stack, Partition, "found_damage", lambda *_: None)


@plant
def join_by_what_is_only_written(stack: ExitStack) -> None:
    """A follower comes into the set by what it has written, though what is synced counts."""
    may_join = LeaderCore._judge_candidate

    def joins(self: LeaderCore, broker: int, follower: FollowerState, *rest: Any) -> bool:
        flushed, follower.flushed = follower.flushed, follower.written
        try:
            return may_join(self, broker, follower, *rest)
        finally:
            follower.flushed = flushed

    swap(stack, LeaderCore, "_judge_candidate", joins)


@plant
def carry_over_whatever_ran_before(stack: ExitStack) -> None:
    """What a process says of the run before it is taken for the member of the set, whichever incarnation that is."""
    carries_over = eligibility.carries_over

    def carried(broker: Broker, known: str, *rest: Any) -> bool:
        return carries_over(broker, known and broker.previous.incarnation if broker.previous else known, *rest)

    swap(stack, eligibility, "carries_over", carried)


@plant
def count_a_sync_across_a_cut(stack: ExitStack) -> None:
    """A sync that was under way when the log was cut counts for what was written in its place."""
    done = GroupCommit._done

    def counted(self: GroupCommit, targets: list[Any], *rest: Any) -> None:
        done(self, [target._replace(truncations=target.log.truncations) for target in targets], *rest)

    swap(stack, GroupCommit, "_done", counted)


@plant
def tell_written_as_flushed_at_first(stack: ExitStack) -> None:
    """The first position after a subscription tells what is written as synced."""
    position = FollowedPartition.position

    def told(self: FollowedPartition) -> Position | None:
        first = self.told is None
        found = position(self)
        if not first or found is None:
            return found
        subscription, epoch, received, written, _, start = found
        return subscription, epoch, received, written, written, start

    swap(stack, FollowedPartition, "position", told)


@plant
def retention_without_the_followers(stack: ExitStack) -> None:
    """A leader's retention deletes at once, whatever its followers have."""
    lead = Partitions.lead

    def led(self: Partitions, log: Log, *args: Any, **named: Any) -> Partition:
        found = lead(self, log, *args, **named)
        log.retire = log.delete_before
        return found

    swap(stack, Partitions, "lead", led)


@plant
@found_by("tests/storage/test_committed.py")
def compact_what_is_not_committed(stack: ExitStack) -> None:
    """Compaction goes by everything that is written, though a truncation may take it."""
    swap(stack, LocalLog, "deletable_below", lambda self: self.written_offset)


@plant
def prefer_a_leader_outside_the_set(stack: ExitStack) -> None:
    """The first replica is elected by hand as soon as it is alive, in the set or not."""
    decide = controller_core._decide
    images: list[Image] = []

    def deciding(image: Image, *args: Any) -> Any:
        images[:] = [image]
        return decide(image, *args)

    def preferred(state: PartitionState, _: Eligibility) -> PartitionState:
        first, brokers = state.replicas[0], images[0].brokers
        if state.leader == first or first not in brokers:
            return state
        members = {**state.incarnations, first: brokers[first].incarnation}
        epoch = state.leader_epoch + 1
        return replace(state, leader=first, leader_epoch=epoch, isr=tuple(members), incarnations=members)

    swap(stack, controller_core, "_decide", deciding)
    swap(stack, controller_core, "_preferred", preferred)


@plant
def go_on_with_older_metadata(stack: ExitStack) -> None:
    """Nobody doubts metadata that goes back."""
    swap(stack, MetadataWatch, "_raise_doubt", lambda *_: None)


@plant
def accept_metadata_with_its_epochs(stack: ExitStack) -> None:
    """Elections go on from the epochs of accepted metadata, which others have used since the copy."""
    swap(stack, lineage, "EPOCHS_ABOVE", 0)


@plant
@found_by("tests/cluster/test_lineage.py")
def accept_the_sets_of_older_metadata(stack: ExitStack) -> None:
    """Accepted metadata holds as it is: sets and leaders with it."""

    def led(state: PartitionState) -> PartitionState:
        return replace(state, leader_epoch=state.leader_epoch + lineage.EPOCHS_ABOVE)

    swap(stack, lineage, "_open", led)


@plant
def retention_takes_a_segment_too_many(stack: ExitStack) -> None:
    """A segment more goes than the topic's settings let go, of a shared log as much."""
    unwanted, unwanted_runs = retention._unwanted, shared_retention._unwanted

    def segments(log: Any, now_ms: int) -> int:
        count = unwanted(log, now_ms)
        return min(count + 1, len(log.segments) - 1) if count else 0

    def runs(queue: Any, start_offset: int, oldest_ms: int, surplus: int, changed: Any) -> Any:
        found = unwanted_runs(queue, start_offset, oldest_ms, surplus, changed)
        return unwanted_runs(queue, start_offset, oldest_ms, surplus + 1024, changed) if found else found

    swap(stack, retention, "_unwanted", segments)
    swap(stack, shared_retention, "_unwanted", runs)


@plant
def compaction_drops_the_last_of_a_key(stack: ExitStack) -> None:
    """Of each key's records none stays that one of the same cleaning does not follow."""
    stays = CompactionFilter._stays

    def kept(self: CompactionFilter, offset: int, key: bytes | None, is_tombstone: bool) -> bool:
        if key is not None and self._latest.get(compaction._short(key)) == offset:
            return False
        return stays(self, offset, key, is_tombstone)

    swap(stack, CompactionFilter, "_stays", kept)


@plant
@found_by("tests/partitions/test_roles.py")
def count_what_is_written_after_a_change_to_disk(stack: ExitStack) -> None:
    """A leader whose topic comes to ask for syncs goes on counting what is written."""
    changed = LeaderCore.durability_changed

    def kept(self: LeaderCore, *, flush_required: bool, position: int) -> bool:
        return False if flush_required else changed(self, flush_required=False, position=position)

    position = Partition.local_position

    def local(self: Partition) -> int:
        written = self.core is not None and not self.core.flush_required
        return self.log.written_offset if written else position(self)

    swap(stack, LeaderCore, "durability_changed", kept)
    swap(stack, Partition, "local_position", local)


@plant
def offsets_of_an_earlier_topic_of_the_name(stack: ExitStack) -> None:
    """What was committed for a topic is answered for the next one of its name."""
    swap(stack, OffsetAndMetadata, "is_of", lambda *_: True)


@plant
def keep_what_was_deleted_while_away(stack: ExitStack) -> None:
    """A broker that starts sets logs of deleted topics aside, as if nobody had deleted them."""
    swap(stack, folder, "remove_deleted", lambda *_: None)
