"""What a follower decides, without I/O: what it asks for, where it cuts, what it tells.

A cut needs no wait for the disk: after a loss of power the log is as it was before the cut or as it was after it, and
a flushed position is told only for what was synced behind the cut.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import Enum
from typing import Final

from headrace.errors import CorruptBatch
from headrace.partitions.log_start import LogStart
from headrace.partitions.partition import Partition
from headrace.records.batch import read_header
from headrace.replication.frames import Position, Subscribe, Truncate

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 0.1
RETRY_MAX_SECONDS: Final = 2.0
MEND_AGAIN_SECONDS: Final = 30.0
NONE: Final = 0
NOTHING_HELD: Final = -1
LATE_POINTS: Final = frozenset({"auto", "flushed"})
"""Replication points that a group commit reaches."""


class Stage(Enum):
    WAITING = "waiting"
    ASKING = "asking"
    COPYING = "copying"


class FollowedPartition:
    """One partition that is copied from its leader in one epoch."""

    __slots__ = (
        "_back",
        "asked_end",
        "epoch",
        "epoch_starts",
        "failed_at",
        "held_end",
        "leader_start",
        "mend_after",
        "mend_from",
        "partition",
        "pause",
        "retry_at",
        "stage",
        "start",
        "subscription",
        "told",
    )

    def __init__(self, partition: Partition, start: LogStart) -> None:
        self.partition = partition
        self.start = start
        self.epoch = partition.epoch
        self.stage = Stage.WAITING
        self.subscription = NONE
        self.retry_at = 0.0
        self.pause = RETRY_SECONDS
        self.failed_at = -1
        """What comes at this offset could not be taken when it was last tried."""
        self.leader_start = 0
        """Where the leader wants the partition to begin."""
        self.epoch_starts: Sequence[tuple[int, int]] = ()
        """Where epochs of the next records began, as the leader tells."""
        self.asked_end = 0
        self.held_end = NOTHING_HELD
        """What lies below it was copied under earlier subscriptions, and the leader may have cleaned since; until what
        is open there was looked at."""
        self.mend_from: int | None = None
        """From here on the log is to be copied again, because something there is damaged."""
        self.mend_after = 0.0
        """Not before that, because the leader could not read it all when it was last asked."""
        self._back = 1
        """How far to go back from there if the log cannot be cut there."""
        self.told: tuple[int, int, int, int] | None = None

    def ask(self, subscription: int) -> Subscribe:
        """Ask where to begin."""
        log = self.partition.log
        self.stage = Stage.ASKING
        self.subscription = subscription
        self.told, self.epoch_starts = None, ()
        end = held = log.end_offset
        if self.mend_from is not None:
            end = max(log.start_offset, min(end, self.mend_from))
        self.asked_end = end
        last_epoch = -1
        if end > log.start_offset:
            last_epoch = max((epoch for epoch, start in log.epoch_starts() if start < end), default=-1)
        where = self.partition.topic_partition
        return Subscribe(subscription, log.topic_id, where.partition, self.epoch, last_epoch, end, held)

    def wait(self, now: float) -> None:
        """It is not served now: ask again later, and then ever later."""
        self.stage = Stage.WAITING
        self.subscription = NONE
        self.retry_at = now + self.pause
        self.pause = min(2 * self.pause, RETRY_MAX_SECONDS)

    def put_off_mending(self, now: float) -> None:
        """The leader cannot give all that would be dropped: the log stays, and is copied on from its end. One of the
        two may lead the other by then."""
        self.mend_from, self.mend_after = None, now + MEND_AGAIN_SECONDS

    def begin(self, from_offset: int) -> bool:
        """The leader begins there. False: the log does not end there, so it has to be asked for again."""
        held = self.partition.log
        if self.mend_from is not None and from_offset == self.asked_end:
            self._cut_damage(from_offset)
        if held.end_offset != from_offset:
            return False
        self.stage = Stage.COPYING
        # Where nothing is held the leader tells of its producers, too.
        self.held_end = NOTHING_HELD if from_offset == held.start_offset else from_offset
        if from_offset != self.failed_at:
            self.pause = RETRY_SECONDS
        return True

    def gap_in(self, batches: memoryview) -> int | None:
        """Where offsets are left out, if what is held may tell of them: the place of the batch behind them."""
        if self.held_end == NOTHING_HELD:
            return None
        at, due = 0, self.partition.log.end_offset
        while at < len(batches):
            header = read_header(batches, at)
            if header.base_offset > due:
                return at
            at, due = at + header.size_bytes, header.next_offset
        return None

    def missed_from(self) -> int | None:
        """The leader has cleaned away what comes next here: everything in it was decided. If a transaction is open in
        what was held before, its marker may have gone, as the leader had none of its records any more; they would count
        with what their producer writes next. So all from there on is to be copied again, as far as the leader has it.
        What came under this subscription came with its marker, or that is still to come."""
        end = self.partition.log.end_offset
        first_open = self.partition.log.producers.first_open(end)
        if first_open < self.held_end:
            return first_open
        self.held_end = NOTHING_HELD
        return None

    def _cut_damage(self, from_offset: int) -> None:
        """Drop what is to be copied again. A cut needs to find its place: if that is damaged too, a lower one is tried,
        which the leader must be able to read as well.
        """
        held, where = self.partition.log, self.partition.topic_partition
        log.warning(
            "%s: cut at offset %d, to be copied again up to %d",
            where, from_offset, held.end_offset,
        )  # fmt: skip
        try:
            held.truncate(from_offset)
        except CorruptBatch as error:
            self.mend_from = max(held.start_offset, from_offset - self._back)
            self._back *= 2
            log.warning("%s: copied again from offset %d on: %s", where, self.mend_from, error)
            return
        self.mend_from, self._back = None, 1
        self.partition.truncated()
        self.partition.mended()

    def cut(self, told: Truncate) -> bool:
        """Cut what the leader does not have. False: there is nothing to cut, so asking again would change nothing."""
        partition = self.partition
        held = partition.log
        ours = held.epoch_end(told.cut_epoch)
        end = min(told.end, held.start_offset if ours is None else ours.end_offset)
        before = held.end_offset
        if end >= before:
            return False
        held.truncate(end)
        self._warn(before)
        partition.truncated()
        return True

    def wanted_start(self) -> int:
        """Where the log should begin by now: nothing goes that is not known to be committed."""
        return min(self.leader_start, self.partition.high_watermark)

    def reset(self, log_start: int) -> bool:
        """The leader cannot give what comes next here: begin anew where it can."""
        held = self.partition.log
        before = held.end_offset
        log.warning(
            "%s: the leader begins at offset %d and cannot continue ours, %d to %d: copied anew from there",
            self.partition.topic_partition, log_start, held.start_offset, before - 1,
        )  # fmt: skip
        held.restart_at(log_start)
        self._warn(before)
        self.partition.truncated()
        return True

    def _warn(self, before: int) -> None:
        partition = self.partition
        end = partition.log.end_offset
        if end < partition.high_watermark:
            log.error(
                "%s: offsets %d to %d were committed once, and the leader of epoch %d does not have them: they are "
                "lost here too", partition.topic_partition, end, partition.high_watermark - 1, self.epoch,
            )  # fmt: skip
        elif end < before:
            log.info(
                "%s: cut from offset %d to %d, where the leader of epoch %d differs",
                partition.topic_partition, before, end, self.epoch,
            )  # fmt: skip

    def may_wait(self) -> bool:
        """Whether what it would tell counts only after the next group commit, which will tell it."""
        held, told = self.partition.log, self.told
        settings = held.settings
        if settings.durability != "disk" or settings.replication_point not in LATE_POINTS:
            return False
        return told is not None and held.durable_offset == told[2] and held.safe_start_offset == told[3]

    def position(self) -> Position | None:
        """What to tell the leader, if it does not know it yet."""
        held = self.partition.log
        now = (held.end_offset, held.written_offset, held.durable_offset, held.safe_start_offset)
        if now == self.told or self.stage is not Stage.COPYING:
            return None
        self.told = now
        return (self.subscription, self.epoch, *now)
