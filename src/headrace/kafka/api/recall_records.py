"""RecallRecords, version 0, Headrace's own: delayed records are not to be delivered. See `wire.own_schema` for its
fields.

The answer waits until every recall is below the high watermark, so that whoever leads next knows of it too.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from headrace.errors import ErrorCode, HeadraceError, InvalidRequest
from headrace.kafka import leader_lookup
from headrace.kafka.connection import Request
from headrace.wire.message import Message

RECORDS_MAX: Final = 1000
"""In one request."""


def handle(request: Request) -> None:
    _Pending(request).start()


class _Pending:
    """One request until each of its records has an answer."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._asked = request.body.records
        self._answers: dict[int, Message] = {}

    def start(self) -> None:
        if not self._asked:
            self._request.reply(Message(throttle_time_ms=0, records=[]))
        for place, asked in enumerate(self._asked):
            try:
                if len(self._asked) > RECORDS_MAX:
                    raise InvalidRequest(f"{len(self._asked)} records; {RECORDS_MAX} can be recalled at once")
                services = self._request.services
                partition = leader_lookup.led_partition(services, asked.topic, asked.partition_index)
                services.delays.recall(partition, asked.offset, partial(self._answered, place))
            except HeadraceError as error:
                self._answered(place, error)

    def _answered(self, place: int, error: HeadraceError | None) -> None:
        asked = self._asked[place]
        self._answers[place] = Message(
            topic=asked.topic,
            partition_index=asked.partition_index,
            offset=asked.offset,
            error_code=ErrorCode.NONE if error is None else error.kafka_code,
            error_message=None if error is None else str(error),
        )
        if len(self._answers) == len(self._asked):
            ordered = [self._answers[nth] for nth in range(len(self._asked))]
            self._request.reply(Message(throttle_time_ms=0, records=ordered))
