"""A member's side of ShareFetch and ShareAcknowledge by hand: each request in its share session."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from brokers import wait_for
from headrace.wire import api as apis
from headrace.wire.message import Message
from kafka_protocol.raw import Raw

ACCEPT, RELEASE, REJECT, RENEW = 1, 2, 3, 4
GROUP_RESOURCE = 32
Place = tuple[bytes, int]
Said = tuple[int, int, Sequence[int]]
"""First offset, last offset, types."""


class ShareClient:
    def __init__(self, raw: Raw, group: str, member: str | None = None, version: int = 2) -> None:
        self.raw = raw
        self.group = group
        self.member = member or str(uuid.uuid4())
        self.version = version
        self.epoch = 0

    def send(
        self,
        places: Iterable[Place] = (),
        said: Mapping[Place, Sequence[Said]] | None = None,
        forgotten: Iterable[Place] = (),
        **more: Any,
    ) -> None:
        said = said or {}
        body = {
            "group_id": self.group,
            "member_id": self.member,
            "share_session_epoch": self.epoch,
            "max_wait_ms": 0,
            "min_bytes": 1,
            "max_bytes": 1 << 20,
            "max_records": 500,
            "batch_size": 500,
            "share_acquire_mode": 0,
            "is_renew_ack": False,
            "topics": _topics({**dict.fromkeys(places, ()), **said}),
            "forgotten_topics_data": [Message(topic_id=topic, partitions=[index]) for topic, index in forgotten],
        }
        self.raw.send(apis.SHARE_FETCH, self.version, **{**body, **more})

    def receive(self) -> Any:
        answer = self.raw.receive(apis.SHARE_FETCH, self.version)[1]
        if answer.error_code == 0:
            self.epoch += 1
        return answer

    def ask(self, *given: Any, **more: Any) -> Any:
        self.send(*given, **more)
        return self.receive()

    def fetch(self, *given: Any, **more: Any) -> dict[Place, Any]:
        """The rows of an answer without an error."""
        answer = self.ask(*given, **more)
        assert answer.error_code == 0, answer
        return rows(answer)

    def acknowledge(self, said: Mapping[Place, Sequence[Said]], **more: Any) -> Any:
        body = {
            "group_id": self.group,
            "member_id": self.member,
            "share_session_epoch": self.epoch,
            "is_renew_ack": False,
            "topics": _topics(said),
        }
        answer = self.raw.call(apis.SHARE_ACKNOWLEDGE, self.version, **{**body, **more})
        if answer.error_code == 0:
            self.epoch += 1
        return answer

    def code(self, said: Mapping[Place, Sequence[Said]], **more: Any) -> int:
        """Of the one partition that is acknowledged."""
        answer = self.acknowledge(said, **more)
        assert answer.error_code == 0, answer
        (row,) = rows(answer).values()
        return int(row.error_code)


def subscribe(raw: Raw, group: str, topic: str, partitions: int) -> str:
    """Have a member that only subscribes: from then on the partitions of the topic are delivered to the group. Answers
    its id."""
    member, epoch, assigned = str(uuid.uuid4()), 0, 0
    raw.call(apis.FIND_COORDINATOR, 4, key_type=0, coordinator_keys=[group])  # which makes the topic of groups

    def beat() -> bool:
        nonlocal epoch, assigned
        answer = raw.call(
            apis.SHARE_GROUP_HEARTBEAT,
            1,
            group_id=group,
            member_id=member,
            member_epoch=epoch,
            rack_id=None,
            subscribed_topic_names=[topic] if epoch == 0 else None,
        )
        if answer.error_code == 0:
            epoch = answer.member_epoch
            if answer.assignment is not None:
                assigned = sum(len(each.partitions) for each in answer.assignment.topic_partitions)
        return assigned == partitions

    wait_for("an assignment", beat, 20)
    return member


def leave(raw: Raw, group: str, member: str) -> None:
    answer = raw.call(
        apis.SHARE_GROUP_HEARTBEAT,
        1,
        group_id=group,
        member_id=member,
        member_epoch=-1,
        rack_id=None,
        subscribed_topic_names=None,
    )
    assert answer.error_code == 0, answer


def rows(answer: Any) -> dict[Place, Any]:
    return {(topic.topic_id, row.partition_index): row for topic in answer.responses for row in topic.partitions}


def acquired(row: Any) -> list[tuple[int, int, int]]:
    return [(each.first_offset, each.last_offset, each.delivery_count) for each in row.acquired_records]


def _topics(said: Mapping[Place, Sequence[Said]]) -> list[Message]:
    topics: dict[bytes, list[Message]] = {}
    for (topic, index), batches in said.items():
        topics.setdefault(topic, []).append(
            Message(
                partition_index=index,
                acknowledgement_batches=[
                    Message(first_offset=first, last_offset=last, acknowledge_types=list(types))
                    for first, last, types in batches
                ],
            )
        )
    return [Message(topic_id=topic, partitions=partitions) for topic, partitions in topics.items()]


def configure_group(raw: Raw, group: str, **config: object) -> None:
    """Settings are named with underscores for dots; it begins at the start of its topics."""
    given = {"share_auto_offset_reset": "earliest", **config}
    changes = [
        Message(name=name.replace("_", "."), config_operation=0, value=str(value)) for name, value in given.items()
    ]
    resource = Message(resource_type=GROUP_RESOURCE, resource_name=group, configs=changes)
    answer = raw.call(apis.INCREMENTAL_ALTER_CONFIGS, 1, resources=[resource], validate_only=False)
    assert answer.responses[0].error_code == 0, answer
