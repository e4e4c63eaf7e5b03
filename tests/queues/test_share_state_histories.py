"""States of share partitions under kills, moves, damage and compaction: what was acknowledged is there at every
coordinator that answers, and nobody writes who has been fenced."""

from __future__ import annotations

import random

import pytest

from coordinators.histories import SETTINGS, CoordinatorScene, History, fail_reads
from headrace.cluster.names import SHARE_STATE_TOPIC
from headrace.coordinators.state_log import StateLog
from headrace.errors import ErrorCode
from headrace.queues.messages import SharePartitionKey, ShareState, StateBatch
from headrace.queues.share_coordinator import SHARE_STATES, ShareCoordinator
from proving import proves
from queues.state_scene import ACQUIRED, TOPIC
from replication import scene as replicas
from replication.scene import Broker

KEYS = [SharePartitionKey("workers", TOPIC, number) for number in range(3)]
OFFSETS_PER_KEY = 8


class ShareScene(CoordinatorScene[ShareCoordinator]):
    state_topic = SHARE_STATES

    def coordinator(self, broker: Broker) -> ShareCoordinator:
        append = StateLog(broker.partitions, SHARE_STATE_TOPIC).append
        return ShareCoordinator(broker.clock, append, 1, lambda _topic_id, _partition: True)


class ShareHistory(History[ShareCoordinator]):
    """The leader of the data reads, writes while that goes well, and reads again after a failure. What it writes is the
    number of the write, as the delivery count of an offset: each is greater than all before it."""

    def __init__(self, seed: int, layout: str) -> None:
        super().__init__(seed, ShareScene(seed=seed, layout=layout, topic=dict(SETTINGS)))
        self.acknowledged: dict[SharePartitionKey, dict[int, int]] = {}
        self.loads: dict[SharePartitionKey, int] = {}
        self.begun: set[SharePartitionKey] = set()

    def commit(self) -> None:
        self.number += 1
        key = self.random.choice(KEYS)
        if key not in self.begun:
            self.begin(key)
        elif key not in self.loads:
            self.load(key, self.number)
        else:
            self.write(key, self.loads[key], self.number)

    def begin(self, key: SharePartitionKey) -> None:
        def reply(code: int) -> None:
            if code == ErrorCode.NONE:
                self.begun.add(key)

        self.asked().initialize(key, 1, 0, reply)

    def load(self, key: SharePartitionKey, load_id: int) -> None:
        def reply(code: int, state: ShareState | None) -> None:
            if code == ErrorCode.NONE:
                assert state is not None
                self.judge(key, state)
                self.loads[key] = max(load_id, self.loads.get(key, 0))

        self.asked().read(key, 1, load_id, reply)

    def write(self, key: SharePartitionKey, load_id: int, number: int) -> None:
        offset = self.random.randrange(OFFSETS_PER_KEY)

        def reply(code: int) -> None:
            if code == ErrorCode.NONE:
                assert self.loads.get(key, 0) <= load_id, "a later load has read"
                known = self.acknowledged.setdefault(key, {})
                known[offset] = max(number, known.get(offset, 0))
            elif self.loads.get(key) == load_id:
                del self.loads[key]

        batch = StateBatch(offset, offset, ACQUIRED, number, f"write-{number:05d}", 1)
        self.asked().write(key, ShareState(1, 1, 0, (batch,)), load_id, reply)

    def judge(self, key: SharePartitionKey, state: ShareState) -> None:
        kept = {
            offset: batch.delivery_count
            for batch in state.batches
            for offset in range(batch.first_offset, batch.last_offset + 1)
        }
        for offset, number in self.acknowledged.get(key, {}).items():
            assert kept.get(offset, 0) >= number, f"{key}: write {number} of offset {offset} is lost: {state}"

    def marker(self) -> bytes | None:
        numbers = [number for known in self.acknowledged.values() for number in known.values()]
        return b"write-%05d" % self.random.choice(numbers) if numbers else None

    def answers(self, number: int) -> bool:
        return self.looked_at(number, KEYS[0])[0] in (ErrorCode.NONE, ErrorCode.INVALID_REQUEST)

    def looked_at(self, number: int, key: SharePartitionKey) -> tuple[int, ShareState | None]:
        found: list[tuple[int, ShareState | None]] = []
        self.scene.coordinators[number].read(key, -1, -1, lambda code, state: found.append((code, state)))
        return found[0] if found else (ErrorCode.COORDINATOR_NOT_AVAILABLE, None)

    def check(self) -> bool:
        leader = self.scene.leader()
        if leader is None:
            return False
        for key in self.acknowledged:
            code, state = self.looked_at(leader.number, key)
            if code == ErrorCode.COORDINATOR_NOT_AVAILABLE:  # a write is on its way
                continue
            if code != ErrorCode.NONE:
                return False
            assert state is not None
            self.judge(key, state)
        return True


@proves("G16", "Q1")
@pytest.mark.parametrize("layout", ["partitioned", "shared"])
@pytest.mark.parametrize("seed", range(6))
def test_what_was_kept_is_there_whoever_coordinates(seed: int, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "TOPIC", SHARE_STATE_TOPIC)
    fail_reads(monkeypatch, random.Random(seed))
    history = ShareHistory(seed, layout)
    history.run()
    assert history.acknowledged, "nothing was kept"
