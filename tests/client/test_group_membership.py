"""Members, several on one pool of connections, against a real broker: what each is given, gives up and saves."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator

import pytest

from brokers import Broker
from headrace.client.admin import groups, operations
from headrace.client.admin.cluster import Cluster
from headrace.client.connection.connections import ConnectionPool, shared
from headrace.client.connection.thread_reactor import ThreadReactor
from headrace.client.consumer.group_protocol import TopicPartition
from headrace.client.consumer.membership import Membership, State
from headrace.client.consumer.progress import NotHeld, Offsets, Saved
from headrace.client.errors import Refusal
from headrace.errors import ErrorCode, HeadraceError
from proving import proves

DEADLINE_S = 120.0
MakeTopic = Callable[..., str]


class Observer:
    """One member, and all that it was told. It answers a revocation with `reached` of what goes."""

    def __init__(
        self, pool: ConnectionPool, group: str, *topics: str, assignor: str = "average", **how: object
    ) -> None:
        self.events: list[tuple[str, frozenset[TopicPartition]]] = []
        self.positions: Offsets = {}
        self.reached: Offsets = {}
        self.unsaved: Offsets = {}
        self.errors: list[HeadraceError] = []
        self.membership = Membership(
            pool,
            group,
            topics,
            assignor,
            on_assigned=self._assigned,
            on_revoked=self._revoked,
            on_lost=lambda places: self.events.append(("lost", places)),
            on_unsaved=self.unsaved.update,
            on_error=self.errors.append,
            **{"session_timeout_ms": 6000, "beat_interval_ms": 100, "look_interval_ms": 200, **how},  # type: ignore[arg-type]
        )
        self.membership.start()

    def _assigned(self, places: frozenset[TopicPartition], positions: Offsets) -> None:
        self.events.append(("assigned", places))
        self.positions.update(positions)

    def _revoked(self, places: frozenset[TopicPartition]) -> Offsets:
        self.events.append(("revoked", places))
        return {place: offset for place, offset in self.reached.items() if place in places}

    @property
    def numbers(self) -> list[int]:
        return sorted(number for _, number in self.membership.held)

    def told(self, event: str) -> set[int]:
        return {number for kind, places in self.events if kind == event for _, number in places}


Join = Callable[..., Observer]
Wait = Callable[[Callable[[], bool]], None]


@pytest.fixture
def pool(broker: Broker) -> Iterator[ConnectionPool]:
    made = shared(broker.bootstrap, client_id=f"members-{uuid.uuid4().hex[:6]}")
    yield made
    made.release()


@pytest.fixture
def wait(pool: ConnectionPool) -> Wait:
    def until(done: Callable[[], bool]) -> None:
        reactor = pool.reactor
        assert isinstance(reactor, ThreadReactor)
        assert reactor.wait(done, time.monotonic() + DEADLINE_S)

    return until


@pytest.fixture
def join(pool: ConnectionPool, wait: Wait) -> Iterator[Join]:
    """Members that do not outlive the test."""
    joined: list[Observer] = []

    def make(group: str, *topics: str, **how: object) -> Observer:
        observer = Observer(pool, group, *topics, **how)  # type: ignore[arg-type]
        joined.append(observer)
        return observer

    yield make
    left: list[HeadraceError | None] = []
    for observer in joined:
        observer.membership.leave(left.append)
    wait(lambda: len(left) == len(joined))


@pytest.fixture
def group() -> str:
    return f"group-{uuid.uuid4().hex[:8]}"


def share(*observers: Observer) -> Callable[[], bool]:
    """Whether all are in the same generation, settled, and have six partitions between them."""

    def shared_out() -> bool:
        members = [observer.membership for observer in observers]
        settled = all(member.state is State.STABLE for member in members) and len({m.generation for m in members}) == 1
        return settled and sorted(n for observer in observers for n in observer.numbers) == list(range(6))

    return shared_out


@proves("R9")
@pytest.mark.parametrize("assignor", ["average", "room-first", "consistent-hash", "range", "cooperative"])
def test_members_of_one_process_join_and_leave(
    topic: MakeTopic, join: Join, wait: Wait, group: str, assignor: str
) -> None:
    target = topic(partitions=6)
    first = join(group, target, assignor=assignor)
    wait(share(first))
    second = join(group, target, assignor=assignor)
    wait(share(first, second))
    assert first.numbers
    assert second.numbers
    if assignor == "cooperative":
        assert first.told("revoked") == set(second.numbers)
    left: list[HeadraceError | None] = []
    first.membership.leave(left.append)
    wait(lambda: bool(left) and share(second)())
    assert left == [None]


@pytest.mark.parametrize("assignor", ["average", "cooperative"])
def test_one_who_leaves_in_the_middle_of_a_join_is_gone_at_once_and_saves_what_it_has(
    cluster: Cluster, topic: MakeTopic, join: Join, wait: Wait, group: str, assignor: str
) -> None:
    target = topic(partitions=6)
    first = join(group, target, assignor=assignor)
    wait(share(first))
    first.membership.on_poll_end()
    second = join(group, target, assignor=assignor, beat_interval_ms=60_000)
    joining = second if assignor == "average" else first
    wait(lambda: joining.membership.state is State.JOINING and bool(joining.membership.member_id))
    joining.reached = {(target, number): 7 for number in joining.numbers}
    left: list[HeadraceError | None] = []
    joining.membership.leave(left.append)
    wait(lambda: bool(left))
    assert (left, joining.errors) == ([None], [])
    other = first if joining is second else second
    other.membership.on_poll()
    wait(share(other))
    assert other.positions == ({(target, number): 7 for number in range(6)} if joining is first else {})


@proves("R8")
@pytest.mark.parametrize("assignor", ["average", "cooperative"])
def test_progress_is_saved_when_partitions_go_and_found_by_who_gets_them(
    topic: MakeTopic, join: Join, wait: Wait, group: str, assignor: str
) -> None:
    target = topic(partitions=6)
    first = join(group, target, assignor=assignor)
    wait(share(first))
    assert first.positions == {}
    first.reached = {(target, number): 100 + number for number in range(6)}
    second = join(group, target, assignor=assignor)
    wait(share(first, second))
    assert second.positions == {(target, number): 100 + number for number in second.numbers}
    first.reached = {(target, number): 200 + number for number in range(6)}
    kept = first.numbers
    left: list[HeadraceError | None] = []
    first.membership.leave(left.append)
    wait(lambda: bool(left) and share(second)())
    assert {second.positions[target, number] for number in kept} == {200 + number for number in kept}


@proves("R9")
@pytest.mark.parametrize("assignor", ["average", "room-first", "consistent-hash", "cooperative"])
def test_members_beyond_the_number_of_partitions_are_idle_until_one_goes(
    topic: MakeTopic, join: Join, wait: Wait, group: str, assignor: str
) -> None:
    target = topic(partitions=1)
    members = [join(group, target, assignor=assignor) for _ in range(3)]

    def one_has_it(*observers: Observer) -> bool:
        settled = all(observer.membership.state is State.STABLE for observer in observers)
        return settled and sorted(len(observer.numbers) for observer in observers) == [0] * (len(observers) - 1) + [1]

    wait(lambda: one_has_it(*members))
    reader = next(member for member in members if member.numbers)
    left: list[HeadraceError | None] = []
    reader.membership.leave(left.append)
    idle = [member for member in members if member is not reader]
    wait(lambda: bool(left) and one_has_it(*idle))


def test_what_the_application_works_on_is_not_given_up_before_it_comes_back(
    topic: MakeTopic, join: Join, wait: Wait, group: str
) -> None:
    target = topic(partitions=6)
    first = join(group, target)
    wait(share(first))
    first.membership.on_poll_end()
    second = join(group, target)
    wait(lambda: first.membership._rejoining)
    assert second.membership.state is State.JOINING
    assert len(first.numbers) == 6
    first.reached = {(target, number): 7 for number in range(6)}
    first.membership.on_poll()
    wait(share(first, second))
    assert set(second.positions.values()) == {7}


def test_one_who_stays_away_too_long_leaves_and_joins_again_when_back(
    topic: MakeTopic, join: Join, wait: Wait, group: str
) -> None:
    target = topic(partitions=6)
    first = join(group, target, rebalance_timeout_ms=1000)
    second = join(group, target)
    wait(share(first, second))
    first.membership.on_poll_end()
    wait(share(second))
    assert first.told("lost")
    assert first.membership.state is State.OUT
    first.membership.on_poll()
    wait(share(first, second))


@proves("R9")
@pytest.mark.parametrize("assignor", ["average", "cooperative"])
def test_partitions_that_a_topic_gains_are_shared_out(
    cluster: Cluster, topic: MakeTopic, join: Join, wait: Wait, group: str, assignor: str
) -> None:
    target = topic(partitions=2)
    members = [join(group, target, assignor=assignor) for _ in range(3)]
    wait(lambda: sum(len(member.numbers) for member in members) == 2)
    operations.create_partitions(cluster, target, 6)
    wait(share(*members))
    assert all(len(member.numbers) == 2 for member in members)


def test_a_topic_that_comes_later_is_read_when_it_is_there(
    cluster: Cluster, join: Join, wait: Wait, group: str
) -> None:
    target = f"later-{uuid.uuid4().hex[:8]}"
    member = join(group, target)
    wait(lambda: member.membership.state is State.STABLE)
    operations.create_topic(cluster, target, partitions=6)
    wait(share(member))


def test_members_with_different_assignors_agree_on_range(topic: MakeTopic, join: Join, wait: Wait, group: str) -> None:
    target = topic(partitions=6)
    members = [join(group, target, assignor=name) for name in ("average", "room-first", "consistent-hash", "range")]
    wait(share(*members))
    assert {member.membership.protocol for member in members} == {"range"}


def test_cooperative_beside_eager_is_refused_with_what_to_do(
    topic: MakeTopic, join: Join, wait: Wait, group: str
) -> None:
    target = topic(partitions=6)
    first = join(group, target)
    wait(share(first))
    second = join(group, target, assignor="cooperative")
    wait(lambda: bool(second.errors))
    assert second.errors[0].kafka_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    assert second.membership.state is State.ENDED


def test_a_static_member_returns_to_what_it_had_and_nobody_else_notices(
    topic: MakeTopic, join: Join, wait: Wait, group: str
) -> None:
    target = topic(partitions=6)
    staying = join(group, target, instance_id="staying", session_timeout_ms=20_000)
    returning = join(group, target, instance_id="returning", session_timeout_ms=20_000)
    wait(share(staying, returning))
    had, told = returning.numbers, len(staying.events)
    left: list[HeadraceError | None] = []
    returning.membership.leave(left.append)
    wait(lambda: bool(left))
    returned = join(group, target, instance_id="returning", session_timeout_ms=20_000)
    wait(lambda: returned.numbers == had)
    assert len(staying.events) == told


def test_the_second_owner_of_an_instance_fences_the_first(topic: MakeTopic, join: Join, wait: Wait, group: str) -> None:
    target = topic(partitions=6)
    first = join(group, target, instance_id="only")
    wait(share(first))
    second = join(group, target, instance_id="only")
    wait(share(second))
    wait(lambda: bool(first.errors))
    assert first.errors[0].kafka_code == ErrorCode.FENCED_INSTANCE_ID
    assert first.told("lost") == set(range(6))


def test_commits_in_a_rebalance_are_done_after_it_and_those_of_others_partitions_not_at_all(
    cluster: Cluster, topic: MakeTopic, join: Join, wait: Wait, group: str
) -> None:
    target = topic(partitions=6)
    first = join(group, target, assignor="cooperative")
    wait(share(first))
    second = join(group, target, assignor="cooperative")
    wait(lambda: first.membership.state is State.JOINING)
    done: list[HeadraceError | None] = []
    first.membership.commit({(target, number): 5 for number in range(6)}, done.append)
    wait(lambda: bool(done) and share(first, second)())
    assert done == [None]
    assert groups.fetch_offsets(cluster, group) == {(target, number): 5 for number in range(6)}
    second.membership.commit({(target, number): 9 for number in range(6)}, done.append)
    wait(lambda: len(done) == 2)
    after = groups.fetch_offsets(cluster, group)
    assert {number for (_, number), offset in after.items() if offset == 9} == set(second.numbers)
    assert isinstance(done[1], NotHeld)
    assert all(f"{target}-{number}" in str(done[1]) for number in first.numbers)


class LateProgress:
    """Commits whose answers come when the test gives them."""

    def __init__(self) -> None:
        self.answers: list[Saved] = []

    def save(self, offsets: Offsets, on_done: Saved, within_s: float = 0.0) -> None:
        self.answers.append(on_done)


def test_a_commit_that_is_refused_in_a_rebalance_while_the_member_leaves_is_told_and_nothing_joins_again(
    topic: MakeTopic, join: Join, wait: Wait, group: str
) -> None:
    target = topic(partitions=6)
    member = join(group, target, assignor="cooperative")
    wait(share(member))
    late = member.membership._progress = LateProgress()  # type: ignore[assignment]
    done: list[HeadraceError | None] = []
    left: list[HeadraceError | None] = []
    with member.membership._reactor.lock:
        member.membership.commit({(target, 0): 5}, done.append)
        member.membership.leave(left.append)
        late.answers[0](Refusal(ErrorCode.REBALANCE_IN_PROGRESS, "group"))
        assert not member.membership.held
        late.answers[1](None)
    wait(lambda: bool(done) and bool(left))
    assert isinstance(done[0], NotHeld)
    assert left == [None]
    assert member.membership.state is State.ENDED


def test_commits_that_wait_for_a_rebalance_are_refused_when_their_partitions_are_lost(
    topic: MakeTopic, join: Join, wait: Wait, group: str
) -> None:
    """Not done when the same partitions come back: others may have gone on from what was saved."""
    target = topic(partitions=6)
    member = join(group, target, assignor="cooperative")
    wait(share(member))
    done: list[HeadraceError | None] = []
    with member.membership._reactor.lock:
        member.membership._join()
        member.membership.commit({(target, 0): 5}, done.append)
        member.membership._refused(Refusal(ErrorCode.UNKNOWN_MEMBER_ID, "group"))
    wait(lambda: bool(done) and share(member)())
    assert isinstance(done[0], NotHeld)
    assert member.positions == {}
