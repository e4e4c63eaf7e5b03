"""Share partitions at the leader of their data: what leaves when, who is woken, and what survives."""

from __future__ import annotations

import pytest

from headrace.errors import ErrorCode
from headrace.queues import led_share_partition, log_read, share_partitions
from headrace.queues.messages import AcknowledgementBatch, Acquired, AcquireRequest, Reason, TopicIdPartition
from headrace.records.isolation import Isolation
from headrace.storage.folder import PARTITIONED, SHARED
from headrace.storage.log import TopicPartition
from partitions.test_partition_transactions import Transactional
from queues.scene import ACCEPT, GROUP, RELEASE, Acknowledged, Fetch, Scene, place, sent_offsets, values

RETRY = ErrorCode.COORDINATOR_NOT_AVAILABLE


@pytest.fixture(params=[PARTITIONED, SHARED])
def scene(request: pytest.FixtureRequest) -> Scene:
    return Scene(request.param)


# What leaves when.


def test_a_delivery_leaves_when_it_is_kept(scene: Scene) -> None:
    partition = scene.lead(records=5)
    scene.fetch(partition, member="warm-up").give_up()
    scene.shares.release(GROUP, "warm-up")
    scene.clock.run_soon()
    scene.persister.held = True
    fetch = scene.fetch(partition)
    assert not fetch.replies
    scene.persister.answer()
    assert fetch.ranges(partition) == [(0, 4, 1)]
    assert values(fetch.of(partition)) == {at: b"%d" % at for at in range(5)}
    assert scene.kept(partition).offsets[4].member == "a"


def test_an_acknowledgement_is_answered_when_it_is_kept(scene: Scene) -> None:
    partition = scene.lead(records=5)
    scene.fetch(partition)
    scene.persister.held = True
    heard = scene.acknowledge(partition, 0, 4)
    assert not heard.replies
    scene.persister.answer()
    assert heard.code == ErrorCode.NONE
    assert scene.kept(partition).start == 5


def test_what_comes_while_a_write_is_under_way_goes_with_the_next(scene: Scene) -> None:
    partition = scene.lead(records=1)
    scene.fetch(partition)
    scene.persister.held = True
    scene.produce(partition, 9)
    before = len(scene.persister.writes)
    fetches = [scene.fetch(partition, most=1, record_limit=True, member=f"m{each}") for each in range(9)]
    heard = scene.acknowledge(partition, 0, 0)
    scene.persister.answer(1)
    scene.clock.run_soon()
    assert [len(fetch.replies) for fetch in fetches] == [1] + [0] * 8
    scene.persister.answer(1)
    assert [fetch.ranges(partition) for fetch in fetches] == [[(at, at, 1)] for at in range(1, 10)]
    assert heard.code == ErrorCode.NONE
    assert len(scene.persister.writes) == before + 2


def test_who_acknowledges_and_acquires_in_one_turn_has_one_write(scene: Scene) -> None:
    partition = scene.lead(records=3)
    scene.fetch(partition)
    scene.produce(partition, 2)
    before, heard = len(scene.persister.writes), Acknowledged()
    scene.shares.acknowledge(GROUP, "a", {place(partition): [AcknowledgementBatch(0, 2, ACCEPT)]}, heard)
    fetch = scene.fetch(partition)
    assert (heard.code, fetch.ranges(partition)) == (ErrorCode.NONE, [(3, 4, 1)])
    assert len(scene.persister.writes) == before + 1


def test_only_batches_with_acquired_records_are_sent(scene: Scene) -> None:
    partition = scene.lead()
    for _ in range(4):
        scene.produce(partition, 3)
    scene.fetch(partition)
    scene.acknowledge(partition, 1, 1, RELEASE)
    scene.acknowledge(partition, 10, 10, RELEASE)
    fetch = scene.fetch(partition, member="b")
    assert fetch.ranges(partition) == [(1, 1, 2), (10, 10, 2)]
    assert sent_offsets(fetch.of(partition)) == [0, 1, 2, 9, 10, 11]
    assert values(fetch.of(partition)) == {1: b"1", 10: b"10"}


