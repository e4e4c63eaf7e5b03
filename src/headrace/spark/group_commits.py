"""Progress of queries on its way to brokers, as commits of consumer groups that say which query it is.

Told by a thread of its own: reports come on one that all of Spark's listeners share. What is lost when the process dies
is committed when the query goes on (`headrace.spark.stream`).
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Mapping
from typing import Any, Final

from headrace.errors import HeadraceError
from headrace.spark import plan, progress, query_metrics
from headrace.spark.connections import cluster_at
from headrace.spark.options import Topics
from headrace.spark.progress import Position

log = logging.getLogger(__name__)

COMMIT_WITHIN_MS: Final = 10_000
LEAVE_WITHIN_S: Final = 5.0
"""How long a process that ends waits for the last commits."""


class GroupCommits:
    """Of each group the newest progress waits, no more."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, str], tuple[Position, str]] = {}
        self._told: dict[tuple[str, str], Position] = {}
        self._changed = threading.Condition()
        self._busy = False
        self._thread: threading.Thread | None = None

    def put(self, bootstrap: str, group_id: str, reached: Position, author: str) -> None:
        """The newest progress of a group takes the place of one that still waits."""
        with self._changed:
            self._waiting[bootstrap, group_id] = reached, author
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="headrace-progress", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self, within_s: float) -> bool:
        """Whether all that was put is told, or could not be."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._waiting or self._busy), within_s)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting)
                key = next(iter(self._waiting))
                reached, author = self._waiting.pop(key)
                self._busy = True
            if self._told.get(key) != reached and self._tell(*key, reached, author):
                self._told[key] = reached

    def _tell(self, bootstrap: str, group_id: str, reached: Position, author: str) -> bool:
        names = tuple(sorted({topic for topic, _ in reached.offsets}))
        try:
            with cluster_at(bootstrap, COMMIT_WITHIN_MS, patient=True) as cluster:
                there = reached.still_there(plan.find(cluster, Topics(names=names), missing_ok=True))
                return progress.commit(cluster, group_id, there, author)
        except HeadraceError as error:
            log.warning("headrace: progress of group %s was not committed: %s", group_id, error)
            return False


commits: Final = GroupCommits()
atexit.register(commits.wait, LEAVE_WITHIN_S)


def take(report: Mapping[str, Any]) -> None:
    """Commit what Spark reports as done."""
    author = query_metrics.author(report)
    for source in query_metrics.sources(report):
        commits.put(source.bootstrap, source.group_id, source.reached, author)
