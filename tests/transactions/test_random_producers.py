"""Producers that take over from each other, repeat what they were not answered and fall silent, on a log that is slow,
fails, or takes what it said it had not, while coordinators change.

Judged: an id and epoch is handed out to one producer alone; a transaction has one end, and it is the one that its
producer was told; at last nobody waits, and whatever was decided has ended everywhere.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from headrace.errors import ErrorCode
from headrace.transactions.messages import EndReply, InitReply
from proving import proves
from transactions.scene import Scene, Waiter

STEPS = 1200
NAMES = ("one", "two")
FAULTS = [ErrorCode.NONE] * 6 + [ErrorCode.NOT_ENOUGH_REPLICAS, ErrorCode.REQUEST_TIMED_OUT]


@dataclass(slots=True)
class Client:
    """A producer that behaves, as far as its fortune lets it."""

    name: str
    version: int
    who: InitReply | EndReply | None = None
    is_open: bool = False
    opening: Waiter[InitReply] | None = None
    adding: Waiter[int] | None = None
    ending: Waiter[EndReply] | None = None
    committed: bool = False


@dataclass(slots=True)
class History:
    random: random.Random
    scene: Scene = field(default_factory=lambda: Scene(partitions=2, held=True, markers_held=True))
    clients: list[Client] = field(default_factory=list)
    handed: dict[tuple[str, int, int], Client] = field(default_factory=dict)
    told: dict[tuple[str, int], bool] = field(default_factory=dict)
    ends: dict[tuple[str, int], bool] = field(default_factory=dict)

    def run(self) -> None:
        for _ in range(STEPS):
            client = self.random.choice(self.clients)
            self.random.choice([self.act, self.act, self.act, self.world])(client)
            self.hear()
            self.judge()
        self.settle()

    def act(self, client: Client) -> None:
        scene = self.scene
        if client.opening or client.adding or client.ending:
            return
        if client.who is None or self.random.random() < 0.03:
            client.who, client.is_open = None, False
            client.opening = scene.init(client.name, timeout_ms=3000)
        elif not client.is_open:
            places = frozenset({("t", self.random.randrange(9))})
            client.adding = scene.add(client.who, places, client.name, client.version)
        elif self.random.random() < 0.6:
            client.committed = self.random.random() < 0.5
            client.ending = scene.end(client.who, client.name, committed=client.committed, version=client.version)

    def world(self, _client: Client) -> None:
        scene = self.scene
        match self.random.randrange(6):
            case 0 | 1:
                self.acknowledge()
            case 2 | 3:
                scene.write_markers()
            case 4:
                scene.advance(self.random.choice([0.05, 0.3, 1.0]))
            case _ if self.random.random() < 0.15:
                self.change_coordinator()

    def acknowledge(self) -> None:
        """A fault may leave the records in the log all the same: who asked hears that it is not known."""
        scene = self.scene
        while scene.on_the_way:
            partition, records, done = scene.on_the_way.pop(0)
            code = self.random.choice(FAULTS)
            if code == ErrorCode.NONE or (code == ErrorCode.REQUEST_TIMED_OUT and self.random.random() < 0.5):
                scene.log.setdefault(partition, []).extend(records)
            done(code)

    def change_coordinator(self) -> None:
        scene = self.scene
        scene.coordinator.close()
        waiting, scene.on_the_way = scene.on_the_way, []
        for partition, records, done in waiting:
            if self.random.random() < 0.5:
                scene.log.setdefault(partition, []).extend(records)
            done(ErrorCode.NOT_LEADER_OR_FOLLOWER)
        scene.take_over()

    def hear(self) -> None:
        for client in self.clients:
            if client.opening is not None and client.opening.answered:
                reply, client.opening = client.opening.reply, None
                if reply.error_code == ErrorCode.NONE:
                    self.take(client, reply)
            if client.adding is not None and client.adding.answered:
                code, client.adding = client.adding.reply, None
                client.is_open = code == ErrorCode.NONE
                self.maybe_lose(client, code)
            if client.ending is not None and client.ending.answered:
                self.ended(client, client.ending.reply)

    def ended(self, client: Client, reply: EndReply) -> None:
        client.ending = None
        if reply.error_code != ErrorCode.NONE:
            self.maybe_lose(client, reply.error_code)
            return
        assert client.who is not None
        if client.version == 2:
            self.told[client.name, client.who.epoch] = client.committed
            self.take(client, reply)
        client.is_open = False

    def take(self, client: Client, reply: InitReply | EndReply) -> None:
        key = (client.name, reply.producer_id, reply.epoch)
        assert self.handed.setdefault(key, client) is client, f"{key} was handed out twice"
        client.who = reply

    def maybe_lose(self, client: Client, code: int) -> None:
        if code in (ErrorCode.PRODUCER_FENCED, ErrorCode.INVALID_PRODUCER_ID_MAPPING, ErrorCode.INVALID_TXN_STATE):
            client.who, client.is_open = None, False

    def judge(self) -> None:
        for marker in self.scene.written:
            key = marker.transactional_id, marker.number
            assert self.ends.setdefault(key, marker.committed) == marker.committed, f"{key} has two ends"
            told = self.told.get((marker.transactional_id, marker.epoch - 1))
            assert told is None or told == marker.committed, f"{key} did not end as its producer was told"
        self.scene.written.clear()

    def settle(self) -> None:
        scene = self.scene
        scene.held = scene.markers_held = False
        for _ in range(50):
            scene.acknowledge()
            scene.write_markers()
            scene.advance(1)
            self.hear()
        self.judge()
        assert not any(client.opening or client.adding or client.ending for client in self.clients)
        states = +scene.coordinator.states()
        assert states.keys() <= {"Empty", "CompleteCommit", "CompleteAbort"}, states
        assert sum(states.values()) == len(NAMES)
        before = scene.listed()
        scene.take_over()
        # Last in the log may be what this coordinator could not know to be kept: a beginning, which then times out.
        for _ in range(10):
            scene.advance(1)
        self.judge()
        after = scene.listed()
        assert after.keys() == before.keys()
        assert all(after[name] == before[name] or after[name].state in ("Empty", "CompleteAbort") for name in after)


@proves("T1", "T2")
@pytest.mark.parametrize("round_number", range(8))
def test_a_transaction_has_one_end_and_an_epoch_one_producer(seed: int, round_number: int) -> None:
    history = History(random.Random(seed * 100 + round_number))
    history.clients = [Client(name, version) for name in NAMES for version in (1, 2, 2)]
    history.run()
    assert len(history.ends) > 5
