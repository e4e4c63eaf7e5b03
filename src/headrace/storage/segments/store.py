"""All logs of one data folder in the `partitioned` layout, of which each has its own files.

Each log is opened, written and synced by itself. A segment that is too old is closed, a sync that fails takes its own
log offline, and the others go on.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Unpack

from headrace.errors import HeadraceError
from headrace.ports.clock import Clock
from headrace.ports.disk import Disk, File
from headrace.settings.values import LogSettings
from headrace.storage import checkpoint, folder, rewritten, shortfall
from headrace.storage.checkpoint import LogPoint
from headrace.storage.cleaner import Steps
from headrace.storage.folder import Stray
from headrace.storage.group_commit import concerns
from headrace.storage.local_store import Expected, LocalStore, StoreOptions, StoreServices
from headrace.storage.log import Log, Phase, Tail, TopicPartition
from headrace.storage.segments import compaction, recovery, retention
from headrace.storage.segments.log import PartitionedLog
from headrace.storage.segments.segment import OPEN_SEGMENTS_MAX, OpenSegments, Segment

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class PartitionedServices(StoreServices[PartitionedLog]):
    open_segments: OpenSegments
    segment_began: Callable[[PartitionedLog], None]
    """The log's active segment got its first batch: it is to be rolled when it is old."""
    discarded: Callable[[list[str], int], None]
    """Paths to remove after so many milliseconds."""

    def new_segment(self, folder: str, settings: LogSettings, base_offset: int) -> Segment:
        """An empty one, whose file is created when it is first used."""
        return self._segment(folder, settings, base_offset, base_offset, fresh=True)

    def old_segment(
        self,
        folder: str,
        settings: LogSettings,
        base_offset: int,
        next_offset: int,
        size: int,
        *,
        cleaned: bool,
        sparse: bool = False,
    ) -> Segment:
        """One whose file is there and has this size."""
        segment = self._segment(folder, settings, base_offset, next_offset, cleaned=cleaned, sparse=sparse)
        segment.found_bytes(size)
        return segment

    def _segment(
        self,
        folder: str,
        settings: LogSettings,
        base_offset: int,
        next_offset: int,
        *,
        cleaned: bool = False,
        sparse: bool = False,
        fresh: bool = False,
    ) -> Segment:
        return Segment(
            self.disk,
            self.open_segments,
            folder,
            base_offset,
            next_offset,
            index_bytes=settings.segment_index_bytes,
            interval_bytes=settings.index_interval_bytes,
            cleaned=cleaned,
            sparse=sparse,
            fresh=fresh,
        )


