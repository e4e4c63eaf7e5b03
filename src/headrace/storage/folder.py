"""The data folder: who holds it, which partitions are in it, and whose they are.

    <data>/@lock                       flock'ed by the running broker; holds its process id as text
    <data>/@checkpoint                 see `checkpoint`
    <data>/layout                      one line: the layout of the folder; without it, `partitioned`
    <data>/@commitlog/                 in the layout `shared` (see `commitlog.commitlog`)
    <data>/<topic>/<topic>-<n>/        a partition (see `segments.log`)
    <data>/<topic>/<topic>-<n>/partition   one line: `headrace <format version> <topic id in hex>`;
                                       in `shared` then a position of the commit log: nothing of it lies before that
    ....stray-<k>                      a partition folder that is not served: another topic's id, or no topic's
    ....deleted-<k>                    a partition folder about to be removed

`@` cannot be in a topic's name. A folder is set aside by renaming, and removed when its topic is known to be deleted;
else a person decides about it.
"""

from __future__ import annotations

import heapq
import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from headrace.errors import DataFolderError, HeadraceError
from headrace.ports.clock import Clock
from headrace.ports.disk import Disk, File, read_whole, write_atomically
from headrace.storage.log import TopicPartition

log = logging.getLogger(__name__)

LOCK_FILE: Final = "@lock"
PARTITION_FILE: Final = "partition"
LAYOUT_FILE: Final = "layout"
PARTITIONED: Final = "partitioned"
SHARED: Final = "shared"
FORMAT_VERSION: Final = 1
STRAY: Final = ".stray-"
DELETED: Final = ".deleted-"
ASIDE_MAX: Final = 10_000

_DELETED = re.compile(r"\d+\.deleted-\d+")
_STRAY = re.compile(r"(\d+)\.stray-\d+")
_CONTENT = re.compile(rb"headrace (\d+) ([0-9a-f]{32})(?: (\d+))?\n")


@dataclass(frozen=True, slots=True)
class Stray:
    """A partition folder that was set aside at start, and why."""

    path: str
    reason: str


def stem(folder: str, base_offset: int) -> str:
    return f"{folder}/{base_offset:020d}"


def lock(disk: Disk, folder: str, layout: str = PARTITIONED) -> File:
    """Hold the data folder for this process; DataFolderError names the one that has it, or another layout."""
    path = f"{folder}/{LOCK_FILE}"
    try:
        _make(disk, folder)
        file = disk.lock(path)
    except BlockingIOError:
        holder = read_whole(disk, path).decode(errors="replace").strip() or "unknown"
        raise DataFolderError(
            f"data folder {folder} is in use by the broker with process id {holder}: stop it, or choose another folder"
        ) from None
    except OSError as error:
        raise DataFolderError(
            f"data folder {folder} cannot be used: {error.strerror}: check that it exists and may be written"
        ) from error
    try:
        file.truncate(0)
        file.pwritev([b"%d\n" % os.getpid()], 0)
        _settle_layout(disk, folder, layout)
    except BaseException:
        file.close()
        raise
    return file


def layout_of(disk: Disk, folder: str) -> str:
    path = f"{folder}/{LAYOUT_FILE}"
    return read_whole(disk, path).decode(errors="replace").strip() if disk.exists(path) else PARTITIONED


def _settle_layout(disk: Disk, folder: str, layout: str) -> None:
    """Give an empty folder its layout; refuse one that has another."""
    found = layout_of(disk, folder)
    if found == layout:
        return
    if any(not name.startswith("coordination") and name not in (LOCK_FILE, LAYOUT_FILE) for name in disk.list(folder)):
        raise DataFolderError(
            f"data folder {folder} has the layout {found!r}, not {layout!r}: start the broker with the layout that it "
            f"has, or convert it with `headrace log convert --to {layout}`"
        )
    write_atomically(disk, f"{folder}/{LAYOUT_FILE}", layout.encode() + b"\n")


def holder(disk: Disk, folder: str) -> str | None:
    """Process id of the broker that runs on the folder, if one does."""
    path = f"{folder}/{LOCK_FILE}"
    if not disk.exists(path):
        return None
    try:
        disk.lock(path).close()
    except BlockingIOError:
        return read_whole(disk, path).decode(errors="replace").strip() or "unknown"
    return None


