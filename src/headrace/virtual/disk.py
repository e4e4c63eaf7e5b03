"""A disk in memory that loses what was not synced, fills up, flips bytes and fails a sync when told to.

A crash keeps what was synced and a random part of the rest (`virtual.platter`). The death of a process alone loses
nothing that it had written. A failed sync loses its writes for good, though they can still be read: that is what Linux
does. It leaves its mark in the folder before it is answered (`ports.disk`).
"""

from __future__ import annotations

import builtins
import errno
import os
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from headrace.ports.clock import Clock
from headrace.ports.disk import SYNC_FAILED, Buffer, File, Range, SyncDone, SyncFailed
from headrace.virtual.platter import SECTOR_BYTES, FileNode, FolderNode, Move, Resize, Write

UNLIMITED_BYTES: Final = 1 << 50


class VirtualFile:
    def __init__(self, disk: VirtualDisk, path: str, node: FileNode | FolderNode, *, writable: bool) -> None:
        self.path = path
        self._disk = disk
        self._node: FileNode | FolderNode | None = node
        self._writable = writable
        self._age = disk.age

    @property
    def node(self) -> FileNode | FolderNode:
        if self._node is None or self._age != self._disk.age:
            raise _error(errno.EBADF, self.path)
        return self._node

    def _file(self, call: str = "", *, write: bool = False) -> FileNode:
        """What that call is meant for, if it does not fail."""
        if call and self._disk.trouble is not None:
            self._disk.meet(call, self.path)
        node = self._node
        if type(node) is not FileNode or self._age != self._disk.age or (write and not self._writable):
            raise self._unfit()
        return node

    def _unfit(self) -> OSError:
        if isinstance(self.node, FolderNode):
            return _error(errno.EISDIR, self.path)
        return OSError(errno.EBADF, "not open for writing", self.path)

    def fileno(self) -> int:
        return -1

    def size(self) -> int:
        return len(self._file("size").content)

    def pwritev(self, parts: Sequence[Buffer], position: int) -> int:
        node = self._file(write=True)
        self._disk.check_write(self.path)
        data = b"".join(parts)
        room = self._disk.room(len(node.content), position + len(data)) if self._disk.limited else 0
        if room < 0:
            fits = max(0, len(data) + room)
            if fits:
                node.change(Write(position, data[:fits]))
            raise _error(errno.ENOSPC, self.path)
        if data:
            node.change(Write(position, data))
            node.changed_ms = self._disk.wall_ms()
        return len(data)

    def pread(self, count: int, position: int) -> bytes:
        node = self._file("read")
        if node.bad and node.is_bad(position, count):
            raise _error(errno.EIO, self.path)
        return bytes(node.content[position : position + count])

    def truncate(self, size: int) -> None:
        self._file("truncate", write=True).change(Resize(size))

    def allocate(self, size: int) -> None:
        node = self._file("allocate", write=True)
        if size > len(node.content):
            if self._disk.room(len(node.content), size) < 0:
                raise _error(errno.ENOSPC, self.path)
            node.change(Resize(size))

    def reserve(self, size: int) -> None:
        self._disk.meet("reserve", self.path)
        node = self._file(write=True)
        if self._disk.room(len(node.content), size) < 0:
            raise _error(errno.ENOSPC, self.path)

    def map(self, size: int, *, writable: bool, populate: bool) -> memoryview:
        node = self._file("map")
        if size > len(node.content) or size == 0:
            raise ValueError("mapping is larger than the file")
        node.exported = True
        if not writable:
            return memoryview(node.content)[:size].toreadonly()
        node.mapped = True
        return memoryview(node.content)[:size]

    def sync(self) -> None:
        self._disk.sync_now([self])

    def in_cache(self, position: int, count: int) -> bool:
        return not self._file().cold

    def close(self) -> None:
        self._node = None


