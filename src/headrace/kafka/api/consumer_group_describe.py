"""ConsumerGroupDescribe, versions 0 to 1. 1: which protocol each member speaks.

Groups of the consumer protocol (KIP-848); classic ones are not found here, but by DescribeGroups. One that is named
twice is told once: it may have very many members.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from headrace.groups.assignors import Assignment
from headrace.groups.consumer_messages import DescribedConsumer, DescribedConsumerGroup
from headrace.kafka import authorized
from headrace.kafka.connection import Request
from headrace.wire.message import Message

CLASSIC: Final = 0
CONSUMER: Final = 1


def handle(request: Request) -> Message:
    return response(request, request.services.groups.describe_consumer, _member)


def response(
    request: Request,
    describe: Callable[[str], DescribedConsumerGroup],
    member_row: Callable[[Request, DescribedConsumer], Message],
) -> Message:
    """Of any group whose coordinator assigns."""
    groups = [group_row(request, describe(group), member_row) for group in dict.fromkeys(request.body.group_ids)]
    return Message(throttle_time_ms=0, groups=groups)


def group_row(
    request: Request,
    group: DescribedConsumerGroup,
    member_row: Callable[[Request, DescribedConsumer], Message],
) -> Message:
    asked = request.body.include_authorized_operations and not group.error_code
    return Message(
        error_code=group.error_code,
        error_message=group.error_message,
        group_id=group.group_id,
        group_state=group.group_state,
        group_epoch=group.group_epoch,
        assignment_epoch=group.assignment_epoch,
        assignor_name=group.assignor,
        members=[member_row(request, member) for member in group.members],
        authorized_operations=authorized.operations(authorized.ON_GROUP, asked),
    )


def _member(request: Request, member: DescribedConsumer) -> Message:
    return Message(
        member_id=member.member_id,
        instance_id=member.instance_id,
        rack_id=member.rack,
        member_epoch=member.member_epoch,
        client_id=member.client_id,
        client_host=member.client_host,
        subscribed_topic_names=list(member.topics),
        subscribed_topic_regex=member.pattern,
        assignment=assignment(request, member.assigned),
        target_assignment=assignment(request, member.target),
        member_type=CLASSIC if member.is_classic else CONSUMER,
    )


def assignment(request: Request, assigned: Assignment) -> Message:
    """Partitions of a topic that is gone have no name to be told by."""
    names = request.services.groups.catalog.names
    topics = [
        Message(topic_id=topic_id, topic_name=names[topic_id], partitions=sorted(indexes))
        for topic_id, indexes in assigned.items()
        if topic_id in names
    ]
    return Message(topic_partitions=topics)
