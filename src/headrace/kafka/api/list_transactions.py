"""ListTransactions, versions 0 to 2. 1: only those that are open for longer than a time; 2: a pattern of names.

The transactional ids that this broker coordinates. A pattern has the syntax of patterns of topics, knows every
character, and describes the whole name. There may be very many: they are looked through a slice in a turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from headrace.coordination.waits import pause
from headrace.errors import ErrorCode, HeadraceError, InvalidPattern
from headrace.groups.topic_patterns import TopicPattern, any_text
from headrace.kafka.connection import Request
from headrace.transactions.descriptions import ListFilter
from headrace.transactions.messages import ListedTransaction
from headrace.transactions.transaction import State
from headrace.wire.message import Message

DURATION_FROM: Final = 1
PATTERN_FROM: Final = 2
_STATES: Final = frozenset(state.value for state in State)


def handle(request: Request) -> Message | None:
    body = request.body
    unknown = sorted(set(body.state_filters) - _STATES)
    states = frozenset(body.state_filters) & _STATES
    if body.state_filters and not states:
        return _response(ErrorCode.NONE, unknown)
    pattern = body.transactional_id_pattern if request.version >= PATTERN_FROM else None
    try:
        matches = TopicPattern(pattern, any_text(pattern)).matches_in_time if pattern else None
    except HeadraceError as error:
        return _response(error.kafka_code, unknown)
    longer_than_ms = body.duration_filter if request.version >= DURATION_FROM else -1
    wanted = ListFilter(states, frozenset(body.producer_id_filters), longer_than_ms, matches)
    found = request.services.transactions.list_transactions(wanted)
    if isinstance(found, int):
        return _response(found, unknown)
    request.reply_later(_list(request, unknown, found))
    return None


async def _list(request: Request, unknown: list[str], slices: Iterator[list[ListedTransaction]]) -> Message:
    rows: list[Message] = []
    try:
        for part in slices:
            rows += [
                Message(transactional_id=one.transactional_id, producer_id=one.producer_id, transaction_state=one.state)
                for one in part
            ]
            await pause(request.services.clock, 0)
    except InvalidPattern as error:
        return _response(error.kafka_code, unknown)
    return _response(ErrorCode.NONE, unknown, rows)


def _response(code: int, unknown: list[str], rows: Sequence[Message] = ()) -> Message:
    return Message(throttle_time_ms=0, error_code=code, unknown_state_filters=unknown, transaction_states=list(rows))
