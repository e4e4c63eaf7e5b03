"""What a member asks of its coordinator, as messages: JoinGroup, SyncGroup, Heartbeat, LeaveGroup. Pure."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.client.consumer.assignors import Assignor
from headrace.client.consumer.group_protocol import NO_GENERATION, PROTOCOL_TYPE, Place, encode_subscription
from headrace.wire.message import Message


@dataclass(frozen=True, slots=True)
class Identity:
    """Who asks: a member of a generation, or nobody in particular."""

    member_id: str = ""
    generation: int = NO_GENERATION
    instance_id: str | None = None


@dataclass(frozen=True, slots=True)
class Timeouts:
    session_ms: int
    rebalance_ms: int


def join_request(
    group: str,
    who: Identity,
    topics: Iterable[str],
    assignor: Assignor,
    held: Iterable[Place],
    rack: str,
    timeouts: Timeouts,
) -> Message:
    # Clients that do not know version 2 of the subscription look for the generation in the user data.
    user_data = struct.pack(">i", who.generation) if assignor.step_by_step else None
    metadata = encode_subscription(topics, owned=held, generation=who.generation, rack=rack, user_data=user_data)
    return Message(
        group_id=group,
        session_timeout_ms=timeouts.session_ms,
        rebalance_timeout_ms=timeouts.rebalance_ms,
        member_id=who.member_id,
        group_instance_id=who.instance_id,
        protocol_type=PROTOCOL_TYPE,
        protocols=[Message(name=name, metadata=metadata) for name in assignor.protocols],
    )


def sync_request(group: str, who: Identity, protocol: str, assignments: list[Message]) -> Message:
    return Message(
        group_id=group,
        generation_id=who.generation,
        member_id=who.member_id,
        group_instance_id=who.instance_id,
        protocol_type=PROTOCOL_TYPE,
        protocol_name=protocol,
        assignments=assignments,
    )


def heartbeat_request(group: str, who: Identity) -> Message:
    return Message(
        group_id=group, generation_id=who.generation, member_id=who.member_id, group_instance_id=who.instance_id
    )


def leave_request(group: str, member_id: str, reason: str) -> Message:
    return Message(group_id=group, members=[Message(member_id=member_id, reason=reason)])
