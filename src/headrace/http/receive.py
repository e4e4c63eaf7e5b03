"""POST /groups/{group}/receive: records of a topic for a share group (KIP-932), each with a handle.

    topic      whose records
    count      most records in the answer (10); `max_bytes` bounds the bytes of the batches that hold them (1 MiB)
    wait_ms    how long to wait for the first record (0)

Each record is locked for the group's lock duration, `lock_ms` in the answer: until then it goes to nobody else, and who
received it says by its handle what became of it (http.acknowledge). Then it is delivered again, as often as the group's
settings allow. Records are those of partitions that this broker leads; those of other brokers are counted in
`elsewhere`: ask there too. Members that speak Kafka share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from headrace.cluster.image import Topic
from headrace.errors import InvalidRequest, NotLeader, PolicyViolation
from headrace.http import fetch, share_states
from headrace.http.description import COUNT as NUMBER
from headrace.http.description import PARTITION, TEXT, Answer, Operation, Parameter, closed, list_of, number
from headrace.http.exchange import Exchange
from headrace.http.groups import checked_name
from headrace.http.handles import SECRET_BYTES, Handle, member_of
from headrace.http.message import Response, json_response
from headrace.http.produce import led_partition
from headrace.http.topics import known_topic
from headrace.queues.messages import AcknowledgementBatch, AcknowledgeType, Acquired, AcquireRequest, TopicIdPartition
from headrace.records import kernel
from headrace.records.batch import batches
from headrace.records.record import Record
from headrace.storage import refusal
from headrace.storage.page_cache import are_warm

COUNT: Final = 10
COUNT_MAX: Final = 1000
MAX_BYTES: Final = 1 << 20

RECEIVED: Final = closed(
    {"handle": TEXT, "partition": PARTITION, "delivery_count": number(1), **fetch.RECORD_FIELDS},
    fetch.RECORD_BYTES,
    title="ReceivedRecord",
)
RECEIVE: Final = Operation(
    "Receive records for a share group, each with a handle to acknowledge it by",
    {
        200: Answer.json(
            "Records, locked for so long; none if none came in time.",
            closed(
                {"group": TEXT, "topic": TEXT, "records": list_of(RECEIVED), "lock_ms": NUMBER, "elsewhere": NUMBER},
                title="Received",
            ),
        )
    },
    (
        Parameter("topic", "Whose records.", TEXT, required=True),
        Parameter("count", f"Most records in the answer ({COUNT}).", number(1, COUNT_MAX)),
        Parameter("max_bytes", f"Most bytes of the batches that hold them ({MAX_BYTES}).", number(1)),
        Parameter("wait_ms", "How long to wait for the first record (0).", number(0)),
    ),
    errors=(403, 404, 409, 422, 503),
)


def handle(exchange: Exchange) -> None:
    request, services = exchange.request, exchange.services
    group = checked_name(request.parameters["group"])
    if "topic" not in request.query:
        raise InvalidRequest("give the topic whose records are to be received: ?topic=")
    topic = known_topic(services, request.query["topic"])
    if topic.internal:
        raise PolicyViolation(f"topic {topic.name!r} belongs to the broker; it is not for share groups")
    led = [state.index for state in topic.partitions if services.partitions.find(topic.name, state.index) is not None]
    if not led:
        raise NotLeader(f"this broker leads no partition of {topic.name}; ask another")
    receive = Receive(
        exchange,
        group,
        topic,
        led,
        max_records=request.integer("count", COUNT, 1, COUNT_MAX),
        max_bytes=request.integer("max_bytes", MAX_BYTES, 1, fetch.JSON_MAX_BYTES),
        wait_ms=request.integer("wait_ms", 0, 0, services.settings["request.timeout.max.ms"]),
    )
    if share_states.unloaded(services, group, topic, led):
        exchange.answer_later(receive.load())
    else:
        receive.start()


class Receive:
    """One receive until its answer; it waits as a share fetch of the Kafka front end does."""

    def __init__(
        self,
        exchange: Exchange,
        group: str,
        topic: Topic,
        led: Sequence[int],
        *,
        max_records: int,
        max_bytes: int,
        wait_ms: int,
    ) -> None:
        self.answered = False
        """It waits for nothing more that could be acquired."""
        self._exchange = exchange
        self._group = group
        self._topic = topic
        self._led = led
        self._places = [(topic.id, index) for index in led]
        self._secret = exchange.services.share.draw(SECRET_BYTES)
        self._member = member_of(self._secret)
        self._asked = AcquireRequest(group, self._member, max_records, max_bytes, max_bytes, record_limit=True)
        self._wait_ms = wait_ms
        self._timed = self._acquiring = False

    async def load(self) -> None:
        await share_states.load(self._exchange.services, self._group, self._topic, self._led)
        self.start()

    def start(self) -> None:
        self._acquiring = True
        self._exchange.services.share.partitions.acquire(self._asked, self._places, self._acquired)

    def _acquired(self, found: dict[TopicIdPartition, Acquired]) -> None:
        self._acquiring = False
        services = self._exchange.services
        records = {place: acquired for place, acquired in found.items() if acquired.records}
        if records or not self._wait_ms or self._exchange.gone:
            self.answered = True
            self._warm(found, records)
            return
        services.share.partitions.wait(self._group, self._places, self)
        if not self._timed:
            self._timed = True
            services.partitions.deadlines.add(services.clock.now() + self._wait_ms / 1000, self)

    def records_available(self) -> None:
        if not self.answered and not self._acquiring:
            self.start()

    def expire(self) -> None:
        self._wait_ms = 0
        if not self._acquiring and not self.answered:
            self.answered = True
            self._exchange.run(lambda _: self._answer({}, {}))

    def _warm(self, found: dict[TopicIdPartition, Acquired], records: dict[TopicIdPartition, Acquired]) -> None:
        if self._exchange.gone:
            self._acknowledge(
                {
                    place: [_batch(first, last, AcknowledgeType.RELEASE) for first, last, _ in acquired.records]
                    for place, acquired in records.items()
                }
            )
            return
        slices = [piece for acquired in records.values() for piece in acquired.slices]

        def answer() -> None:
            self._exchange.run(lambda _: self._answer(found, records))

        if are_warm(self._exchange.services.disk, slices, answer):
            answer()

    def _answer(self, found: dict[TopicIdPartition, Acquired], records: dict[TopicIdPartition, Acquired]) -> Response:
        services = self._exchange.services
        refused = [(index, acquired.error_code) for (_, index), acquired in found.items() if acquired.error_code]
        if refused and not records:
            led_partition(services, known_topic(services, self._topic.name), refused[0][0])
            raise NotLeader(f"{self._topic.name}-{refused[0][0]} cannot be read now, code {refused[0][1]}; try again")
        rows: list[dict[str, Any]] = []
        gaps: dict[TopicIdPartition, list[AcknowledgementBatch]] = {}
        for place, acquired in records.items():
            delivered = self._unpack(place[1], acquired)
            rows += [
                {
                    "handle": Handle(*place, record.offset, self._secret).text(self._group),
                    "partition": place[1],
                    "delivery_count": count,
                    **fetch.shown_record(record),
                }
                for record, count in delivered
            ]
            missing = _gaps(acquired, {record.offset for record, _ in delivered})
            if missing:
                gaps[place] = missing
        self._acknowledge(gaps)
        return json_response(
            {
                "group": self._group,
                "topic": self._topic.name,
                "records": rows,
                "lock_ms": services.share.config_of(self._group).lock_ms,
                "elsewhere": len(known_topic(services, self._topic.name).partitions) - len(self._led),
            }
        )

    def _unpack(self, index: int, acquired: Acquired) -> list[tuple[Record, int]]:
        """The records that were acquired, each with its delivery count."""
        counts = {offset: count for first, last, count in acquired.records for offset in range(first, last + 1)}
        partition = led_partition(self._exchange.services, self._topic, index)
        with refusal.reading(partition.topic_partition):
            view = memoryview(b"".join([piece.read() for piece in acquired.slices]))
            found = [
                (record, counts[record.offset])
                for header, batch in batches(view)
                if not header.is_control
                for record in kernel.records(batch)
                if record.offset in counts
            ]
        partition.traffic.sent(len(found), acquired.size_bytes)
        return found

    def _acknowledge(self, said: dict[TopicIdPartition, list[AcknowledgementBatch]]) -> None:
        """In the name of who received; if it cannot be kept, the locks end with their time."""
        self._exchange.services.share.partitions.acknowledge(self._group, self._member, said, lambda _codes: None)


def _batch(first: int, last: int, type: AcknowledgeType) -> AcknowledgementBatch:
    return AcknowledgementBatch(first, last, (int(type),))


def _gaps(acquired: Acquired, seen: set[int]) -> list[AcknowledgementBatch]:
    """Offsets that no record has."""
    return [
        _batch(offset, offset, AcknowledgeType.GAP)
        for first, last, _ in acquired.records
        for offset in range(first, last + 1)
        if offset not in seen
    ]
