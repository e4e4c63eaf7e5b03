"""The share partitions of the data partitions that this broker leads: found by their keys, loaded when they are first
asked for, and let go with the lead. Share fetches and acknowledgements go over several of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Final

from headrace import metrics
from headrace.coordinators.alarms import Alarms
from headrace.coordinators.wall import Wall
from headrace.errors import ErrorCode, HeadraceError, OffsetNotAvailable
from headrace.partitions.partition import Partition
from headrace.partitions.partitions import Partitions
from headrace.ports.disk import Disk
from headrace.queues.dead_letter_topics import DeadLetterTopics
from headrace.queues.led_share_partition import PAUSE_MOST_SECONDS, TRY_AGAIN, LedSharePartition, Wait
from headrace.queues.log_read import LogRead, read_log, readable_end
from headrace.queues.messages import (
    AcknowledgementBatch,
    Acquired,
    AcquireRequest,
    DeliveryState,
    Persister,
    Reason,
    RecordsWaiter,
    ShareGroupConfig,
    SharePartitionKey,
    TopicIdPartition,
)
from headrace.queues.share_partition import DeliveryCounts, SharePartition
from headrace.storage.page_cache import are_warm

SHARE_PARTITIONS_MAX: Final = 100_000
"""In memory; beyond that those that nobody uses have to make room."""
LOOKED_AT_MAX: Final = 100
"""Share partitions that are looked at for one that can make room."""
GROUPS_COUNTED_MAX: Final = 10_000
"""Beyond that, what was counted of groups that have nothing here any more is forgotten."""
READS_PER_TURN: Final = 16
"""Reads of one share fetch that may find nothing but gaps, before others have their turn."""
PLACES_PER_TURN: Final = 1000
"""Partitions that one share fetch looks at, before others have their turn."""
REFUSALS_MAX: Final = 1000
"""Codes that one share fetch is told; it has to ask again for those of the partitions behind them."""

AcquireDone = Callable[[dict[TopicIdPartition, Acquired]], None]
AcknowledgeDone = Callable[[dict[TopicIdPartition, int]], None]


class SharePartitions:
    """`config_of` answers what holds for a group now; it is asked anew for each request."""

    def __init__(
        self,
        partitions: Partitions,
        disk: Disk,
        persister: Persister,
        config_of: Callable[[str], ShareGroupConfig],
        dead_letters: DeadLetterTopics | None = None,
        share_partitions_max: int = SHARE_PARTITIONS_MAX,
    ) -> None:
        self.clock = partitions.clock
        self.disk = disk
        self.persister = persister
        self.dead_letters = dead_letters
        self.wall = Wall(self.clock)
        self.alarms = Alarms(self.clock)
        self._partitions = partitions
        self._config_of = config_of
        self._most = share_partitions_max
        self._led: dict[SharePartitionKey, LedSharePartition] = {}
        self._of_group: dict[str, dict[SharePartitionKey, LedSharePartition]] = {}
        self._counts: dict[str, DeliveryCounts] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._led)

    # Requests.

    def acquire(self, request: AcquireRequest, places: Sequence[TopicIdPartition], done: AcquireDone) -> None:
        """Acquire from these partitions, in this order, until the request has enough. `done` hears once, when all is
        kept: of each place that had something, or a code that will not pass by itself: NOT_LEADER_OR_FOLLOWER,
        UNKNOWN_TOPIC_OR_PARTITION, GROUP_ID_NOT_FOUND, and those of reading the log. Of a place whose state is being
        loaded, or could not be kept, it hears nothing. Nothing at all: `wait`, then ask again."""
        _Acquisition(self, request, places, done).go_on()

    def acknowledge(
        self,
        group: str,
        member: str,
        batches: Mapping[TopicIdPartition, Sequence[AcknowledgementBatch]],
        done: AcknowledgeDone,
    ) -> None:
        """`done` hears a code for each partition, when all is kept: all of a partition's batches were taken, or none.
        INVALID_RECORD_STATE: something is not acquired by this member; INVALID_REQUEST: offsets or types that cannot
        be; NOT_LEADER_OR_FOLLOWER, UNKNOWN_TOPIC_OR_PARTITION, GROUP_ID_NOT_FOUND; LEADER_NOT_AVAILABLE: it may have
        been taken, try again. What is loaded is changed at once: an acquire that follows sees it."""
        codes: dict[TopicIdPartition, int] = {}
        if not batches:
            done(codes)
            return

        def heard(place: TopicIdPartition, code: int) -> None:
            codes[place] = code
            if len(codes) == len(batches):
                done(codes)

        for place, said in list(batches.items()):
            self._acknowledge(SharePartitionKey(group, *place), member, said, partial(heard, place))

    def _acknowledge(
        self,
        key: SharePartitionKey,
        member: str,
        batches: Sequence[AcknowledgementBatch],
        heard: Callable[[int], None],
    ) -> None:
        found = self.find(key)
        if isinstance(found, int):
            heard(found)
            return
        led = found

        def take() -> None:
            core = self.ready_core(led)
            if core is None:
                led.when_kept(heard)  # which it cannot be
                return
            config = core.config
            now_ms = self.wall.steady_ms()
            code = core.acknowledge(member, batches, now_ms + config.lock_ms, now_ms)
            led.changed(wakes=code == ErrorCode.NONE)
            led.when_kept(lambda kept: heard(kept or code))

        if not led.when_loaded(take):
            heard(TRY_AGAIN)

    def wait(self, group: str, places: Iterable[TopicIdPartition], waiter: RecordsWaiter) -> None:
        """`waiter.records_available()` runs, once, when one of them may have something to acquire or to tell. Who has
        waited longest is asked first, and the next one only if there is still something."""
        wait = Wait(waiter)
        for place in places:
            found = self.find(SharePartitionKey(group, *place))
            if not isinstance(found, int):
                found.wait(wait)
            elif found == TRY_AGAIN:
                self.clock.call_later(PAUSE_MOST_SECONDS, wait.hear)
            else:
                self.clock.call_soon(wait.hear)

    def release(self, group: str, member: str) -> None:
        """The member's share session has ended: what it has acquired and not acknowledged goes to others."""
        for led in list(self._of_group.get(group, {}).values()):
            led.release(member)

    def begin(self, group: str) -> None:
        """The group begins to read here: what is in memory of it may be of a time before it was empty."""
        for led in list(self._of_group.get(group, {}).values()):
            led.read_again()

    # Which are led.

    def find(self, key: SharePartitionKey) -> LedSharePartition | int:
        """The share partition, which may have to be loaded; or why there is none here."""
        partition = self._partitions.find_by_id(key.topic_id, key.partition)
        led = self._led.get(key)
        if led is not None and led.partition is partition and partition.leading:
            return led
        if led is not None:
            self._resign(led)
        if partition is None:
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        if not partition.leading or self._closed:
            return ErrorCode.NOT_LEADER_OR_FOLLOWER
        return self._create(key, partition)

    def _create(self, key: SharePartitionKey, partition: Partition) -> LedSharePartition | int:
        if len(self._led) >= self._most and not self._make_room():
            return TRY_AGAIN
        if len(self._counts) >= GROUPS_COUNTED_MAX:
            self._counts = {group: counts for group, counts in self._counts.items() if group in self._of_group}
        led = LedSharePartition(key, partition, self, self._counts.setdefault(key.group, DeliveryCounts()))
        self._led[key] = self._of_group.setdefault(key.group, {})[key] = led
        return led

    def _make_room(self) -> bool:
        """Those that are in use go behind all others: the next one who needs room looks at others."""
        for key, led in list(islice(self._led.items(), LOOKED_AT_MAX)):
            if led.is_idle:
                self._resign(led)
                return True
            self._led[key] = self._led.pop(key)
        return False

    def config_of(self, group: str) -> ShareGroupConfig:
        return self._config_of(group)

    def ready_core(self, led: LedSharePartition) -> SharePartition | None:
        """The core, with the group's configuration and the log's start as they are now."""
        core = led.core
        if core is not None:
            core.config = led.config
            if core.log_start(led.partition.log.start_offset):
                led.changed(wakes=False)
        return core

    def dropped(self, led: LedSharePartition) -> None:
        """See `led_share_partition.Broker`."""
        if self._led.get(led.key) is led:
            del self._led[led.key]
            of_group = self._of_group[led.key.group]
            del of_group[led.key]
            if not of_group:
                del self._of_group[led.key.group]

    def _resign(self, led: LedSharePartition) -> None:
        self.dropped(led)
        led.resign()

    def follow(self) -> None:
        """Leaderships or topics have changed: let go of what is not led here any more."""
        for led in list(self._led.values()):
            if not led.partition.leading:
                self._resign(led)

    def close(self) -> None:
        self._closed = True
        for led in list(self._led.values()):
            self._resign(led)

    def samples(self) -> Iterator[metrics.Sample]:
        yield metrics.Sample(metrics.SHARE_PARTITIONS, (), len(self._led))
        for group, of_group in self._of_group.items():
            cores = [led.core for led in of_group.values() if led.core is not None]
            for state in (DeliveryState.AVAILABLE, DeliveryState.ACQUIRED, DeliveryState.ARCHIVING):
                held = sum([core.in_state(state) for core in cores])
                yield metrics.Sample(metrics.SHARE_RECORDS_HELD, (group, state.name.lower()), held)
        for group, counts in self._counts.items():
            yield metrics.Sample(metrics.SHARE_ACQUIRED, (group,), counts.acquired)
            yield metrics.Sample(metrics.SHARE_REDELIVERED, (group,), counts.redelivered)
            yield metrics.Sample(metrics.SHARE_ACKNOWLEDGED, (group,), counts.acknowledged)
            yield metrics.Sample(metrics.SHARE_RELEASED, (group,), counts.released)
            yield metrics.Sample(metrics.SHARE_EXPIRED, (group,), counts.expired)
            for reason in Reason:
                labels = group, reason.name.lower()
                yield metrics.Sample(metrics.SHARE_ARCHIVED, labels, counts.archived[reason])
            yield metrics.Sample(metrics.SHARE_DEAD_LETTERS, (group,), counts.dead_letters)
            yield metrics.Sample(metrics.SHARE_DEAD_LETTER_FAILURES, (group,), counts.dead_letter_failures)


