"""Markers reach every partition of a transaction: here at once, at others in one request, again until acknowledged."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from chosen_layout import log_path, new_store
from headrace.cluster.image import Broker, Endpoint, Image, PartitionState, Topic
from headrace.errors import ErrorCode, HeadraceError, PeerUnreachable
from headrace.partitions.partition import Partition
from headrace.partitions.partitions import Partitions
from headrace.records import batch, kernel
from headrace.records.batch import TRANSACTIONAL
from headrace.records.control import read_marker
from headrace.settings.values import log_settings
from headrace.storage.log import TopicPartition
from headrace.transactions.marker_appends import WAIT_MS, Codes, Decision, MarkerAppends
from headrace.transactions.markers import PAUSE_MOST_SECONDS, PLACES_PER_REQUEST, Markers, in_parts
from headrace.transactions.messages import MarkerRequest, Place
from headrace.virtual.clock import VirtualClock
from headrace.virtual.disk import VirtualDisk
from headrace.wire.api import WRITE_TXN_MARKERS
from headrace.wire.codec import decode_request, encode_request
from headrace.wire.message import Message
from proving import proves

HERE, THERE, ELSEWHERE = 1, 2, 3
PRODUCER, EPOCH = 77, 4
Reply = Callable[[Message | HeadraceError], None]


@dataclass(slots=True)
class Scene:
    """A broker that leads partition 0 of each topic; others lead those that the image gives them."""

    topics: tuple[str, ...] = ("a", "b")
    layout: str = ""
    clock: VirtualClock = field(default_factory=VirtualClock)
    disk: VirtualDisk = field(init=False)
    partitions: Partitions = field(init=False)
    markers: Markers = field(init=False)
    appends: MarkerAppends = field(init=False)
    image: Image = field(init=False)
    asked: list[tuple[int, Message, Reply, bool]] = field(default_factory=list)
    decided: list[tuple[str, bool, int]] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    wanted: bool = True

    def __post_init__(self) -> None:
        self.disk = VirtualDisk(self.clock)
        self.disk.make_folder("/data")
        store = new_store(self.disk, self.clock, "/data", self.layout)
        store.open({})
        self.partitions = Partitions(store, self.clock, HERE, "a")
        for number, topic in enumerate(self.topics):
            log = store.create(TopicPartition(topic, 0), bytes([number]) * 16, log_settings({}, {}))
            self.partitions.lead(log, 1, {HERE: "a"}, (HERE,), revision=1)
        self.image = self.with_leaders(dict.fromkeys(self.topics, (HERE,)))
        self.appends = MarkerAppends(self.partitions, self.not_led, self.note)
        self.markers = Markers(self.clock, self.partitions, lambda: self.image, self.appends, self.ask)

    def with_leaders(self, leaders: dict[str, tuple[int, ...]], alive: tuple[int, ...] = (1, 2, 3)) -> Image:
        topics = {
            name: Topic(
                name,
                name.encode().ljust(16),
                tuple(PartitionState(index, led, 1, (led,), (led,)) for index, led in enumerate(of_topic)),
            )
            for name, of_topic in leaders.items()
        }
        brokers = {one: Broker(one, {"default": Endpoint("h", one)}, "a", 0) for one in alive}
        return Image("/headrace/c/", brokers=brokers, topics=topics)

    def not_led(self, topic: str, index: int) -> int:
        known = self.image.partition(topic, index) is not None
        return ErrorCode.NOT_LEADER_OR_FOLLOWER if known else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION

    def note(self, decision: Decision) -> None:
        self.decided.append((decision.partition.topic_partition.topic, decision.committed, decision.marker_offset))

    def ask(
        self, broker: int, api_key: int, version: int, message: Message, reply: Reply, timeout_ms: int, *, again: bool
    ) -> None:
        assert api_key == WRITE_TXN_MARKERS
        body = decode_request(api_key, version, memoryview(encode_request(api_key, version, message)))
        self.asked.append((broker, body, reply, again))

    def answer(self, code: int = ErrorCode.NONE, only: Place | None = None) -> None:
        """The oldest request; the code is for all partitions, or for one and the others are well."""
        _, body, reply, _ = self.asked.pop(0)

        def of(topic: str, index: int) -> int:
            return code if only is None or only == (topic, index) else ErrorCode.NONE

        reply(
            Message(
                markers=[
                    Message(
                        producer_id=marker.producer_id,
                        topics=[
                            Message(
                                name=topic.name,
                                partitions=[
                                    Message(partition_index=index, error_code=of(topic.name, index))
                                    for index in topic.partition_indexes
                                ],
                            )
                            for topic in marker.topics
                        ],
                    )
                    for marker in body.markers
                ]
            )
        )

    def write(self, topic: str, epoch: int = EPOCH, sequence: int = 0) -> None:
        """A batch of the producer's transaction."""
        partition = self.led(topic)
        data, header = kernel.build_with_header(
            [(0, None, b"v", ())], TRANSACTIONAL, producer=(PRODUCER, epoch, sequence)
        )
        partition.verified(partition.verification(PRODUCER, epoch))
        partition.append(memoryview(data), -1, header)
        self.partitions.touch(partition)
        self.partitions.end_turn()

    def led(self, topic: str) -> Partition:
        return self.partitions.get(topic, 0)

    def send(self, *places: Place, name: str = "tx", committed: bool = True, number: int = 1) -> MarkerRequest:
        request = MarkerRequest(name, PRODUCER, EPOCH, 9, committed, number, 1, places)
        self.markers.send(request, lambda: self.wanted, lambda: self.done.append(name))
        return request

    def turn(self, seconds: float = 0.0) -> None:
        self.clock.run_soon()
        for _ in range(round(seconds * 10)):
            self.clock.advance(0.1)
            self.markers.tick()
            self.clock.run_soon()

    def written(self, topic: str) -> list[tuple[bool, int]]:
        found = []
        for _, piece in self.led(topic).log.headers(0):
            data = piece.read()
            marker = read_marker(data, batch.check(data))
            if marker is not None:
                found.append((marker.committed, marker.number))
        return found


