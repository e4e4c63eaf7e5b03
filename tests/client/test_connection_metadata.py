"""Metadata of a peer that tells of leaders as a test wants: what is newer counts, asking is held back, all hear."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from brokers import free_port
from client.connection_peer import Answer, Peer
from headrace.client.connection import connections as networks
from headrace.client.connection import metadata
from headrace.client.connection.connections import ConnectionPool
from headrace.client.connection.metadata import Topic
from headrace.client.connection.thread_reactor import ThreadReactor
from headrace.client.errors import BrokerUnreachable, EngineClosed, NoBroker, Refusal, UnknownTopic
from headrace.errors import ErrorCode, HeadraceError
from headrace.ports.network import Address
from headrace.wire import api as apis
from headrace.wire.message import Message
from proving import proves

WAIT_S = 20.0
FIRST_ID, SECOND_ID = b"1" * 16, b"2" * 16


class Told:
    """A cluster as its brokers tell of it: partitions are (leader, epoch); all peers say the same unless told apart."""

    def __init__(self) -> None:
        self.brokers: dict[int, Address] = {}
        self.topics: dict[str, list[tuple[int, int]]] = {}
        self.ids: dict[str, bytes] = {}
        self.refused: dict[str, int] = {}
        self.asked: list[tuple[float, list[str], bool]] = []
        self.coordinator: int | None = None

    def reply(self, api_key: int, request: Message) -> Answer:
        if api_key == apis.FIND_COORDINATOR:
            return self._coordinator(request)
        if api_key == apis.HEARTBEAT:
            return Message(error_code=ErrorCode.NONE if self.coordinator == 1 else ErrorCode.NOT_COORDINATOR)
        names = [topic.name for topic in request.topics]
        self.asked.append((time.monotonic(), names, request.allow_auto_topic_creation))
        brokers = [
            Message(node_id=broker_id, host=address.host, port=address.port)
            for broker_id, address in self.brokers.items()
        ]
        return Message(
            brokers=brokers, cluster_id="told", controller_id=1, topics=[self._topic(name) for name in names]
        )

    def _topic(self, name: str) -> Message:
        if name in self.refused or name not in self.topics:
            code = self.refused.get(name, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
            return Message(error_code=code, name=name, partitions=[])
        partitions = [
            Message(
                partition_index=nth, leader_id=leader, leader_epoch=epoch, replica_nodes=[leader], isr_nodes=[leader]
            )
            for nth, (leader, epoch) in enumerate(self.topics[name])
        ]
        return Message(error_code=0, name=name, topic_id=self.ids.get(name, FIRST_ID), partitions=partitions)

    def _coordinator(self, request: Message) -> Message:
        address = self.brokers.get(self.coordinator or 0, Address("", -1))
        code = ErrorCode.COORDINATOR_NOT_AVAILABLE if self.coordinator is None else ErrorCode.NONE
        found = Message(
            key=request.coordinator_keys[0],
            node_id=self.coordinator or -1,
            host=address.host,
            port=address.port,
            error_code=code,
            error_message=None,
        )
        return Message(coordinators=[found])


class Scene:
    def __init__(self, told: Told, peer: Peer, pool: ConnectionPool) -> None:
        self.told = told
        self.peer = peer
        self.pool = pool
        self.metadata = pool.metadata

    def until(self, done: Callable[[], object]) -> None:
        reactor = self.pool.reactor
        assert isinstance(reactor, ThreadReactor)
        assert reactor.wait(lambda: bool(done()), reactor.now() + WAIT_S)

    def want(self, name: str, create: bool = False) -> Topic | HeadraceError:
        found: list[Topic | HeadraceError] = []
        self.metadata.want(name, create=create, on_known=found.append)
        self.until(lambda: found)
        return found[0]

    def heard_of(self) -> list[tuple[str, Topic | None]]:
        heard: list[tuple[str, Topic | None]] = []
        self.metadata.listeners.append(lambda name, topic: heard.append((name, topic)))
        return heard


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def scene(told: Told) -> Iterator[Scene]:
    """Refreshed every 50 ms; broker 1 is the peer."""
    with Peer(told.reply) as peer:
        told.brokers[1] = peer.address
        pool = ConnectionPool((peer.address,), client_id="routes", refresh_ms=50)
        yield Scene(told, peer, pool)
        pool.release()


@pytest.fixture
def quiet(told: Told) -> Iterator[Scene]:
    """Refreshed only when it is stale."""
    with Peer(told.reply) as peer:
        told.brokers[1] = peer.address
        pool = ConnectionPool((peer.address,), client_id="routes", refresh_ms=600_000)
        yield Scene(told, peer, pool)
        pool.release()


@proves("R16")
def test_routes_are_refreshed_by_the_clock_and_listeners_hear_what_changed(scene: Scene) -> None:
    scene.told.topics["t"] = [(1, 0)]
    assert isinstance(scene.want("t"), Topic)
    heard = scene.heard_of()
    before = len(scene.told.asked)
    scene.until(lambda: len(scene.told.asked) > before + 2)
    assert heard == []
    scene.told.topics["t"] = [(1, 0), (1, 0), (1, 0)]
    scene.until(lambda: heard)
    assert [name for name, _ in heard] == ["t"]
    known = scene.metadata.topic("t")
    assert known is not None
    assert len(known.partitions) == 3
    assert scene.metadata.leader("t", 2) == 1
    assert scene.metadata.leader("t", 3) is None


def test_routes_are_refreshed_every_thirty_seconds_unless_told_otherwise() -> None:
    assert metadata.REFRESH_MS == 30_000
    assert ConnectionPool((Address("127.0.0.1", 1),), client_id="x").metadata._refresh_s == 30


@proves("R16")
def test_an_older_leader_epoch_does_not_replace_a_newer(scene: Scene) -> None:
    scene.told.topics["t"] = [(1, 5), (1, 5)]
    scene.want("t")
    scene.told.topics["t"] = [(2, 4), (2, 6)]
    scene.until(lambda: scene.metadata.leader("t", 1) == 2)
    assert scene.metadata.leader("t", 0) == 1
    scene.told.topics["t"] = [(2, 4)]
    before = len(scene.told.asked)
    scene.until(lambda: len(scene.told.asked) > before + 2)
    known = scene.metadata.topic("t")
    assert known is not None
    assert [part.leader_epoch for part in known.partitions] == [5, 6]


def test_a_topic_that_was_made_again_begins_anew(scene: Scene) -> None:
    scene.told.topics["t"] = [(1, 5), (1, 5)]
    scene.want("t")
    scene.told.ids["t"], scene.told.topics["t"] = SECOND_ID, [(1, 0)]
    scene.until(lambda: (known := scene.metadata.topic("t")) and known.topic_id == SECOND_ID)
    known = scene.metadata.topic("t")
    assert known is not None
    assert [part.leader_epoch for part in known.partitions] == [0]


def test_a_broker_that_lags_behind_cannot_bring_a_deleted_topic_back(scene: Scene) -> None:
    scene.told.topics["t"] = [(1, 5)]
    scene.want("t")
    scene.told.ids["t"] = SECOND_ID
    scene.until(lambda: (known := scene.metadata.topic("t")) and known.topic_id == SECOND_ID)
    heard = scene.heard_of()
    scene.told.ids["t"] = FIRST_ID
    before = len(scene.told.asked)
    scene.until(lambda: len(scene.told.asked) > before + 2)
    assert heard == []


def test_a_listener_that_raises_keeps_nobody_else_from_hearing(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    def faulty(name: str, topic: Topic | None) -> None:
        raise RuntimeError("by mistake")

    scene.told.topics["t"] = [(1, 5)]
    scene.want("t")
    scene.metadata.listeners.append(faulty)
    heard = scene.heard_of()
    for epoch in (6, 7):
        scene.told.topics["t"] = [(1, epoch)]
        scene.until(lambda: heard and heard[-1][1].partitions[0].leader_epoch == epoch)  # type: ignore[union-attr]  # noqa: B023
    assert "by mistake" in caplog.text


def test_routes_that_nobody_could_tell_are_asked_for_until_somebody_can(quiet: Scene) -> None:
    quiet.told.topics["t"] = [(1, 5)]
    quiet.want("t")
    quiet.peer.reply = lambda key, request: b""
    quiet.metadata.stale("t")
    quiet.until(lambda: len(quiet.peer.accepted_at) > 2)
    quiet.told.topics["t"] = [(1, 6)]
    quiet.peer.reply = quiet.told.reply
    quiet.until(lambda: (known := quiet.metadata.topic("t")) and known.partitions[0].leader_epoch == 6)


def test_a_topic_is_gone_when_it_stays_away_and_not_when_one_answer_lacks_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.told.topics["t"] = [(1, 0)]
    scene.want("t")
    heard = scene.heard_of()
    del scene.told.topics["t"]
    before = len(scene.told.asked)
    scene.until(lambda: len(scene.told.asked) > before + 2)
    assert scene.metadata.topic("t") is not None
    scene.told.topics["t"] = [(1, 0)]
    before = len(scene.told.asked)
    scene.until(lambda: len(scene.told.asked) > before + 2)
    monkeypatch.setattr(metadata, "GONE_AFTER_S", 0.0)
    del scene.told.topics["t"]
    scene.until(lambda: heard)
    assert heard == [("t", None)]
    assert scene.metadata.topic("t") is None


def test_a_hint_counts_if_its_epoch_is_newer(quiet: Scene) -> None:
    quiet.told.topics["t"] = [(1, 5), (1, 5)]
    quiet.want("t")
    heard = quiet.heard_of()
    endpoint = Message(node_id=7, host="127.0.0.1", port=99, rack=None)
    quiet.metadata.hint("t", 0, 7, 5, [endpoint])
    quiet.metadata.hint("t", 9, 7, 6, [endpoint])
    quiet.metadata.hint("t", 0, 8, 6, [endpoint])
    quiet.metadata.hint("unknown", 0, 7, 6, [endpoint])
    assert heard == []
    before = quiet.metadata.snapshot
    quiet.metadata.hint("t", 0, 7, 6, [endpoint])
    assert [name for name, _ in heard] == ["t"]
    assert quiet.metadata.leader("t", 0) == 7
    assert quiet.metadata.leader("t", 1) == 1
    assert quiet.pool.broker(7).address == Address("127.0.0.1", 99)
    assert before.topics["t"].partitions[0].leader_id == 1


def test_many_who_want_topics_are_answered_by_one_request(quiet: Scene) -> None:
    names = [f"t{nth}" for nth in range(20)]
    quiet.told.topics = {name: [(1, 0)] for name in names}
    found: list[Topic | HeadraceError] = []
    with quiet.pool.reactor.lock:
        for name in names * 3:
            quiet.metadata.want(name, create=False, on_known=found.append)
    quiet.until(lambda: len(found) == 60)
    assert [sorted(asked) for _, asked, _ in quiet.told.asked] == [sorted(names)]
    quiet.metadata.want("t3", create=False, on_known=found.append)
    assert len(found) == 61


def test_only_topics_that_are_to_be_created_are_asked_for_so(quiet: Scene) -> None:
    quiet.told.topics = {"old": [(1, 0)]}
    found: list[Topic | HeadraceError] = []
    quiet.metadata.want("old", create=False, on_known=found.append)
    quiet.metadata.want("new", create=True, on_known=found.append)
    quiet.until(lambda: len(quiet.told.asked) >= 2)
    assert {(tuple(names), create) for _, names, create in quiet.told.asked[:2]} == {
        (("old",), False),
        (("new",), True),
    }
    quiet.told.refused["new"] = ErrorCode.LEADER_NOT_AVAILABLE
    quiet.until(lambda: len(quiet.told.asked) >= 4)
    quiet.told.topics["new"] = [(1, 0)]
    quiet.told.refused.clear()
    quiet.until(lambda: len(found) == 2)
    assert all(isinstance(each, Topic) for each in found)


def test_a_topic_that_is_not_there_is_told_and_one_that_does_not_appear(
    quiet: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "APPEAR_WITHIN_S", 0.1)
    assert isinstance(quiet.want("nowhere"), UnknownTopic)
    assert isinstance(quiet.want("never", create=True), UnknownTopic)
    quiet.told.refused["bad name"] = ErrorCode.INVALID_TOPIC_EXCEPTION
    refused = quiet.want("bad name")
    assert isinstance(refused, Refusal)
    assert "letters, digits" in str(refused)
    monkeypatch.setattr(metadata, "WANT_WITHIN_S", 0.1)
    quiet.told.refused["busy"] = ErrorCode.LEADER_NOT_AVAILABLE
    assert isinstance(quiet.want("busy"), Refusal)


@proves("R16")
def test_stale_routes_are_asked_for_at_once_then_after_growing_pauses(quiet: Scene) -> None:
    quiet.told.topics["t"] = [(1, 0)]
    quiet.want("t")
    asked_at = [quiet.metadata._asked_at]
    for count in range(2, 8):
        for _ in range(10):
            quiet.metadata.stale("t")
        quiet.until(lambda: len(quiet.told.asked) == count)  # noqa: B023
        asked_at.append(quiet.metadata._asked_at)
    gaps = [later - earlier for earlier, later in pairwise(asked_at)]
    assert all(gap >= least / 1000 for gap, least in zip(gaps, (20, 40, 80, 160, 320, 640), strict=True))


def test_a_partition_without_a_leader_is_asked_for_until_it_has_one(quiet: Scene) -> None:
    quiet.told.topics["t"] = [(-1, 3)]
    quiet.want("t")
    assert quiet.metadata.leader("t", 0) is None
    quiet.until(lambda: len(quiet.told.asked) > 2)
    quiet.told.topics["t"] = [(1, 4)]
    quiet.until(lambda: quiet.metadata.leader("t", 0) == 1)


def test_a_broker_that_lags_behind_is_left_for_another(told: Told) -> None:
    """Its answers never say anything new, though everyone finds them stale."""
    ahead = Told()
    with Peer(told.reply) as lagging, Peer(ahead.reply) as other:
        told.brokers = ahead.brokers = {1: lagging.address, 2: other.address}
        told.topics["t"], ahead.topics["t"] = [(1, 1)], [(2, 2)]
        scene = Scene(told, lagging, ConnectionPool((lagging.address,), client_id="lag", refresh_ms=600_000))
        scene.want("t")
        assert scene.metadata.leader("t", 0) == 1

        def moved() -> bool:
            scene.metadata.stale("t")
            return scene.metadata.leader("t", 0) == 2

        scene.until(moved)
        scene.pool.release()


@proves("R16")
def test_the_next_address_is_asked_when_one_does_not_answer(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "IMPATIENT_S", 0.05)
    told.topics["t"] = [(1, 0)]
    dead = Address("127.0.0.1", free_port())
    with Peer() as silent, Peer(greeting=b"no broker") as strange, Peer(told.reply) as peer:
        told.brokers[1] = peer.address
        addresses = (dead, silent.address, strange.address, peer.address)
        scene = Scene(told, peer, ConnectionPool(addresses, client_id="next"))
        assert isinstance(scene.want("t"), Topic)
        scene.pool.release()


def test_nobody_there_is_told_for_each_address_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "WANT_WITHIN_S", 0.1)
    addresses = tuple(Address("127.0.0.1", free_port()) for _ in range(2))
    scene = Scene(Told(), None, ConnectionPool(addresses, client_id="nobody"))  # type: ignore[arg-type]
    error = scene.want("t")
    assert isinstance(error, NoBroker)
    assert all(f"no broker answers at {address}" in str(error) for address in addresses)
    scene.pool.release()


def test_a_broker_that_was_lost_is_failing_for_a_while_and_not_when_it_is_back(quiet: Scene) -> None:
    quiet.told.topics["t"] = [(1, 0)]
    quiet.want("t")
    pool = quiet.pool
    assert pool.failing() == frozenset()
    quiet.told.brokers[2] = Address("127.0.0.1", free_port())
    quiet.metadata.stale("t")
    quiet.until(lambda: 2 in quiet.metadata.brokers)
    heard: list[Message | HeadraceError] = []
    pool.broker(2).ask(apis.METADATA, Message(topics=[]), heard.append, timeout_s=WAIT_S)
    quiet.until(lambda: heard)
    assert pool.failing() == {2}
    pool.failed(1)
    assert pool.failing() == {1, 2}
    pool._avoided.clear()
    pool._marked[1] = 0.0
    assert pool.failing() == frozenset()
    with pytest.raises(BrokerUnreachable, match="broker 9 is not in the cluster now"):
        pool.broker(9)


def test_a_coordinator_is_found_kept_and_forgotten_when_it_denies(quiet: Scene) -> None:
    def beat() -> Message | HeadraceError:
        heard: list[Message | HeadraceError] = []
        request = Message(group_id="g", generation_id=1, member_id="m", group_instance_id=None)
        quiet.pool.ask_coordinator("g", apis.HEARTBEAT, request, heard.append, timeout_s=WAIT_S)
        quiet.until(lambda: heard)
        return heard[0]

    def looked_up() -> int:
        return quiet.peer.asked.count(apis.FIND_COORDINATOR)

    unavailable = beat()
    assert isinstance(unavailable, Refusal)
    assert unavailable.mapping.retriable
    quiet.told.coordinator = 1
    for _ in range(3):
        answer = beat()
        assert isinstance(answer, Message)
        assert answer.error_code == ErrorCode.NONE
    assert looked_up() == 2
    quiet.told.brokers[2] = quiet.peer.address
    quiet.told.coordinator = 2
    denied = beat()
    assert isinstance(denied, Message)
    assert denied.error_code == ErrorCode.NOT_COORDINATOR
    beat()
    assert looked_up() == 3


def test_lanes_are_connections_of_their_own_and_end_alone(quiet: Scene) -> None:
    quiet.told.topics["t"] = [(1, 0)]
    quiet.want("t")
    heard: list[Message | HeadraceError] = []
    fetch = quiet.pool.broker(1, "fetch 1")
    assert fetch is not quiet.pool.broker(1)
    quiet.peer.reply = lambda key, request: None
    fetch.ask(apis.METADATA, Message(topics=[]), heard.append, timeout_s=WAIT_S)
    quiet.until(lambda: fetch.is_open)
    quiet.pool.close_channel("fetch 1")
    assert isinstance(heard[0], EngineClosed)
    assert not fetch.is_open
    assert quiet.pool.broker(1, "fetch 1") is not fetch


def test_a_lane_that_was_closed_is_not_opened_again_by_what_still_waits(quiet: Scene) -> None:
    """A member that has left must not join because its coordinator is found at last."""
    heard: list[Message | HeadraceError] = []
    quiet.told.coordinator = 1
    request = Message(group_id="g", generation_id=1, member_id="m", group_instance_id=None)
    pool = quiet.pool
    with pool.reactor.lock:
        pool.ask_coordinator("g", apis.HEARTBEAT, request, heard.append, timeout_s=WAIT_S, channel="gone")
        pool.ask_coordinator("g", apis.HEARTBEAT, request, heard.append, timeout_s=WAIT_S, channel="stays")
        pool.close_channel("gone")
    assert isinstance(heard[0], EngineClosed)
    quiet.until(lambda: len(heard) == 2)
    assert isinstance(heard[1], Message)
    assert quiet.peer.asked.count(apis.HEARTBEAT) == 1


def test_the_last_release_tells_everyone_who_waits(told: Told) -> None:
    with Peer() as silent:
        pool = networks.shared(str(silent.address), client_id="leaving")
        assert networks.shared(str(silent.address), client_id="leaving") is pool
        found: list[Topic | HeadraceError] = []
        pool.metadata.want("t", create=False, on_known=found.append)
        pool.release()
        assert found == []
        pool.release()
        assert isinstance(found[0], EngineClosed)
        assert networks.shared(str(silent.address), client_id="leaving") is not pool
        networks.shared(str(silent.address), client_id="leaving").release()
        networks.shared(str(silent.address), client_id="leaving").release()
