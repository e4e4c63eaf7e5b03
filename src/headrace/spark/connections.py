"""What a Python worker of Spark keeps from one task to the next: connections, and what it has imported.

Workers live on after a task, so a cluster that was reached once is reached again without a handshake. After an error
its connections are closed, and the next task opens new ones. Readers are pickled and hold no connection themselves.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from headrace.client.admin.cluster import Cluster, Retry
from headrace.records.isolation import Isolation

ANSWER_MAX_MS: Final = 10_000
IDLE_MAX: Final = 2
"""A task that writes has one for its transaction, and one for its rows."""

_Key = tuple[int, str, int]
_idle: Final[dict[_Key, list[Cluster]]] = {}
_tasks: Final[list[int]] = []
"""The processes, this one and those that it was forked from, in which a task has begun: once, and once more."""


def begin_task() -> None:
    """PySpark's daemon collects garbage after each task of a worker, and looks through all that is imported, which
    takes 25 ms: more than a small task. When a second task begins that was just done, and what is left is there to
    stay: it is not looked at again. Only for processes that Spark keeps for tasks."""
    mine = os.getpid()
    begun = _tasks.count(mine)
    if begun < 2:
        _tasks.append(mine)
    if begun == 1:
        gc.freeze()


@contextmanager
def cluster_at(
    bootstrap: str, timeout_ms: int, *, patient: bool = False, isolation: Isolation = Isolation.UNCOMMITTED
) -> Iterator[Cluster]:
    """A cluster that is left open for whoever asks next in this process, and closed after an error.

    An address that nobody answers at is told at once, unless `patient`: where it is known to be right, a broker that is
    restarting gets as long as any other error that may pass.
    """
    # Workers are forked: a socket of the parent must not be used by two.
    key = (os.getpid(), bootstrap, timeout_ms)
    idle = _idle.setdefault(key, [])
    if idle:
        cluster = idle.pop()
    else:
        cluster = Cluster(
            bootstrap,
            client_id="headrace-spark",
            timeout_ms=min(timeout_ms, ANSWER_MAX_MS),
            retry=Retry(within_ms=timeout_ms, first_contact_ms=timeout_ms if patient else 0),
        )
        if patient:
            cluster.reach()
    cluster.isolation = isolation
    try:
        yield cluster
    except BaseException:
        cluster.close()
        raise
    if len(idle) < IDLE_MAX:
        idle.append(cluster)
    else:
        cluster.close()
