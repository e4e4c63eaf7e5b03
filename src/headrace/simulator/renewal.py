"""A topic that is deleted and made anew while it runs, with a producer and a consumer that go on with the new one.

All of them name it by its id, so each answer belongs to one topic of that name for certain. Each has a history of its
own: its records are its own, from offset 0 on, and so are the offsets committed for it. Once somebody has asked to
delete it, nothing of it is judged any more. At the end the last one is compared with its replicas, and no broker has
anything of the others.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Final

from headrace.cluster.image import Image
from headrace.cluster.names import OFFSETS_TOPIC
from headrace.coordinators.state_log import partition_of
from headrace.errors import ErrorCode
from headrace.records import kernel
from headrace.records.record import NewRecord
from headrace.simulator.connection import VERSIONS, Client, Clients
from headrace.simulator.consumer import fetch, take
from headrace.simulator.contents import content_of, parse_content
from headrace.simulator.history import Batch, History, Record, Violation
from headrace.simulator.machine import DATA, Machine
from headrace.simulator.producer import ALL_IN_SYNC, BROKER_TIMEOUT_MS, SEQUENCE_FAULTS
from headrace.storage import folder
from headrace.storage.log import TopicPartition
from headrace.wire import api
from headrace.wire.message import Message

NAME: Final = "renewed"
WHERE: Final = TopicPartition(NAME, 0)
GROUP: Final = "renewal"
PRODUCER: Final = 1000
"""Of its own among the numbers of a run's producers."""
NO_ID: Final = bytes(16)
NO_OFFSET: Final = -1
REPLICAS: Final = 3
OVERRIDES: Final = {
    "durability": "disk",
    "min.insync.replicas": "2",
    "segment.bytes": "1024",
    "flush.ms": "50",
    "file.delete.delay.ms": "100",
}
ACT_SECONDS: Final = 0.15
DELETION_SHARE: Final = 0.2
PAUSE_SECONDS: Final = 0.05
COMMIT_SHARE: Final = 0.2
BY_ID: Final = VERSIONS | {
    api.PRODUCE: 13,
    api.FETCH: 13,
    api.METADATA: 12,
    api.OFFSET_COMMIT: 10,
    api.OFFSET_FETCH: 10,
}


class Incarnation(History):
    """One topic of that name."""

    def __init__(self, history: History, topic_id: bytes) -> None:
        super().__init__(history.trace, history.now)
        self.counts = history.counts
        self.topic_id = topic_id
        self.sent: set[Batch] = set()
        self.is_doomed = False
        """Somebody has asked to delete it."""
        self.watch(WHERE, may_lose=False)

    def consumed(self, where: TopicPartition, offset: int, content: bytes, by: str) -> None:
        self.check_sent(content, by)
        super().consumed(where, offset, content, by)

    def check(
        self, where: TopicPartition, records: list[Record], contents: dict[int, bytes], starts: Collection[int] = (0,)
    ) -> None:
        for content in contents.values():
            self.check_sent(content, "the log")
        super().check(where, records, contents, starts)

    def check_sent(self, content: bytes, by: str) -> None:
        batch, _ = parse_content(content)
        if batch not in self.sent:
            raise Violation(f"{where_of(self.topic_id)}: {by} has {batch}, which was sent to another of that name")

    def metadata(self, number: int) -> str:
        return f"{self.topic_id.hex()} {number}"

    def number(self, metadata: str, by: str) -> int:
        owner, number = metadata.split()
        if owner != self.topic_id.hex():
            raise Violation(f"{where_of(self.topic_id)}: {by} answers an offset that was committed for {owner}")
        return int(number)


def where_of(topic_id: bytes) -> str:
    return f"{WHERE} of {topic_id.hex()}"


