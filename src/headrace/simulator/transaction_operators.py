"""Operators of a simulated cluster with transactions: one deletes a topic that is written to in them and makes it anew,
time and again; one ends what hangs in a partition that was led by who lacked records, as `headrace transaction
find-hanging` and `abort` do.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any, Final

from headrace.simulator.connection import VERSIONS, Client, Clients
from headrace.simulator.leaders import Leaders
from headrace.storage.log import TopicPartition
from headrace.wire import api
from headrace.wire.message import Message

PASSING: Final = TopicPartition("passing", 0)
"""Of the topic that is deleted."""
REPLICAS: Final = 3
OVERRIDES: Final = {
    "durability": "disk",
    "min.insync.replicas": "2",
    "segment.bytes": "2048",
    "file.delete.delay.ms": "100",
}
LASTS_SECONDS: Final = (0.2, 1.2)
AWAY_SECONDS: Final = (0.0, 0.3)
PAUSE_SECONDS: Final = 0.1
TIMEOUT_MS: Final = 1000
VERSIONS_OF_OPERATORS: Final = VERSIONS | {api.DESCRIBE_PRODUCERS: 0, api.WRITE_TXN_MARKERS: 1}


class _Operator:
    def __init__(self, clients: Clients, name: str, chance: random.Random) -> None:
        self._clients = clients
        self._random = chance
        self._client = Client(clients, name, VERSIONS_OF_OPERATORS)

    async def _ask(self, broker: int, api_key: int, message: Message) -> Any:
        """The answer, or None if there is none."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._client.call(broker, api_key, message, answer.set_result)
        return await answer


class Renewer(_Operator):
    """Answers are not looked at: whether the topic is there then is what its writers have to find out."""

    is_stopped = False

    async def renew(self) -> None:
        while True:
            configs = [Message(name=name, value=value) for name, value in OVERRIDES.items()]
            topic = Message(
                name=PASSING.topic, num_partitions=1, replication_factor=REPLICAS, assignments=[], configs=configs
            )
            message = Message(topics=[topic], timeout_ms=TIMEOUT_MS, validate_only=False)
            await self._ask(self._clients.some_broker(self._random), api.CREATE_TOPICS, message)
            await asyncio.sleep(self._random.uniform(*LASTS_SECONDS))
            if self.is_stopped:
                return
            doomed = Message(name=PASSING.topic, topic_id=bytes(16))
            message = Message(topics=[doomed], timeout_ms=TIMEOUT_MS)
            answer = await self._ask(self._clients.some_broker(self._random), api.DELETE_TOPICS, message)
            if answer is not None and not answer.responses[0].error_code:
                self._clients.history.note(f"{PASSING.topic} is deleted")
                self._clients.history.counts["passing topics deleted"] += 1
            await asyncio.sleep(self._random.uniform(*AWAY_SECONDS))


class HangingEnder(_Operator):
    """When no transaction is open for any coordinator: what is open in a partition hangs."""

    async def end(self, where: TopicPartition) -> None:
        leaders = Leaders(self._clients, self._client, (where.topic,), self._random)
        left = True
        while left:
            await asyncio.sleep(PAUSE_SECONDS)
            leader = leaders.leader(where)
            left = leader is None or await self._end_all(leader, where)
            if left:
                leaders.refresh()

    async def _end_all(self, leader: int, where: TopicPartition) -> bool:
        """True: something may be left."""
        asked = Message(topics=[Message(name=where.topic, partition_indexes=[where.partition])])
        answer = await self._ask(leader, api.DESCRIBE_PRODUCERS, asked)
        row = None if answer is None else answer.topics[0].partitions[0]
        if row is None or row.error_code:
            return True
        hanging = [each for each in row.active_producers if each.current_txn_start_offset >= 0]
        for each in hanging:
            self._clients.history.note(f"{where}: ends what hangs of producer {each.producer_id}")
            self._clients.history.counts["hanging transactions ended"] += 1
            marker = Message(
                producer_id=each.producer_id,
                producer_epoch=each.producer_epoch,
                transaction_result=False,
                coordinator_epoch=max(0, each.coordinator_epoch),
                topics=[Message(name=where.topic, partition_indexes=[where.partition])],
            )
            await self._ask(leader, api.WRITE_TXN_MARKERS, Message(markers=[marker]))
        return bool(hanging)
