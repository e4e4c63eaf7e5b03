"""ShareGroupDescribe, version 1. Share groups (KIP-932) alone; others are not found here."""

from __future__ import annotations

from headrace.groups.consumer_messages import DescribedConsumer
from headrace.kafka.api import consumer_group_describe
from headrace.kafka.connection import Request
from headrace.wire.message import Message


def handle(request: Request) -> Message:
    return consumer_group_describe.response(request, request.services.groups.share.describe, _member)


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
