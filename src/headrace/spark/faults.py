"""Named places where a pipeline, or a query that writes to topics, can be made to die: for the tests of what survives.

`HEADRACE_DIE_AT=POINT` or `POINT:N` in the environment of a driver kills it with SIGKILL, its JVM with it, when batch N
(else 0) reaches the point. Works with a local master on Linux. Costs nothing when the variable is not set.

    files-written     the tasks of a batch have written their files, no table has them
    dead-committed    the dead-letter table has the batch, the table of records does not
    table-committed   the tables have the batch, Spark's own log does not
    batch-done        Spark's log has the batch, its offsets are not yet committed to the group
    sink-written      the tasks of a batch have written their rows to topics, nothing is decided
    sink-decided      the batch is decided, none of its transactions is committed
    sink-ended        all of its transactions are committed, Spark's own log does not have the batch
    compact-written   the larger files are written, the table has the small ones still
    compact-committed the table has the larger files, the small ones are not deleted yet
    merge-written     an archive has merged files, its table has the small ones still
    merge-committed   its table has the merged ones, the small ones are kept for readers
    index-written     the files of the key index are written, its table does not have them
    index-committed   the table of the key index has them, the files that they replace are not deleted yet
    replay-written    a window of a replay is written, and not committed
    replay-committed  a window of a replay is committed
    latest-written    the files of the latest records are written, their table does not have them
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Final

VARIABLE: Final = "HEADRACE_DIE_AT"


def reached(point: str, batch: int) -> None:
    wanted = os.environ.get(VARIABLE)
    if wanted is None:
        return
    name, _, nth = wanted.partition(":")
    if name == point and int(nth or 0) == batch:
        _kill_driver()


def _kill_driver() -> None:
    """The tree is driver, JVM, Python daemon, Python worker; this may be the driver or a worker."""
    above = os.getpid()
    while above > 1 and _name(above) != "java":
        above = _parent(above)
    if above > 1:
        doomed = [_parent(above), above]
    else:
        doomed = [pid for pid in _children(os.getpid()) if _name(pid) == "java"]
    for pid in doomed:
        os.kill(pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _stat(pid: int) -> tuple[str, list[str]]:
    head, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    return head.partition("(")[2], rest.split()


def _name(pid: int) -> str:
    return _stat(pid)[0]


def _parent(pid: int) -> int:
    return int(_stat(pid)[1][1])


def _children(pid: int) -> list[int]:
    return [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and _parent_or_none(int(p.name)) == pid]


def _parent_or_none(pid: int) -> int | None:
    try:
        return _parent(pid)
    except OSError:
        return None
