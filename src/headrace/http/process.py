"""What the operating system says about this process (Linux)."""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from typing import Final

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class ProcessFigures:
    resident_bytes: int
    cpu_seconds: float
    open_files: int
    open_files_max: int


def process_figures() -> ProcessFigures:
    try:
        with open("/proc/self/statm") as file:
            resident_bytes = int(file.read().split()[1]) * _PAGE_BYTES
        open_files = len(os.listdir("/proc/self/fd"))
    except OSError:  # no descriptor left to look with
        resident_bytes, open_files = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10, -1
    return ProcessFigures(
        resident_bytes, time.process_time(), open_files, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    )
