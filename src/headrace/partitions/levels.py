"""What acks=-1 waits for, chosen per topic: durability x replication point x replica policy. Pure.

By default, point `auto` and policy `all`, it is the high watermark: the whole in-sync set holds the record as durably
as the topic asks, and nothing acknowledged is lost while one member of the set lives. Any other choice is made by name
only: a weaker one is answered earlier than the watermark, so that a change of leader can take back what was
acknowledged; a stronger one (`flushed` where durability is not `disk`) later. Consumers read below the watermark
whatever is chosen.

Points, in the order in which a record passes them at each follower: `none`, `queued` for its link, `sent` into the
network, `received`, `written` to its page cache, `flushed` to its disk. Policies: `none`, `one` follower, a `majority`
of the replicas with the leader, `all` of the in-sync set, `racks`: a follower in the leader's rack and one in another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from headrace.partitions.leader_core import UNKNOWN, FollowerState, LeaderCore, majority
from headrace.settings.declared import LEVELS
from headrace.settings.values import LogSettings

AUTO: Final = "auto"
ALL: Final = "all"
NONE: Final = "none"
RACKS: Final = "racks"
WRITTEN: Final = "written"
FLUSHED: Final = "flushed"
POINTS: Final = (NONE, "queued", "sent", "received", WRITTEN, FLUSHED)
NO_LIMIT: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Reliability:
    point: str
    policy: str


@dataclass(frozen=True, slots=True)
class Level:
    """One of the named levels, and what it means when something breaks."""

    name: str
    durability: str
    point: str
    policy: str
    loses: str
    unavailable: str

    @property
    def is_lossy(self) -> bool:
        """Whether a change of leader alone can take back what was acknowledged."""
        return is_lossy(self.durability, self.point, self.policy)


_CONSEQUENCES: Final = {
    "page-cache": (
        "the leader's machine stops before its page cache reaches the disk, or another leader is elected",
        "while the leader is down; what was lost never comes back",
    ),
    "local-disk": (
        "the leader's disk is damaged, or another leader is elected that had not copied yet",
        "while the leader is down; after its restart everything is there if its disk is",
    ),
    "one-replica": (
        "the leader's disk and that of the one replica that had it are damaged together, or another replica is elected",
        "only while leader and replicas are down together, or the rack that all of them stand in",
    ),
    "all-replicas": (
        "the disks of all in-sync replicas are damaged",
        "only while fewer replicas than min.insync.replicas are up; with replicas in several racks, not by one",
    ),
}

NAMED: Final = tuple(
    Level(name, means["durability"], means["replication.point"], means["replication.policy"], *_CONSEQUENCES[name])
    for name, means in LEVELS.items()
)


def is_lossy(durability: str, point: str, policy: str) -> bool:
    counts = FLUSHED if durability == "disk" else WRITTEN
    return policy != ALL or (point != AUTO and POINTS.index(point) < POINTS.index(counts))


def weaker_or_stronger(settings: LogSettings) -> Reliability | None:
    """What acks=-1 waits for, if that is not the high watermark."""
    point, policy = settings.replication_point, settings.replication_policy
    counts = FLUSHED if settings.durability == "disk" else WRITTEN
    if point == AUTO:
        point = counts
    if policy == ALL and point == counts:
        return None
    return Reliability(point, policy)


def acknowledged(core: LeaderCore, chosen: Reliability, durable: int, racks: Mapping[int, str]) -> int:
    """Below this offset acks=-1 is answered. The leader's own copy counts as its durability says, always."""
    own = core.position
    if NONE in (chosen.policy, chosen.point):
        return own
    if chosen.policy == ALL:
        if not core.has_min_isr:
            return UNKNOWN
        if chosen.point == FLUSHED:
            own = min(own, durable, core.high_watermark)
        return min(own, _least_in_set(core, chosen.point))
    held = {broker: _at(follower, chosen.point) for broker, follower in core.followers.items()}
    if chosen.policy == RACKS:
        return min(own, _in_both_racks(core, held, racks))
    needed = 1 if chosen.policy == "one" else majority(len(core.replicas)) - 1
    best = sorted(held.values(), reverse=True)
    if not needed:
        return own
    return min(own, best[needed - 1] if len(best) >= needed else UNKNOWN)


def _at(follower: FollowerState, point: str) -> int:
    return int(getattr(follower, point))


def _least_in_set(core: LeaderCore, point: str) -> int:
    needed = core.needed_followers
    if needed is None:
        return UNKNOWN
    return min((_at(follower, point) for follower in needed), default=NO_LIMIT)


def stands_elsewhere(core: LeaderCore, racks: Mapping[int, str]) -> bool:
    """Whether the policy `racks` can be met at all."""
    return bool(_elsewhere(core, racks))


def _elsewhere(core: LeaderCore, racks: Mapping[int, str]) -> list[int]:
    home = racks.get(core.broker, "")
    return [broker for broker in core.replicas if racks.get(broker, "") != home]


def _in_both_racks(core: LeaderCore, held: Mapping[int, int], racks: Mapping[int, str]) -> int:
    """Where no follower stands in the leader's own rack, the leader is the one there."""
    home = racks.get(core.broker, "")
    here = [broker for broker in core.replicas if broker != core.broker and racks.get(broker, "") == home]
    there = _elsewhere(core, racks)
    near = max((held.get(broker, UNKNOWN) for broker in here), default=NO_LIMIT)
    far = max((held.get(broker, UNKNOWN) for broker in there), default=UNKNOWN)
    return min(near, far)
