"""The rules of a share partition as one dict with an entry for each offset, and nothing clever: what the real one is
compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from headrace.errors import ErrorCode
from headrace.queues.messages import (
    AcknowledgementBatch,
    AcknowledgeType,
    DeliveryState,
    Letter,
    Reason,
    ShareGroupConfig,
    ShareState,
)
from headrace.queues.share_partition import FoundBatch

FINAL = (DeliveryState.ACKNOWLEDGED, DeliveryState.ARCHIVED)


@dataclass(frozen=True)
class Offset:
    state: DeliveryState = DeliveryState.AVAILABLE
    count: int = 0
    member: str = ""
    until_ms: int = 0
    letter: Letter | None = None


NEW = Offset()


@dataclass
class NaiveSharePartition:
    config: ShareGroupConfig
    start: int = 0
    next: int = 0
    offsets: dict[int, Offset] = field(default_factory=dict)
    archived: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))

    def copy(self) -> NaiveSharePartition:
        return replace(self, offsets=dict(self.offsets), archived=dict(self.archived))

    def at(self, offset: int) -> Offset:
        return self.offsets.get(offset, NEW)

    def first_available(self) -> int:
        return next((at for at in range(self.start, self.next) if self.is_available(at)), self.next)

    def is_available(self, offset: int) -> bool:
        return self.at(offset).state == DeliveryState.AVAILABLE and not self.at(offset).until_ms

    def is_live(self, offset: int) -> bool:
        """Somebody has it, or may have it now."""
        return self.is_available(offset) or self.at(offset).state == DeliveryState.ACQUIRED

    def room(self) -> int:
        """What waits before the first that is live counts for itself alone."""
        first = next((at for at in range(self.start, self.next) if self.is_live(at)), self.next)
        waiting = [at for at in range(self.start, first) if self.at(at).state not in FINAL]
        return self.config.record_locks_max - (self.next - first) - len(waiting)

    def acquire(
        self,
        member: str,
        from_offset: int,
        found: Sequence[FoundBatch],
        most: int,
        until_ms: int,
        *,
        record_limit: bool,
    ) -> list[tuple[int, int]]:
        """Offsets and their delivery counts."""
        taken: list[tuple[int, int]] = []
        position = from_offset
        for base, last, is_data in found:
            if last < position:
                continue
            if len(taken) >= most:
                break
            if position < self.next <= base:
                self._archive_gap(range(position, self.next))
                self._advance()
            if base >= self.next and self.room() <= 0:
                break
            self._archive_gap(range(position, base))
            position = max(position, base)
            if not is_data:
                self._archive_gap(range(position, last + 1))
            elif self._take(taken, range(position, last + 1), member, most, until_ms, record_limit=record_limit):
                break
            position = last + 1
        self._advance()
        return taken

    def _take(
        self,
        taken: list[tuple[int, int]],
        offsets: range,
        member: str,
        most: int,
        until_ms: int,
        *,
        record_limit: bool,
    ) -> bool:
        """True: that is all."""
        began_at, room = self.next, self.room()
        for offset in offsets:
            if offset == began_at and room <= 0:
                return True
            if not self.is_available(offset):
                continue
            if record_limit and (len(taken) >= most or (offset >= began_at and offset - began_at >= room)):
                return True
            count = self.at(offset).count + 1
            alone = self.config.delivery_count_limit >= 3 and count == self.config.delivery_count_limit
            if alone and taken:
                return True
            taken.append((offset, count))
            self.offsets[offset] = Offset(DeliveryState.ACQUIRED, count, member, until_ms)
            self.next = max(self.next, offset + 1)
            if alone:
                return True
        return False

    def _archive_gap(self, offsets: range) -> None:
        for offset in offsets:
            if self.at(offset).state == DeliveryState.AVAILABLE:
                self.archived[Reason.GAP] += 1
                self.offsets[offset] = Offset(DeliveryState.ARCHIVED, self.at(offset).count)
                self.next = max(self.next, offset + 1)

    def acknowledge(self, member: str, batches: Sequence[AcknowledgementBatch], until_ms: int, now_ms: int = 0) -> int:
        said: dict[int, int] = {}
        for first, last, types in batches:
            for offset in range(first, last + 1):
                said[offset] = types[offset - first if len(types) > 1 else 0]
        for offset in sorted(said):
            if offset < self.start:
                continue
            if offset >= self.next or self.at(offset).state != DeliveryState.ACQUIRED:
                return ErrorCode.INVALID_RECORD_STATE
            if self.at(offset).member != member:
                return ErrorCode.INVALID_RECORD_STATE
        for offset, how in said.items():
            if offset >= self.start:
                self._acknowledge(offset, how, until_ms, now_ms)
        self._advance()
        return ErrorCode.NONE

    def _acknowledge(self, offset: int, how: int, until_ms: int, now_ms: int) -> None:
        now = self.at(offset)
        if how == AcknowledgeType.ACCEPT:
            self.offsets[offset] = Offset(DeliveryState.ACKNOWLEDGED, now.count)
        elif how == AcknowledgeType.RENEW:
            self.offsets[offset] = replace(now, until_ms=until_ms)
        elif how == AcknowledgeType.RELEASE:
            self._give_back(offset, now_ms)
        elif how == AcknowledgeType.REJECT:
            self._give_up(offset, Reason.REJECTED)
        else:
            self.archived[Reason.GAP] += 1
            self.offsets[offset] = Offset(DeliveryState.ARCHIVED, now.count)

    def _give_up(self, offset: int, reason: Reason) -> None:
        count = self.at(offset).count
        self.archived[reason] += 1
        if self.config.dead_letter_topic:
            self.offsets[offset] = Offset(DeliveryState.ARCHIVING, count, letter=Letter(reason))
        else:
            self.offsets[offset] = Offset(DeliveryState.ARCHIVED, count)

    def letters(self) -> list[int]:
        return sorted(at for at, each in self.offsets.items() if each.state == DeliveryState.ARCHIVING)

    def address(self, first: int, last: int, producer_id: int, sequence: int) -> None:
        for offset in range(first, last + 1):
            before = self.offsets[offset]
            assert before.letter is not None
            self.offsets[offset] = replace(before, letter=Letter(before.letter.reason, producer_id, sequence))

    def archive(self, first: int, last: int) -> int:
        waiting = [at for at in self.letters() if first <= at <= last]
        for offset in waiting:
            self.offsets[offset] = Offset(DeliveryState.ARCHIVED, self.offsets[offset].count)
        self._advance()
        return len(waiting)

    def _give_back(self, offset: int, now_ms: int) -> None:
        count = self.at(offset).count
        if count >= self.config.delivery_count_limit:
            self._give_up(offset, Reason.DELIVERIES)
        else:
            wait_ms = self.config.backoff_ms(count)
            self.offsets[offset] = Offset(DeliveryState.AVAILABLE, count, until_ms=now_ms + wait_ms if wait_ms else 0)

    def expire(self, now_ms: int) -> int:
        expired = [at for at, each in self.offsets.items() if each.until_ms and each.until_ms <= now_ms]
        for offset in expired:
            if self.offsets[offset].state == DeliveryState.ACQUIRED:
                self._give_back(offset, now_ms)
            else:
                self.offsets[offset] = replace(self.offsets[offset], until_ms=0)
        self._advance()
        return len(expired)

    def release_member(self, member: str) -> int:
        its = [at for at, each in self.offsets.items() if each.member == member]
        for offset in its:
            self.offsets[offset] = Offset(DeliveryState.AVAILABLE, self.offsets[offset].count - 1)
        return len(its)

    def log_start(self, offset: int) -> int:
        gone = sum(self.at(at).state not in FINAL for at in range(self.start, offset))
        self.archived[Reason.DELETED] += gone
        if offset > self.start:
            self._unaddress(offset)
            self.start, self.next = offset, max(self.next, offset)
            self._advance()
        return gone

    def _unaddress(self, offset: int) -> None:
        """Letters on both sides of this offset that were to be sent as one batch are not that any more."""
        letter = self.at(offset).letter
        if letter is not None and letter.is_addressed and self.at(offset - 1).letter == letter:
            for at in self.letters():
                if self.offsets[at].letter == letter:
                    self.offsets[at] = replace(self.offsets[at], letter=Letter(letter.reason))

    def log_end(self, offset: int) -> None:
        self._unaddress(offset)
        for at in range(offset, self.next):
            self.offsets[at] = NEW
        self.start = min(self.start, offset)
        self._advance()

    def _advance(self) -> None:
        while self.start < self.next and self.at(self.start).state in FINAL:
            self.start += 1
        for offset in [at for at in self.offsets if at < self.start]:
            del self.offsets[offset]


@dataclass
class NaiveKeeper:
    """What a coordinator makes of what it is told to keep."""

    start: int = 0
    offsets: dict[int, Offset] = field(default_factory=dict)

    def keep(self, delta: ShareState) -> None:
        self.start = delta.start_offset
        for each in delta.batches:
            for offset in range(each.first_offset, each.last_offset + 1):
                self.offsets[offset] = Offset(each.state, each.delivery_count, each.member, each.until_ms, each.letter)
        for offset in [at for at in self.offsets if at < self.start]:
            del self.offsets[offset]
