"""All partitions of this broker, and the turn: append many, write once, answer many.

The front ends append during a turn and call `end_turn`. It writes what was staged in one go, moves watermarks, lets the
links to other brokers have what was written, and answers. Waiting fetches are woken once, after everything that is
being worked on now, however many appends there were.

A replica leads, follows, or stands by without a leader. `find` and `get` answer leaders; `find_replica` answers any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from headrace.errors import HeadraceError, NotLeader, RequestTimedOut, UnknownPartition
from headrace.metrics import TopicTraffic
from headrace.partitions.deadlines import Deadlines
from headrace.partitions.early_refusals import EarlyRefusals
from headrace.partitions.leader_core import IsrChange, LeaderCore
from headrace.partitions.partition import COMMITTED, Appended, Partition, ProduceWaiter, sequenced
from headrace.ports.clock import Clock
from headrace.records.batch import BatchHeader
from headrace.storage.log import Log, LogStore, TopicPartition

if TYPE_CHECKING:
    from headrace.partitions.recompression import Recompression

Failures = dict[TopicPartition, HeadraceError]
Submitted = Callable[[HeadraceError | None, int], None]


class Links(Protocol):
    """Who carries partitions to and from other brokers; hears of those that are `replicated`."""

    def written(self, partition: Partition) -> None:
        """Something was written to its log in this turn."""
        ...

    def rose(self, partition: Partition) -> None:
        """The watermark of a leader rose, or the start that it wants."""
        ...

    def durable(self, partition: Partition) -> None:
        """A sync has come back."""
        ...

    def end_turn(self) -> None:
        """Send what this turn has brought."""
        ...

    def closed(self, partition: Partition) -> None:
        """Its role has ended."""
        ...


class Partitions:
    def __init__(
        self,
        store: LogStore,
        clock: Clock,
        broker: int,
        incarnation: str = "",
        watermarks: Mapping[tuple[bytes, int], int] | None = None,
    ) -> None:
        self.store = store
        self.clock = clock
        self.broker = broker
        self.incarnation = incarnation
        self.deadlines = Deadlines(clock)
        self.links: Links | None = None
        self.recompression: Recompression | None = None
        """Who stores batches in their topic's codec; without one they are stored as they come."""
        self.racks: dict[int, str] = {}
        """Where each broker stands, for the policy `racks`; whoever knows the cluster keeps it up to date."""
        self.damaged: dict[Partition, int] = {}
        """Replicas with a place that cannot be read, and its offset."""
        self.unable: set[Partition] = set()
        """Leaders that cannot do what is asked of them, though their logs are not known to be damaged: another replica
        should lead, if one can."""
        self.traffic: dict[str, TopicTraffic] = {}
        """By topic, as long as a replica of it is held here."""
        self._watermarks = dict(watermarks or {})
        """Of logs that are not served, as far as they are known."""
        self._early = EarlyRefusals()
        self._replicas: dict[str, dict[int, Partition]] = {}
        self._leading: dict[str, dict[int, Partition]] = {}
        self._by_log: dict[Log, Partition] = {}
        self._by_id: dict[tuple[bytes, int], Partition] = {}
        self._touched: dict[Partition, None] = {}
        self._grown: dict[Partition, None] = {}
        self._waking = False
        self._after_turn: list[Callable[[Failures], None]] = []
        store.on_durable(self._durable)

    def __iter__(self) -> Iterator[Partition]:
        return iter(list(self._by_log.values()))

    def __len__(self) -> int:
        return len(self._by_log)

    def find(self, topic: str, index: int) -> Partition | None:
        """The partition, if this broker leads it."""
        of_topic = self._leading.get(topic)
        return of_topic.get(index) if of_topic is not None else None

    def find_replica(self, topic: str, index: int) -> Partition | None:
        """The partition, if this broker holds a replica of it, whatever its role."""
        of_topic = self._replicas.get(topic)
        return of_topic.get(index) if of_topic is not None else None

    def get(self, topic: str, index: int) -> Partition:
        partition = self.find(topic, index)
        if partition is None:
            if self.find_replica(topic, index) is not None:
                raise NotLeader(f"this broker does not lead {topic}-{index}")
            raise UnknownPartition(f"there is no partition {topic}-{index} on this broker")
        return partition

    def find_by_id(self, topic_id: bytes, index: int) -> Partition | None:
        """A replica by its topic's id, which tells a topic from another one that had its name."""
        return self._by_id.get((topic_id, index))

    def refuse(self, topic: str | bytes, index: int, records: memoryview) -> None:
        """This broker does not lead the partition of the topic with this name or id, as far as it has heard: what the
        producer of the batch sent behind it must not come before it, should that change now."""
        replica = self.find_replica(topic, index) if isinstance(topic, str) else self.find_by_id(topic, index)
        if replica is not None:
            replica.refuse(records)
        elif (header := sequenced(records)) is not None:
            self._early.note((topic, index), header, self.clock.now())

    # Roles.

    def lead(
        self,
        log: Log,
        epoch: int,
        isr: Mapping[int, str],
        replicas: Sequence[int] = (),
        revision: int = 0,
        adding: Sequence[int] = (),
        least_start: int = 0,
    ) -> Partition:
        """Serve a log as its leader in this epoch, with the in-sync set of its key's revision. What a leader alone
        holds counts as committed, and so does what lies below `least_start`: others have deleted it, and it goes here
        too before any start is told. Led already in this epoch: only the set is taken over."""
        current = self._by_log.get(log)
        if current is not None and current.core is not None and current.epoch == epoch:
            self.confirmed(current, isr, revision)
            return current
        told_start = max(0, current.start_offset) if current is not None and current.core is not None else 0
        watermark = self._end_role(log)
        least_start = min(least_start, log.written_offset)
        watermark = max(watermark, least_start)
        core = LeaderCore(
            self.broker,
            epoch,
            log.end_offset,
            watermark,
            isr,
            log.settings.min_insync_replicas,
            replicas=replicas,
            adding=adding,
            flush_required=log.settings.durability == "disk",
            revision=revision,
            now=self.clock.now(),
            own_start=max(log.start_offset, least_start),
            told_start=told_start,
        )
        where = log.topic_partition
        partition = Partition(
            log,
            epoch,
            self.broker,
            watermark,
            self.clock.wall_ms,
            core,
            self.racks,
            self.damaged,
            self._traffic_of(where.topic),
        )
        self._leading.setdefault(where.topic, {})[where.partition] = partition
        self._serve(partition, current)
        log.retire = partial(self.delete_before, partition)
        partition.advance()
        if current is not None:
            current.release_readers()
        return partition

    def follow(self, log: Log, epoch: int, leader: int) -> Partition:
        """Hold a log as a follower of this leader in this epoch; a leader of -1: nobody leads it now."""
        current = self._by_log.get(log)
        if current is not None and current.core is None and (current.epoch, current.leader) == (epoch, leader):
            return current
        watermark = self._end_role(log)
        partition = Partition(
            log,
            epoch,
            leader,
            watermark,
            self.clock.wall_ms,
            damaged=self.damaged,
            traffic=self._traffic_of(log.topic_partition.topic),
        )
        log.retire = _leave
        self._serve(partition, current)
        if current is not None:
            current.release_readers()
        return partition

    def drop(self, topic_partition: TopicPartition, error: HeadraceError | None = None) -> None:
        """Stop serving a partition and answer who waits for it. Its watermark is remembered: its log may stay."""
        partition = self.find_replica(topic_partition.topic, topic_partition.partition)
        if partition is not None:
            gone = error or NotLeader(f"{topic_partition}: not served here any more")
            key = partition.log.topic_id, topic_partition.partition
            self._watermarks[key] = self._end_role(partition.log, gone)
            partition.release_readers()
            self.damaged.pop(partition, None)
            if topic_partition.topic not in self._replicas:
                self.traffic.pop(topic_partition.topic, None)

    def _traffic_of(self, topic: str) -> TopicTraffic:
        return self.traffic.setdefault(topic, TopicTraffic())

    def _serve(self, partition: Partition, before: Partition | None) -> None:
        where = partition.topic_partition
        self._replicas.setdefault(where.topic, {})[where.partition] = partition
        self._by_log[partition.log] = self._by_id[partition.log.topic_id, where.partition] = partition
        partition.log.on_damage = partition.found_damage
        known = self.damaged.pop(before, None) if before is not None else partition.log.first_damaged_offset()
        if known is not None:
            partition.found_damage(known)
        self._early.tell(partition.log, self.clock.now())

    def _end_role(self, log: Log, error: HeadraceError | None = None) -> int:
        """Answer every producer that waits for the log in its old role, before anything of the next one exists; answers
        where its watermark stands."""
        partition = self._by_log.get(log)
        where = log.topic_partition
        if partition is None:
            watermark = self._watermarks.get((log.topic_id, where.partition), log.start_offset)
        else:
            if partition in self._touched:
                self.end_turn()
            watermark = partition.high_watermark
            partition.close(error)
            log.retire, log.retiring_to = _leave, 0
            if self.links is not None:
                self.links.closed(partition)
            self._grown.pop(partition, None)
            self.unable.discard(partition)
            del self._by_log[log]
            self._by_id.pop((log.topic_id, where.partition), None)
            for by_name in (self._replicas, self._leading):
                of_topic = by_name.get(where.topic)
                if of_topic is not None and of_topic.get(where.partition) is partition:
                    del of_topic[where.partition]
                    if not of_topic:
                        del by_name[where.topic]
        return max(log.start_offset, min(watermark, log.end_offset))

    def watermarks(self) -> Iterator[tuple[bytes, int, int]]:
        """Topic id, partition and watermark of every replica and of logs that are not served, to be kept over a
        restart."""
        for log in self.store.logs():
            partition, key = self._by_log.get(log), (log.topic_id, log.topic_partition.partition)
            if partition is not None:
                yield *key, partition.high_watermark
            elif key in self._watermarks:
                yield *key, self._watermarks[key]

    # The turn.

    def touch(self, partition: Partition) -> None:
        """Something was appended to it in this turn."""
        self._touched[partition] = None

    def at_turn_end(self, call: Callable[[Failures], None]) -> None:
        """Run once when what is staged now has been written, with the logs that could not be."""
        self._after_turn.append(call)

    def submit(
        self,
        partition: Partition,
        batch: bytearray,
        acks: int,
        timeout_ms: int,
        done: Submitted,
        *,
        recompress: bool = False,
        own: BatchHeader | None = None,
    ) -> None:
        """Append one ready-made batch; the caller ends the turn when it has submitted all. What comes from users is
        stored in its topic's codec (`recompress`); what the broker keeps for itself is stored as it is, and with `own`,
        its header, not checked again (`Partition.append`)."""
        Submission(self, partition, acks, timeout_ms, done).start(batch, recompress=recompress, own=own)

    def submit_marker(
        self, partition: Partition, append: Callable[[], Appended], timeout_ms: int, done: Submitted
    ) -> None:
        """Have the end of a transaction appended, by `Partition.append_marker`, and answered when it is below the high
        watermark; the caller ends the turn."""
        Submission(self, partition, COMMITTED, timeout_ms, done).start_with(append)

    def end_turn(self) -> None:
        """Write all that was staged, then answer. An answer may begin and end another turn within this one, so
        what belongs to this one is taken out first: its calls must hear its own failures."""
        calls, self._after_turn = self._after_turn, []
        failures: Failures = {}
        if self._touched:
            touched, self._touched = self._touched, {}
            for log, error in self.store.write_staged():
                failures[log.topic_partition] = error
            links = self.links
            if links is not None:
                for partition in touched:
                    if partition.replicated:
                        links.written(partition)
                links.end_turn()
            for partition in touched:
                if partition.advance():
                    self._rose(partition)
        for call in calls:
            call(failures)

    def _durable(self, log: Log) -> None:
        partition = self._by_log.get(log)
        if partition is None:
            return
        if log.offline is not None:
            partition.failed(log.offline)
        elif partition.advance():
            self._rose(partition)
        if partition.replicated and self.links is not None:
            self.links.durable(partition)

    def settle(self, partition: Partition) -> None:
        """The leader's core has taken something in: answer who can be answered by it."""
        if partition.settle():
            self._rose(partition)

    def told(self, partition: Partition, watermark: int) -> None:
        """A follower's leader told its watermark."""
        if partition.told(watermark):
            self._rose(partition)

    def _rose(self, partition: Partition) -> None:
        if partition.has_readers:
            self._wake_later(partition)
        if partition.replicated and partition.core is not None and self.links is not None:
            self.links.rose(partition)

    # The start.

    def delete_before(self, partition: Partition, offset: int, waiter: ProduceWaiter | None = None) -> None:
        """Have a led partition begin at this offset. Its followers hear of it now; this broker's own log follows when
        all that are in sync have that start, and then `waiter.passed()` runs."""
        partition.want_start(offset, self.clock.now())
        if waiter is not None:
            partition.wait_for_start(offset, waiter)
        self.settle(partition)
        if partition.replicated and self.links is not None:
            self.links.rose(partition)

    # The in-sync set.

    def settings_changed(self, partition: Partition) -> None:
        """The topic's settings were altered: what waited for more replicas, or for a sync, may count now."""
        core, log, settings = partition.core, partition.log, partition.log.settings
        flush_required = settings.durability == "disk"
        self.store.settings_changed(log.topic_partition)
        if flush_required and log.offline is None and log.durable_offset < log.written_offset:
            log.sync_soon()  # no write may come to ask for it
        if core is not None:
            core.min_isr_changed(settings.min_insync_replicas)
            core.durability_changed(flush_required=flush_required, position=partition.local_position())
            partition.settings_changed()
            if partition.advance():
                self._rose(partition)
            self._set_changed(partition)

    def replicas_changed(self, partition: Partition, replicas: Sequence[int], adding: Sequence[int] = ()) -> None:
        core = partition.core
        if core is not None and (core.replicas, core.adding) != (tuple(replicas), tuple(adding)):
            core.replicas_changed(replicas, adding)
            self._set_changed(partition)

    def proposed(self, partition: Partition, change: IsrChange) -> None:
        """A change of the set is about to be written: from now on the watermark needs both sets."""
        if partition.core is not None:
            partition.core.proposed(change)

    def confirmed(self, partition: Partition, isr: Mapping[int, str], revision: int) -> None:
        """The set as its key has it at this revision."""
        if partition.core is not None:
            partition.core.confirmed(isr, revision)
            self._set_changed(partition)

    def refused(self, partition: Partition) -> None:
        """The proposed change was not made and never will be."""
        if partition.core is not None:
            partition.core.refused(self.clock.now())
            self._set_changed(partition)

    def _set_changed(self, partition: Partition) -> None:
        self.settle(partition)
        partition.too_few()

    def _wake_later(self, partition: Partition) -> None:
        self._grown[partition] = None
        if not self._waking:
            self._waking = True
            self.clock.call_soon(self._wake)

    def _wake(self) -> None:
        self._waking = False
        grown, self._grown = self._grown, {}
        for partition in grown:
            partition.wake()


