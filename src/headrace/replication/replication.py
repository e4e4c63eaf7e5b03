"""All links of this broker: to the leaders that it copies from, and from the followers that copy from it.

No task, timer or future belongs to a partition or a request. What a turn has written leaves at its end. Positions that
come from syncs are gathered and leave once, after what is being worked on now. Watermarks leave with the next records
on the link, or by themselves a few milliseconds later: nobody is acknowledged by them. The rest is `tick`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from headrace.errors import HeadraceError
from headrace.partitions.leader_core import IsrChange, LagLimits
from headrace.partitions.partition import Partition
from headrace.partitions.partitions import Partitions
from headrace.ports.clock import Clock
from headrace.ports.disk import Disk
from headrace.ports.network import Address, Listener, Network, chosen_with
from headrace.records.batch import batches, check
from headrace.replication.follower_session import FollowerContext, FollowerSession
from headrace.replication.frames import Hello
from headrace.replication.leader_session import LeaderContext, LeaderSession
from headrace.replication.link import Link
from headrace.replication.streams import Budget, Stream, whole_batches
from headrace.storage.log import TopicPartition

log = logging.getLogger(__name__)

LINKS_MAX: Final = 1000
WATERMARK_SECONDS: Final = 0.005
DAMAGE_RETRY_SECONDS: Final = 30.0
"""How often is tried again to read what could not be."""
JUDGEMENT_TICKS: Final = 10
"""Each led partition's in-sync set is judged once in so many ticks, and besides whenever a follower outside it reports
its position or a member asks for what may be committed."""


@dataclass(frozen=True, slots=True)
class ReplicationSettings:
    window_bytes: int = 16 << 20
    catchup_bytes_per_second: int = 50 << 20
    link_timeout_ms: int = 3000
    append_max_bytes: int = 128 << 20
    lag_time_max_ms: int = 10_000
    round_max_ms: int = 0


@dataclass(frozen=True, slots=True)
class LinkTls:
    """Contexts for both ends of a link: the one that listens, the one that connects."""

    listening: object
    connecting: object


class Replication:
    """See `partitions.partitions.Links`."""

    def __init__(
        self,
        network: Network,
        partitions: Partitions,
        clock: Clock,
        broker: int,
        incarnation: str,
        cluster_id: str,
        settings: ReplicationSettings,
        disk: Disk,
        tls: LinkTls | None = None,
    ) -> None:
        self._network = network
        self._partitions = partitions
        self._clock = clock
        self._settings = settings
        self._tls = tls
        self._ours = Hello(cluster_id, broker, incarnation)
        self._limits = LagLimits(settings.lag_time_max_ms / 1000, settings.round_max_ms / 1000)
        self._listener: Listener | None = None
        self._closed = False
        self.on_change: Callable[[Partition, IsrChange], None] = lambda partition, _change: partitions.refused(
            partition
        )
        """The leader wants its in-sync set changed; `Partitions.proposed` was called. Whoever writes it answers by
        `Partitions.confirmed` or `refused`."""
        self.on_failure: Callable[[BaseException], None] = lambda _error: None
        """A turn could not be ended: what was staged is lost, and the broker must stop."""
        self._budget = Budget(settings.catchup_bytes_per_second, clock.now())
        self._leading = LeaderContext(
            partitions, disk, clock, self._budget, settings.window_bytes,
            self._arrived, self._left, self._began, self._ended, self._judge_isr,
        )  # fmt: skip
        self._copying = FollowerContext(partitions, clock, self._connect, self._tell_soon)
        self._accepted: dict[LeaderSession, None] = {}
        self._followers: dict[int, LeaderSession] = {}
        self._streams: dict[Partition, list[tuple[LeaderSession, Stream]]] = {}
        self._heard_at: dict[int, float] = {}
        self._leaders: dict[int, FollowerSession] = {}
        self._followed: dict[TopicPartition, tuple[Partition, FollowerSession]] = {}
        self._addresses: Mapping[int, tuple[Address, str]] = {}
        self._written: dict[Partition, None] = {}
        self._risen: dict[Partition, None] = {}
        self._to_tell: dict[FollowerSession, None] = {}
        self._telling = self._raising = False
        self._damage_retry_at = 0.0
        self._to_judge: Iterator[Partition] = iter(())
        self._judgement_ticks_left = self._judged_each_tick = 0
        partitions.links = self

    def limit_catchup(self, bytes_per_second: int) -> None:
        """From now on; 0 for no limit."""
        self._budget.limit(bytes_per_second)

    # What this broker does, as the cluster says.

    def listen(self, address: Address) -> Address:
        """Take links from followers on this address; answers the real one. OperatorError if it cannot be had."""
        tls = self._tls.listening if self._tls is not None else None
        with chosen_with("--set replication.listen=HOST:PORT"):
            self._listener = self._network.listen(address, self._accept, tls)
        return self._listener.address

    def peers(self, addresses: Mapping[int, tuple[Address, str]]) -> None:
        """The brokers alive: replication address and incarnation."""
        self._addresses = dict(addresses)
        for broker, end in self._leaders.items():
            end.reach(*self._addresses.get(broker, (None, "")))

    def follow(self, partition: Partition, leader: int, epoch: int) -> None:
        """Copy the partition from this leader; replaces what was followed before."""
        assert partition.epoch == epoch, "a partition is made anew for every epoch"
        self.unfollow(partition.topic_partition)
        end = self._leaders.get(leader)
        if end is None:
            end = self._leaders[leader] = FollowerSession(self._copying, leader)
            end.reach(*self._addresses.get(leader, (None, "")))
        self._followed[partition.topic_partition] = partition, end
        end.follow(partition)

    def unfollow(self, where: TopicPartition) -> None:
        followed = self._followed.pop(where, None)
        if followed is not None:
            partition, end = followed
            partition.replicated = False
            end.unfollow(partition)

    def close(self) -> None:
        self._closed = True
        if self._listener is not None:
            self._listener.close()
        for following in list(self._leaders.values()):
            following.close("this broker stops")
        for leading in list(self._accepted):
            leading.link.abort("this broker stops")
        self._partitions.links = None

    # Links.

    def _connect(self, address: Address, end: FollowerSession) -> Link:
        link = self._link(end)
        self._network.connect(address, link, self._tls.connecting if self._tls is not None else None)
        return link

    def _accept(self) -> Link | None:
        if self._closed or len(self._accepted) >= LINKS_MAX:
            return None
        end = LeaderSession(self._leading)
        end.link = self._link(end)
        self._accepted[end] = None
        return end.link

    def _link(self, end: LeaderSession | FollowerSession) -> Link:
        settings = self._settings
        return Link(
            end, self._ours, self._clock, settings.link_timeout_ms, settings.append_max_bytes,
            lambda error: self.on_failure(error),
        )  # fmt: skip

    def _arrived(self, end: LeaderSession, hello: Hello) -> None:
        """A follower has said who it is; it has one link at a time, the last one."""
        before = self._followers.get(hello.broker)
        self._followers[hello.broker] = end
        if before is not None:
            before.link.abort("the follower has opened another link")

    def _left(self, end: LeaderSession) -> None:
        self._accepted.pop(end, None)
        if self._followers.get(end.broker) is end:
            del self._followers[end.broker]
            self._heard_at[end.broker] = end.link.heard_at

    def _began(self, end: LeaderSession, stream: Stream) -> None:
        self._streams.setdefault(stream.partition, []).append((end, stream))

    def _ended(self, end: LeaderSession, stream: Stream) -> None:
        streams = self._streams.get(stream.partition, [])
        if (end, stream) in streams:
            streams.remove((end, stream))
        if not streams:
            self._streams.pop(stream.partition, None)
            stream.partition.replicated = False

    # The turn.

    def written(self, partition: Partition) -> None:
        if partition.core is not None:
            self._written[partition] = None

    def rose(self, partition: Partition) -> None:
        self._risen[partition] = None
        if not self._raising:
            self._raising = True
            self._clock.call_later(WATERMARK_SECONDS, self._raise)

    def durable(self, partition: Partition) -> None:
        followed = self._followed.get(partition.topic_partition)
        if followed is not None and followed[0] is partition:
            followed[1].durable(partition)

    def end_turn(self) -> None:
        """Send what was written, and with it the watermarks that rose."""
        if self._written:
            written, self._written = self._written, {}
            self._send(written)

    def _send(self, written: dict[Partition, None]) -> None:
        risen, self._risen = self._risen, {}
        ends: dict[LeaderSession, None] = {}
        for partition in written | risen if risen else written:
            upto = partition.log.written_offset
            for end, stream in self._streams.get(partition, ()):
                stream.follower.queued = upto
                end.mark(stream)
                ends[end] = None
        for end in ends:
            end.pump(with_others=True)
        self._leading.reads.clear()

    def _raise(self) -> None:
        self._raising = False
        if self._risen and not self._closed:
            self._send({})

    def closed(self, partition: Partition) -> None:
        self._written.pop(partition, None)
        self._risen.pop(partition, None)
        for end, stream in list(self._streams.get(partition, ())):
            end.close_stream(stream)
        followed = self._followed.get(partition.topic_partition)
        if followed is not None and followed[0] is partition:
            self.unfollow(partition.topic_partition)

    def _tell_soon(self, end: FollowerSession) -> None:
        self._to_tell[end] = None
        if not self._telling:
            self._telling = True
            self._clock.call_soon(self._tell)

    def _tell(self) -> None:
        self._telling = False
        to_tell, self._to_tell = self._to_tell, {}
        for end in to_tell:
            end.tell(early=False)

    # From time to time.

    def tick(self) -> None:
        """Every 100 ms: pings and silence, links to be opened again, budgets, in-sync sets."""
        now = self._clock.now()
        self._leading.budget.refill(now)
        for following in list(self._leaders.values()):
            if following.is_idle:
                del self._leaders[following.broker]
                following.close("nothing is followed there any more")
            else:
                following.tick(now)
        self._mend(now)
        for leading in list(self._accepted):
            leading.link.tick(now)
            leading.pump()
        self._judge_some()

    def _mend(self, now: float) -> None:
        """Followers with a damaged place copy it again. A leader's stays as it is, and is not served. Either is well
        again if the disk gives the place back after all, or the log begins behind it."""
        damaged = self._partitions.damaged
        if not damaged:
            return
        is_due = now >= self._damage_retry_at
        if is_due:
            self._damage_retry_at = now + DAMAGE_RETRY_SECONDS
        for partition, offset in list(damaged.items()):
            followed = self._followed.get(partition.topic_partition)
            if partition.log.start_offset > offset:
                partition.mended()
            elif is_due and _can_read(partition, offset):
                log.warning("%s: offset %d can be read again", partition.topic_partition, offset)
                partition.mended()
            elif followed is not None and followed[0] is partition:
                followed[1].mend(partition, offset)

    def _judge_some(self) -> None:
        """Judge a part of the led partitions, so that each has its turn once in `JUDGEMENT_TICKS`."""
        if not self._judgement_ticks_left:
            led = [partition for partition in self._partitions if self._has_followers(partition)]
            self._to_judge = iter(led)
            self._judgement_ticks_left = JUDGEMENT_TICKS
            self._judged_each_tick = -(-len(led) // JUDGEMENT_TICKS)
        self._judgement_ticks_left -= 1
        for _ in range(self._judged_each_tick):
            partition = next(self._to_judge, None)
            if partition is None:
                return
            self._judge_isr(partition)

    def _has_followers(self, partition: Partition) -> bool:
        core = partition.core
        return core is not None and (len(core.replicas) > 1 or len(core.isr) > 1)

    def _judge_isr(self, partition: Partition) -> None:
        """Ask the leader's core whether its in-sync set should change, and have the change written."""
        core = partition.core
        if core is None or self._closed:
            return
        for broker, end in self._followers.items():
            self._heard_at[broker] = end.link.heard_at
        change = core.judge_isr(self._clock.now(), partition.log.written_offset, self._heard_at, self._limits)
        if change is not None:
            log.info(
                "%s: in-sync set %s wanted instead of %s: %s",
                partition.topic_partition, sorted(change.isr), sorted(core.isr), change.reason,
            )  # fmt: skip
            self._partitions.proposed(partition, change)
            self.on_change(partition, change)


def _can_read(partition: Partition, offset: int) -> bool:
    """The batch there and the one behind it: where headers are wrong, either may be meant."""
    held = partition.log
    try:
        for _ in range(2):
            if offset < held.written_offset:
                found = held.read(offset, 1, held.written_offset, warm=True)
                for piece in found.slices:
                    for _, view in batches(memoryview(piece.read())):
                        check(view)  # what this process wrote is read as it is
                offset = whole_batches(found)[2]
                if offset < 0:
                    return False
    except (HeadraceError, OSError):
        return False
    return True
