"""Clients of a simulated cluster: producers that repeat until they are answered, consumers that read below watermarks.

They call the partitions of a broker as its front ends do, over the simulated wires: a call and its answer are delayed,
held back by a cut, and lost with the process that they were meant for. A producer is idempotent, keeps up to
`in_flight` batches on their way and, when one of them fails, sends all that are not answered again, in order, to
whoever leads by then. A consumer reads on from where it is, from the leader or from a follower.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from headrace.errors import DuplicateSequence, HeadraceError, NotLeader, OffsetOutOfRange, OutOfOrderSequence
from headrace.partitions.submission import submit
from headrace.records import kernel
from headrace.records.batch import batches
from headrace.records.record import NewRecord
from headrace.sim.clock import VirtualClock
from headrace.sim.network import MemoryNetwork
from headrace.simulator.history import Batch, History, Violation
from headrace.storage.log import ReadResult, TopicPartition

if TYPE_CHECKING:
    from headrace.simulator.machine import Machine

CLIENT: Final = "client"
PATIENCE_SECONDS: Final = 1.5
BROKER_TIMEOUT_MS: Final = 1000
READ_BYTES: Final = 4096

Reply = Callable[[object], None]
Work = Callable[["Machine", Reply], None]


class NoAnswer(Exception):
    """Refused, lost, or not answered in time."""


class Wire:
    """The connections of the clients' host to the brokers'."""

    def __init__(self, network: MemoryNetwork, clock: VirtualClock) -> None:
        self._network = network
        self._clock = clock
        self._last: dict[tuple[str, str], float] = {}

    def call(self, machine: Machine, work: Work, reply: Reply) -> None:
        """Run `work(machine, reply)` in the broker's process. `reply` runs once here, with NoAnswer if need be."""
        answered = False

        def answer(what: object) -> None:
            nonlocal answered
            if not answered:
                answered = True
                timer.cancel()
                reply(what)

        def arrived() -> None:
            if machine.participant is None:
                if machine.refuses:
                    self._send(machine.name, CLIENT, lambda: answer(NoAnswer("refused")))
                return
            work(machine, lambda what: self._send(machine.name, CLIENT, lambda: answer(what)))

        timer = self._clock.call_later(PATIENCE_SECONDS, lambda: answer(NoAnswer("no answer in time")))
        self._send(CLIENT, machine.name, lambda: machine.hear(arrived))

    def _send(self, source: str, target: str, call: Callable[[], None]) -> None:
        """In the order of sending, as on one connection."""
        way = (source, target)
        now = self._clock.now()
        self._last[way] = max(self._last.get(way, 0.0), now + self._network.draw_delay(way))
        self._clock.call_later(self._last[way] - now, lambda: self._network.pass_on(way, call))


@dataclass(slots=True)
class Clients:
    """What all clients share."""

    wire: Wire
    clock: VirtualClock
    machines: list[Machine]
    history: History
    random: random.Random

    def find_leader(self, where: TopicPartition, reply: Callable[[Machine | None, int], None]) -> None:
        """Ask some broker who leads; None if it does not know or does not answer."""

        def look(machine: Machine, answer: Reply) -> None:
            assert machine.participant is not None
            state = machine.participant.view.image.partition(where.topic, where.partition)
            answer(None if state is None else (state.leader, state.leader_epoch))

        def found(what: object) -> None:
            leader, epoch = what if isinstance(what, tuple) else (-1, -1)
            reply(next((machine for machine in self.machines if machine.id == leader), None), epoch)

        self.wire.call(self.random.choice(self.machines), look, found)


