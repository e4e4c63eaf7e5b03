"""How far the archive has come, for logs that keep what is not archived (topic setting `retention.archived`).

The offsets of the archive's group are with its coordinator. Where that is this broker it is asked on the spot; where it
is another one it is asked from time to time as any client would, in a thread, while a log here wants to know. An old
answer keeps records for longer, never for shorter. Topics are told apart by their ids, and an answer counts when the
one before it was about the same topic: the coordinator may hear later than others that a topic was made anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

from headrace.cluster.image import Image
from headrace.cluster.names import OFFSETS_TOPIC
from headrace.errors import HeadraceError
from headrace.groups.coordinator import GroupCoordinator
from headrace.partitions.partitions import Partitions
from headrace.ports.clock import Clock
from headrace.storage.log import TopicPartition

log = logging.getLogger(__name__)

ASK_SECONDS: Final = 10.0
TIMEOUT_MS: Final = 2000

Answer = dict[tuple[bytes, int], int]
"""Committed offset by topic id and partition."""


class ArchivedOffsets:
    """`bootstrap` is an address at which this broker can be asked in plain text, None if there is none."""

    def __init__(
        self,
        clock: Clock,
        partitions: Partitions,
        groups: GroupCoordinator,
        image: Callable[[], Image],
        group: Callable[[], str],
        bootstrap: str | None,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._clock = clock
        self._partitions = partitions
        self._groups = groups
        self._image = image
        self._group = group
        self._bootstrap = bootstrap
        self._spawn = spawn
        self._ask_at = clock.now()
        self._asking = False
        self._heard: dict[str, tuple[Answer, Answer]] = {}
        """By group: the last answer and the one before it."""

    def offset(self, where: TopicPartition) -> int:
        """What storage may take as archived; 0 while nothing is known."""
        group = self._group()
        found = self._groups.committed_offset(group, where.topic, where.partition)
        if found is not None:
            return found
        topic = self._image().topics.get(where.topic)
        last, before = self._heard.get(group, ({}, {}))
        if topic is None or (topic.id, where.partition) not in before:
            return 0
        return min(last.get((topic.id, where.partition), 0), before[topic.id, where.partition])

    def tick(self) -> None:
        if self._asking or self._clock.now() < self._ask_at:
            return
        self._ask_at = self._clock.now() + ASK_SECONDS
        if self._bootstrap is not None and self._is_wanted():
            self._asking = True
            self._spawn(self._ask(self._group(), self._bootstrap))

    def _is_wanted(self) -> bool:
        """Some log here wants to know, another broker could be the coordinator, and there is a topic with offsets."""
        image = self._image()
        return (
            len(image.brokers) > 1
            and OFFSETS_TOPIC in image.topics
            and any(partition.log.settings.retention_archived for partition in self._partitions)
        )

    async def _ask(self, group: str, bootstrap: str) -> None:
        ids = {name: topic.id for name, topic in self._image().topics.items()}
        try:
            answer = await asyncio.to_thread(_fetch, bootstrap, group)
        except HeadraceError as error:
            log.warning("the archive group %r cannot be asked how far it is: %s", group, error)
        else:
            self.heard(group, ids, answer)
        finally:
            self._asking = False

    def heard(self, group: str, ids: Mapping[str, bytes], answer: Mapping[tuple[str, int], int]) -> None:
        """An answer, and the ids that topics had when it was asked for."""
        fresh = {(ids[topic], index): offset for (topic, index), offset in answer.items() if topic in ids}
        self._heard = {group: (fresh, self._heard.get(group, ({}, {}))[0])}


def _fetch(bootstrap: str, group: str) -> dict[tuple[str, int], int]:
    # Here, because no broker needs the client before: it would start a tenth later, and larger.
    from headrace.client.admin.cluster import Cluster, Retry
    from headrace.client.admin.groups import fetch_offsets

    with Cluster(bootstrap, client_id="headrace-broker", timeout_ms=TIMEOUT_MS, retry=Retry(within_ms=0)) as cluster:
        return fetch_offsets(cluster, group)
