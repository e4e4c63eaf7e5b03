"""Producer ids for idempotent producers, handed out from blocks that coordination gives this broker alone."""

from __future__ import annotations

from collections.abc import Callable

from headrace.cluster.changes import check_no_doubt
from headrace.cluster.membership import allocate_producer_ids, next_producer_id
from headrace.cluster.view import View
from headrace.ports.coordination import Coordination


class ProducerIds:
    """`draw` answers so many random bytes."""

    def __init__(self, coordination: Coordination, view: View, draw: Callable[[int], bytes]) -> None:
        self._coordination = coordination
        self._view = view
        self._draw = draw
        self._block = iter(range(0))

    async def next(self) -> int:
        """An id that no other producer of the cluster has had."""
        while True:
            for producer_id in self._block:
                return producer_id
            image = self._view.image
            check_no_doubt(image)
            block = await allocate_producer_ids(self._coordination, image.prefix, self._draw, image.revision)
            # What has come back through the watch meanwhile may tell of a restore.
            check_no_doubt(self._view.image)
            self._block = iter(block)

    async def first_free(self) -> int:
        """The first id that nobody has had, as far as coordination knows."""
        return await next_producer_id(self._coordination, self._view.image.prefix)
