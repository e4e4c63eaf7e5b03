"""PlanPlacement, version 0, Headrace's own: which replicas should move; draining a broker. Fields: `wire.own_schema`.

A plan is computed from the image in a thread: with thousands of partitions it takes a while, and the loop goes on.
"""

from __future__ import annotations

from functools import partial
from typing import Final, cast

from headrace.cluster import keys
from headrace.cluster.changes import Plan, Step
from headrace.cluster.image import Image
from headrace.errors import ErrorCode, HeadraceError, InvalidRequest
from headrace.kafka.connection import Request
from headrace.placement.plans import Reassignment, drain, rebalance
from headrace.ports.coordination import Delete, Put
from headrace.wire.message import Message

SHOW: Final = "show"
REBALANCE: Final = "rebalance"
DRAIN: Final = "drain"
UNDRAIN: Final = "undrain"


def handle(request: Request) -> None:
    request.reply_later(_answer(request))


async def _answer(request: Request) -> Message:
    code, reason = ErrorCode.NONE, None
    plan = Reassignment()
    try:
        plan = await _act(request)
    except HeadraceError as error:
        code, reason = error.kafka_code, str(error)
    return Message(
        throttle_time_ms=0,
        error_code=code,
        error_message=reason,
        draining=sorted(request.services.view.image.controls.draining),
        moves=[
            Message(topic=move.topic, partition_index=move.partition, before=list(move.before), after=list(move.after))
            for move in plan.moves
        ],
    )


async def _act(request: Request) -> Reassignment:
    services, body = request.services, request.body
    image, default = services.view.image, services.effective_settings()["log.placement"]
    match body.action:
        case "show":
            return Reassignment()
        case "rebalance":
            return cast(Reassignment, await services.compute(partial(rebalance, image, default=default)))
        case "drain":
            plan: Reassignment = await services.compute(partial(drain, image, body.broker_id, default=default))
            if not body.dry_run:
                await services.changes.run(partial(_mark, broker=body.broker_id))
            return plan
        case "undrain":
            if body.broker_id not in image.controls.draining:
                raise InvalidRequest(f"broker {body.broker_id} is not being drained")
            if not body.dry_run:
                await services.changes.run(partial(_unmark, broker=body.broker_id))
            return Reassignment()
        case unknown:
            raise InvalidRequest(f"{unknown!r} is none of {SHOW}, {REBALANCE}, {DRAIN}, {UNDRAIN}")


def _mark(image: Image, broker: int) -> Plan:
    return Plan((Step((), (Put(keys.draining_key(image.prefix, broker), keys.encode({})),)),))


def _unmark(image: Image, broker: int) -> Plan:
    return Plan((Step((), (Delete(keys.draining_key(image.prefix, broker)),)),))
