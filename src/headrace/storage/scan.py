"""Reading a segment file batch by batch: `walk` believes the bytes and reads headers only, `scan` checks everything.

Base offset, batch length, leader epoch and magic lie outside a batch's CRC. A wrong length fails the CRC; a wrong base
offset breaks the chain, because a segment that was never compacted holds its offsets without a gap; a wrong epoch
falls, or differs from the partition's epoch history, which `scan` is given as a function when it is known to be whole.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from crc32c import crc32c

from headrace.errors import CorruptBatch, InvalidRecord, UnreadableBatch
from headrace.ports.disk import MEDIUM_ERRORS, File
from headrace.records.batch import (
    ATTRIBUTES_AT,
    HEADER_BYTES,
    LENGTH_END,
    MAGIC,
    MAGIC_AT,
    BatchHeader,
    check,
    read_header,
)

WALK_WINDOW_BYTES: Final = 1 << 16
WALK_LARGE_BATCH_BYTES: Final = 1 << 13
FIND_WINDOW_BYTES: Final = 1 << 13
SCAN_WINDOW_BYTES: Final = 1 << 20
SEARCH_TAIL_BYTES: Final = HEADER_BYTES
RECORD_LENGTH_BYTES_MAX: Final = 5
BASE_OFFSET_BYTES: Final = 8

_PLACE_FIELDS = struct.Struct(">qi4xb6xi").unpack_from
_FOLLOWING_FIELDS = struct.Struct(">qii").unpack_from
_CHECKED_FIELDS = struct.Struct(">qiibI2xi30xi").unpack_from
_LENGTH = struct.Struct(">i")
_PLACE = re.compile(r"batch at byte \d+")


@dataclass(frozen=True, slots=True)
class ValidBatch:
    """A batch that is as it should be."""

    position: int
    header: BatchHeader


@dataclass(frozen=True, slots=True)
class Broken:
    """Bytes that are no whole batch. `next_offset` is where the chain goes on behind them; None: it does not."""

    position: int
    end: int
    expected_offset: int
    next_offset: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Chain:
    """What the offsets and epochs of a segment must look like."""

    dense: bool = True
    epoch_at: Callable[[int], int | None] | None = None
    bases: Mapping[int, int] | None = None
    """Base offset by position, from the index of a compacted segment."""
    last_offset_max: int = (1 << 63) - 1
    """No segment goes on beyond it."""


Headers = Iterator[tuple[int, BatchHeader]]
"""Headers with their positions."""
Walk = Callable[[File, int, int], Headers]
"""From one position to another in a file: `walk` or `walk_checked`."""


def read_log(file: File, count: int, position: int, least: int | None = None) -> bytes:
    """Bytes of a log, not all of them if the disk cannot give them back, but at least so many: UnreadableBatch if not
    even those. Other errors of the disk are no damage."""
    try:
        return file.pread(count, position)
    except OSError as error:
        if error.errno not in MEDIUM_ERRORS:
            raise
        if least is not None and least < count:
            return read_log(file, least, position)
        raise UnreadableBatch(f"{file.path} at byte {position}: {error.strerror}; mend or replace the disk") from error


def walk(file: File, position: int, end: int, *, may_be_cut: bool = False) -> Headers:
    """Headers from a position that is known to be a batch's. CorruptBatch says where they stop making sense. The last
    batch may be cut, if so said, and is left out then."""
    window, window_at, size_bytes = b"", position, 0
    while position < end:
        if may_be_cut and end - position < HEADER_BYTES:
            return
        at = position - window_at
        if at + HEADER_BYTES > len(window):
            count = HEADER_BYTES if size_bytes > WALK_LARGE_BATCH_BYTES else WALK_WINDOW_BYTES
            window = read_log(file, min(count, end - position), position, HEADER_BYTES)
            window_at, at = position, 0
        try:
            header = read_header(window, at)
        except (CorruptBatch, InvalidRecord) as error:
            raise CorruptBatch(f"{file.path} at byte {position}: {_because(error)}") from None
        size_bytes = header.size_bytes
        if position + size_bytes > end:
            if may_be_cut:
                return
            raise CorruptBatch(f"{file.path} at byte {position}: batch of {size_bytes} bytes goes beyond byte {end}")
        yield position, header
        position += size_bytes


def walk_checked(file: File, position: int, end: int, wanted_end: int | None = None) -> Headers:
    """Like `walk`, with the CRC of each batch checked, up to the one that reaches the wanted end."""
    window, window_at = b"", position
    if wanted_end is None:
        wanted_end = end
    while position < wanted_end:
        at = position - window_at
        need = _size_at(window, at)
        if need is None or at + need > len(window):
            count = max(min(SCAN_WINDOW_BYTES, wanted_end - position), need or HEADER_BYTES)
            window = read_log(file, min(count, end - position), position, HEADER_BYTES)
            window_at, at = position, 0
            need = _size_at(window, 0)
            if need is not None and len(window) < need <= end - position:
                window = read_log(file, need, position)
        try:
            header = check(window, at)
        except (CorruptBatch, InvalidRecord) as error:
            because = f"{_because(error)}; `headrace log verify` says more"
            raise CorruptBatch(f"{file.path} at byte {position}: {because}") from None
        yield position, header
        position += header.size_bytes


def sound_run(window: bytes, expected_offset: int, epoch: int, batches_max: int) -> tuple[int, int, int]:
    """How many bytes of the window are sound batches of this epoch, without a gap from the expected offset on; the
    offset that follows them, and their count. What is not is left to `walk_checked`, which says why."""
    view, at, size, batches = memoryview(window), 0, len(window), 0
    while batches < batches_max and size - at >= HEADER_BYTES:
        base, length, leader_epoch, magic, crc, last_offset_delta, count = _CHECKED_FIELDS(window, at)
        end = at + length + LENGTH_END
        if base != expected_offset or leader_epoch != epoch or magic != MAGIC or not at + HEADER_BYTES <= end <= size:
            break
        if not 0 <= count <= last_offset_delta + 1 or crc32c(view[at + ATTRIBUTES_AT : end]) != crc:
            break
        at, expected_offset, batches = end, base + last_offset_delta + 1, batches + 1
    return at, expected_offset, batches


def find(file: File, position: int, end: int, expected_offset: int, offset: int, *, dense: bool) -> int:
    """Position of the first batch that ends at or after the offset, `end` if none does: `walk` without its luxury.

    -1 where the headers do not make sense or cannot be read; `walk` from the same position says why.
    """
    window, window_at = b"", position
    while position < end:
        at = position - window_at
        if at + HEADER_BYTES > len(window):
            try:
                window = read_log(file, min(FIND_WINDOW_BYTES, end - position), position, HEADER_BYTES)
            except UnreadableBatch:
                return -1
            window_at, at = position, 0
            if len(window) < HEADER_BYTES:
                return -1
        base, length, magic, last_offset_delta = _PLACE_FIELDS(window, at)
        if magic != MAGIC or length < HEADER_BYTES - LENGTH_END or base < expected_offset or last_offset_delta < 0:
            return -1
        if dense and base != expected_offset:
            return -1
        expected_offset = base + last_offset_delta + 1
        if expected_offset > offset:
            return position if position + length + LENGTH_END <= end else -1
        position += length + LENGTH_END
    return end if position == end else -1


def scan(
    file: File, size: int, expected_offset: int, chain: Chain, position: int = 0, epoch: int = -1
) -> Iterator[ValidBatch | Broken]:
    """Every batch with its CRC, place in the chain and epoch checked; behind broken bytes it goes on where it can."""
    window, window_at = b"", position
    while position < size:
        at = position - window_at
        need = _size_at(window, at)
        if need is None or at + need > len(window):
            wanted = max(SCAN_WINDOW_BYTES, need or 0)
            window, window_at, at = file.pread(min(wanted, size - position), position), position, 0
            need = _size_at(window, 0)
            if need is not None and len(window) < need <= size - position:
                window = file.pread(need, position)
        found = _check(window, at, position, expected_offset, chain, epoch)
        if isinstance(found, BatchHeader):
            yield ValidBatch(position, found)
            position += found.size_bytes
            expected_offset, epoch = found.next_offset, found.leader_epoch
            continue
        after = _search(file, position, size, expected_offset, chain, epoch)
        if after is None:
            yield Broken(position, size, expected_offset, None, found)
            return
        yield Broken(position, after.position, expected_offset, after.header.base_offset, found)
        position, expected_offset = after.position, after.header.base_offset


def is_cut_short(file: File, position: int, size: int, expected_offset: int, *, dense: bool) -> bool:
    """Whether the batch at that place is right as far as it goes, but the file ends before it does.

    A wrong length can look like that. Then all its records are there, unless they are compressed; or the batch agrees
    with its CRC if it ends where another begins, or with the file. More than its length may be wrong: so it is no cut
    either where a batch seems to begin that could be the next one.
    """
    head = file.pread(min(HEADER_BYTES, size - position), position)
    if len(head) < HEADER_BYTES:
        return True
    try:
        header = read_header(head)
    except (CorruptBatch, InvalidRecord):
        return False
    base = header.base_offset
    if base < expected_offset or (dense and base != expected_offset) or position + header.size_bytes <= size:
        return False
    if not 0 <= header.record_count <= header.last_offset_delta + 1:
        return False
    if not header.codec and not _lacks_records(file, position + HEADER_BYTES, size, header.record_count):
        return False
    at, checked = position + ATTRIBUTES_AT, 0
    while at < size:
        window = file.pread(min(SCAN_WINDOW_BYTES, size - at), at)
        view, upto = memoryview(window), 0
        for end in _candidates(window, expected_offset):
            checked, upto = crc32c(view[upto:end], checked), end
            if checked == header.crc or _could_follow(window, end, header, dense):
                return False
        rest = len(window) if at + len(window) == size else max(upto, len(window) - SEARCH_TAIL_BYTES)
        checked = crc32c(view[upto:rest], checked)
        at += rest
    return bool(checked != header.crc)


def _lacks_records(file: File, position: int, size: int, count: int) -> bool:
    """Whether the file ends before so many records do, which begin at that position."""
    window, window_at = b"", position
    for _ in range(count):
        at = position - window_at
        if at + RECORD_LENGTH_BYTES_MAX > len(window):
            window, window_at, at = file.pread(min(WALK_WINDOW_BYTES, max(0, size - position)), position), position, 0
        raw = 0
        for nth, byte in enumerate(window[at : at + RECORD_LENGTH_BYTES_MAX]):
            raw |= (byte & 0x7F) << 7 * nth
            if byte < 0x80:
                break
        else:
            return len(window) - at < RECORD_LENGTH_BYTES_MAX
        if raw & 1:  # by zigzag a negative length: no record begins so
            return False
        position += nth + 1 + (raw >> 1)
    return position > size


def _could_follow(window: bytes, at: int, before: BatchHeader, dense: bool) -> bool:
    """Whether what a candidate says is what the batch behind this one would. A value may say the same by chance."""
    base, length, epoch = _FOLLOWING_FIELDS(window, at)
    if epoch < before.leader_epoch or length < HEADER_BYTES - LENGTH_END:
        return False
    return bool(base == before.next_offset if dense else base >= before.next_offset)


def _check(window: bytes, at: int, position: int, expected_offset: int, chain: Chain, epoch: int) -> BatchHeader | str:
    try:
        header = check(window, at)
    except (CorruptBatch, InvalidRecord) as error:
        return _because(error)
    base = header.base_offset
    if base != expected_offset and (chain.dense or base < expected_offset):
        return f"base offset is {base}, but {expected_offset} comes next"
    if header.last_offset > chain.last_offset_max:
        return f"base offset is {base}, but the segment ends at {chain.last_offset_max} at the latest"
    if chain.bases is not None and chain.bases.get(position) != base:
        return f"base offset is {base}, but the index has {chain.bases.get(position)} here"
    if header.leader_epoch < epoch:
        return f"leader epoch falls from {epoch} to {header.leader_epoch}"
    right = chain.epoch_at(base) if chain.epoch_at is not None else None
    if right is not None and header.leader_epoch != right:
        return f"leader epoch is {header.leader_epoch}, but offset {base} was written in epoch {right}"
    return header


def _search(file: File, position: int, size: int, expected_offset: int, chain: Chain, epoch: int) -> ValidBatch | None:
    """The next whole batch behind broken bytes, with an offset that can follow. Nothing before it says whether its base
    offset is right, so in a chain without gaps what comes behind it should. One that is doubtful counts if the first
    that is not agrees with it, or if there is none."""
    doubtful: ValidBatch | None = None
    for found in _whole_behind(file, position + 1, size, expected_offset, chain, epoch):
        if not chain.dense or _is_followed(file, size, found):
            is_refuted = doubtful is not None and found.header.base_offset < doubtful.header.next_offset
            return found if is_refuted or doubtful is None else doubtful
        doubtful = doubtful or found
    return doubtful


def _is_followed(file: File, size: int, batch: ValidBatch) -> bool:
    """Whether the next base offset is the one that has to follow; at the end nothing has to."""
    end = batch.position + batch.header.size_bytes
    return end == size or file.pread(BASE_OFFSET_BYTES, end) == batch.header.next_offset.to_bytes(
        BASE_OFFSET_BYTES, "big"
    )


def _whole_behind(
    file: File, after: int, size: int, expected_offset: int, chain: Chain, epoch: int
) -> Iterator[ValidBatch]:
    """Whole batches from there on, each with an offset that can follow the broken bytes; none lies in another."""
    loose = replace(chain, dense=False)
    while size - after >= HEADER_BYTES:
        window = file.pread(min(SCAN_WINDOW_BYTES, size - after), after)
        reached = 0
        for at in _candidates(window, expected_offset):
            need = _size_at(window, at)
            if at < reached or need is None or need > size - after - at:
                continue
            batch = window[at : at + need] if at + need <= len(window) else file.pread(need, after + at)
            found = _check(batch, 0, after + at, expected_offset, loose, epoch)
            if isinstance(found, BatchHeader):
                yield ValidBatch(after + at, found)
                reached = at + need
        after += max(1, len(window) - SEARCH_TAIL_BYTES, reached)


def _candidates(window: bytes, expected_offset: int) -> Iterator[int]:
    """Places where a base offset not far above the expected one could begin."""
    prefixes = {(high >> 24).to_bytes(5, "big") for high in (expected_offset, expected_offset + (1 << 24))}
    starts: list[int] = []
    for prefix in prefixes:
        at = window.find(prefix)
        while at >= 0:
            if at + MAGIC_AT < len(window) and window[at + MAGIC_AT] == MAGIC:
                starts.append(at)
            at = window.find(prefix, at + 1)
    yield from sorted(starts)


def _size_at(window: bytes, at: int) -> int | None:
    """Size of the batch at that place, if its length field is there and can be true."""
    if at + HEADER_BYTES > len(window):
        return None
    size_bytes = int(_LENGTH.unpack_from(window, at + 8)[0]) + LENGTH_END
    return size_bytes if size_bytes >= HEADER_BYTES else None


def _because(error: Exception) -> str:
    """The reason without its place, which is relative to a window and would mislead."""
    return _PLACE.sub("batch", str(error))