def test_one_fetch_shares_its_limits_among_its_partitions(scene: Scene) -> None:
    one, two = scene.lead("one", records=4), scene.lead("two", records=4)
    fetch = scene.fetch(one, two, most=6, record_limit=True)
    assert (fetch.ranges(one), fetch.ranges(two)) == ([(0, 3, 1)], [(0, 1, 1)])
    small = scene.fetch(two, one, max_bytes=1, member="b")
    assert list(small.reply) == [place(two)], "the first batch is sent whatever its size, and no other"


def test_a_fetch_of_many_partitions_gives_others_their_turn(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share_partitions, "PLACES_PER_TURN", 2)
    partitions = [scene.lead(name, records=1) for name in ("one", "two", "three")]
    scene.fetch(*partitions, member="a")
    scene.produce(partitions[2])
    places = [place(each) for each in partitions]
    heard: list[dict[TopicIdPartition, Acquired]] = []
    scene.shares.acquire(AcquireRequest(GROUP, "b", 500, 1 << 20, 1 << 20), places, heard.append)
    looked_at = scene.shares.find(scene.key(partitions[2]))
    assert isinstance(looked_at, led_share_partition.LedSharePartition)
    assert looked_at.core is not None
    assert looked_at.core.next_offset == 1, "not yet"
    scene.clock.run_soon()
    assert [tuple(each) for each in heard[0][places[2]].records] == [(1, 1, 1)]


def test_a_fetch_is_told_only_so_many_codes(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share_partitions, "REFUSALS_MAX", 2)
    known = scene.lead(records=1)
    unknown = [(b"no topic's own id", number) for number in range(3)]
    heard: list[dict[TopicIdPartition, Acquired]] = []
    request = AcquireRequest(GROUP, "a", 500, 1 << 20, 1 << 20)
    scene.shares.acquire(request, [*unknown, place(known)], heard.append)
    scene.shares.acquire(request, [unknown[2], place(known), *unknown[:2]], heard.append)
    scene.clock.run_soon()
    assert [list(each) for each in heard] == [unknown[:2], [unknown[2], unknown[0]]]


def test_a_byte_limit_that_cuts_a_batch_leaves_it_for_the_next(scene: Scene) -> None:
    partition = scene.lead()
    for _ in range(3):
        scene.produce(partition, 10)
    whole = partition.log.size_bytes
    fetch = scene.fetch(partition, max_bytes=whole - 5)
    assert fetch.ranges(partition) == [(0, 19, 1)]
    assert sent_offsets(fetch.of(partition)) == list(range(20))
    assert scene.fetch(partition).ranges(partition) == [(20, 29, 1)]


def test_no_more_batches_are_looked_at_than_are_needed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    partition = scene.lead(records=2)
    for _ in range(8):
        scene.produce(partition)

    def seen(offset: int, next_offset: int, max_records: int) -> list[int]:
        given = 1 << 20, Isolation.UNCOMMITTED, next_offset, max_records
        read = log_read.read_log(partition, scene.led.disk, offset, *given, warm=True)
        assert isinstance(read, log_read.LogRead)
        return [batch.base_offset for batch in read.batches]

    assert seen(0, 0, 1) == seen(0, 1, 1) == seen(0, 0, 2) == [0]
    assert seen(0, 1, 2) == [0, 2]
    assert seen(2, 4, 3) == [2, 3, 4, 5, 6]
    monkeypatch.setattr(log_read, "BATCHES_MAX", 2)
    assert seen(2, 4, 3) == [2, 3]
    fetches = [scene.fetch(partition, member=name) for name in "abc"]
    assert [fetch.ranges(partition) for fetch in fetches] == [[(0, 2, 1)], [(3, 4, 1)], [(5, 6, 1)]]
    scene.acknowledge(partition, 0, 2, RELEASE)
    assert scene.fetch(partition).ranges(partition) == [(0, 2, 2)]


