"""Commit files of which little or nothing is wanted: what is still wanted is copied to the end of the commit log, and
files without anything wanted go.

A closed file whose wanted bytes are less than `rewrite_share` of it is emptied, the emptiest first, one at a time and a
few runs at a step. The runs of a partition are written as replace frames with all their batches, checked on the way,
and synced; then its queue leads there (see `replace_frames`). The file goes when a checkpoint no longer needs it, and
after file.delete.delay.ms. A run that is damaged stays, and its file with it. Until its queue leads to the copy, the
old run is served; a crash at any point leaves a log that reads the same, and some bytes twice, of which one is
unwanted.

With share s, at most 0.5:

- disk: every closed file but the one being emptied is wanted to s at least, so all take less than wanted / s, and
  besides the active file, the one being emptied with the copies from it (1 + s files), and those that wait for their
  removal;
- writes: emptying a file frees it all and writes at most s of it, and no byte is freed twice. So the bytes copied are
  at most s / (1 - s) of those appended, headers of frames included: at 0.5 never more than one copied byte for each
  appended byte. A smaller share writes less and keeps more.

A file of the smallest batches is more than half batches, so no file is emptied that is full of wanted ones.

Partition folders that were set aside hold queues only, their batches lie in the commit log. While there is one whose
topic is known, no commit file is emptied or removed: a broker that has lost its metadata would else remove everything.
They go with the deletion of their topic; else a person decides about them, as about those of the other layout.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, cast

from headrace.errors import CorruptBatch
from headrace.ports.disk import Disk
from headrace.settings.values import BROKER_BY_NAME
from headrace.storage import folder
from headrace.storage.cleaner import Steps
from headrace.storage.commitlog.commitlog import CommitLog, FrameWriter
from headrace.storage.commitlog.frames import FRAME_BYTES
from headrace.storage.commitlog.log import SharedLog
from headrace.storage.commitlog.queuefile import DAMAGED, GONE, Entry
from headrace.storage.commitlog.replace_frames import Replacements
from headrace.storage.log import look_at
from headrace.storage.scan import read_log

log = logging.getLogger(__name__)

SHARE_MAX: Final = 0.5
REWRITE_SHARE: Final = cast(float, BROKER_BY_NAME["commitlog.rewrite.share"].default)
STEP_ENTRIES: Final = 512
STEP_BYTES: Final = 1 << 20
WAITING_RUNS_MAX: Final = 4096


class Rewriter:
    def __init__(
        self,
        commit_log: CommitLog,
        logs: Callable[[], Iterable[SharedLog]],
        replacements: Callable[[], Replacements],
        share: float,
    ) -> None:
        self._commit_log = commit_log
        self._logs = logs
        self._replacements = replacements
        self._share = min(share, SHARE_MAX)
        self._tried: set[int] = set()
        self.copied_bytes = 0
        """Written by this process for the sake of other files, headers included."""

    def begin_round(self) -> None:
        """Files that could not be emptied may be tried again."""
        self._tried.clear()

    def sparse_file(self, live: dict[int, int]) -> int | None:
        """The number of the closed file with the smallest share of wanted bytes, if that is small enough."""
        heads = FRAME_BYTES * (1 + sum(1 for _ in self._logs()))
        found, smallest = None, self._share
        for number, size in self._commit_log.sizes.items():
            wanted = live.get(number, 0)
            if number == self._commit_log.number or not wanted or number in self._tried:
                continue
            share = wanted / max(1, size - heads)
            if share < smallest:
                found, smallest = number, share
        return found

    def steps(self, number: int) -> Steps:
        """Empty a file. After an OSError what was copied counts, and the rest is still in the file."""
        self._tried.add(number)
        replacements = self._replacements()
        try:
            for each in list(self._logs()):
                if each.queue.live.get(number) and each.offline is None:
                    yield from self._copy(each, number, replacements)
        except OSError:
            yield from replacements.settle()
            raise
        finally:
            self.copied_bytes += replacements.written_bytes
        copied = replacements.written_bytes
        yield from replacements.settle()
        log.info("%s: %d bytes were still wanted and are copied", self._commit_log.path(number), copied)

    def _copy(self, source: SharedLog, number: int, replacements: Replacements) -> Steps:
        """Copy what one log has in the file, some neighbouring entries at a time."""
        queue, offset, end = source.queue, source.start_offset, source.written_offset
        while offset < end and source.offline is None:
            place = queue.place(offset)
            if place is None:
                return
            file, at = place
            last = min(file.count, at + STEP_ENTRIES)
            group: list[Entry] = []
            size = 0
            for nth, found in enumerate(file.numbers_of(at, last), at):
                if found == number and file.size_at(nth) != DAMAGED:
                    group.append(queue.entry((file, nth)))
                    size += group[-1].size
                    if size < STEP_BYTES:
                        continue
                if group:
                    self._move(source, group, replacements)
                    if size >= STEP_BYTES:
                        last = nth + 1
                        group = []
                        break
                    group, size = [], 0
            if group:
                self._move(source, group, replacements)
            offset = max(offset + 1, queue.entry((file, last - 1)).next_offset)
            if replacements.runs >= WAITING_RUNS_MAX:
                yield from replacements.settle()
            yield None

    def _move(self, source: SharedLog, entries: list[Entry], replacements: Replacements) -> None:
        file = self._commit_log.file(entries[0].number)
        try:
            batches = [read_log(file, entry.size, entry.byte) for entry in entries if entry.size != GONE]
            replacements.add(source, entries[0].offset, entries[-1].next_offset, batches)
        except CorruptBatch as error:
            log.error("%s stays: %s", file.path, error)
            for entry in entries:
                look_at(source, max(source.start_offset, entry.offset))


@dataclass(frozen=True, slots=True)
class Removal:
    numbers: list[int]
    """Files that may go now."""
    waits: bool = False
    """Whether others are empty too..."""
    wants_checkpoint: bool = False
    """...and a checkpoint would let them go."""


class EmptyFiles:
    """When a commit file without anything wanted may go. What made it empty is told by frames: those must be safe
    first, and a checkpoint must speak of it, unless there is no room to write any. That the file had been synced must
    be told too, or else a start would take it for lost in a crash."""

    def __init__(self, commit_log: CommitLog, writer: FrameWriter) -> None:
        self._commit_log = commit_log
        self._writer = writer
        self._empty_at: dict[int, int] = {}
        """Where the commit log ended when a file was first seen to be empty, by its number."""
        self._wanted = 0
        self.checkpointed = 0
        """The position that the last checkpoint speaks for."""

    def removal(self, live: Mapping[int, int]) -> Removal:
        """By the wanted bytes in each file."""
        commit_log, writer = self._commit_log, self._writer
        empty = [number for number, count in live.items() if not count and number != commit_log.number]
        if not empty:
            return Removal([])
        self._empty_at = {number: self._empty_at.get(number, commit_log.end) for number in empty}
        ready = [n for n in empty if self._empty_at[n] <= self.checkpointed or writer.short_of_room]
        if ready and writer.marked >> 32 <= ready[-1]:
            writer.mark()
        safe_below = writer.marked >> 32 if writer.mark_end <= commit_log.synced else 0
        gone = [number for number in ready if number < safe_below]
        if len(gone) == len(empty):
            return Removal(gone)
        before, self._wanted = self._wanted, max(self._wanted, writer.mark_end, *self._empty_at.values())
        return Removal(gone, waits=True, wants_checkpoint=self._wanted > before)


NAMED_MAX = 10


def strays_with_topics(disk: Disk, data: str) -> list[str]:
    """Those that say which topic they belong to."""
    found = [path for topic in folder.topic_folders(disk, data) for _, path in folder.strays_of(disk, data, topic)]
    return [path for path in found if isinstance(folder.read_topic_id(disk, path), bytes)]


def strays_advice(data: str, found: list[str]) -> str:
    named = ", ".join(found[:NAMED_MAX]) + (f" and {len(found) - NAMED_MAX} more" if len(found) > NAMED_MAX else "")
    return (
        f"no commit file of {data} is removed, because batches of folders that are set aside may be in it: {named}. "
        "If they are not wanted, remove these folders and restart the broker. If they are, stop it, mend the cluster's "
        "metadata, give the folders back their names, and start it"
    )
