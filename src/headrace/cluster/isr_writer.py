"""Writes the changes that leaders want in their in-sync sets to coordination: compare-and-swap on the partition's key.

The leader's core counts both sets from the proposal until its outcome is known (partitions.leader_core). A transaction
compares the key's revision and the registration of every broker that it adds, so that a broker that was restarted in
the meantime does not come in by what its earlier process had told (KIP-903), and that no replica doubts the metadata: a
leader whose view is behind may be one of a history that has gone on without it. Many changes go in one transaction;
after a conflict each goes alone.

When an answer is lost, nobody knows whether the change was made, or will still be. The same change is sent again:
either it is made now, or the key has changed, and then the first one was made or never will be; the view shows which.
Without a lease that holds for certain nothing is sent.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from headrace.cluster import keys
from headrace.cluster.changes import unchanged
from headrace.cluster.image import LIVE, Image, PartitionState, encode_partition
from headrace.cluster.membership import ClusterAccess
from headrace.coordination.waits import Bell, OwnedTask, pause
from headrace.errors import CoordinationError, RequestTimedOut
from headrace.partitions.leader_core import IsrChange
from headrace.partitions.partition import Partition
from headrace.partitions.partitions import Partitions
from headrace.ports.coordination import ACTIONS_MAX, Compare, Put

log = logging.getLogger(__name__)

CHANGES_A_STEP: Final = 60
COMPARES_A_STEP: Final = ACTIONS_MAX - 1
"""One is left for a receipt (coordination.etcd)."""
RETRY_SECONDS: Final = 0.2


@dataclass(frozen=True, slots=True)
class Proposal:
    partition: Partition
    isr: Mapping[int, str]
    reason: str
    before: PartitionState
    key: str
    put: Put
    relied_on: tuple[Compare, ...]


class IsrWriter:
    """One task for all partitions that this broker leads."""

    def __init__(self, cluster: ClusterAccess, partitions: Partitions) -> None:
        self._cluster = cluster
        self._partitions = partitions
        self._pending: dict[Partition, Proposal] = {}
        self._bell = Bell()
        self._task = OwnedTask(cluster.failed)

    def start(self) -> None:
        self._task.start(self._run())

    async def close(self) -> None:
        await self._task.close()

    def want(self, partition: Partition, change: IsrChange) -> None:
        """The leader of a partition has proposed a change of its set: both sets count until it is answered."""
        able = self._cluster.membership.standing and not self._cluster.is_held()
        proposal = self._proposal(partition, change) if able else None
        if proposal is None:
            self._partitions.refused(partition)
        else:
            self._pending[partition] = proposal
            self._bell.ring()

    def _proposal(self, partition: Partition, change: IsrChange) -> Proposal | None:
        image = self._cluster.view.image
        where = partition.topic_partition
        state = image.partition(where.topic, where.partition)
        registrations = _registrations(image, change)
        if state is None or registrations is None or not self._is_led(image, state, partition):
            return None
        isr = {broker: change.isr[broker] for broker in state.replicas if broker in change.isr}
        after = replace(state, isr=tuple(isr), incarnations=isr)
        key = keys.partition_key(image.prefix, where.topic, where.partition)
        put = Put(key, encode_partition(partition.log.topic_id, after))
        relied_on = (*registrations, *_no_doubts(image, state))
        return Proposal(partition, isr, change.reason, state, key, put, relied_on)

    def _is_led(self, image: Image, state: PartitionState, partition: Partition) -> bool:
        """Whether the key is still the one that the leader's set was read from."""
        core = partition.core
        return (
            core is not None
            and core.revision == state.revision
            and (state.leader, state.leader_epoch) == (core.broker, core.epoch)
            and image.topics[partition.topic_partition.topic].id == partition.log.topic_id
        )

    async def _run(self) -> None:
        while True:
            await self._bell.rung()
            try:
                await self._carry_out(self._proposals())
            except (CoordinationError, RequestTimedOut) as error:
                log.info("changes of in-sync sets are sent again: %s", error)
                await pause(self._cluster.clock, RETRY_SECONDS)
            if self._proposals():
                self._bell.ring()

    def _proposals(self) -> list[Proposal]:
        """Those whose outcome is open. A newer key, or another role, has settled the others."""
        image = self._cluster.view.image
        for partition, proposal in list(self._pending.items()):
            where = partition.topic_partition
            state = image.partition(where.topic, where.partition)
            if (
                state is None
                or not self._is_led(image, state, partition)
                or state.revision != proposal.before.revision
                or self._partitions.find(where.topic, where.partition) is not partition
            ):
                del self._pending[partition]
        return list(self._pending.values())

    async def _carry_out(self, proposals: Sequence[Proposal]) -> None:
        if not self._cluster.membership.standing or self._cluster.is_held():
            await pause(self._cluster.clock, RETRY_SECONDS)
            return
        for part in _parts(proposals):
            if await self._transact(part) or len(part) == 1:
                continue
            for proposal in part:
                await self._transact([proposal])

    async def _transact(self, proposals: Sequence[Proposal]) -> bool:
        compares = [unchanged(proposal.key, proposal.before.revision) for proposal in proposals]
        compares.extend(dict.fromkeys(each for proposal in proposals for each in proposal.relied_on))
        result = await self._cluster.coordination.transact(compares, [proposal.put for proposal in proposals])
        if result.succeeded:
            for proposal in proposals:
                self._confirmed(proposal, result.revision)
        elif len(proposals) == 1:
            await self._cluster.view.wait_for_revision(result.revision)
            self._refused(proposals[0])
        return result.succeeded

    def _confirmed(self, proposal: Proposal, revision: int) -> None:
        partition = proposal.partition
        if not self._take(proposal):
            return
        log.info("%s: in sync %s: %s", partition.topic_partition, sorted(proposal.isr), proposal.reason)
        self._partitions.confirmed(partition, proposal.isr, revision)

    def _refused(self, proposal: Proposal) -> None:
        """The transaction was not made. A change of the key has told the leader by the image; here the key is the
        same, and a registration has changed, or a replica has come to doubt the metadata.
        """
        self._proposals()
        if self._take(proposal):
            self._partitions.refused(proposal.partition)

    def _take(self, proposal: Proposal) -> bool:
        """Whether its outcome is still awaited. The image may have told it before the answer came, and the leader may
        have proposed the next one since.
        """
        awaited = self._pending.get(proposal.partition) is proposal
        if awaited:
            del self._pending[proposal.partition]
        return awaited


