"""GET /topics/{topic}/records: records of all partitions of a topic that this broker leads, up to a count.

    cursor     where to go on: the `cursor` of the answer before
    offset     where to begin in partitions that the cursor does not name: `earliest` (default), `latest`, a number, or
               `@` and a time, as in http.fetch
    group      begin where this group has committed to, with `reset` as in http.fetch; then no cursor is needed
    count, max_bytes, wait_ms   as in http.fetch, for all partitions together
    isolation  as in http.fetch

Records of a partition come in its order, one partition after the other; the next request begins with another one.
`offsets` is what a group commits once it has dealt with these records: the body of POST /groups/{group}/offsets.
Partitions that other brokers lead are in `elsewhere`: ask there with the same cursor, which names those too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any, Final

from headrace.errors import InvalidRequest, NotLeader
from headrace.http import fetch
from headrace.http.description import COUNT, PARTITION, TEXT, Answer, Operation, Parameter, closed, list_of
from headrace.http.exchange import Exchange
from headrace.http.fetch import BatchRead, first_offset, has_data, shown_record, unpack
from headrace.http.groups import PLACE
from headrace.http.message import OFFSET_MAX, PARTITION_MAX, Response, json_response, whole_number
from headrace.http.produce import led_partition
from headrace.http.services import HttpServices
from headrace.http.topics import known_topic
from headrace.partitions.partition import Partition
from headrace.ports.disk import FileSlice
from headrace.records.isolation import AbortedFilter
from headrace.storage import refusal

PLACED_RECORD: Final = closed({"partition": PARTITION, **fetch.RECORD_FIELDS}, fetch.RECORD_BYTES, title="PlacedRecord")
FETCH: Final = Operation(
    "Records of all partitions that this broker leads",
    {
        200: Answer.json(
            "Records, and where to go on.",
            closed(
                {
                    "topic": TEXT,
                    "records": list_of(PLACED_RECORD),
                    "offsets": list_of(PLACE),
                    "cursor": TEXT,
                    "elsewhere": COUNT,
                },
                title="TopicRecords",
            ),
        )
    },
    (
        Parameter(
            "cursor",
            "Where to go on: the cursor of the answer before.",
            {"type": "string", "pattern": "^[0-9]{1,9}:[0-9]{1,18}(,[0-9]{1,9}:[0-9]{1,18})*$"},
        ),
        *fetch.FROM,
        *fetch.BOUNDS,
    ),
    errors=(404, 416, 422, 503),
)

_turn = count()
"""Which partition a request begins with: the next one with every request, so that none waits behind a busy one."""


def handle(exchange: Exchange) -> Response | None:
    request, services = exchange.request, exchange.services
    topic = known_topic(services, request.parameters["topic"])
    cursor = _cursor(request.query["cursor"]) if "cursor" in request.query else {}
    if cursor and "group" in request.query:
        raise InvalidRequest("give cursor or group: a group begins where it has committed to")
    fetch.check_start(request.query)
    led = _led(services, topic.name)
    if not led:
        raise NotLeader(f"this broker leads no partition of {topic.name}; ask another")
    positions = {
        index: cursor[index] if index in cursor else first_offset(services, partition, request.query)
        for index, partition in led.items()
    }
    waiting = TopicFetch(
        exchange,
        topic.name,
        cursor | positions,
        max_records=request.integer("count", fetch.COUNT, 1, fetch.COUNT_MAX),
        max_bytes=request.integer("max_bytes", fetch.MAX_BYTES, 1, fetch.JSON_MAX_BYTES),
        committed=fetch.reads_committed(request.query),
    )
    return waiting.start(request.integer("wait_ms", 0, 0, services.settings["request.timeout.max.ms"]))


def _cursor(given: str) -> dict[int, int]:
    """The offset of each partition, such as `0:12,1:7`."""
    positions: dict[int, int] = {}
    for part in given.split(","):
        index, _, offset = part.partition(":")
        place = whole_number("the partition in query parameter cursor", index, 0, PARTITION_MAX)
        if place in positions:
            raise InvalidRequest(f"query parameter cursor: partition {place} is named twice")
        positions[place] = whole_number("the offset in query parameter cursor", offset, 0, OFFSET_MAX)
    return positions


def _led(services: HttpServices, topic: str) -> dict[int, Partition]:
    states = known_topic(services, topic).partitions
    found = ((state.index, services.partitions.find(topic, state.index)) for state in states)
    return {index: partition for index, partition in found if partition is not None}


class TopicFetch:
    """One fetch from many partitions until its answer."""

    def __init__(
        self,
        exchange: Exchange,
        topic: str,
        positions: dict[int, int],
        *,
        max_records: int,
        max_bytes: int,
        committed: bool,
    ) -> None:
        self.answered = False
        self._exchange = exchange
        self._topic = topic
        self._positions = positions
        self._room = max_records
        self._room_bytes = max_bytes
        self._committed = committed
        self._rows: list[dict[str, Any]] = []
        self._to_read: list[int] = []
        self._arrived = False
        self._looping = False
        """Whether the loop of `_read_on` waits for what it asked for: then `_take` lets it go on, else it starts it."""

    def start(self, wait_ms: int) -> Response | None:
        services, led = self._exchange.services, _led(self._exchange.services, self._topic)
        committed = self._committed
        if not wait_ms or any(
            has_data(partition, self._positions[index], committed) for index, partition in led.items()
        ):
            return self._collect()
        for partition in led.values():
            partition.wait_for_data(self, committed=committed)
        services.partitions.deadlines.add(services.clock.now() + wait_ms / 1000, self)
        return None

    def grew(self, count: int) -> None:
        if count:
            self._go_on()

    def expire(self) -> None:
        self._go_on()

    def _go_on(self) -> None:
        self.answered = True
        self._exchange.run(lambda _: self._collect())

    def _collect(self) -> Response | None:
        self.answered = True
        led = sorted(index for index in _led(self._exchange.services, self._topic) if index in self._positions)
        first = next(_turn) % max(1, len(led))
        self._to_read = [*led[first:], *led[:first]]
        return self._read_on()

    def _read_on(self) -> Response | None:
        while self._to_read and self._room > 0 and self._room_bytes > 0:
            index = self._to_read.pop(0)
            self._arrived, self._looping = False, True
            try:
                find = partial(self._partition, index)
                BatchRead(
                    self._exchange,
                    find,
                    self._positions[index],
                    self._room_bytes,
                    partial(self._take, index),
                    committed=self._committed,
                ).collect()
            finally:
                self._looping = False
            if not self._arrived:
                return None
        return self._answer()

    def _partition(self, index: int) -> Partition:
        services = self._exchange.services
        return led_partition(services, known_topic(services, self._topic), index)

    def _take(
        self, index: int, partition: Partition, slices: Sequence[FileSlice], aborted: AbortedFilter
    ) -> Response | None:
        with refusal.reading(partition.topic_partition):
            records, after, taken_bytes = unpack(
                partition, slices, aborted, self._positions[index], self._room, self._room_bytes
            )
        self._rows += [{"partition": index, **shown_record(record)} for record in records]
        self._positions[index] = after
        self._room -= len(records)
        self._room_bytes -= taken_bytes
        self._arrived = True
        return None if self._looping else self._read_on()

    def _answer(self) -> Response:
        partitions = len(known_topic(self._exchange.services, self._topic).partitions)
        led = sorted(_led(self._exchange.services, self._topic).keys() & self._positions.keys())
        return json_response(
            {
                "topic": self._topic,
                "records": self._rows,
                "offsets": [
                    {"topic": self._topic, "partition": index, "offset": self._positions[index]} for index in led
                ],
                "cursor": ",".join(f"{index}:{self._positions[index]}" for index in sorted(self._positions)),
                "elsewhere": partitions - len(led),
            }
        )
