"""What this broker tells the controller of its replicas: what they hold while nobody leads, and that it cannot lead.

They are the keys `ends/<topic>/<n>/<broker>`. The controller elects from them and deletes them. What is reported is
synced first, where the topic asks for that. A report goes with the broker's lease and names its incarnation; its write
compares the partition's key, so that none arrives late, after the election that it was for.

A leader whose log is offline (its disk failed) asks for another by the key `orders/<topic>/<n>`, as long as there is
another member of the in-sync set that could lead. So does one whose log has a damaged place, which it can only mend as
a follower; but in another epoch not at once, or those that are damaged would hand the partition round and round, unless
one can lead that could not whenever it was asked for. While it is alone in the set it goes on, says what would help,
and resigns as soon as another is in sync.
"""

from __future__ import annotations

import logging
from typing import Final, NamedTuple

from headrace.cluster import keys
from headrace.cluster.changes import unchanged
from headrace.cluster.controller_state import RESIGN, ReplicaEnd, encode_end
from headrace.cluster.image import NO_LEADER, Image, PartitionState, Topic
from headrace.cluster.membership import ClusterAccess
from headrace.coordination.waits import Bell, OwnedTask, pause
from headrace.errors import CoordinationError, RequestTimedOut
from headrace.partitions.partition import Partition
from headrace.partitions.partitions import Partitions
from headrace.placement.moves import live_members
from headrace.ports.coordination import Compare, Put
from headrace.storage.log import Log

log = logging.getLogger(__name__)

REPORTS_A_STEP: Final = 60
RETRY_SECONDS: Final = 0.2
LOOK_SECONDS: Final = 1.0
"""How often is looked for what no new image tells of: logs that went offline or were created late, reports that could
not be written."""


RESIGN_AGAIN_SECONDS: Final = 60.0
RESIGN_AGAIN_MAX_SECONDS: Final = 3600.0
"""A leader that resigned for damage and leads again, in another epoch and still damaged, asks again only after the one,
and then after ever longer pauses, up to the other. Or at once, when one can lead that never could before."""


class Resigned(NamedTuple):
    """When another leader was asked for because of damage."""

    epoch: int
    at: float
    pause_seconds: float = RESIGN_AGAIN_SECONDS
    successors: frozenset[int] = frozenset()
    """Who could lead then, or when it was asked before."""

    def may_ask(self, epoch: int, successors: frozenset[int], now: float) -> bool:
        return epoch == self.epoch or not successors <= self.successors or now - self.at >= self.pause_seconds

    def asked(self, epoch: int, successors: frozenset[int], now: float) -> Resigned:
        is_first = epoch == self.epoch or not successors <= self.successors
        pause_seconds = self.pause_seconds if is_first else min(2 * self.pause_seconds, RESIGN_AGAIN_MAX_SECONDS)
        return Resigned(epoch, now, pause_seconds, self.successors | successors)