class Renewal:
    """The operator who deletes and creates, and what it knows of the topic."""

    def __init__(self, clients: Clients, seed: int, offsets_partitions: int) -> None:
        self.clients = clients
        self.current: Incarnation | None = None
        self.leader = self.epoch = -1
        self._known: dict[bytes, Incarnation] = {}
        self._random = random.Random(f"{seed} renewal")
        self._client = Client(clients, "renewal", BY_ID)
        self._doomed: bytes = b""
        """To be deleted now."""
        self.is_stopped = False
        self._act()
        self._ask()
        RenewedProducer(self, random.Random(f"{seed} renewed producer"))
        RenewedConsumer(self, random.Random(f"{seed} renewed consumer"), offsets_partitions)

    def stop(self) -> None:
        """Delete it no more; it is made if it is not there."""
        self.is_stopped = True

    def _act(self) -> None:
        clients, chance = self.clients, self._random
        clients.clock.call_later(chance.expovariate(1 / ACT_SECONDS), self._act)
        broker, current = clients.some_broker(chance), self.current
        if self._doomed:
            message = Message(topics=[Message(name=None, topic_id=self._doomed)], timeout_ms=1000)
            self._client.call(broker, api.DELETE_TOPICS, message, self._deleted)
        elif current is None:
            configs = [Message(name=name, value=value) for name, value in OVERRIDES.items()]
            topic = Message(name=NAME, num_partitions=1, replication_factor=REPLICAS, assignments=[], configs=configs)
            message = Message(topics=[topic], timeout_ms=1000, validate_only=False)
            self._client.call(broker, api.CREATE_TOPICS, message, lambda _: None)
        elif not self.is_stopped and chance.random() < DELETION_SHARE:
            clients.history.note(f"asks to delete {where_of(current.topic_id)}")
            current.is_doomed, self._doomed = True, current.topic_id

    def _deleted(self, answer: Message | None) -> None:
        if answer is None or answer.responses[0].error_code not in (ErrorCode.NONE, ErrorCode.UNKNOWN_TOPIC_ID):
            return
        if self.current is not None and self.current.topic_id == self._doomed:
            self.current = None
            self.clients.history.counts["topics renewed"] += 1
        self._doomed = b""

    def _ask(self) -> None:
        clients = self.clients
        message = Message(
            topics=[Message(topic_id=NO_ID, name=NAME)],
            allow_auto_topic_creation=False,
            include_topic_authorized_operations=False,
        )

        def answered(answer: Message | None) -> None:
            clients.clock.call_later(PAUSE_SECONDS * self._random.uniform(0.5, 1.5), self._ask)
            if answer is not None and not answer.topics[0].error_code and answer.topics[0].partitions:
                self._told(bytes(answer.topics[0].topic_id), answer.topics[0].partitions[0])

        self._client.call(clients.some_broker(self._random), api.METADATA, message, answered)

    def _told(self, topic_id: bytes, row: Message) -> None:
        found = self._known.get(topic_id)
        if found is None:
            found = self._known[topic_id] = Incarnation(self.clients.history, topic_id)
        if found.is_doomed:
            # A broker that does not know better, or one that did not know of it when it was asked to delete it.
            self._doomed = self._doomed or topic_id
            return
        if self.current is not found:
            self.clients.history.note(f"{where_of(topic_id)} is there")
            self.current, self.leader, self.epoch = found, -1, -1
        if row.leader_epoch >= self.epoch:
            self.leader, self.epoch = row.leader_id, row.leader_epoch

    # What can be seen of it.

    def leading_epoch(self, machine: Machine, topic_id: bytes) -> int:
        """In which the machine leads that topic by its own account; -1 if it does not."""
        partition = machine.leading(WHERE)
        return -1 if partition is None or partition.log.topic_id != topic_id else partition.epoch

    def look(self, machine: Machine) -> None:
        """Who leads, and where watermarks are."""
        partition = machine.leading(WHERE)
        found = None if partition is None else self._known.get(partition.log.topic_id)
        if partition is not None and partition.leading and found is not None:
            found.leads(WHERE, partition.epoch, machine.life)
            found.watermark(WHERE, partition.epoch, machine.life, partition.high_watermark)

    def unsettled(self, machines: list[Machine], image: Image) -> str:
        """Why it is not at rest; empty if it is."""
        current, topic = self.current, image.topics.get(NAME)
        if current is None or self._doomed or topic is None or topic.id != current.topic_id:
            return f"no {NAME} that lasts"
        if image.deleted:
            return f"topics {[each.hex() for each in image.deleted]} are still to be deleted"
        for machine in machines:
            assert machine.participant is not None
            logs = {each.topic_id for each in machine.participant.store.logs() if each.topic_partition == WHERE}
            if logs != {topic.id}:
                return f"{machine.life} has logs of {NAME} with the ids {[each.hex() for each in logs]}"
            if (left := self._left(machine)) != "":
                return f"{machine.life} still has {left}"
        return ""

    def _left(self, machine: Machine) -> str:
        """A folder of a topic that was deleted."""
        above = f"{DATA}/{NAME}"
        for name in machine.disk.list(above):
            found = folder.read_topic_id(machine.disk, f"{above}/{name}")
            if isinstance(found, bytes) and found in self._known and self._known[found].is_doomed:
                return f"{above}/{name}"
        return ""

    def judged(self) -> list[tuple[History, TopicPartition]]:
        return [] if self.current is None else [(self.current, WHERE)]


