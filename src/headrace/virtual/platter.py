"""What lies on a simulated disk: files and folders, each as it is read now and as it would be after a crash.

Each file keeps its content, the image that is safe on the platter, and the writes between the two. A crash keeps a
random part of those writes, one of them perhaps torn; of the changes to a folder it keeps those up to a random one.
What was renamed from one folder to another is never lost to both. POSIX does not promise that; ext4 with its journal,
XFS and Btrfs do, as they write both sides in one transaction, and ext2 does not. A file may be found in both folders,
which only weaker file systems leave; a folder, which has one parent, is found in one.
Mapped memory is not journalled: a crash takes each sector of a mapped file from before or after.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Final

SECTOR_BYTES: Final = 512


@dataclass(frozen=True, slots=True)
class Write:
    position: int
    data: bytes

    def apply(self, image: bytearray) -> None:
        position, size = self.position, len(image)
        if position > size:
            image.extend(bytes(position - size))
        image[position : position + len(self.data)] = self.data


@dataclass(frozen=True, slots=True)
class Resize:
    size: int

    def apply(self, image: bytearray) -> None:
        if len(image) > self.size:
            del image[self.size :]
        else:
            image.extend(bytes(self.size - len(image)))


@dataclass(slots=True)
class FileNode:
    content: bytearray = field(default_factory=bytearray)
    safe: bytearray = field(default_factory=bytearray)
    changes: deque[Write | Resize] = field(default_factory=deque)
    changes_taken: int = 0
    synced_bytes: int = 0
    """As many as the last sync that went well has made safe."""
    changed_ms: int = 0
    mapped: bool = False
    """Whether memory that was mapped for writing may have changed it."""
    exported: bool = False
    """Whether a process has mapped it at all."""
    cold: bool = False
    bad: set[int] = field(default_factory=set)
    """Numbers of sectors that cannot be read any more; writing one anew mends it, as the disk puts it elsewhere."""

    def is_bad(self, position: int, count: int) -> bool:
        return any(
            position < (sector + 1) * SECTOR_BYTES and sector * SECTOR_BYTES < position + count for sector in self.bad
        )

    def change(self, change: Write | Resize) -> None:
        if self.bad:
            self._write_over_bad(change)
        change.apply(self.content)
        self.changes.append(change)

    def _write_over_bad(self, change: Write | Resize) -> None:
        if isinstance(change, Resize):
            self.bad = {sector for sector in self.bad if sector * SECTOR_BYTES < change.size}
        else:
            end = change.position + len(change.data)
            self.bad = {
                sector
                for sector in self.bad
                if not change.position <= sector * SECTOR_BYTES < (sector + 1) * SECTOR_BYTES <= end
            }

    def moment(self) -> tuple[int, bytes | None]:
        """What a sync that is asked for now makes safe."""
        return self.changes_taken + len(self.changes), bytes(self.content) if self.mapped else None

    def settle(self, moment: tuple[int, bytes | None], *, lost: bool) -> None:
        upto, mapped = moment
        while self.changes_taken < upto:
            change = self.changes.popleft()
            self.changes_taken += 1
            if not lost:
                change.apply(self.safe)
        if mapped is not None and not lost:
            self.safe = bytearray(mapped)
        if not lost:
            self.synced_bytes = len(self.safe)

    def let_go(self) -> None:
        """The process that had it open is dead: what it has mapped is its own from now on."""
        if self.exported:
            self.content = bytearray(self.content)
            self.exported = False

    def crash(self, chance: random.Random) -> None:
        image = self.safe
        if self.mapped:
            image = _mix(self.safe, self.content, chance)
        else:
            kept = chance.random()
            for change in self.changes:
                if chance.random() >= kept:
                    continue
                if isinstance(change, Write) and chance.random() < 0.2:
                    change = Write(change.position, change.data[: chance.randrange(len(change.data) + 1)])
                change.apply(image)
        self.safe = image
        self.content = bytearray(image)
        self.synced_bytes = min(self.synced_bytes, len(image))
        self.changes_taken += len(self.changes)
        self.changes.clear()
        self.mapped = self.exported = False


def _mix(old: bytearray, new: bytearray, chance: random.Random) -> bytearray:
    image = bytearray(chance.choice((old, new)))
    for at in range(0, len(image), SECTOR_BYTES):
        source = chance.choice((old, new))[at : at + SECTOR_BYTES]
        image[at : at + len(source)] = source
    return image


@dataclass(slots=True)
class FolderNode:
    entries: dict[str, FileNode | FolderNode] = field(default_factory=dict)
    safe: dict[str, FileNode | FolderNode] = field(default_factory=dict)
    steps: list[dict[str, FileNode | FolderNode]] = field(default_factory=list)
    steps_taken: int = 0
    """How many are safe; after a crash, how many it kept."""

    @property
    def last_step(self) -> int:
        return self.steps_taken + len(self.steps)

    def stepped(self) -> None:
        """Remember the entries as they are after one more change."""
        self.steps.append(dict(self.entries))

    def settle(self, steps: int) -> None:
        if steps:
            self.safe = self.steps[steps - 1]
            self.steps_taken += steps
            del self.steps[:steps]

    def let_go(self) -> None:
        for node in self.entries.values():
            node.let_go()

    def crash(self, chance: random.Random) -> None:
        keep = chance.randrange(len(self.steps) + 1)
        self.settle(keep)
        self.steps.clear()
        self.entries = dict(self.safe)
        for node in self.entries.values():
            node.crash(chance)

    def put(self, name: str, node: FileNode | FolderNode | None) -> None:
        """On the platter itself; None: take it away."""
        for entries in (self.entries, self.safe):
            if node is None:
                entries.pop(name, None)
            else:
                entries[name] = node

    def everything(self) -> dict[int, FileNode | FolderNode]:
        """All that can be reached from here, by identity."""
        found: dict[int, FileNode | FolderNode] = {id(self): self}
        for node in self.entries.values():
            found |= node.everything() if isinstance(node, FolderNode) else {id(node): node}
        return found


@dataclass(frozen=True, slots=True)
class Move:
    """A rename from one folder to another, and the step that it is of each."""

    node: FileNode | FolderNode
    source: FolderNode
    name: str
    source_step: int
    target: FolderNode
    target_name: str
    target_step: int

    @property
    def settled(self) -> bool:
        return self.source.steps_taken >= self.source_step and self.target.steps_taken >= self.target_step

    def mend(self, root: FolderNode, chance: random.Random) -> None:
        """After a crash that may have kept one of its sides, or lost the folder that it went to."""
        there = root.everything()
        arrived = self.target.steps_taken >= self.target_step and id(self.target) in there
        if self.source.steps_taken >= self.source_step and not arrived and id(self.node) not in there:
            free = id(self.source) in there and self.name not in self.source.entries
            folder, name = (self.source, self.name) if free else (self.target, self.target_name)
            folder.put(name, self.node)
            self.node.crash(chance)
        elif arrived and isinstance(self.node, FolderNode) and self.source.entries.get(self.name) is self.node:
            self.source.put(self.name, None)
