"""A real file system of a few megabytes, for tests that fill it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size_mib: int = 4) -> Iterator[str]:
    """Mount a tmpfs; the test is skipped where that is not allowed."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    place = folder / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", str(place)]
    made = subprocess.run(mount, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no tmpfs: {made.stderr.strip()}")
    try:
        yield str(place)
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
