"""Files and folders that a loss of power does not take back, and the lock of a folder.

A file survives when its bytes and its name are on disk, and its name lies in a folder: that has to be on disk too, and
the name of that folder in the one above it. `save_json` replaces a file as a whole; what was there before stays until
the new one is on disk. What lies in a store survives once the store has answered (see `headrace.arrow.locations`).
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.arrow.locations import ObjectPath


def sync(file: Path, root: Path | None = None) -> None:
    """Bring a file and its name to the disk; with `root` also the names of all folders between that one and it."""
    if isinstance(file, ObjectPath):
        return
    for each in (file, *file.parents[: len(file.relative_to(root or file.parent).parts)]):
        _sync(each)


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it that are not there. Their names are on disk when this returns."""
    if isinstance(folder, ObjectPath):
        return
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        _sync(each.parent)
    if not missing:
        # That it is no file is told here.
        folder.mkdir(exist_ok=True)


def save_json(path: Path, value: dict[str, Any]) -> None:
    """On disk when this returns."""
    text = json.dumps(value) + "\n"
    if isinstance(path, ObjectPath):
        path.write_text(text)
        return
    make_folder(path.parent)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text)
    _sync(temporary)
    temporary.rename(path)
    _sync(path.parent)


@contextmanager
def locked(file: Path, taken: Callable[[str], Exception]) -> Iterator[None]:
    """Hold a lock that goes with the process, however that ends; `taken` makes an error of who has it."""
    with file.open("a+") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            opened.seek(0)
            raise taken(opened.read().strip() or "unknown") from None
        opened.truncate(0)
        opened.write(f"{os.getpid()}\n")
        opened.flush()
        yield


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