def test_data_outside_the_page_cache_is_read_ahead_first() -> None:
    scene = Scene(PARTITIONED)
    partition = scene.lead(records=5)
    scene.led.disk.evict(scene.led.log_path(partition.log))
    assert scene.fetch(partition).ranges(partition) == [(0, 4, 1)]


# What fails.


def test_after_a_failed_write_nothing_is_told_and_all_is_as_it_was_kept(scene: Scene) -> None:
    partition = scene.lead(records=5)
    scene.fetch(partition, most=2, record_limit=True)
    scene.persister.faults = [("write", RETRY)]
    fetch, heard = scene.fetch(partition, member="b"), scene.acknowledge(partition, 0, 1)
    assert not fetch.replies
    assert heard.code == ErrorCode.LEADER_NOT_AVAILABLE
    scene.clock.advance(1)
    assert fetch.ranges(partition) == [(2, 4, 1)], "it was loaded again, and nobody had these"
    assert scene.acknowledge(partition, 0, 1).code == ErrorCode.NONE


def test_what_was_kept_and_not_told_is_delivered_again_when_its_lock_has_expired(scene: Scene) -> None:
    partition = scene.lead(records=2)
    scene.fetch(partition)
    scene.acknowledge(partition, 0, 1)
    scene.produce(partition, 2)
    scene.persister.lost_answers = 1
    fetch = scene.fetch(partition)
    scene.clock.advance(scene.config.lock_ms / 1000 - 1)
    assert not fetch.replies
    scene.clock.advance(2)
    assert fetch.ranges(partition) == [(2, 3, 2)]


def test_a_load_that_fails_is_tried_again_while_somebody_waits(scene: Scene) -> None:
    partition = scene.lead(records=1)
    scene.persister.faults = [("read", RETRY)] * 5
    fetch = scene.fetch(partition)
    assert scene.acknowledge(partition, 0, 0).code == ErrorCode.LEADER_NOT_AVAILABLE
    scene.clock.advance(10)
    assert fetch.ranges(partition) == [(0, 0, 1)]
    assert scene.persister.reads == 6


def test_what_nobody_waits_for_is_not_loaded_again_and_again(scene: Scene) -> None:
    partition = scene.lead(records=1)
    scene.persister.faults = [("read", RETRY)]
    scene.fetch(partition).give_up()
    scene.clock.advance(60)
    assert (scene.persister.reads, len(scene.shares)) == (1, 0)


def test_a_slow_load_holds_up_nobody_else(scene: Scene) -> None:
    slow, quick = scene.lead("slow", records=1), scene.lead("quick", records=1)
    scene.fetch(quick, member="b")
    scene.acknowledge(quick, 0, 0, RELEASE, "b")
    scene.persister.held = True
    fetch = scene.fetch(slow, quick)
    scene.persister.on_the_way.append(scene.persister.on_the_way.pop(0))
    scene.persister.answer(1)
    assert list(fetch.reply) == [place(quick)]
    waiting = scene.fetch(slow)
    scene.persister.held = False
    scene.persister.answer()
    scene.clock.run_soon()
    assert waiting.ranges(slow) == [(0, 0, 1)]


def test_an_acknowledgement_waits_for_a_load(scene: Scene) -> None:
    partition = scene.lead(records=1)
    scene.fetch(partition)
    partition = scene.lead_again(partition)
    scene.persister.held = True
    heard = scene.acknowledge(partition, 0, 0)
    assert not heard.replies
    scene.persister.held = False
    scene.persister.answer()
    scene.clock.run_soon()
    assert heard.code == ErrorCode.NONE


