"""One share partition where its data partition is led, in one epoch of that lead.

It is loaded from whoever keeps its state, which fences those who led before. From then on `core` decides in memory, and
one write at a time has what it decided; what comes meanwhile goes with the next. Deliveries and answers leave when the
write that has them is kept. If one fails, nobody knows what of it is kept: memory is dropped, all who wait for it hear
so, and after a pause it is loaded again. What was kept and not told is a lock that nobody knows of; it ends with its
time. So a record may be delivered again although it was delivered when its lock has expired, its member has released
it or has ended its session, or its acknowledgement was answered with an error; and in no other case.

Locks end by the wall clock of the leader as it was at its start, and go on from there: nobody's setting of the clock
makes them longer or shorter. The next leader ends them by its own clock, at most `lock_max_ms` later. The same holds
for waits of records that were given back (share.retry.backoff.ms), which last at most as long as the longest of them.

Records that the group has given up wait here for their dead letters to be written (`letter_delivery`). The next leader
goes on with that when it loads the share partition: when a member of the group first fetches there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Protocol

from headrace.coordinators.alarms import NEVER, Alarms
from headrace.coordinators.wall import Wall
from headrace.errors import ErrorCode, HeadraceError
from headrace.partitions.partition import Partition
from headrace.ports.clock import Clock
from headrace.ports.disk import Disk
from headrace.queues.dead_letter_topics import DeadLetterTopics
from headrace.queues.letter_delivery import LetterDelivery
from headrace.queues.log_read import readable_end
from headrace.queues.messages import (
    NO_OFFSET,
    CodeHeard,
    Persister,
    RecordsWaiter,
    ShareGroupConfig,
    SharePartitionKey,
    ShareState,
)
from headrace.queues.offset_reset import initial_offset
from headrace.queues.share_partition import NEVER_MS, DeliveryCounts, SharePartition
from headrace.records.isolation import Isolation

log = logging.getLogger(__name__)

PAUSE_LEAST_SECONDS: Final = 0.05
PAUSE_MOST_SECONDS: Final = 2.0
"""Before what could not be loaded or kept is loaded again."""
HELD_MAX: Final = 1000
"""Requests that wait for one load."""
UNKEPT_MAX: Final = 10_000
"""Answers that wait for one share partition's next write."""
TIDY_WAITS_LEAST: Final = 64

TOLD: Final = {
    ErrorCode.FENCED_LEADER_EPOCH: ErrorCode.NOT_LEADER_OR_FOLLOWER,
    ErrorCode.FENCED_STATE_EPOCH: ErrorCode.LEADER_NOT_AVAILABLE,
    ErrorCode.NOT_LEADER_OR_FOLLOWER: ErrorCode.NOT_LEADER_OR_FOLLOWER,
    ErrorCode.GROUP_ID_NOT_FOUND: ErrorCode.GROUP_ID_NOT_FOUND,
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
}
"""What members hear when the state cannot be loaded or kept; of everything else that they may try again."""
TRY_AGAIN: Final = ErrorCode.LEADER_NOT_AVAILABLE


class Broker(Protocol):
    """What it needs of the broker that leads it."""

    clock: Clock
    wall: Wall
    alarms: Alarms
    persister: Persister
    disk: Disk
    dead_letters: DeadLetterTopics | None
    """None: this broker leads nothing, and writes none."""

    def config_of(self, group: str) -> ShareGroupConfig: ...

    def dropped(self, led: LedSharePartition) -> None:
        """Nobody waits for it, and it has no state: it need not be remembered."""
        ...


class Wait:
    """A share fetch that waits for records, of several partitions perhaps."""

    __slots__ = ("_waiter", "heard")

    def __init__(self, waiter: RecordsWaiter) -> None:
        self._waiter = waiter
        self.heard = False

    @property
    def is_over(self) -> bool:
        return self.heard or self._waiter.answered

    def hear(self) -> None:
        if not self.is_over:
            self.heard = True
            self._waiter.records_available()


