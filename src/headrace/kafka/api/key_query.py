"""KeyQuery, versions 0 to 1, Headrace's own: records by key, through the key index. 1: the isolation level; 0 reads
what is committed. See `wire.own_schema` for its fields.
"""

from __future__ import annotations

from typing import Final

from headrace.errors import ErrorCode, HeadraceError
from headrace.kafka import leader_lookup
from headrace.kafka.connection import Request
from headrace.records.isolation import Isolation
from headrace.storage.keys.builder import no_index
from headrace.storage.keys.query import KeyQueryResult, Wanted
from headrace.wire.message import Message

ISOLATION_FROM: Final = 1
RECORDS_MAX: Final = 100_000
PARTITIONS_MAX: Final = 10_000


def handle(request: Request) -> None:
    PendingQuery(request).start()


class PendingQuery:
    """One request until all its partitions have an answer."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._asked = request.body.partitions[:PARTITIONS_MAX]
        self._answers: dict[int, Message] = {}

    def start(self) -> None:
        if not self._asked:
            self._request.reply(Message(throttle_time_ms=0, partitions=[]))
        for place, asked in enumerate(self._asked):
            try:
                self._ask(place, asked)
            except HeadraceError as error:
                self._answered(place, Message(error_code=error.kafka_code, error_message=str(error)))

    def _ask(self, place: int, asked: Message) -> None:
        services, body = self._request.services, self._request.body
        partition = leader_lookup.led_partition(services, body.topic, asked.partition_index)
        keys = services.key_indexes.get(partition.topic_partition)
        if keys is None:
            raise no_index(body.topic)
        positions = {"high_watermark": partition.high_watermark, "indexed_offset": keys.next_offset}
        if body.max_records <= 0:
            self._answered(place, Message(error_code=ErrorCode.NONE, **positions))
            return
        committed = self._request.version < ISOLATION_FROM or body.isolation_level == Isolation.COMMITTED
        limit = partition.last_stable_offset if committed else partition.high_watermark
        most_bytes = services.settings["fetch.max.bytes"] // len(self._asked)
        wanted = Wanted(
            key=bytes(body.key),
            from_ms=body.from_ms,
            to_ms=body.to_ms,
            first_offset=asked.first_offset,
            next_offset=asked.next_offset,
            newest_first=body.newest_first,
            max_records=min(body.max_records, RECORDS_MAX),
            max_bytes=max(1, min(body.max_bytes, most_bytes)),
            committed=committed,
        )

        def answered(found: KeyQueryResult | HeadraceError) -> None:
            if isinstance(found, HeadraceError):
                self._answered(place, Message(error_code=found.kafka_code, error_message=str(found), **positions))
            else:
                records = b"".join(found.batches)
                answer = Message(searched=found.searched, done=found.done, records=records, **positions)
                self._answered(place, answer)

        services.key_indexes.query(partition.topic_partition, wanted, limit, answered)

    def _answered(self, place: int, answer: Message) -> None:
        answer.partition_index = self._asked[place].partition_index
        self._answers[place] = answer
        if len(self._answers) == len(self._asked):
            ordered = [self._answers[nth] for nth in range(len(self._asked))]
            self._request.reply(Message(throttle_time_ms=0, partitions=ordered))
