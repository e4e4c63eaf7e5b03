"""What is on its way to a follower, without I/O: one partition's stream, the budget of those that catch up, and which
part of a read can be sent.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from typing import Final

from headrace.errors import CorruptBatch
from headrace.partitions.leader_core import FollowerState, LeaderCore
from headrace.partitions.partition import Partition
from headrace.ports.disk import FileSlice
from headrace.ports.network import Part
from headrace.replication.frames import EPOCHS_MAX, Start
from headrace.storage.log import ReadResult

READ_WHOLE_BYTES: Final = 64 << 10
HEADS_BYTES: Final = 27
_FIELDS = struct.Struct(">qi11xi").unpack_from
LENGTH_END: Final = 12


class Stream:
    """One partition on its way to one follower, in one subscription.

    `sent` is where the next APPEND begins. What was sent and not yet told as received is counted in bytes: the sum
    over a link is bounded.
    """

    __slots__ = (
        "_under_way",
        "broker",
        "catching_up",
        "core",
        "epoch",
        "follower",
        "is_warm",
        "partition",
        "sent",
        "subscription",
        "told_epoch",
        "told_start",
        "told_watermark",
        "under_way_bytes",
        "waits_for_pages",
    )

    def __init__(
        self,
        started: Start,
        broker: int,
        partition: Partition,
        core: LeaderCore,
        follower: FollowerState,
        last_epoch: int,
    ) -> None:
        self.broker = broker
        self.subscription = started.subscription
        self.epoch = started.epoch
        self.partition = partition
        self.core = core
        self.follower = follower
        self.sent = follower.sent = started.from_offset
        self.catching_up = started.from_offset < partition.log.written_offset
        """It has never had all that there was: its bytes are taken from the budget for that."""
        self.waits_for_pages = False
        """The disk was asked for what comes next."""
        self.is_warm = False
        """The disk has brought it in, for the next read."""
        self.told_watermark = started.watermark
        self.told_start = started.log_start
        self.told_epoch = last_epoch
        """The follower knows where epochs up to this one began."""
        self._under_way: deque[tuple[int, int]] = deque()
        self.under_way_bytes = 0

    @property
    def is_throttled(self) -> bool:
        """Members of the in-sync set are waited for; only the others can wait."""
        return self.catching_up and not self.core.is_in_sync(self.broker, self.follower.incarnation)

    def has_more(self) -> bool:
        return self.sent < self.partition.log.written_offset

    def went(self, next_offset: int, count: int) -> None:
        """So many bytes, up to this offset, were given to the channel."""
        self.sent = self.follower.sent = next_offset
        self._under_way.append((next_offset, count))
        self.under_way_bytes += count
        if next_offset >= self.partition.log.written_offset:
            self.catching_up = False

    def arrived(self, received: int) -> int:
        """The follower has everything below this offset; answers how many bytes that takes off the way."""
        under_way, count = self._under_way, 0
        while under_way and under_way[0][0] <= received:
            count += under_way.popleft()[1]
        self.under_way_bytes -= count
        return count

    def news(self) -> tuple[int, int] | None:
        """The watermark and the start that is wanted, if the follower does not know them yet."""
        watermark, start = self.partition.high_watermark, self.core.wanted_start
        if watermark == self.told_watermark and start == self.told_start:
            return None
        self.told_watermark, self.told_start = watermark, start
        return watermark, start

    def epochs_before(self, offset: int) -> Sequence[tuple[int, int]]:
        """Where epochs began before this offset, if the follower does not know them yet."""
        held = self.partition.log
        if held.last_epoch() <= self.told_epoch:
            return ()
        untold = [entry for entry in held.epoch_starts() if entry[0] > self.told_epoch and entry[1] < offset]
        if untold:
            self.told_epoch = untold[-1][0]
        return untold[-EPOCHS_MAX:]


class Budget:
    """Bytes a second for followers that catch up, over all links of a broker; a second's worth can be saved up. 0 is no
    limit."""

    def __init__(self, bytes_per_second: int, now: float) -> None:
        self.bytes_per_second = bytes_per_second
        self._left = float(bytes_per_second)
        self._at = now

    def limit(self, bytes_per_second: int) -> None:
        """From now on. What was sent under another limit does not count."""
        if bytes_per_second != self.bytes_per_second:
            self.bytes_per_second, self._left = bytes_per_second, float(bytes_per_second)

    def refill(self, now: float) -> None:
        most = float(self.bytes_per_second)
        self._left = min(most, self._left + (now - self._at) * most)
        self._at = now

    @property
    def is_spent(self) -> bool:
        return self._left <= 0 < self.bytes_per_second

    def spend(self, count: int) -> None:
        self._left -= count


def whole_batches(found: ReadResult) -> tuple[list[Part], int, int]:
    """What to send of a read: parts, their bytes, and the first offset behind them. A batch that the byte limit has cut
    is left out. Small slices are read here, because the channel would read them as well."""
    parts: list[Part] = []
    total, next_offset = 0, -1
    for piece in found.slices:
        if piece.count <= READ_WHOLE_BYTES:
            data = piece.read()
            end, following = _walk(data)
            if end:
                parts.append(data if end == len(data) else data[:end])
        else:
            end, following = _walk_file(piece)
            if end:
                parts.append(piece if end == piece.count else piece.part(0, end))
        if end:
            total += end
            next_offset = following
        if end < piece.count:
            break
    return parts, total, next_offset


def _walk(data: bytes) -> tuple[int, int]:
    """Where the last whole batch ends, and the offset behind it."""
    at, next_offset, most = 0, -1, len(data)
    while at + HEADS_BYTES <= most:
        base, length, delta = _FIELDS(data, at)
        end = at + LENGTH_END + length
        if length <= 0:
            raise CorruptBatch(f"a batch with offset {base} gives its length as {length}")
        if end > most:
            break
        at, next_offset = end, base + delta + 1
    return at, next_offset


def _walk_file(piece: FileSlice) -> tuple[int, int]:
    at, next_offset = 0, -1
    while at + HEADS_BYTES <= piece.count:
        base, length, delta = _FIELDS(piece.part(at, HEADS_BYTES).read(), 0)
        end = at + LENGTH_END + length
        if length <= 0:
            raise CorruptBatch(f"{piece.file.path} at byte {piece.position + at}: a batch of length {length}")
        if end > piece.count:
            break
        at, next_offset = end, base + delta + 1
    return at, next_offset
