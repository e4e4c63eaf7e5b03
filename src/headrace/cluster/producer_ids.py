"""Producer ids for idempotent producers, handed out from blocks that coordination gives this broker alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from headrace.cluster import keys
from headrace.cluster.changes import check_no_doubt
from headrace.cluster.view import View
from headrace.errors import CoordinationError
from headrace.ports.coordination import Compare, Coordination, Put

PRODUCER_IDS_PER_BLOCK: Final = 1000
PRODUCER_BLOCKS_SKIPPED: Final = 1 << 20
"""Fewer than so many blocks, by lot, are left out before each that is taken; on average half as many. Ids then last for
17 billion blocks."""
SWAPS_MAX: Final = 50
"""Tries of a compare-and-swap that others keep winning."""


async def allocate_producer_ids(
    coordination: Coordination, prefix: str, draw: Callable[[int], bytes], seen_revision: int = 0
) -> range:
    """A block of producer ids that nobody else in the cluster has or will have.

    `seen_revision` is the newest that this broker has seen: a store that answers with an older one was put back to a
    copy. A broker that has seen less than the copy cannot tell, and those that can may not have said so yet: as the
    block is drawn by lot from what comes next, it is hardly ever one that was given before.
    """
    key = keys.producer_ids_key(prefix)
    for _ in range(SWAPS_MAX):
        found = await coordination.get(key)
        skipped = int.from_bytes(draw(4), "big") % PRODUCER_BLOCKS_SKIPPED
        first = 0 if found is None else int(keys.decode(key, found.value)["next"])
        first += skipped * PRODUCER_IDS_PER_BLOCK
        unchanged = Compare(key, "mod_revision", "=", 0 if found is None else found.mod_revision)
        block = range(first, first + PRODUCER_IDS_PER_BLOCK)
        made = await coordination.transact([unchanged], [Put(key, keys.encode({"next": block.stop}))])
        if made.succeeded and made.revision <= seen_revision:
            raise CoordinationError(
                f"no producer ids: coordination answers with revision {made.revision}, and {seen_revision} has been "
                "seen: it was put back to an older copy; see headrace cluster status"
            )
        if made.succeeded:
            return block
    raise CoordinationError(f"no producer ids: key {key} was changed by others {SWAPS_MAX} times in a row; try again")


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

    def at_hand(self) -> int | None:
        """The same, of the block that is there; None when it is used up."""
        return next(self._block, None)

    async def first_free(self) -> int:
        """The first id that nobody has had, as far as coordination knows."""
        found = await self._coordination.get(keys.producer_ids_key(self._view.image.prefix))
        return 0 if found is None else int(keys.decode(found.key, found.value)["next"])
