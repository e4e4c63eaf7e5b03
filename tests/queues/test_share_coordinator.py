"""A share coordinator keeps what it is told, refuses whom it must, and its successor knows the same."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from headrace.errors import ErrorCode
from headrace.queues import share_coordinator, state_changes
from headrace.queues.messages import SharePartitionKey, ShareState, ShareSummary, StateBatch
from headrace.queues.share_coordinator import DROPPED_PER_TURN, PAUSE_SECONDS, WAITING_MAX
from headrace.queues.state_changes import MEMBER_BYTES_MAX, RANGES_MAX
from headrace.queues.state_records import SLOTS_MAX, decode_key, encode_key
from queues.state_scene import (
    ACQUIRED,
    ARCHIVED,
    AVAILABLE,
    KEY,
    TOPIC,
    Scene,
    acknowledged,
    acquired,
    changed,
)

NONE = ErrorCode.NONE


@pytest.fixture
def scene() -> Scene:
    made = Scene()
    assert made.initialize() == [NONE]
    return made


def slots(scene: Scene, key: SharePartitionKey = KEY) -> list[int]:
    found = [decode_key(encoded) for encoded, _value in scene.log]
    return [slot for one in found if one is not None for of, slot in [one] if of == key]


# What is kept


def test_what_is_written_is_read_by_the_next_leader_and_by_the_next_coordinator(scene: Scene) -> None:
    assert scene.write(changed(acquired(0, 9), acknowledged(10, 11))) == [NONE]
    assert scene.write(changed(acknowledged(0, 4), start=5)) == [NONE]
    expected = ShareState(1, 1, 5, (acquired(5, 9), acknowledged(10, 11)))
    assert scene.read(2) == [(NONE, expected)]
    scene.take_over()
    assert scene.read(2) == [(NONE, expected)]


def test_who_reads_hears_the_epoch_of_the_last_write(scene: Scene) -> None:
    """What offsets mean is known in the epoch in which they were written: the log may have lost some since."""
    assert scene.read(3) == [(NONE, ShareState(1, 3, 0))], "nothing is written yet"
    scene.write(changed(acquired(0, 4), leader_epoch=3))
    assert scene.read(7, 70) == [(NONE, ShareState(1, 3, 0, (acquired(0, 4),)))]
    assert scene.summary() == (NONE, ShareSummary(1, 7, 0, 0))
    scene.take_over()
    assert scene.read(8, 80) == [(NONE, ShareState(1, 3, 0, (acquired(0, 4),)))]
    scene.write(changed(start=2, leader_epoch=8), 80)
    assert scene.read(9) == [(NONE, ShareState(1, 8, 2, (acquired(2, 4),)))]
    scene.initialize(state_epoch=2, start=50)
    scene.take_over()
    assert scene.read(9) == [(NONE, ShareState(2, 9, 50))]


def test_the_start_never_goes_back_for_whoever_writes(scene: Scene) -> None:
    scene.write(changed(start=10))
    scene.write(changed(acknowledged(3, 12), start=4))
    assert scene.state() == ShareState(1, 1, 10, (acknowledged(10, 12),))


def test_the_start_goes_back_for_a_leader_whose_log_has_lost_its_end(scene: Scene) -> None:
    """What comes in the place of the lost records was delivered to nobody, however often the state is loaded."""
    scene.read(1, 70)
    scene.write(changed(acquired(12, 14), start=10), 70)
    scene.read(2, 80)
    lost_from = changed(StateBatch(4, 14, AVAILABLE, 0), start=4, leader_epoch=2)
    assert scene.write(lost_from, 80) == [NONE]
    assert scene.write(changed(acquired(4, 6), start=4, leader_epoch=2), 80) == [NONE]
    scene.compact(len(scene.log))
    scene.take_over()
    expected = ShareState(1, 2, 4, (acquired(4, 6), StateBatch(7, 14, AVAILABLE, 0)))
    assert scene.read(3, 90) == [(NONE, expected)]


def test_a_start_that_is_not_known_is_set_by_the_first_write(scene: Scene) -> None:
    other = SharePartitionKey("others", TOPIC, 3)
    scene.initialize(other, start=-1)
    assert scene.state(other) == ShareState(1, 0, -1)
    scene.write(changed(start=0), key=other)
    assert scene.state(other) == ShareState(1, 1, 0)


def test_a_summary_counts_what_is_done_with(scene: Scene) -> None:
    scene.write(
        changed(acknowledged(0, 4), StateBatch(5, 5, ARCHIVED, 5), acquired(6, 9), StateBatch(10, 12, AVAILABLE, 1))
    )
    assert scene.summary() == (NONE, ShareSummary(1, 1, 0, 6))
    assert scene.summary(0) == (ErrorCode.FENCED_LEADER_EPOCH, None)
    nothing = SharePartitionKey("nobody", TOPIC, 0)
    assert scene.summary(key=nothing) == (NONE, ShareSummary(0, 0, -1, -1))


def test_what_is_decided_in_one_turn_is_one_append(scene: Scene) -> None:
    keys = [SharePartitionKey("workers", TOPIC, partition) for partition in range(1, 6)]
    codes: list[int] = []
    before = len(scene.appends)
    for key in keys:
        scene.coordinator.initialize(key, 1, 0, codes.append)
    scene.clock.run_soon()
    assert (codes, len(scene.appends)) == ([NONE] * 5, before + 1)


# Fencing


def test_an_older_leader_writes_and_reads_nothing_any_more(scene: Scene) -> None:
    assert scene.read(5)[0][0] == NONE
    assert scene.write(changed(acquired(0, 1), leader_epoch=4)) == [ErrorCode.FENCED_LEADER_EPOCH]
    assert scene.read(4) == [(ErrorCode.FENCED_LEADER_EPOCH, None)]
    scene.take_over()
    assert scene.write(changed(acquired(0, 1), leader_epoch=4)) == [ErrorCode.FENCED_LEADER_EPOCH]
    assert scene.write(changed(acquired(0, 1), leader_epoch=5)) == [NONE]


def test_a_read_fences_from_its_answer_on_and_not_before(scene: Scene) -> None:
    scene.held = True
    read = scene.read(5)
    assert read == []
    assert scene.summary(1)[0] == NONE
    scene.acknowledge()
    assert read[0][0] == NONE
    assert scene.summary(1)[0] == ErrorCode.FENCED_LEADER_EPOCH


@pytest.mark.parametrize("state_epoch", [1, 3])
def test_what_was_decided_under_another_state_epoch_is_not_kept(scene: Scene, state_epoch: int) -> None:
    scene.write(changed(acknowledged(0, 4), start=5))
    assert scene.initialize(state_epoch=2, start=2) == [NONE]
    assert scene.write(changed(acquired(5, 6), state_epoch=state_epoch)) == [ErrorCode.FENCED_STATE_EPOCH]
    assert scene.state() == ShareState(2, 1, 2)
    scene.take_over()
    assert scene.write(changed(acquired(5, 6), state_epoch=state_epoch)) == [ErrorCode.FENCED_STATE_EPOCH]
    assert scene.initialize(state_epoch=1, start=9) == [ErrorCode.FENCED_STATE_EPOCH]
    assert scene.state() == ShareState(2, 1, 2)


def test_who_initializes_again_because_the_answer_was_lost_takes_nothing_back(scene: Scene) -> None:
    scene.write(changed(acknowledged(0, 4), start=5))
    assert scene.initialize(start=0) == [NONE]
    assert scene.state() == ShareState(1, 1, 5)


def test_a_write_of_an_earlier_load_comes_too_late(scene: Scene) -> None:
    """A leader gives up a write that is held up on its way, reads again, and goes on: what it has answered since must
    not be undone when the write arrives after all."""
    assert scene.read(1, 77)[0][0] == NONE
    assert scene.write(changed(acquired(0, 9)), 77) == [NONE]
    assert scene.read(1, 78)[0][1] == ShareState(1, 1, 0, (acquired(0, 9),))
    assert scene.write(changed(acknowledged(0, 9)), 78) == [NONE]
    late = changed(StateBatch(0, 9, AVAILABLE, 1))
    assert scene.write(late, 77) == [ErrorCode.FENCED_LEADER_EPOCH]
    scene.take_over()
    assert scene.write(late, 77) == [ErrorCode.FENCED_LEADER_EPOCH]
    assert scene.write(changed(acknowledged(10, 11)), 78) == [NONE]
    assert scene.state() == ShareState(1, 1, 0, (acknowledged(0, 11),))


def test_a_read_sees_the_writes_that_were_begun_before_it(scene: Scene) -> None:
    scene.held = True
    written = scene.write(changed(acquired(0, 9)))
    read = scene.read(1, 5)
    scene.acknowledge()
    scene.acknowledge()
    assert (written, read) == ([NONE], [(NONE, ShareState(1, 1, 0, (acquired(0, 9),)))])


# Who is refused


def test_what_is_not_initialized_is_neither_read_nor_written() -> None:
    scene = Scene()
    assert scene.read() == [(ErrorCode.INVALID_REQUEST, None)]
    assert scene.write(changed(acquired(0, 1))) == [ErrorCode.INVALID_REQUEST]
    assert scene.delete() == [NONE]
    assert (scene.log, len(scene.coordinator)) == ([], 0)


def test_topics_that_there_are_not_have_no_share_partitions() -> None:
    scene = Scene(unknown={TOPIC})
    assert scene.initialize() == [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    assert scene.read() == [(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, None)]
    assert scene.write(changed()) == [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    assert len(scene.coordinator) == 0


@pytest.mark.parametrize(
    "key",
    [
        SharePartitionKey("", TOPIC, 0),
        SharePartitionKey("g" * 256, TOPIC, 0),
        SharePartitionKey("g", bytes(16), 0),
        SharePartitionKey("g", TOPIC[1:], 0),
        SharePartitionKey("g", TOPIC, -1),
    ],
)
def test_keys_that_cannot_be_are_refused(scene: Scene, key: SharePartitionKey) -> None:
    assert scene.initialize(key) == scene.write(changed(), key=key) == scene.delete(key) == [ErrorCode.INVALID_REQUEST]
    assert scene.read(key=key) == [(ErrorCode.INVALID_REQUEST, None)]
    assert scene.summary(key=key) == (ErrorCode.INVALID_REQUEST, None)


@pytest.mark.parametrize(
    "batch",
    [
        StateBatch(-1, 4, AVAILABLE, 1),
        StateBatch(5, 4, AVAILABLE, 1),
        StateBatch(5, 5, AVAILABLE, -1),
        StateBatch(5, 5, AVAILABLE, 1, "m1"),
        StateBatch(5, 5, ARCHIVED, 1, "", 1),
        StateBatch(5, 5, ACQUIRED, 1, "m1", -1),
        StateBatch(5, 5, ACQUIRED, 1, "m" * (MEMBER_BYTES_MAX + 1), 1),
    ],
)
def test_batches_that_cannot_be_are_refused_with_all_of_their_write(scene: Scene, batch: StateBatch) -> None:
    assert scene.write(changed(acquired(0, 1), batch)) == [ErrorCode.INVALID_REQUEST]
    assert scene.state() == ShareState(1, 0, 0)


def test_offsets_and_epochs_that_cannot_be_are_refused(scene: Scene) -> None:
    assert scene.write(changed(start=-2)) == [ErrorCode.INVALID_REQUEST]
    assert scene.initialize(start=-2, state_epoch=2) == [ErrorCode.INVALID_REQUEST]
    assert scene.initialize(state_epoch=-1) == [ErrorCode.INVALID_REQUEST]
    assert scene.read(-2) == [(ErrorCode.FENCED_LEADER_EPOCH, None)]


def test_ranges_are_bounded(scene: Scene) -> None:
    halves = [acquired(2 * number, 2 * number) for number in range(RANGES_MAX // 2)]
    more = [acquired(2 * number, 2 * number) for number in range(RANGES_MAX // 2, RANGES_MAX)]
    assert scene.write(changed(*halves)) == [NONE]
    assert scene.write(changed(*halves, *more, acquired(2 * RANGES_MAX, 2 * RANGES_MAX))) == [
        ErrorCode.POLICY_VIOLATION
    ]
    assert scene.write(changed(*more)) == [NONE]
    assert scene.write(changed(acquired(2 * RANGES_MAX, 2 * RANGES_MAX))) == [ErrorCode.POLICY_VIOLATION]
    assert scene.write(changed(start=2)) == [NONE]
    assert scene.write(changed(acquired(2 * RANGES_MAX, 2 * RANGES_MAX))) == [NONE]


def test_share_partitions_are_bounded(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share_coordinator, "SHARE_PARTITIONS_MAX", 2)
    keys = [SharePartitionKey("workers", TOPIC, partition) for partition in (1, 2)]
    assert [scene.initialize(key) for key in keys] == [[NONE], [ErrorCode.POLICY_VIOLATION]]
    assert len(scene.coordinator) == 2


def test_requests_that_wait_for_a_share_partition_are_bounded(scene: Scene) -> None:
    scene.held = True
    codes = [scene.write(changed(acquired(number, number))) for number in range(WAITING_MAX + 2)]
    assert codes[-1] == [ErrorCode.COORDINATOR_NOT_AVAILABLE]
    scene.held = False
    scene.acknowledge()
    assert codes[:-1] == [[NONE]] * (WAITING_MAX + 1)


# Appends that fail


@pytest.mark.parametrize("logged", [True, False])
@pytest.mark.parametrize(
    "step",
    [
        lambda scene: scene.write(changed(acknowledged(0, 4), start=5)),
        lambda scene: scene.initialize(state_epoch=2, start=40),
        lambda scene: scene.read(7, 70),
        lambda scene: scene.delete(),
    ],
    ids=["write", "initialize", "read", "delete"],
)
def test_what_could_not_be_kept_has_not_happened_whether_it_is_in_the_log_or_not(
    scene: Scene, step: Callable[[Scene], list[object]], logged: bool
) -> None:
    scene.write(changed(acquired(0, 9)))
    before = scene.state()
    scene.held = True
    answers = step(scene)
    scene.acknowledge(ErrorCode.REQUEST_TIMED_OUT, logged=logged)
    scene.held = False
    assert answers in ([ErrorCode.COORDINATOR_NOT_AVAILABLE], [(ErrorCode.COORDINATOR_NOT_AVAILABLE, None)])
    assert scene.state() == before
    assert scene.write(changed(acquired(20, 29))) == [NONE]
    assert before is not None
    expected = ShareState(1, 1, 0, (acquired(0, 9), acquired(20, 29)))
    assert scene.state() == expected
    scene.take_over()
    assert scene.state() == expected


def test_the_same_write_again_after_a_lost_answer_changes_nothing_more(scene: Scene) -> None:
    write = changed(acknowledged(0, 4), acquired(5, 9), start=5)
    scene.held = True
    scene.write(write)
    scene.acknowledge(ErrorCode.REQUEST_TIMED_OUT)
    scene.held = False
    assert scene.write(write) == scene.write(write) == [NONE]
    expected = ShareState(1, 1, 5, (acquired(5, 9),))
    assert scene.state() == expected
    scene.take_over()
    assert scene.write(write) == [NONE]
    assert scene.state() == expected


def test_who_waits_goes_on_after_an_append_that_has_failed(scene: Scene) -> None:
    scene.held = True
    first, second = scene.write(changed(acquired(0, 4))), scene.write(changed(acquired(5, 9)))
    scene.acknowledge(ErrorCode.NOT_ENOUGH_REPLICAS)
    scene.acknowledge()
    assert (first, second) == ([ErrorCode.COORDINATOR_NOT_AVAILABLE], [NONE])
    scene.held = False
    assert scene.state() == ShareState(1, 1, 0, (acquired(5, 9),))


def test_a_record_that_is_too_large_is_refused_for_good(scene: Scene) -> None:
    scene.held = True
    codes = scene.write(changed(acquired(0, 4)))
    scene.acknowledge(ErrorCode.MESSAGE_TOO_LARGE, logged=False)
    assert codes == [ErrorCode.POLICY_VIOLATION]


# Leadership


def test_who_waits_when_the_lead_ends_looks_for_the_next_coordinator(scene: Scene) -> None:
    scene.held = True
    codes = [scene.write(changed(acquired(0, 4))), scene.write(changed(acquired(5, 9)))]
    scene.coordinator.resign(0)
    assert codes == [[], [ErrorCode.NOT_COORDINATOR]]
    assert scene.write(changed(acquired(0, 4))) == [ErrorCode.NOT_COORDINATOR]
    scene.acknowledge(ErrorCode.NOT_LEADER_OR_FOLLOWER, logged=False)
    assert codes[0] == [ErrorCode.NOT_COORDINATOR]


def test_what_was_not_appended_when_the_lead_ends_is_not(scene: Scene) -> None:
    codes: list[int] = []
    before = len(scene.log)
    scene.coordinator.write(KEY, changed(acquired(0, 4)), -1, codes.append)
    scene.coordinator.resign(0)
    scene.clock.run_soon()
    assert (codes, len(scene.log)) == ([ErrorCode.NOT_COORDINATOR], before)


def test_a_partition_that_loads_says_so(scene: Scene) -> None:
    loading = scene.coordinator.lead(0, scene.epoch)
    assert scene.write(changed()) == [ErrorCode.COORDINATOR_LOAD_IN_PROGRESS]
    assert scene.summary()[0] == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    loading.replay(scene.log)
    loading.ready()
    assert scene.state() == ShareState(1, 0, 0)


def test_a_load_that_was_overtaken_opens_nothing(scene: Scene) -> None:
    loading = scene.coordinator.lead(0, scene.epoch)
    loading.replay(scene.log)
    scene.coordinator.resign(0)
    assert not loading.wanted
    loading.ready()
    assert scene.write(changed()) == [ErrorCode.NOT_COORDINATOR]


# Slots


def test_updates_take_one_slot_after_the_other_until_the_next_snapshot(scene: Scene) -> None:
    for number in range(2 * SLOTS_MAX):
        assert scene.write(changed(start=number)) == [NONE]
    written = slots(scene)
    assert set(written) <= set(range(SLOTS_MAX + 1))
    for before, after in pairwise(written):
        assert after in (before + 1, 0)
    assert written.count(0) > 1
    scene.compact(len(scene.log))
    assert len(scene.log) <= SLOTS_MAX + 1
    scene.take_over()
    assert scene.state() == ShareState(1, 1, 2 * SLOTS_MAX - 1)


def test_slots_end_where_they_must_though_there_is_room(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.queues.state_shard.UPDATES_LEAST_BYTES", 1 << 20)
    for number in range(SLOTS_MAX + 1):
        scene.write(changed(start=number))
    assert slots(scene) == [0, *range(1, SLOTS_MAX + 1), 0]


def test_updates_that_outgrow_their_snapshot_give_way_to_the_next(scene: Scene) -> None:
    wide = [acquired(2 * number, 2 * number) for number in range(100)]
    scene.write(changed(*wide))
    scene.write(changed(acquired(1000, 1000)))
    scene.write(changed(*wide))
    assert slots(scene) == [0, 0, 1, 0]


# Deletion


def test_what_is_deleted_is_gone_with_all_of_its_records(scene: Scene) -> None:
    for number in range(5):
        scene.write(changed(start=number))
    assert scene.delete() == [NONE]
    assert (scene.state(), len(scene.coordinator)) == (None, 0)
    scene.compact(len(scene.log))
    assert all(value is None for _key, value in scene.log)
    scene.take_over()
    assert len(scene.coordinator) == 0
    assert scene.initialize(start=30) == [NONE]
    scene.take_over()
    assert scene.state() == ShareState(1, 0, 30)


def test_what_could_not_be_initialized_can_be_deleted() -> None:
    """Its record may be in the log after all, and would come back with the next coordinator."""
    scene = Scene(held=True)
    codes = scene.initialize()
    scene.acknowledge(ErrorCode.REQUEST_TIMED_OUT)
    scene.held = False
    assert codes == [ErrorCode.COORDINATOR_NOT_AVAILABLE]
    assert scene.delete() == [NONE]
    scene.take_over()
    assert (scene.state(), len(scene.coordinator)) == (None, 0)


def test_a_deletion_that_was_cut_short_is_finished_by_the_next_coordinator(scene: Scene) -> None:
    for number in range(5):
        scene.write(changed(start=number))
    scene.log.append((encode_key(KEY, 0), None))
    scene.take_over()
    assert len(scene.coordinator) == 0
    assert scene.read() == [(ErrorCode.INVALID_REQUEST, None)]
    scene.compact(len(scene.log))
    assert all(value is None for _key, value in scene.log)


def test_what_is_initialized_before_a_deletion_is_finished_stays(scene: Scene) -> None:
    scene.write(changed(start=3))
    scene.log.append((encode_key(KEY, 0), None))
    scene.held = True
    scene.take_over()
    codes = scene.initialize(start=50)
    scene.acknowledge(ErrorCode.REQUEST_TIMED_OUT)
    scene.held = False
    scene.acknowledge()
    scene.clock.advance(2 * PAUSE_SECONDS)
    assert codes == [NONE]
    assert scene.state() == ShareState(1, 0, 50)
    scene.take_over()
    assert scene.state() == ShareState(1, 0, 50)


def test_share_partitions_of_deleted_topics_are_deleted_some_after_the_others() -> None:
    scene = Scene()
    other = b"another topic id"
    count = 2 * DROPPED_PER_TURN + 1
    for number in range(count):
        scene.initialize(SharePartitionKey(f"g{number}", TOPIC, 0))
    scene.initialize(SharePartitionKey("g", other, 0))
    appends = len(scene.appends)
    scene.coordinator.drop_topics({TOPIC})
    scene.clock.advance(1)
    assert len(scene.appends) == appends + 3
    assert len(scene.coordinator) == 1
    scene.take_over()
    assert len(scene.coordinator) == 1


def test_a_topics_share_partitions_are_deleted_when_that_can_be_kept(scene: Scene) -> None:
    scene.held = True
    under_way = scene.write(changed(acquired(0, 1)))
    scene.coordinator.drop_topics({TOPIC})
    scene.acknowledge()
    assert under_way == [NONE]
    scene.acknowledge(ErrorCode.NOT_ENOUGH_REPLICAS, logged=False)
    scene.held = False
    assert len(scene.coordinator) == 1
    scene.clock.advance(2 * PAUSE_SECONDS)
    assert len(scene.coordinator) == 0


# Compaction and losses


def test_any_compaction_leaves_the_same_states(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes, snapshots, failures and deletions at random, compaction up to some place and loads in between."""
    rng = random.Random(seed)
    for run in range(25):
        monkeypatch.setattr("headrace.queues.state_shard.UPDATES_LEAST_BYTES", rng.choice((0, 100, 1000, 1 << 20)))
        scene = Scene()
        keys = [SharePartitionKey(f"g{number}", TOPIC, number) for number in range(3)]
        starts = dict.fromkeys(keys, 0)
        epochs = dict.fromkeys(keys, 1)
        failed: set[SharePartitionKey] = set()
        for _ in range(60):
            key = rng.choice(keys)
            if some_step(rng, scene, key, starts, epochs):
                failed.add(key)
            if rng.random() < 0.2:
                scene.compact(rng.randrange(len(scene.log) + 1))
            if rng.random() < 0.2:
                # Of what has failed the log may have more, until something is kept that says how things are.
                doubtful = {key for key in failed if scene.write(ShareState(-1, -1, -1), key=key) != [NONE]}
                expected = {key: (scene.state(key), scene.summary(key=key)) for key in keys if key not in doubtful}
                scene.take_over()
                found = {key: (scene.state(key), scene.summary(key=key)) for key in expected}
                assert found == expected, f"run {run}"
                failed.clear()
        per_key = len(keys) * (SLOTS_MAX + 1)
        scene.compact(len(scene.log))
        assert len(scene.log) <= per_key