def _make(disk: Disk, folder: str) -> None:
    """Create a folder and its parents so that they outlive a loss of power."""
    if not disk.exists(folder):
        parent = folder.rpartition("/")[0] or "/"
        _make(disk, parent)
        disk.make_folder(folder)
        disk.sync_folder(parent)


def partition_folder(data: str, topic_partition: TopicPartition) -> str:
    return f"{data}/{topic_partition.topic}/{topic_partition}"


def remove_deleted(disk: Disk, data: str, deleted: Collection[bytes]) -> None:
    """At a start: the partition folders of topics with these ids, set aside or not, and those that were about to be
    removed."""
    for topic in topic_folders(disk, data):
        for where, path in folders_of(disk, data, topic) if deleted else ():
            if read_topic_id(disk, path) in deleted:
                set_aside(disk, partition_folder(data, where), DELETED, path)
        gone = [name for name in disk.list(f"{data}/{topic}") if _DELETED.fullmatch(name.removeprefix(f"{topic}-"))]
        if gone:
            disk.sync_folder(f"{data}/{topic}")
        for name in gone:
            disk.remove_folder(f"{data}/{topic}/{name}")


def topic_ids(disk: Disk, data: str) -> dict[TopicPartition, bytes]:
    """The partitions whose folders say which topic they belong to."""
    found = {where: read_topic_id(disk, path) for where, path in partitions(disk, data)}
    return {where: topic_id for where, topic_id in found.items() if isinstance(topic_id, bytes)}


def above(data: str, partitions: Iterable[TopicPartition]) -> list[str]:
    """The data folder, and those of the topics."""
    return [data, *dict.fromkeys(f"{data}/{each.topic}" for each in partitions)]


def partitions(disk: Disk, data: str) -> Iterator[tuple[TopicPartition, str]]:
    """Every partition folder that is not set aside, in order."""
    for topic in topic_folders(disk, data):
        yield from partitions_of(disk, data, topic)


def partitions_of(disk: Disk, data: str, topic: str) -> Iterator[tuple[TopicPartition, str]]:
    for name in sorted(disk.list(f"{data}/{topic}")):
        number = name.removeprefix(topic + "-")
        if number != name and number.isdigit():
            yield TopicPartition(topic, int(number)), f"{data}/{topic}/{name}"


def strays_of(disk: Disk, data: str, topic: str) -> Iterator[tuple[TopicPartition, str]]:
    """Its partition folders that are set aside, in order."""
    for name in sorted(disk.list(f"{data}/{topic}")):
        match = _STRAY.fullmatch(name.removeprefix(topic + "-"))
        if match is not None and name.startswith(topic + "-"):
            yield TopicPartition(topic, int(match[1])), f"{data}/{topic}/{name}"


def folders_of(disk: Disk, data: str, topic: str) -> list[tuple[TopicPartition, str]]:
    """Both."""
    return [*partitions_of(disk, data, topic), *strays_of(disk, data, topic)]


def topic_folders(disk: Disk, data: str) -> Iterator[str]:
    for topic in sorted(disk.list(data)):
        if topic.startswith("@"):
            continue
        try:
            disk.list(f"{data}/{topic}")
        except NotADirectoryError:
            continue
        yield topic


def write_partition_file(disk: Disk, folder: str, topic_id: bytes, position: int = 0) -> str:
    path = f"{folder}/{PARTITION_FILE}"
    file = disk.open(path, create=True, writable=True)
    try:
        file.truncate(0)
        begins = b" %d" % position if position else b""
        file.pwritev([b"headrace %d %b%b\n" % (FORMAT_VERSION, topic_id.hex().encode(), begins)], 0)
    finally:
        file.close()
    return path


def read_topic_id(disk: Disk, folder: str) -> bytes | str:
    """The id of the topic that the folder belongs to; or what is wrong, in words."""
    path = f"{folder}/{PARTITION_FILE}"
    if not disk.exists(path):
        return f"it has no file {PARTITION_FILE!r}"
    match = _CONTENT.fullmatch(read_whole(disk, path))
    if match is None:
        return f"its file {PARTITION_FILE!r} is not readable"
    if int(match[1]) != FORMAT_VERSION:
        return f"its format is version {int(match[1])}, and this is version {FORMAT_VERSION}"
    return bytes.fromhex(match[2].decode())


