"""A follower's end of a link: it opens the connection to a leader broker and copies every partition that it leads.

Batches are staged from the receive buffer as they are and written once per read; then the positions of all partitions
that changed are told in one frame. A link that drops is opened again with growing pauses; what was copied stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from headrace.errors import CorruptBatch, HeadraceError, InvalidRecord, ProtocolError
from headrace.partitions.log_start import LogStart
from headrace.partitions.partition import Partition
from headrace.partitions.partitions import Failures, Partitions
from headrace.ports.clock import Clock
from headrace.ports.network import Address
from headrace.replication import frames
from headrace.replication.follower import RETRY_SECONDS, FollowedPartition, Stage
from headrace.replication.frames import Frame, Hello, Kind, Position, Producers, Reason, Start
from headrace.replication.link import Link
from headrace.storage import producers
from headrace.storage.producers import UnreadableProducers

log = logging.getLogger(__name__)

RECONNECT_SECONDS: Final = 0.05
RECONNECT_MAX_SECONDS: Final = 1.0


@dataclass(slots=True)
class FollowerContext:
    """What all links of a follower share."""

    partitions: Partitions
    clock: Clock
    connect: Callable[[Address, FollowerSession], Link]
    soon: Callable[[FollowerSession], None]
    """Have `tell` called once, after what is being worked on now."""


class FollowerSession:
    """All that this broker copies from one leader. See `link.LinkSession`."""

    def __init__(self, shared: FollowerContext, broker: int) -> None:
        self._shared = shared
        self.broker = broker
        self.link: Link | None = None
        self.connects = 0
        self._address: Address | None = None
        self._incarnation = ""
        self._followings: dict[Partition, FollowedPartition] = {}
        self._subscriptions: dict[int, FollowedPartition] = {}
        self._last_subscription = 0
        self._pause = RECONNECT_SECONDS
        self._connect_at = self._ready_at = 0.0
        self._staged: list[FollowedPartition] = []
        self._waiting: dict[FollowedPartition, None] = {}
        self._to_tell: dict[FollowedPartition, None] = {}
        self._late: dict[FollowedPartition, None] = {}
        """Positions that wait for a group commit; told without one after a while."""
        self._low: dict[FollowedPartition, None] = {}
        """Starts that could not be raised when that was last tried."""

    @property
    def is_idle(self) -> bool:
        return not self._followings

    # What is followed.

    def reach(self, address: Address | None, incarnation: str) -> None:
        """Where the leader is now; None: it is not known to be anywhere, but a link that works may stay."""
        if (address, incarnation) == (self._address, self._incarnation):
            return
        if address is None:
            self._address, self._incarnation = None, ""
            return
        has_moved = self._address is not None and address != self._address
        self._address, self._incarnation = address, incarnation
        self._pause, self._connect_at = RECONNECT_SECONDS, 0.0
        peer = self.link.peer if self.link is not None else None
        if self.link is not None and (has_moved or (peer is not None and peer.incarnation != incarnation)):
            self.link.abort("the leader is gone, or has moved or started anew")
        self._connect_if_due(self._shared.clock.now())

    def follow(self, partition: Partition) -> None:
        start = LogStart(partition.log, partial(self._start_settled, partition))
        following = self._followings[partition] = FollowedPartition(partition, start)
        self._waiting[following] = None
        partition.replicated = True
        if self.link is not None and self.link.is_ready:
            self._ask(following)
        else:
            self._connect_if_due(self._shared.clock.now())

    def unfollow(self, partition: Partition) -> None:
        following = self._followings.pop(partition, None)
        if following is None:
            return
        for those in (self._waiting, self._to_tell, self._late, self._low):
            those.pop(following, None)
        if self._subscriptions.pop(following.subscription, None) is not None and self.link is not None:
            self.link.send([frames.unsubscribe(following.subscription, following.epoch)])

    def mend(self, partition: Partition, offset: int) -> None:
        """Something at this offset is damaged: copy it again, with all that follows."""
        following = self._followings.get(partition)
        if following is None or following.mend_from is not None or self._shared.clock.now() < following.mend_after:
            return
        following.mend_from = offset
        if following.stage is not Stage.WAITING and self.link is not None:
            self.link.send([frames.unsubscribe(following.subscription, following.epoch)])
            self._ask(following)

    def close(self, reason: str) -> None:
        if self.link is not None:
            self.link.abort(reason)

    def tick(self, now: float) -> None:
        if self.link is not None:
            self.link.tick(now)
        self._connect_if_due(now)
        if self.link is not None and self.link.is_ready:
            if now - self._ready_at > RECONNECT_MAX_SECONDS:  # it stands; one that breaks at once keeps its pauses
                self._pause = RECONNECT_SECONDS
            self._ask(*[waiting for waiting in self._waiting if now >= waiting.retry_at])
            if self._late:
                self._to_tell.update(self._late)
                self._late = {}
                self.tell(early=True)
            low, self._low = self._low, {}
            for following in low:
                self._follow_start(following, following.leader_start)

    def _connect_if_due(self, now: float) -> None:
        if self.link is None and self._address is not None and self._followings and now >= self._connect_at:
            self._connect_at = now + self._pause
            self._pause = min(2 * self._pause, RECONNECT_MAX_SECONDS)
            self.connects += 1
            self.link = self._shared.connect(self._address, self)

    def _ask(self, *followings: FollowedPartition) -> None:
        assert self.link is not None
        asked: list[bytes] = []
        for following in followings:
            if following.partition.log.offline is not None:  # it takes nothing until this broker is started again
                self._wait(following)
                continue
            self._waiting.pop(following, None)
            self._subscriptions.pop(following.subscription, None)
            self._last_subscription += 1
            self._subscriptions[self._last_subscription] = following
            asked.append(frames.subscribe(following.ask(self._last_subscription)))
        if asked:
            self.link.send([b"".join(asked)])

    def _wait(self, following: FollowedPartition) -> None:
        self._subscriptions.pop(following.subscription, None)
        self._to_tell.pop(following, None)
        self._waiting[following] = None
        following.wait(self._shared.clock.now())

    # LinkSession.

    def greeted(self, hello: Hello) -> None:
        if hello.broker != self.broker:
            raise ProtocolError(
                f"broker {hello.broker} answers at the address of broker {self.broker}, {self._address}"
            )
        self._ready_at = self._shared.clock.now()
        self._ask(*self._waiting)

    def gone(self, reason: str) -> None:
        log.info("link to leader broker %d ended: %s", self.broker, reason)
        self.link = None
        for those in (self._subscriptions, self._to_tell, self._late, self._low):
            those.clear()
        for following in self._followings.values():
            following.stage = Stage.WAITING
            self._waiting[following] = None

    def drained(self) -> None:
        pass

    def take(self, data: memoryview, frame: Frame) -> None:
        match frame.kind:
            case Kind.APPEND:
                self._append(data, frame)
            case Kind.WATERMARKS:
                for subscription, epoch, watermark, log_start in frames.read_watermarks(data, frame):
                    following = self._current(subscription, epoch, Stage.COPYING)
                    if following is not None:
                        self._shared.partitions.told(following.partition, watermark)
                        self._follow_start(following, log_start)
            case Kind.EPOCHS:
                epochs = frames.read_epochs(data, frame)
                following = self._current(epochs.subscription, epochs.epoch, Stage.COPYING)
                if following is not None:
                    following.epoch_starts = epochs.starts
            case Kind.PRODUCERS:
                self._producers(frames.read_producers(data, frame))
            case Kind.START:
                self._start(frames.read_start(data, frame))
            case Kind.TRUNCATE:
                told = frames.read_truncate(data, frame)
                following = self._current(told.subscription, told.epoch, Stage.ASKING)
                if following is not None:
                    self._mend(following, partial(following.cut, told))
            case Kind.RESET:
                reset = frames.read_reset(data, frame)
                following = self._current(reset.subscription, reset.epoch, Stage.ASKING)
                if following is not None:
                    self._mend(following, partial(following.reset, reset.log_start))
            case Kind.STOP:
                stop = frames.read_stop(data, frame)
                following = self._subscriptions.get(stop.subscription)
                if following is not None:
                    log.info("broker %d does not serve a subscription: %s", self.broker, stop.text)
                    if stop.reason == Reason.INSPECTING:
                        following.pause = RETRY_SECONDS
                    elif stop.reason == Reason.UNREADABLE and following.mend_from is not None:
                        following.put_off_mending(self._shared.clock.now())
                    self._wait(following)
            case _:
                raise ProtocolError(f"a frame of kind {frame.kind}, which a leader never sends")

    def end_turn(self) -> None:
        if self._staged:
            self._shared.partitions.at_turn_end(self._written)
            self._shared.partitions.end_turn()
        self.tell(early=False)

    # FollowerContext.

    def _current(self, subscription: int, epoch: int, stage: Stage) -> FollowedPartition | None:
        following = self._subscriptions.get(subscription)
        if following is None or following.epoch != epoch or following.stage is not stage:
            return None  # of an earlier subscription, or answered already
        return following

    def _start(self, start: Start) -> None:
        following = self._current(start.subscription, start.epoch, Stage.ASKING)
        if following is None:
            return
        partition = following.partition
        if start.from_offset != following.asked_end:
            raise ProtocolError(
                f"{partition.topic_partition}: the leader starts at {start.from_offset}, but asked for was "
                f"{following.asked_end}"
            )
        try:
            begun = following.begin(start.from_offset)
        except (HeadraceError, OSError) as error:
            partition.truncated()  # as far as the cut went
            self._give_up(following, error)
            return
        if not begun:
            self._ask(following)
            return
        self._shared.partitions.told(partition, start.watermark)
        self._follow_start(following, start.log_start)
        self._to_tell[following] = None

    def _producers(self, told: Producers) -> None:
        following = self._current(told.subscription, told.epoch, Stage.COPYING)
        if following is None:
            return
        states = producers.decode(told.snapshot)
        if states is None:
            raise ProtocolError(f"{following.partition.topic_partition}: what is told of its producers is not whole")
        try:
            following.partition.log.learn_producers(states)
        except (HeadraceError, OSError) as error:
            self._give_up(following, error)

    def _mend(self, following: FollowedPartition, change: Callable[[], bool]) -> None:
        """Cut or begin anew, then ask again."""
        where = following.partition.topic_partition
        try:
            changed = change()
        except (HeadraceError, OSError) as error:
            log.error("%s cannot be cut to what its leader has: %s; tried again later", where, str(error))
            following.partition.truncated()  # as far as the cut went
            changed = False
        if changed:
            self._ask(following)
        else:
            self._wait(following)

    def _append(self, data: memoryview, frame: Frame) -> None:
        subscription, epoch, from_offset, watermark, log_start = frames.read_append(data, frame)
        following = self._current(subscription, epoch, Stage.COPYING)
        if following is None:
            return
        partition = following.partition
        end = partition.log.end_offset
        if from_offset != end:
            raise ProtocolError(f"{partition.topic_partition}: records from offset {from_offset} on, but {end} is next")
        try:
            batches = data[frame.body + frames.APPEND_BYTES : frame.end]
            gap = following.gap_in(batches)
            if gap:
                partition.log.append_copied(batches[:gap], following.epoch_starts)
                self._stage(following)
            if gap is not None and self._has_missed(following):
                return
            partition.log.append_copied(batches[gap:], following.epoch_starts)
        except (CorruptBatch, InvalidRecord) as error:
            if isinstance(error, UnreadableProducers):  # our own log, where it tells of its producers
                partition.found_damage(error.offset)
                self._give_up(following, error)
                return
            if following.failed_at != end:  # damaged on its way, for all that is known: another link may bring it whole
                following.failed_at = end
                raise ProtocolError(f"{partition.topic_partition}: {error}") from None
            self._give_up(following, error)
            return
        except (HeadraceError, OSError) as error:
            _let_go(error)
            self._give_up(following, error)
        else:
            partition.expect(watermark)
            following.leader_start = log_start
        self._stage(following)

    def _stage(self, following: FollowedPartition) -> None:
        """Also after an error: what was staged before it lies in the receive buffer and has to be written now."""
        self._shared.partitions.touch(following.partition)
        self._staged.append(following)

    def _has_missed(self, following: FollowedPartition) -> bool:
        """Whether the marker of something may lie in what the leader leaves out here; then that is copied again."""
        missed_from, partition = following.missed_from(), following.partition
        if missed_from is None:
            return False
        log.info(
            "%s: what follows offset %d was compacted by the leader, and a transaction is open here since offset %d",
            partition.topic_partition, partition.log.end_offset - 1, missed_from,
        )  # fmt: skip
        self.mend(partition, missed_from)
        if following.mend_from is None:  # the leader could not read it when it was last asked
            self._wait(following)
        return True

    def _give_up(self, following: FollowedPartition, error: Exception) -> None:
        """This partition cannot be copied now; the others go on."""
        log.error("%s is not copied for now: %s", following.partition.topic_partition, str(error))
        following.failed_at = following.partition.log.end_offset
        if self.link is not None:
            self.link.send([frames.unsubscribe(following.subscription, following.epoch)])
        self._wait(following)

    def _written(self, failures: Failures) -> None:
        staged, self._staged = self._staged, []
        for following in staged:
            error = failures.get(following.partition.topic_partition)
            if error is None:
                self._follow_start(following, following.leader_start)
                if following.stage is Stage.COPYING:
                    self._to_tell[following] = None
            elif following.stage is Stage.COPYING:
                self._give_up(following, error)

    def _follow_start(self, following: FollowedPartition, log_start: int) -> None:
        """Begin where the leader wants it; it hears of that when it is safe on disk."""
        following.leader_start = log_start
        held = following.partition.log
        before = held.start_offset
        following.start.raise_to(following.wanted_start())
        if held.start_offset != before:
            following.partition.bounds_changed()

    def _start_settled(self, partition: Partition, error: HeadraceError | None) -> None:
        following = self._followings.get(partition)
        if following is None or following.stage is not Stage.COPYING:
            return
        if error is not None:
            self._low[following] = None
            return
        self._follow_start(following, following.leader_start)
        self._to_tell[following] = None
        self._shared.soon(self)

    def durable(self, partition: Partition) -> None:
        """A sync of its log has come back."""
        following = self._followings.get(partition)
        if following is None or following.stage is not Stage.COPYING:
            return
        if partition.log.offline is not None:
            self._give_up(following, partition.log.offline)
            return
        self._to_tell[following] = None
        self._shared.soon(self)

    def tell(self, *, early: bool) -> None:
        """One frame with the positions of all partitions that have changed."""
        if not self._to_tell or self.link is None:
            return
        to_tell, self._to_tell = self._to_tell, {}
        entries: list[Position] = []
        for following in to_tell:
            if not early and following.may_wait():
                self._late[following] = None
            elif (entry := following.position()) is not None:
                entries.append(entry)
        if entries:
            self.link.send([frames.positions(entries)])


def _let_go(error: BaseException) -> None:
    """A log may keep the error that took it offline: that must not keep the receive buffer, which its frames hold."""
    for each in (error, error.__cause__, error.__context__):
        if each is not None:
            each.__traceback__ = None