def some_step(
    rng: random.Random,
    scene: Scene,
    key: SharePartitionKey,
    starts: dict[SharePartitionKey, int],
    epochs: dict[SharePartitionKey, int],
) -> bool:
    """Whether it has failed."""
    scene.held = fails = rng.random() < 0.15
    match rng.choice(("write", "write", "write", "write", "write", "initialize", "read", "delete")):
        case "initialize":
            epochs[key] += 1
            scene.initialize(key, epochs[key], rng.randrange(30))
        case "read":
            scene.read(rng.randrange(1, 4), rng.randrange(100), key)
        case "delete" if rng.random() < 0.3:
            scene.delete(key)
        case _:
            starts[key] += rng.choice((0, 0, 1, 4))
            first = starts[key] + rng.randrange(20)
            batch = rng.choice((acquired, acknowledged))(first, first + rng.randrange(5))
            scene.write(ShareState(-1, -1, starts[key], (batch,)), key=key)
    if fails:
        scene.acknowledge(ErrorCode.REQUEST_TIMED_OUT, logged=rng.random() < 0.5)
        scene.held = False
    return fails


def test_replaying_the_same_records_again_changes_nothing(scene: Scene) -> None:
    for number in range(20):
        scene.write(changed(acquired(number, number + 3), start=number))
    expected = scene.state()
    loading = scene.coordinator.lead(0, scene.epoch)
    for record in scene.log:
        loading.replay([record])
        loading.replay([record])
    loading.ready()
    assert scene.state() == expected


