"""The deliveries of one share group from one partition: who has acquired which records, until when, and how often they
were delivered. No I/O.

Everything below `start_offset` is final. From there to `next_offset` offsets lie in ranges that are in one state each
and leave nothing out; a whole batch, or many, in one state cost as much as one record. From `next_offset` on everything
is available and was never delivered. What ends at the start raises it: a partition that is consumed in order has one
range or two.

    AVAILABLE -> ACQUIRED        acquire, delivery count + 1
    ACQUIRED -> ACKNOWLEDGED     accept
    ACQUIRED -> AVAILABLE        release, lock expired; end of the member's session, delivery count - 1
    ACQUIRED -> ARCHIVED         reject, gap; released or expired at the limit of deliveries
    ACQUIRED -> ARCHIVING        the same but a gap, where the group has a topic for dead letters
    ARCHIVING -> ARCHIVED        its dead letter is written
    AVAILABLE -> ARCHIVED        there turned out to be nothing to deliver
    ACQUIRED -> ACQUIRED         renew

What is released, or whose lock has expired, is AVAILABLE only after a while, if the group has a table of such waits.
A record that waits so, or for its dead letter, holds up no others: it counts for the bound of what is in flight, but
what is done with behind it does not.

Each step changes the state at once, and `take_write` gives what of it has not been taken to be kept. Nothing that was
decided may be told before it is kept. If it cannot be, this object is dropped and made anew from what is kept: a record
stays acquired by its member until its time, whoever leads the partition then.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Final, NamedTuple

from headrace.errors import ErrorCode
from headrace.queues.messages import (
    IN_FLIGHT_MAX,
    NO_OFFSET,
    AcknowledgementBatch,
    AcknowledgeType,
    AcquiredRecords,
    DeliveryState,
    Letter,
    Reason,
    ShareGroupConfig,
    ShareState,
    StateBatch,
)

AVAILABLE: Final = DeliveryState.AVAILABLE
ACQUIRED: Final = DeliveryState.ACQUIRED
ACKNOWLEDGED: Final = DeliveryState.ACKNOWLEDGED
ARCHIVING: Final = DeliveryState.ARCHIVING
ARCHIVED: Final = DeliveryState.ARCHIVED
NEVER_MS: Final = 1 << 62
ALONE_FROM_LIMIT: Final = 3
"""With so many deliveries allowed, the last one of a record is of that record alone: if it brings its member down, no
other is archived with it."""
TYPES: Final = frozenset(AcknowledgeType)

_first_offset = attrgetter("first")


class FoundBatch(NamedTuple):
    """A batch of the log; the last offset is included."""

    base_offset: int
    last_offset: int
    is_data: bool
    """False: nothing in it is ever delivered to this group."""


class AcknowledgedRun(NamedTuple):
    """Offsets that are acknowledged in one way."""

    first: int
    last: int
    type: int


@dataclass(slots=True)
class DeliveryCounts:
    """Records, since this broker began to count."""

    acquired: int = 0
    redelivered: int = 0
    """Of these, what had been delivered before."""
    acknowledged: int = 0
    released: int = 0
    expired: int = 0
    archived: list[int] = field(default_factory=lambda: [0] * len(Reason))
    """By reason; with those whose dead letters are still to be written."""
    dead_letters: int = 0
    """Written."""
    dead_letter_failures: int = 0
    """Attempts to write some."""


class _Range:
    """Offsets in one state."""

    __slots__ = ("count", "first", "last", "letter", "member", "state", "until_ms")

    def __init__(
        self,
        first: int,
        last: int,
        state: DeliveryState,
        count: int,
        member: str,
        until_ms: int,
        letter: Letter | None = None,
    ) -> None:
        self.first = first
        self.last = last
        self.state = state
        self.count = count
        self.member = member
        self.until_ms = until_ms
        self.letter = letter

    def is_like(self, other: _Range) -> bool:
        return (
            self.state is other.state
            and self.count == other.count
            and self.until_ms == other.until_ms
            and self.member == other.member
            and self.letter == other.letter
        )

    def __len__(self) -> int:
        return self.last - self.first + 1


class SharePartition:
    """With the state that is kept, the start of which is set."""

    def __init__(self, state: ShareState, config: ShareGroupConfig, counts: DeliveryCounts | None = None) -> None:
        assert state.start_offset >= 0, "the start has to be found first"
        self.config = config
        """What holds now; whoever knows the group keeps it up to date."""
        self.counts = DeliveryCounts() if counts is None else counts
        self.state_epoch = state.state_epoch
        self.leader_epoch = state.leader_epoch
        self.start_offset = self.next_offset = state.start_offset
        self.next_expiry_ms = NEVER_MS
        """No lock expires, and no wait ends, before."""
        self.archiving = 0
        """Records whose dead letters are not written yet."""
        self._ranges: list[_Range] = []
        self._unkept: dict[_Range, None] = {}
        """What has changed since it was taken to be kept."""
        self._taken_start = state.start_offset
        self._available_from = state.start_offset
        """No range below has anything available."""
        for batch in sorted(state.batches, key=attrgetter("first_offset")):
            self._restore(batch)
        self._unkept.clear()
        self._advance()

    def _restore(self, batch: StateBatch) -> None:
        if batch.last_offset < self.next_offset:
            return
        if batch.first_offset > self.next_offset:
            self._append(batch.first_offset - 1, AVAILABLE, 0)
        first, letter = max(batch.first_offset, self.next_offset), batch.letter
        if batch.state is ARCHIVING and letter is None:
            letter = Letter(Reason.REJECTED)  # of one that was kept by Kafka's fields alone
        self._append(batch.last_offset, batch.state, batch.delivery_count, batch.member, batch.until_ms, letter)
        if batch.until_ms or batch.state is ACQUIRED:
            self.next_expiry_ms = min(self.next_expiry_ms, batch.until_ms)
        if batch.state is ARCHIVING:
            self.archiving += batch.last_offset - first + 1

    # What is there.

    def first_available(self) -> int:
        """Where to read next: at the first record that can be acquired, or behind all that ever were."""
        if self._ranges and self._available_from < self.next_offset:
            for index in range(self._at(max(self._available_from, self.start_offset)), len(self._ranges)):
                each = self._ranges[index]
                if each.state is AVAILABLE and not each.until_ms:
                    self._available_from = max(self._available_from, each.first)
                    return self._available_from
            self._available_from = self.next_offset
        return self.next_offset

    @property
    def has_room(self) -> bool:
        """Whether records may be acquired that never were."""
        return self._room() > 0

    def _room(self, *, whole: bool = False) -> int:
        """How many offsets more may be in flight, or, of a batch that is taken whole, may be at all. Counted from the
        first one that somebody has or may have now: what waits before that, for its time or its dead letter, counts for
        itself alone, but may be a range, and have another behind it."""
        first, waiting = self.start_offset, 0
        for each in self._ranges:
            if each.state is ACQUIRED or (each.state is AVAILABLE and not each.until_ms):
                break
            first = each.last + 1
            waiting += len(each) if each.state is ARCHIVING or each.state is AVAILABLE else 0
        in_flight = self.next_offset - first
        most = IN_FLIGHT_MAX - in_flight - (2 * waiting + 1 if waiting else 0)
        return most if whole else min(most, self.config.record_locks_max - in_flight - waiting)

    def batches(self) -> Iterator[StateBatch]:
        """The whole state above the start."""
        return (_batch(each) for each in self._ranges)

    def in_state(self, state: DeliveryState) -> int:
        """How many records."""
        return sum([len(each) for each in self._ranges if each.state is state])

    # Steps.

    def acquire(
        self,
        member: str,
        from_offset: int,
        found: Iterable[FoundBatch],
        max_records: int,
        until_ms: int,
        *,
        record_limit: bool = False,
    ) -> list[AcquiredRecords]:
        """Of these batches, which were read from this offset on, have the member acquire what is available. Offsets
        between them are gone, and archived. A batch that is begun is taken whole, unless `record_limit`, or as far as
        offsets may be in flight."""
        assert from_offset <= self.next_offset, "what is passed over has to be read"
        taken: list[AcquiredRecords] = []
        position = began = max(from_offset, self.start_offset)
        left = max_records
        for base, last, is_data in found:
            if last < position:
                continue
            if left <= 0:
                break
            if position < self.next_offset <= base:  # what was in flight and is gone: that may make room
                self._pass_over(position, self.next_offset - 1)
                position = self.next_offset
                self._advance()
            if base >= self.next_offset and not self.has_room:
                break
            if base > position:
                self._pass_over(position, base - 1)
                position = base
            if not is_data:
                self._pass_over(position, last)
            else:
                left = self._take(taken, position, last, member, until_ms, left, record_limit=record_limit)
            position = last + 1
        if taken:
            self.next_expiry_ms = min(self.next_expiry_ms, until_ms)
        if position > began:
            self._join(began, position)
            self._advance()
        return taken

    def _take(
        self,
        taken: list[AcquiredRecords],
        first: int,
        last: int,
        member: str,
        until_ms: int,
        left: int,
        *,
        record_limit: bool,
    ) -> int:
        """Acquire from one batch. Answers how many records may follow; 0 also when none may for another reason."""
        limit = self.config.delivery_count_limit
        index = self._at(first) if first < self.next_offset else len(self._ranges)
        while index < len(self._ranges) and self._ranges[index].first <= last:
            each = self._ranges[index]
            if each.state is AVAILABLE and not each.until_ms:
                begin, end = max(first, each.first), min(last, each.last)
                alone = each.count == limit - 1 and limit >= ALONE_FROM_LIMIT
                if alone and taken:
                    return 0
                if alone or (record_limit and end - begin >= left):
                    end = begin if alone else begin + left - 1
                count = each.count + 1
                self._tell(taken, begin, end, count)
                index = self._change(index, begin, end, ACQUIRED, count, member, until_ms)
                left -= end - begin + 1
                if alone or (record_limit and left <= 0):
                    return 0
            index += 1
        if last >= self.next_offset:
            if not self.has_room:
                return 0
            begin = self.next_offset
            room = self._room(whole=not record_limit)
            end = min(last, begin + (min(left, room) if record_limit else room) - 1)
            self._tell(taken, begin, end, 1)
            self._append(end, ACQUIRED, 1, member, until_ms)
            left = 0 if end < last else left - (end - begin + 1)
        return max(0, left)

    def _tell(self, taken: list[AcquiredRecords], first: int, last: int, count: int) -> None:
        records = last - first + 1
        self.counts.acquired += records
        if count > 1:
            self.counts.redelivered += records
        if taken and taken[-1].last_offset == first - 1 and taken[-1].delivery_count == count:
            first = taken.pop().first_offset
        taken.append(AcquiredRecords(first, last, count))

    def _pass_over(self, first: int, last: int) -> None:
        """There is nothing to deliver at these offsets."""
        index = self._at(first) if first < self.next_offset else len(self._ranges)
        while index < len(self._ranges) and self._ranges[index].first <= last:
            each = self._ranges[index]
            if each.state is AVAILABLE:
                begin, end = max(first, each.first), min(last, each.last)
                self._count(Reason.GAP, end - begin + 1)
                index = self._change(index, begin, end, ARCHIVED, each.count)
            index += 1
        if last >= self.next_offset:
            self._count(Reason.GAP, last - self.next_offset + 1)
            self._append(last, ARCHIVED, 0)

    def acknowledge(self, member: str, batches: Sequence[AcknowledgementBatch], until_ms: int, now_ms: int = 0) -> int:
        """Take all that a member says, or nothing and a code: INVALID_RECORD_STATE if it has not acquired a record,
        INVALID_REQUEST for what can never be. What lies below the start is passed over, as Kafka does: it is final.
        `until_ms`: what is renewed is locked until then."""
        fault = check_acknowledgements(batches)
        if fault != ErrorCode.NONE:
            return fault
        runs = [run for batch in batches for run in _runs(batch, self.start_offset)]
        for run in runs:
            fault = self._run_fault(member, run)
            if fault != ErrorCode.NONE:
                return fault
        for run in runs:
            index = self._at(run.first)
            while index < len(self._ranges) and self._ranges[index].first <= run.last:
                index = self._acknowledge(index, run, until_ms, now_ms) + 1
            self._join(run.first, run.last)
        if runs:
            self._advance()
        return ErrorCode.NONE

    def _run_fault(self, member: str, run: AcknowledgedRun) -> int:
        if run.last >= self.next_offset:
            return ErrorCode.INVALID_RECORD_STATE if run.first >= self.next_offset else ErrorCode.INVALID_REQUEST
        for index in range(self._at(run.first), len(self._ranges)):
            each = self._ranges[index]
            if each.first > run.last:
                break
            if each.state is not ACQUIRED or each.member != member:
                return ErrorCode.INVALID_RECORD_STATE
        return ErrorCode.NONE

    def _acknowledge(self, index: int, run: AcknowledgedRun, until_ms: int, now_ms: int) -> int:
        """Of the range at this index, what is in the run."""
        each = self._ranges[index]
        first, last, count, how = max(run.first, each.first), min(run.last, each.last), each.count, run.type
        records = last - first + 1
        if how == AcknowledgeType.ACCEPT:
            self.counts.acknowledged += records
            return self._change(index, first, last, ACKNOWLEDGED, count)
        if how == AcknowledgeType.RENEW:
            self.next_expiry_ms = min(self.next_expiry_ms, until_ms)
            return self._change(index, first, last, ACQUIRED, count, each.member, until_ms)
        if how == AcknowledgeType.RELEASE:
            self.counts.released += records
            return self._give_back(index, first, last, now_ms)
        if how == AcknowledgeType.REJECT:
            return self._give_up(index, first, last, Reason.REJECTED)
        self._count(Reason.GAP, records)
        return self._change(index, first, last, ARCHIVED, count)

    def _give_up(self, index: int, first: int, last: int, reason: Reason) -> int:
        """Of the range at this index, these offsets are delivered to nobody any more."""
        count, records = self._ranges[index].count, last - first + 1
        self._count(reason, records)
        if not self.config.dead_letter_topic:
            return self._change(index, first, last, ARCHIVED, count)
        self.archiving += records
        return self._change(index, first, last, ARCHIVING, count, letter=Letter(reason))

    def _give_back(self, index: int, first: int, last: int, now_ms: int) -> int:
        """Of the range at this index, these offsets were not processed: others get them, unless that was the last
        time, and perhaps only later."""
        count = self._ranges[index].count
        if count >= self.config.delivery_count_limit:
            return self._give_up(index, first, last, Reason.DELIVERIES)
        wait_ms = self.config.backoff_ms(count)
        if wait_ms:
            self.next_expiry_ms = min(self.next_expiry_ms, now_ms + wait_ms)
            return self._change(index, first, last, AVAILABLE, count, until_ms=now_ms + wait_ms)
        self._available_from = min(self._available_from, first)
        return self._change(index, first, last, AVAILABLE, count)

    def expire(self, now_ms: int) -> int:
        """Take back what is locked no longer, and let go what has waited long enough; answers how many records."""
        expired, ended = 0, 0
        self.next_expiry_ms = NEVER_MS
        for index, each in enumerate(self._ranges):
            if not each.until_ms and each.state is not ACQUIRED:
                continue
            if each.until_ms > now_ms:
                self.next_expiry_ms = min(self.next_expiry_ms, each.until_ms)
            elif each.state is ACQUIRED:
                expired += len(each)
                self._give_back(index, each.first, each.last, now_ms)
            else:
                ended += len(each)
                self._available_from = min(self._available_from, each.first)
                self._change(index, each.first, each.last, AVAILABLE, each.count)
        if expired or ended:
            self.counts.expired += expired
            self._join(self.start_offset, self.next_offset - 1)
            self._advance()
        return expired + ended

    def release_member(self, member: str) -> int:
        """The member's session has ended. What it has acquired counts as never delivered, as in Kafka: what it had seen
        it would have acknowledged at its end. Answers how many records."""
        released = 0
        for index, each in enumerate(self._ranges):
            if each.state is ACQUIRED and each.member == member:
                released += len(each)
                self._available_from = min(self._available_from, each.first)
                self._change(index, each.first, each.last, AVAILABLE, max(0, each.count - 1))
        if released:
            self.counts.released += released
            self._join(self.start_offset, self.next_offset - 1)
        return released

    def log_start(self, offset: int) -> int:
        """The log begins here now; answers how many records are gone that were neither accepted nor archived."""
        if offset <= self.start_offset:
            return 0
        gone = max(0, offset - self.next_offset)
        whole = 0
        for each in self._ranges:
            if each.first >= offset:
                break
            lost = min(each.last, offset - 1) - each.first + 1
            if each.state is not ACKNOWLEDGED and each.state is not ARCHIVED:
                gone += lost
            if each.state is ARCHIVING:
                self.archiving -= lost
            if each.last >= offset:
                each.first = offset
                self._unaddress(each)
                break
            self._unkept.pop(each, None)
            whole += 1
        del self._ranges[:whole]
        self._count(Reason.DELETED, gone)
        self.start_offset = offset
        self.next_offset = max(self.next_offset, offset)
        self._advance()
        return gone

    def log_end(self, offset: int) -> None:
        """The log ends here, before what was acquired of it: an election, or a loss of power, has cost records. What
        comes in their place was never delivered."""
        if offset >= self.next_offset:
            return
        if offset < self.start_offset:
            self._put_first(offset)
        index = self._at(offset)
        while index < len(self._ranges):
            each = self._ranges[index]
            if each.letter is not None:
                self.archiving -= each.last - max(offset, each.first) + 1
                self._unaddress(each)
            index = self._change(index, max(offset, each.first), each.last, AVAILABLE, 0) + 1
        self._available_from = min(self._available_from, offset)
        self._join(offset, self.next_offset - 1)
        self._advance()

    # Dead letters.

    def letters(self) -> Iterator[StateBatch]:
        """What waits for its dead letter. Those that are addressed alike are sent as one range."""
        if self.archiving:
            yield from (_batch(each) for each in self._ranges if each.state is ARCHIVING)

    def address_letters(self, first: int, last: int, producer_id: int, sequence: int = 0) -> None:
        """The letters of these offsets, which are in one range, are about to be sent under this identity; NO_PRODUCER:
        they are not."""
        index = self._at(first)
        each = self._ranges[index]
        assert each.state is ARCHIVING, "only what waits for its letter is sent"
        assert each.letter is not None
        letter = Letter(each.letter.reason, producer_id, sequence)
        self._change(index, first, last, ARCHIVING, each.count, letter=letter)
        self._join(first, last)

    def _unaddress(self, each: _Range) -> None:
        """It is not all that was sent under its identity."""
        if each.letter is not None and each.letter.is_addressed:
            each.letter = Letter(each.letter.reason)
            self._unkept[each] = None

    def archive(self, first: int, last: int) -> int:
        """Of these offsets, what waits for its dead letter waits no more; answers how many records that are."""
        first, last = max(first, self.start_offset), min(last, self.next_offset - 1)
        archived = 0
        if first > last or not self.archiving:
            return archived
        index = self._at(first)
        while index < len(self._ranges) and self._ranges[index].first <= last:
            each = self._ranges[index]
            if each.state is ARCHIVING:
                begin, end = max(first, each.first), min(last, each.last)
                archived += end - begin + 1
                index = self._change(index, begin, end, ARCHIVED, each.count)
            index += 1
        self.archiving -= archived
        self._join(first, last)
        self._advance()
        return archived

    # Keeping.

    def keep_start(self) -> None:
        """The start was only found now."""
        self._taken_start = NO_OFFSET

    def _put_first(self, offset: int) -> None:
        before = _Range(offset, self.start_offset - 1, AVAILABLE, 0, "", 0)
        self._ranges.insert(0, before)
        self._unkept[before] = None
        self.start_offset = offset

    def take_write(self) -> ShareState | None:
        """What has to be kept and was not taken before."""
        if not self._unkept and self._taken_start == self.start_offset:
            return None
        changed = sorted(self._unkept, key=_first_offset) if len(self._unkept) > 1 else self._unkept
        batches = tuple([_batch(each) for each in changed])
        self._unkept = {}
        self._taken_start = self.start_offset
        return ShareState(self.state_epoch, self.leader_epoch, self.start_offset, batches)

    # Ranges.

    def _at(self, offset: int) -> int:
        """Where the range is that holds the offset, which lies between the start and the next."""
        ranges = self._ranges
        if ranges[0].last >= offset:
            return 0
        return bisect_right(ranges, offset, key=_first_offset) - 1

    def _append(
        self,
        last: int,
        state: DeliveryState,
        count: int,
        member: str = "",
        until_ms: int = 0,
        letter: Letter | None = None,
    ) -> None:
        """What begins at the next offset."""
        added = _Range(self.next_offset, last, state, count, member, until_ms, letter)
        ranges = self._ranges
        if ranges and ranges[-1].is_like(added):
            ranges[-1].last = last
            self._unkept[ranges[-1]] = None
        else:
            ranges.append(added)
            self._unkept[added] = None
        self.next_offset = last + 1

    def _change(
        self,
        index: int,
        first: int,
        last: int,
        state: DeliveryState,
        count: int,
        member: str = "",
        until_ms: int = 0,
        letter: Letter | None = None,
    ) -> int:
        """Put offsets of the range at this index into a state; what is left of it stays beside them. Answers the index
        of the range that they are now."""
        each = self._ranges[index]
        if each.first < first:
            self._split(index, each, each.first, first - 1)
            each.first = first
            index += 1
        if each.last > last:
            self._split(index + 1, each, last + 1, each.last)
            each.last = last
        each.state, each.count, each.member, each.until_ms, each.letter = state, count, member, until_ms, letter
        self._unkept[each] = None
        return index

    def _split(self, index: int, each: _Range, first: int, last: int) -> None:
        part = _Range(first, last, each.state, each.count, each.member, each.until_ms, each.letter)
        self._ranges.insert(index, part)
        if each in self._unkept:
            self._unkept[part] = None

    def _join(self, first: int, last: int) -> None:
        """Make one of ranges that are alike, from the one before `first` to the one behind `last`."""
        ranges = self._ranges
        if len(ranges) < 2:
            return
        begin = self._at(max(self.start_offset, first - 1))
        end, joined = begin, [ranges[begin]]
        for end in range(begin + 1, len(ranges)):
            each, before = ranges[end], joined[-1]
            if each.first > last + 1:
                end -= 1
                break
            if before.is_like(each):
                before.last = each.last
                if self._unkept.pop(each, False) is None:
                    self._unkept[before] = None
            else:
                joined.append(each)
        if len(joined) <= end - begin:
            ranges[begin : end + 1] = joined

    def _advance(self) -> None:
        """What is final at the start is done with."""
        ranges, final = self._ranges, 0
        for each in ranges:
            if each.state is not ACKNOWLEDGED and each.state is not ARCHIVED:
                break
            self._unkept.pop(each, None)
            final += 1
        if final:
            del ranges[:final]
            self.start_offset = ranges[0].first if ranges else self.next_offset

    def _count(self, reason: Reason, records: int) -> None:
        self.counts.archived[reason] += records


def check_acknowledgements(batches: Sequence[AcknowledgementBatch]) -> int:
    """INVALID_REQUEST unless they rise, do not overlap, and have types that there are: one, or one for each offset."""
    following = 0
    for first, last, types in batches:
        if first < following or last < first or len(types) not in (1, last - first + 1) or not TYPES.issuperset(types):
            return ErrorCode.INVALID_REQUEST
        following = last + 1
    return ErrorCode.NONE


def _runs(batch: AcknowledgementBatch, start_offset: int) -> Iterator[AcknowledgedRun]:
    """A batch, from the start on, as offsets of one type each."""
    first, last, types = batch
    if len(types) == 1:
        if last >= start_offset:
            yield AcknowledgedRun(max(first, start_offset), last, types[0])
        return
    for how, offsets in groupby(range(max(first, start_offset), last + 1), key=lambda offset: types[offset - first]):
        run = list(offsets)
        yield AcknowledgedRun(run[0], run[-1], how)


def _batch(each: _Range) -> StateBatch:
    return StateBatch(each.first, each.last, each.state, each.count, each.member, each.until_ms, each.letter)
