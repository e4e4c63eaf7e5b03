"""Lanes against a log that keeps the broker's own rules for sequences, under every mishap that a batch can meet.

The log is `storage.producers.ProducerTable`, as brokers have it. Requests may be refused, lost, answered late or never,
and may linger in a connection that the client has given up, to be worked on whenever it hurts most.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from headrace.client.producer.lane import Fate, Lane, LaneBatch, Outcome, outcome_of_code
from headrace.errors import HeadraceError
from headrace.records.batch import BatchHeader
from headrace.storage.producers import Load, LogProducers, ProducerLoads, ProducerTable
from headrace.virtual.clock import VirtualClock
from proving import proves

NOT_ENOUGH_REPLICAS = 19
TIMED_OUT = 7
NOT_LEADER = 6
TOO_LARGE = 10
INVALID = 87
NO_LIMIT = 1 << 30

Content = tuple[tuple[int, ...], bool]
"""The records, as numbers, and whether the broker will not have them."""


@dataclass(slots=True, eq=False)
class Batch(LaneBatch):
    content: Content = ((), False)


def _no_producers(_past_damage: bool) -> Load:
    yield
    return LogProducers()


class Log:
    """Batches in order, with the broker's memory of producers."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, int, int, tuple[int, ...]]] = []
        self._table = ProducerTable(ProducerLoads(VirtualClock()), _no_producers)

    def append(self, request: Sent) -> int:
        """The code that a broker answers."""
        if request.pid < 0:
            self.batches.append((request.pid, request.epoch, request.sequence, request.uids))
            return 0
        header = BatchHeader(
            0, 100, -1, 2, 0, 0, request.count - 1, 0, 0, request.pid, request.epoch, request.sequence, request.count
        )
        try:
            offset = self._table.check(header)
        except HeadraceError as error:
            return error.kafka_code
        if offset is None:
            self._table.appended(header, len(self.batches))
            self.batches.append((request.pid, request.epoch, request.sequence, request.uids))
        return 0

    def forget_producers(self) -> None:
        self._table.forget()

    @property
    def uids(self) -> list[int]:
        return [uid for _, _, _, uids in self.batches for uid in uids]


@dataclass(frozen=True)
class Sent:
    batch: Batch
    attempt: int
    pid: int
    epoch: int
    sequence: int
    count: int
    uids: tuple[int, ...]
    denied: bool


