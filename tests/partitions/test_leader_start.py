"""Where a partition begins, as its leader decides it: what all in sync have safe on disk, and never lower."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import NotLeader, OffsetNotAvailable, OffsetOutOfRange, StorageFailed
from headrace.partitions.leader_core import START_SECONDS_MAX, UNKNOWN, FollowerState, IsrChange, LagLimits, LeaderCore
from headrace.storage.checkpoint import Done
from partitions.led import Deletion, Led
from proving import proves

LEADER = 1
REPLICAS = (1, 2, 3)
RUN = {1: "a", 2: "b", 3: "c"}
END = 50


def set_of(*brokers: int) -> dict[int, str]:
    return {broker: RUN[broker] for broker in brokers}


def core_of(*isr: int, own: int = 0, told: int = 0) -> LeaderCore:
    core = LeaderCore(LEADER, 0, 0, END, set_of(*isr), replicas=REPLICAS, own_start=own, told_start=told)
    core.moved(END)
    return core


def subscribe(core: LeaderCore, broker: int) -> FollowerState:
    return core.subscribed(broker, RUN[broker], END, 0.0)


def tell(core: LeaderCore, follower: FollowerState, start: int, now: float = 0.0) -> None:
    core.position_reported(follower, END, END, END, END, now, start=start)


def wanted(core: LeaderCore, now: float) -> IsrChange | None:
    return core.judge_isr(now, END, dict.fromkeys(REPLICAS, now), LagLimits(1000.0))


Step = tuple[str, int, int] | tuple[str, frozenset[int]]
steps = st.lists(
    st.one_of(
        st.tuples(st.just("safe"), st.sampled_from(REPLICAS), st.integers(0, END)),
        st.tuples(st.just("want"), st.just(LEADER), st.integers(0, END)),
        st.tuples(
            st.sampled_from(["propose", "confirm", "refuse"]),
            st.frozensets(st.sampled_from((2, 3))).map(lambda some: some | {LEADER}),
        ),
    ),
    max_size=40,
)


@proves("F6")
@settings(deadline=None)
@given(steps, st.integers(0, END))
def test_the_start_is_what_every_replica_in_sync_has_safe_and_never_falls(course: list[Step], own: int) -> None:
    core = core_of(*REPLICAS, own=own)
    followers = {broker: subscribe(core, broker) for broker in (2, 3)}
    safe = {1: own, 2: UNKNOWN, 3: UNKNOWN}
    sets = [frozenset(REPLICAS)]
    highest, revision = own, 0
    for step in course:
        before = core.start
        if step[0] == "safe" and len(step) == 3:
            if step[1] == LEADER:  # its own rises last
                safe[LEADER] = max(safe[LEADER], min(step[2], core.agreed_start()))
            else:
                safe[step[1]] = max(safe[step[1]], step[2])
                tell(core, followers[step[1]], safe[step[1]])
        elif step[0] == "want" and len(step) == 3:
            core.want_start(step[2], 0.0)
            highest = max(highest, step[2])
        elif len(step) == 2 and step[0] == "confirm":
            sets, revision = [step[1]], revision + 1
            core.confirmed(set_of(*step[1]), revision)
        elif len(step) == 2 and step[0] == "refuse":
            sets = sets[:1]
            core.refused(0.0)
        elif len(step) == 2 and len(sets) == 1:
            sets = [sets[0], step[1]]
            core.proposed(IsrChange(set_of(*step[1]), (), (), ""))
        rose = core.start_safe(safe[LEADER])
        least = min(safe[replica] for replica in sets[0].union(*sets))
        assert core.wanted_start == highest
        assert rose == (core.start > before)
        assert core.start >= before
        if rose:
            assert core.start == min(least, highest)
        else:
            assert min(least, highest) <= core.start or min(least, highest) < own


def test_a_leader_that_begins_at_nothing_or_where_it_did_knows_its_start() -> None:
    assert core_of(*REPLICAS).start == 0
    assert core_of(*REPLICAS, own=20, told=20).start == 20
    core = core_of(*REPLICAS, own=20, told=10)
    assert core.start == UNKNOWN
    assert not core.start_safe(20)
    for broker in (2, 3):
        tell(core, subscribe(core, broker), 25)
    assert core.start_safe(20)
    assert core.start == 20


def test_a_leader_that_was_no_member_tells_no_start_below_its_own() -> None:
    """Others may have told more than it has safe on disk: it was elected by what it reported."""
    core = core_of(LEADER, own=20)
    assert not core.start_safe(0)
    assert core.start == UNKNOWN
    assert core.start_safe(20)


def test_a_replica_joins_when_it_begins_where_the_leader_wants_it() -> None:
    core = core_of(LEADER)
    core.want_start(30, 0.0)
    assert core.start_safe(30)
    follower = subscribe(core, 2)
    for start in (UNKNOWN, 0, 29):
        tell(core, follower, start)
        assert wanted(core, 0.0) is None
    tell(core, follower, 30)
    change = wanted(core, 0.0)
    assert change is not None
    assert change.added == (2,)


def test_a_member_that_begins_below_what_consumers_were_told_leaves_at_once() -> None:
    core = core_of(LEADER, 2, own=20, told=20)
    follower = subscribe(core, 2)
    assert wanted(core, 0.0) is None
    tell(core, follower, 19)
    change = wanted(core, 0.0)
    assert change is not None
    assert change.removed == (2,)


def test_a_member_that_does_not_raise_its_start_leaves_in_the_end() -> None:
    core = core_of(LEADER, 2)
    follower = subscribe(core, 2)
    tell(core, follower, 0)
    now = START_SECONDS_MAX
    core.want_start(10, now)
    core.want_start(20, now + START_SECONDS_MAX - 1)
    assert wanted(core, now + START_SECONDS_MAX) is None
    change = wanted(core, now + START_SECONDS_MAX + 1)
    assert change is not None
    assert change.removed == (2,)


def test_a_member_that_raises_its_start_again_and_again_stays() -> None:
    """Who deletes all the time always wants more than the members have."""
    core = core_of(LEADER, 2)
    follower = subscribe(core, 2)
    tell(core, follower, 0)
    now = 0.0
    for start in range(40):
        core.want_start(start + 2, now)
        now += 2.0
        tell(core, follower, start, now)
        assert wanted(core, now) is None
    assert wanted(core, now + START_SECONDS_MAX + 1) is not None


def test_a_member_has_its_time_from_when_it_was_asked() -> None:
    """Also where the start itself was not known for long: another member had not told its own."""
    core = core_of(LEADER, 2, 3, own=10)
    follower = subscribe(core, 2)
    tell(core, follower, 10)
    now = 2 * START_SECONDS_MAX
    core.want_start(20, now)
    assert wanted(core, now + START_SECONDS_MAX) is None
    assert wanted(core, now + START_SECONDS_MAX + 1) is not None


def test_a_member_that_only_tells_the_same_start_again_leaves_in_the_end() -> None:
    core = core_of(LEADER, 2)
    tell(core, subscribe(core, 2), 0)
    core.want_start(10, 0.0)
    follower = subscribe(core, 2)
    tell(core, follower, 0, START_SECONDS_MAX / 3)
    tell(core, follower, 0, START_SECONDS_MAX / 2)
    change = wanted(core, START_SECONDS_MAX + 1)
    assert change is not None
    assert change.removed == (2,)


@pytest.fixture(params=["partitioned", "shared"])
def led(request: pytest.FixtureRequest) -> Led:
    return Led(request.param)


def test_a_start_is_told_when_it_is_safe_on_disk(led: Led) -> None:
    partition = led.lead(durability="disk")
    for nth in range(9):
        led.produce(partition, b"%d" % nth)
    led.clock.run_soon()
    led.disk.hold_syncs()
    deletion = Deletion()
    led.partitions.delete_before(partition, 5, deletion)
    led.clock.run_soon()
    assert (partition.start_offset, deletion.answered) == (0, False)
    with pytest.raises(OffsetNotAvailable):
        partition.read(4, 1000)
    assert partition.read(5, 1000).count
    led.disk.release_syncs()
    led.clock.run_soon()
    assert (partition.start_offset, deletion.answered, deletion.error) == (5, True, None)
    with pytest.raises(OffsetOutOfRange):
        partition.read(4, 1000)
    again = Deletion()
    led.partitions.delete_before(partition, 3, again)
    assert again.answered
    with pytest.raises(OffsetOutOfRange):
        led.partitions.delete_before(partition, 10)


@proves("F6")
def test_a_leader_elected_by_reports_begins_where_others_had_deleted_and_tells_nothing_before(led: Led) -> None:
    """Its set is itself alone, and its watermark an old one: what others deleted was committed all the same."""
    log = led.lead(durability="disk").log
    partition = led.partitions.lead(log, 1, {1: "", 2: "b"}, (1, 2), 1)
    for nth in range(9):
        led.produce(partition, b"%d" % nth)
    led.clock.run_soon()
    assert partition.high_watermark == 0
    led.partitions.follow(log, 2, -1)
    led.disk.hold_syncs()
    partition = led.partitions.lead(log, 3, {1: "", 2: "b"}, (1, 2), 2, least_start=5)
    assert (partition.core and partition.core.wanted_start, partition.high_watermark) == (5, 5)
    assert (partition.start_offset, log.start_offset) == (UNKNOWN, 0), "the other member has told nothing yet"
    partition = led.partitions.lead(log, 4, {1: ""}, (1, 2), 3, least_start=5)
    assert (partition.start_offset, log.start_offset) == (UNKNOWN, 5)
    with pytest.raises(OffsetNotAvailable):
        partition.first_offset()
    led.disk.release_syncs()
    led.clock.run_soon()
    assert partition.first_offset() == 5
    partition = led.partitions.lead(log, 5, {1: ""}, (1, 2), 4, least_start=5)
    assert partition.first_offset() == 5, "told before"


def test_a_start_that_is_not_safe_says_so_and_is_tried_again(led: Led) -> None:
    partition = led.lead()
    for _ in range(9):
        led.produce(partition)
    led.clock.run_soon()
    led.disk.fail_write("/data/@checkpoint.tmp", errno.EIO)
    deletion = Deletion()
    led.partitions.delete_before(partition, 5, deletion)
    led.clock.run_soon()
    assert isinstance(deletion.error, StorageFailed)
    assert partition.start_offset == 0
    led.clock.advance(6)
    assert partition.start_offset == 5


def test_a_start_that_cannot_rise_says_so_and_retention_may_want_it_again(
    led: Led, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = led.lead()
    for _ in range(9):
        led.produce(partition)
    led.clock.run_soon()

    def fails(_offset: int, _done: Done) -> None:
        raise OSError(errno.ENOSPC, "no room for a snapshot")

    deletion = Deletion()
    with monkeypatch.context() as patched:
        patched.setattr(partition.log, "delete_before", fails)
        led.partitions.delete_before(partition, 5, deletion)
    assert isinstance(deletion.error, StorageFailed)
    assert (partition.log.start_offset, partition.log.retiring_to) == (0, 0)
    partition.log.retire(5)
    led.clock.run_soon()
    assert partition.start_offset == 5


def test_files_that_cannot_be_removed_do_not_hold_up_the_start(led: Led, monkeypatch: pytest.MonkeyPatch) -> None:
    partition = led.lead(segment_bytes=1024)
    for _ in range(9):
        led.produce(partition, bytes(500))
    led.clock.run_soon()

    def fails(source: str, _target: str) -> None:
        raise OSError(errno.EIO, "no", source)

    deletion = Deletion()
    with monkeypatch.context() as patched:
        patched.setattr(led.disk, "rename", fails)
        led.partitions.delete_before(partition, 5, deletion)
    led.clock.advance(6)
    assert (deletion.answered, deletion.error) == (True, None)
    assert partition.start_offset == partition.log.safe_start_offset == 5, "also where nothing more comes"


def test_who_waits_for_a_start_is_answered_when_the_role_ends(led: Led) -> None:
    partition = led.lead()
    led.produce(partition)
    led.clock.run_soon()
    led.disk.hold_syncs()
    deletion = Deletion()
    led.partitions.delete_before(partition, 1, deletion)
    led.partitions.follow(partition.log, 1, 7)
    assert isinstance(deletion.error, NotLeader)
    led.disk.release_syncs()
    led.clock.run_soon()
    with pytest.raises(NotLeader):
        led.partitions.delete_before(partition, 1)