class _Acquisition:
    """One share fetch, partition after partition, until what it took is kept."""

    def __init__(
        self, owner: SharePartitions, request: AcquireRequest, places: Sequence[TopicIdPartition], done: AcquireDone
    ) -> None:
        self._owner = owner
        self._request = request
        self._places = places
        self._done = done
        self._index = 0
        self._left_records = request.max_records
        self._left_bytes = request.max_bytes
        self._acquired: dict[TopicIdPartition, Acquired] = {}
        self._unkept = 1
        """Partitions of which something was taken that is not kept yet; and itself, while it goes on."""
        self._warm = False
        self._reads = 0
        self._refusals = 0

    def go_on(self) -> None:
        while self._goes_on:
            place = self._places[self._index]
            try:
                if not self._take(place):
                    return
            except OffsetNotAvailable:
                pass  # it will be, some time
            except HeadraceError as error:
                self._refuse(place, error.kafka_code)
            self._index += 1
            self._warm = False
            if self._index % PLACES_PER_TURN == 0 and self._goes_on:
                self._owner.clock.call_soon(self.go_on)
                return
        self._one_less()

    @property
    def _goes_on(self) -> bool:
        has_room = self._left_records > 0 and self._left_bytes > 0 and self._refusals < REFUSALS_MAX
        return has_room and self._index < len(self._places)

    def _take(self, place: TopicIdPartition) -> bool:
        """False: it goes on with this place in a later turn."""
        owner = self._owner
        led = owner.find(SharePartitionKey(self._request.group, *place))
        if isinstance(led, int):
            self._refuse(place, led)
            return True
        core = owner.ready_core(led)
        if core is None:
            self._refuse(place, led.fault)
            led.load()
            return True
        isolation = core.config.isolation
        while True:
            offset, end = core.first_available(), readable_end(led.partition, isolation)
            if offset >= end or (offset == core.next_offset and not core.has_room):
                return True
            most_bytes = min(self._left_bytes, self._request.partition_max_bytes)
            read = read_log(
                led.partition,
                owner.disk,
                offset,
                most_bytes,
                isolation,
                core.next_offset,
                self._left_records,
                warm=self._warm,
            )
            if not isinstance(read, LogRead):
                if are_warm(owner.disk, read, self._warmed):
                    owner.clock.call_soon(self._warmed)
                return False
            if self._left_bytes < self._request.max_bytes and read.least_bytes > self._left_bytes:
                return True
            if self._acquire(place, led, core, offset, read):
                return True
            if core.first_available() == offset:
                led.found_nothing(offset, end)
                return True
            self._reads += 1
            if self._reads % READS_PER_TURN == 0:
                owner.clock.call_soon(self.go_on)
                return False

    def _acquire(
        self, place: TopicIdPartition, led: LedSharePartition, core: SharePartition, offset: int, read: LogRead
    ) -> bool:
        """Whether something was there beside gaps."""
        request = self._request
        records = core.acquire(
            request.member,
            offset,
            read.batches,
            self._left_records,
            self._owner.wall.steady_ms() + core.config.lock_ms,
            record_limit=request.record_limit,
        )
        led.changed(wakes=False)
        if not records:
            return False
        slices = read.slices_of(records)
        acquired = Acquired(ErrorCode.NONE, tuple(records), slices, sum(map(len, slices)))
        self._acquired[place] = acquired
        self._left_records -= acquired.record_count
        self._left_bytes -= acquired.size_bytes
        self._unkept += 1
        led.when_kept(partial(self._kept, place))
        return True

    def _kept(self, place: TopicIdPartition, code: int) -> None:
        if code != ErrorCode.NONE:
            del self._acquired[place]
            self._refuse(place, code)
        self._one_less()

    def _one_less(self) -> None:
        self._unkept -= 1
        if not self._unkept:
            self._done(self._acquired)

    def _refuse(self, place: TopicIdPartition, code: int) -> None:
        if code not in (ErrorCode.NONE, TRY_AGAIN):
            self._acquired[place] = Acquired(code)
            self._refusals += 1

    def _warmed(self) -> None:
        self._warm = True
        self.go_on()