def asked_places(message: Message) -> list[list[Place]]:
    return [
        [(topic.name, index) for topic in marker.topics for index in topic.partition_indexes]
        for marker in message.markers
    ]


@proves("T1")
def test_partitions_that_are_led_here_get_their_markers_in_the_next_turn() -> None:
    scene = Scene()
    scene.write("a")
    scene.send(("a", 0), ("b", 0))
    assert not scene.done
    scene.turn()
    assert scene.done == ["tx"]
    assert len(scene.markers) == 0
    assert (scene.written("a"), scene.written("b")) == ([(True, 1)], [(True, 1)])
    assert scene.led("a").last_stable_offset == 2
    assert scene.decided == [("a", True, 1), ("b", True, 0)]


@proves("T1")
def test_what_is_sent_in_one_turn_is_one_request_to_each_broker_with_the_transactions_numbers() -> None:
    scene = Scene(topics=())
    leaders = tuple(2 + index % 5 for index in range(500))
    scene.image = scene.with_leaders({"wide": leaders}, alive=(1, 2, 3, 4, 5, 6))
    for number in range(3):
        scene.send(*(("wide", index) for index in range(500)), name=f"tx{number}", number=number)
    scene.turn()
    assert sorted(broker for broker, _, _, _ in scene.asked) == [2, 3, 4, 5, 6]
    for broker, message, _, again in scene.asked:
        assert not again
        assert [marker.number for marker in message.markers] == [0, 1, 2]
        assert [(marker.coordinator_epoch, marker.transaction_version) for marker in message.markers] == [(9, 1)] * 3
        assert asked_places(message) == [[("wide", n) for n in range(500) if leaders[n] == broker]] * 3
    while scene.asked:
        assert not scene.done
        scene.answer()
    assert scene.done == ["tx0", "tx1", "tx2"]


def test_a_request_has_so_many_partitions_and_no_more() -> None:
    scene = Scene(topics=())
    scene.image = scene.with_leaders({"wide": (THERE,) * (PLACES_PER_REQUEST + 1)})
    scene.send(*(("wide", index) for index in range(PLACES_PER_REQUEST + 1)))
    scene.turn()
    assert [sum(map(len, asked_places(message))) for _, message, _, _ in scene.asked] == [PLACES_PER_REQUEST, 1]
    assert list(in_parts([])) == []
    scene.answer()
    scene.answer()
    assert scene.done == ["tx"]


@proves("T2")
def test_what_fails_is_sent_again_to_whoever_leads_then_by_another_connection() -> None:
    scene = Scene(topics=())
    scene.image = scene.with_leaders({"x": (THERE, THERE)})
    scene.send(("x", 0), ("x", 1))
    scene.turn()
    scene.answer(ErrorCode.NOT_LEADER_OR_FOLLOWER, only=("x", 1))
    scene.image = scene.with_leaders({"x": (THERE, ELSEWHERE)})
    scene.turn(0.2)
    ((broker, message, _, again),) = scene.asked
    assert (broker, asked_places(message), again) == (ELSEWHERE, [[("x", 1)]], True)
    assert not scene.done
    scene.answer()
    assert scene.done == ["tx"]


def test_a_broker_that_does_not_answer_is_asked_again_ever_more_slowly() -> None:
    scene = Scene(topics=())
    scene.image = scene.with_leaders({"x": (THERE,)})
    scene.send(("x", 0))
    scene.turn()
    tries = 0
    for _ in range(200):
        while scene.asked:
            tries += 1
            scene.asked.pop(0)[2](PeerUnreachable("away"))
        scene.turn(0.1)
    assert 20 / PAUSE_MOST_SECONDS <= tries <= 20
    assert not scene.done
    assert len(scene.markers) == 1
    scene.turn(2 * PAUSE_MOST_SECONDS)
    scene.answer()
    assert scene.done == ["tx"]