def begins_at(disk: Disk, folder: str) -> int:
    """The position of the commit log that nothing of the partition lies before."""
    match = _CONTENT.fullmatch(read_whole(disk, f"{folder}/{PARTITION_FILE}"))
    return int(match[3] or 0) if match is not None else 0


class NewFolders:
    """Folders for new partitions. One that was begun here and could not be finished holds nothing: it is removed, at
    once or when the disk lets it. Anything else that stands in the place is set aside."""

    def __init__(self, disk: Disk, data: str) -> None:
        self._disk = disk
        self._data = data
        self._unfinished: set[str] = set()

    @contextmanager
    def begin(self, where: TopicPartition, topic_id: bytes, position: int = 0) -> Iterator[str]:
        """The folder is finished when the block is left without an error."""
        self.discard(where)
        path = partition_folder(self._data, where)
        if self._disk.exists(path):
            aside = set_aside(self._disk, path, STRAY)
            log.warning("%s set aside as %s: it stood where a new partition begins", path, aside)
        self._unfinished.add(path)
        try:
            self._disk.make_folder(path)
            write_partition_file(self._disk, path, topic_id, position)
            yield path
        except (HeadraceError, OSError):
            with suppress(OSError):  # then it stays noted, and the first error is the one to tell
                self.discard(where)
            raise
        self._unfinished.discard(path)

    def discard(self, where: TopicPartition) -> None:
        """Remove what was begun and not finished, if anything was; OSError: it may be there still."""
        path = partition_folder(self._data, where)
        if path in self._unfinished:
            with suppress(FileNotFoundError):
                self._disk.remove_folder(path)
            self._unfinished.discard(path)


def discard_left(disk: Disk, data: str, topic: str, topic_id: bytes, opened: Collection[str]) -> Iterator[str]:
    """Rename the partition folders of a deleted topic that are not opened, to be removed; answers the new paths."""
    if not disk.exists(f"{data}/{topic}"):
        return
    for where, path in folders_of(disk, data, topic):
        if path not in opened and read_topic_id(disk, path) == topic_id:
            yield set_aside(disk, partition_folder(data, where), DELETED, path)


def why_stray(disk: Disk, path: str, expected_id: bytes | None) -> str | None:
    """Why a partition's folder is not served: it is another topic's, or no topic's (None: no such partition is
    expected here). None if it is."""
    if expected_id is None:
        return "no topic of this cluster has this partition here"
    topic_id = read_topic_id(disk, path)
    if isinstance(topic_id, str):
        return topic_id
    if topic_id != expected_id:
        return f"it belongs to the topic with id {topic_id.hex()}, not to {expected_id.hex()} of the same name"
    return None


def set_stray_aside(disk: Disk, path: str, reason: str) -> Stray:
    stray = Stray(set_aside(disk, path, STRAY), reason)
    log.warning("%s set aside as %s: %s", path, stray.path, reason)
    return stray


def set_aside(disk: Disk, folder: str, ending: str, path: str | None = None) -> str:
    """Rename a partition folder, which is at `path` if it was set aside before, so that it is not a partition's any
    more; answers the new path."""
    for number in range(ASIDE_MAX):
        target = f"{folder}{ending}{number}"
        if not disk.exists(target):
            disk.rename(path or folder, target)
            return target
    raise DataFolderError(f"{folder}: {ASIDE_MAX} folders are set aside beside it: remove those not needed any more")


class Trash:
    """Files and folders that were set aside and go after a while."""

    def __init__(self, disk: Disk, clock: Clock) -> None:
        self._disk = disk
        self._clock = clock
        self._waiting: list[tuple[float, int, list[str]]] = []
        self._order = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def later(self, paths: list[str], delay_ms: int) -> None:
        if paths:
            self._order += 1
            heapq.heappush(self._waiting, (self._clock.now() + delay_ms / 1000, self._order, paths))

    def empty(self, now: float) -> None:
        """Remove what has waited long enough."""
        while self._waiting and self._waiting[0][0] <= now:
            for path in heapq.heappop(self._waiting)[2]:
                try:
                    if DELETED in path:
                        self._disk.remove_folder(path)
                    else:
                        self._disk.remove(path)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    log.error("%s cannot be removed: %s", path, error.strerror)
