"""Groups and offsets of one partition as its records leave them, and what is on its way to it."""

from __future__ import annotations

from collections import Counter

from groups.scene import LIMITS, TOPIC_ID
from headrace.coordinators.record_fields import Record
from headrace.groups.consumer_group import ConsumerGroup
from headrace.groups.consumer_records import GroupPieces
from headrace.groups.group import Moment
from headrace.groups.records import OffsetAndMetadata, OffsetKey, encode_offset, encode_offset_key
from headrace.groups.shard import Shard, ShardLoad

KEY = OffsetKey("g", "t", 0)
COMMITTED: Record = (encode_offset_key(KEY), encode_offset(OffsetAndMetadata(5, 0, "", 0)))
DROPPED: Record = (encode_offset_key(KEY), None)


def no_consumer_group(group_id: str, _pieces: GroupPieces) -> ConsumerGroup:
    raise AssertionError(f"{group_id} is a classic group")


def opened(shard: Shard) -> None:
    shard.open(LIMITS.group, lambda: "id", Moment(0.0, 0), no_consumer_group)


def test_an_offset_is_dropped_as_often_as_the_log_says_so() -> None:
    shard = Shard(0, 0)
    other = (encode_offset_key(OffsetKey("g", "t", 1)), COMMITTED[1])
    shard.replay([DROPPED, other, DROPPED, COMMITTED, DROPPED])
    assert list(shard.offsets.of("g")) == [("t", 1)]
    shard.replay([(other[0], None)])
    assert list(shard.offsets.groups()) == []
    opened(shard)
    assert shard.groups == {}


def test_a_load_takes_nothing_more_when_it_is_done() -> None:
    shard = Shard(0, 0)
    loading = ShardLoad(shard, opened)
    assert loading.wanted
    loading.ready()
    loading.replay([COMMITTED])
    assert not loading.wanted
    assert not shard.offsets.of("g")


def test_a_load_takes_nothing_more_when_its_partition_was_resigned() -> None:
    shard = Shard(0, 0)
    loading = ShardLoad(shard, opened)
    shard.gone = True
    loading.replay([COMMITTED])
    loading.ready()
    assert not loading.wanted
    assert shard.loading
    assert not shard.offsets.of("g")


def test_an_offset_without_an_id_has_that_of_its_topic_from_then_on() -> None:
    shard = Shard(0, 0)
    shard.replay([COMMITTED])
    assert shard.give_ids(lambda _: None) == []
    known = OffsetAndMetadata(5, 0, "", 0, topic_id=TOPIC_ID)
    assert shard.give_ids(lambda _: TOPIC_ID) == [(COMMITTED[0], encode_offset(known))]
    assert shard.offsets.of("g") == {("t", 0): known}
    assert shard.give_ids(lambda _: TOPIC_ID) == []


def test_a_place_is_on_its_way_until_all_commits_to_it_are_answered() -> None:
    shard = Shard(0, 0)
    place, other = ("t", 0), ("t", 1)
    shard.offsets.pending["g"] = Counter({place: 2, other: 1})
    shard.offsets.answered("g", {place: 0, other: 0}.keys())
    assert shard.offsets.pending == {"g": {place: 1}}
    assert set(shard.offsets.places("g")) == {place}
    shard.offsets.answered("g", {place: 0}.keys())
    assert shard.offsets.pending == {}
