"""Members of a share group under drawn faults: a write that fails, or is kept and not told; a keeper that answers late
and in any order; a lead that begins anew; retention. Judged by what the members are told, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest

from headrace.errors import ErrorCode
from headrace.partitions.partition import Partition
from headrace.queues.messages import AcknowledgementBatch, AcknowledgeType, Acquired
from headrace.storage.folder import PARTITIONED, SHARED
from proving import proves
from queues.letter_scene import LetterScene
from queues.scene import GROUP, Fetch, Scene, place, values

MEMBERS = ("a", "b", "c", "d")
WAYS = (AcknowledgeType.ACCEPT,) * 3 + (AcknowledgeType.RELEASE, AcknowledgeType.RENEW)
STEPS = 150
HISTORIES = 20
PASSES = frozenset({ErrorCode.LEADER_NOT_AVAILABLE, ErrorCode.NOT_LEADER_OR_FOLLOWER})
"""Who hears these knows nothing of what became of it."""


@dataclass
class Held:
    """What a member was told that it may process."""

    member: str
    until: float
    count: int = 0
    """Its delivery count."""
    asked: bool = False
    """An acknowledgement of it is on its way."""


@dataclass
class World:
    random: Random
    layout: str
    scene: Scene = field(init=False)
    partition: Partition = field(init=False)
    held: dict[int, Held] = field(default_factory=dict)
    accepted: set[int] = field(default_factory=set)
    rejected: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)
    """Those that were accepted when their lock was over."""
    fetching: dict[str, Fetch] = field(default_factory=dict)
    told: int = 0
    ways: tuple[AcknowledgeType, ...] = WAYS

    def __post_init__(self) -> None:
        self.scene = self.make_scene(record_locks_max=self.random.choice((5, 50, 2000)))
        self.partition = self.scene.lead(records=5)

    def make_scene(self, **config: object) -> Scene:
        return Scene(self.layout, lock_ms=5000, delivery_count_limit=1000, **config)  # type: ignore[arg-type]

    @property
    def now(self) -> float:
        return self.scene.clock.now()

    def run(self, steps: int) -> None:
        often: list[Callable[[], None]] = [self.produce, self.fetch, self.fetch, self.acknowledge, self.acknowledge]
        for _ in range(steps):
            self.random.choice(often if self.random.random() < 0.7 else self.rare_steps())()
            self.scene.clock.run_soon()
        self.drain()

    def rare_steps(self) -> list[Callable[[], None]]:
        return [self.advance, self.end_session, self.fault, self.answer, self.lead, self.retain]

    # What happens.

    def produce(self) -> None:
        self.scene.produce(self.partition, self.random.randint(1, 6))

    def fetch(self) -> None:
        member = self.random.choice(MEMBERS)
        if member in self.fetching and not self.fetching[member].replies:
            return
        most, limit = self.random.randint(1, 8), self.random.random() < 0.5
        where = place(self.partition)
        self.fetching[member] = self.scene.fetch(
            self.partition,
            member=member,
            most=most,
            record_limit=limit,
            on_reply=lambda found: self._delivered(member, found[where]),
        )

    def _delivered(self, member: str, acquired: Acquired) -> None:
        if acquired.error_code != ErrorCode.NONE:
            assert acquired.error_code in PASSES
            return
        for offset, value in values(acquired).items():
            assert value == b"%d" % offset
            assert offset not in self.accepted, f"{offset} was accepted, and is delivered again"
            assert offset not in self.rejected, f"{offset} was rejected, and is delivered again"
            other = self.held.get(offset)
            assert other is None or other.until <= self.now + 0.001 or other.asked, f"{offset} is locked by {other}"
            # The lock runs since it was acquired, which may be a while ago: nobody is told for how long.
            self.held[offset] = Held(member, self.now)
            self.told += 1
        for first, last, count in acquired.records:
            assert count >= 1
            for offset in range(first, last + 1):
                self.held[offset].count = count
                self.held[offset].until = self._kept_until(offset, self.held[offset])

    def _kept_until(self, offset: int, held: Held) -> float:
        """Of a later delivery to the same member, nothing is known yet."""
        kept = self.scene.kept(self.partition).offsets.get(offset)
        if kept is None or (kept.member, kept.count) != (held.member, held.count):
            return self.now
        return self.now + (kept.until_ms - self.scene.clock.wall_ms()) / 1000

    def acknowledge(self) -> None:
        mine = sorted(at for at, held in self.held.items() if not held.asked)
        if not mine:
            return
        first = self.random.choice(mine)
        member = self.held[first].member
        last = first
        while last + 1 in self.held and self.held[last + 1].member == member and not self.held[last + 1].asked:
            last += 1
        how = self.random.choice(self.ways)
        asked = {at: self.held[at] for at in range(first, last + 1)}
        valid = all(held.until > self.now + 0.001 for held in asked.values())
        for held in asked.values():
            held.asked = True

        def heard(codes: dict[tuple[bytes, int], int]) -> None:
            self._acknowledged(asked, how, codes[place(self.partition)], valid=valid)

        said = {place(self.partition): [AcknowledgementBatch(first, last, (int(how),))]}
        self.scene.shares.acknowledge(GROUP, member, said, heard)

    def _acknowledged(self, asked: dict[int, Held], how: AcknowledgeType, code: int, *, valid: bool) -> None:
        holds = valid and all(self.held.get(at) is held and held.until > self.now + 0.001 for at, held in asked.items())
        assert code in PASSES or code == ErrorCode.NONE or not holds, f"{code} for a lock that holds"
        for offset, held in asked.items():
            current = self.held.get(offset)
            if current is not held:
                if current is not None and current.member == held.member:  # for which it may have been taken
                    del self.held[offset]
                continue
            if code == ErrorCode.NONE and how == AcknowledgeType.ACCEPT:
                self.accepted.add(offset)
                if not valid:  # below the start all is well, whatever became of it
                    self.late.add(offset)
            if code == ErrorCode.NONE and how == AcknowledgeType.REJECT:
                self.rejected.add(offset)
                if not valid:
                    self.late.add(offset)
            if code == ErrorCode.NONE and how == AcknowledgeType.RENEW:
                held.asked, held.until = False, self._kept_until(offset, held)
            else:
                del self.held[offset]

    def advance(self) -> None:
        self.scene.clock.advance(self.random.choice((0.01, 0.3, 2, 6)))

    def end_session(self) -> None:
        member = self.random.choice(MEMBERS)
        self.scene.shares.release(GROUP, member)
        if member in self.fetching:  # what it is answered from now on goes nowhere
            fetch = self.fetching.pop(member)
            fetch.give_up()
            fetch.on_reply = None
        for offset in [at for at, held in self.held.items() if held.member == member]:
            del self.held[offset]

    def fault(self) -> None:
        persister = self.scene.persister
        code = self.random.choice((ErrorCode.COORDINATOR_NOT_AVAILABLE, ErrorCode.NOT_COORDINATOR))
        kind = self.random.randint(0, 3)
        if kind == 0:
            persister.faults.append((self.random.choice(("read", "write")), code))
        elif kind == 1:
            persister.lost_answers = 1
        else:
            persister.held = not persister.held

    def answer(self) -> None:
        """In any order, but what is asked of one broker for one lead stays in its order."""
        persister = self.scene.persister
        if persister.on_the_way and self.random.random() < 0.3:
            self.random.shuffle(persister.on_the_way)
        persister.answer(self.random.randint(1, 3))

    def lead(self) -> None:
        self.partition = self.scene.lead_again(self.partition)
        if self.random.random() < 0.5:
            self.scene.shares.follow()

    def retain(self) -> None:
        start, end = self.partition.log.start_offset, self.partition.high_watermark
        if self.random.random() < 0.3:
            self.scene.led.partitions.delete_before(self.partition, self.random.randint(start, end))

    # The end.

    def drain(self) -> None:
        """Without faults every record ends accepted, or deleted."""
        persister, scene = self.scene.persister, self.scene
        persister.held, persister.lost_answers, persister.faults = False, 0, []
        for member in MEMBERS:
            scene.shares.release(GROUP, member)
        self.held.clear()
        for fetch in self.fetching.values():
            fetch.give_up()
            fetch.on_reply = None
        persister.answer()
        scene.clock.advance(20)
        end = self.partition.log.end_offset
        for _ in range(end + 10):
            if scene.persister.kept and scene.kept(self.partition).start == end:
                break
            fetch = scene.fetch(self.partition, member="last")
            scene.clock.advance(1)
            if not fetch.replies:
                scene.clock.advance(10)
            for first, last, _ in fetch.ranges(self.partition):
                assert self.accepted.isdisjoint(range(first, last + 1))
                assert scene.acknowledge(self.partition, first, last, member="last").code == ErrorCode.NONE
        assert scene.kept(self.partition).start == end


@proves("Q1")
@pytest.mark.parametrize("layout", [PARTITIONED, SHARED])
def test_nothing_accepted_is_delivered_again_no_lock_is_broken_and_nothing_is_lost(layout: str, seed: int) -> None:
    told = 0
    for history in range(HISTORIES):
        world = World(Random(f"{seed}-{history}"), layout)
        world.run(STEPS)
        told += world.told
    assert told > HISTORIES * 10, "much was delivered under faults"


@dataclass
class LetterWorld(World):
    """Records are rejected too, and their dead letters go to a broker that is away at times, or whose answers are
    lost."""

    ways: tuple[AcknowledgeType, ...] = (*WAYS, AcknowledgeType.REJECT, AcknowledgeType.REJECT)
    retains: bool = False

    def make_scene(self, **config: object) -> LetterScene:
        limit = self.random.choice((4, 1000))
        self.letters = LetterScene(self.layout, lock_ms=5000, delivery_count_limit=limit, **config)  # type: ignore[arg-type]
        return self.letters

    def rare_steps(self) -> list[Callable[[], None]]:
        steps = [*super().rare_steps(), self.letter_fault, self.letter_fault]
        return steps if self.retains else [each for each in steps if each != self.retain]

    def letter_fault(self) -> None:
        if self.random.random() < 0.5:
            self.letters.away = not self.letters.away
        else:
            self.letters.lost_answers = self.random.randint(1, 3)

    def _delivered(self, member: str, acquired: Acquired) -> None:
        written = set(self.letters.offsets())
        given = {at for first, last, _ in acquired.records for at in range(first, last + 1)}
        assert written.isdisjoint(given), "a dead letter was written of what is delivered"
        super()._delivered(member, acquired)

    def drain(self) -> None:
        self.letters.away, self.letters.lost_answers = False, 0
        super().drain()
        self.scene.clock.advance(100)
        written = self.letters.offsets()
        assert self.retains or len(set(written)) == len(written), "a dead letter was written twice"
        assert (self.accepted - self.late).isdisjoint(written)
        there = {at for at in self.rejected - self.late if at >= self.partition.log.start_offset}
        assert there <= set(written), "a dead letter is lost"


@proves("R10", "Q1")
@pytest.mark.parametrize("retains", [False, True])
@pytest.mark.parametrize("layout", [PARTITIONED, SHARED])
def test_no_dead_letter_is_lost_or_written_twice(layout: str, retains: bool, seed: int) -> None:
    written = 0
    for history in range(HISTORIES):
        world = LetterWorld(Random(f"{seed}-{history}-{retains}"), layout, retains=retains)
        world.run(STEPS)
        written += len(world.letters.offsets())
    assert written > HISTORIES, "many were written under faults"
