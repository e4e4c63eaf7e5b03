"""Bringing queues up to date with the commit log, frame by frame, at start.

Bytes that are no whole frame, or a frame with a batch that does not agree with its CRC, are judged by where they lie:

- below what is known to be synced they have been damaged since: they stay, are never served, and what is whole before
  and after them is. A partition misses the offsets that were in them; its queue says so. One of which nothing follows
  may have had its last frame there, and its end is in doubt;
- the same holds above it as long as the kernel has run on since they were written: a write that died with its process
  has nothing behind it;
- else they are a torn tail there: cut, with all that follows, of every partition.

What is known to be synced is what the checkpoint says, or a synced frame anywhere in the log. A frame whose batches all
agree with their CRCs is not torn, wherever it lies: if an offset, an epoch or a count in it cannot be true, its own
partition is damaged, and nothing is cut.

A CRC does not cover the epoch of a batch. It is told by a frame before the first batch of its epoch, and a batch that
differs is damaged. What was written before there were such frames is compared with the file of epochs: that is written
before the batches, but synced by checkpoints alone, so it knows every epoch as long as the kernel runs. After a loss of
power it may not know the last ones; and where bytes are broken, or a file was removed, a frame may be missing. Then
batches are believed as long as their epochs do not fall.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from headrace.storage.commitlog import frames
from headrace.storage.commitlog.commitlog import CommitLog
from headrace.storage.commitlog.frames import (
    APPEND,
    BOUNDS,
    EPOCH,
    FRAME_BYTES,
    SYNCED,
    Batches,
    BrokenBytes,
    Frame,
    Key,
    Scanner,
    Unsound,
    places,
    read_batches,
    read_damaged,
)
from headrace.storage.commitlog.queue import Queue
from headrace.storage.commitlog.queuefile import DAMAGED, GONE, NO_TIMESTAMP, Replacement, Run
from headrace.storage.epochs import EpochHistory
from headrace.storage.log import Tail, TopicPartition

log = logging.getLogger(__name__)


@dataclass(slots=True)
class State:
    """One partition on its way from what the checkpoint says to what the commit log does."""

    topic_partition: TopicPartition
    queue: Queue
    interval_bytes: int
    start_offset: int = 0
    claimed_start: int = 0
    """Where it began by the checkpoint, if that speaks of it."""
    from_position: int = 0
    """Frames before it are in the queue already."""
    known: bool = False
    """Whether anything was heard of the partition."""
    touched: bool = False
    rebuilt: bool = False
    """Whether nothing but the commit log counts."""
    history: EpochHistory | None = None
    saved_epochs: EpochHistory | None = None
    """The epochs as their file has them; None if batches are compared with it otherwise."""
    framed: list[tuple[int, int]] = field(default_factory=list)
    """Epochs and their starts as frames tell them; the first ones may be missing. Empty: nobody tells."""
    framed_at: int = -1
    """Position of the last frame that did."""
    epochs: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Every epoch that was seen: its least start (see `epochs`) and its first batch."""
    last_epoch: int = -1
    lowest_end: int = 0
    """Nothing that was known of higher offsets before counts: the checkpoint's end, or a cut behind it."""
    checkpoint_position: int = 0
    cut_to: int = 1 << 62
    """The lowest end that a cut behind the checkpoint's position left."""
    checked_from: int = 1 << 62
    seen: int = -1
    """Position of the last frame."""
    missing: list[tuple[int, int, BrokenBytes | None]] = field(default_factory=list)
    """Offsets that no whole frame held, and the broken bytes that they may have been in."""
    damaged_from: int | None = None
    """The first of them, once that is settled."""
    tail: Tail = Tail.WHOLE

    def may_end_in(self, position: int) -> bool:
        """Whether a last frame of it may have been there; what the checkpoint tells of it was before."""
        return position >= max(self.from_position, self.checkpoint_position) and position > self.seen

    def take_epoch_frame(self, frame: Frame, position: int) -> None:
        start, epoch = frame.first_offset, frame.next_offset
        self.framed = [each for each in self.framed if each[0] < epoch and each[1] <= start] + [(epoch, start)]
        self.framed_at = position

    def framed_epoch(self, offset: int, epoch: int) -> int:
        """Of a batch at the offset that bears this epoch: what it was written in, -1 if that is another, not known."""
        at = bisect_right(self.framed, offset, key=lambda entry: entry[1])
        if at:
            return self.framed[at - 1][0]
        return epoch if epoch < self.framed[0][0] else -1

    def apply(self, frame: Frame, found: Batches | None, broken: BrokenBytes | None) -> None:
        self.touched = True
        if not self.known:
            self.known = True
            start = frame.first_offset
            if frame.kind != BOUNDS:  # which comes first: it is lost, and more may be
                start = min(start, self.claimed_start)
            self.start_offset = self.queue.end_offset = start
        if frame.kind == BOUNDS:
            self._bounds(frame, broken)
            return
        assert found is not None
        end = self.queue.end_offset
        if frame.first_offset > end:
            self._miss(end, frame.first_offset, frame, broken)
        elif frame.first_offset < end and frame.kind == APPEND:
            self._cut(frame.first_offset, frame, broken)
        if frame.kind == APPEND:  # what lies behind a replaced range was not looked at
            self.checked_from = min(self.checked_from, frame.first_offset)
        if frame.kind == APPEND and self.last_epoch < 0 and found.epochs:
            self.epochs = {epoch: begins for epoch, begins in self.epochs.items() if epoch <= found.epochs[0][0]}
        for epoch, least, first in found.epochs:
            known = self.epochs.get(epoch, (least, first))
            self.epochs[epoch] = min(least, known[0]), min(first, known[1])
        if frame.kind == APPEND:
            self.last_epoch = found.epoch
            for nth, run in enumerate(found.runs):
                following = found.runs[nth + 1].offset if nth + 1 < len(found.runs) else frame.next_offset
                self.queue.add_roomy(run, following)
            self.queue.end_offset = frame.next_offset
        else:
            self._replace(frame, found.runs)

    def _replace(self, frame: Frame, runs: list[Run]) -> None:
        if not runs or runs[0].offset > frame.first_offset:
            gone = Run(frame.number, frame.byte - FRAME_BYTES, GONE, frame.first_offset, NO_TIMESTAMP)
            runs = [gone, *runs]
        if frame.next_offset > frame.first_offset:
            self.queue.splice([Replacement(frame.first_offset, frame.next_offset, runs)])
            self.queue.drop_before(self.start_offset)

    def _bounds(self, frame: Frame, broken: BrokenBytes | None) -> None:
        first, following, end = frame.first_offset, frame.next_offset, self.queue.end_offset
        self.framed = [entry for entry in self.framed if entry[1] < following]
        if following < end:
            self._cut(following, frame, broken)
        elif first == following:
            self.queue.drop_all(following)
        elif following > end:
            self._miss(end, following, frame, broken)
        if first == following:  # perhaps it began anew, and the frame that said so went with its file
            self.last_epoch = -1
        self.start_offset = first
        self.queue.drop_before(first)

    def _cut(self, offset: int, frame: Frame, broken: BrokenBytes | None) -> None:
        end = self.queue.cut(offset)
        if end < offset:  # the batch across it had been truncated before, and what took its place has moved since
            self._miss(end, offset, frame, broken)
        self.queue.end_offset = offset
        self.lowest_end = min(self.lowest_end, offset)
        if frames.position(frame.number, frame.byte) > self.checkpoint_position:
            self.cut_to = min(self.cut_to, offset)
        self.checked_from = min(self.checked_from, offset)
        self.epochs = {epoch: begins for epoch, begins in self.epochs.items() if begins[1] < offset}
        self.last_epoch = max(self.epochs, default=-1)

    def _miss(self, first_offset: int, next_offset: int, frame: Frame, broken: BrokenBytes | None) -> None:
        self.missing.append((first_offset, next_offset, broken))
        number, byte = (broken.number, broken.byte) if broken else (frame.number, frame.byte - FRAME_BYTES)
        self.queue.add_roomy(Run(number, byte, DAMAGED, first_offset, NO_TIMESTAMP), next_offset)

    def settle(self, commit_log: CommitLog) -> None:
        """Say what is missing. So are offsets before everything else that were in files that are gone: what was
        deleted is told by a frame, and nothing else raises a start."""
        if not self.missing:
            return
        for entry in list(self.queue.entries(self.start_offset)):
            if entry.size != DAMAGED or entry.offset >= entry.next_offset:
                continue
            holes = [hole for hole in self.missing if hole[0] < entry.next_offset and entry.offset < hole[1]]
            if not holes:
                continue  # known for long
            if self.damaged_from is None:
                self.damaged_from = max(entry.offset, self.start_offset)
            where = next((broken for _, _, broken in holes if broken is not None), None)
            log.error(
                "%s: offsets %d to %d are missing: %s at byte %d is damaged (%s); what is whole around them is served",
                self.topic_partition,
                max(entry.offset, self.start_offset),
                entry.next_offset - 1,
                commit_log.path(entry.number),
                entry.byte,
                where.reason if where else "no frame holds them",
            )


