"""What a leader answers to a follower that subscribes, without I/O: whether it is served, and where the copy begins.

Epochs decide where two logs part (KIP-101, KIP-279). A follower tells the epoch of its last batch and its end. If the
leader has that epoch and it reaches as far, everything below is the same, and the copy begins there. If not, the
follower is told the leader's nearest epoch below and where it ends; it cuts, and asks again. What the leader has
deleted already cannot be copied: the follower then begins anew at the leader's log start, and is told what the leader
knows of producers from before it: a batch whose answer was lost comes again, though its records are gone.
"""

from __future__ import annotations

from headrace.partitions.leader_core import LeaderCore
from headrace.partitions.partition import Partition
from headrace.replication.frames import (
    PRODUCERS_MAX,
    Answer,
    Producers,
    Reason,
    Reset,
    Start,
    Stop,
    Subscribe,
    Truncate,
)
from headrace.storage import producers
from headrace.storage.log import Log


def refusal(asked: Subscribe, partition: Partition | None, broker: int) -> Stop | None:
    """Why this broker's subscription is not served; None if it is."""

    def stop(reason: Reason, text: str) -> Stop:
        return Stop(asked.subscription, asked.epoch, reason, text)

    if partition is None:
        return stop(Reason.NOT_LEADER, f"partition {asked.partition} of topic {asked.topic_id.hex()} is not here")
    where = partition.topic_partition
    if asked.epoch > partition.epoch:
        return stop(Reason.NEW_EPOCH, f"{where}: epoch {asked.epoch} is newer than ours, {partition.epoch}")
    if asked.epoch < partition.epoch:
        return stop(Reason.OLD_EPOCH, f"{where}: epoch {asked.epoch} is older than ours, {partition.epoch}")
    if partition.core is None:
        return stop(Reason.NOT_LEADER, f"{where}: this broker does not lead it")
    if broker not in partition.core.replicas:
        return stop(Reason.NOT_REPLICA, f"{where}: broker {broker} is not one of its replicas")
    if partition.log.offline is not None:
        return stop(Reason.UNREADABLE, str(partition.log.offline))
    return None


def must_leave_first(asked: Subscribe, core: LeaderCore, broker: int, incarnation: str) -> Stop | None:
    """A member that holds less than what is committed could be elected, and that would be lost: it gets nothing, and
    cuts nothing, before it has left the set. Who is about to cut could become one again in the next moment, if it was
    one before it was started anew."""
    committed = core.committed_before(mends=asked.mends)
    counts = core.may_be_carried_over(broker) if asked.mends else core.may_be_in_sync(broker, incarnation)
    if asked.end >= committed or not counts:
        return None
    text = f"broker {broker} is in sync below {committed} and asks for {asked.end}: it leaves the set first"
    return Stop(asked.subscription, asked.epoch, Reason.IN_SYNC, text)


def answer(asked: Subscribe, log: Log, watermark: int) -> Answer:
    """Where the follower may begin, or what it must do before it asks again."""
    subscription, epoch = asked.subscription, asked.epoch
    if asked.end < log.start_offset:
        return Reset(subscription, epoch, log.start_offset)
    if asked.last_epoch < 0:  # it holds nothing that could differ
        if asked.end > log.end_offset:
            return Reset(subscription, epoch, log.start_offset)
        return Start(subscription, epoch, asked.end, watermark, log.start_offset)
    ours = log.epoch_end(asked.last_epoch)
    if ours is None:
        # None of its epochs is known here, so whatever it has may be of another past. Even if all of that lies below
        # our start: it would tell other things of producers and their transactions.
        return Reset(subscription, epoch, log.start_offset)
    if ours.epoch == asked.last_epoch and asked.end <= ours.end_offset:
        return Start(subscription, epoch, asked.end, watermark, log.start_offset)
    return Truncate(subscription, epoch, ours.epoch, ours.end_offset)


def begins_anew(asked: Subscribe, start: Start) -> bool:
    """Whether the follower holds nothing, though there was something."""
    return asked.last_epoch < 0 and start.from_offset > 0


def producers_before(start: Start, log: Log) -> list[Producers]:
    """What the copy from there on does not tell of them."""
    known = list(log.producers_before(start.from_offset).items())
    parts = [dict(known[at : at + PRODUCERS_MAX]) for at in range(0, len(known), PRODUCERS_MAX)]
    return [Producers(start.subscription, start.epoch, producers.encode(part)) for part in parts]
