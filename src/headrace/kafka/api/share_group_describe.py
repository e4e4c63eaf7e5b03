"""ShareGroupDescribe, version 1. Share groups (KIP-932) alone; others are not found here."""

from __future__ import annotations

from headrace.groups.consumer_messages import DescribedConsumer, DescribedConsumerGroup
from headrace.kafka import authorized
from headrace.kafka.api import consumer_group_describe
from headrace.kafka.connection import Request
from headrace.wire.message import Message


def handle(request: Request) -> Message:
    groups = [_group(request, request.services.groups.share.describe(group)) for group in request.body.group_ids]
    return Message(throttle_time_ms=0, groups=groups)


def _group(request: Request, group: DescribedConsumerGroup) -> Message:
    asked = request.body.include_authorized_operations and not group.error_code
    return Message(
        error_code=group.error_code,
        error_message=group.error_message,
        group_id=group.group_id,
        group_state=group.group_state,
        group_epoch=group.group_epoch,
        assignment_epoch=group.assignment_epoch,
        assignor_name=group.assignor,
        members=[_member(request, member) for member in group.members],
        authorized_operations=authorized.operations(authorized.ON_GROUP, asked),
    )


def _member(request: Request, member: DescribedConsumer) -> Message:
    return Message(
        member_id=member.member_id,
        rack_id=member.rack,
        member_epoch=member.member_epoch,
        client_id=member.client_id,
        client_host=member.client_host,
        subscribed_topic_names=list(member.topics),
        assignment=consumer_group_describe.assignment(request, member.assigned),
    )
