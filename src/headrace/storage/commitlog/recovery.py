"""Opening a data folder of the shared layout: checkpoint, then queues, then the commit log.

After a clean stop the checkpoint says where the commit log ends; if it does, and the queues agree with their CRCs,
nothing is read. After a crash the commit log is read from the checkpoint's position on. A partition whose queue is lost
or damaged is built from the whole commit log, all such partitions in one pass; so is one whose folder is there and of
which the checkpoint says nothing, from where its folder says that it begins. Frames of partitions that are not expected
any more are passed over.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.ports.disk import read_whole
from headrace.storage import folder, producers, rewritten, shortfall
from headrace.storage.aborted import TXN_INDEX
from headrace.storage.commitlog import frames, reader
from headrace.storage.commitlog.checkpoint import Checkpoint, LogPoint
from headrace.storage.commitlog.frames import Key
from headrace.storage.commitlog.log import SharedLog
from headrace.storage.commitlog.queue import Queue
from headrace.storage.commitlog.replay import Replay, State
from headrace.storage.epochs import EpochHistory, reconciled
from headrace.storage.folder import Stray, stem
from headrace.storage.local_log import RecoveredLog
from headrace.storage.local_store import Expected
from headrace.storage.log import Tail, TopicPartition
from headrace.storage.producers import SNAPSHOT

if TYPE_CHECKING:
    from headrace.storage.commitlog.store import SharedServices

log = logging.getLogger(__name__)

DIGITS = 20


@dataclass(slots=True, kw_only=True)
class RecoveredQueue(RecoveredLog):
    """What a start found of a log of the shared layout."""

    queue: Queue
    safe_start_offset: int = 0
    """The start that the checkpoint holds."""
    checked_from: int | None = None
    """From this offset on everything was checked just now; None: nothing was."""
    damaged_from: int | None = None
    """The first offset that was found to be damaged."""


@dataclass(slots=True)
class Opened:
    logs: dict[TopicPartition, SharedLog] = field(default_factory=dict)
    strays: list[Stray] = field(default_factory=list)
    was_clean: bool = True
    """Whether the commit log ends where a clean stop left it."""


class StoreRecovery:
    """One start of a store."""

    def __init__(
        self, services: SharedServices, data: str, expected: Expected, checkpoint: Checkpoint | None, *, same_boot: bool
    ) -> None:
        self._same_boot = same_boot
        self._services = services
        self._disk = services.disk
        self._data = data
        self._expected = expected
        self._checkpoint = checkpoint or Checkpoint()
        self._folders: dict[TopicPartition, str] = {}
        self._there: set[TopicPartition] = set()
        """Partitions whose folders were found."""
        self._states: dict[TopicPartition, State] = {}
        self._read_before: set[TopicPartition] = set()
        """Partitions of which the commit log is read from before the checkpoint's position on."""
        self._tail = Tail.WHOLE
        self._clean = False

    def run(self) -> Opened:
        opened = Opened(strays=self._set_strays_aside())
        commit_log, point = self._services.commit_log, self._checkpoint
        commit_log.find_files()
        whole = commit_log.end >= point.position
        if not whole:
            log.error(
                "%s had been synced to position %d, but ends at %d: every queue is built anew",
                commit_log.folder,
                point.position,
                commit_log.end,
            )
        for where in self._expected:
            self._states[where] = self._state(where, believed=whole)
        opened.was_clean = commit_log.end == point.position and (point.clean or commit_log.end == 0)
        opened.was_clean = opened.was_clean and not rewritten.is_noted(self._disk, commit_log.folder)
        if opened.was_clean:
            self._begin_anew_without_files()
        if self._read_before or not opened.was_clean:
            self._replay()
        self._clean = opened.was_clean and point.clean
        for where, state in self._states.items():
            opened.logs[where] = self._open(where, state)
        rewritten.forget(self._disk, [each.folder for each in opened.logs.values()])
        rewritten.forget(self._disk, folder.above(self._data, opened.logs))
        return opened

    # Folders.

    def _set_strays_aside(self) -> list[Stray]:
        strays: list[Stray] = []
        for where, path in list(folder.partitions(self._disk, self._data)):
            expected = self._expected.get(where)
            reason = folder.why_stray(self._disk, path, None if expected is None else expected[0])
            if reason is None:
                self._folders[where] = path
                self._there.add(where)
                continue
            strays.append(folder.set_stray_aside(self._disk, path, reason))
        return strays

    def _folder(self, where: TopicPartition) -> str:
        path = self._folders.get(where)
        if path is None:
            position = 0 if where in self._checkpoint.logs else self._checkpoint.position
            with folder.NewFolders(self._disk, self._data).begin(where, self._expected[where][0], position) as path:
                self._folders[where] = path
        return path

    # Queues.

    def _state(self, where: TopicPartition, *, believed: bool) -> State:
        topic_id, settings = self._expected[where]
        path = self._folder(where)
        state = State(where, self._services.new_queue(path), settings.index_interval_bytes)
        state.saved_epochs = EpochHistory(self._disk, path)
        state.checkpoint_position = self._checkpoint.position
        point = self._checkpoint.logs.get(where)
        if point is not None and point.topic_id != topic_id.hex():
            point = None  # of a topic that had the same name
        state.lowest_end = 0 if point is None else point.end_offset
        if point is None:
            # Created after the checkpoint, or forgotten by it: its folder says where to begin.
            state.queue.clear_files()
            state.from_position = self._checkpoint.position
            if where in self._there:
                state.from_position = folder.begins_at(self._disk, path)
                self._read_before.add(where)
            return state
        state.claimed_start = point.start_offset
        if not believed or not self._load(state, path, point):
            self._begin_anew(where, state)
        return state

    def _load(self, state: State, path: str, point: LogPoint) -> bool:
        queue = state.queue
        state.history = EpochHistory(self._disk, path)
        if state.history.crc_below(point.end_offset) != point.epochs_crc:
            log.warning("%s: its leader epochs are missing or not those of its queue: built from the commit log", path)
            return False
        if not queue.load(point.queue_first, point.queue_count, point.queue_crc):
            log.warning("%s: its queue is missing or damaged: built from the commit log", path)
            return False
        queue.end_offset, queue.size_bytes, queue.live = point.end_offset, point.size_bytes, dict(point.live)
        queue.find_front(point.start_offset)
        if not self._checkpoint.clean:
            queue.count_anew()  # a closed file may have been written anew since the checkpoint
        state.start_offset, state.known = point.start_offset, True
        state.from_position = self._checkpoint.position
        state.checked_from = point.end_offset
        state.last_epoch = state.history.epoch_at(point.end_offset - 1) or -1
        if self._checkpoint.epoch_frames:
            state.framed = [entry for entry in state.history.entries if entry[1] < point.end_offset]
        return True

    def _begin_anew(self, where: TopicPartition, state: State) -> None:
        queue = self._services.new_queue(state.queue.folder)
        queue.clear_files()
        self._states[where] = state
        state.queue, state.from_position, state.known = queue, 0, False
        state.start_offset, state.checked_from, state.cut_to = 0, 0, 1 << 62
        state.epochs, state.last_epoch, state.seen = {}, -1, -1
        state.framed, state.framed_at = [], -1
        state.missing = []
        state.rebuilt, state.history = True, None
        self._read_before.add(where)

    def _begin_anew_without_files(self) -> dict[TopicPartition, State]:
        """Queues that lead to commit files that are gone, or have lost their own first ones, are built anew; answers
        them."""
        there = self._services.commit_log.sizes.keys()
        missing: dict[TopicPartition, State] = {}
        for where, state in self._states.items():
            if not state.queue.live.keys() <= there:
                reason = "its queue leads to files that are gone"
            elif not state.rebuilt and not state.queue.speaks_from(state.start_offset):
                reason = "its queue does not begin where the log does"
            else:
                continue
            log.warning("%s: %s: built from the commit log", state.queue.folder, reason)
            missing[where] = state
        for where, state in missing.items():
            self._begin_anew(where, state)
        return missing

    # The commit log.

    def _replay(self) -> None:
        commit_log, position = self._services.commit_log, self._checkpoint.position
        names = self._disk.list(commit_log.folder)
        replay = Replay(commit_log, self._by_key(self._states), position, same_boot=self._same_boot)
        replay.run(min([position, *(self._states[where].from_position for where in self._read_before)]))
        self._tail = shortfall.known_tail(names, replay.tail)
        missing = self._begin_anew_without_files()
        if missing:
            end = frames.position(commit_log.number + 1, 0)
            Replay(commit_log, self._by_key(missing), end, same_boot=self._same_boot).run(0)
        for state in self._states.values():
            state.settle(commit_log)
        commit_log.doubt(min(position, commit_log.end))
        there = [commit_log.path(number) for number in commit_log.sizes if number >= position >> 32]
        rewritten.write_again(self._disk, commit_log.folder, there)

    def _by_key(self, states: Mapping[TopicPartition, State]) -> dict[Key, State]:
        return {(self._expected[where][0], where.partition): state for where, state in states.items()}

    # Logs.

    def _open(self, where: TopicPartition, state: State) -> SharedLog:
        topic_id, settings = self._expected[where]
        path, queue = state.queue.folder, state.queue
        queue.scratch = False
        point = self._checkpoint.logs.get(where)
        found = RecoveredQueue(queue=queue, start_offset=state.start_offset, epochs=state.history)
        found.snapshots = self._snapshots(path, state)
        found.aborted = _offsets(self._disk.list(path), TXN_INDEX)
        found.damaged_from = state.damaged_from
        found.tail = max(self._tail, state.tail)  # of what was cut nobody knows whose it was
        if point is not None and point.topic_id == topic_id.hex():
            found.safe_start_offset = min(point.start_offset, state.start_offset)
            found.cleanings = [(min(cleaned_to, queue.end_offset), at_ms) for cleaned_to, at_ms in point.cleanings]
            if queue.end_offset < point.end_offset and not state.touched:
                log.error("%s: offsets from %d on had been synced, and are gone", path, queue.end_offset)
        if state.touched or not self._clean:
            found.checked_from = min(state.checked_from, queue.end_offset)
            found.epochs = self._epochs(path, state)
        opened = SharedLog(self._services, path, where, topic_id, settings, found)
        if state.touched or not self._clean or not state.known:
            opened.sync_derived_again()
        if not state.known:
            # Whatever the commit log holds of it from before is not its own.
            opened.bounds_unwritten = True
            self._services.staged[opened] = None
        return opened

    def _epochs(self, path: str, state: State) -> EpochHistory:
        """What the file says, as far as it still holds, and what the commit log does. For a partition that is built
        anew, and behind the checkpoint, the commit log leads: the file may tell of what was truncated."""
        history = state.history or EpochHistory(self._disk, path)
        before = 0 if state.rebuilt else min(state.lowest_end, state.queue.end_offset)
        kept = [entry for entry in history.entries if entry[1] < before]
        known = kept[-1][0] if kept else -1
        seen = _rising([(epoch, *begins) for epoch, begins in sorted(state.epochs.items()) if epoch > known])
        if not before:
            seen = self._least_starts(state, seen)
        kept += reconciled([entry for entry in history.entries if entry[0] > known], seen)
        if not before:
            kept += self._epochs_without_batches(state, history, kept[-1][0] if kept else -1)
        same = 0
        while same < min(len(kept), len(history.entries)) and kept[same] == history.entries[same]:
            same += 1
        history.cut(same)
        for epoch, offset in kept[same:]:
            history.begin(epoch, offset)
        file = history.save()
        if file is not None:
            file.close()
        return history

    def _least_starts(self, state: State, seen: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """A frame tells least starts within its own offsets; one before it may hold nothing any more at its end, and
        nothing is left to tell where the first epoch began."""
        starts: list[tuple[int, int, int]] = []
        entries = (entry for entry in state.queue.entries(state.start_offset) if entry.has_batches)
        before, entry = None, next(entries, None)
        for epoch, start, first in seen:
            while entry is not None and entry.offset < start:
                before, entry = entry, next(entries, None)
            end = 0 if before is None else reader.end_of_run(self._services.commit_log, before)
            starts.append((epoch, min(start, end), first))
        return starts

    def _epochs_without_batches(self, state: State, history: EpochHistory, last: int) -> list[tuple[int, int]]:
        """What the file tells of later epochs than the batches, where no batch can speak against it."""
        if not history.entries or history.entries[-1][0] <= last:
            return []
        run = None
        for entry in state.queue.entries(state.start_offset):
            run = entry if entry.has_batches else run
        end = 0 if run is None else reader.end_of_run(self._services.commit_log, run)
        return [entry for entry in history.entries if entry[0] > last and end <= entry[1] < state.queue.end_offset]

    def _snapshots(self, path: str, state: State) -> list[int]:
        """Those that are torn, or speak of what was cut, go. A cut removes the latter before it tells of itself, so a
        kill brings none back; a loss of power may, until a checkpoint has synced that. Nothing else can tell what the
        one at the start does."""
        offsets = _offsets(self._disk.list(path), SNAPSHOT)
        if self._clean and not state.touched:
            return offsets
        whole: list[int] = []
        for offset in offsets:
            file = stem(path, offset) + SNAPSHOT
            known = offset <= state.lowest_end or offset == state.start_offset <= state.cut_to or self._same_boot
            if (
                known
                and offset <= state.queue.end_offset
                and producers.decode(read_whole(self._disk, file)) is not None
            ):
                whole.append(offset)
            else:
                self._disk.remove(file)
        return whole


def _offsets(names: list[str], ending: str) -> list[int]:
    return sorted(int(name[:DIGITS]) for name in names if name.endswith(ending) and name[:DIGITS].isdigit())


def _rising(seen: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Epochs without those that were cut, of which only a removed file told: a later one has batches before them."""
    kept: list[tuple[int, int, int]] = []
    for each in reversed(seen):
        if not kept or each[2] < kept[-1][2]:
            kept.append(each)
    return kept[::-1]