def _parts(proposals: Sequence[Proposal]) -> Iterator[Sequence[Proposal]]:
    """One transaction each."""
    part: list[Proposal] = []
    relied_on: set[Compare] = set()
    for proposal in proposals:
        more = relied_on.union(proposal.relied_on)
        if part and (len(part) == CHANGES_A_STEP or len(part) + 1 + len(more) > COMPARES_A_STEP):
            yield part
            part, more = [], set(proposal.relied_on)
        part.append(proposal)
        relied_on = more
    if part:
        yield part


def _no_doubts(image: Image, state: PartitionState) -> Iterator[Compare]:
    """That no replica doubts the metadata, as far as the image shows none; a doubt in it that counts holds all up."""
    for number in state.replicas:
        if number not in image.controls.told_doubts:
            yield unchanged(keys.doubt_key(image.prefix, number), 0)


def _registrations(image: Image, change: IsrChange) -> tuple[Compare, ...] | None:
    """That each added broker is still registered as it is now; None if one is not registered with the incarnation that
    caught up, or is about to leave.
    """
    compares = []
    for number in change.added:
        broker = image.brokers.get(number)
        if broker is None or broker.incarnation != change.isr[number] or broker.state != LIVE:
            return None
        compares.append(unchanged(keys.broker_key(image.prefix, number), broker.revision))
    return tuple(compares)
