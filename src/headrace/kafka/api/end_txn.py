"""EndTxn, versions 0 to 5. 2: PRODUCER_FENCED; 3: flexible; 4: as 3; 5: the producer's next epoch in the answer.

Answered when it is decided, for good; the markers follow. From version 5 on each transaction has an epoch of its own
(KIP-890), and the answer has that of the next one, under another producer id where epochs are used up. Asked again, it
is answered again.
"""

from __future__ import annotations

from typing import Final

from headrace.errors import ErrorCode
from headrace.kafka.connection import Request
from headrace.transactions.messages import EPOCHS_BUMPED, EndReply, EndRequest
from headrace.wire.message import Message

FENCED_FROM: Final = 2
BUMPED_FROM: Final = 5


def handle(request: Request) -> None:
    body = request.body
    version = EPOCHS_BUMPED if request.version >= BUMPED_FROM else EPOCHS_BUMPED - 1
    asked = EndRequest(body.producer_id, body.producer_epoch, body.committed, version)

    def ended(reply: EndReply) -> None:
        code = reply.error_code
        if code == ErrorCode.PRODUCER_FENCED and request.version < FENCED_FROM:
            code = ErrorCode.INVALID_PRODUCER_EPOCH
        request.reply(
            Message(throttle_time_ms=0, error_code=code, producer_id=reply.producer_id, producer_epoch=reply.epoch)
        )

    request.services.transactions.end(body.transactional_id, asked, ended)