def test_requests_that_wait_for_a_load_are_bounded(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(led_share_partition, "HELD_MAX", 3)
    partition = scene.lead(records=1)
    scene.persister.held = True
    heard = [scene.acknowledge(partition, 0, 0) for _ in range(4)]
    assert [len(each.replies) for each in heard] == [0, 0, 0, 1]
    assert heard[3].code == ErrorCode.LEADER_NOT_AVAILABLE


def test_share_partitions_in_memory_are_bounded_and_idle_ones_make_room() -> None:
    scene = Scene(share_partitions_max=2)
    one, two, three = (scene.lead(name, records=1) for name in ("one", "two", "three"))
    scene.fetch(one)
    scene.fetch(two)
    waiting = scene.fetch(three)
    assert not waiting.replies
    scene.acknowledge(one, 0, 0)
    scene.clock.advance(40)
    assert waiting.ranges(three) == [(0, 0, 1)]
    assert len(scene.shares) == 2


def test_those_that_are_in_use_do_not_hide_one_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share_partitions, "LOOKED_AT_MAX", 1)
    scene = Scene(share_partitions_max=3)
    for name in ("one", "two"):
        scene.fetch(scene.lead(name))  # which waits
    idle, new = (scene.lead(name, records=1) for name in ("three", "four"))
    scene.fetch(idle)
    scene.acknowledge(idle, 0, 0)
    scene.clock.advance(40)
    waiting = scene.fetch(new)
    scene.clock.advance(10)
    assert waiting.ranges(new) == [(0, 0, 1)]


# Who is woken.


def test_who_waits_gets_what_is_produced_the_first_first(scene: Scene) -> None:
    partition = scene.lead()
    fetches = [scene.fetch(partition, member=name) for name in "abc"]
    scene.produce(partition, 2)
    assert [len(fetch.replies) for fetch in fetches] == [1, 0, 0]
    assert [fetch.heard for fetch in fetches] == [1, 0, 0]
    scene.produce(partition, 2)
    assert fetches[1].ranges(partition) == [(2, 3, 1)]
    assert fetches[2].heard == 0
    fetches[2].give_up()
    scene.produce(partition)
    assert not partition.has_readers, "nobody waits any more"


def test_who_waits_gets_what_is_released_or_expires(scene: Scene) -> None:
    partition = scene.lead(records=4)
    scene.fetch(partition)
    one = scene.fetch(partition, member="b")
    scene.acknowledge(partition, 0, 1, RELEASE)
    assert one.ranges(partition) == [(0, 1, 2)]
    two = scene.fetch(partition, member="c")
    scene.clock.advance(scene.config.lock_ms / 1000 - 1)
    assert not two.replies
    scene.clock.advance(2)
    assert two.ranges(partition) == [(0, 1, 3), (2, 3, 2)]


def test_who_waits_is_not_woken_for_what_turned_out_to_be_nothing(scene: Scene) -> None:
    """As where compaction took the last records: it is news when there is more to read."""
    partition = scene.lead(records=1)
    scene.fetch(partition)
    scene.acknowledge(partition, 0, 0, RELEASE)
    led = scene.shares.find(scene.key(partition))
    assert isinstance(led, led_share_partition.LedSharePartition)
    led.found_nothing(0, 1)
    waiting = Fetch(scene, AcquireRequest(GROUP, "b", 500, 1 << 20, 1 << 20), [place(partition)])
    scene.shares.wait(GROUP, [place(partition)], waiting)
    scene.clock.run_soon()
    assert waiting.heard == 0
    scene.produce(partition)
    assert waiting.heard == 1
    assert waiting.ranges(partition) == [(0, 0, 2), (1, 1, 1)]


def test_the_end_of_a_session_gives_its_records_to_who_waits(scene: Scene) -> None:
    one, two = scene.lead("one", records=2), scene.lead("two", records=2)
    scene.fetch(one, two)
    other = scene.fetch(one, two, member="b")
    scene.shares.release(GROUP, "a")
    scene.clock.run_soon()
    assert other.ranges(one) == [(0, 1, 1)]
    assert scene.acknowledge(two, 0, 0).code == ErrorCode.INVALID_RECORD_STATE


