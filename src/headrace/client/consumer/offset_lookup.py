"""Offsets of moments, asked of the leaders of many partitions at once, again and again until all are found.

A moment is a time in ms, `EARLIEST` or `LATEST`; a time after the last record has the offset of the end. Where the end
is depends on the isolation: a reader of committed records gets no further than the first undecided one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from headrace.client.connection.connections import CONTROL, ConnectionPool
from headrace.client.connection.reactor import Backoff
from headrace.client.consumer.group_protocol import TopicPartition
from headrace.client.errors import Refusal, is_retriable
from headrace.client.fetch_requests import LATEST, offsets_request
from headrace.errors import ErrorCode, HeadraceError
from headrace.records.isolation import Isolation
from headrace.wire import api as apis
from headrace.wire.message import Message

ANSWER_WITHIN_S: Final = 30.0


class OffsetLookup:
    """One question. `on_found` hears of each place as it is found, `on_failed` of each that never will be.

    Before it asks again it leaves out the places that are no longer `wanted`.
    """

    def __init__(
        self,
        pool: ConnectionPool,
        moments: Mapping[TopicPartition, int],
        on_found: Callable[[TopicPartition, int], None],
        on_failed: Callable[[TopicPartition, HeadraceError], None],
        wanted: Callable[[TopicPartition], bool] = lambda _: True,
        *,
        isolation: Isolation = Isolation.UNCOMMITTED,
    ) -> None:
        self._isolation = isolation
        self._pool = pool
        self._wanted = dict(moments)
        self._on_found = on_found
        self._on_failed = on_failed
        self._is_wanted = wanted
        self._under_way = 0
        self._backoff = Backoff()
        self._ask()

    def cancel(self) -> None:
        self._wanted.clear()

    def _ask(self) -> None:
        self._wanted = {place: moment for place, moment in self._wanted.items() if self._is_wanted(place)}
        if not self._wanted:
            return
        by_leader: dict[int, list[TopicPartition]] = {}
        for place in self._wanted:
            leader = self._pool.metadata.leader(*place)
            if leader is None:
                self._pool.metadata.stale(place[0])
            else:
                by_leader.setdefault(leader, []).append(place)
        for leader, places in by_leader.items():
            self._under_way += 1
            try:
                connection = self._pool.broker(leader, CONTROL)
            except HeadraceError as error:
                # Not at once: before all are asked, the first to fail would count as the last.
                self._pool.reactor.call_soon(
                    lambda places=places, error=error: self._on_answer(places, error)  # type: ignore[misc]
                )
                continue
            connection.ask(
                apis.LIST_OFFSETS,
                offsets_request(
                    {place: self._wanted[place] for place in places if place in self._wanted},
                    int(ANSWER_WITHIN_S * 1000),
                    self._isolation,
                ),
                lambda answer, places=places: self._on_answer(places, answer),  # type: ignore[misc]
                timeout_s=ANSWER_WITHIN_S,
            )
        if not self._under_way:
            self._later()

    def _on_answer(self, places: list[TopicPartition], answer: Message | HeadraceError) -> None:
        self._under_way -= 1
        if isinstance(answer, HeadraceError):
            if not answer.mapping.retriable:
                for place in places:
                    self._fail(place, answer)
            for topic in {topic for topic, _ in places}:
                self._pool.metadata.stale(topic)
        else:
            for topic in answer.topics:
                for partition in topic.partitions:
                    self._read((topic.name, partition.partition_index), partition)
        if not self._under_way:
            self._later()

    def _read(self, place: TopicPartition, partition: Message) -> None:
        if place not in self._wanted:
            return
        code, offset = partition.error_code, partition.offset
        if code != ErrorCode.NONE:
            if not is_retriable(code):
                self._fail(place, Refusal(code, f"offsets of {place[0]}-{place[1]}"))
            self._pool.metadata.stale(place[0])
        elif offset < 0 and self._wanted[place] >= 0:
            self._wanted[place] = LATEST
            self._backoff.next_s = 0.0
        else:
            del self._wanted[place]
            self._on_found(place, max(offset, 0))

    def _fail(self, place: TopicPartition, error: HeadraceError) -> None:
        if self._wanted.pop(place, None) is not None:
            self._on_failed(place, error)

    def _later(self) -> None:
        if not self._wanted:
            return
        reactor = self._pool.reactor
        reactor.call_at(reactor.now() + self._backoff.take(), self._ask)
