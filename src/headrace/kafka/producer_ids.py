"""Producer ids for idempotent producers, handed out from blocks that coordination gives this broker alone."""

from __future__ import annotations

from headrace.cluster.membership import allocate_producer_ids
from headrace.ports.coordination import Coordination


class ProducerIds:
    def __init__(self, coordination: Coordination, prefix: str) -> None:
        self._coordination = coordination
        self._prefix = prefix
        self._block = iter(range(0))

    async def next(self) -> int:
        """An id that no other producer of the cluster has had."""
        while True:
            for producer_id in self._block:
                return producer_id
            self._block = iter(await allocate_producer_ids(self._coordination, self._prefix))