def test_a_session_that_ends_while_nothing_is_loaded_is_released_at_the_load(scene: Scene) -> None:
    partition = scene.lead(records=2)
    scene.fetch(partition)
    partition = scene.lead_again(partition)
    scene.persister.held = True
    other = scene.fetch(partition, member="b")
    scene.shares.release(GROUP, "a")
    scene.persister.held = False
    scene.persister.answer()
    scene.clock.run_soon()
    assert other.ranges(partition) == [(0, 1, 1)]


def test_what_a_member_acknowledges_before_its_session_ends_is_taken_though_nothing_was_loaded(scene: Scene) -> None:
    partition = scene.lead(records=2)
    scene.fetch(partition)
    partition = scene.lead_again(partition)
    scene.persister.held = True
    heard = scene.acknowledge(partition, 0, 0)
    scene.shares.release(GROUP, "a")
    scene.persister.held = False
    scene.persister.answer()
    scene.clock.run_soon()
    assert heard.code == ErrorCode.NONE
    assert scene.fetch(partition, member="b").ranges(partition) == [(1, 1, 1)]


def test_who_waits_gets_more_when_there_is_room_again() -> None:
    scene = Scene(record_locks_max=2)
    partition = scene.lead()
    for _ in range(3):
        scene.produce(partition)
    scene.fetch(partition)
    waiting = scene.fetch(partition, member="b")
    assert not waiting.replies
    scene.acknowledge(partition, 0, 0)
    assert waiting.ranges(partition) == [(2, 2, 1)]


def test_a_renewed_lock_lasts_for_its_whole_time_again(scene: Scene) -> None:
    partition = scene.lead(records=1)
    scene.fetch(partition)
    scene.clock.advance(20)
    assert scene.acknowledge(partition, 0, 0, (4,)).code == ErrorCode.NONE
    scene.clock.advance(29)
    assert scene.acknowledge(partition, 0, 0).code == ErrorCode.NONE


# Who leads.


def test_a_handle_is_valid_where_the_partition_is_led_next(scene: Scene) -> None:
    partition = scene.lead(records=3)
    scene.fetch(partition, most=2, record_limit=True)
    after = scene.lead_again(partition)
    other = scene.fetch(after, member="b")
    assert other.ranges(after) == [(2, 2, 1)]
    assert scene.acknowledge(after, 0, 1).code == ErrorCode.NONE
    scene.clock.advance(60)
    assert scene.kept(after).start == 2


def test_who_led_before_can_keep_nothing_any_more(scene: Scene) -> None:
    partition = scene.lead(records=2)
    scene.fetch(partition, most=1, record_limit=True)
    scene.persister.kept[scene.key(partition)].leader_epoch = 9
    fetch = scene.fetch(partition, member="b")
    assert scene.acknowledge(partition, 0, 0).code == ErrorCode.LEADER_NOT_AVAILABLE
    scene.clock.advance(0.1)
    assert fetch.of(partition).error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert scene.acknowledge(partition, 0, 0).code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert len(scene.kept(partition).offsets) == 1


def test_a_leader_that_was_fenced_by_its_own_later_load_goes_on(scene: Scene) -> None:
    partition = scene.lead(records=2)
    scene.fetch(partition, most=1, record_limit=True)
    scene.persister.faults = [("write", ErrorCode.FENCED_LEADER_EPOCH)]
    fetch = scene.fetch(partition, member="b")
    scene.clock.advance(1)
    assert fetch.ranges(partition) == [(1, 1, 1)]
    assert scene.acknowledge(partition, 0, 0).code == ErrorCode.NONE


