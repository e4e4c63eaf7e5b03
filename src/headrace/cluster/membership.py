"""This broker's place in the cluster: the cluster's id, its registration under a lease, blocks of producer ids.

A registration is there as long as its lease is kept alive; a lapsed one is written again at once. Whether the lease
still stands is judged by a local deadline, counted from before the last renewal was asked for, never by a late
answer.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from headrace.cluster import keys
from headrace.cluster.image import Broker, Endpoint, decode_broker, encode_broker
from headrace.cluster.waiting import pause
from headrace.errors import CoordinationError, DataFolderError, OperatorError
from headrace.ports.clock import Clock
from headrace.ports.coordination import Compare, Coordination, KeyValue, Put

LEASE_SECONDS: Final = 10.0
RENEWALS_PER_LEASE: Final = 3
REGISTER_PAUSE_SECONDS: Final = 0.5
PRODUCER_IDS_PER_BLOCK: Final = 1000
SWAPS_MAX: Final = 50
"""Tries of a compare-and-swap that others keep winning."""


async def settle_cluster_id(coordination: Coordination, wanted: str, draw: Callable[[], bytes]) -> str:
    """The id of the one cluster in this store: the one it has, else `wanted`, else one made of 16 drawn bytes."""
    fresh = wanted or base64.urlsafe_b64encode(draw()).rstrip(b"=").decode()
    if "/" in fresh:
        raise OperatorError(f"setting cluster.id: {fresh!r} must not contain '/'")
    absent = Compare(keys.CLUSTER_ID, "create_revision", "=", 0)
    await coordination.transact([absent], [Put(keys.CLUSTER_ID, keys.encode(fresh))])
    found = await coordination.get(keys.CLUSTER_ID)
    if found is None:
        raise CoordinationError(f"key {keys.CLUSTER_ID} was deleted while the broker started: start it again")
    settled = str(keys.decode(found.key, found.value))
    if wanted and settled != wanted:
        raise DataFolderError(
            f"setting cluster.id is {wanted!r}, and this data folder belongs to cluster {settled!r}: "
            "correct the setting, or use another data folder"
        )
    return settled


async def allocate_producer_ids(coordination: Coordination, prefix: str) -> range:
    """A block of producer ids that nobody else in the cluster has or will have."""
    key = keys.producer_ids_key(prefix)
    for _ in range(SWAPS_MAX):
        found = await coordination.get(key)
        first = 0 if found is None else int(keys.decode(key, found.value)["next"])
        unchanged = Compare(key, "mod_revision", "=", 0 if found is None else found.mod_revision)
        block = range(first, first + PRODUCER_IDS_PER_BLOCK)
        if (await coordination.transact([unchanged], [Put(key, keys.encode({"next": block.stop}))])).succeeded:
            return block
    raise CoordinationError(f"no producer ids: key {key} was changed by others {SWAPS_MAX} times in a row; try again")


class Membership:
    """Keeps this broker registered. `failed` runs when the renewing task dies of something that it cannot mend."""

    def __init__(
        self,
        coordination: Coordination,
        prefix: str,
        clock: Clock,
        broker: Broker,
        failed: Callable[[BaseException], None],
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        self.broker = broker
        self._coordination = coordination
        self._key = keys.broker_key(prefix, broker.id)
        self._clock = clock
        self._failed = failed
        self._lease_seconds = lease_seconds
        self._lease = 0
        self._deadline = float("-inf")
        self._task: asyncio.Task[None] | None = None

    @property
    def standing(self) -> bool:
        """Whether the lease holds for certain."""
        return self._clock.now() < self._deadline

    async def start(self) -> None:
        """Registered when this returns. Another live broker of the same number is an OperatorError."""
        give_up = self._clock.now() + 2 * self._lease_seconds
        while not await self._register():
            rival = await self._coordination.get(self._key)
            if rival is not None and self._clock.now() >= give_up:
                raise OperatorError(_taken(self.broker.id, self._key, rival))
            await pause(self._clock, REGISTER_PAUSE_SECONDS)
        self._task = asyncio.get_running_loop().create_task(self._renew())
        self._task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Leave: the registration is gone when this returns, or lapses with its lease if coordination does not
        answer.
        """
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._deadline = float("-inf")
        with suppress(CoordinationError):
            await self._coordination.revoke_lease(self._lease)

    async def _register(self) -> bool:
        """False when another registration is in the way."""
        asked = self._clock.now()
        self._lease = await self._coordination.grant_lease(self._lease_seconds)
        absent = Compare(self._key, "create_revision", "=", 0)
        put = Put(self._key, encode_broker(self.broker), self._lease)
        if (await self._coordination.transact([absent], [put])).succeeded:
            self._deadline = asked + self._lease_seconds
            return True
        await self._coordination.revoke_lease(self._lease)
        return False

    async def _renew(self) -> None:
        while True:
            await pause(self._clock, self._lease_seconds / RENEWALS_PER_LEASE)
            asked = self._clock.now()
            try:
                if await self._coordination.keep_alive(self._lease):
                    self._deadline = asked + self._lease_seconds
                else:
                    await self._register()
            except CoordinationError:
                continue

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failed(error)


def _taken(broker: int, key: str, rival: KeyValue) -> str:
    ends: list[Endpoint] = list(decode_broker(broker, keys.decode(key, rival.value)).listeners.values())
    at = ", ".join(f"{end.host}:{end.port}" for end in ends)
    return f"node.id {broker} is taken by the live broker at {at}: give this one another node.id"
