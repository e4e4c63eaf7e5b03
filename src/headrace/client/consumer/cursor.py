"""One partition as a consumer reads it, and which partitions are asked for next: values and pure steps, no I/O.

A feed has three offsets. `offset` is the next to be fetched, `position` the next to be handed out, and `done` what may
be saved as progress: everything before it was handed out by an earlier call than the last, or the caller has had it
saved. They stand in this order, and all move together on a seek.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from headrace.client.admin.connection import RESPONSE_MAX_BYTES
from headrace.client.consumer.group_protocol import Place
from headrace.errors import CorruptBatch, HeadraceError

PAUSE_S: Final = 0.02
PAUSE_MOST_S: Final = 1.0
MOST_SET_BYTES: Final = RESPONSE_MAX_BYTES // 2
REPLICA_KEPT_S: Final = 300.0
"""How long a follower is read that a leader named, before the leader is asked again."""


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A question under way; its answer counts for the feeds that still hold it."""

    broker_id: int
    offset: int


class Feed:
    """State of one partition. `turn` changes with every seek: what was fetched in an earlier one no longer counts."""

    __slots__ = (
        "__weakref__",
        "asked",
        "done",
        "end",
        "epoch",
        "failure",
        "failures",
        "most_bytes",
        "not_before",
        "offset",
        "partition",
        "paused",
        "position",
        "replica",
        "replica_until",
        "reset",
        "saved",
        "stuck",
        "topic",
        "topic_id",
        "turn",
        "wanted",
    )

    def __init__(self, topic: str, partition: int, most_bytes: int) -> None:
        self.topic = topic
        self.partition = partition
        self.topic_id = b""
        self.offset = self.position = self.done = self.saved = -1
        self.wanted: int | None = None
        """A moment (as ListOffsets has them) whose offset is still to be found; nothing is fetched till then."""
        self.reset: tuple[int, str] | None = None
        """From which offset, and why, `wanted` was set other than by the caller: told when it is found."""
        self.stuck = False
        """The log does not have `offset`: nothing is asked for until what was fetched before it is handed out."""
        self.turn = 0
        self.asked: Asked | None = None
        self.paused = False
        self.epoch = -1
        """Leader epoch of the last batch that was fetched."""
        self.end = -1
        """The high watermark as last told, -1 before."""
        self.replica: int | None = None
        self.replica_until = 0.0
        self.failures = 0
        self.not_before = 0.0
        self.failure: HeadraceError | None = None
        """What ended the reading until somebody seeks."""
        self.most_bytes = most_bytes

    @property
    def place(self) -> Place:
        return self.topic, self.partition

    def __repr__(self) -> str:
        return f"{self.topic}-{self.partition}"

    def seek(self, offset: int) -> None:
        """Go on at an offset; what was asked for or buffered before no longer counts."""
        self._turn()
        self.offset = self.position = self.done = offset

    def seek_moment(self, moment: int, reset: tuple[int, str] | None = None) -> None:
        """Go on at the offset of a moment, once it is found."""
        self._turn()
        self.offset = self.position = self.done = -1
        self.wanted, self.reset = moment, reset

    def _turn(self) -> None:
        self.turn += 1
        self.asked = None
        self.wanted = self.reset = None
        self.failure = None
        self.stuck = False
        self.epoch = -1
        self.failures, self.not_before = 0, 0.0

    def fetch_again(self, offset: int) -> None:
        """What was fetched from this offset on was not kept."""
        self.offset, self.epoch, self.asked = offset, -1, None
        self.stuck = False

    def leave(self) -> None:
        """Nothing that was asked for or fetched counts any more."""
        self.turn += 1
        self.asked = None

    def succeed(self) -> None:
        self.failures, self.not_before = 0, 0.0

    def back_off(self, now: float) -> None:
        """Not again before a pause, which doubles while it goes on."""
        self.not_before = now + min(PAUSE_S * 2**self.failures, PAUSE_MOST_S)
        self.failures = min(self.failures + 1, 16)

    def read_from(self, leader: int, now: float) -> int:
        """The follower that the leader named, for a while, or the leader itself."""
        if self.replica is not None and now >= self.replica_until:
            self.replica = None
        return leader if self.replica is None else self.replica

    def prefer(self, replica: int, now: float) -> None:
        self.replica, self.replica_until = replica, now + REPLICA_KEPT_S

    def may_be_asked(self, now: float) -> bool:
        return self.asked is None and self.failure is None and not self.stuck and now >= self.not_before


@dataclass(frozen=True, slots=True)
class RawSet:
    """Whole batches of one partition as they came, from `first_offset` on; records before it do not count."""

    feed: Feed
    turn: int
    records: memoryview
    first_offset: int
    next_offset: int

    @property
    def counts(self) -> bool:
        return self.feed.turn == self.turn


def fetchable(
    feeds: Iterable[Feed], leader_of: Callable[[Feed], int | None], busy: Callable[[int], bool], now: float
) -> tuple[dict[int, list[Feed]], list[Feed]]:
    """By broker, what a Fetch may ask it for; and the feeds that no leader is known of.

    A broker that is busy with a question is left alone: one is under way at each broker at most.
    """
    found: dict[int, list[Feed]] = {}
    lost: list[Feed] = []
    for feed in feeds:
        if feed.paused or feed.wanted is not None or not feed.may_be_asked(now):
            continue
        leader = leader_of(feed)
        if leader is None:
            lost.append(feed)
            continue
        broker_id = feed.read_from(leader, now)
        if not busy(broker_id):
            found.setdefault(broker_id, []).append(feed)
    return found, lost


def next_time(feeds: Iterable[Feed], now: float) -> float | None:
    """When the first of the feeds that pause may be asked for again."""
    times = [feed.not_before for feed in feeds if feed.not_before > now and feed.asked is None and not feed.paused]
    return min(times, default=None)


def larger(feed: Feed, cut_bytes: int) -> int:
    """What a partition may send from now on, so that the batch which did not fit does."""
    if feed.most_bytes >= MOST_SET_BYTES:
        raise CorruptBatch(f"{feed} at offset {feed.offset}: a batch of {cut_bytes} bytes, more than {MOST_SET_BYTES}")
    return min(max(2 * feed.most_bytes, cut_bytes), MOST_SET_BYTES)
