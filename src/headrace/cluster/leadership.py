"""Whether this broker still leads a partition, asked of the partition's key: its own view may be behind.

A leader that was replaced and has not heard of it commits nothing, but its log may lack what its successor has
acknowledged. Before it tells a client that the log has a gap, which a client takes for a loss, it asks here: if it
leads in its epoch when it is asked, nobody has led in a later one before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from headrace.cluster import keys
from headrace.cluster.image import decode_partition
from headrace.cluster.view import View
from headrace.errors import CoordinationError
from headrace.partitions.partition import Partition
from headrace.ports.coordination import Coordination

log = logging.getLogger(__name__)

Told = Callable[[bool], None]


class Leadership:
    """`spawn` runs a coroutine in a task that the node owns."""

    def __init__(
        self, coordination: Coordination, view: View, spawn: Callable[[Coroutine[Any, Any, None]], None]
    ) -> None:
        self._coordination = coordination
        self._view = view
        self._spawn = spawn
        self._waiting: dict[Partition, list[Told]] = {}
        """Those whose question has not left yet, by partition; a partition that is here is being asked for."""

    def confirm(self, partition: Partition, told: Told) -> None:
        """Tell later whether the partition is led here in its epoch; no, if that cannot be known. However many ask,
        one question is under way for a partition: who comes while it is waits for the next."""
        waiting = self._waiting.get(partition)
        if waiting is not None:
            waiting.append(told)
            return
        self._waiting[partition] = [told]
        self._spawn(self._ask(partition))

    async def _ask(self, partition: Partition) -> None:
        try:
            while asked := self._waiting[partition]:
                self._waiting[partition] = []
                leads = await self._leads(partition)
                for told in asked:
                    told(leads)
        finally:
            del self._waiting[partition]

    async def _leads(self, partition: Partition) -> bool:
        where = partition.topic_partition
        try:
            found = await self._coordination.get(
                keys.partition_key(self._view.image.prefix, where.topic, where.partition)
            )
            if found is None:
                return False
            topic_id, state = decode_partition(where.partition, found)
        except CoordinationError as error:
            log.info("%s: whether it is still led here is not known: %s", where, error)
            return False
        is_same = topic_id == partition.log.topic_id and state.leader_epoch == partition.epoch
        return is_same and state.leader == partition.leader and partition.leading and partition.closed is None