class PartitionedStore(LocalStore[PartitionedLog]):
    def __init__(
        self,
        disk: Disk,
        clock: Clock,
        data: str,
        *,
        open_segments_max: int = OPEN_SEGMENTS_MAX,
        **options: Unpack[StoreOptions],
    ) -> None:
        super().__init__(disk, clock, data, folder.PARTITIONED, **options)
        self._services = PartitionedServices(
            open_segments=OpenSegments(open_segments_max),
            segment_began=self._segment_began,
            discarded=self._trash.later,
            **self._shared_services(),
        )
        self._rolls: list[tuple[int, int, PartitionedLog, int]] = []
        self._order = 0

    def _open(self, expected: Expected, same_boot: bool) -> list[Stray]:
        points = checkpoint.read(self._disk, self.data)
        if points is None:
            log.error("%s/%s is damaged: every log is read and checked", self.data, checkpoint.FILE_NAME)
        # A point of a topic that had the same name is nothing to go by.
        wanted = {where: topic_id for where, (topic_id, _) in expected.items()}
        found = {
            where: point
            for where, point in (points or {}).items()
            if where in wanted and point.topic_id == wanted[where].hex()
        }
        strays: list[Stray] = []
        for topic_partition, path in list(folder.partitions(self._disk, self.data)):
            reason = folder.why_stray(self._disk, path, wanted.get(topic_partition))
            if reason is not None:
                strays.append(folder.set_stray_aside(self._disk, path, reason))
                continue
            topic_id, settings = expected[topic_partition]
            self._open_log(path, topic_partition, topic_id, settings, found.get(topic_partition), same_boot)
        for topic_partition, (topic_id, settings) in expected.items():
            if topic_partition not in self._logs:
                self._create(topic_partition, topic_id, settings, found.get(topic_partition))
        rewritten.forget(self._disk, folder.above(self.data, self._logs))
        self._sync_now([each for each in self._logs.values() if each.recovered])
        return strays

    def _write_first_checkpoint(self) -> None:
        self._checkpoints.write_now()
        for each in self._logs.values():
            if each.tail >= Tail.TORN:
                shortfall.forget_cut(self._disk, each.folder)

    def _open_log(
        self,
        path: str,
        topic_partition: TopicPartition,
        topic_id: bytes,
        settings: LogSettings,
        point: LogPoint | None,
        same_boot: bool,
    ) -> None:
        opened = recovery.open_log(
            self._services, path, topic_partition, topic_id, settings, point, same_boot=same_boot
        )
        self._logs[topic_partition] = opened
        self.was_clean = self.was_clean and not opened.recovered
        if opened.active.written:
            self._segment_began(opened)
        self._dirty.wrote(opened)

    def _create(
        self,
        topic_partition: TopicPartition,
        topic_id: bytes,
        settings: LogSettings,
        point: LogPoint | None = None,
    ) -> PartitionedLog:
        with self._new_folders.begin(topic_partition, topic_id) as path:
            created = recovery.open_log(self._services, path, topic_partition, topic_id, settings, point)
        self._logs[topic_partition] = created
        return created

    # Every turn of the loop.

    def write_staged(self) -> list[tuple[Log, HeadraceError]]:
        failures: list[tuple[Log, HeadraceError]] = []
        if not self._staged:
            return failures
        commit = self.commit
        for staged in self._staged:
            error = staged.write()
            if error is not None:
                failures.append((staged, error))
                continue
            self._flushes.wrote(staged)
            if staged.settings.compact:
                self._dirty.written[staged] = self._clock.now()
        self._staged.clear()
        commit.start()
        return failures

    # From time to time.

    def _segment_began(self, began: PartitionedLog) -> None:
        self._order += 1
        heapq.heappush(self._rolls, (began.rolls_at_ms, self._order, began, began.active.base_offset))

    def _roll_aged(self, now_ms: int) -> None:
        while self._rolls and self._rolls[0][0] <= now_ms:
            _, _, old, base_offset = heapq.heappop(self._rolls)
            if old.active.base_offset != base_offset or old.active.size == 0 or old.offline is not None:
                continue
            if old.rolls_at_ms > now_ms:  # the setting was changed meanwhile
                self._segment_began(old)
            else:
                self.roll(old)

    def roll(self, old: PartitionedLog) -> None:
        """Close the active segment; what was staged is written first by the turn that staged it."""
        if old in self._staged:
            return
        try:
            old.roll()
        except (OSError, HeadraceError) as error:
            log.warning("%s: segment %s stays open: %s", old.topic_partition, old.active.path, error)

    def _apply_retention(self, checked: PartitionedLog, now_ms: int) -> None:
        if checked.active.written and checked.rolls_at_ms < now_ms:
            self.roll(checked)
        retention.apply(checked, now_ms, self.roll)

    def _compaction_due(self, one: PartitionedLog, now_ms: int) -> bool:
        return compaction.due(one, now_ms)

    def _compact(self, one: PartitionedLog) -> Steps:
        return compaction.steps(one, self._disk, self._clock.wall_ms())

    # The checkpoint.

    def encode(self) -> bytes:
        return checkpoint.encode(self._points())

    def files_to_sync(self) -> Sequence[File]:
        return ()  # every log is synced by itself

    def synced(self, error: OSError | None) -> None:
        return None

    def _points(self) -> Iterator[LogPoint]:
        for each in self._logs.values():
            yield LogPoint(
                each.topic_partition.topic,
                each.topic_partition.partition,
                each.topic_id.hex(),
                each.stopped,
                min(each.durable_offset, each.cuts.least),
                each.start_offset,
                each.end_offset,
                each.active.base_offset,
                each.active.written,
                each.began_ms,
                each.cleanings,
                each.cuts.settled,
            )

    # Stopping.

    def close(self) -> bool:
        if self.phase is not Phase.OPEN:
            self.abandon()
            return False
        self.write_staged()
        self._end_jobs()
        self._sync_now([each for each in self._logs.values() if self._stop_log(each)])
        for each in self._logs.values():
            self._look_for_mark(each)
            each.stopped = each.offline is None
        clean = all(each.stopped for each in self._logs.values())
        self._checkpoints.close()
        try:
            self._checkpoints.write_now()
        except OSError as error:
            log.error("no clean checkpoint, the next start reads the logs: %s", error)
            clean = False
        self._let_go()
        return clean

    def _stop_log(self, stopping: PartitionedLog) -> bool:
        if stopping.offline is not None:
            return False
        try:
            stopping.stop()
        except OSError as error:
            stopping.fail(error)
            return False
        return True

    def _look_for_mark(self, stopping: PartitionedLog) -> None:
        """A sync that was under way may have failed: nobody listens to it any more, and it is told once only."""
        try:
            if stopping.offline is None:
                rewritten.refuse_if_noted(self._disk, stopping.folder)
        except OSError as error:
            stopping.fail(error)

    def _sync_now(self, logs: list[PartitionedLog]) -> None:
        """Make everything that is written durable, many files at a time."""
        waiting: list[tuple[PartitionedLog, list[File]]] = []
        for nth, each in enumerate(logs, 1):
            try:
                waiting.append((each, each.take_unsynced()))
            except OSError as error:
                each.fail(error)
            files = [file for _, own in waiting for file in own]
            if len(files) < self._sync_files_max and nth < len(logs):
                continue
            failure: OSError | None = None
            try:
                self._disk.sync_now(files)
            except OSError as error:
                failure = error
            for log, own in waiting:
                if failure is not None and concerns(failure, own):
                    log.fail(failure)
                else:
                    log.synced_upto(log.written_offset)
            waiting = []
