"""Share groups of a broker that is killed, and loses power and with it records that were not synced, while what is kept
of the groups is: each record that is there is delivered until it is accepted, and not again, whatever lay at its offset
before."""

from __future__ import annotations

from random import Random

import pytest

from headrace.errors import ErrorCode
from headrace.queues.messages import AcknowledgementBatch, AcknowledgeType, Acquired, TopicIdPartition
from headrace.records import kernel
from headrace.records.batch import batches
from headrace.storage.folder import PARTITIONED, SHARED
from partitions.led import Outcome, batch
from proving import proves
from queues.scene import GROUP, values
from queues.share_walk import KEY, LOCK_MS, LOGS, MEMBERS, ORDERS, PLACE, SMALL, Member, World
from storage.harness import settings

STEPS = 80
HISTORIES = 20
LOSING = {**LOGS, ORDERS: (LOGS[ORDERS][0], settings(**{**SMALL, "durability": "memory"}))}


class LosingWorld(World):
    """Records are known by their values: an offset may have had several."""

    def __init__(self, layout: str, random: Random) -> None:
        super().__init__(layout, LOSING)
        self.random = random
        self.number = 0
        self.having: dict[int, tuple[str, bytes | None]] = {}
        self.accepted_values: set[bytes | None] = set()
        self.unsure_values: set[bytes | None] = set()

    def run(self) -> None:
        self.start()
        codes: list[int] = []
        self.persister.initialize(KEY, 0, -1, codes.append)
        self.settle()
        assert codes == [ErrorCode.NONE]
        steps = (self.write, self.take, self.acknowledge, self.disturb)
        for _ in range(STEPS):
            self.random.choices(steps, (25, 25, 30, 20))[0]()
        self.judge()

    def write(self) -> None:
        count = self.random.randint(1, 5)
        made = batch(*[b"%d" % (self.number + each) for each in range(count)])
        self.number += count
        self.partitions.submit(self.partition, made, -1, 1000, Outcome())
        self.partitions.end_turn()
        self.settle(0.1)

    def take(self) -> None:
        self._take(self.random.choice(MEMBERS), self.random.randint(1, 6))

    def _take(self, member: str, most: int) -> None:
        fetching = Member(self, member)
        fetching.fetch(most)
        self.settle(0.2)
        fetching.answered = True

    def delivered(self, member: str, acquired: Acquired) -> None:
        if acquired.error_code == ErrorCode.NONE:
            for offset, value in values(acquired).items():
                assert value not in self.accepted_values, f"{value!r} was accepted, and is delivered again"
                self.having[offset] = member, value

    def acknowledge(self) -> None:
        some = self.random.sample(sorted(self.having), min(len(self.having), self.random.randint(0, 6)))
        for offset in some:
            self.tell(offset, self.random.choice((AcknowledgeType.ACCEPT,) * 3 + (AcknowledgeType.RELEASE,)))
        self.settle(0.1)

    def tell(self, offset: int, how: AcknowledgeType) -> None:
        member, value = self.having.pop(offset)

        def heard(codes: dict[TopicIdPartition, int]) -> None:
            if how is AcknowledgeType.ACCEPT and codes[PLACE] == ErrorCode.NONE:
                self.accepted_values.add(value)

        if how is AcknowledgeType.ACCEPT:
            self.unsure_values.add(value)
        self.shares.acknowledge(GROUP, member, {PLACE: [AcknowledgementBatch(offset, offset, (int(how),))]}, heard)

    def disturb(self) -> None:
        drawn = self.random.randrange(6)
        if drawn == 0:
            self.shares.release(GROUP, self.random.choice(MEMBERS))
        elif drawn == 1:
            self.shares.begin(GROUP)
        elif drawn == 2:
            self.settle(self.random.choice((1, 6)))
        elif drawn == 3:
            start = self.partition.log.start_offset + self.random.randint(0, 5)
            self.partitions.delete_before(self.partition, min(self.partition.high_watermark, start))
        else:
            self.kill()
            if drawn == 5:
                self.disk.crash(self.random.randrange(1 << 30))
                self.having.clear()
            self.start()
        self.settle(0.1)

    def judge(self) -> None:
        self.settle(2 * LOCK_MS / 1000)
        self.having.clear()
        unsure = self.unsure_values - self.accepted_values
        while True:
            self._take("judge", 50)
            if not self.having:
                break
            for offset in list(self.having):
                self.tell(offset, AcknowledgeType.ACCEPT)
            self.settle(0.3)
        lost = {at: value for at, value in self.kept().items() if value not in self.accepted_values | unsure}
        assert not lost, f"{lost} are delivered to nobody"

    def kept(self) -> dict[int, bytes | None]:
        """What the log has, by offset."""
        log, found = self.partition.log, dict[int, bytes | None]()
        offset = log.start_offset
        while offset < log.end_offset:
            before = offset
            for piece in log.read(offset, 1 << 20, log.end_offset, warm=True).slices:
                for header, view in batches(memoryview(piece.read())):
                    found |= {record.offset: record.value for record in kernel.records(view)}
                    offset = header.next_offset
            assert offset > before
        return {at: value for at, value in found.items() if at >= log.start_offset}


@proves("Q1")
@pytest.mark.thorough
@pytest.mark.parametrize("layout", [PARTITIONED, SHARED])
def test_what_comes_in_the_place_of_lost_records_is_delivered(layout: str, seed: int) -> None:
    for history in range(HISTORIES):
        random = Random(f"{seed} {history}")
        try:
            LosingWorld(layout, random).run()
        except AssertionError as error:
            raise AssertionError(f"history {history}: {error}") from error
