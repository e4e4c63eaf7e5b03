"""Workloads and retry rules by themselves: what may begin, what may be saved, where a failed record goes."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.client.consumer import retries
from headrace.client.consumer.group_protocol import TopicPartition
from headrace.client.consumer.retries import DELAYS_MS, RetryRules, retried_record
from headrace.client.consumer.workload import SPAN_MAX, Job, Share, Workload
from headrace.errors import SettingError
from headrace.records.consumer_records import ReceivedRecord
from proving import proves

A, B = ("t", 0), ("t", 1)


def jobs(load: Workload, place: TopicPartition, *offsets: int, not_before: float = 0.0) -> list[Job]:
    progress = load.progress_of(place)
    return [Job(ReceivedRecord(*place, offset, 0), place, offset, progress, not_before) for offset in offsets]


def started(load: Workload, now: float = 0.0) -> list[Job]:
    found = []
    while (job := load.next(now)) is not None:
        found.append(job)
    return found


@given(st.permutations(range(8)))
def test_what_may_be_saved_is_the_first_that_is_not_done_in_whatever_order(order: list[int]) -> None:
    load = Workload(ordered=False)
    load.put(jobs(load, A, *range(8)))
    begun = started(load)
    assert [job.offset for job in begun] == list(range(8))
    left = set(range(8))
    for offset in order:
        load.done(begun[offset])
        left.remove(offset)
        assert load.positions() == {A: min(left, default=8)}
    assert (load.running, load.pending) == (0, 0)


def test_records_that_come_out_of_order_are_saved_without_a_gap() -> None:
    load = Workload(ordered=False)
    load.put(jobs(load, A, 9, 3, 5))
    begun = started(load)
    load.done(begun[0])
    assert load.positions() == {A: 3}
    load.done(begun[1])
    assert load.positions() == {A: 5}
    load.done(begun[2])
    assert load.positions() == {A: 10}


def test_a_record_that_is_read_twice_is_done_twice() -> None:
    load = Workload(ordered=False)
    load.put(jobs(load, A, 4, 5))
    first, second = started(load)
    load.done(second)
    load.put(jobs(load, A, 5))
    (again,) = started(load)
    load.done(first)
    assert load.positions() == {A: 5}
    load.done(again)
    assert load.positions() == {A: 6}


def test_a_partition_is_full_by_what_it_has_to_do_and_by_what_one_record_holds_up() -> None:
    load = Workload(ordered=False)
    assert not load.is_full(A, Share(2, 1000))
    load.put(jobs(load, A, 0, 1))
    assert load.is_full(A, Share(2, 1000))
    assert not load.has_room(A, Share(2, 1000))
    assert not load.is_full(B, Share(2, 1000))
    assert load.has_room(B, Share(2, 1000))
    stuck, other = started(load)
    load.done(other)
    assert not load.is_full(A, Share(2, 1000))
    assert load.has_room(A, Share(2, 1000))
    assert not load.has_room(A, Share(1, 1000))
    for offset in range(2, SPAN_MAX):
        load.put(jobs(load, A, offset))
        load.done(*started(load))
    assert load.is_full(A, Share(2, 1000))
    load.done(stuck)
    assert not load.is_full(A, Share(2, 1000))
    assert load.positions() == {A: SPAN_MAX}


def test_a_partition_is_full_by_the_bytes_of_what_it_has_to_do() -> None:
    load, share = Workload(ordered=False), Share(100, 1000)
    large = jobs(load, A, 0, 1, 2)
    for job in large:
        job.size_bytes = 400
    load.put(large[:2])
    assert not load.is_full(A, share)
    load.put(large[2:])
    assert load.is_full(A, share)
    first, *others = started(load)
    load.done(first)
    assert not load.is_full(A, share)
    assert not load.has_room(A, share)
    for job in others:
        load.done(job)
    assert load.has_room(A, share)


def test_ordered_partitions_go_one_at_a_time_and_side_by_side() -> None:
    load = Workload(ordered=True)
    load.put([*jobs(load, A, 0, 1), *jobs(load, B, 0, 1)])
    first = started(load)
    assert [(job.place, job.offset) for job in first] == [(A, 0), (B, 0)]
    load.done(first[1])
    assert [(job.place, job.offset) for job in started(load)] == [(B, 1)]
    load.again(first[0], not_before=5.0)
    assert started(load, now=4.9) == []
    assert load.next_at() == 5.0
    (again,) = started(load, now=5.0)
    assert again is first[0]
    load.done(again)
    assert [job.offset for job in started(load)] == [1]


def test_a_record_that_waits_does_not_hold_up_others_that_need_no_order() -> None:
    load = Workload(ordered=False)
    load.put([*jobs(load, A, 0, not_before=9.0), *jobs(load, A, 1)])
    (second,) = started(load)
    load.done(second)
    assert load.positions() == {A: 0}
    assert [job.offset for job in started(load, now=9.0)] == [0]


@pytest.mark.parametrize("ordered", [False, True])
def test_partitions_that_are_gone_begin_nothing_and_say_nothing_of_what_is_still_running(ordered: bool) -> None:
    load = Workload(ordered=ordered)
    load.put(jobs(load, A, 0, 1, 2))
    running = load.next(0.0)
    assert running is not None
    load.drop([A])
    load.put(jobs(load, A, 0))
    assert load.positions() == {A: 0}
    load.done(running)
    assert load.positions() == {A: 0}
    assert load.running == 0
    (fresh,) = started(load)
    assert fresh.progress is not running.progress


@pytest.mark.parametrize("ordered", [False, True])
def test_what_is_dropped_is_held_no_longer_though_no_hand_is_free(ordered: bool) -> None:
    load = Workload(ordered=ordered)
    for not_before in (0.0, 9.0, 7.0):
        load.put([*jobs(load, A, 0, 1, not_before=not_before), *jobs(load, B, 0, not_before=not_before + 1)])
        load.drop([A])
        assert {job.place for job in load._ready} | {job.place for _, _, job in load._waiting} == {B}
    if ordered:
        load.drop([B])
        assert load.next_at() is None
        return
    assert load.next_at() == 1.0
    assert [job.not_before for job in started(load, now=20.0)] == [1.0, 8.0, 10.0]


def test_nothing_begins_while_it_is_held() -> None:
    load = Workload(ordered=False)
    load.put(jobs(load, A, 0))
    load.holds += 1
    assert started(load) == []
    load.holds -= 1
    assert len(started(load)) == 1


@proves("R10")
def test_sixteen_tries_with_growing_delays_and_then_the_dead_letter_topic() -> None:
    rules = RetryRules("billing")
    record = ReceivedRecord("orders", 3, 42, 1000, b"key", b"value", [("trace", b"x"), ("none", None)])
    tries, now_ms, delays = 0, 5_000, []
    for _ in range(16):
        outgoing = rules.outgoing(record, tries + 1, "ValueError: no", now_ms)
        assert (outgoing.topic, outgoing.partition) == ("billing.retry", tries)
        on_topic = ReceivedRecord(outgoing.topic, tries, 7, 9, outgoing.key, outgoing.value, outgoing.headers)
        back = retried_record(on_topic)
        assert back.record == record
        delays.append(back.due_ms - now_ms)
        record, tries = back.record, back.tries
    assert tuple(delays) == DELAYS_MS
    assert delays == sorted(delays)
    dead = rules.outgoing(record, tries + 1, "ValueError: no", now_ms)
    assert (dead.topic, dead.partition, dead.key, dead.value) == ("billing.dead", None, b"key", b"value")
    said = dict(dead.headers)
    assert said["trace"] == b"x"
    assert said[retries.TRIES] == b"17"
    assert said[retries.ERROR] == b"ValueError: no"
    assert (said[retries.TOPIC], said[retries.OFFSET]) == (b"orders", b"42")
    assert retries.DUE not in said


def test_more_tries_than_delays_use_the_last_delay_again() -> None:
    rules = RetryRules("g", max_tries=5, delays_ms=(10, 20))
    record = ReceivedRecord("t", 0, 0, 0)
    parcels = [rules.outgoing(record, failed, "", 0) for failed in range(1, 7)]
    assert [outgoing.partition for outgoing in parcels] == [0, 1, 1, 1, 1, None]


def test_a_record_that_somebody_else_put_into_the_retry_topic_is_tried_at_once() -> None:
    strange = ReceivedRecord("g.retry", 0, 5, 1, headers=[(retries.TRIES, b"many")])
    assert retried_record(strange) == retries.RetriedRecord(strange, 0, 0)


@pytest.mark.parametrize("wrong", [{"max_tries": -1}, {"delays_ms": ()}, {"delays_ms": (1, -1)}])
def test_rules_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(SettingError):
        RetryRules("g", **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("group", ["my group/1", "größe", "g" * 249, "a:b"])
def test_topics_of_a_group_have_names_that_topics_may_have(group: str) -> None:
    rules = RetryRules(group)
    for name in (rules.retry_topic, rules.dead_topic):
        assert re.fullmatch(r"[A-Za-z0-9._-]{1,249}", name)
    assert RetryRules("a:b").dead_topic != RetryRules("a/b").dead_topic
    assert RetryRules("a.b-c_1").dead_topic == "a.b-c_1.dead"
