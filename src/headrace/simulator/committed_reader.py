"""A simulated consumer that reads what is committed (isolation level 1), as clients do: the broker sends everything
below the last stable offset with a list of aborted transactions, and the client leaves out what belongs to them.
"""

from __future__ import annotations

import random
from typing import Final

from headrace.errors import CorruptBatch, ErrorCode
from headrace.records import kernel
from headrace.records.batch import batches, check
from headrace.records.control import read_marker
from headrace.simulator.connection import Client, Clients
from headrace.simulator.consumer import BOUNDS_SHARE, LATEST, bounds, fetch, fetched, is_deleted
from headrace.simulator.contents import parse_content
from headrace.simulator.leaders import Leaders
from headrace.simulator.registers import Floor
from headrace.simulator.transaction_history import CommittedRecord, TransactionHistory
from headrace.storage.log import TopicPartition
from headrace.wire import api
from headrace.wire.message import Message

READ_COMMITTED: Final = 1
PAUSE_SECONDS: Final = 0.05


def fetch_committed(asked: dict[TopicPartition, tuple[int, int]]) -> Message:
    message = fetch(asked)
    message.isolation_level = READ_COMMITTED
    return message


def committed_records(row: Message, offset: int) -> tuple[list[CommittedRecord], int]:
    """The records that a fetch at that offset has found, without those of aborted transactions, and where to go on."""
    aborted = sorted((each.first_offset, each.producer_id) for each in row.aborted_transactions or ())
    out: set[int] = set()
    found: list[CommittedRecord] = []
    for header, view in batches(memoryview(row.records or b"")):
        try:
            check(view)
        except CorruptBatch:
            break
        while aborted and aborted[0][0] < header.next_offset:
            out.add(aborted.pop(0)[1])
        marker = read_marker(view, header) if header.is_control else None
        if marker is not None and not marker.committed:
            out.discard(header.producer_id)
        elif not header.is_control and not (header.is_transactional and header.producer_id in out):
            for record in kernel.records(view):
                if record.offset >= offset:
                    found.append((record.offset, *parse_content(record.value or b"")))
        offset = max(offset, header.next_offset)
    return found, offset


class CommittedReader:
    """Reads one partition from its start, of leaders and followers."""

    def __init__(
        self,
        clients: Clients,
        judge: TransactionHistory,
        where: TopicPartition,
        chance: random.Random,
        follower_share: float,
    ) -> None:
        self.offset = 0
        self.name = f"committed reader of {where}"
        self._clients = clients
        self._judge = judge
        self._where = where
        self._random = chance
        self._follower_share = follower_share
        self._ends = Floor()
        self._client = Client(clients, self.name)
        self._leaders = Leaders(clients, self._client, (where.topic,), chance)
        judge.add_reader(where, self.name)
        self._again()

    def _again(self, *, look: bool = False) -> None:
        if look:
            self._leaders.refresh()
        self._clients.clock.call_later(PAUSE_SECONDS * self._random.uniform(0.5, 1.5), self._next)

    def _next(self) -> None:
        leader = self._leaders.leader(self._where)
        if leader is None:
            self._again(look=True)
        elif self._random.random() < BOUNDS_SHARE:
            self._ask_end(leader)
        elif self._random.random() < self._follower_share:
            self._fetch(self._clients.some_broker(self._random))
        else:
            self._fetch(leader)

    def _fetch(self, broker: int) -> None:
        where = self._where
        message = fetch_committed({where: (self.offset, self._leaders.epoch(where))})
        self._client.call(broker, api.FETCH, message, lambda answer: self._fetched(broker, answer))

    def _fetched(self, broker: int, answer: Message | None) -> None:
        if answer is None:
            self._again(look=True)
            return
        where, by = self._where, self._clients.life(broker)
        row = fetched(answer)[where]
        if row.error_code == ErrorCode.NONE:
            self._judge.stable_told(where, row.last_stable_offset, row.high_watermark, by)
            found, self.offset = committed_records(row, self.offset)
            for record in found:
                self._judge.read(where, record, self.name, by)
        elif row.error_code == ErrorCode.OFFSET_OUT_OF_RANGE:
            gone = is_deleted(self._clients.history, where, self.offset, row, by)
            self.offset = row.log_start_offset if gone else 0
        self._again(look=row.error_code != ErrorCode.NONE)

    def _ask_end(self, broker: int) -> None:
        """What was told as the end of what is decided never falls, whoever answers."""
        where, history, known = self._where, self._clients.history, self._ends.known()

        def answered(answer: Message | None) -> None:
            row = None if answer is None else answer.topics[0].partitions[0]
            if row is not None and not row.error_code:
                by = self._clients.life(broker)
                history.bound(where, "stable end", self._ends, known, row.leader_epoch, row.offset, by)
            self._again(look=row is None or row.error_code != ErrorCode.NONE)

        message = bounds(where, self._leaders.epoch(where), LATEST)
        message.isolation_level = READ_COMMITTED
        self._client.call(broker, api.LIST_OFFSETS, message, answered)