def test_the_start_that_is_set_anew_holds_from_the_next_request_on(scene: Scene) -> None:
    partition = scene.lead(records=5)
    scene.fetch(partition, most=1, record_limit=True)
    scene.persister.initialize(scene.key(partition), 1, 3, lambda _: None)
    fetch = scene.fetch(partition)
    scene.clock.advance(1)
    assert fetch.ranges(partition) == [(3, 4, 1)]


def test_a_group_that_begins_anew_begins_where_it_was_set(scene: Scene) -> None:
    """All of it is consumed, so no write finds out that the start was set back meanwhile."""
    partition = scene.lead(records=3)
    scene.fetch(partition)
    scene.acknowledge(partition, 0, 2)
    scene.persister.initialize(scene.key(partition), 1, 1, lambda _: None)
    scene.shares.begin(GROUP)
    assert scene.fetch(partition).ranges(partition) == [(1, 2, 1)]


def test_a_group_that_begins_anew_keeps_what_it_has_decided(scene: Scene) -> None:
    partition = scene.lead(records=3)
    scene.fetch(partition)
    scene.persister.held = True
    kept = scene.acknowledge(partition, 0, 0)
    more = scene.acknowledge(partition, 1, 1)
    scene.shares.begin(GROUP)
    reads = scene.persister.reads
    scene.persister.held = False
    scene.persister.answer()
    scene.clock.run_soon()
    assert (kept.code, more.code) == (ErrorCode.NONE, ErrorCode.NONE)
    assert scene.persister.reads == reads + 1
    other = scene.fetch(partition, member="b")
    assert not other.replies, "the third one is locked"
    scene.clock.advance(31)
    assert other.ranges(partition) == [(2, 2, 2)]


def test_who_waits_hears_that_the_lead_has_ended(scene: Scene) -> None:
    partition = scene.lead()
    fetch = scene.fetch(partition)
    scene.led.partitions.follow(partition.log, 5, 7)
    scene.shares.follow()
    scene.clock.run_soon()
    assert fetch.of(partition).error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert len(scene.shares) == 0


def test_what_was_being_kept_when_the_lead_ended_is_told_as_it_ends(scene: Scene) -> None:
    partition = scene.lead(records=1)
    scene.fetch(partition)
    scene.persister.held = True
    written = scene.acknowledge(partition, 0, 0)
    scene.produce(partition)
    not_written = scene.fetch(partition)
    scene.led.partitions.follow(partition.log, 5, 7)
    scene.shares.follow()
    scene.persister.answer()
    assert written.code == ErrorCode.NONE
    assert not_written.of(partition).error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER


def test_a_topic_that_is_deleted_is_unknown(scene: Scene) -> None:
    partition = scene.lead(records=1)
    scene.fetch(partition, member="b")
    scene.led.partitions.drop(TopicPartition("orders", 0))
    scene.shares.follow()
    assert len(scene.shares) == 0
    fetch = scene.fetch(partition)
    assert fetch.of(partition).error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert scene.acknowledge(partition, 0, 0).code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_nothing_is_done_after_the_close(scene: Scene) -> None:
    partition = scene.lead()
    fetch = scene.fetch(partition)
    scene.shares.close()
    scene.clock.run_soon()
    assert fetch.of(partition).error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER


# What the log holds.


@pytest.mark.parametrize(
    ("reset", "start"), [("earliest", 0), ("latest", 6), ("by_duration:PT2H", 0), ("by_duration:PT1S", 6)]
)
def test_a_group_without_a_start_begins_where_its_configuration_says(reset: str, start: int) -> None:
    scene = Scene(auto_offset_reset=reset)
    partition = scene.lead(records=6)
    scene.clock.advance(3600)
    scene.fetch(partition, most=1, record_limit=True)
    scene.produce(partition)
    assert scene.kept(partition).start == start


def test_an_empty_partition_is_read_from_its_end_on_as_soon_as_somebody_waits() -> None:
    scene = Scene(auto_offset_reset="latest")
    partition = scene.lead()
    fetch = scene.fetch(partition)
    scene.produce(partition, 2)
    assert fetch.ranges(partition) == [(0, 1, 1)]


