"""A simulated consumer without a group: reads one partition from its start, and asks for its bounds now and then.

It reads from the leader, and from followers as a share of its fetches says. What it has read, and the starts and ends
that it is told, are noted: see `history`.
"""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Final

from headrace.errors import CorruptBatch, ErrorCode
from headrace.records import kernel
from headrace.records.batch import batches, check
from headrace.simulator.connection import Client, Clients
from headrace.simulator.history import History, Violation
from headrace.simulator.leaders import Leaders
from headrace.storage.log import TopicPartition
from headrace.wire import api
from headrace.wire.message import Message

READ_BYTES: Final = 4096
WAIT_MS: Final = 200
BOUNDS_SHARE: Final = 0.15
BATCHES_KNOWN: Final = 1000
LATEST: Final = -1
EARLIEST: Final = -2
CONSUMER: Final = -1


def fetch(asked: dict[TopicPartition, tuple[int, int]]) -> Message:
    """A request for these partitions, each at an offset in an epoch."""
    topics: dict[str, list[Message]] = {}
    for where, (offset, epoch) in asked.items():
        topics.setdefault(where.topic, []).append(
            Message(
                partition=where.partition,
                current_leader_epoch=epoch,
                fetch_offset=offset,
                last_fetched_epoch=-1,
                log_start_offset=-1,
                partition_max_bytes=READ_BYTES,
            )
        )
    return Message(
        replica_id=CONSUMER,
        max_wait_ms=WAIT_MS,
        min_bytes=1,
        max_bytes=1 << 20,
        isolation_level=0,
        session_id=0,
        session_epoch=-1,
        topics=[Message(topic=topic, partitions=rows) for topic, rows in topics.items()],
        forgotten_topics_data=[],
        rack_id="",
    )


def fetched(answer: Message) -> dict[TopicPartition, Message]:
    return {
        TopicPartition(topic.topic, row.partition_index): row for topic in answer.responses for row in topic.partitions
    }


def bounds(where: TopicPartition, epoch: int, timestamp_ms: int) -> Message:
    row = Message(partition_index=where.partition, current_leader_epoch=epoch, timestamp=timestamp_ms)
    return Message(replica_id=CONSUMER, isolation_level=0, topics=[Message(name=where.topic, partitions=[row])])


def take(history: History, where: TopicPartition, offset: int, row: Message, by: str) -> int:
    """Note what a fetch at that offset has found; answers where to go on: before a batch whose CRC is wrong, as clients
    do."""
    before = offset
    for header, view in batches(memoryview(row.records or b"")):
        try:
            contents = _contents(bytes(view))
        except CorruptBatch:
            history.counts["rejected"] += 1
            break
        for at, content in contents:
            if at >= offset:
                history.consumed(where, at, content, by)
        offset = max(offset, header.next_offset)
    if offset > before:
        history.note(f"read {where} {before} to {offset} from {by}")
        history.counts["read"] += offset - before
    return offset


@lru_cache(BATCHES_KNOWN)
def _contents(batch: bytes) -> list[tuple[int, bytes]]:
    """Offsets and values; CorruptBatch if the CRC is wrong. Every consumer reads the same batches."""
    check(batch)
    return [(record.offset, record.value or b"") for record in kernel.records(batch)]


def is_deleted(history: History, where: TopicPartition, offset: int, row: Message, by: str) -> bool:
    """A broker says that the offset is out of range: only what was deleted may be."""
    if not history.may_lose(where, offset) and offset >= row.log_start_offset:
        raise Violation(f"{where}: {by} says that {offset} is out of range; its log begins at {row.log_start_offset}")
    return bool(offset < row.log_start_offset)


class Consumer:
    """Reads one partition."""

    def __init__(
        self, clients: Clients, where: TopicPartition, name: str, pause_seconds: float, follower_share: float
    ) -> None:
        self.offset = 0
        self.name = name
        self._clients = clients
        self._where = where
        self._pause_seconds = pause_seconds
        self._follower_share = follower_share
        self._random = random.Random(clients.random.random())
        self._client = Client(clients, name)
        self._leaders = Leaders(clients, self._client, (where.topic,), self._random)
        self._again()

    def _again(self, *, look: bool = False) -> None:
        if look:
            self._leaders.refresh()
        self._clients.clock.call_later(self._pause_seconds * self._random.uniform(0.5, 1.5), self._next)

    def _next(self) -> None:
        leader = self._leaders.leader(self._where)
        if leader is None:
            self._again(look=True)
        elif self._random.random() < BOUNDS_SHARE:
            self._ask_bounds(leader, self._random.choice((LATEST, EARLIEST)))
        elif self._random.random() < self._follower_share:
            self._fetch(self._clients.some_broker(self._random))
        else:
            self._fetch(leader)

    def _fetch(self, broker: int) -> None:
        where = self._where
        message = fetch({where: (self.offset, self._leaders.epoch(where))})
        self._client.call(broker, api.FETCH, message, lambda answer: self._fetched(broker, answer))

    def _fetched(self, broker: int, answer: Message | None) -> None:
        if answer is None:
            self._again(look=True)
            return
        history, where, by = self._clients.history, self._where, self._clients.life(broker)
        row = fetched(answer)[where]
        if row.error_code == ErrorCode.NONE:
            self.offset = take(history, where, self.offset, row, by)
        elif row.error_code == ErrorCode.OFFSET_OUT_OF_RANGE:
            gone = is_deleted(history, where, self.offset, row, by)
            self.offset = row.log_start_offset if gone else 0
        self._again(look=row.error_code != ErrorCode.NONE)

    def _ask_bounds(self, broker: int, timestamp_ms: int) -> None:
        """Neither bound falls, whoever answers."""
        where, history = self._where, self._clients.history
        floor = history.watched(where).ends if timestamp_ms == LATEST else history.watched(where).starts
        known = floor.known()

        def answered(answer: Message | None) -> None:
            row = None if answer is None else answer.topics[0].partitions[0]
            if row is not None and not row.error_code:
                what = "end" if timestamp_ms == LATEST else "start"
                history.bound(where, what, floor, known, row.leader_epoch, row.offset, self._clients.life(broker))
            self._again(look=row is None or row.error_code != ErrorCode.NONE)

        message = bounds(where, self._leaders.epoch(where), timestamp_ms)
        self._client.call(broker, api.LIST_OFFSETS, message, answered)
