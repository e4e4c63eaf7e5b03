"""A coordinator of transactions on a virtual clock, a log in memory and partitions that take markers when told.

Appends are acknowledged at once, or with `held` kept until `acknowledge`; markers are written at once, or with
`markers_held` kept until `write_markers`. `take_over` makes the next coordinator from the acknowledged records.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from headrace.coordinators.record_fields import Record
from headrace.coordinators.state_log import AppendDone
from headrace.errors import ErrorCode
from headrace.transactions.coordinator import TransactionCoordinator
from headrace.transactions.descriptions import ListFilter
from headrace.transactions.limits import TransactionLimits
from headrace.transactions.messages import (
    AddRequest,
    EndReply,
    EndRequest,
    InitReply,
    InitRequest,
    ListedTransaction,
    MarkerRequest,
    Owner,
    Place,
)
from headrace.virtual.clock import VirtualClock

ID = "pay-1"
TIMEOUT_MS = 10_000
PLACES = frozenset({("a", 0), ("b", 1)})
EVERYTHING = ListFilter()
T = TypeVar("T")


class Waiter(Generic[T]):
    """The other end of a reply callback; a second reply is an error."""

    def __init__(self) -> None:
        self.replies: list[T] = []

    def __call__(self, reply: T) -> None:
        assert not self.replies, f"answered twice: {self.replies[0]} and {reply}"
        self.replies.append(reply)

    @property
    def answered(self) -> bool:
        return bool(self.replies)

    @property
    def reply(self) -> T:
        assert self.replies, "not answered"
        return self.replies[0]


@dataclass(slots=True)
class Scene:
    limits: TransactionLimits = field(default_factory=TransactionLimits)
    partitions: int = 1
    clock: VirtualClock = field(default_factory=VirtualClock)
    held: bool = False
    markers_held: bool = False
    ids_held: bool = False
    log: dict[int, list[Record]] = field(default_factory=dict)
    on_the_way: list[tuple[int, list[Record], AppendDone]] = field(default_factory=list)
    markers: list[tuple[MarkerRequest, Callable[[], bool], Callable[[], None]]] = field(default_factory=list)
    written: list[MarkerRequest] = field(default_factory=list)
    drawing: list[Callable[[int | None], None]] = field(default_factory=list)
    epoch: int = 0
    ids: Iterator[int] = field(default_factory=lambda: itertools.count(1000))
    coordinator: TransactionCoordinator = field(init=False)

    def __post_init__(self) -> None:
        self.coordinator = self._coordinator()
        for partition in range(self.partitions):
            self.coordinator.lead(partition, self.epoch).ready()

    def _coordinator(self) -> TransactionCoordinator:
        return TransactionCoordinator(
            self.clock, self.append, self.partitions, self.draw, self.send_markers, self.limits
        )

    # Ports

    def append(self, partition: int, _epoch: int, records: list[Record], done: AppendDone) -> None:
        self.on_the_way.append((partition, records, done))
        if not self.held:
            self.acknowledge()

    def acknowledge(self, error_code: int = ErrorCode.NONE, most: int = sys.maxsize) -> None:
        while self.on_the_way and most:
            most -= 1
            partition, records, done = self.on_the_way.pop(0)
            if error_code == ErrorCode.NONE:
                self.log.setdefault(partition, []).extend(records)
            done(error_code)

    def draw(self, done: Callable[[int | None], None]) -> None:
        self.drawing.append(done)
        if not self.ids_held:
            self.hand_out_ids()

    def hand_out_ids(self, *, none: bool = False) -> None:
        while self.drawing:
            self.drawing.pop(0)(None if none else next(self.ids))

    def send_markers(self, request: MarkerRequest, wanted: Callable[[], bool], done: Callable[[], None]) -> None:
        self.markers.append((request, wanted, done))
        if not self.markers_held:
            self.write_markers()

    def write_markers(self) -> None:
        while self.markers:
            request, wanted, done = self.markers.pop(0)
            if wanted():
                self.written.append(request)
            done()

    # What happens

    def take_over(self) -> TransactionCoordinator:
        """The coordinator after this one; this one is asked no more."""
        self.coordinator.close()
        self.coordinator = self._coordinator()
        self.epoch += 1
        for partition in range(self.partitions):
            loading = self.coordinator.lead(partition, self.epoch)
            for record in self.log.get(partition, ()):
                loading.replay([record])
            loading.ready()
        return self.coordinator

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def state(self, name: str = ID) -> str:
        return self.coordinator.describe(name).state

    def listed(self, wanted: ListFilter = EVERYTHING) -> dict[str, ListedTransaction]:
        slices = self.coordinator.list_transactions(wanted)
        assert not isinstance(slices, int)
        return {one.transactional_id: one for part in slices for one in part}

    # Requests

    def init(
        self,
        name: str = ID,
        producer_id: int = -1,
        epoch: int = -1,
        *,
        timeout_ms: int = TIMEOUT_MS,
        two_phase: bool = False,
        keep: bool = False,
        client_id: str = "app",
    ) -> Waiter[InitReply]:
        waiter: Waiter[InitReply] = Waiter()
        owner = Owner(client_id, "10.0.0.1")
        self.coordinator.init(name, InitRequest(timeout_ms, producer_id, epoch, two_phase, keep, owner), waiter)
        return waiter

    def add(
        self, who: InitReply | EndReply, places: frozenset[Place] = PLACES, name: str = ID, version: int = 2
    ) -> Waiter[int]:
        waiter: Waiter[int] = Waiter()
        self.coordinator.add(name, AddRequest(who.producer_id, who.epoch, places, version), waiter)
        return waiter

    def verify(
        self, who: InitReply | EndReply, places: frozenset[Place] = PLACES, name: str = ID
    ) -> Waiter[dict[Place, int]]:
        waiter: Waiter[dict[Place, int]] = Waiter()
        self.coordinator.verify(name, AddRequest(who.producer_id, who.epoch, places), waiter)
        return waiter

    def end(
        self, who: InitReply | EndReply, name: str = ID, *, committed: bool = True, version: int = 2
    ) -> Waiter[EndReply]:
        waiter: Waiter[EndReply] = Waiter()
        self.coordinator.end(name, EndRequest(who.producer_id, who.epoch, committed, version), waiter)
        return waiter

    def begun(self, name: str = ID, places: frozenset[Place] = PLACES, *, two_phase: bool = False) -> InitReply:
        """A producer with an open transaction."""
        producer = self.init(name, two_phase=two_phase).reply
        assert producer.error_code == ErrorCode.NONE
        assert self.add(producer, places, name).reply == ErrorCode.NONE
        return producer
