"""What a process and its descendants cost, read from outside: processor time and memory.

Processor time comes from the kernel's per-process clock (nanoseconds, all threads, ended ones too), plus what ended
children left behind. A broker whose work is done in children it has already reaped is therefore counted in full.
"""

import os
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

STOP_TIMEOUT_S = 20.0
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident bytes of a process tree; `rss` counts a shared page once per process, `pss` once in all."""

    rss_bytes: int
    pss_bytes: int


def _stat_fields(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the command's name, or None when the process has ended."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(")") + 2 :].split()


def process_tree(root: int) -> list[int]:
    """The process and every living descendant of it."""
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            fields = _stat_fields(int(entry.name))
            if fields is not None:
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    tree = [root]
    for pid in tree:
        tree.extend(children.get(pid, ()))
    return tree


def cpu_seconds(root: int) -> float:
    """Processor time that the tree has used since it began."""
    total = 0.0
    for pid in process_tree(root):
        total += own_cpu_seconds(pid) + ended_children_cpu_seconds(pid)
    return total


def ended_children_cpu_seconds(pid: int) -> float:
    """Processor time of children that the process has waited for, 0 when it has ended."""
    fields = _stat_fields(pid)
    return 0.0 if fields is None else (int(fields[13]) + int(fields[14])) * TICK_S


def own_cpu_seconds(pid: int) -> float:
    """Processor time of the process alone, 0 when it has ended."""
    # Linux names the scheduler's clock of another process by the inverted pid and the number 2.
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def machine_cpu_seconds() -> float:
    """Processor time that everything on the machine has used since it began, idling and waiting left out."""
    user, nice, system, _idle, _iowait, irq, softirq, *_ = (PROC / "stat").read_text().split("\n", 1)[0].split()[1:]
    return sum(map(int, (user, nice, system, irq, softirq))) * TICK_S


def memory(root: int) -> Memory:
    """Resident memory of the tree now."""
    sums = {"Rss:": 0, "Pss:": 0}
    for pid in process_tree(root):
        try:
            lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        for line in lines:
            key, *rest = line.split()
            if key in sums:
                sums[key] += int(rest[0]) * 1024
    return Memory(sums["Rss:"], sums["Pss:"])


def stop(process: subprocess.Popen[bytes]) -> float:
    """Ends the process politely, then its tree by force; returns how long it took."""
    began = time.monotonic()
    tree = process_tree(process.pid)
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    took_s = time.monotonic() - began
    for pid in tree[1:]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return took_s


def warm_memory(count: int, folder: Path) -> None:
    """Has so many bytes of page cache backed by real memory and free again.

    A virtual machine that gives free memory back to its host pays for every page that it takes anew, several seconds of
    processor time a GB here: more than a broker needs to write it. Pages that were just in use are not given back yet.
    """
    piece = bytes(1 << 20)
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(0, count, len(piece)):
            file.write(piece)