class RenewedProducer:
    """Idempotent, one batch under way. What was not acknowledged when the topic is another is given up."""

    def __init__(self, renewal: Renewal, chance: random.Random) -> None:
        self._renewal = renewal
        self._clients = renewal.clients
        self._random = chance
        self._client = Client(renewal.clients, "renewed producer", BY_ID)
        self._producer_id = -1
        self._topic: Incarnation | None = None
        self._sequence = self._made = self._tries = 0
        self._waiting: list[NewRecord] = []
        self._next()

    def _next(self) -> None:
        self._clients.clock.call_later(self._random.expovariate(1 / PAUSE_SECONDS), self._go_on)

    def _go_on(self) -> None:
        renewal = self._renewal
        if self._producer_id < 0:
            self._draw_id()
            return
        if renewal.current is not self._topic:
            self._topic, self._sequence, self._waiting = renewal.current, 0, []
        if self._topic is None or renewal.leader < 0 or (renewal.is_stopped and not self._waiting):
            self._next()
            return
        if not self._waiting:
            self._make()
        self._send(self._topic)

    def _draw_id(self) -> None:
        def answered(answer: Message | None) -> None:
            if answer is not None and not answer.error_code:
                self._producer_id = answer.producer_id
            self._next()

        message = Message(transactional_id=None, transaction_timeout_ms=60_000, producer_id=-1, producer_epoch=-1)
        self._client.call(self._clients.some_broker(self._random), api.INIT_PRODUCER_ID, message, answered)

    def _make(self) -> None:
        assert self._topic is not None
        self._made, self._tries = self._made + 1, 0
        batch, now_ms = (PRODUCER, self._made), self._clients.clock.wall_ms()
        self._topic.sent.add(batch)
        count = self._random.choice((1, 2, 5))
        self._waiting = [
            (now_ms, None, content_of(batch, nth, self._random.randrange(120)), []) for nth in range(count)
        ]

    def _send(self, topic: Incarnation) -> None:
        self._tries += 1
        built = kernel.build(
            self._waiting, producer_id=self._producer_id, producer_epoch=0, base_sequence=self._sequence
        )
        data = Message(topic_id=topic.topic_id, partition_data=[Message(index=0, records=bytes(built))])
        message = Message(transactional_id=None, acks=ALL_IN_SYNC, timeout_ms=BROKER_TIMEOUT_MS, topic_data=[data])
        batch, count = (PRODUCER, self._made), len(self._waiting)

        def decided(answer: Message, machine: Machine) -> None:
            row = answer.responses[0].partition_responses[0]
            if not row.error_code:
                epoch = self._renewal.leading_epoch(machine, topic.topic_id)
                topic.acknowledged(WHERE, batch, count, row.base_offset, epoch, machine.life)

        def answered(answer: Message | None) -> None:
            self._next()
            if answer is not None and topic is self._topic:
                self._answered(topic, answer.responses[0].partition_responses[0].error_code)

        self._client.call(self._renewal.leader, api.PRODUCE, message, answered, decided=decided)

    def _answered(self, topic: Incarnation, code: int) -> None:
        is_done = code == ErrorCode.NONE or (code == ErrorCode.DUPLICATE_SEQUENCE_NUMBER and self._tries > 1)
        if is_done:
            self._sequence += len(self._waiting)
            self._waiting = []
        elif code in SEQUENCE_FAULTS and not topic.is_doomed:
            raise Violation(f"{where_of(topic.topic_id)}: sequence {self._sequence} is told {code}")