def _leave(_offset: int) -> None:
    """Retention of a log that this broker does not lead: its leader says where it begins."""


class Submission:
    """One batch that the broker itself appends: a group's offsets, a message that came by HTTP. The same road as a
    producer's batch: staged, written at the end of the turn, answered when it counts for its acks. Calls
    `done(error, base_offset)` exactly once, on the loop."""

    __slots__ = ("_acks", "_appended", "_done", "_partition", "_partitions", "_timeout_ms", "answered")

    def __init__(
        self, partitions: Partitions, partition: Partition, acks: int, timeout_ms: int, done: Submitted
    ) -> None:
        self.answered = False
        self._partitions = partitions
        self._partition = partition
        self._acks = acks
        self._timeout_ms = timeout_ms
        self._done = done
        self._appended: Appended | None = None

    def start(self, batch: bytearray, *, recompress: bool, own: BatchHeader | None) -> None:
        view, recompression = memoryview(batch), self._partitions.recompression
        try:
            if recompress and recompression is not None and self._partition.stored_otherwise(view):
                recompression.submit(self._partition, view, self._acks, self._recompressed)
                return
        except HeadraceError as error:
            self._answer(error)
            return
        self.start_with(lambda: self._partition.append(view, self._acks, own))

    def start_with(self, append: Callable[[], Appended]) -> None:
        """With what stages it, or finds that it is there already."""
        try:
            self._appended = append()
        except HeadraceError as error:
            self._answer(error)
            return
        self._partitions.touch(self._partition)
        self._partitions.at_turn_end(self._written)

    def _recompressed(self, outcome: Appended | HeadraceError) -> None:
        if isinstance(outcome, HeadraceError):
            self._answer(outcome)
        else:
            self._appended = outcome
            self._partitions.at_turn_end(self._written)

    def _written(self, failures: Failures) -> None:
        assert self._appended is not None
        error = failures.get(self._partition.topic_partition)
        if error is not None or self._acks == 0:
            self._answer(error)
        elif self._partition.reached(self._appended[1], self._acks):
            self._answer(None)
        else:
            self._partition.wait(self._appended[1], self._acks, self)
            deadlines = self._partitions.deadlines
            deadlines.add(self._partitions.clock.now() + self._timeout_ms / 1000, self)

    def passed(self) -> None:
        self._answer(None)

    def failed(self, topic_partition: TopicPartition, error: HeadraceError) -> None:
        self._answer(error)

    def expire(self) -> None:
        where = self._partition.topic_partition
        self._answer(RequestTimedOut(f"{where}: not committed within {self._timeout_ms} ms; it may be later"))

    def _answer(self, error: HeadraceError | None) -> None:
        if not self.answered:
            self.answered = True
            self._done(error, self._appended[0] if self._appended is not None else -1)
