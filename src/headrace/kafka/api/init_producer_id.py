"""InitProducerId, versions 0 to 6. 2: flexible; 3: a producer can ask for its next epoch; 6: two-phase commit.

Idempotent producers get an id of their own. A producer that names its id and epoch gets the same id with the next
epoch, or a new id when the epochs are used up. While there is no coordination to draw ids from, the answer is
COORDINATOR_NOT_AVAILABLE. Transactional ids are refused: transactions are not served yet.
"""

from __future__ import annotations

from typing import Final

from headrace.errors import CoordinationError, ErrorCode
from headrace.kafka.connection import Request
from headrace.wire.message import Message

LAST_EPOCH: Final = 32_766


def handle(request: Request) -> Message | None:
    body = request.body
    if body.transactional_id is not None:
        return _response(ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, -1, -1)
    known, epoch = (body.producer_id, body.producer_epoch) if request.version >= 3 else (-1, -1)
    if known >= 0 and 0 <= epoch < LAST_EPOCH:
        return _response(ErrorCode.NONE, known, epoch + 1)
    request.reply_later(_fresh(request))
    return None


async def _fresh(request: Request) -> Message:
    try:
        return _response(ErrorCode.NONE, await request.services.producer_ids.next(), 0)
    except CoordinationError as error:
        return _response(error.kafka_code, -1, -1)


def _response(code: int, producer_id: int, epoch: int) -> Message:
    return Message(throttle_time_ms=0, error_code=code, producer_id=producer_id, producer_epoch=epoch)
