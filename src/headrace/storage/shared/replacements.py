"""Replace frames of several logs at a time: written one after the other, synced together, then led to by the queues.

A log that was truncated, deleted or taken offline meanwhile keeps its queue as it is: what the frames hold is not used,
and a start that reads everything in order comes to the same records. Files that the queues no longer lead to go after
the next checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.ports.disk import Buffer
from headrace.storage import refusal
from headrace.storage.cleaner import Steps, wait_for_sync
from headrace.storage.commit import concerns
from headrace.storage.shared.frames import FRAME_BYTES
from headrace.storage.shared.log import SharedLog
from headrace.storage.shared.replacing import Replacer
from headrace.storage.shared.splicing import Replacement
from headrace.storage.shared.surroundings import Surroundings


class Replacements:
    def __init__(self, around: Surroundings, replacer: Replacer) -> None:
        self._around = around
        self._replacer = replacer
        self._waiting: dict[SharedLog, tuple[int, list[Replacement]]] = {}
        self.runs = 0
        """Runs that wait for the sync."""
        self.written_bytes = 0

    def add(self, log: SharedLog, first_offset: int, next_offset: int, batches: Sequence[Buffer]) -> None:
        """From first to next the log holds these batches; both are where runs of it begin. CorruptBatch if one is not
        whole, OSError if the frame could not be written: nothing has changed then."""
        try:
            runs = self._replacer.write(log, first_offset, next_offset, batches)
        except OSError as error:
            if not refusal.passes(error):
                self._around.failed(error)
            raise
        self.written_bytes += FRAME_BYTES + sum(map(len, batches))
        self.runs += len(runs)
        truncations, waiting = self._waiting.setdefault(log, (log.truncations, []))
        if truncations == log.truncations:
            waiting.append(Replacement(first_offset, next_offset, runs))

    def settle(self) -> Steps:
        """Sync what was written, and have the queues lead to it, one after the other."""
        waiting, self._waiting, self.runs = self._waiting, {}, 0
        if not waiting:
            return
        around, commit_log = self._around, self._around.commit_log
        files, upto = commit_log.unsynced(), commit_log.end
        try:
            yield from wait_for_sync(around.disk, files)
        except OSError as error:
            if concerns(error, files):
                around.failed(error)
            raise
        commit_log.synced_to(upto)
        failure: OSError | None = None
        for log, (truncations, replacements) in waiting.items():
            if log.offline is None and log.truncations == truncations:
                try:
                    log.replaced(sorted(replacements))
                except OSError as error:  # no room for its queue: it leads to the old ones
                    failure = error
            yield None
        around.checkpoint_soon(lambda error: _drop_old(waiting) if error is None else None)
        if failure is not None:
            raise failure


def _drop_old(logs: dict[SharedLog, tuple[int, list[Replacement]]]) -> None:
    for log in logs:
        if log.offline is None:
            log.queue.drop_old()
