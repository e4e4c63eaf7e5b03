"""ElectLeaders, versions 0 to 2. 1: preferred or unclean, an error for the whole; 2: flexible.

Preferred (0): the first replica leads again, if it is in sync. Unclean (1): a partition without a leader gets one from
whatever replica knows the most, and what that one lacks is lost. The controller elects; the answer waits for it.
Without a list of partitions all are meant, and those that need no election are left out of the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from headrace.cluster.controller_state import PREFERRED, UNCLEAN
from headrace.cluster.image import PartitionState
from headrace.cluster.orders import carried_out, election_needed, plan_elections
from headrace.errors import ErrorCode, HeadraceError, RequestTimedOut
from headrace.kafka.connection import Request
from headrace.placement.plans import Where
from headrace.wire.message import Message

KINDS: Final = {0: PREFERRED, 1: UNCLEAN}
UNCLEAN_FROM: Final = 1

Result = tuple[int, str | None]


def handle(request: Request) -> None:
    request.reply_later(_elect(request))


async def _elect(request: Request) -> Message:
    kind = KINDS.get(request.body.election_type if request.version >= UNCLEAN_FROM else 0)
    if kind is None:
        return Message(error_code=ErrorCode.INVALID_REQUEST, replica_election_results=[])
    image = request.services.view.image
    everything = request.body.topic_partitions is None
    results: dict[Where, Result] = {}
    wanted: dict[Where, PartitionState] = {}
    for where in _asked(request):
        state = image.partition(*where)
        if state is None:
            results[where] = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no partition {where[1]} of {where[0]!r}"
        elif election_needed(state, kind):
            wanted[where] = state
        elif not everything:
            results[where] = ErrorCode.ELECTION_NOT_NEEDED, f"broker {state.leader} leads it already"
    try:
        await _order(request, wanted, kind)
    except HeadraceError as error:
        results |= dict.fromkeys(wanted, (error.kafka_code, str(error)))
    else:
        results |= {where: _outcome(request, where, before, kind) for where, before in wanted.items()}
    return Message(error_code=ErrorCode.NONE, replica_election_results=_rows(results))


def _asked(request: Request) -> list[Where]:
    asked = request.body.topic_partitions
    if asked is None:
        topics = request.services.view.image.topics
        return [(name, state.index) for name, topic in topics.items() for state in topic.partitions]
    return [(topic.topic, index) for topic in asked for index in topic.partitions]


async def _order(request: Request, wanted: Mapping[Where, PartitionState], kind: str) -> None:
    services = request.services
    timeout_ms = min(max(0, request.body.timeout_ms), services.settings["request.timeout.max.ms"])
    if wanted:
        await services.changes.run(lambda image: plan_elections(image, wanted, kind))
        try:
            await services.view.wait_for(carried_out(wanted), timeout_ms / 1000)
        except RequestTimedOut:
            return  # each partition says for itself how far it came


def _outcome(request: Request, where: Where, before: PartitionState, kind: str) -> Result:
    image = request.services.view.image
    now = image.partition(*where)
    if now is None:
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"{where[0]!r} was deleted"
    if not election_needed(now, kind):
        return ErrorCode.NONE, None
    if where in image.controls.orders:
        return ErrorCode.REQUEST_TIMED_OUT, "the controller has not elected yet; the order stands"
    if kind == UNCLEAN:
        return ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE, f"none of brokers {list(now.replicas)} could be elected"
    return ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE, f"broker {now.replicas[0]} is not in sync: {list(now.isr)} are"


def _rows(results: Mapping[Where, Result]) -> list[Message]:
    topics: dict[str, list[Message]] = {}
    for (topic, index), (code, reason) in results.items():
        row = Message(partition_id=index, error_code=code, error_message=reason)
        topics.setdefault(topic, []).append(row)
    return [Message(topic=topic, partition_result=rows) for topic, rows in topics.items()]