@dataclass
class World:
    """One lane, one log, one connection in use and any number of forgotten ones that may still carry requests."""

    rng: random.Random
    idempotent: bool = True
    in_flight: int = 5
    now: float = 1000.0
    leader: int = 1
    log: Log = field(default_factory=Log)
    requests: deque[Sent] = field(default_factory=deque)
    answers: deque[tuple[Sent, int]] = field(default_factory=deque)
    ghosts: list[deque[Sent]] = field(default_factory=list)
    fates: dict[int, Fate] = field(default_factory=dict)
    added: int = 0
    pid: int = 500
    most: int = 3
    limit: int = NO_LIMIT
    """How many records the log takes in a batch."""
    large: set[int] = field(default_factory=set)
    """Records that are too large by themselves."""

    def __post_init__(self) -> None:
        self.lane: Lane[Batch] = Lane("t", 0, -1, self.idempotent, self.in_flight)

    def add(self, *, timeout_s: float = 30.0, denied: bool = False, count: int = 0) -> Batch:
        uids = tuple(range(self.added, self.added + (count or self.rng.randint(1, self.most))))
        self.added += len(uids)
        batch = Batch(len(uids), self.now + timeout_s, content=(uids, denied))
        self.lane.add(batch)
        return batch

    def note(self, verdicts: list[tuple[Batch, Fate]]) -> None:
        for batch, fate in verdicts:
            for uid in batch.content[0]:
                assert uid not in self.fates, "a fate is told once"
                self.fates[uid] = fate

    def send(self) -> None:
        while True:
            if self.lane.wants_producer_id:
                self.lane.adopt(self.pid, 0)
                self.pid += 1
            batch = self.lane.next(self.now, self.leader)
            if batch is None and self.lane.wants_producer_id:
                continue
            if batch is None:
                return
            uids, denied = batch.content
            stamp = (batch.producer_id, batch.epoch, batch.sequence)
            self.requests.append(Sent(batch, batch.attempt, *stamp, batch.count, uids, denied))

    def work(self, code: int = 0, after: bool = False) -> None:
        """The broker works on the oldest request: refused with `code` before or after it is appended, or appended."""
        request = self.requests.popleft()
        appended = 0
        if self.too_large(request):
            appended = TOO_LARGE
        elif request.denied:
            appended = INVALID
        elif code == 0 or after:
            appended = self.log.append(request)
        self.answers.append((request, appended or code))

    def answer(self) -> None:
        request, code = self.answers.popleft()
        batch, outcome = request.batch, outcome_of_code(code)
        if outcome is Outcome.TOO_LARGE and self.lane.splits(batch, request.attempt):
            self.split(batch)
        else:
            self.note(self.lane.answered(batch, request.attempt, outcome, self.now))

    def too_large(self, request: Sent) -> bool:
        """As the broker has it: sizes come before sequences."""
        return request.count > self.limit or not self.large.isdisjoint(request.uids)

    def split(self, batch: Batch) -> None:
        uids, denied = batch.content
        cuts = sorted(self.rng.sample(range(1, len(uids)), self.rng.randint(1, min(2, len(uids) - 1))))
        pieces = [uids[start:end] for start, end in pairwise((0, *cuts, len(uids)))]
        self.lane.split(batch, [Batch(len(piece), batch.deadline, content=(piece, denied)) for piece in pieces])

    def cut(self, outcome: Outcome = Outcome.UNSURE) -> None:
        """The connection breaks: answers are lost; requests may be worked on later, for nobody."""
        lost = [request for request, _ in self.answers] + list(self.requests)
        if outcome is Outcome.UNSURE and self.requests:
            self.ghosts.append(deque(self.requests))
        self.requests.clear()
        self.answers.clear()
        for request in lost:
            self.note(self.lane.answered(request.batch, request.attempt, outcome, self.now))

    def haunt(self) -> None:
        connection = self.rng.choice(self.ghosts)
        request = connection.popleft()
        if not request.denied and not self.too_large(request):
            self.log.append(request)
        self.ghosts = [each for each in self.ghosts if each]

    def move(self) -> None:
        self.leader += 1
        if self.rng.random() < 0.5:
            pending = deque(self.requests)
            if pending:
                self.ghosts.append(pending)
            self.requests.clear()
            self.answers.clear()
            self.note(self.lane.abandon(self.now))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.note(self.lane.expire(self.now))

    def settle(self) -> None:
        """No more mishaps: everything gets its fate."""
        while not self.lane.idle or self.requests or self.answers:
            self.wait(1.0)
            self.send()
            while self.requests:
                self.work()
            while self.answers:
                self.answer()
        while self.ghosts:
            self.haunt()

    def check(self) -> None:
        written = self.log.uids
        assert sorted(set(written)) == sorted(written), "written twice"
        assert set(self.fates) == set(range(self.added)), "no fate was told"
        delivered = {uid for uid, fate in self.fates.items() if fate is Fate.DELIVERED}
        assert delivered <= set(written), "lost"
        failed = {uid for uid, fate in self.fates.items() if fate is Fate.FAILED}
        assert not failed & set(written), "told as not written, but it is"
        assert written == sorted(written), "overtaken"


def mishap(world: World) -> None:
    """One thing that happens, good or bad."""
    rng = world.rng
    if rng.random() < 0.3:
        world.add(timeout_s=rng.choice([0.3, 2.0, 30.0]), denied=rng.random() < 0.03)
    world.send()
    drawn = rng.random()
    if drawn < 0.35 and world.requests:
        world.work()
    elif drawn < 0.45 and world.requests:
        world.work(rng.choice([NOT_ENOUGH_REPLICAS, NOT_LEADER, -1]))
    elif drawn < 0.52 and world.requests:
        world.work(rng.choice([TIMED_OUT, NOT_LEADER, -1]), after=True)
    elif drawn < 0.75 and world.answers:
        world.answer()
    elif drawn < 0.78:
        world.cut()
    elif drawn < 0.79 and not world.answers:
        world.cut(Outcome.NEVER_SENT)
    elif drawn < 0.84 and world.ghosts:
        world.haunt()
    elif drawn < 0.86:
        world.move()
    elif drawn < 0.88:
        world.limit = rng.choice([1, 2, 3, NO_LIMIT])
    elif drawn < 0.89:
        world.large.add(rng.randrange(world.added + 3))
    else:
        world.wait(rng.choice([0.001, 0.05, 0.5]))


