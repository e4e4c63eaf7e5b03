"""Connections of simulated clients to the Kafka listeners of the brokers, and what brokers are overheard to answer.

A client speaks the protocol itself: frames over the simulated network, several requests under way on one connection,
answers in their order. A connection on which an answer is overdue is given up, and everything on it with it, as Java's
and librdkafka's clients do.

What a broker has decided is noted when its answer leaves it, not when it arrives: an acknowledgement that is lost on
the way binds the broker all the same.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, Final

from headrace.partitions.partition import Partition
from headrace.ports.disk import FileSlice
from headrace.ports.network import Address, Channel, Part
from headrace.simulator.history import History, Violation
from headrace.storage.log import TopicPartition
from headrace.virtual.clock import VirtualClock, VirtualTimer
from headrace.virtual.network import VirtualChannel, VirtualHost
from headrace.wire import api
from headrace.wire.codec import decode_response, encode_request, read_response_header, write_request
from headrace.wire.message import Message

if TYPE_CHECKING:
    from headrace.simulator.machine import Machine

CLIENT: Final = "client"
KAFKA_PORT: Final = 9092
PATIENCE_SECONDS: Final = 1.5
VERSIONS: Final = {
    api.PRODUCE: 9,
    api.FETCH: 12,
    api.LIST_OFFSETS: 5,
    api.METADATA: 8,
    api.OFFSET_COMMIT: 7,
    api.OFFSET_FETCH: 7,
    api.FIND_COORDINATOR: 2,
    api.JOIN_GROUP: 5,
    api.HEARTBEAT: 3,
    api.LEAVE_GROUP: 3,
    api.SYNC_GROUP: 3,
    api.DELETE_RECORDS: 1,
    api.INIT_PRODUCER_ID: 3,
    api.ELECT_LEADERS: 1,
    api.INCREMENTAL_ALTER_CONFIGS: 0,
    api.ACCEPT_METADATA: 0,
    api.CREATE_TOPICS: 7,
    api.DELETE_TOPICS: 6,
    api.ALTER_PARTITION_REASSIGNMENTS: 0,
    api.LIST_PARTITION_REASSIGNMENTS: 0,
    api.PLAN_PLACEMENT: 0,
}

_length = struct.Struct(">i").unpack_from
_head = struct.Struct(">ii").unpack_from
LENGTH_BYTES: Final = 4

Reply = Callable[[Any], None]
"""Hears the answer, or None if there will be none."""
Decided = Callable[[Any, "Machine"], None]
"""Hears the answer when it leaves the broker."""


@dataclass(slots=True, eq=False)
class Call:
    api_key: int
    correlation_id: int
    reply: Reply
    decided: Decided | None
    deadline: float
    version: int
    answer: Message | None = None
    """Once the broker is overheard."""


@dataclass(slots=True)
class Clients:
    """What all clients of a run share."""

    host: VirtualHost
    clock: VirtualClock
    machines: list[Machine]
    history: History
    random: Random
    synced_since: dict[tuple[TopicPartition, str], float] = field(default_factory=dict)
    """By partition and process: since when a leader has been seen to count what is synced, and only that."""
    calls: dict[int, Call] = field(default_factory=dict)
    """By correlation id, which no two requests of a run share."""

    def address(self, broker: int) -> Address:
        return Address(self.machines[broker - 1].name, KAFKA_PORT)

    def life(self, broker: int) -> str:
        return self.machines[broker - 1].life

    def some_broker(self, chance: Random) -> int:
        return chance.choice(self.machines).id

    def overhear(self, machine: Machine, channel: VirtualChannel, parts: Sequence[Part]) -> None:
        """A broker sends; what it sends to a client at once are whole answers. Brokers ask each other at the same
        ports."""
        if channel.local.port != KAFKA_PORT or channel.peer.host != CLIENT:
            return
        left = 0
        for nth, part in enumerate(parts):
            at, size = left, len(part)
            left = max(0, left - size)
            while at < size:
                assert isinstance(part, bytes | bytearray | memoryview), "an answer begins with encoded bytes"
                length, correlation_id = _head(part, at)
                end = at + LENGTH_BYTES + length
                call = self.calls.get(correlation_id)
                if call is not None and call.decided is not None:
                    self._decided(call, machine, memoryview(part)[at + LENGTH_BYTES : end], parts[nth + 1 :], length)
                left = max(0, end - size)
                at = end

    def _decided(self, call: Call, machine: Machine, begun: memoryview, others: Sequence[Part], length: int) -> None:
        assert call.decided is not None
        try:
            frame = begun if len(begun) == length else _joined(begun, others, length)
        except OSError:  # then it cannot leave either
            return
        call.answer = _read(call, frame)
        call.decided(call.answer, machine)

    def epoch(self, machine: Machine, where: TopicPartition) -> int:
        """In which the machine leads the partition by its own account; -1 if it does not."""
        partition = machine.leading(where)
        return -1 if partition is None or not partition.leading else partition.epoch

    def look(self, machine: Machine, where: TopicPartition, leader: Partition) -> None:
        """Time and again."""
        if leader.log.settings.durability == "disk":
            self.synced_since.setdefault((where, machine.life), self.clock.now())
        else:
            self.synced_since.pop((where, machine.life), None)

    def is_synced(self, machine: Machine, where: TopicPartition, sent_at: float) -> bool:
        """Whether what was sent then, and is acknowledged now, cannot count by page caches."""
        partition = machine.leading(where)
        if partition is None or partition.log.settings.durability != "disk":
            return False
        return sent_at > self.synced_since.get((where, machine.life), float("inf"))

    def known_epoch(self, machine: Machine, where: TopicPartition) -> int:
        """The last of which the machine has heard: whatever it answers, it answers in that one."""
        participant = machine.participant
        state = None if participant is None else participant.view.image.partition(where.topic, where.partition)
        return -1 if state is None else max(state.leader_epoch, self.epoch(machine, where))


def _joined(begun: memoryview, parts: Sequence[Part], length: int) -> memoryview:
    """A frame that goes on in other parts, of which some are slices of files."""
    frame = bytearray(begun)
    for part in parts:
        if len(frame) >= length:
            break
        frame += part.read() if isinstance(part, FileSlice) else memoryview(part)
    return memoryview(bytes(frame[:length]))


def _read(call: Call, frame: memoryview) -> Message:
    _, body = read_response_header(call.api_key, call.version, frame)
    return decode_response(call.api_key, call.version, frame, body)


class Client:
    """One client: at most one connection to each broker."""

    def __init__(
        self,
        clients: Clients,
        name: str,
        versions: Mapping[int, int] = VERSIONS,
        ended: Callable[[int, str], None] = lambda _broker, _life: None,
    ) -> None:
        """`ended` hears of every connection that has ended, by its broker and which of its lives had it."""
        self.name = name
        self._ended = ended
        self._clients = clients
        self._versions = versions
        self._links: dict[int, Link] = {}

    def call(
        self,
        broker: int,
        api_key: int,
        message: Message,
        reply: Reply,
        *,
        decided: Decided | None = None,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        """`reply` hears the answer, or None when the connection is lost or given up."""
        clients = self._clients
        link = self._links.get(broker)
        if link is None or link.gone:
            link = self._links[broker] = Link(clients, broker, partial(self._ended, broker))
        version, correlation_id = self._versions[api_key], len(clients.calls) + 1
        deadline = clients.clock.now() + patience_seconds
        call = clients.calls[correlation_id] = Call(api_key, correlation_id, reply, decided, deadline, version)
        body = encode_request(api_key, version, message)
        link.send(call, write_request(api_key, version, correlation_id, self.name, body))

    def is_connected(self, broker: int) -> bool:
        """Whether the next call goes the way of the last."""
        link = self._links.get(broker)
        return link is not None and not link.gone

    def hang_up(self) -> None:
        """End all connections; what was under way is not answered."""
        links, self._links = self._links, {}
        for link in links.values():
            link.give_up()


class Link:
    """One connection: the session of its channel."""

    def __init__(self, clients: Clients, broker: int, ended: Callable[[str], None]) -> None:
        self.gone = False
        self._broker = broker
        self._ended = ended
        self._life = ""
        self._clients = clients
        self._address = address = clients.address(broker)
        self._channel: Channel | None = None
        self._unsent: list[bytes] = []
        self._awaited: deque[Call] = deque()
        self._timer: VirtualTimer | None = None
        clients.host.connect(address, self)

    def send(self, call: Call, frame: bytes) -> None:
        self._awaited.append(call)
        if self._channel is None:
            self._unsent.append(frame)
        else:
            self._channel.send((frame,))
        if self._timer is None:
            self._arm()

    def _arm(self) -> None:
        clock = self._clients.clock
        self._timer = clock.call_later(self._awaited[0].deadline - clock.now(), self._look)

    def _look(self) -> None:
        self._timer = None
        if self.gone or not self._awaited:
            return
        if self._awaited[0].deadline <= self._clients.clock.now():
            self.give_up()
        else:
            self._arm()

    def give_up(self) -> None:
        if self._channel is not None:
            self._channel.abort()
        else:
            self.closed("no answer in time")

    # Session.

    def opened(self, channel: Channel) -> None:
        if self.gone:
            channel.abort()
            return
        self._channel = channel
        self._life = self._clients.life(self._broker)
        unsent, self._unsent = self._unsent, []
        channel.send(unsent)

    def received(self, data: memoryview) -> int:
        used, end = 0, len(data)
        while end - used >= LENGTH_BYTES and not self.gone:
            (length,) = _length(data, used)
            frame_end = used + LENGTH_BYTES + length
            if frame_end > end:
                break
            self._answered(memoryview(bytes(data[used + LENGTH_BYTES : frame_end])))
            used = frame_end
        return end if self.gone else used

    def _answered(self, frame: memoryview) -> None:
        (correlation_id,) = _length(frame, 0)
        call = self._awaited.popleft() if self._awaited else None
        if call is None or call.correlation_id != correlation_id:
            wanted = "nothing" if call is None else call.correlation_id
            raise Violation(f"{self._address} answers request {correlation_id}, where {wanted} was to be answered")
        call.reply(_read(call, frame) if call.answer is None else call.answer)

    def drained(self) -> None:
        pass

    def closed(self, reason: str) -> None:
        if self.gone:
            return
        self.gone = True
        if self._life:
            self._ended(self._life)
        awaited, self._awaited = self._awaited, deque()
        for call in awaited:
            call.reply(None)