class RenewedConsumer:
    """Reads on from what is committed, and commits, for a group without members."""

    def __init__(self, renewal: Renewal, chance: random.Random, offsets_partitions: int) -> None:
        self._renewal = renewal
        self._clients = renewal.clients
        self._random = chance
        self._client = Client(renewal.clients, "renewed consumer", BY_ID)
        self._commits = offsets_partitions > 0
        self._home = TopicPartition(OFFSETS_TOPIC, partition_of(GROUP, offsets_partitions or 1))
        self._coordinator = -1
        self._topic: Incarnation | None = None
        self._offset = self._committed = NO_OFFSET
        """Where to read on; not known until it was asked for."""
        self._next()

    def _next(self) -> None:
        self._clients.clock.call_later(PAUSE_SECONDS * self._random.uniform(0.5, 1.5), self._go_on)

    def _go_on(self) -> None:
        renewal = self._renewal
        if renewal.current is not self._topic or self._random.random() < 0.02:
            self._topic = renewal.current
            self._offset = self._committed = NO_OFFSET if self._commits else 0
        topic = self._topic
        if topic is None:
            self._next()
        elif self._commits and self._coordinator < 0:
            self._find()
        elif self._offset == NO_OFFSET:
            self._ask_committed(topic)
        elif self._commits and self._offset != self._committed and self._random.random() < COMMIT_SHARE:
            self._commit(topic)
        elif renewal.leader >= 0:
            self._fetch(topic)
        else:
            self._next()

    def _find(self) -> None:
        def answered(answer: Message | None) -> None:
            if answer is not None and not answer.error_code:
                self._coordinator = answer.node_id
            self._next()

        broker = self._clients.some_broker(self._random)
        self._client.call(broker, api.FIND_COORDINATOR, Message(key=GROUP, key_type=0), answered)

    def _ask_committed(self, topic: Incarnation) -> None:
        asked = topic.commits(GROUP, WHERE).ask()
        one = Message(topic_id=topic.topic_id, partition_indexes=[0])
        group = Message(group_id=GROUP, member_id=None, member_epoch=-1, topics=[one])
        message = Message(groups=[group], require_stable=False)

        def decided(answer: Message, machine: Machine) -> None:
            row = _fetched_offset(answer)
            if row is None or topic.is_doomed:
                return
            by = machine.life
            number = None if row.committed_offset == NO_OFFSET else topic.number(row.metadata, by)
            epoch = self._clients.known_epoch(machine, self._home)
            topic.committed_told(GROUP, WHERE, asked, number, epoch, by)

        def answered(answer: Message | None) -> None:
            self._next()
            row = None if answer is None else _fetched_offset(answer)
            if row is None:
                self._coordinator = -1
            elif topic is self._topic:
                self._committed = row.committed_offset
                self._offset = max(0, row.committed_offset)

        self._client.call(self._coordinator, api.OFFSET_FETCH, message, answered, decided=decided)

    def _commit(self, topic: Incarnation) -> None:
        offset = self._offset
        number = topic.commits(GROUP, WHERE).begin(offset)
        row = Message(
            partition_index=0,
            committed_offset=offset,
            committed_leader_epoch=-1,
            committed_metadata=topic.metadata(number),
        )
        message = Message(
            group_id=GROUP,
            generation_id_or_member_epoch=-1,
            member_id="",
            group_instance_id=None,
            topics=[Message(topic_id=topic.topic_id, partitions=[row])],
        )

        def decided(answer: Message, machine: Machine) -> None:
            if not answer.topics[0].partitions[0].error_code:
                epoch = self._clients.known_epoch(machine, self._home)
                topic.committed(GROUP, WHERE, number, epoch, machine.life)

        def answered(answer: Message | None) -> None:
            self._next()
            if answer is None or answer.topics[0].partitions[0].error_code:
                self._coordinator = -1
            elif topic is self._topic:
                self._committed = offset

        self._client.call(self._coordinator, api.OFFSET_COMMIT, message, answered, decided=decided)

    def _fetch(self, topic: Incarnation) -> None:
        broker = self._renewal.leader
        message = fetch({WHERE: (self._offset, -1)})
        message.topics[0].topic_id = topic.topic_id

        def answered(answer: Message | None) -> None:
            self._next()
            if answer is None or topic is not self._topic or topic.is_doomed or not answer.responses:
                return
            row, by = answer.responses[0].partitions[0], self._clients.life(broker)
            if row.error_code == ErrorCode.NONE:
                self._offset = take(topic, WHERE, self._offset, row, by)
            elif row.error_code == ErrorCode.OFFSET_OUT_OF_RANGE:
                raise Violation(f"{where_of(topic.topic_id)}: {by} says that {self._offset} is out of range")

        self._client.call(broker, api.FETCH, message, answered)


def _fetched_offset(answer: Message) -> Message | None:
    """None: it is not answered for now."""
    group = answer.groups[0]
    if group.error_code or not group.topics or group.topics[0].partitions[0].error_code:
        return None
    row: Message = group.topics[0].partitions[0]
    return row