class Producer:
    """One idempotent producer of one partition."""

    def __init__(self, clients: Clients, where: TopicPartition, id: int, in_flight: int, pause: float) -> None:
        self._clients = clients
        self._where = where
        self._id = id
        self._in_flight = in_flight
        self._pause_seconds = pause
        self._random = random.Random(clients.random.random())
        self._waiting: list[tuple[Batch, int, bytes]] = []
        """Sent or to be sent, not answered: batch, count of records, bytes."""
        self._sent = 0
        self._known = False
        """Whether its first batch was answered. A log that has not heard of it takes any batch as the first one, so
        a second one must not overtake it."""
        self._turn = 0
        self._number = 0
        self._sequence = 0
        self._leader: Machine | None = None
        self._stopped = False
        self._retry()

    @property
    def done(self) -> bool:
        return self._stopped and not self._waiting

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def stop(self) -> None:
        """Make no new batches."""
        self._stopped = True

    def make(self) -> None:
        """One more batch."""
        if self._stopped or len(self._waiting) >= 2 * self._in_flight:
            return
        count = self._random.choice((1, 1, 2, 5))
        batch = (self._id, self._number)
        records: list[NewRecord] = [
            (self._clients.clock.wall_ms(), None, content_of(batch, nth, self._random.randrange(120)), [])
            for nth in range(count)
        ]
        built = kernel.build(records, producer_id=self._id, producer_epoch=0, base_sequence=self._sequence)
        self._number += 1
        self._sequence += count
        self._waiting.append((batch, count, bytes(built)))
        self._send()

    def _retry(self) -> None:
        """Begin again: find the leader, send everything that is not answered."""
        self._turn += 1
        self._leader = None
        self._sent = 0
        turn = self._turn

        def found(machine: Machine | None, _epoch: int) -> None:
            if turn != self._turn:
                return
            if machine is None:
                self._retry_later()
            else:
                self._leader = machine
                self._send()

        self._clients.find_leader(self._where, found)

    def _retry_later(self) -> None:
        self._turn += 1
        self._leader = None
        turn = self._turn
        delay = self._pause_seconds * self._random.uniform(0.5, 1.5)
        self._clients.clock.call_later(delay, lambda: self._retry() if turn == self._turn else None)

    def _send(self) -> None:
        while self._leader is not None and self._sent < len(self._waiting):
            entry = self._waiting[self._sent]
            if entry[0][1] >= self._waiting[0][0][1] + (self._in_flight if self._known else 1):
                return
            self._sent += 1
            self._submit(self._leader, self._turn, entry)

    def _submit(self, leader: Machine, turn: int, entry: tuple[Batch, int, bytes]) -> None:
        batch, count, built = entry
        where, history = self._where, self._clients.history

        def work(machine: Machine, answer: Reply) -> None:
            assert machine.participant is not None
            partitions = machine.participant.partitions
            try:
                partition = partitions.get(where.topic, where.partition)
            except HeadraceError as error:
                answer(error)
                return
            epoch = partition.epoch

            def done(error: HeadraceError | None, offset: int) -> None:
                if error is None:
                    history.acknowledged(where, batch, count, offset, epoch, machine.life)
                answer(error)

            submit(partitions, partition, bytearray(built), -1, BROKER_TIMEOUT_MS, done)
            partitions.end_turn()

        self._clients.wire.call(leader, work, lambda what: self._answered(turn, entry, what))

    def _answered(self, turn: int, entry: tuple[Batch, int, bytes], what: object) -> None:
        if entry not in self._waiting:
            return
        if what is None:
            self._known = True
            at = self._waiting.index(entry)
            del self._waiting[at]
            if at < self._sent:
                self._sent -= 1
            self._send()
        elif turn == self._turn:
            if isinstance(what, OutOfOrderSequence | DuplicateSequence) and self._clients.history.may_lose(self._where):
                self._begin_anew()
            self._retry_later()

    def _begin_anew(self) -> None:
        """What was acknowledged is lost, as the topic's level allows: go on as another producer."""
        self._id += 1_000_000
        self._sequence = 0
        self._known = False
        waiting, self._waiting = self._waiting, []
        for (_, number), count, _built in waiting:
            batch = (self._id, number)
            records: list[NewRecord] = [(0, None, content_of(batch, nth, 0), []) for nth in range(count)]
            built = kernel.build(records, producer_id=self._id, producer_epoch=0, base_sequence=self._sequence)
            self._sequence += count
            self._waiting.append((batch, count, bytes(built)))