def test_a_partition_without_a_leader_is_waited_for() -> None:
    scene = Scene(topics=())
    scene.image = scene.with_leaders({"x": (-1, THERE)}, alive=(HERE,))
    scene.send(("x", 0), ("x", 1))
    scene.turn(1)
    assert not scene.asked
    assert not scene.done
    scene.image = scene.with_leaders({"x": (THERE, THERE)})
    scene.turn(2)
    assert [set(asked_places(message)[0]) for _, message, _, _ in scene.asked] == [{("x", 0), ("x", 1)}]
    while scene.asked:
        scene.answer()
    assert scene.done == ["tx"]


def test_a_topic_that_was_deleted_needs_no_marker_but_one_whose_key_is_missing_does() -> None:
    scene = Scene(topics=())
    scene.image = scene.with_leaders({"x": (THERE,)})
    scene.send(("gone", 0), ("x", 7), ("x", 0))
    scene.turn()
    assert asked_places(scene.asked[0][1]) == [[("x", 0)]]
    kept = scene.image.topics["x"]
    scene.image = replace(scene.with_leaders({}), keyless={"x": kept})
    scene.asked.pop(0)[2](PeerUnreachable("away"))
    scene.turn(1)
    assert not scene.done
    scene.image = scene.with_leaders({})
    scene.turn(2)
    assert scene.done == ["tx"]


def test_all_partitions_of_deleted_topics_are_an_end_too() -> None:
    scene = Scene(topics=())
    scene.send(("gone", 0))
    scene.turn()
    assert scene.done == ["tx"]
    assert len(scene.markers) == 0


def test_nothing_is_sent_again_when_another_coordinator_does_it() -> None:
    scene = Scene(topics=())
    scene.image = scene.with_leaders({"x": (THERE,)})
    scene.send(("x", 0))
    scene.turn()
    scene.asked.pop(0)[2](PeerUnreachable("away"))
    scene.wanted = False
    scene.turn(2)
    assert not scene.asked
    assert not scene.done
    assert len(scene.markers) == 0


def test_a_partition_in_which_the_next_epoch_has_begun_has_ended_the_transaction_before() -> None:
    scene = Scene(topics=())
    scene.image = scene.with_leaders({"x": (THERE,)})
    scene.send(("x", 0))
    scene.turn()
    scene.answer(ErrorCode.INVALID_PRODUCER_EPOCH)
    assert scene.done == ["tx"]


def test_a_fenced_coordinator_is_never_told_that_it_is_done() -> None:
    scene = Scene(topics=())
    scene.image = scene.with_leaders({"x": (THERE,)})
    scene.send(("x", 0))
    scene.turn()
    scene.answer(ErrorCode.TRANSACTION_COORDINATOR_FENCED)
    scene.turn(1)
    assert not scene.done
    assert scene.asked


def test_an_answer_that_leaves_something_out_is_no_answer_to_that() -> None:
    scene = Scene(topics=())
    scene.image = scene.with_leaders({"x": (THERE,)})
    scene.send(("x", 0))
    scene.turn()
    scene.asked.pop(0)[2](Message(markers=[]))
    assert not scene.done
    scene.turn(1)
    assert scene.asked


def test_ten_thousand_transactions_that_cannot_end_make_no_timers_of_their_own() -> None:
    scene = Scene(topics=())
    scene.image = scene.with_leaders({"x": (-1,)})
    for number in range(10_000):
        scene.send(("x", 0), name=f"{number}")
    scene.clock.run_soon()
    assert len(scene.markers) == 10_000
    assert not scene.asked
    scene.image = scene.with_leaders({"x": (THERE,)})
    scene.turn(0.3)
    assert len(scene.asked) == 5
    while scene.asked:
        scene.answer()
    assert len(scene.done) == 10_000


# Appends.


@proves("T1")
def test_a_marker_that_comes_again_is_written_once_and_answered_twice() -> None:
    scene = Scene()
    scene.write("a")
    for _ in range(2):
        scene.send(("a", 0))
        scene.turn()
    assert scene.done == ["tx", "tx"]
    assert scene.written("a") == [(True, 1)]
    assert scene.decided == [("a", True, 1)]


@proves("T2")
def test_a_late_marker_ends_no_later_transaction_of_the_same_epoch() -> None:
    scene = Scene()
    scene.write("a")
    late = scene.send(("a", 0), committed=False, number=1)
    scene.turn()
    scene.write("a", sequence=1)
    scene.markers.send(late, lambda: True, lambda: scene.done.append("late"))
    scene.turn()
    assert scene.done == ["tx", "late"]
    assert scene.written("a") == [(False, 1)]
    assert scene.led("a").has_open_transaction(PRODUCER, EPOCH)


