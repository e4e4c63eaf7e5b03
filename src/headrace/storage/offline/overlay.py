"""A disk whose changes stay in memory: what is written, cut or removed on it is so for its user, and nobody else.

So a data folder can be looked at as the next start would find it, by the same code, with nothing changed. Bytes are
read from the disk below until they are changed. What is written takes memory; cutting a large file takes none.
"""

from __future__ import annotations

import builtins
import errno
import os
from collections.abc import Callable, Sequence

from headrace.ports.disk import Buffer, Disk, File, Range, SyncDone


class _Node:
    """A file: the first `limit` bytes of one below, and `tail` behind them."""

    __slots__ = ("base", "limit", "tail")

    def __init__(self, base: File | None) -> None:
        self.base = base
        self.limit = base.size() if base is not None else 0
        self.tail = bytearray()

    def size(self) -> int:
        return self.limit + len(self.tail)

    def read(self, count: int, position: int) -> bytes:
        if self.base is not None and position < self.limit:
            head = self.base.pread(min(count, self.limit - position), position)
            return head + self.tail[: count - len(head)] if self.tail and len(head) < count else head
        at = position - self.limit
        return bytes(self.tail[at : at + count])

    def resize(self, size: int) -> None:
        # A new object each time: a mapping of the old one may still be in use.
        if size < self.limit:
            self.limit, self.tail = size, bytearray()
        else:
            self.tail = bytearray(self.tail[: size - self.limit].ljust(size - self.limit, b"\0"))

    def own(self) -> None:
        """Take everything into memory."""
        if self.base is not None:
            self.tail = bytearray(self.read(self.size(), 0))
            self.base, self.limit = None, 0

    def write(self, data: bytes, position: int) -> None:
        if position < self.limit:
            self.own()
        at = position - self.limit
        if at + len(data) > len(self.tail):
            self.resize(position + len(data))
        self.tail[at : at + len(data)] = data


class OverlayFile:
    def __init__(self, path: str, node: _Node) -> None:
        self.path = path
        self._node = node

    def fileno(self) -> int:
        return -1

    def size(self) -> int:
        return self._node.size()

    def pwritev(self, parts: Sequence[Buffer], position: int) -> int:
        data = b"".join(parts)
        self._node.write(data, position)
        return len(data)

    def pread(self, count: int, position: int) -> bytes:
        return self._node.read(count, position)

    def truncate(self, size: int) -> None:
        self._node.resize(size)

    def allocate(self, size: int) -> None:
        if size > self._node.size():
            self._node.resize(size)

    def reserve(self, size: int) -> None:
        return None

    def map(self, size: int, *, writable: bool, populate: bool) -> memoryview:
        self._node.own()
        view = memoryview(self._node.tail)[:size]
        return view if writable else view.toreadonly()

    def sync(self) -> None:
        return None

    def in_cache(self, position: int, count: int) -> bool:
        return True

    def close(self) -> None:
        return None


class OverlayDisk:
    def __init__(self, below: Disk) -> None:
        self._below = below
        self._nodes: dict[str, _Node | None] = {}

    def open(self, path: str, *, create: bool = False, writable: bool = False) -> File:
        if path in self._nodes:
            node = self._nodes[path]
            if node is None and not create:
                raise _missing(path)
            node = self._nodes[path] = node or _Node(None)
            return OverlayFile(path, node)
        if not self._below.exists(path):
            if not create:
                raise _missing(path)
            self._nodes[path] = node = _Node(None)
            return OverlayFile(path, node)
        file = self._below.open(path)
        if not writable:
            return file
        self._nodes[path] = node = _Node(file)
        return OverlayFile(path, node)

    def lock(self, path: str) -> File:
        return OverlayFile(path, _Node(None))

    def exists(self, path: str) -> bool:
        return self._nodes[path] is not None if path in self._nodes else self._below.exists(path)

    def size(self, path: str) -> int:
        node = self._nodes.get(path)
        if path not in self._nodes:
            return self._below.size(path)
        if node is None:
            raise _missing(path)
        return node.size()

    def changed_ms(self, path: str) -> int:
        return self._below.changed_ms(path)

    def list(self, folder: str) -> builtins.list[str]:
        names = dict.fromkeys(self._below.list(folder) if self._below.exists(folder) else ())
        for path, node in self._nodes.items():
            parent, _, name = path.rpartition("/")
            if parent == folder:
                if node is None:
                    names.pop(name, None)
                else:
                    names[name] = None
        return [*names]

    def make_folder(self, path: str) -> None:
        return None

    def remove(self, path: str) -> None:
        if not self.exists(path):
            raise _missing(path)
        self._nodes[path] = None

    def remove_folder(self, path: str) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP), path)

    def rename(self, source: str, target: str) -> None:
        """Files only."""
        self.open(source, writable=True)
        self._nodes[target] = self._nodes[source]
        self._nodes[source] = None

    def sync_folder(self, path: str) -> None:
        return None

    def free_bytes(self, path: str) -> int:
        return self._below.free_bytes(path)

    def request_sync(self, files: Sequence[File], done: SyncDone) -> None:
        done(None)

    def sync_now(self, files: Sequence[File]) -> None:
        return None

    def read_ahead(self, file: File, ranges: Sequence[Range], done: Callable[[], None]) -> None:
        done()

    def close(self) -> None:
        self._nodes.clear()


def _missing(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
