"""When a commit file without anything wanted may go.

What made it empty is told by frames: those must be safe first, and a checkpoint must speak of it, unless there is no
room to write any. That the file had been synced must be told too, or else a start would take it for lost in a crash.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.storage.commitlog.commitlog import CommitLog
from headrace.storage.commitlog.frame_writer import FrameWriter


@dataclass(frozen=True, slots=True)
class Removal:
    numbers: list[int]
    """Files that may go now."""
    waits: bool = False
    """Whether others are empty too..."""
    wants_checkpoint: bool = False
    """...and a checkpoint would let them go."""


class EmptyFiles:
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
        told = writer.marked >> 32 if writer.mark_end <= commit_log.synced else 0
        gone = [number for number in ready if number < told]
        if len(gone) == len(empty):
            return Removal(gone)
        before, self._wanted = self._wanted, max(self._wanted, writer.mark_end, *self._empty_at.values())
        return Removal(gone, waits=True, wants_checkpoint=self._wanted > before)