def histories(seed: object, count: int) -> None:
    for nth in range(count):
        world = World(random.Random(f"{seed} {nth}"), most=6)
        for _ in range(150):
            mishap(world)
        world.settle()
        world.check()


@proves("J10")
def test_nothing_is_lost_doubled_or_overtaken_whatever_happens(seed: int) -> None:
    histories(seed, 300)


@proves("J10")
@pytest.mark.long
def test_nothing_is_lost_doubled_or_overtaken_in_many_histories(seed: int, proof_report: Callable[..., None]) -> None:
    histories(seed, 20_000)
    proof_report(histories=20_000, events=20_000 * 150)


def test_the_checker_finds_a_new_identity_that_does_not_fence_the_old_one(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    renew = Lane._renew

    def under_another_id(lane: Lane[Batch]) -> None:
        renew(lane)
        lane.wants_producer_id = True

    monkeypatch.setattr(Lane, "_renew", under_another_id)
    with pytest.raises(AssertionError, match="overtaken"):
        histories(seed, 300)


def test_the_checker_finds_a_batch_sent_under_a_new_epoch_while_the_old_one_may_be_written(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lane, "_old_epoch_serves", lambda lane, first: False)
    with pytest.raises(AssertionError, match="twice"):
        histories(seed, 300)


def test_the_checker_finds_a_loss(seed: int) -> None:
    world = World(random.Random(seed))
    for _ in range(3):
        world.add()
    world.settle()
    world.check()
    world.log.batches.pop(1)
    with pytest.raises(AssertionError, match="lost"):
        world.check()


@pytest.fixture
def world(seed: int) -> World:
    return World(random.Random(seed))


def proven(world: World) -> World:
    world.add()
    world.settle()
    return world


def test_the_first_batch_travels_alone_and_then_five(world: World) -> None:
    for _ in range(9):
        world.add()
    world.send()
    assert len(world.requests) == 1
    world.work()
    world.answer()
    world.send()
    assert len(world.requests) == 5
    world.settle()
    world.check()
    assert world.lane.renewals == 0


@pytest.mark.parametrize("why", ["leader", "silence", "failure"])
def test_a_batch_travels_alone_again_after(world: World, why: str) -> None:
    proven(world)
    if why == "leader":
        world.leader += 1
    elif why == "silence":
        world.now += 61.0
    else:
        world.add()
        world.send()
        world.cut()
        world.now += 1.0
    world.add()
    world.add()
    world.send()
    assert len(world.requests) == 1


def test_batches_in_flight_behind_a_refused_one_follow_it(world: World) -> None:
    proven(world)
    for _ in range(3):
        world.add()
    world.send()
    world.work(NOT_ENOUGH_REPLICAS)
    world.settle()
    world.check()
    assert set(world.fates.values()) == {Fate.DELIVERED}
    assert world.lane.renewals == 0


def test_a_batch_that_no_try_will_help_fails_alone_and_the_rest_goes_under_a_new_epoch(world: World) -> None:
    proven(world)
    refused = world.add(denied=True)
    for _ in range(3):
        world.add()
    world.settle()
    world.check()
    assert {uid for uid, fate in world.fates.items() if fate is not Fate.DELIVERED} == set(refused.content[0])
    assert (world.lane.renewals, world.lane.epoch) == (1, 1)


def test_a_batch_refused_for_its_size_goes_on_in_parts_under_its_sequences_and_the_rest_follows(world: World) -> None:
    proven(world)
    for count in (8, 1, 3, 7, 5):
        world.add(count=count)
    world.send()
    assert len(world.requests) == 5
    world.limit = 2
    world.settle()
    world.check()
    assert set(world.fates.values()) == {Fate.DELIVERED}
    assert all(len(uids) <= 2 for _, _, _, uids in world.log.batches[1:])
    assert (world.lane.renewals, world.lane.epoch) == (0, 0)


def test_a_record_that_is_too_large_fails_alone(world: World) -> None:
    proven(world)
    for _ in range(5):
        world.add(count=8)
    world.large.add(world.added - 2)
    world.settle()
    world.check()
    assert {uid for uid, fate in world.fates.items() if fate is not Fate.DELIVERED} == world.large


def test_parts_of_a_batch_that_may_be_written_are_not_written_again(world: World) -> None:
    proven(world)
    batch = world.add(count=8)
    world.send()
    world.work(TIMED_OUT, after=True)
    world.answer()
    world.limit = 1
    world.settle()
    world.check()
    assert world.fates[batch.content[0][0]] is Fate.UNKNOWN


def test_once_a_part_is_written_no_other_is_in_doubt_for_the_whole(world: World) -> None:
    proven(world)
    batch = world.add(count=8)
    world.add(count=2)
    world.send()
    world.work(TIMED_OUT)
    world.answer()
    world.large.add(batch.content[0][7])
    world.settle()
    world.check()
    assert {uid: fate for uid, fate in world.fates.items() if fate is not Fate.DELIVERED} == {
        batch.content[0][7]: Fate.FAILED
    }


@pytest.mark.parametrize("first", [Outcome.WRITTEN, Outcome.DUPLICATE])
def test_a_part_stays_in_doubt_for_its_own_try_or_if_the_log_may_have_the_whole(world: World, first: Outcome) -> None:
    lane = proven(world).lane
    whole = world.add(count=2)
    world.send()
    world.work(TIMED_OUT)
    world.answer()
    world.wait(1.0)
    world.send()
    parts = [Batch(1, whole.deadline), Batch(1, whole.deadline)]
    lane.split(whole, parts)
    lane._proven_at = world.now
    assert [lane.next(world.now, world.leader) for _ in parts] == parts
    if first is Outcome.WRITTEN:
        lane.answered(parts[1], 1, Outcome.UNSURE, world.now)
    lane.answered(parts[0], 1, first, world.now)
    assert parts[1].unsure


def test_the_checker_finds_parts_that_forget_that_they_may_be_written(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = Lane.split

    def forgetful(lane: Lane[Batch], batch: Batch, parts: Sequence[Batch]) -> None:
        batch.unsure = False
        split(lane, batch, parts)

    monkeypatch.setattr(Lane, "split", forgetful)
    with pytest.raises(AssertionError, match=r"twice|overtaken|told as not written"):
        histories(seed, 600)


def test_a_late_acknowledgement_of_a_batch_told_as_unknown_leaves_no_hole(world: World) -> None:
    proven(world)
    late = world.add(timeout_s=1.0)
    world.send()
    world.wait(2.0)
    assert world.fates[late.content[0][0]] is Fate.UNKNOWN
    world.add()
    world.settle()
    world.check()
    assert world.lane.renewals == 0


def test_a_batch_given_up_with_an_attempt_out_is_fenced_off_by_a_new_epoch(world: World) -> None:
    proven(world)
    world.add(timeout_s=1.0)
    world.send()
    world.cut()
    world.wait(2.0)
    world.add()
    world.send()
    world.work()
    world.answer()
    world.haunt()
    world.settle()
    world.check()
    assert world.lane.renewals == 1
    assert len(world.log.batches) == 2, "the lingering request was not taken"


def test_a_log_that_claims_what_it_never_had_is_not_believed(world: World) -> None:
    proven(world)
    batch = world.add()
    world.send()
    request = world.requests.popleft()
    world.note(world.lane.answered(batch, request.attempt, Outcome.DUPLICATE, world.now))
    assert not world.lane.idle
    world.settle()
    world.check()
    assert set(world.fates.values()) == {Fate.DELIVERED}


def test_a_log_that_lost_acknowledged_batches_is_written_on_under_a_new_epoch(world: World) -> None:
    for _ in range(2):
        proven(world)
    world.log = Log()
    world.log.append(Sent(Batch(1, 0), 1, 500, 0, 0, 1, (), False))
    world.lane._next_sequence += 5
    world.add()
    world.settle()
    assert set(world.fates.values()) == {Fate.DELIVERED}
    assert world.lane.renewals == 1


def test_a_batch_that_may_be_written_is_not_sent_again_when_the_log_has_forgotten_its_predecessors(
    world: World,
) -> None:
    proven(world)
    batch = world.add()
    world.send()
    request = world.requests.popleft()
    world.note(world.lane.answered(batch, request.attempt, Outcome.UNSURE, world.now))
    world.wait(1.0)
    world.send()
    request = world.requests.popleft()
    world.note(world.lane.answered(batch, request.attempt, Outcome.OUT_OF_ORDER, world.now))
    assert world.fates[batch.content[0][0]] is Fate.UNKNOWN


def test_a_fenced_lane_goes_on_under_a_producer_id_of_its_own(world: World) -> None:
    proven(world)
    batch = world.add()
    world.send()
    request = world.requests.popleft()
    world.note(world.lane.answered(batch, request.attempt, Outcome.FENCED, world.now))
    world.settle()
    world.check()
    assert world.log.batches[-1][:3] == (501, 0, 0)


def test_epochs_that_are_used_up_bring_a_new_producer_id(world: World) -> None:
    proven(world)
    world.lane.epoch = 32_766
    world.add(denied=True)
    world.add()
    world.settle()
    assert world.log.batches[-1][:2] == (501, 0)


def test_an_answer_to_an_attempt_that_was_given_up_says_nothing(world: World) -> None:
    proven(world)
    batch = world.add()
    world.send()
    stale = world.requests.popleft()
    assert world.lane.abandon(world.now) == []
    world.leader += 1
    world.send()
    assert world.lane.answered(batch, stale.attempt, Outcome.FATAL, world.now) == []
    world.settle()
    world.check()
    assert set(world.fates.values()) == {Fate.DELIVERED}


def test_a_batch_that_never_left_can_go_elsewhere_and_one_that_may_be_written_cannot(world: World) -> None:
    proven(world)
    first, second = world.add(), world.add()
    world.send()
    world.cut(Outcome.NEVER_SENT)
    assert world.lane.release(first)
    assert not first.stamped
    world.wait(1.0)
    world.send()
    world.cut(Outcome.UNSURE)
    assert not world.lane.release(second)
    world.fates.update(dict.fromkeys(first.content[0], Fate.FAILED))
    world.settle()
    world.check()


def test_without_an_identity_batches_are_tried_again_and_the_window_is_kept(seed: int) -> None:
    world = World(random.Random(seed), idempotent=False, in_flight=1)
    for _ in range(20):
        world.add(timeout_s=100.0)
    for _ in range(60):
        world.send()
        assert len(world.requests) <= 1
        if world.requests:
            world.work(world.rng.choice([0, NOT_ENOUGH_REPLICAS]))
            world.answer()
        world.wait(0.6)
    world.settle()
    world.check()
    assert set(world.fates.values()) == {Fate.DELIVERED}


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (0, Outcome.WRITTEN),
        (-1, Outcome.FATAL_UNKNOWN),
        (2, Outcome.REFUSED),
        (3, Outcome.UNSURE),
        (6, Outcome.UNSURE),
        (7, Outcome.UNSURE),
        (10, Outcome.TOO_LARGE),
        (18, Outcome.TOO_LARGE),
        (19, Outcome.REFUSED),
        (20, Outcome.UNSURE),
        (29, Outcome.FATAL),
        (45, Outcome.OUT_OF_ORDER),
        (46, Outcome.DUPLICATE),
        (47, Outcome.FENCED),
        (56, Outcome.UNSURE),
        (59, Outcome.OUT_OF_ORDER),
        (87, Outcome.FATAL),
        (30_000, Outcome.FATAL_UNKNOWN),
    ],
)
def test_what_an_answer_says_of_a_batch(code: int, outcome: Outcome) -> None:
    assert outcome_of_code(code) is outcome
