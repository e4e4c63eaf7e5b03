"""Roles of partitions and who hears of them: what one role leaves to the next, and what links are told."""

from __future__ import annotations

import pytest

from headrace.errors import (
    HeadraceError,
    NotEnoughReplicasAfterAppend,
    NotLeader,
    OutOfOrderSequence,
    StorageFailed,
    UnknownPartition,
)
from headrace.partitions.leader_core import IsrChange
from headrace.partitions.partition import Partition
from headrace.partitions.partitions import Partitions
from headrace.settings.values import log_settings
from headrace.storage.log import TopicPartition
from partitions.led import BROKER, Led, Reader, batch, topic_id
from proving import proves

OTHER = 2
WHERE = TopicPartition("orders", 0)


class Heard:
    """Links that write down what they are told."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def written(self, partition: Partition) -> None:
        self.calls.append("written")

    def rose(self, partition: Partition) -> None:
        self.calls.append("rose")

    def durable(self, partition: Partition) -> None:
        self.calls.append("durable")

    def end_turn(self) -> None:
        self.calls.append("end of turn")

    def closed(self, partition: Partition) -> None:
        self.calls.append("closed")

    def take(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def led() -> Led:
    return Led()


@pytest.fixture
def links(led: Led) -> Heard:
    led.partitions.links = heard = Heard()
    return heard


# What links hear


def test_links_hear_of_what_is_written_durable_and_committed(led: Led, links: Heard) -> None:
    partition = led.lead(durability="disk")
    led.produce(partition)
    led.clock.run_soon()
    led.partitions.delete_before(partition, 1)
    assert links.take() == ["end of turn"], "nobody copies it"
    partition.replicated = True
    led.produce(partition)
    assert links.take() == ["written", "end of turn"]
    led.clock.run_soon()
    assert links.take() == ["rose", "durable"]
    led.partitions.delete_before(partition, 2)
    assert "rose" in links.take(), "a start is wanted"
    led.disk.hold_syncs()
    led.produce(partition)
    follower = led.partitions.follow(partition.log, 1, OTHER)
    follower.replicated = True
    assert links.take()[-1] == "closed"
    led.partitions.told(follower, 3)
    assert (follower.high_watermark, links.take()) == (3, []), "a follower tells nobody"
    led.disk.release_syncs()


def test_a_leader_without_links_needs_none(led: Led) -> None:
    partition = led.lead(durability="disk")
    partition.replicated = True
    outcome = led.produce(partition)
    led.clock.run_soon()
    assert outcome.offset == 0
    led.partitions.delete_before(partition, 1)
    led.partitions.drop(WHERE)


# From role to role


def test_a_partition_is_found_by_its_role(led: Led) -> None:
    partition = led.lead()
    assert led.partitions.get("orders", 0) is led.partitions.find_replica("orders", 0) is partition
    follower = led.partitions.follow(partition.log, 1, OTHER)
    assert led.partitions.find("orders", 0) is None
    assert led.partitions.find_replica("orders", 0) is follower
    assert led.partitions.find_by_id(topic_id("orders"), 0) is follower
    with pytest.raises(NotLeader):
        led.partitions.get("orders", 0)
    led.partitions.drop(WHERE)
    assert led.partitions.find_replica("orders", 0) is led.partitions.find_by_id(topic_id("orders"), 0) is None
    with pytest.raises(UnknownPartition):
        led.partitions.get("orders", 0)


def test_the_other_partitions_of_a_topic_are_served_on_when_one_goes(led: Led) -> None:
    kept, gone = led.lead(index=0), led.lead(index=1)
    followed = led.partitions.follow(led.lead(index=2).log, 1, OTHER)
    led.partitions.drop(gone.topic_partition)
    assert led.partitions.get("orders", 0) is kept
    assert led.partitions.find_replica("orders", 2) is followed
    led.partitions.drop(followed.topic_partition)
    assert list(led.partitions) == [led.partitions.get("orders", 0)] == [kept]


@proves("G2")
def test_readers_are_woken_by_what_other_brokers_tell(led: Led) -> None:
    partition = led.lead()
    core = partition.core
    assert core is not None
    core.confirmed({BROKER: "", OTHER: "b"}, 1)
    led.produce(partition, acks=1)
    led.produce(partition, acks=1)
    reader = Reader()
    partition.wait_for_data(reader)
    core.position_reported(core.subscribed(OTHER, "b", 0, 0.0), 1, 1, 1, 2, 0.0)
    led.partitions.settle(partition)
    led.clock.run_soon()
    assert reader.answered, "a follower told its position"
    follower = led.partitions.follow(partition.log, 1, OTHER)
    reader = Reader()
    follower.wait_for_data(reader)
    led.partitions.told(follower, 2)
    led.clock.run_soon()
    assert reader.answered, "the leader told its watermark"


def test_the_same_role_again_is_the_same_partition_with_the_newest_set(led: Led) -> None:
    partition = led.lead()
    assert led.partitions.lead(partition.log, 0, {BROKER: "", OTHER: "b"}, revision=1) is partition
    assert partition.core is not None
    assert partition.core.isr == {BROKER: "", OTHER: "b"}
    assert led.partitions.lead(partition.log, 1, {BROKER: ""}) is not partition
    follower = led.partitions.follow(partition.log, 2, OTHER)
    assert led.partitions.follow(partition.log, 2, OTHER) is follower
    assert led.partitions.follow(partition.log, 2, 3) is not follower
    assert led.partitions.follow(partition.log, 3, 3).epoch == 3


@proves("G2")
def test_a_follower_that_comes_to_lead_alone_commits_what_it_holds(led: Led) -> None:
    partition = led.lead()
    led.partitions.confirmed(partition, {BROKER: "", OTHER: "b"}, 1)
    led.produce(partition, acks=1)
    follower = led.partitions.follow(partition.log, 1, OTHER)
    assert follower.high_watermark == 0
    alone = led.partitions.lead(partition.log, 1, {BROKER: ""}, revision=2)
    assert (alone.leading, alone.high_watermark) == (True, 1)


@proves("F6")
def test_a_leader_that_leads_on_in_the_next_epoch_knows_the_start_that_it_told(led: Led) -> None:
    partition = led.lead()
    for _ in range(3):
        led.produce(partition)
    led.partitions.delete_before(partition, 2)
    led.clock.run_soon()
    assert partition.start_offset == 2
    again = led.partitions.lead(partition.log, 1, {BROKER: "", OTHER: "b"}, revision=1)
    assert again.start_offset == 2
    led.partitions.follow(partition.log, 2, OTHER)
    after = led.partitions.lead(partition.log, 3, {BROKER: "", OTHER: "b"}, revision=2)
    assert after.start_offset == -1, "another may have told a higher one"
    beyond = led.partitions.lead(partition.log, 4, {BROKER: "", OTHER: "b"}, revision=3)
    assert beyond.start_offset == -1


def test_what_is_staged_when_a_role_ends_is_written_and_answered_as_not_led(led: Led) -> None:
    partition = led.lead(durability="disk")
    led.disk.hold_syncs()
    outcome = led.submit(partition)
    led.partitions.follow(partition.log, 1, OTHER)
    assert isinstance(outcome.error, NotLeader)
    assert partition.log.written_offset == 1
    led.disk.release_syncs()
    led.clock.run_soon()


def test_readers_are_sent_to_look_again_when_a_role_ends(led: Led) -> None:
    partition = led.lead()
    for nth, change in enumerate((led.partitions.follow, led.partitions.follow), 1):
        reader = Reader()
        partition.wait_for_data(reader)
        partition = change(partition.log, nth, OTHER)
        assert reader.answered
    reader = Reader()
    partition.wait_for_data(reader)
    led.partitions.lead(partition.log, 3, {BROKER: ""})
    assert reader.answered


@proves("G2")
def test_a_watermark_goes_from_role_to_role_and_outlives_them(led: Led) -> None:
    partition = led.lead()
    led.produce(partition)
    led.produce(partition)
    assert led.partitions.follow(partition.log, 1, OTHER).high_watermark == 2
    assert list(led.partitions.watermarks()) == [(topic_id("orders"), 0, 2)]
    led.partitions.drop(WHERE)
    assert list(led.partitions.watermarks()) == [(topic_id("orders"), 0, 2)]
    assert led.partitions.follow(partition.log, 2, OTHER).high_watermark == 2
    led.partitions.drop(WHERE)
    partition.log.truncate(1)
    assert led.partitions.follow(partition.log, 3, OTHER).high_watermark == 1, "no more is there"
    led.store.create(TopicPartition("new", 0), topic_id("new"), log_settings({}, {}))
    assert [found[0] for found in led.partitions.watermarks()] == [topic_id("orders")], "of the new one none is known"


@proves("G2")
def test_a_log_is_served_with_the_watermark_that_was_kept_over_a_restart(led: Led) -> None:
    partition = led.lead()
    for _ in range(3):
        led.produce(partition)
    for kept, watermark in ((2, 2), (9, 3)):
        again = Partitions(led.store, led.clock, BROKER, watermarks={(topic_id("orders"), 0): kept})
        assert again.follow(partition.log, 1, OTHER).high_watermark == watermark


def test_damage_goes_from_role_to_role_and_inability_does_not(led: Led) -> None:
    partition = led.lead()
    partition.found_damage(7)
    led.partitions.unable.add(partition)
    follower = led.partitions.follow(partition.log, 1, OTHER)
    assert led.partitions.damaged == {follower: 7}
    assert led.partitions.unable == set()
    led.partitions.drop(WHERE)
    assert led.partitions.damaged == {}


def test_who_waits_hears_why_a_partition_is_dropped(led: Led) -> None:
    partition = led.lead(durability="disk")
    led.disk.hold_syncs()
    outcome = led.produce(partition)
    gone = StorageFailed("the disk is gone")
    led.partitions.drop(WHERE, gone)
    assert outcome.error is gone
    led.disk.release_syncs()
    led.clock.run_soon()


@proves("J10")
@pytest.mark.parametrize("topic", ["orders", topic_id("orders")])
@pytest.mark.parametrize("is_replica", [True, False])
def test_a_batch_refused_by_name_or_id_stays_the_first(led: Led, topic: str | bytes, is_replica: bool) -> None:
    partition = led.lead()
    if is_replica:
        led.partitions.follow(partition.log, 1, OTHER)
    else:
        led.partitions.drop(WHERE)
    led.partitions.refuse(topic, 0, memoryview(batch(producer=(9, 0, 0))))
    led.partitions.refuse(topic, 0, memoryview(batch()))
    again = led.partitions.lead(partition.log, 2, {BROKER: ""})
    with pytest.raises(OutOfOrderSequence, match="but 0 was refused"):
        again.append(memoryview(batch(producer=(9, 0, 1))), -1)


# Settings


@proves("G5")
@pytest.mark.parametrize(("durability", "watermark"), [("disk", 0), ("os", 1)])
def test_what_a_follower_has_only_written_counts_as_the_topic_says(led: Led, durability: str, watermark: int) -> None:
    partition = led.lead(durability=durability)
    core = partition.core
    assert core is not None
    core.confirmed({BROKER: "", OTHER: "b"}, 1)
    led.produce(partition, acks=1)
    led.clock.run_soon()
    core.position_reported(core.subscribed(OTHER, "b", 0, 0.0), 1, 1, 0, 1, 0.0)
    assert core.high_watermark == watermark


@proves("G5")
def test_altered_settings_count_for_what_waits_already(led: Led) -> None:
    partition = led.lead(min_insync_replicas=2)
    led.produce(partition, acks=1)
    assert partition.high_watermark == 0
    reader = Reader()
    partition.wait_for_data(reader)
    partition.log.settings = log_settings({}, {"min.insync.replicas": "1"})
    led.partitions.settings_changed(partition)
    led.clock.run_soon()
    assert (partition.high_watermark, reader.answered) == (1, True)
    partition.log.settings = log_settings({}, {"min.insync.replicas": "2", "replication.policy": "none"})
    led.partitions.settings_changed(partition)
    assert partition.append(memoryview(batch()), -1)[0] == 1, "the weaker policy holds"


@proves("G5")
def test_a_topic_that_counts_the_disk_from_now_on_has_synced_what_is_written(led: Led) -> None:
    partition = led.lead()
    led.produce(partition)
    led.disk.hold_syncs()
    partition.log.settings = log_settings({}, {"durability": "disk"})
    led.partitions.settings_changed(partition)
    outcome = led.produce(partition)
    led.clock.run_soon()
    assert outcome.waiting
    led.disk.release_syncs()
    led.clock.advance(2)
    assert (partition.log.durable_offset, outcome.offset) == (2, 1)
    follower = led.partitions.follow(partition.log, 1, OTHER)
    led.partitions.settings_changed(follower)
    led.partitions.replicas_changed(follower, (1, 2))


@pytest.mark.parametrize(
    ("durability", "unsynced", "offline", "asked"),
    [("disk", True, False, 1), ("os", True, False, 0), ("disk", False, False, 0), ("disk", True, True, 0)],
)
def test_a_sync_is_asked_for_when_the_disk_counts_and_something_is_not_synced(
    led: Led, durability: str, unsynced: bool, offline: bool, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = led.lead()
    led.produce(partition)
    log = partition.log
    log.durable_offset = 0 if unsynced else log.written_offset
    log.offline = StorageFailed("a sync failed") if offline else None
    syncs: list[int] = []
    heard: list[TopicPartition] = []
    monkeypatch.setattr(type(log), "sync_soon", lambda _: syncs.append(1))
    monkeypatch.setattr(led.store, "settings_changed", heard.append)
    log.settings = log_settings({}, {"durability": durability})
    led.partitions.settings_changed(partition)
    assert (len(syncs), heard) == (asked, [log.topic_partition])


def test_producers_hear_at_once_that_more_replicas_are_needed_than_there_are(led: Led) -> None:
    partition = led.lead()
    assert partition.core is not None
    partition.core.confirmed({BROKER: "", OTHER: "b"}, 1)
    outcome = led.produce(partition)
    assert outcome.waiting
    partition.log.settings = log_settings({}, {"min.insync.replicas": "3"})
    led.partitions.settings_changed(partition)
    assert isinstance(outcome.error, NotEnoughReplicasAfterAppend)


@proves("G5")
def test_followers_must_sync_too_once_a_topic_counts_the_disk(led: Led) -> None:
    partition = led.lead()
    core = partition.core
    assert core is not None
    core.confirmed({BROKER: "", OTHER: "b"}, 1)
    follower = core.subscribed(OTHER, "b", 0, 0.0)
    led.produce(partition, acks=1)
    partition.log.settings = log_settings({}, {"durability": "disk"})
    led.partitions.settings_changed(partition)
    led.clock.run_soon()
    assert partition.log.durable_offset == 1, "no write may come to ask for it"
    core.position_reported(follower, 1, 1, 0, 1, 0.0)
    assert core.high_watermark == 0
    core.position_reported(follower, 1, 1, 1, 1, 0.0)
    assert core.high_watermark == 1


@proves("G16")
def test_a_proposed_set_counts_until_it_is_refused(led: Led) -> None:
    partition = led.lead()
    led.partitions.proposed(partition, IsrChange({BROKER: "", OTHER: "b"}, (OTHER,), (), ""))
    outcome = led.produce(partition)
    assert outcome.waiting
    led.partitions.refused(partition)
    assert outcome.offset == 0


def test_a_sync_of_a_log_that_nobody_serves_is_nobodys(led: Led) -> None:
    partition = led.lead(durability="disk")
    led.disk.hold_syncs()
    led.produce(partition)
    led.partitions.drop(WHERE)
    led.disk.release_syncs()
    led.clock.run_soon()
    assert partition.high_watermark == 0


def test_fewer_replicas_lower_the_majority_that_is_needed(led: Led) -> None:
    log = led.store.create(WHERE, topic_id("orders"), log_settings({}, {"min.insync.replicas": "0"}))
    partition = led.partitions.lead(log, 0, {BROKER: ""}, (1, 2, 3))
    led.produce(partition, acks=1)
    assert partition.high_watermark == 0
    led.partitions.replicas_changed(partition, (1, 2, 3), (2, 3))
    assert partition.high_watermark == 1


def test_a_role_that_has_ended_takes_no_change_of_its_set(led: Led) -> None:
    partition = led.lead()
    led.partitions.drop(WHERE)
    led.partitions.confirmed(partition, {BROKER: "", OTHER: "b"}, 7)
    led.partitions.refused(partition)
    with pytest.raises(HeadraceError):
        partition.append(memoryview(batch()), 1)