class ReplicaReports:
    """One task; looks at every new image that has partitions without a leader."""

    def __init__(self, cluster: ClusterAccess, partitions: Partitions) -> None:
        self._cluster = cluster
        self._partitions = partitions
        self._led: dict[str, Topic] = {}
        """Topics that were seen with a leader for every partition, as they were then."""
        self._resigned: dict[Log, Resigned] = {}
        """Of logs with a damaged place."""
        self._alone: dict[Log, int] = {}
        """Damaged logs for which no other can lead, as it was said, and the offset."""
        self._look_at = cluster.clock.now()
        self._bell = Bell()
        self._task = OwnedTask(cluster.failed)

    def start(self) -> None:
        self._cluster.view.listen(lambda _old, _new: self._bell.ring())
        self._task.start(self._run())
        self._bell.ring()

    async def close(self) -> None:
        await self._task.close()

    async def _run(self) -> None:
        while True:
            await self._bell.rung()
            try:
                await self._report()
            except (CoordinationError, RequestTimedOut) as error:
                log.info("what replicas hold is reported again: %s", error)
                await pause(self._cluster.clock, RETRY_SECONDS)
                self._bell.ring()

    def tick(self) -> None:
        """Call it from time to time."""
        now = self._cluster.clock.now()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        if self._wanted():
            self._bell.ring()

    def _wanted(self) -> list[tuple[Compare, Put]]:
        image = self._cluster.view.image
        return [] if self._cluster.is_held() else [*self._missing(image), *self._resignations(image)]

    async def _report(self) -> None:
        missing = self._wanted()
        for first in range(0, len(missing), REPORTS_A_STEP):
            part = missing[first : first + REPORTS_A_STEP]
            if not await self._write(part) and len(part) > 1:
                for each in part:
                    await self._write([each])

    async def _write(self, reports: list[tuple[Compare, Put]]) -> bool:
        if not self._cluster.membership.standing or self._cluster.is_held():
            return True
        result = await self._cluster.coordination.transact([same for same, _ in reports], [put for _, put in reports])
        await self._cluster.view.wait_for_revision(result.revision)
        return result.succeeded

    def _missing(self, image: Image) -> list[tuple[Compare, Put]]:
        """Every report that should be there and is not."""
        own = self._cluster.membership.broker
        if own.id not in image.brokers or image.brokers[own.id].incarnation != own.incarnation:
            return []
        missing = []
        if len(self._led) > len(image.topics):
            self._led = {name: topic for name, topic in self._led.items() if name in image.topics}
        for name, topic in image.topics.items():
            if self._led.get(name) is topic:
                continue
            leaderless = [state for state in topic.partitions if state.leader == NO_LEADER]
            if not leaderless:
                self._led[name] = topic
            for state in leaderless:
                if own.id in state.replicas and (report := self._report_of(topic, state)) is not None:
                    missing.append(self._as_change(image, topic, state, report))
        return missing

    def _resignations(self, image: Image) -> list[tuple[Compare, Put]]:
        own = self._cluster.membership.broker.id
        orders = []
        damaged = self._partitions.damaged
        if self._resigned:
            self._resigned = {part.log: self._resigned[part.log] for part in damaged if part.log in self._resigned}
        if self._alone:
            self._alone = {part.log: self._alone[part.log] for part in damaged if part.log in self._alone}
        now = self._cluster.clock.now()
        for partition in self._partitions:
            where = partition.topic_partition
            unable = partition.log.offline is not None or partition in self._partitions.unable
            if not partition.leading or not (unable or partition in damaged):
                continue
            state = image.partition(where.topic, where.partition)
            if state is None or state.leader != own or (where.topic, where.partition) in image.controls.orders:
                continue
            successors = live_members(state, image.brokers) - {own}
            before = self._resigned.get(partition.log, Resigned(partition.epoch, now))
            if not unable and not before.may_ask(partition.epoch, successors, now):
                continue
            if successors:
                key = keys.order_key(image.prefix, where.topic, where.partition)
                same = unchanged(keys.partition_key(image.prefix, where.topic, where.partition), state.revision)
                orders.append((same, Put(key, keys.encode({"kind": RESIGN, "broker": own}))))
                self._resigned[partition.log] = before.asked(partition.epoch, successors, now)
                self._alone.pop(partition.log, None)
            elif partition in damaged:
                self._say_alone(partition, damaged[partition])
        return orders

    def _say_alone(self, partition: Partition, offset: int) -> None:
        if self._alone.get(partition.log) == offset:
            return
        self._alone[partition.log] = offset
        where = partition.topic_partition
        log.error(
            "%s: offset %d cannot be read here, and no other replica is in sync to lead: the other records are served "
            "and new ones taken, but followers cannot copy what lies behind it. If a replica that holds it comes back, "
            "it is mended from there by itself; so it is when retention passes it. Else bring back the disk, or give "
            "up what lies before it (DeleteRecords up to behind it), or all from it on: stop this broker and elect "
            "another, `headrace partition elect --unclean %s %d`",
            where, offset, where.topic, where.partition,
        )  # fmt: skip

    def _report_of(self, topic: Topic, state: PartitionState) -> ReplicaEnd | None:
        """What to report, if it is not reported already; None also while the log is still in an earlier role."""
        partition = self._partitions.find_replica(topic.name, state.index)
        if partition is None or partition.log.topic_id != topic.id or partition.leader != NO_LEADER:
            return None
        own, held = self._cluster.membership.broker, partition.log
        if held.settings.durability == "disk" and held.offline is None and held.durable_offset < held.written_offset:
            held.sync_soon()  # who is elected by it has to hold it over a loss of power
            return None
        report = ReplicaEnd(
            topic.id,
            own.incarnation,
            held.last_epoch(),
            held.safe_start_offset,  # a crash may lower the other, and the key would not say where others begin
            held.end_offset,
            partition.high_watermark,
        )
        known = self._cluster.view.image.controls.ends.get((topic.name, state.index), {}).get(own.id)
        return report if report != known else None

    def _as_change(self, image: Image, topic: Topic, state: PartitionState, report: ReplicaEnd) -> tuple[Compare, Put]:
        key = keys.ends_key(image.prefix, topic.name, state.index, self._cluster.membership.broker.id)
        same = unchanged(keys.partition_key(image.prefix, topic.name, state.index), state.revision)
        return same, Put(key, encode_end(report), self._cluster.membership.lease)