def test_after_a_loss_the_leader_of_the_data_has_to_read_again(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """It knows more than what is left, and would write changes to what is not there."""
    scene.read(1, 70)
    scene.write(changed(acquired(0, 9)), 70)
    left = len(scene.log)
    scene.write(changed(acknowledged(0, 9), start=10), 70)
    loading = scene.coordinator.lead(0, scene.epoch)
    loading.replay(scene.log[:left])
    loading.lost()
    with caplog.at_level(logging.ERROR):
        loading.ready()
    assert "records of 1 share partitions are lost" in caplog.text
    assert scene.write(changed(acquired(10, 11)), 70) == [ErrorCode.FENCED_LEADER_EPOCH]
    assert scene.read(1, 71) == [(NONE, ShareState(1, 1, 0, (acquired(0, 9),)))]
    assert scene.write(changed(acquired(10, 11)), 71) == [NONE]


def test_a_lost_update_in_the_middle_is_noticed(scene: Scene) -> None:
    scene.read(1, 70)
    for number in range(3):
        scene.write(changed(acquired(number, number)), 70)
    del scene.log[-2]
    scene.take_over()
    assert scene.write(changed(acquired(5, 5)), 70) == [ErrorCode.FENCED_LEADER_EPOCH]
    scene.read(1, 71)
    assert slots(scene)[-1] == 0, "a snapshot says again how things are"
    scene.take_over()
    assert scene.write(changed(acquired(5, 5)), 71) == [NONE]


def test_updates_of_a_snapshot_that_is_lost_are_passed_over(scene: Scene) -> None:
    """They belong to another state than the one that is left."""
    scene.write(changed(acquired(0, 0)))
    scene.initialize(state_epoch=2, start=100)
    lost = scene.log.pop()
    for number in range(3):
        scene.write(changed(acquired(100 + number, 100 + number), state_epoch=2))
    scene.take_over()
    assert scene.state() == ShareState(1, 1, 0, (acquired(0, 0),))
    assert decode_key(lost[0]) == (KEY, 0)


def test_what_was_written_since_a_loss_is_not_doubted(scene: Scene) -> None:
    loading = scene.coordinator.lead(0, scene.epoch)
    loading.lost()
    loading.replay(scene.log)
    loading.ready()
    scene.read(1, 70)
    assert scene.write(changed(acquired(0, 1)), 70) == [NONE]


def test_records_of_other_kinds_are_passed_over(scene: Scene) -> None:
    scene.log.append((b"\x00\x09 of a later version", b"whatever"))
    scene.take_over()
    assert scene.state() == ShareState(1, 0, 0)


def test_steps_know_no_share_partition_without_a_state() -> None:
    assert state_changes.read(None, 1, 1) == ErrorCode.INVALID_REQUEST
    assert state_changes.write(None, changed(), 1) == ErrorCode.INVALID_REQUEST
