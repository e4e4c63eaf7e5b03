"""The data folder: whose it is, who holds it, what it stands on and how much room is left."""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headrace.cli.checkup.finding import Finding, fail, ok, warn
from headrace.cli.output import format_bytes
from headrace.ports.disk import SYNC_FAILED
from headrace.storage.folder import LAYOUT_FILE, LOCK_FILE, PARTITIONED

WHAT: Final = "data folder"
VOLATILE: Final = frozenset({"tmpfs", "ramfs"})
SHARED: Final = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "ceph", "glusterfs", "fuse.sshfs"})
LAYERED: Final = frozenset({"overlay", "aufs"})
LOW_SHARE: Final = 0.10
LOW_BYTES: Final = 1 << 30
NONE_LEFT_BYTES: Final = 64 << 20
MARKERS_MAX: Final = 10_000
"""Folders that are looked into for signs of failed syncs."""


def holder(data: str) -> int | None:
    """The process of the broker that runs on the folder. The kernel's list of locks is read: taking the lock, for
    however short, could stop a broker that starts just now."""
    lock = Path(data) / LOCK_FILE
    try:
        inode, pid = lock.stat().st_ino, lock.read_text().strip()
        locks = Path("/proc/locks").read_text().split("\n")
    except OSError:
        return None
    held = any(
        fields[1:2] == ["FLOCK"] and fields[4] == pid and fields[5].rpartition(":")[2] == str(inode)
        for fields in map(str.split, locks)
    )
    return int(pid) if held and pid.isdecimal() else None


def look(data: str, broker: int | None) -> Iterator[Finding]:
    folder = Path(data).absolute()
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if there != folder:
        if os.access(there, os.W_OK):
            yield ok(WHAT, f"{folder} is not there yet; the first start makes it")
        else:
            yield fail(WHAT, f"{folder} is not there, and {there} may not be written by {_me()}", _owned(folder))
    elif not folder.is_dir():
        yield fail(WHAT, f"{folder} is not a folder", "name another with --data")
        return
    else:
        yield from _contents(folder, broker)
    yield from _file_system(there)
    yield from _room(there)


def _contents(folder: Path, broker: int | None) -> Iterator[Finding]:
    found = folder.stat()
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        yield fail(WHAT, f"{folder} belongs to {_user(found.st_uid)} and may not be used by {_me()}", _owned(folder))
        return
    if found.st_mode & stat.S_IWOTH:
        yield warn(WHAT, f"everyone may write to {folder}", f"chmod o-w {folder}")
    layout_file = folder / LAYOUT_FILE
    layout = layout_file.read_text().strip() if layout_file.exists() else PARTITIONED
    whose = f"{folder}, layout {layout}, of {_user(found.st_uid)}"
    yield ok(WHAT, f"{whose}, in use by the broker with process id {broker}" if broker else f"{whose}, is free")
    if broker is None and not os.geteuid() and found.st_uid:
        yield warn(
            WHAT,
            f"{folder} belongs to {_user(found.st_uid)}: what a broker of root writes, that user cannot open",
            f"start the broker as {_user(found.st_uid)}",
        )
    marked = _marked(folder)
    if marked:
        yield warn(
            WHAT,
            f"a sync has failed in {marked[0]}" + (f" and {len(marked) - 1} more" if marked[1:] else ""),
            "look at the disk (dmesg, smartctl); the broker judges the log at its next start",
        )


def _marked(folder: Path) -> list[Path]:
    places = [folder, *(place for topic in folder.iterdir() if topic.is_dir() for place in (topic, *topic.iterdir()))]
    return [place for place in places[:MARKERS_MAX] if (place / SYNC_FAILED).exists()]


@dataclass(frozen=True, slots=True)
class Mount:
    point: str
    kind: str
    read_only: bool


def mount_of(folder: Path) -> Mount:
    """The file system that the folder is on: the last one mounted on the deepest point above it."""
    best = Mount("/", "unknown", read_only=False)
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, options, *_ = line.split(" ")
        point = point.encode().decode("unicode_escape")
        if folder.is_relative_to(point) and len(point) >= len(best.point):
            best = Mount(point, kind, "ro" in options.split(","))
    return best


def _file_system(there: Path) -> Iterator[Finding]:
    mount = mount_of(there.resolve())
    on = f"{mount.kind}, mounted on {mount.point}"
    if mount.read_only:
        yield fail(
            "disk", f"{there} is on {on}, which is read-only", "mount it to be written, or choose another folder"
        )
    elif mount.kind in VOLATILE:
        yield warn("disk", f"{there} is on {on}: memory, gone at the next boot", "choose a folder on a disk")
    elif mount.kind in SHARED:
        yield warn(
            "disk",
            f"{there} is on {on}: over a network a sync may be slow, or say done before it is, and locks may fail",
            "choose a disk of this machine",
        )
    elif mount.kind in LAYERED:
        yield warn("disk", f"{there} is on {on}: it goes with the container", "mount a volume there")
    else:
        yield ok("disk", f"{there} is on {on}")


def _room(there: Path) -> Iterator[Finding]:
    found = os.statvfs(there)
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    text = f"{format_bytes(free)} of {format_bytes(total)} are free"
    advice = "make room, or lower log.retention.ms or log.retention.bytes"
    if free < NONE_LEFT_BYTES:
        yield fail("space", text, advice)
    elif free < LOW_BYTES or free < total * LOW_SHARE:
        yield warn("space", text, advice)
    else:
        yield ok("space", text)
    if found.f_files and found.f_favail < found.f_files * LOW_SHARE / 10:
        yield warn("space", f"{found.f_favail} of {found.f_files} inodes are free", "remove files that nobody needs")


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def _me() -> str:
    return _user(os.geteuid())


def _owned(folder: Path) -> str:
    return f"run it as the user that the folder belongs to, or: chown -R {_me()} {folder}"