class LedSharePartition:
    """`gone` is true when the data partition is not led in this epoch any more."""

    def __init__(self, key: SharePartitionKey, partition: Partition, broker: Broker, counts: DeliveryCounts) -> None:
        self.key = key
        self.partition = partition
        self.core: SharePartition | None = None
        """None until it is loaded."""
        self.fault = ErrorCode.NONE
        """Why it could not be loaded or kept, until it is loaded again."""
        self.gone = False
        self.answered = True
        """As who waits for data: nobody waits for records."""
        self._broker = broker
        self._counts = counts
        self._loading = self._pausing = self._writing = self._write_due = self._wake_due = False
        self._pause_seconds = PAUSE_LEAST_SECONDS
        self._doubted = False
        """What is kept may have been set anew: it is read again when all that is decided is kept."""
        self._held: list[Callable[[], None]] = []
        """What is done when it is loaded, or cannot be."""
        self._unkept: list[CodeHeard] = []
        """Who hears when everything that is decided now is kept."""
        self._under_way: list[CodeHeard] = []
        """Who hears when the write that is under way is kept."""
        self._to_release: set[str] = set()
        """Members whose sessions ended while it was not loaded."""
        self._barren: tuple[int, int] | None = None
        """Where a read from the first available record on to the end of what is readable found nothing."""
        self._waits: dict[Wait, None] = {}
        self._tidy_waits_at = TIDY_WAITS_LEAST
        self._letters: LetterDelivery | None = None
        if broker.dead_letters is not None:
            self._letters = LetterDelivery(self, broker.dead_letters, broker.disk, broker.clock, counts)
        self._letters_wait = self._letters_taken = False
        """Whether dead letters are to be written by what is kept, or may be; and by what is being kept."""

    @property
    def config(self) -> ShareGroupConfig:
        """What holds now. Who reads a topic of dead letters does not write them to the same one."""
        config = self._broker.config_of(self.key.group)
        if config.dead_letter_topic and (
            self._letters is None or config.dead_letter_topic == self.partition.topic_partition.topic
        ):
            return replace(config, dead_letter_topic="")
        return config

    @property
    def is_idle(self) -> bool:
        """It can be loaded again as it is."""
        at_work = self._loading or self._writing or self._write_due or self._held or self._unkept or self._to_release
        if at_work or (self.core is not None and self.core.archiving):
            return False
        return all(each.is_over for each in self._waits) and self._next_expiry() == NEVER_MS

    def _next_expiry(self) -> int:
        return NEVER_MS if self.core is None else self.core.next_expiry_ms

    # Loading.

    def load(self) -> None:
        """Unless that is under way, or has just failed."""
        if self._loading or self._pausing or self.core is not None or self.gone:
            return
        self._loading = True
        self._broker.persister.read(self.key, self.partition.epoch, self._read)

    def read_again(self) -> None:
        """A group begins to read here, and meanwhile its start may have been set anew, or its state deleted: nobody
        tells this broker of that, and where there is nothing to acquire no write would find out."""
        if self.core is not None:
            self._doubted = True
            self._write_soon()

    def when_loaded(self, call: Callable[[], None]) -> bool:
        """Call when there is a core, or a fault; now, if one is there. False: too many wait."""
        if self.core is not None or self.fault != ErrorCode.NONE or self.gone:
            call()
        elif len(self._held) >= HELD_MAX:
            return False
        else:
            self._held.append(call)
            self.load()
        return True

    def _read(self, code: int, state: ShareState | None) -> None:
        self._loading = False
        if self.gone:
            return
        if code != ErrorCode.NONE:
            self._fail(code)
            return
        try:
            self.core = self._restored(state or ShareState(0, self.partition.epoch, NO_OFFSET))
        except HeadraceError as error:  # where it begins is not known yet
            self._fail(error.kafka_code)
            return
        self.fault, self._pause_seconds = ErrorCode.NONE, PAUSE_LEAST_SECONDS
        self._release_held()  # who ends its session has acknowledged before that
        for member in self._to_release:
            self.core.release_member(member)
        self._to_release.clear()
        self._letters_wait = self.core.archiving > 0
        self.changed(wakes=True)

    def _restored(self, state: ShareState) -> SharePartition:
        now_ms, config, partition = self._broker.wall.steady_ms(), self.config, self.partition
        kept_start = state.start_offset
        if kept_start == NO_OFFSET:
            kept_start = initial_offset(partition, config.auto_offset_reset, now_ms)
        latest_ms = now_ms + max(config.lock_ms, config.lock_max_ms, *config.retry_backoff_ms)
        batches = [
            replace(batch, until_ms=latest_ms) if batch.until_ms > latest_ms else batch for batch in state.batches
        ]
        core = SharePartition(
            replace(state, leader_epoch=partition.epoch, start_offset=kept_start, batches=tuple(batches)),
            config,
            self._counts,
        )
        if state.start_offset == NO_OFFSET:
            core.keep_start()
        core.log_end(self._certain_end(state.leader_epoch))
        core.log_start(partition.log.start_offset)
        return core

    def _certain_end(self, epoch: int) -> int:
        """Below it the log has what a leader of this epoch had; what it has above is something else."""
        data = self.partition.log
        if epoch >= self.partition.epoch:
            return data.end_offset
        known = data.epoch_end(epoch)
        if known is not None:
            return min(data.end_offset, known.end_offset)
        first = next(iter(data.epoch_starts()), None)  # a later epoch: nothing is left of this one
        return data.end_offset if first is None else max(data.start_offset, first[1])

    def _release_held(self) -> None:
        held, self._held = self._held, []
        for call in held:
            call()

    def _fail(self, code: int) -> None:
        """What is in memory may not be what is kept."""
        told = TOLD.get(code, TRY_AGAIN)
        if self._pause_seconds == PAUSE_LEAST_SECONDS:
            log.info("%s: its state cannot be loaded or kept now, code %d; tried again", self._name, code)
        self.fault = told
        self._forget()
        self._pausing = True
        self._broker.clock.call_later(self._pause_seconds, self._try_again)
        self._pause_seconds = min(2 * self._pause_seconds, PAUSE_MOST_SECONDS)
        unkept, self._unkept = self._unkept, []
        for call in unkept:
            call(told)
        self._release_held()
        if told != TRY_AGAIN:
            self._wake_soon()

    def _forget(self) -> None:
        """What is in memory; what is kept has its locks too."""
        self.core, self._doubted = None, False
        self._broker.alarms.keep(self, NEVER, self._expire)

    def _try_again(self) -> None:
        self._pausing = False
        if self.gone:
            return
        self.fault = ErrorCode.NONE
        self._tidy_waits()
        if self._waits or self._held or self._to_release or self._letters_wait:
            self.load()
        else:
            self.gone = True
            self._broker.dropped(self)

    @property
    def _name(self) -> str:
        return f"share group {self.key.group!r} of {self.partition.topic_partition}"

    def release(self, member: str) -> None:
        """Its session has ended: now, or when this is loaded."""
        if self.core is not None:
            if self.core.release_member(member):
                self.changed(wakes=True)
        elif not self.gone and len(self._to_release) < HELD_MAX:  # else its locks end with their time
            self._to_release.add(member)
            self.load()

    # Keeping.

    def when_kept(self, heard: CodeHeard) -> None:
        """`heard` is told when all that is decided now is kept, or cannot be."""
        if self.gone:
            heard(ErrorCode.NOT_LEADER_OR_FOLLOWER)
        elif self.core is None or len(self._unkept) >= UNKEPT_MAX:
            heard(self.fault or TRY_AGAIN)
        else:
            self._unkept.append(heard)
            self._write_soon()

    def changed(self, *, wakes: bool) -> None:
        """The core has taken something in. `wakes`: others may acquire something now."""
        if self.core is None:
            return
        until_ms = self.core.next_expiry_ms
        if until_ms < NEVER_MS:
            wall, clock = self._broker.wall, self._broker.clock
            seconds = max(0, until_ms - wall.steady_ms()) / 1000
            self._broker.alarms.keep(self, clock.now() + seconds, self._expire)
        self._write_soon()
        if self.core.archiving and self._letters is not None:
            self._letters.look()
        if wakes:
            self._wake_soon()

    def _write_soon(self) -> None:
        """One write has all of this turn."""
        if not self._write_due and not self._writing:
            self._write_due = True
            self._broker.clock.call_soon(self._write)

    def _write(self) -> None:
        self._write_due = False
        if self.core is None or self.gone:
            return
        self._under_way, self._unkept = self._unkept, []
        self._letters_taken = self.core.archiving > 0
        self._letters_wait = self._letters_wait or self._letters_taken
        delta = self.core.take_write()
        if delta is None:
            self._tell_under_way(ErrorCode.NONE)
            if self._doubted and not self._write_due:
                self._forget()
                self.load()
        else:
            self._writing = True
            self._broker.persister.write(self.key, delta, self._written)

    def _written(self, code: int) -> None:
        self._writing = False
        if code == ErrorCode.NONE:
            self._letters_wait = self._letters_taken
            self._tell_under_way(code)
            if not self.gone:
                self._write_soon()
            return
        if code == ErrorCode.FENCED_LEADER_EPOCH:
            code = TRY_AGAIN  # perhaps only by a later load of this broker's own: the next one tells who leads
        if not self.gone:
            self._fail(code)
        self._tell_under_way(TOLD.get(code, TRY_AGAIN))

    def _tell_under_way(self, code: int) -> None:
        told, self._under_way = self._under_way, []
        for heard in told:
            heard(code)

    # Time.

    def _expire(self) -> None:
        core = self.core
        if core is not None:
            core.config = self.config
            self.changed(wakes=core.expire(self._broker.wall.steady_ms()) > 0)

    # Who waits for records.

    def wait(self, wait: Wait) -> None:
        if len(self._waits) >= self._tidy_waits_at:
            self._tidy_waits()
            self._tidy_waits_at = max(TIDY_WAITS_LEAST, 2 * len(self._waits))
        self._waits[wait] = None
        if self.core is None:
            self.load()
        else:
            self._watch()
            if self._has_news():
                self._wake_soon()

    def _tidy_waits(self) -> None:
        self._waits = {each: None for each in self._waits if not each.is_over}

    def _watch(self) -> None:
        """Hear of what is appended, as long as somebody waits for it."""
        if self.answered and self._waits and not self.gone:
            self.answered = False
            self.partition.wait_for_data(self, committed=self.config.isolation is Isolation.COMMITTED)

    def grew(self, _count: int) -> None:
        """See `partitions.partition.FetchWaiter`. Also when the role has ended: then they look elsewhere."""
        if self.core is not None:
            self.core.log_start(self.partition.log.start_offset)
        self._wake()

    def found_nothing(self, offset: int, end: int) -> None:
        """There was nothing to acquire between the first available record and the end of what is readable: compaction
        took it, or it is just being deleted. That is no news until one of them moves."""
        self._barren = offset, end

    def _has_news(self) -> bool:
        core = self.core
        if core is None or self.gone or self.partition.closed is not None:
            return True
        offset = core.first_available()
        try:
            end = readable_end(self.partition, self.config.isolation)
        except HeadraceError:  # who asks for it hears why, or tries again
            return False
        return offset < end and (offset < core.next_offset or core.has_room) and (offset, end) != self._barren

    def _wake_soon(self) -> None:
        if self._waits and not self._wake_due:
            self._wake_due = True
            self._broker.clock.call_soon(self._wake)

    def _wake(self) -> None:
        """Ask those who wait, the first first, as long as there is something; each once."""
        self._wake_due = False
        for wait in list(self._waits):
            if not wait.is_over and not self._has_news():
                break
            self._waits.pop(wait, None)
            wait.hear()
        if not self._waits:
            self.answered = True
            self.partition.stop_waiting(self)
        elif self.core is not None:
            self._watch()

    # The end.

    def resign(self) -> None:
        """The data partition is not led in this epoch any more. What is being written is told as it ends: if it is
        kept, it holds wherever the partition is led next."""
        self.gone = self.answered = True
        self._forget()
        self.partition.stop_waiting(self)
        unkept, self._unkept = self._unkept, []
        for heard in unkept:
            heard(ErrorCode.NOT_LEADER_OR_FOLLOWER)
        self._release_held()
        self._wake_soon()