def test_readers_of_committed_records_get_neither_open_nor_aborted_ones() -> None:
    scene = Scene(isolation=Isolation.COMMITTED)
    partition = scene.lead()
    one = Transactional(scene.led, partition)
    one.write(7)
    one.write(8)
    scene.produce(partition)
    fetch = scene.fetch(partition)
    assert not fetch.replies
    one.mark(7, committed=False)
    scene.clock.run_soon()
    assert not fetch.replies, "the other transaction is open"
    one.mark(8)
    scene.clock.run_soon()
    assert fetch.ranges(partition) == [(1, 2, 1)]
    assert scene.kept(partition).start == 1
    scene.acknowledge(partition, 1, 2)
    rest = scene.fetch(partition)
    assert (rest.replies, scene.kept(partition).start) == ([], 5)


def test_readers_of_all_records_get_open_ones_and_no_markers() -> None:
    scene = Scene()
    partition = scene.lead()
    one = Transactional(scene.led, partition)
    one.write(7)
    one.mark(7)
    one.write(8)
    assert scene.fetch(partition).ranges(partition) == [(0, 0, 1), (2, 2, 1)]


def test_what_retention_overtakes_is_counted_and_the_rest_is_delivered(scene: Scene) -> None:
    partition = scene.lead()
    for _ in range(3):
        scene.produce(partition, 2)
    scene.fetch(partition, most=3, record_limit=True)
    scene.led.partitions.delete_before(partition, 4)
    scene.clock.advance(1)
    fetch = scene.fetch(partition, member="b")
    assert fetch.ranges(partition) == [(4, 5, 1)]
    assert scene.kept(partition).start == 4
    archived = {
        each.labels: each.value for each in scene.shares.samples() if each.family.name.endswith("archived_total")
    }
    assert archived[GROUP, Reason.DELETED.name.lower()] == 4


def test_a_log_that_has_lost_its_end_delivers_what_comes_in_its_place(scene: Scene) -> None:
    partition = scene.lead(records=2)
    scene.produce(partition, 2)
    scene.fetch(partition)
    scene.acknowledge(partition, 0, 3)
    scene.led.partitions.follow(partition.log, 1, 7)
    partition.log.truncate(2)
    after = scene.led.partitions.lead(partition.log, 2, {1: ""})
    scene.produce(after, 1)
    assert scene.fetch(after).ranges(after) == [(2, 2, 1)]


def test_a_log_that_has_lost_all_of_an_epoch_delivers_what_comes_in_its_place(scene: Scene) -> None:
    """What was accepted at these offsets was something else, though the log is as long again by now."""
    partition = scene.lead(records=4)
    scene.fetch(partition)
    assert scene.acknowledge(partition, 2, 3).code == ErrorCode.NONE
    scene.led.partitions.follow(partition.log, 1, 7)
    partition.log.truncate(0)
    after = scene.led.partitions.lead(partition.log, 2, {1: ""})
    scene.produce(after, 4)
    assert scene.fetch(after).ranges(after) == [(0, 3, 1)]


def test_samples_say_what_is_held_and_what_has_been(scene: Scene) -> None:
    partition = scene.lead(records=4)
    scene.fetch(partition)
    scene.acknowledge(partition, 0, 1, RELEASE)
    scene.acknowledge(partition, 2, 2)
    told = {(each.family.name, *each.labels): each.value for each in scene.shares.samples()}
    assert told["headrace_share_partitions",] == 1
    assert told["headrace_share_records_held", GROUP, "available"] == 2
    assert told["headrace_share_records_held", GROUP, "acquired"] == 1
    assert told["headrace_share_acquired_total", GROUP] == 4
    assert told["headrace_share_released_total", GROUP] == 2
    assert told["headrace_share_acknowledged_total", GROUP] == 1