class Replay:
    """One pass over the commit log from a position on."""

    def __init__(
        self, commit_log: CommitLog, states: Mapping[Key, State], synced: int, *, same_boot: bool = False
    ) -> None:
        self._commit_log = commit_log
        self._states = states
        self._synced = synced
        self._same_boot = same_boot
        self._scanner = Scanner(commit_log)
        self._broken: BrokenBytes | None = None
        self.tail = Tail.WHOLE

    def run(self, from_position: int) -> None:
        torn = self._read(from_position)
        if torn is not None:
            self._cut(torn)
        self._doubt_ends()

    def _read(self, from_position: int) -> BrokenBytes | None:
        """Answers where the log is to be cut."""
        tail: BrokenBytes | None = None
        for found in self._scanner.frames(from_position):
            if tail is not None:
                self._damaged(tail)
            tail = found if isinstance(found, BrokenBytes) else None
            if isinstance(found, BrokenBytes):
                if self._is_torn(found.number, found.byte):
                    return found
            elif found.kind == SYNCED:
                self._synced = max(self._synced, found.first_offset)
                lost = self._lost_before(found) if found.next_offset else None
                if lost is not None:
                    return lost
            else:
                torn = self._take(found)
                if torn is not None:
                    return torn
        return tail  # nothing follows it: the log goes on from there

    def _doubt_ends(self) -> None:
        """Of partitions of which nothing came behind broken bytes: those may have been the last of theirs."""
        if self._broken is None:
            return
        position = frames.position(self._broken.number, self._broken.byte)
        ended = [state for state in self._states.values() if state.may_end_in(position)]
        if ended:
            self._commit_log.tail_found(Tail.HOLED)
        for state in ended:
            state.tail = Tail.HOLED

    def _lost_before(self, frame: Frame) -> BrokenBytes | None:
        """Where the log is torn because of what is missing between a file and the one that was written before it. A
        file that is not there at all was removed if it had been synced: nothing else is removed."""
        number, end = frame.next_offset >> 32, frame.next_offset & frames.BYTE_MASK
        size = self._commit_log.sizes.get(number)
        if size is None:
            if self._is_torn(number, end - 1):
                return BrokenBytes(frame.number, 0, 0, "the file before it is missing")
            for state in self._states.values():
                state.framed = []  # it may have told of epochs whose batches were moved from it
            return None
        if size >= end:
            return None
        lost = BrokenBytes(number, size, size, "the end of the file is missing")
        if self._is_torn(number, size):
            return lost
        self._damaged(lost)
        return None

    def _take(self, frame: Frame) -> BrokenBytes | None:
        """Give a frame to its partition; if it is torn, it is answered instead."""
        state = self._states.get(frame.key)
        start = frame.byte - FRAME_BYTES
        position = frames.position(frame.number, start)
        if state is None or position < state.from_position:
            return None
        broken = self._broken
        if broken is not None and frames.position(broken.number, broken.byte) < state.seen:
            broken = None  # the partition went on behind it
        if broken is not None and frames.position(broken.number, broken.byte) > state.framed_at:
            state.framed = []  # a frame that told an epoch may have been there
        if frame.kind == EPOCH:
            state.take_epoch_frame(frame, position)
            return None
        state.seen = position
        if frame.kind == BOUNDS:
            state.apply(frame, None, broken)
            return None
        payload = self._scanner.payload(frame)
        floor = self._epoch_floor(state, frame)
        found = read_batches(payload, frame, state.interval_bytes, floor)
        if isinstance(found, Unsound):
            if found.torn and self._is_torn(frame.number, start):
                return BrokenBytes(frame.number, start, frame.end, found.reason)
            wrong = self._wrong_epochs(state, frame, payload)
            found = self._damaged_batches(state, frame, floor, wrong)
        elif wrong := self._wrong_epochs(state, frame, payload) if self._may_differ(state, frame, found) else {}:
            found = self._damaged_batches(state, frame, floor, wrong)
        state.apply(frame, found, broken)
        return None

    def _knows_all(self, state: State) -> bool:
        """Whether the file of epochs speaks for every batch that goes on with its partition."""
        saved = state.saved_epochs
        return (
            self._same_boot
            and not state.rebuilt
            and saved is not None
            and bool(saved.entries)
            and not saved.was_rebuilt
        )

    def _right_epoch(self, state: State, frame: Frame) -> Callable[[int, int], int] | None:
        """Answers in which epoch a batch was written, by its offset and the epoch that it bears (-1: in another, not
        known). None: nothing is known but what batches say."""
        if state.framed:
            return state.framed_epoch
        saved = state.saved_epochs
        if saved is None or not self._knows_all(state) or frame.first_offset < state.queue.end_offset:
            return None

        def by_file(offset: int, _epoch: int) -> int:
            epoch = saved.epoch_at(offset)
            return -1 if epoch is None else epoch

        return by_file

    def _may_differ(self, state: State, frame: Frame, found: Batches) -> bool:
        right = self._right_epoch(state, frame)
        if right is None or found.last_base < 0:
            return False
        ends = {right(offset, found.epoch) for offset in (frame.first_offset, found.last_base)}
        return bool(found.epochs) or ends != {found.epoch}

    def _wrong_epochs(self, state: State, frame: Frame, payload: memoryview) -> dict[int, int]:
        """Offsets of batches that were written in another epoch than they have, and in which (-1: nobody knows)."""
        right = self._right_epoch(state, frame)
        if right is None:
            return {}
        epochs = ((base, epoch, right(base, epoch)) for base, epoch in places(payload))
        return {base: written for base, epoch, written in epochs if written != epoch}

    def _damaged_batches(self, state: State, frame: Frame, floor: int, wrong: Mapping[int, int]) -> Batches:
        """What is whole of a frame, without the batches at offsets in `wrong`, which have another epoch than that."""
        found = read_damaged(self._commit_log.file(frame.number), frame, floor, wrong.get)
        for part in found.damage:
            last = frame.next_offset if part.next_offset is None else part.next_offset
            where = BrokenBytes(frame.number, part.position, part.end, part.reason)
            state.missing.append((part.expected_offset, last, where))
        return found

    def _epoch_floor(self, state: State, frame: Frame) -> int:
        return state.last_epoch if frame.kind == APPEND and frame.first_offset >= state.queue.end_offset else -1

    def _is_torn(self, number: int, byte: int) -> bool:
        """Of bytes that are not the last ones."""
        if self._same_boot:
            return False
        where = frames.position(number, byte)
        if where >= self._synced:
            for found in Scanner(self._commit_log).frames(where + 1):
                if isinstance(found, Frame) and found.kind == SYNCED:
                    self._synced = max(self._synced, found.first_offset)
        return where >= self._synced

    def _damaged(self, found: BrokenBytes) -> None:
        self._broken = found
        log.error(
            "%s at byte %d: %d bytes are damaged (%s); the partitions that they belonged to are named below",
            self._commit_log.path(found.number),
            found.byte,
            found.end - found.byte,
            found.reason,
        )

    def _cut(self, found: BrokenBytes) -> None:
        behind = Scanner(self._commit_log).frames(frames.position(found.number, found.end))
        if any(isinstance(each, Frame) for each in behind):
            self.tail = Tail.HOLED
        else:
            self.tail = Tail.CUT_SHORT if found.cut_short else Tail.TORN
        self._commit_log.tail_found(self.tail)
        lost = sum(size for number, size in self._commit_log.sizes.items() if number >= found.number) - found.byte
        synced = frames.position(found.number, found.byte) < self._synced
        say = log.error if synced else log.warning
        say(
            "%s is cut at byte %d: %d bytes from there on are not whole, and %s (%s)",
            self._commit_log.path(found.number),
            found.byte,
            lost,
            "had been synced" if synced else "were not synced",
            found.reason,
        )
        self._commit_log.cut(found.number, found.byte)
