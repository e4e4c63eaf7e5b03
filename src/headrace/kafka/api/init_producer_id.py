"""InitProducerId, versions 0 to 6. 2: flexible; 3: a producer can ask for its next epoch; 4: PRODUCER_FENCED; 5: as 4;
6: two-phase commit.

Idempotent producers get an id of their own. A producer that names its id and epoch gets the same id with the next
epoch, or a new id when the epochs are used up. While there is no coordination to draw ids from, the answer is
COORDINATOR_NOT_AVAILABLE. With a transactional id its coordinator answers: who has the id before is fenced, and what it
left open is aborted, or kept if the producer asks for that (KIP-939).
"""

from __future__ import annotations

from typing import Final

from headrace.errors import CoordinationError, ErrorCode
from headrace.kafka.connection import Request
from headrace.transactions.messages import NO_EPOCH, NO_PRODUCER_ID, InitReply, InitRequest, Owner
from headrace.transactions.transaction import LAST_EPOCH
from headrace.wire.message import Message

EPOCHS_FROM: Final = 3
FENCED_FROM: Final = 4
TWO_PHASE_FROM: Final = 6
OWNER_CHARS_MAX: Final = 255


def handle(request: Request) -> Message | None:
    body = request.body
    has_epoch = request.version >= EPOCHS_FROM
    known, epoch = (body.producer_id, body.producer_epoch) if has_epoch else (NO_PRODUCER_ID, NO_EPOCH)
    if body.transactional_id is not None:
        if (known == NO_PRODUCER_ID) != (epoch == NO_EPOCH):
            return _response(ErrorCode.INVALID_REQUEST)
        _open(request, known, epoch)
        return None
    if known >= 0 and 0 <= epoch < LAST_EPOCH:
        return _response(ErrorCode.NONE, known, epoch + 1)
    request.reply_later(_fresh(request))
    return None


def _open(request: Request, producer_id: int, epoch: int) -> None:
    body = request.body
    two_phase = request.version >= TWO_PHASE_FROM
    owner = Owner((request.client_id or "")[:OWNER_CHARS_MAX], request.connection.peer.host[:OWNER_CHARS_MAX])
    asked = InitRequest(
        body.transaction_timeout_ms,
        producer_id,
        epoch,
        two_phase and body.enable2_pc,
        two_phase and body.keep_prepared_txn,
        owner,
    )

    def opened(reply: InitReply) -> None:
        code = reply.error_code
        if code == ErrorCode.PRODUCER_FENCED and request.version < FENCED_FROM:
            code = ErrorCode.INVALID_PRODUCER_EPOCH
        ongoing = reply.ongoing_producer_id, reply.ongoing_epoch
        request.reply(_response(code, reply.producer_id, reply.epoch, *ongoing))

    request.services.transactions.init(body.transactional_id, asked, opened)


async def _fresh(request: Request) -> Message:
    try:
        return _response(ErrorCode.NONE, await request.services.producer_ids.next(), 0)
    except CoordinationError as error:
        return _response(error.kafka_code)


def _response(
    code: int,
    producer_id: int = NO_PRODUCER_ID,
    epoch: int = NO_EPOCH,
    ongoing_id: int = NO_PRODUCER_ID,
    ongoing_epoch: int = NO_EPOCH,
) -> Message:
    return Message(
        throttle_time_ms=0,
        error_code=code,
        producer_id=producer_id,
        producer_epoch=epoch,
        ongoing_txn_producer_id=ongoing_id,
        ongoing_txn_producer_epoch=ongoing_epoch,
    )
