"""From who needs a state to who keeps it: a direct call here, Kafka's APIs to another broker, with its real handlers on
the other side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from chosen_layout import new_store
from headrace.cluster.image import Broker, Endpoint, Image, PartitionState, Topic
from headrace.cluster.names import SHARE_STATE_TOPIC
from headrace.errors import ErrorCode, HeadraceError, PeerUnreachable
from headrace.kafka.dispatch import HANDLERS
from headrace.partitions.partitions import Partitions
from headrace.queues import persister as persister_module
from headrace.queues.messages import Persister, SharePartitionKey, ShareState, ShareSummary
from headrace.queues.persister import KEYS_PER_REQUEST, READS_PER_REQUEST, REQUESTS_MAX, StatePersister
from headrace.queues.state_records import NO_LOAD
from headrace.settings.values import log_settings
from headrace.storage.log import TopicPartition
from headrace.virtual.disk import VirtualDisk
from headrace.wire import api
from headrace.wire.codec import decode_request, decode_response, encode_request, encode_response
from headrace.wire.message import Message
from queues.state_scene import KEY, TOPIC, acknowledged, acquired, changed
from queues.state_scene import Scene as Coordinating

HERE, THERE = 1, 2
NONE = ErrorCode.NONE
Reply = Callable[[Message | HeadraceError], None]


@dataclass(slots=True)
class Scene:
    """A broker without partitions, unless it leads the state topic, and another that has the coordinator. Requests are
    answered at once, or with `held` when the test says so."""

    is_here: bool = False
    held: bool = False
    there: Coordinating = field(default_factory=Coordinating)
    asked: list[tuple[int, int, Message, Reply]] = field(default_factory=list)
    requests: list[tuple[int, Message]] = field(default_factory=list)
    creating: list[Callable[[], None]] = field(default_factory=list)
    drawn: int = 0
    image: Image = field(init=False)
    partitions: Partitions = field(init=False)
    persister: StatePersister = field(init=False)

    def __post_init__(self) -> None:
        clock = self.there.clock
        disk = VirtualDisk(clock)
        disk.make_folder("/data")
        store = new_store(disk, clock, "/data")
        store.open({})
        self.partitions = Partitions(store, clock, HERE, "a")
        leader = HERE if self.is_here else THERE
        if self.is_here:
            log = store.create(TopicPartition(SHARE_STATE_TOPIC, 0), bytes(16), log_settings({}, {}))
            self.partitions.lead(log, 1, {HERE: "a"}, (HERE,), revision=1)
        state = PartitionState(0, leader, 1, (leader,), (leader,))
        brokers = {one: Broker(one, {"default": Endpoint("h", one)}, "a", 0) for one in (HERE, THERE)}
        topics = {SHARE_STATE_TOPIC: Topic(SHARE_STATE_TOPIC, bytes(16), (state,), internal=True)}
        self.image = Image("/headrace/c/", brokers=brokers, topics=topics)
        self.persister = StatePersister(
            clock,
            self.partitions,
            lambda: self.image,
            self.there.coordinator,
            self.ask,
            self.creating.append,
            self.draw,
        )

    def draw(self, count: int) -> bytes:
        self.drawn += 1
        return (2 * self.drawn).to_bytes(count, "big")

    def ask(
        self, broker: int, api_key: int, version: int, message: Message, reply: Reply, timeout_ms: int, *, again: bool
    ) -> None:
        assert (broker, again) == (THERE, False)
        body = decode_request(api_key, version, memoryview(encode_request(api_key, version, message)))
        self.requests.append((api_key, body))
        self.asked.append((api_key, version, body, reply))
        if not self.held:
            self.there.clock.call_soon(self.answer)

    def answer(self, *, with_error: HeadraceError | None = None, unanswered: bool = False) -> None:
        """The other broker works on the oldest request. `unanswered`: it does, and its answer is lost."""
        api_key, version, body, reply = self.asked.pop(0)
        if with_error is not None:
            reply(with_error)
            return

        def encoded(message: Message) -> None:
            if not unanswered:
                reply(decode_response(api_key, version, memoryview(encode_response(api_key, version, message))))

        services = SimpleNamespace(share_states=self.there.coordinator)
        request: Any = SimpleNamespace(body=body, version=version, services=services, reply=encoded)
        assert HANDLERS[api_key](request) is None
        self.there.clock.run_soon()
        if unanswered:
            reply(PeerUnreachable("it did not answer in time"))

    # Operations

    def initialize(self, key: SharePartitionKey = KEY, start: int = 0) -> list[int]:
        codes: list[int] = []
        self.persister.initialize(key, 1, start, codes.append)
        assert codes == [], "never before the call has returned"
        self.there.clock.run_soon()
        return codes

    def read(self, key: SharePartitionKey = KEY, leader_epoch: int = 1) -> list[tuple[int, ShareState | None]]:
        answers: list[tuple[int, ShareState | None]] = []
        self.persister.read(key, leader_epoch, lambda code, state: answers.append((code, state)))
        assert answers == []
        self.there.clock.run_soon()
        return answers

    def write(self, state: ShareState, key: SharePartitionKey = KEY) -> list[int]:
        codes: list[int] = []
        self.persister.write(key, state, codes.append)
        assert codes == []
        self.there.clock.run_soon()
        return codes

    def delete(self, key: SharePartitionKey = KEY) -> list[int]:
        codes: list[int] = []
        self.persister.delete(key, codes.append)
        self.there.clock.run_soon()
        return codes

    def summary(self, key: SharePartitionKey = KEY) -> list[tuple[int, ShareSummary | None]]:
        answers: list[tuple[int, ShareSummary | None]] = []
        self.persister.summary(key, -1, lambda code, found: answers.append((code, found)))
        self.there.clock.run_soon()
        return answers


@pytest.fixture(params=["here", "there"])
def scene(request: pytest.FixtureRequest) -> Scene:
    return Scene(is_here=request.param == "here")


@pytest.fixture
def far() -> Scene:
    made = Scene()
    assert made.initialize() == [NONE]
    assert made.read()[0][0] == NONE
    made.requests.clear()
    return made


def test_it_is_a_persister(scene: Scene) -> None:
    persister: Persister = scene.persister
    assert persister is scene.persister


def test_what_is_written_is_read_with_members_and_times(scene: Scene) -> None:
    assert scene.initialize(start=3) == [NONE]
    assert scene.read() == [(NONE, ShareState(1, 1, 3))]
    assert scene.write(changed(acquired(3, 9, 2, "member", 77), acknowledged(10, 11))) == [NONE]
    expected = ShareState(1, 1, 3, (acquired(3, 9, 2, "member", 77), acknowledged(10, 11)))
    assert scene.read(leader_epoch=2) == [(NONE, expected)]
    assert scene.summary() == [(NONE, ShareSummary(1, 2, 3, 2))]
    assert scene.delete() == [NONE]
    assert scene.read() == [(ErrorCode.INVALID_REQUEST, None)]
    assert scene.summary() == [(NONE, ShareSummary(0, 0, -1, -1))]
    assert bool(scene.requests) != scene.is_here


def test_an_older_leader_is_fenced(scene: Scene) -> None:
    scene.initialize()
    scene.read(leader_epoch=5)
    assert scene.read(leader_epoch=4) == [(ErrorCode.FENCED_LEADER_EPOCH, None)]
    assert scene.write(changed(leader_epoch=4)) == [ErrorCode.FENCED_LEADER_EPOCH]


def test_who_writes_has_read_before(scene: Scene) -> None:
    scene.initialize()
    assert scene.write(changed(acquired(0, 1))) == [ErrorCode.FENCED_LEADER_EPOCH]
    scene.read()
    assert scene.write(changed(acquired(0, 1))) == [NONE]
    scene.persister.forget(KEY)
    assert scene.write(changed(acquired(0, 1))) == [ErrorCode.FENCED_LEADER_EPOCH]


def test_after_a_write_that_failed_nothing_is_written_before_the_next_read(scene: Scene) -> None:
    scene.initialize()
    scene.read()
    assert scene.write(changed(acquired(0, 1), state_epoch=9)) == [ErrorCode.FENCED_STATE_EPOCH]
    assert scene.write(changed(acquired(0, 1))) == [ErrorCode.FENCED_LEADER_EPOCH]
    scene.read()
    assert scene.write(changed(acquired(0, 1))) == [NONE]


def test_a_write_whose_answer_is_lost_is_seen_by_the_next_read_and_can_be_written_again(far: Scene) -> None:
    far.held = True
    codes = far.write(changed(acquired(0, 4)))
    far.answer(unanswered=True)
    far.held = False
    assert codes == [ErrorCode.NETWORK_EXCEPTION]
    assert far.read() == [(NONE, ShareState(1, 1, 0, (acquired(0, 4),)))]
    assert far.write(changed(acquired(0, 4))) == [NONE]
    assert far.read() == [(NONE, ShareState(1, 1, 0, (acquired(0, 4),)))]


def test_a_write_that_was_given_up_comes_too_late_after_the_next_read(far: Scene) -> None:
    """It lies in a connection that was given up, and is worked on after a read by another one."""
    far.held = True
    codes = far.write(changed(acquired(0, 4)))
    late = far.asked.pop()
    late[3](PeerUnreachable("it did not answer in time"))
    assert codes == [ErrorCode.NETWORK_EXCEPTION]
    far.held = False
    assert far.read() == [(NONE, ShareState(1, 1, 0))]
    assert far.write(changed(acknowledged(0, 4))) == [NONE]
    heard: list[Message | HeadraceError] = []
    far.asked.append((late[0], late[1], late[2], heard.append))
    far.answer()
    assert isinstance(heard[0], Message)
    assert heard[0].results[0].partitions[0].error_code == ErrorCode.FENCED_LEADER_EPOCH
    assert far.there.state() == ShareState(1, 1, 0, (acknowledged(0, 4),))


def test_what_is_asked_in_one_turn_is_one_request_of_each_group() -> None:
    scene = Scene()
    keys = [SharePartitionKey(group, topic, 0) for group in ("g", "h") for topic in (TOPIC, b"another topic id")]
    codes: list[int] = []
    for key in keys:
        scene.persister.initialize(key, 1, 0, codes.append)
    scene.there.clock.run_soon()
    assert codes == [NONE] * 4
    assert [(body.group_id, len(body.topics)) for _, body in scene.requests] == [("g", 2), ("h", 2)]


@pytest.mark.parametrize(
    ("api_key", "most"),
    [(api.READ_SHARE_GROUP_STATE, READS_PER_REQUEST), (api.INITIALIZE_SHARE_GROUP_STATE, KEYS_PER_REQUEST)],
)
def test_requests_are_bounded(api_key: int, most: int) -> None:
    scene = Scene()
    heard: list[int] = []
    for partition in range(most + 1):
        key = SharePartitionKey("g", TOPIC, partition)
        if api_key == api.READ_SHARE_GROUP_STATE:
            scene.persister.read(key, 1, lambda code, _state: heard.append(code))
        else:
            scene.persister.initialize(key, 1, 0, heard.append)
    scene.there.clock.run_soon()
    assert [len(body.topics[0].partitions) for _, body in scene.requests] == [most, 1]
    assert len(heard) == most + 1


def test_writes_with_many_batches_go_in_several_requests(far: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persister_module, "BATCHES_PER_REQUEST", 5)
    keys = [replace_partition(number) for number in range(3)]
    for key in keys:
        far.initialize(key)
        far.read(key)
    far.requests.clear()
    codes: list[int] = []
    wide = changed(*(acquired(2 * number, 2 * number) for number in range(3)))
    for key in keys:
        far.persister.write(key, wide, codes.append)
    far.there.clock.run_soon()
    assert (codes, len(far.requests)) == ([NONE] * 3, 3)


def replace_partition(number: int) -> SharePartitionKey:
    return KEY._replace(partition=number)


def test_only_so_many_requests_are_under_way_and_the_rest_goes_together() -> None:
    scene = Scene(held=True)
    codes: list[int] = []
    for number in range(REQUESTS_MAX + 10):
        scene.persister.initialize(SharePartitionKey(f"g{number}", TOPIC, 0), 1, 0, codes.append)
    scene.there.clock.run_soon()
    assert len(scene.asked) == REQUESTS_MAX
    scene.persister.initialize(SharePartitionKey(f"g{REQUESTS_MAX}", TOPIC, 1), 1, 0, codes.append)
    scene.held = False
    for _ in range(REQUESTS_MAX):
        scene.answer()
    scene.there.clock.run_soon()
    assert codes == [NONE] * (REQUESTS_MAX + 11)
    assert len(scene.requests) == REQUESTS_MAX + 10


def test_one_request_asks_for_a_share_partition_once() -> None:
    """Two answers for one share partition could not be told apart."""
    scene = Scene()
    codes: list[int] = []
    scene.persister.initialize(KEY, 1, 0, codes.append)
    scene.persister.initialize(KEY, 0, 0, codes.append)
    scene.there.clock.run_soon()
    assert codes == [NONE, ErrorCode.FENCED_STATE_EPOCH]


def test_who_waits_for_a_broker_is_bounded(far: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persister_module, "WAITING_MAX", 2)
    codes: list[int] = []
    for number in range(3):
        far.persister.initialize(replace_partition(number + 1), 1, 0, codes.append)
    far.there.clock.run_soon()
    assert sorted(codes) == [NONE, NONE, ErrorCode.COORDINATOR_NOT_AVAILABLE]


def test_a_broker_that_cannot_be_asked_fails_all_that_was_asked(far: Scene) -> None:
    far.held = True
    answers = far.read(), far.summary(), far.initialize(), far.delete()
    for _ in range(4):
        far.answer(with_error=PeerUnreachable("gone"))
    code = ErrorCode.NETWORK_EXCEPTION
    assert answers == ([(code, None)], [(code, None)], [code], [code])


def test_an_answer_that_lacks_what_was_asked_is_an_error(far: Scene) -> None:
    far.held = True
    read, written = far.read(), far.write(changed())
    for _ in range(2):
        far.asked.pop(0)[3](Message(results=[]))
    assert (read, written) == ([(ErrorCode.UNKNOWN_SERVER_ERROR, None)], [ErrorCode.UNKNOWN_SERVER_ERROR])


def test_a_state_that_there_is_not_is_an_error(far: Scene) -> None:
    far.held = True
    read = far.read()
    row = persister_module.batch_row(acquired(0, 1))
    row.delivery_state = 9
    part = Message(partition=0, error_code=0, state_epoch=1, start_offset=0, state_batches=[row])
    far.asked.pop(0)[3](Message(results=[Message(topic_id=TOPIC, partitions=[part])]))
    assert read == [(ErrorCode.UNKNOWN_SERVER_ERROR, None)]


def test_a_partition_without_a_leader_has_no_coordinator(far: Scene) -> None:
    far.image = replace(far.image, brokers={})
    assert far.initialize() == [ErrorCode.COORDINATOR_NOT_AVAILABLE]
    assert far.read() == [(ErrorCode.COORDINATOR_NOT_AVAILABLE, None)]


def test_the_topic_is_created_when_it_is_first_needed() -> None:
    scene = Scene()
    there, scene.image = scene.image, replace(scene.image, topics={})
    first, second = scene.initialize(), scene.initialize(replace_partition(1))
    assert (len(scene.creating), first, second) == (1, [], [])
    scene.image = there
    scene.creating.pop()()
    scene.there.clock.run_soon()
    assert (first, second) == ([NONE], [NONE])


def test_a_topic_that_cannot_be_created_is_said_to_who_waits() -> None:
    scene = Scene()
    scene.image = replace(scene.image, topics={})
    codes = scene.initialize()
    scene.creating.pop()()
    assert codes == [ErrorCode.COORDINATOR_NOT_AVAILABLE]
    again = scene.initialize()
    assert (len(scene.creating), again) == (1, [])


def test_nothing_is_created_for_who_only_looks_or_deletes() -> None:
    scene = Scene()
    scene.image = replace(scene.image, topics={})
    assert scene.delete() == [NONE]
    assert scene.summary() == [(NONE, ShareSummary(0, 0, -1))]
    assert scene.creating == []


def test_loads_of_partitions_that_are_led_elsewhere_now_are_let_go(far: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(far.persister, "_loads_max", 3)
    for number in range(5):
        far.initialize(replace_partition(number))
        far.read(replace_partition(number))
    assert len(far.persister._loads) <= 3
    assert far.write(changed(), replace_partition(0)) == [ErrorCode.FENCED_LEADER_EPOCH]


def test_of_too_many_loads_the_oldest_are_forgotten(far: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persister_module, "LOADS_MAX", 3)
    for number in (0, 1, 2, 0, 3):
        far.initialize(replace_partition(number))
        far.read(replace_partition(number))
    assert [far.write(changed(), replace_partition(number)) for number in range(4)] == [
        [NONE],
        [ErrorCode.FENCED_LEADER_EPOCH],
        [NONE],
        [NONE],
    ]


def test_kafkas_own_brokers_need_no_fields_of_ours(far: Scene) -> None:
    """Their requests have no load id, and their batches no member."""
    batch = Message(first_offset=0, last_offset=4, delivery_state=2, delivery_count=1)
    part = Message(partition=0, state_epoch=1, leader_epoch=1, start_offset=-1, state_batches=[batch])
    body = Message(group_id=KEY.group, topics=[Message(topic_id=TOPIC, partitions=[part])])
    heard: list[Message | HeadraceError] = []
    far.ask(THERE, api.WRITE_SHARE_GROUP_STATE, 0, body, heard.append, 1000, again=False)
    assert far.requests[-1][1].topics[0].partitions[0].load_id == NO_LOAD
    far.there.clock.run_soon()
    assert isinstance(heard[0], Message)
    assert heard[0].results[0].partitions[0].error_code == NONE
    assert far.there.state() == ShareState(1, 1, 0, (acknowledged(0, 4),))


@pytest.mark.parametrize("delivery_state", [-1, 5, 127])
def test_states_that_there_are_not_are_refused(far: Scene, delivery_state: int) -> None:
    batch = Message(first_offset=0, last_offset=4, delivery_state=delivery_state, delivery_count=1)
    part = Message(partition=0, state_epoch=1, leader_epoch=1, start_offset=-1, state_batches=[batch])
    body = Message(group_id=KEY.group, topics=[Message(topic_id=TOPIC, partitions=[part])])
    heard: list[Any] = []
    far.ask(THERE, api.WRITE_SHARE_GROUP_STATE, 1, body, heard.append, 1000, again=False)
    far.there.clock.run_soon()
    assert heard[0].results[0].partitions[0].error_code == ErrorCode.INVALID_REQUEST
