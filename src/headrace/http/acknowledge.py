"""POST /groups/{group}/acknowledge: what became of records that were received (http.receive), by their handles.

    {"accept": [HANDLE, ...], "release": [HANDLE, ...], "reject": [HANDLE, ...], "renew": [HANDLE, ...]}

`accept`: done, and never delivered again. `release`: not done, another delivery may follow now. `reject`: can never be
done. `renew`: the lock lasts for its whole time again, and the handle with it. The answer has a place for each handle,
in this order; it comes when what it says is kept.

    {"results": [{"handle": ..., "acknowledged": "accept"}, {"handle": ..., "error": {...}}], "lock_ms": 30000}

Status 200 when all are kept, that of the first error when none is, 207 when some are. A handle is taken by the broker
that leads its partition, whoever gave it; another one names that broker (503). One whose lock has run out, or that was
used before, is refused (409); what is no handle of this group is 400, and then nothing is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final, NamedTuple

from headrace.errors import ErrorCode, HeadraceError, InvalidRecordState, InvalidRequest, NotLeader, UnknownPartition
from headrace.http import documents
from headrace.http.description import (
    COUNT,
    ERROR,
    FAULT,
    STATUSES,
    TEXT,
    Answer,
    Body,
    Operation,
    choice,
    closed,
    list_of,
)
from headrace.http.exchange import Exchange
from headrace.http.groups import checked_name
from headrace.http.handles import HANDLE_CHARACTERS, Handle, parse
from headrace.http.message import describe_error, json_response
from headrace.http.produce import led_partition
from headrace.queues.led_share_partition import LedSharePartition
from headrace.queues.messages import AcknowledgementBatch, AcknowledgeType, SharePartitionKey

HANDLES_MAX: Final = 10_000
TYPES: Final = {
    "accept": AcknowledgeType.ACCEPT,
    "release": AcknowledgeType.RELEASE,
    "reject": AcknowledgeType.REJECT,
    "renew": AcknowledgeType.RENEW,
}
_RESULTS: Final = closed(
    {
        "results": list_of(
            {
                "anyOf": [
                    closed({"handle": TEXT, "acknowledged": choice(*TYPES)}),
                    closed({"handle": TEXT, "error": FAULT}),
                ]
            }
        ),
        "lock_ms": COUNT,
    },
    title="Acknowledged",
)
_HANDLES: Final = list_of({"type": "string", "maxLength": HANDLE_CHARACTERS}, maxItems=HANDLES_MAX)
_NONE_KEPT: Final = {"anyOf": [ERROR, _RESULTS]}
ACKNOWLEDGE: Final = Operation(
    "Acknowledge received records by their handles",
    {
        200: Answer.json("All are kept.", _RESULTS),
        207: Answer.json("Some are kept.", _RESULTS),
        **{status: Answer.json(STATUSES[status], _NONE_KEPT) for status in (400, 404, 409, 503)},
    },
    body=Body.json(closed({}, dict.fromkeys(TYPES, _HANDLES), title="Acknowledgements")),
    errors=(415,),
)


class Said(NamedTuple):
    text: str
    handle: Handle
    how: str


def handle(exchange: Exchange) -> None:
    group = checked_name(exchange.request.parameters["group"])
    PendingAcknowledge(exchange, group, list(_read(exchange, group))).start()


def _read(exchange: Exchange, group: str) -> Iterator[Said]:
    fields = documents.read_object(exchange.request, tuple(TYPES))
    given = [(how, text) for how in TYPES for text in _handles(how, fields.get(how, []))]
    if not given:
        raise InvalidRequest(f"there is no handle in this request; it has {', '.join(TYPES)}, each a list of them")
    if len(given) > HANDLES_MAX:
        raise InvalidRequest(f"one request takes {HANDLES_MAX} handles; send more in further requests")
    if len({text for _, text in given}) != len(given):
        raise InvalidRequest("a handle is named twice in one request")
    for how, text in given:
        yield Said(text, parse(group, text), how)


def _handles(how: str, given: Any) -> list[str]:
    if not isinstance(given, list):
        raise InvalidRequest(f"{how} is not a list of handles")
    return [documents.text(f"a handle in {how}", each) for each in given]


class PendingAcknowledge:
    """The handles of one request until all of them have an answer. Each is taken for itself: one whose lock has run out
    does not take others with it."""

    def __init__(self, exchange: Exchange, group: str, said: list[Said]) -> None:
        self._exchange = exchange
        self._group = group
        self._said = said
        self._results: list[dict[str, Any]] = [{} for _ in said]
        self._error: HeadraceError | None = None
        self._kept = 0
        self._waiting = len(said)

    def start(self) -> None:
        for nth, said in enumerate(self._said):
            led = self._exchange.services.share.partitions.find(SharePartitionKey(self._group, *said.handle.place))
            if isinstance(led, int):
                self._done(nth, led)
            elif not led.when_loaded(partial(self._take, nth, led)):
                self._done(nth, ErrorCode.LEADER_NOT_AVAILABLE)

    def _take(self, nth: int, led: LedSharePartition) -> None:
        _, handle, how = self._said[nth]
        if led.core is not None and handle.offset < led.core.start_offset:
            self._done(
                nth, ErrorCode.INVALID_RECORD_STATE
            )  # final, and nobody's: a session would hear that all is well
            return
        batches = {handle.place: [AcknowledgementBatch(handle.offset, handle.offset, (int(TYPES[how]),))]}
        self._exchange.services.share.partitions.acknowledge(
            self._group, handle.member, batches, lambda codes: self._done(nth, codes[handle.place])
        )

    def _done(self, nth: int, code: int) -> None:
        text, handle, how = self._said[nth]
        if code == ErrorCode.NONE:
            self._results[nth] = {"handle": text, "acknowledged": how}
            self._kept += 1
        else:
            error = self._fault(handle, code)
            self._results[nth] = {"handle": text, "error": describe_error(error)}
            self._error = self._error or error
        self._waiting -= 1
        if not self._waiting:
            lock_ms = self._exchange.services.share.config_of(self._group).lock_ms
            self._exchange.answer(json_response({"results": self._results, "lock_ms": lock_ms}, self._status()))

    def _status(self) -> int:
        if self._error is None:
            return 200
        return 207 if self._kept else self._error.mapping.http_status

    def _fault(self, handle: Handle, code: int) -> HeadraceError:
        services = self._exchange.services
        topic = services.image().topics_by_id.get(handle.topic_id)
        if topic is None:
            return UnknownPartition("the topic of this handle is not there any more")
        if code in (ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION):
            try:
                led_partition(services, topic, handle.partition)
            except HeadraceError as error:
                return error
        if code in (ErrorCode.INVALID_RECORD_STATE, ErrorCode.INVALID_REQUEST):
            return InvalidRecordState(
                f"{topic.name}-{handle.partition} at offset {handle.offset} is not held by this handle: its lock has "
                "run out, or it was acknowledged before"
            )
        where = f"{topic.name}-{handle.partition} at offset {handle.offset}"
        return NotLeader(f"{where}: this could not be kept now, code {code}; try again")