def test_a_marker_counts_when_the_watermark_has_passed_it() -> None:
    scene = Scene(topics=())
    log = scene.partitions.store.create(
        TopicPartition("r", 0), b"r" * 16, log_settings({}, {"min.insync.replicas": "1"})
    )
    partition = scene.partitions.lead(log, 1, {HERE: "a", THERE: "b"}, (HERE, THERE), revision=1)
    request = MarkerRequest("tx", PRODUCER, EPOCH, 9, True, 1, 1, (("r", 0),))
    heard: list[Codes] = []
    scene.appends.write(request, request.partitions, heard.append)
    scene.partitions.end_turn()
    assert (heard, scene.decided) == ([], [])
    scene.clock.advance(WAIT_MS / 1000 + 0.1)
    assert heard == [{("r", 0): ErrorCode.REQUEST_TIMED_OUT}]
    assert scene.decided == []
    scene.appends.write(request, request.partitions, heard.append)  # again, and written already
    scene.partitions.end_turn()
    assert partition.core is not None
    scene.partitions.confirmed(partition, {HERE: "a"}, 2)
    assert heard[1:] == [{("r", 0): ErrorCode.NONE}]
    assert scene.decided == [("r", True, 0)]


def test_a_marker_is_decided_when_the_watermark_passes_it_though_its_sender_was_told_of_too_few_replicas() -> None:
    scene = Scene(topics=())
    log = scene.partitions.store.create(TopicPartition("r", 0), b"r" * 16, log_settings({}, {}))
    partition = scene.partitions.lead(log, 1, {HERE: "a", THERE: "b"}, (HERE, THERE), revision=1)
    request = MarkerRequest("tx", PRODUCER, EPOCH, 9, True, 1, 1, (("r", 0),))
    heard: list[Codes] = []
    scene.appends.write(request, request.partitions, heard.append)
    scene.partitions.end_turn()
    scene.partitions.confirmed(partition, {HERE: "a"}, 2)
    assert heard == [{("r", 0): ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND}]
    scene.turn()
    assert scene.decided == []
    log.settings = log_settings({}, {"min.insync.replicas": "1"})
    scene.partitions.settings_changed(partition)
    assert scene.decided == [("r", True, 0)]


@pytest.mark.parametrize("known", [True, False])
def test_partitions_that_are_not_led_here_say_so(known: bool) -> None:
    scene = Scene()
    scene.image = scene.with_leaders({"x": (THERE,)} if known else {})
    request = MarkerRequest("tx", PRODUCER, EPOCH, 9, True, 1, 1, (("x", 0), ("a", 0), ("a", 0)))
    heard: list[Codes] = []
    scene.appends.write(request, request.partitions, heard.append)
    scene.partitions.end_turn()
    code = ErrorCode.NOT_LEADER_OR_FOLLOWER if known else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert heard == [{("x", 0): code, ("a", 0): ErrorCode.NONE}]
    assert scene.written("a") == [(True, 1)]


def test_who_waits_for_a_marker_hears_of_the_end_of_the_role() -> None:
    scene = Scene(topics=())
    log = scene.partitions.store.create(TopicPartition("r", 0), b"r" * 16, log_settings({}, {}))
    scene.partitions.lead(log, 1, {HERE: "a", THERE: "b"}, (HERE, THERE), revision=1)
    request = MarkerRequest("tx", PRODUCER, EPOCH, 9, True, 1, 1, (("r", 0),))
    heard: list[Codes] = []
    scene.appends.write(request, request.partitions, heard.append)
    scene.partitions.end_turn()
    scene.partitions.follow(log, 2, THERE)
    assert heard == [{("r", 0): ErrorCode.NOT_LEADER_OR_FOLLOWER}]
    scene.clock.advance(10)
    assert scene.decided == []


@proves("T2")
def test_a_marker_that_cannot_be_written_is_tried_again_and_its_partition_alone_waits() -> None:
    scene = Scene(layout="partitioned")
    scene.write("a")
    scene.disk.fail_write(log_path("/data", TopicPartition("a", 0), "partitioned"), errno.ENOSPC)
    scene.send(("a", 0), ("b", 0))
    scene.send(("a", 0))  # the same in the same turn: what was not written is not there for it either
    scene.turn()
    assert not scene.done
    assert scene.written("b") == [(True, 1)]
    assert scene.decided == [("b", True, 0)]
    assert scene.led("a").has_open_transaction(PRODUCER, EPOCH)
    scene.disk.mend()
    scene.turn(1)
    assert scene.done == ["tx", "tx"]
    assert scene.decided == [("b", True, 0), ("a", True, 1)]
