"""What a coordinator of transactions does after its partition has lost records that were below the watermark."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from chosen_layout import log_path, new_store
from headrace.cluster.image import Image, Lost, PartitionState, Topic
from headrace.cluster.names import TRANSACTIONS_TOPIC
from headrace.coordinators.state_log import StateLog
from headrace.coordinators.state_partitions import Loss, StatePartitions
from headrace.errors import ErrorCode
from headrace.partitions.partitions import Partitions
from headrace.ports.disk import read_whole
from headrace.settings.values import log_settings
from headrace.storage.log import Log, TopicPartition
from headrace.transactions.coordinator import TRANSACTIONS, TransactionCoordinator
from headrace.transactions.limits import TransactionLimits
from headrace.transactions.messages import AddRequest, EndReply, EndRequest, InitReply, InitRequest
from headrace.virtual.clock import VirtualClock
from headrace.virtual.disk import VirtualDisk
from proving import proves

BROKER = 1
STATE = TopicPartition(TRANSACTIONS_TOPIC, 0)
SETTINGS = log_settings({}, {})
LEDGER = ("ledger", 0)
UNKNOWN_END = -1


@dataclass(slots=True)
class Scene:
    """A broker that leads the one partition of the topic."""

    layout: str
    clock: VirtualClock = field(default_factory=VirtualClock)
    epoch: int = 0
    lost: Lost | None = None
    accepted: frozenset[Loss] = frozenset()
    drawn: int = 1000
    disk: VirtualDisk = field(init=False)
    partitions: Partitions = field(init=False)
    coordinator: TransactionCoordinator = field(init=False)
    followed: StatePartitions = field(init=False)

    def __post_init__(self) -> None:
        self.disk = VirtualDisk(self.clock)
        self.disk.make_folder("/data")
        store = new_store(self.disk, self.clock, "/data", self.layout)
        store.open({})
        store.create(STATE, bytes(16), SETTINGS)
        self.partitions = Partitions(store, self.clock, BROKER, "a", {})
        self._coordinate()

    def _coordinate(self) -> None:
        append = StateLog(self.partitions, TRANSACTIONS_TOPIC).append
        self.coordinator = TransactionCoordinator(
            self.clock, append, 1, self._draw, lambda _request, _wanted, done: done(), TransactionLimits()
        )
        self.followed = StatePartitions(
            TRANSACTIONS, self.partitions, self.coordinator, self.disk, self._image, lambda: self.accepted
        )

    def _draw(self, done: object) -> None:
        self.drawn += 1
        assert callable(done)
        done(self.drawn)

    def _image(self) -> Image:
        state = PartitionState(0, BROKER, self.epoch, (BROKER,), (BROKER,), lost=self.lost)
        topics = {TRANSACTIONS_TOPIC: Topic(TRANSACTIONS_TOPIC, bytes(16), (state,))}
        return Image("/headrace/c/", topics=topics)

    @property
    def log(self) -> Log:
        log = self.partitions.store.get(STATE)
        assert log is not None
        return log

    def lead(self) -> None:
        self.coordinator.close()
        self._coordinate()
        self.epoch += 1
        self.partitions.lead(self.log, self.epoch, {BROKER: "a"}, (BROKER,), revision=self.epoch)
        self.followed.follow()
        self.go_on()

    def lead_without(self, offset: int) -> None:
        """Elected by an operator, though another had records from this offset on."""
        self.partitions.follow(self.log, self.epoch, 2)
        self.followed.follow()
        self.log.truncate(offset)
        self.lost = Lost(self.epoch + 1, offset, UNKNOWN_END)
        self.lead()

    def go_on(self) -> None:
        self.partitions.end_turn()
        self.clock.advance(1)

    def init(self, name: str = "pay") -> InitReply:
        replies: list[InitReply] = []
        self.coordinator.init(name, InitRequest(60_000), replies.append)
        self.go_on()
        return replies[0]

    def add(self, who: InitReply | EndReply, name: str = "pay") -> int:
        replies: list[int] = []
        self.coordinator.add(name, AddRequest(who.producer_id, who.epoch, frozenset({LEDGER}), 2), replies.append)
        self.go_on()
        return replies[0]

    def end(self, who: InitReply | EndReply) -> EndReply:
        replies: list[EndReply] = []
        self.coordinator.end("pay", EndRequest(who.producer_id, who.epoch, True, 2), replies.append)
        self.go_on()
        return replies[0]


@pytest.fixture(params=["partitioned", "shared"])
def scene(request: pytest.FixtureRequest) -> Scene:
    made = Scene(request.param)
    made.lead()
    return made


@proves("T2")
def test_no_epoch_is_handed_out_twice_after_an_election_that_has_cost_records(scene: Scene) -> None:
    """Partitions may have a transaction of that epoch open: they would take it for this one, and write to it what its
    coordinator does not know of."""
    first = scene.init()
    ended = scene.log.end_offset
    second = scene.init()
    assert (second.producer_id, second.epoch) == (first.producer_id, first.epoch + 1)
    assert scene.add(second) == ErrorCode.NONE
    scene.lead_without(ended)
    assert scene.add(first) == scene.add(second) == ErrorCode.PRODUCER_FENCED
    third = scene.init()
    assert third.error_code == ErrorCode.NONE
    assert third.producer_id not in (first.producer_id, second.producer_id)
    assert scene.add(third) == ErrorCode.NONE


@proves("T2")
def test_who_has_a_transaction_open_in_what_is_left_does_not_go_on_with_it(scene: Scene) -> None:
    """It may have been ended since, and another begun with the next epoch."""
    first = scene.init()
    assert scene.add(first) == ErrorCode.NONE
    ended = scene.log.end_offset
    second = scene.end(first)
    assert scene.add(second) == ErrorCode.NONE
    scene.lead_without(ended)
    assert scene.coordinator.describe("pay").state == "Ongoing"
    assert scene.add(first) == scene.add(second) == ErrorCode.PRODUCER_FENCED
    assert scene.end(first).error_code == ErrorCode.PRODUCER_FENCED
    third = scene.init()
    assert (third.error_code, third.epoch) == (ErrorCode.NONE, 0)
    assert third.producer_id != first.producer_id


def test_what_was_written_since_the_election_is_not_doubted(scene: Scene) -> None:
    scene.init()
    ended = scene.log.end_offset
    scene.init()
    scene.lead_without(ended)
    third = scene.init()
    other = scene.init("other")
    scene.lead()
    assert scene.add(third) == ErrorCode.NONE
    assert scene.add(other, "other") == ErrorCode.NONE


@proves("T2")
def test_no_epoch_is_handed_out_twice_after_a_loss_that_was_accepted(scene: Scene) -> None:
    first = scene.init()
    second = scene.init()
    unhurt = scene.init("unhurt")
    path = log_path("/data", STATE, scene.layout)
    data = read_whole(scene.disk, path)
    scene.disk.flip(path, data.index(b"pay", data.index(b"pay") + 3))
    scene.accepted = frozenset({(0, 1)})
    scene.lead()
    scene.clock.advance(1)
    assert scene.add(unhurt, "unhurt") == ErrorCode.NONE
    assert scene.add(first) == scene.add(second) == ErrorCode.PRODUCER_FENCED
    assert scene.init().producer_id != first.producer_id