class VirtualDisk:
    """Paths are absolute; the root folder is there from the start."""

    def __init__(self, clock: Clock, *, capacity_bytes: int = UNLIMITED_BYTES) -> None:
        self.capacity_bytes = capacity_bytes
        self.age = 0
        self.syncs = 0
        self.synced_files = 0
        self._clock = clock
        self._root = FolderNode()
        self._folders: dict[str, FolderNode] = {}
        """Those that were found by their path, until one goes or is renamed."""
        self._moves: builtins.list[Move] = []
        """From one folder to another, until both are synced."""
        self._failing: dict[tuple[str, str], int] = {}
        """By call (sync, write, open) and path: the errno with which the next one fails."""
        self._locked: set[str] = set()
        self._held: builtins.list[Callable[[], None]] | None = None
        self.silent = False
        self._sync_seconds: Callable[[], float] | None = None
        self.trouble: Callable[[str, str], int] | None = None
        """Asked at every call, by its name and path, for the errno that it fails with; 0: none."""

    # What a test does to the disk.

    def crash(self, seed: int) -> None:
        """Lose power: open files are gone, and so is a random part of what was not synced."""
        self.release()
        chance = random.Random(seed)
        moves, self._moves = [move for move in self._moves if not move.settled], []
        self._root.crash(chance)
        for move in moves:
            move.mend(self._root, chance)

    def release(self) -> None:
        """The process that used the disk is dead: its open files and locks are gone, what it wrote is not."""
        self.age += 1
        self._folders.clear()
        self._locked.clear()
        self._held = None
        self.silent = False
        self._root.let_go()

    def serve(self, clock: Clock, sync_seconds: Callable[[], float] | None = None) -> None:
        """Answer by this clock, the new process's, from now on; a sync takes as long as `sync_seconds` says."""
        self._clock = clock
        self._sync_seconds = sync_seconds

    def fail_sync(self, path: str, number: int = errno.EIO) -> None:
        """The next sync of that file fails, and what it should have saved is lost."""
        self._failing["sync", path] = number

    def fail_write(self, path: str, number: int = errno.EIO) -> None:
        self._failing["write", path] = number

    def fail_open(self, path: str, number: int = errno.EMFILE) -> None:
        self._failing["open", path] = number

    def mend(self) -> None:
        """What was told to fail and has not yet does not."""
        self.trouble = None
        self._failing.clear()

    def go_bad(self, path: str, position: int) -> None:
        """The sector there cannot be read any more."""
        self._file(path).bad.add(position // SECTOR_BYTES)

    def recover(self) -> None:
        """Every sector can be read again."""
        for node in self._files():
            node.bad.clear()

    def flip(self, path: str, position: int, mask: int = 0x01) -> None:
        """Damage a byte on the platter."""
        node = self._file(path)
        node.content[position] ^= mask
        if position < len(node.safe):
            node.safe[position] ^= mask

    def decay(self, path: str, position: int, mask: int = 0x01) -> None:
        """Damage a byte on the platter, which the page cache still has as it was."""
        self._file(path).safe[position] ^= mask

    def drop_caches(self) -> None:
        """What is safe is read from the platter from now on."""
        for node in self._files():
            if not node.changes and not node.mapped and len(node.safe) == len(node.content):
                node.content[:] = node.safe

    def synced_bytes(self, path: str) -> int:
        """How many bytes at the beginning of the file are safe, and read as they are on the platter."""
        node = self._file(path)
        differing = (at for at in range(node.synced_bytes) if node.safe[at : at + 1] != node.content[at : at + 1])
        return next(differing, node.synced_bytes)

    @property
    def limited(self) -> bool:
        """Whether it can be full."""
        return self.capacity_bytes < UNLIMITED_BYTES

    def fill(self, spare_bytes: int) -> None:
        """There is room for so much more, and not for another byte."""
        self.capacity_bytes = self._used() + spare_bytes

    def evict(self, path: str) -> None:
        """Drop a file from the page cache."""
        self._file(path).cold = True

    def hold_syncs(self) -> None:
        """Let asked-for syncs wait until `release_syncs`."""
        self._held = self._held or []

    def release_syncs(self) -> None:
        held, self._held = self._held or [], None
        for finish in held:
            self._clock.call_soon(finish)

    def answer_no_sync(self) -> None:
        """Syncs are done, or fail, and the process hears of none any more: it is about to die."""
        self.silent = True

    # The port.

    def open(self, path: str, *, create: bool = False, writable: bool = False) -> VirtualFile:
        self.meet("open", path)
        self._fail_if_told("open", path)
        parent, name = self._parent(path)
        node = parent.entries.get(name)
        if node is None:
            if not create:
                raise _error(errno.ENOENT, path)
            node = parent.entries[name] = FileNode(changed_ms=self.wall_ms())
            parent.stepped()
        return VirtualFile(self, path, node, writable=writable)

    def lock(self, path: str) -> VirtualFile:
        if path in self._locked:
            raise _error(errno.EWOULDBLOCK, path)
        self._locked.add(path)
        return _LockedFile(self, path, self.open(path, create=True, writable=True).node, writable=True)

    def unlock(self, path: str) -> None:
        self._locked.discard(path)

    def exists(self, path: str) -> bool:
        self.meet("exists", path)
        try:
            self._find(path)
        except FileNotFoundError:
            return False
        return True

    def size(self, path: str) -> int:
        self.meet("size", path)
        node = self._find(path)
        return len(node.content) if isinstance(node, FileNode) else 0

    def changed_ms(self, path: str) -> int:
        self.meet("changed", path)
        node = self._find(path)
        return node.changed_ms if isinstance(node, FileNode) else 0

    def list(self, folder: str) -> builtins.list[str]:
        self.meet("list", folder)
        return [*self._folder(folder).entries]

    def make_folder(self, path: str) -> None:
        self.meet("make folder", path)
        folder = self._root
        for name in path.strip("/").split("/"):
            node = folder.entries.get(name)
            if node is None:
                node = folder.entries[name] = FolderNode()
                folder.stepped()
            if not isinstance(node, FolderNode):
                raise _error(errno.EEXIST, path)
            folder = node

    def remove(self, path: str) -> None:
        self.meet("remove", path)
        parent, name = self._parent(path)
        if not isinstance(parent.entries.get(name), FileNode):
            raise _error(errno.ENOENT, path)
        del parent.entries[name]
        parent.stepped()

    def remove_folder(self, path: str) -> None:
        self.meet("remove folder", path)
        self._folder(path)
        parent, name = self._parent(path)
        del parent.entries[name]
        parent.stepped()
        self._folders.clear()

    def rename(self, source: str, target: str) -> None:
        self.meet("rename", source)
        parent, name = self._parent(source)
        target_parent, target_name = self._parent(target)
        if name not in parent.entries:
            raise _error(errno.ENOENT, source)
        node = parent.entries.pop(name)
        if isinstance(node, FolderNode):
            self._folders.clear()
        target_parent.entries[target_name] = node
        parent.stepped()
        if target_parent is not parent:
            target_parent.stepped()
            sides = parent, name, parent.last_step, target_parent, target_name, target_parent.last_step
            self._moves = [move for move in self._moves if not move.settled] + [Move(node, *sides)]

    def sync_folder(self, path: str) -> None:
        self.meet("sync folder", path)
        folder = self._folder(path)
        folder.settle(len(folder.steps))

    def free_bytes(self, path: str) -> int:
        self.meet("free bytes", path)
        return max(0, self.capacity_bytes - self._used())

    def request_sync(self, files: Sequence[File], done: SyncDone) -> None:
        finish_sync = self._begin_sync([file for file in files if isinstance(file, VirtualFile)])
        age = self.age

        def finish() -> None:
            if age == self.age:
                self.syncs += 1
                self.synced_files += len(files)
                error = finish_sync()
                if not self.silent:
                    done(error)

        if self._held is not None:
            self._held.append(finish)
        elif self._sync_seconds is not None:
            self._clock.call_later(self._sync_seconds(), finish)
        else:
            self._clock.call_soon(finish)

    def sync_now(self, files: Sequence[File]) -> None:
        error = self._begin_sync([file for file in files if isinstance(file, VirtualFile)])()
        if error is not None:
            raise error

    def read_ahead(self, file: File, ranges: Sequence[Range], done: Callable[[], None]) -> None:
        assert isinstance(file, VirtualFile)
        node = file.node
        assert isinstance(node, FileNode)
        # Only a hint: where it fails, nobody is told.
        node.cold = self.trouble is not None and self.trouble("read ahead", file.path) > 0 and node.cold
        self._clock.call_soon(done)

    def close(self) -> None:
        self._held = None

    # What files ask of their disk.

    def wall_ms(self) -> int:
        return self._clock.wall_ms()

    def meet(self, call: str, path: str) -> None:
        """Fail if there is trouble."""
        if self.trouble is not None and (number := self.trouble(call, path)):
            raise _error(number, path)

    def check_write(self, path: str) -> None:
        if self.trouble is not None:
            self.meet("write", path)
        self._fail_if_told("write", path)

    def _fail_if_told(self, call: str, path: str) -> None:
        if self._failing and (number := self._failing.pop((call, path), 0)):
            raise _error(number, path)

    def room(self, size: int, wanted: int) -> int:
        """Free bytes after growing a file from `size` to `wanted`; below zero: that many are missing."""
        if wanted <= size or not self.limited:
            return 0
        return self.capacity_bytes - self._used() - (wanted - size)

    def _begin_sync(self, files: Sequence[VirtualFile]) -> Callable[[], SyncFailed | None]:
        """What the files hold now is safe, or lost, when the answer is called."""
        try:
            for file in files:
                self.meet("sync", file.path)
        except OSError as error:
            self._failing.update((("sync", file.path), error.errno or errno.EIO) for file in files)
        nodes = [(file, file.node) for file in files]
        moments = [node.moment() if isinstance(node, FileNode) else len(node.steps) for _, node in nodes]

        def finish() -> SyncFailed | None:
            numbers = [self._settle(file.path, node, at) for (file, node), at in zip(nodes, moments, strict=True)]
            failed = [file for file, number in zip(files, numbers, strict=True) if number]
            return SyncFailed(max(numbers), failed) if failed else None

        return finish

    def _settle(self, path: str, node: FileNode | FolderNode, moment: tuple[int, bytes | None] | int) -> int:
        """The errno, 0 if it went well."""
        number = self._failing.pop(("sync", path), 0)
        if number:
            self._mark(path if isinstance(node, FolderNode) else path.rpartition("/")[0])
        if isinstance(node, FolderNode):
            assert isinstance(moment, int)
            if not number:
                node.settle(min(moment, len(node.steps)))
        else:
            assert isinstance(moment, tuple)
            node.settle(moment, lost=number > 0)
        return number

    def _mark(self, folder: str) -> None:
        """By who syncs, whatever befalls the calls of the process."""
        trouble, self.trouble = self.trouble, None
        if self.exists(folder):
            self.open(f"{folder}/{SYNC_FAILED}", create=True)
        self.trouble = trouble

    def _find(self, path: str) -> FileNode | FolderNode:
        node: FileNode | FolderNode = self._root
        for name in filter(None, path.split("/")):
            if not isinstance(node, FolderNode) or name not in node.entries:
                raise _error(errno.ENOENT, path)
            node = node.entries[name]
        return node

    def _folder(self, path: str) -> FolderNode:
        known = self._folders.get(path)
        if known is not None:
            return known
        node = self._find(path)
        if not isinstance(node, FolderNode):
            raise _error(errno.ENOTDIR, path)
        self._folders[path] = node
        return node

    def _parent(self, path: str) -> tuple[FolderNode, str]:
        folder, _, name = path.rpartition("/")
        return (self._folder(folder) if folder else self._root), name

    def _file(self, path: str) -> FileNode:
        node = self._find(path)
        assert isinstance(node, FileNode)
        return node

    def _files(self) -> Iterator[FileNode]:
        """All that there are."""
        nodes: builtins.list[FileNode | FolderNode] = [self._root]
        while nodes:
            node = nodes.pop()
            if isinstance(node, FolderNode):
                nodes.extend(node.entries.values())
            else:
                yield node

    def _used(self) -> int:
        return sum(len(node.content) for node in self._files())


class _LockedFile(VirtualFile):
    def close(self) -> None:
        super().close()
        self._disk.unlock(self.path)


def _error(number: int, path: str) -> OSError:
    """Of the class that Python has for the number."""
    return OSError(number, os.strerror(number), path)
