"""Connections of a Python worker of Spark, kept from one micro-batch to the next.

Workers live on after a task, so a cluster that was reached once is reached again without a handshake. After an error
its connections are closed, and the next task opens new ones. Readers are pickled and hold no connection themselves.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from headrace.client.cluster import Cluster, Retry

_open: Final[dict[tuple[int, str, int], Cluster]] = {}


@contextmanager
def cluster_at(bootstrap: str, timeout_ms: int) -> Iterator[Cluster]:
    """The cluster of this process; it is left open for whoever asks next, and closed after an error."""
    # Workers are forked: a socket of the parent must not be read by two.
    key = (os.getpid(), bootstrap, timeout_ms)
    cluster = _open.pop(key, None) or Cluster(
        bootstrap, client_id="headrace-spark", timeout_ms=timeout_ms, retry=Retry(within_ms=timeout_ms)
    )
    try:
        yield cluster
    except BaseException:
        cluster.close()
        raise
    # A reader nested in another has one of its own; one of the two is kept.
    spare = _open.pop(key, None)
    if spare is not None:
        spare.close()
    _open[key] = cluster
