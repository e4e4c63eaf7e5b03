"""This broker's place in the cluster: the cluster's id, and its registration under a lease.

A registration is there as long as its lease is kept alive; a lapsed one is written again at once, and one that is
missing though its lease lives, as after a restore of coordination, within two lease times. Whether the lease
still stands is judged by a local deadline, counted from before the last renewal was asked for, never by a late
answer.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from headrace.cluster import keys
from headrace.cluster.image import LEAVING, Broker, Endpoint, Image, decode_broker, encode_broker
from headrace.cluster.view import ClusterView
from headrace.coordination.waits import OwnedTask, pause
from headrace.errors import CoordinationError, DataFolderError, OperatorError
from headrace.ports.clock import Clock
from headrace.ports.coordination import Compare, Coordination, Delete, KeyValue, Put

LEASE_SECONDS: Final = 10.0
RENEWALS_PER_LEASE: Final = 3
REGISTER_PAUSE_SECONDS: Final = 0.5
RETRY_SECONDS: Final = 0.5
"""Pause after a renewal that coordination did not answer."""


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


class Membership:
    """Keeps this broker registered, and standing for controller, under one lease.

    `failed` runs when the renewing task dies of something that it cannot mend.
    """

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
        self.lease = 0
        self.lease_seconds = lease_seconds
        self.steady_since = float("inf")
        """Since when coordination has answered all that was asked here; never, while it does not."""
        self._coordination = coordination
        self._prefix = prefix
        self._key = keys.broker_key(prefix, broker.id)
        self._clock = clock
        self._failed = failed
        self._deadline = float("-inf")
        self._revision = 0
        self._missing_since = float("inf")
        """Since when images have not had the registration: a restore of coordination may have kept the lease alone."""
        self._unanswered: set[int] = set()
        """Leases of registrations that may have been made: the answer did not come."""
        self._task = OwnedTask(failed)

    @property
    def standing(self) -> bool:
        """Whether the lease holds for certain."""
        return self._clock.now() < self._deadline

    async def start(self) -> None:
        """Registered when this returns. Another live broker of the same number is an OperatorError. After any error,
        and when cancelled, `close` takes back what was done.
        """
        give_up = self._clock.now() + 2 * self.lease_seconds
        while True:
            try:
                if await self._register():
                    break
                rival = await self._coordination.get(self._key)
                if rival is not None and self._clock.now() >= give_up:
                    raise OperatorError(_taken(self.broker.id, self._key, rival))
            except CoordinationError:
                if self._clock.now() >= give_up:
                    raise
            await pause(self._clock, REGISTER_PAUSE_SECONDS)
        self._task.start(self._renew())

    async def leave(self) -> None:
        """Say that this broker is about to go: its leaderships are handed over while it still serves."""
        self.broker = replace(self.broker, state=LEAVING)
        own = Compare(self._key, "mod_revision", "=", self._revision)
        result = await self._coordination.transact([own], [Put(self._key, encode_broker(self.broker), self.lease)])
        if result.succeeded:
            self._revision = result.revision

    async def close(self) -> None:
        """Leave: the registration is gone when this returns, or lapses with its lease if coordination does not
        answer.
        """
        await self.stop_renewing()
        self._deadline = float("-inf")
        with suppress(CoordinationError):
            for lease in sorted(self._unanswered | {self.lease} - {0}):
                await self._coordination.revoke_lease(lease)

    async def stop_renewing(self) -> None:
        await self._task.close()

    def follow(self, _old: Image, new: Image) -> None:
        """An image listener: a second process with this broker's number and data folder must not go on beside us."""
        found = new.brokers.get(self.broker.id)
        is_there = found is not None and found.incarnation == self.broker.incarnation
        self._missing_since = float("inf") if is_there else min(self._missing_since, self._clock.now())
        if found is not None and found.revision > self._revision > 0 and found.incarnation != self.broker.incarnation:
            at = ", ".join(f"{end.host}:{end.port}" for end in found.listeners.values())
            self._failed(
                OperatorError(
                    f"node.id {found.id} was taken over by the broker at {at}: is it a copy of this one's data folder? "
                    "Stop one of them"
                )
            )

    async def _register(self) -> bool:
        """False when another registration is in the way."""
        asked = self._clock.now()
        lease = await self._coordination.grant_lease(self.lease_seconds)
        rival = await self._coordination.get(self._key)
        if rival is None or self._is_own(rival):
            same = Compare(self._key, "mod_revision", "=", 0 if rival is None else rival.mod_revision)
            actions: list[Put | Delete] = [
                Put(self._key, encode_broker(self.broker), lease),
                Put(keys.election_key(self._prefix, lease), keys.encode({"broker": self.broker.id}), lease),
            ]
            if rival is not None:
                actions.append(Delete(keys.election_key(self._prefix, rival.lease)))
            self._unanswered.add(lease)
            result = await self._coordination.transact([same], actions)
            self._unanswered.discard(lease)
            if result.succeeded:
                self._unanswered.clear()  # what they may have made is replaced
                self.lease, self._revision = lease, result.revision
                self._deadline = asked + self.lease_seconds
                self._answered()
                return True
        await self._coordination.revoke_lease(lease)
        return False

    def _is_own(self, found: KeyValue) -> bool:
        """Whether a registration is of this process, or of the one that held the data folder before it: that one is
        dead, or we would not hold the folder, and need not wait for the end of its lease.
        """
        drawn = decode_broker(self.broker.id, keys.decode(found.key, found.value)).incarnation
        previous = self.broker.previous
        return drawn == self.broker.incarnation or (previous is not None and drawn == previous.incarnation)

    async def _renew(self) -> None:
        interval = self.lease_seconds / RENEWALS_PER_LEASE
        wait = interval
        while True:
            await pause(self._clock, wait)
            asked = self._clock.now()
            try:
                is_missing = asked - self._missing_since > self.lease_seconds
                if not is_missing and await self._coordination.keep_alive(self.lease):
                    self._deadline = asked + self.lease_seconds
                    self._answered()
                elif await self._register():
                    self._missing_since = float("inf")
                wait = interval
            except CoordinationError:
                self.steady_since = float("inf")
                wait = min(interval, RETRY_SECONDS)

    def _answered(self) -> None:
        self.steady_since = min(self.steady_since, self._clock.now())


def _taken(broker: int, key: str, rival: KeyValue) -> str:
    ends: list[Endpoint] = list(decode_broker(broker, keys.decode(key, rival.value)).listeners.values())
    at = ", ".join(f"{end.host}:{end.port}" for end in ends)
    return f"node.id {broker} is taken by the live broker at {at}: give this one another node.id"


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    """What the tasks of a registered broker act through. `failed` hears why one has ended by itself; while `is_held`,
    because the metadata is in doubt (cluster.lineage), they change nothing."""

    coordination: Coordination
    view: ClusterView
    membership: Membership
    clock: Clock
    failed: Callable[[BaseException], None]
    is_held: Callable[[], bool] = lambda: False
