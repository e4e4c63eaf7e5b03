"""A share group begins to read a topic over HTTP: the state of its share partitions, where they are led here.

Where a group begins is kept for it only once a member has subscribed to the topic (`groups.share_group`). Whoever
receives over HTTP is no member for longer than one request, so the port joins the group for a moment, when it finds
partitions without a state, and leaves it again: the group's coordinator initializes them meanwhile. Members that stay
are told their partitions anew, and read on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from headrace.cluster.image import Topic
from headrace.cluster.names import OFFSETS_TOPIC
from headrace.coordination.waits import pause
from headrace.errors import CoordinatorLoading, ErrorCode, HeadraceError, InvalidRequest
from headrace.groups.consumer_messages import JOINING, LEAVING, ConsumerReply, ShareHeartbeat
from headrace.http import groups
from headrace.http.services import HttpServices
from headrace.queues.led_share_partition import LedSharePartition
from headrace.queues.messages import SharePartitionKey
from headrace.wire.api import SHARE_GROUP_HEARTBEAT
from headrace.wire.message import Message

LOAD_SECONDS: Final = 10.0
"""How long a receive waits for states to be there."""
LOOK_SECONDS: Final = 0.02
HEARTBEAT_VERSION: Final = 1
CLIENT_ID: Final = "headrace-http"


def unloaded(services: HttpServices, group: str, topic: Topic, led: Sequence[int]) -> list[LedSharePartition]:
    """Of these partitions, those whose state is not loaded here."""
    found = [services.share.partitions.find(SharePartitionKey(group, topic.id, index)) for index in led]
    return [each for each in found if not isinstance(each, int) and each.core is None]


async def load(services: HttpServices, group: str, topic: Topic, led: Sequence[int]) -> None:
    """Returns when the states of these partitions are loaded; those that the group has not, it is given."""
    clock = services.clock
    give_up = clock.now() + LOAD_SECONDS
    has_joined = False
    while waiting := unloaded(services, group, topic, led):
        if clock.now() >= give_up:
            raise CoordinatorLoading(f"share group {group!r} cannot begin with topic {topic.name!r} now; try again")
        for each in waiting:
            each.load()
        if not has_joined and any(each.fault != ErrorCode.NONE for each in waiting):
            has_joined = await _visit(services, group, topic.name)
        await pause(clock, LOOK_SECONDS)


async def _visit(services: HttpServices, group: str, topic: str) -> bool:
    """Join, and leave; False if the coordinator cannot be asked now."""
    if OFFSETS_TOPIC not in services.image().topics:
        await services.ensure_topic(OFFSETS_TOPIC)
    member = f"http-{services.share.draw(12).hex()}"
    joined = await _heartbeat(services, group, member, JOINING, (topic,))
    if joined in _PASSING:
        return False
    await _heartbeat(services, group, member, LEAVING, None)
    if joined == ErrorCode.GROUP_ID_NOT_FOUND:
        raise InvalidRequest(f"group {group!r} is there and is no share group; take another name")
    if joined != ErrorCode.NONE:
        raise groups.fault(services, group, joined)
    return True


async def _heartbeat(
    services: HttpServices, group: str, member: str, epoch: int, topics: tuple[str, ...] | None
) -> int:
    """The code of the answer."""
    answered: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def heard(answer: ConsumerReply | Message | HeadraceError | Any) -> None:
        code = answer.kafka_code if isinstance(answer, HeadraceError) else answer.error_code
        if not answered.done():
            answered.set_result(int(code))

    coordinator = groups.coordinator(services, group)
    if coordinator == services.broker_id:
        heartbeat = ShareHeartbeat(member, epoch, topics=topics, client_id=CLIENT_ID, client_host="/http")
        services.groups.share.heartbeat(group, heartbeat, heard)
    elif coordinator is None or coordinator < 0:
        return ErrorCode.COORDINATOR_NOT_AVAILABLE
    else:
        body = Message(
            group_id=group,
            member_id=member,
            member_epoch=epoch,
            rack_id=None,
            subscribed_topic_names=None if topics is None else list(topics),
        )
        timeout_ms = int(LOAD_SECONDS * 1000)
        services.share.ask(coordinator, SHARE_GROUP_HEARTBEAT, HEARTBEAT_VERSION, body, heard, timeout_ms, again=False)
    return await answered


_PASSING: Final = frozenset(
    {
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.NOT_COORDINATOR,
        ErrorCode.NETWORK_EXCEPTION,
        ErrorCode.REQUEST_TIMED_OUT,
    }
)
