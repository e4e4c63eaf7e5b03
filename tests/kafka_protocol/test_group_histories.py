"""Commits to a coordinator whose partition moves between brokers that are killed, lose power, fail to read and have
wrong bytes on their disks: what was acknowledged is there at every coordinator that answers.
"""

from __future__ import annotations

import random

import pytest

from coordinators.histories import SETTINGS, TOPIC_ID, CoordinatorScene, History, fail_reads
from headrace.cluster.names import OFFSETS_TOPIC
from headrace.coordinators.state_log import StateLog
from headrace.errors import ErrorCode
from headrace.groups.coordinator import GroupCoordinator
from headrace.groups.messages import CommitRequest, OffsetToCommit, PartitionResult
from headrace.groups.offsets import OFFSETS
from kafka_protocol.test_group_loading import LIMITS
from proving import proves
from replication import scene as replicas
from replication.scene import Broker

GROUPS = 3


class GroupScene(CoordinatorScene[GroupCoordinator]):
    state_topic = OFFSETS

    def coordinator(self, broker: Broker) -> GroupCoordinator:
        append = StateLog(broker.partitions, OFFSETS_TOPIC).append
        return GroupCoordinator(broker.clock, append, 1, lambda: "id", LIMITS, lambda _name: TOPIC_ID)


class GroupHistory(History[GroupCoordinator]):
    def __init__(self, seed: int, layout: str) -> None:
        super().__init__(seed, GroupScene(seed=seed, layout=layout, topic=dict(SETTINGS)))
        self.acknowledged: dict[str, int] = {}

    def commit(self) -> None:
        self.number += 1
        group, offset = f"g{self.random.randrange(GROUPS)}", self.number

        def reply(results: tuple[PartitionResult, ...]) -> None:
            if all(result.error_code == ErrorCode.NONE for result in results):
                self.acknowledged[group] = max(self.acknowledged.get(group, 0), offset)

        request = CommitRequest((OffsetToCommit("t", 0, offset, 0, f"commit-{offset:05d}", TOPIC_ID),))
        self.asked().commit(group, request, reply)

    def marker(self) -> bytes | None:
        numbers = list(self.acknowledged.values())
        return b"commit-%05d" % self.random.choice(numbers) if numbers else None

    def answers(self, number: int) -> bool:
        return self.answer(number, "g0")[0] == ErrorCode.NONE

    def answer(self, number: int, group: str) -> tuple[int, int]:
        reply = self.scene.coordinators[number].fetch_offsets(group, [("t", 0)])
        return reply.error_code, reply.offsets[0].committed_offset if reply.offsets else -1

    def check(self) -> bool:
        leader = self.scene.leader()
        if leader is None:
            return False
        for group, least in self.acknowledged.items():
            code, offset = self.answer(leader.number, group)
            if code != ErrorCode.NONE:
                return False
            assert offset >= least, f"{group}: {least} was acknowledged, broker {leader.number} answers {offset}"
        return True


@proves("G16")
@pytest.mark.parametrize("layout", ["partitioned", "shared"])
@pytest.mark.parametrize("seed", range(6))
def test_what_was_acknowledged_is_there_whoever_coordinates(
    seed: int, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "TOPIC", OFFSETS_TOPIC)
    fail_reads(monkeypatch, random.Random(seed))
    GroupHistory(seed, layout).run()
