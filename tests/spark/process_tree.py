"""Processes that belong to a test, as the kernel lists them: who descends from whom, what they run, killing them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path


def below(*roots: int) -> list[int]:
    """All processes that descend from some, nearest first."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = list(roots)
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[len(roots) :]


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill(pids: Iterable[int]) -> int:
    """SIGKILL to each that is still there; how many were."""
    killed = 0
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed += 1
    return killed


def is_python_worker(pid: int) -> bool:
    return "pyspark.daemon" in command(pid)


def is_executor(pid: int) -> bool:
    """The JVM, not the script that starts it."""
    told = command(pid)
    return told.split(" ")[0].endswith("java") and "CoarseGrainedExecutorBackend" in told