class Consumer:
    """Reads one partition from its start."""

    def __init__(self, clients: Clients, where: TopicPartition, name: str, pause: float, follower_share: float) -> None:
        self.offset = 0
        self.name = name
        self._clients = clients
        self._where = where
        self._pause_seconds = pause
        self._follower_share = follower_share
        self._random = random.Random(clients.random.random())
        self._epoch = -1
        self._end = 0
        self._leader: Machine | None = None
        self._look()

    def _again(self, *, look: bool) -> None:
        delay = self._pause_seconds * self._random.uniform(0.5, 1.5)
        self._clients.clock.call_later(delay, self._look if look else self._read)

    def _look(self) -> None:
        def found(machine: Machine | None, epoch: int) -> None:
            if machine is None or epoch < self._epoch:
                self._again(look=True)
            else:
                self._leader, self._epoch = machine, epoch
                self._read()

        self._clients.find_leader(self._where, found)

    def _read(self) -> None:
        leader = self._leader
        assert leader is not None
        follower = self._random.random() < self._follower_share
        machine = self._random.choice(self._clients.machines) if follower else leader
        offset, epoch, where = self.offset, self._epoch, self._where

        def work(machine: Machine, answer: Reply) -> None:
            assert machine.participant is not None
            partitions = machine.participant.partitions
            try:
                partition = partitions.find_replica(where.topic, where.partition)
                if partition is None or (partition.core is None and not follower):
                    raise NotLeader(f"{machine.life} does not lead {where}")
                partition.check_epoch(epoch)
                data = content(partition.read(offset, READ_BYTES))
                core = partition.core
                settled = core is not None and partition.high_watermark >= core.epoch_start
                answer((data, partition.high_watermark if settled else -1, machine.life, partition.leading))
            except OffsetOutOfRange as error:
                answer((error, partition is not None and partition.leading, machine.life))
            except HeadraceError as error:
                answer(error)

        self._clients.wire.call(machine, work, self._answered)

    def _answered(self, what: object) -> None:
        match what:
            case (bytes() as data, int() as end, str() as by, bool()):
                self._took(data, end, by)
                self._again(look=False)
            case (OffsetOutOfRange() as error, True, by):
                if not self._clients.history.may_lose(self._where):
                    raise Violation(f"{self.name} at {self.offset} in epoch {self._epoch}, leader {by}: {error}")
                self.offset = 0
                self._again(look=True)
            case _:
                self._again(look=True)

    def _took(self, data: bytes, end: int, by: str) -> None:
        history, where = self._clients.history, self._where
        if 0 <= end < self._end and not history.may_lose(where):
            raise Violation(f"{where}: {self.name} was told the end {self._end} and then by {by} {end}")
        self._end = max(self._end, end)
        before = self.offset
        for header, view in batches(memoryview(data)):
            for record in kernel.records(view):
                if record.offset >= self.offset:
                    history.consumed(where, record.offset, record.value or b"", by)
            self.offset = max(self.offset, header.next_offset)
        if self.offset > before:
            history.note(f"{self.name} read {where} {before} to {self.offset} from {by}")
            history.counts["read"] += self.offset - before


def content(result: ReadResult) -> bytes:
    return b"".join(part.file.pread(part.count, part.position) for part in result.slices)


def content_of(batch: Batch, nth: int, padding: int) -> bytes:
    return b"%d:%d:%d:" % (*batch, nth) + b"." * padding


def parse_content(content: bytes) -> tuple[Batch, int]:
    producer, number, nth, _ = content.split(b":", 3)
    return (int(producer), int(number)), int(nth)
