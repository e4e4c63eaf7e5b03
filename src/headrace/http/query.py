"""GET /topics/{topic}/query: records by key, for topics with a key index (`key.index`).

    key, key_base64   the key, as text or as bytes
    from, to          only records with a time from `from` to before `to`, in ms
    count             most records in the answer (100)
    order             `newest` (default): by time, the newest first; `offset`: by partition and offset
    isolation         `committed` (default) or `uncommitted`, as in http.fetch
    partition         only this one; then `first` and `next` bound the offsets, `next` being outside

Of each partition the newest records (with `offset`: the first) are taken, up to the count. `more` tells that there are
others; asked for one partition, `searched` is the `next` (with `offset`: the `first`) to go on with. A single record by
its id, and records by time alone: GET /topics/{topic}/partitions/{partition}/records?offset=N or ?offset=@TIME&count=1.
Partitions that other brokers lead are in `elsewhere`.
"""

from __future__ import annotations

from typing import Any, Final

from headrace.errors import HeadraceError, InvalidRequest, NotLeader
from headrace.http.bodies import decode_base64
from headrace.http.description import (
    BASE64,
    OFFSET,
    PARTITION,
    TEXT,
    TRUTH,
    Answer,
    Operation,
    Parameter,
    choice,
    closed,
    list_of,
    number,
)
from headrace.http.description import COUNT as ANY_COUNT
from headrace.http.exchange import Exchange
from headrace.http.fetch import COUNT, COUNT_MAX, ISOLATION, JSON_MAX_BYTES, reads_committed, shown_record
from headrace.http.message import OFFSET_MAX, PARTITION_MAX, Request, Response, error_response, json_response
from headrace.http.produce import led_partition
from headrace.http.topic_fetch import PLACED_RECORD
from headrace.http.topics import known_topic
from headrace.partitions.partition import Partition
from headrace.records import kernel
from headrace.records.record import Record
from headrace.storage.keys.query import MOST, KeyQueryResult, Wanted

ORDERS: Final = ("newest", "offset")
TIME_MAX: Final = 1 << 61
QUERY: Final = Operation(
    "Records by key, of a topic with a key index",
    {
        200: Answer.json(
            "The records found.",
            closed(
                {"topic": TEXT, "records": list_of(PLACED_RECORD), "more": TRUTH, "elsewhere": ANY_COUNT},
                {"searched": OFFSET},
                title="KeyQueryResult",
            ),
        )
    },
    (
        Parameter("key", "The key, as text.", TEXT),
        Parameter("key_base64", "The key, as bytes.", BASE64),
        Parameter("from", "Only records not older than this, in ms.", number(-TIME_MAX, TIME_MAX)),
        Parameter("to", "Only records older than this, in ms.", number(-TIME_MAX, TIME_MAX)),
        Parameter("count", f"Most records in the answer ({COUNT}).", number(1, COUNT_MAX)),
        Parameter("order", "The newest first, or by partition and offset.", choice(*ORDERS)),
        ISOLATION,
        Parameter("partition", "Only this one.", PARTITION),
        Parameter("first", "With partition: only offsets from here on.", OFFSET),
        Parameter("next", "With partition: only offsets before.", OFFSET),
    ),
    errors=(404, 409, 503),
)


def handle(exchange: Exchange) -> Response | None:
    request, services = exchange.request, exchange.services
    topic = known_topic(services, request.parameters["topic"])
    index = request.integer("partition", -1, 0, PARTITION_MAX)
    if index < 0 and ("first" in request.query or "next" in request.query):
        raise InvalidRequest("query parameters first and next are offsets of one partition: give partition too")
    if index >= 0:
        led = [led_partition(services, topic, index)]
    else:
        found = [services.partitions.find(topic.name, state.index) for state in topic.partitions]
        led = [partition for partition in found if partition is not None]
    if not led:
        raise NotLeader(f"this broker leads no partition of {topic.name}; ask another")
    elsewhere = len(topic.partitions) - len(led) if index < 0 else 0
    PendingQuery(exchange, topic.name, led, elsewhere, _wanted(request, len(led))).start()
    return None


def _wanted(request: Request, partitions: int) -> Wanted:
    order = request.query.get("order", "newest")
    if order not in ORDERS:
        raise InvalidRequest(f"query parameter order: {order[:40]!r} is neither newest nor offset")
    return Wanted(
        key=_key(request),
        from_ms=request.integer("from", -MOST, -TIME_MAX, TIME_MAX),
        to_ms=request.integer("to", MOST, -TIME_MAX, TIME_MAX),
        first_offset=request.integer("first", 0, 0, OFFSET_MAX),
        next_offset=request.integer("next", MOST, 0, OFFSET_MAX),
        newest_first=order == "newest",
        max_records=request.integer("count", COUNT, 1, COUNT_MAX),
        max_bytes=max(1, JSON_MAX_BYTES // partitions),
        committed=reads_committed(request.query),
    )


def _key(request: Request) -> bytes:
    text, coded = request.query.get("key"), request.query.get("key_base64")
    if (text is None) == (coded is None):
        raise InvalidRequest("give the key once, as ?key= or as ?key_base64=")
    if text is not None:
        return text.encode(errors="surrogateescape")
    return decode_base64("query parameter key_base64", coded)


class PendingQuery:
    """One query until all partitions have answered."""

    def __init__(self, exchange: Exchange, topic: str, led: list[Partition], elsewhere: int, wanted: Wanted) -> None:
        self._exchange = exchange
        self._topic = topic
        self._led = led
        self._elsewhere = elsewhere
        self._wanted = wanted
        self._found: dict[int, KeyQueryResult] = {}

    def start(self) -> None:
        indexes = self._exchange.services.key_indexes
        for partition in self._led:
            index = partition.topic_partition.partition
            indexes.query(
                partition.topic_partition,
                self._wanted,
                partition.last_stable_offset if self._wanted.committed else partition.high_watermark,
                lambda found, index=index: self._answered(index, found),  # type: ignore[misc]
            )

    def _answered(self, index: int, found: KeyQueryResult | HeadraceError) -> None:
        if isinstance(found, HeadraceError):
            self._exchange.answer(error_response(found))
            return
        self._found[index] = found
        if len(self._found) == len(self._led):
            self._exchange.run(lambda _: self._answer())

    def _answer(self) -> Response:
        rows = [
            (index, record)
            for index, found in self._found.items()
            for batch in found.batches
            for record in kernel.records(batch)
        ]
        rows.sort(key=_newest_first if self._wanted.newest_first else _by_offset)
        chosen = rows[: self._wanted.max_records]
        answer: dict[str, Any] = {
            "topic": self._topic,
            "records": [{"partition": index, **shown_record(record)} for index, record in chosen],
            "more": len(chosen) < len(rows) or not all(found.done for found in self._found.values()),
            "elsewhere": self._elsewhere,
        }
        if "partition" in self._exchange.request.query:
            answer["searched"] = next(iter(self._found.values())).searched
        return json_response(answer)


def _newest_first(row: tuple[int, Record]) -> tuple[int, int, int]:
    return -row[1].timestamp_ms, row[0], -row[1].offset


def _by_offset(row: tuple[int, Record]) -> tuple[int, int]:
    return row[0], row[1].offset
