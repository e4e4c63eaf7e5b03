"""POST /topics/{topic}/records: append one record or many (see http.bodies), one batch for each partition.

The answer has a place for each record, in the order of the request:

    {"offsets": [{"partition": 0, "offset": 5}, {"partition": 1, "error": {"kind": ..., "message": ..., ...}}]}

Status 200 when all were appended, that of the error when none was, 207 when some were. A request that cannot be read
is refused whole. `acks` and `timeout_ms` mean what they mean to a Kafka producer.
"""

from __future__ import annotations

from itertools import count
from typing import Any, Final

from headrace.cluster.image import NO_LEADER, Topic
from headrace.errors import HeadraceError, InvalidRequest, NotLeader, PolicyViolation, UnknownPartition
from headrace.http import bodies
from headrace.http.bodies import Incoming
from headrace.http.description import (
    BASE64,
    ERROR,
    FAULT,
    PARTITION,
    STATUSES,
    TEXT,
    Answer,
    Body,
    Operation,
    Parameter,
    choice,
    closed,
    list_of,
    number,
)
from headrace.http.exchange import Exchange
from headrace.http.message import (
    BINARY,
    JSON,
    PARTITION_MAX,
    PLAIN,
    Response,
    UnknownContentType,
    content_type,
    describe_error,
    json_response,
)
from headrace.http.services import HttpServices
from headrace.http.topics import http_of
from headrace.partitions.partition import Partition
from headrace.records import kernel
from headrace.records.partitioner import partition_for_key

ACKS: Final = {"0": 0, "1": 1, "-1": -1, "all": -1}
TIMEOUT_MS: Final = 30_000

_PLACES: Final = closed(
    {
        "offsets": list_of(
            {
                "anyOf": [
                    closed({"partition": PARTITION, "offset": number(-1)}),
                    closed({"partition": PARTITION, "error": FAULT}),
                ]
            }
        )
    },
    title="Produced",
)
_NONE_APPENDED: Final = {"anyOf": [ERROR, _PLACES]}
PRODUCE: Final = Operation(
    "Append one record or many",
    {
        200: Answer.json("All were appended; where, in the order of the request.", _PLACES),
        207: Answer.json("Some were appended.", _PLACES),
        **{
            status: Answer.json(STATUSES[status], _NONE_APPENDED) for status in (400, 403, 404, 413, 422, 503, 504, 507)
        },
    },
    (
        Parameter("key", "The key of one record, as text.", TEXT),
        Parameter("key_base64", "The key of one record, as bytes.", BASE64),
        Parameter("partition", "Of one record; else its key chooses.", number(0, PARTITION_MAX)),
        Parameter("acks", "Whom to wait for, as a Kafka producer has it.", choice(*ACKS)),
        Parameter("timeout_ms", "How long to wait for the replicas.", number(0)),
        Parameter("X-Key", "The key of one record.", TEXT, "header"),
        Parameter("X-Key-Base64", "The key of one record, as bytes.", BASE64, "header"),
    ),
    Body(
        {
            BINARY: {"type": "string", "format": "binary"},
            PLAIN: TEXT,
            JSON: bodies.RECORDS,
            bodies.LINES: {"type": "string", "description": "Lines, each a Record in JSON."},
        }
    ),
    (415,),
)

_turn = count()
"""Records without a key go to one partition per request, the next one with every request."""


def handle(exchange: Exchange) -> Response | None:
    request, services = exchange.request, exchange.services
    if content_type(request) not in bodies.KINDS:
        taken = "application/octet-stream or text/plain for one record, application/json or application/x-ndjson"
        raise UnknownContentType(request, f"{taken} for many")
    acks = ACKS.get(request.query.get("acks", "-1"))
    if acks is None:
        raise InvalidRequest(f"query parameter acks: {request.query['acks'][:40]!r} is not one of {', '.join(ACKS)}")
    timeout_ms = request.integer("timeout_ms", TIMEOUT_MS, 0, services.settings["request.timeout.max.ms"])
    incoming = bodies.read(request, services.clock.wall_ms())
    name = request.parameters["topic"]
    topic = services.image().topics.get(name)
    if topic is None:
        exchange.answer_later(_create_then_append(exchange, name, incoming, acks, timeout_ms))
    else:
        PendingAppend(exchange, topic, incoming).start(acks, timeout_ms)
    return None


async def _create_then_append(
    exchange: Exchange, name: str, incoming: list[Incoming], acks: int, timeout_ms: int
) -> None:
    await exchange.services.ensure_topic(name)
    topic = exchange.services.image().topics.get(name)
    if topic is None:
        raise UnknownPartition(f"there is no topic {name[:249]!r}")
    PendingAppend(exchange, topic, incoming).start(acks, timeout_ms)


class PendingAppend:
    """The records of one request until all of them have an answer."""

    def __init__(self, exchange: Exchange, topic: Topic, incoming: list[Incoming]) -> None:
        if topic.internal:
            raise PolicyViolation(f"topic {topic.name!r} belongs to the broker; nobody else writes to it")
        self._exchange = exchange
        self._topic = topic
        self._incoming = incoming
        self._results: list[dict[str, Any]] = [{} for _ in incoming]
        self._error: HeadraceError | None = None
        self._appended = 0
        self._places = self._choose()
        self._waiting = len(self._places)

    def _choose(self) -> dict[int, list[int]]:
        """For each partition the places of its records in the request."""
        partition_count = len(self._topic.partitions)
        unkeyed = next(_turn) % partition_count
        places: dict[int, list[int]] = {}
        for place, (partition, (_, key, _, _)) in enumerate(self._incoming):
            if partition is None:
                partition = unkeyed if key is None else partition_for_key(key, partition_count)
            places.setdefault(partition, []).append(place)
        return places

    def start(self, acks: int, timeout_ms: int) -> None:
        partitions = self._exchange.services.partitions
        for index, places in self._places.items():
            try:
                partition = led_partition(self._exchange.services, self._topic, index)
                batch = kernel.build([self._incoming[place].record for place in places])
            except HeadraceError as error:
                self._done(index, error, -1)
                continue
            partitions.submit(
                partition,
                batch,
                acks,
                timeout_ms,
                lambda error, offset, index=index: self._done(index, error, offset),  # type: ignore[misc]
                recompress=True,
            )
        partitions.end_turn()

    def _done(self, index: int, error: HeadraceError | None, base_offset: int) -> None:
        for nth, place in enumerate(self._places[index]):
            if error is None:
                self._results[place] = {"partition": index, "offset": base_offset + nth}
                self._appended += 1
            else:
                self._results[place] = {"partition": index, "error": describe_error(error)}
        self._error = self._error or error
        self._waiting -= 1
        if not self._waiting:
            self._exchange.answer(json_response({"offsets": self._results}, self._status()))

    def _status(self) -> int:
        if self._error is None:
            return 200
        return 207 if self._appended else self._error.mapping.http_status


def led_partition(services: HttpServices, topic: Topic, index: int) -> Partition:
    """The partition, if this broker leads it."""
    if not 0 <= index < len(topic.partitions):
        raise UnknownPartition(f"topic {topic.name!r} has partitions 0 to {len(topic.partitions) - 1}, not {index}")
    partition = services.partitions.find(topic.name, index)
    if partition is not None:
        return partition
    leader = topic.partitions[index].leader
    if leader == NO_LEADER:
        raise NotLeader(f"{topic.name}-{index} has no leader now; try again")
    raise NotLeader(f"{topic.name}-{index} is led by broker {leader}; ask {http_of(services, leader)}")
