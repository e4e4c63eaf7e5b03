"""AcceptMetadata, version 0, Headrace's own: metadata that was restored from an older copy holds. Fields:
`wire.own_schema`; what it means: `cluster.lineage`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from headrace.cluster.controller_state import Doubt
from headrace.cluster.lineage import plan_accept
from headrace.errors import ErrorCode, HeadraceError
from headrace.kafka.connection import Request
from headrace.wire.message import Message


def handle(request: Request) -> None:
    request.reply_later(_answer(request))


async def _answer(request: Request) -> Message:
    services = request.services
    doubts = list(services.view.image.controls.doubts.values())
    code, reason = ErrorCode.NONE, None
    if not request.body.dry_run:
        try:
            first_free = await services.producer_ids.first_free()
            plan = partial(plan_accept, lineage_id=services.topics.draw_id().hex(), producer_ids=first_free)
            await services.changes.run(plan, even_in_doubt=True)
        except HeadraceError as error:
            code, reason = error.kafka_code, str(error)
    return Message(throttle_time_ms=0, error_code=code, error_message=reason, doubts=_rows(doubts))


def _rows(doubts: Iterable[Doubt]) -> list[Message]:
    return [
        Message(
            broker_id=doubt.broker,
            seen_revision=doubt.seen,
            found_revision=doubt.found,
            at_ms=doubt.at_ms,
            difference_count=doubt.count,
            differences=[
                Message(
                    kind=row.kind,
                    topic=row.topic,
                    partition_index=row.partition,
                    topic_id=row.topic_id,
                    detail=row.detail,
                )
                for row in doubt.differences
            ],
        )
        for doubt in doubts
    ]
