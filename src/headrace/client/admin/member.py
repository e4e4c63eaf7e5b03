"""A member of a consumer group: joins, is given partitions, keeps its place, commits, leaves.

The classic protocol with the range assignor; the member that leads assigns for all. Nothing runs in the background:
whoever reads calls `keep_alive` between two fetches, which sends a heartbeat when one is due. A commit or heartbeat
that the coordinator refuses because the group has moved on means: join again, and start from what is committed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Final

from headrace.client.admin import groups
from headrace.client.admin.cluster import Cluster
from headrace.client.consumer.group_protocol import (
    PROTOCOL_TYPE,
    RANGE,
    Assignment,
    assign_ranges,
    decode_assignment,
    decode_subscription,
    encode_assignment,
    encode_subscription,
)
from headrace.client.errors import Refusal, check
from headrace.errors import Code
from headrace.wire import api as apis
from headrace.wire.message import Message

HEARTBEATS_PER_SESSION: Final = 3
JOIN_MARGIN_MS: Final = 5_000
NO_GENERATION: Final = -1

_MOVED_ON: Final = frozenset({Code.REBALANCE_IN_PROGRESS, Code.ILLEGAL_GENERATION, Code.UNKNOWN_MEMBER_ID})


class Member:
    def __init__(
        self,
        cluster: Cluster,
        group_id: str,
        topics: Iterable[str],
        *,
        instance_id: str | None = None,
        session_timeout_ms: int = 10_000,
        rebalance_timeout_ms: int = 60_000,
    ) -> None:
        self.group_id = group_id
        self.assignment: Assignment = {}
        self.generation = NO_GENERATION
        self.member_id = ""
        self._cluster = cluster
        self._topics = tuple(sorted(set(topics)))
        self._instance_id = instance_id
        self._session_timeout_ms = session_timeout_ms
        self._rebalance_timeout_ms = rebalance_timeout_ms
        self._heartbeat_due = 0.0

    def join(self) -> Assignment:
        """Take part in rebalances until one gives this member its partitions."""
        while True:
            try:
                self.assignment = self._cluster.retry(self._join_and_sync)
                self._schedule_heartbeat()
                return self.assignment
            except Refusal as refusal:
                if not self._moved_on(refusal):
                    raise

    def keep_alive(self) -> bool:
        """Send a heartbeat if one is due. False: the group rebalances, so commit and `join` again."""
        if time.monotonic() < self._heartbeat_due:
            return True
        request = Message(
            group_id=self.group_id,
            generation_id=self.generation,
            member_id=self.member_id,
            group_instance_id=self._instance_id,
        )

        def beat() -> None:
            answer = self._cluster.call(self._cluster.coordinator(self.group_id), apis.HEARTBEAT, request)
            check(answer.error_code, f"heartbeat in group {self.group_id!r}")

        try:
            self._cluster.retry(beat)
        except Refusal as refusal:
            if not self._moved_on(refusal):
                raise
            return False
        self._schedule_heartbeat()
        return True

    def committed(self) -> dict[tuple[str, int], int]:
        """The group's committed offsets of the partitions that this member has; none where nothing is committed."""
        mine = [(topic, number) for topic, numbers in self.assignment.items() for number in numbers]
        return groups.fetch_offsets(self._cluster, self.group_id, mine) if mine else {}

    def commit(self, offsets: Mapping[tuple[str, int], int]) -> bool:
        """False: nothing was committed, because the group has given these partitions to another by now."""
        if not offsets:
            return True
        try:
            groups.commit_offsets(
                self._cluster,
                self.group_id,
                offsets,
                generation=self.generation,
                member_id=self.member_id,
                instance_id=self._instance_id,
            )
        except Refusal as refusal:
            if not self._moved_on(refusal):
                raise
            return False
        return True

    def leave(self) -> None:
        """Let the others have this member's partitions now. A static member keeps its place instead."""
        if not self.member_id or self._instance_id is not None:
            return
        member = Message(member_id=self.member_id, reason="the consumer was closed")
        request = Message(group_id=self.group_id, members=[member])
        self._cluster.call(self._cluster.coordinator(self.group_id), apis.LEAVE_GROUP, request)
        self.member_id, self.generation, self.assignment = "", NO_GENERATION, {}

    def _join_and_sync(self) -> Assignment:
        joined = self._join()
        assignments = self._assign(joined) if joined.leader == joined.member_id else []
        request = Message(
            group_id=self.group_id,
            generation_id=self.generation,
            member_id=self.member_id,
            group_instance_id=self._instance_id,
            protocol_type=PROTOCOL_TYPE,
            protocol_name=joined.protocol_name,
            assignments=assignments,
        )
        answer = self._cluster.call(self._cluster.coordinator(self.group_id), apis.SYNC_GROUP, request, self._wait_ms())
        check(answer.error_code, f"sync of group {self.group_id!r}")
        return decode_assignment(answer.assignment)

    def _join(self) -> Message:
        request = Message(
            group_id=self.group_id,
            session_timeout_ms=self._session_timeout_ms,
            rebalance_timeout_ms=self._rebalance_timeout_ms,
            member_id=self.member_id,
            group_instance_id=self._instance_id,
            protocol_type=PROTOCOL_TYPE,
            protocols=[Message(name=RANGE, metadata=encode_subscription(self._topics))],
        )
        answer = self._cluster.call(self._cluster.coordinator(self.group_id), apis.JOIN_GROUP, request, self._wait_ms())
        if answer.error_code == Code.MEMBER_ID_REQUIRED:
            self.member_id = answer.member_id
            return self._join()
        check(answer.error_code, f"join of group {self.group_id!r}")
        self.member_id, self.generation = answer.member_id, answer.generation_id
        return answer

    def _assign(self, joined: Message) -> list[Message]:
        if joined.skip_assignment:
            return []
        subscriptions = {member.member_id: decode_subscription(member.metadata) for member in joined.members}
        wanted = sorted(set().union(*subscriptions.values()))
        topics = self._cluster.topology(wanted).topics
        counts = {name: len(topic.partitions) for name, topic in topics.items()}
        return [
            Message(member_id=member_id, assignment=encode_assignment(assignment))
            for member_id, assignment in assign_ranges(subscriptions, counts).items()
        ]

    def _moved_on(self, refusal: Refusal) -> bool:
        """Whether joining again is the answer; a member that the group does not know any more is a new one then."""
        if refusal.kafka_code == Code.UNKNOWN_MEMBER_ID:
            self.member_id = ""
        if refusal.kafka_code in _MOVED_ON:
            self.generation = NO_GENERATION
            return True
        return False

    def _wait_ms(self) -> int:
        return self._rebalance_timeout_ms + JOIN_MARGIN_MS

    def _schedule_heartbeat(self) -> None:
        self._heartbeat_due = time.monotonic() + self._session_timeout_ms / 1000 / HEARTBEATS_PER_SESSION
