"""What the operating system says about this process (Linux)."""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from functools import cache
from typing import Final

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_TICKS: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ProcessFigures:
    resident_bytes: int
    cpu_seconds: float
    open_files: int
    open_files_max: int
    started_seconds: float


def process_figures() -> ProcessFigures:
    try:
        with open("/proc/self/statm") as file:
            resident_bytes = int(file.read().split()[1]) * _PAGE_BYTES
        open_files = len(os.listdir("/proc/self/fd"))
    except OSError:  # no descriptor left to look with
        resident_bytes, open_files = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10, -1
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return ProcessFigures(resident_bytes, time.process_time(), open_files, most, _started_seconds())


@cache
def _started_seconds() -> float:
    """When this process began, since 1970: kept as it is first read, so that a clock put right does not move it."""
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / _TICKS)
