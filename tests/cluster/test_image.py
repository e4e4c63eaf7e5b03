from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.cluster import keys
from headrace.cluster.controller_state import Controls, ElectedController, Order, ReplicaEnd, encode_end
from headrace.cluster.image import (
    CREATING,
    LIVE,
    Broker,
    Deletion,
    Endpoint,
    Image,
    Lost,
    PartitionState,
    Previous,
    Topic,
    apply,
    encode_broker,
    encode_deletion,
    encode_partition,
    encode_topic,
    from_listing,
)
from headrace.errors import CoordinationError
from headrace.ports.coordination import Event, KeyValue, Listing, WatchResponse
from proving import proves

PREFIX = "/headrace/c/"
BROKER = Broker(1, {"inside": Endpoint("127.0.0.1", 9092)}, "i1", 5, "r", Endpoint("127.0.0.1", 8082))


def partition(index: int, epoch: int = 0) -> PartitionState:
    return PartitionState(index, 1, epoch, (1,), (1,))


def put_topic(name: str, count: int, topic_id: bytes = b"t" * 16, state: str = LIVE) -> Event:
    return Event(
        "put", keys.topic_key(PREFIX, name), encode_topic(Topic(name, topic_id, (), {}, False, state), count), 9
    )


def put_partition(name: str, index: int, topic_id: bytes = b"t" * 16, epoch: int = 0) -> Event:
    return Event("put", keys.partition_key(PREFIX, name, index), encode_partition(topic_id, partition(index, epoch)), 9)


def after(image: Image, *events: Event) -> Image:
    return apply(image, WatchResponse(image.revision + 1, events))


def with_topic(name: str, count: int, topic_id: bytes = b"t" * 16) -> list[Event]:
    return [put_topic(name, count, topic_id), *(put_partition(name, index, topic_id) for index in range(count))]


def test_a_listing_becomes_an_image() -> None:
    events = [*with_topic("t", 2), Event("put", keys.broker_key(PREFIX, 1), encode_broker(BROKER), 4)]
    entries = tuple(KeyValue(event.key, event.value, 1, event.mod_revision, 1) for event in events)
    image = from_listing(PREFIX, Listing(entries, 12))
    assert image.revision == 12
    assert image.brokers == {1: BROKER}
    assert image.topics["t"].partitions == tuple(PartitionState(n, 1, 0, (1,), (1,), 9) for n in range(2))
    assert image.topics_by_id[b"t" * 16] is image.topics["t"]
    assert image.partition("t", 1) == image.topics["t"].partitions[1]
    assert image.partition("t", 2) is None
    assert image.partition("none", 0) is None


def test_a_change_shares_what_did_not_change() -> None:
    image = after(Image(PREFIX), *with_topic("a", 1, b"a" * 16), *with_topic("b", 2, b"b" * 16))
    changed = after(image, put_partition("b", 1, b"b" * 16, epoch=3))
    assert changed.version == image.version + 1
    assert changed.topics["a"] is image.topics["a"]
    assert changed.topics["b"].partitions[0] is image.topics["b"].partitions[0]
    assert changed.topics["b"].partitions[1].leader_epoch == 3
    assert image.topics["b"].partitions[1].leader_epoch == 0
    assert changed.brokers is image.brokers


def test_a_move_under_way_is_in_the_key_and_only_then() -> None:
    moving = replace(partition(0), replicas=(1, 2), target=(2,), adding=(2,))
    key = keys.partition_key(PREFIX, "t", 0)
    image = after(Image(PREFIX), put_topic("t", 1), Event("put", key, encode_partition(b"t" * 16, moving), 9))
    assert image.topics["t"].partitions == (replace(moving, revision=9),)
    settled = keys.decode(key, encode_partition(b"t" * 16, partition(0)))
    assert not {"target", "adding"} & set(settled)


def test_a_topic_is_there_when_it_is_live() -> None:
    claimed = after(Image(PREFIX), put_topic("t", 2, state=CREATING), put_partition("t", 0))
    assert "t" not in claimed.topics
    assert claimed.unfinished["t"].state == CREATING
    whole = after(claimed, put_partition("t", 1), put_topic("t", 2))
    assert len(whole.topics["t"].partitions) == 2
    assert whole.unfinished == {}


@proves("J7")
def test_a_partition_without_its_key_keeps_its_place_and_the_others_theirs() -> None:
    image = after(Image(PREFIX), *with_topic("t", 3))
    lacking = after(image, Event("delete", keys.partition_key(PREFIX, "t", 1), b"", 10))
    topic = lacking.topics["t"]
    assert topic.missing == (1,)
    assert [state.index for state in topic.partitions] == [0, 1, 2]
    assert topic.partitions[2] is image.topics["t"].partitions[2]
    assert (lacking.partition("t", 1), lacking.unfinished) == (None, {})
    assert after(lacking, put_partition("t", 1)).topics["t"].partitions == image.topics["t"].partitions


@proves("J7")
def test_a_topic_without_its_key_goes_on_as_it_was_seen_until_its_partitions_are_gone() -> None:
    image = after(Image(PREFIX), *with_topic("t", 1))
    without = after(image, Event("delete", keys.topic_key(PREFIX, "t"), b"", 10))
    assert without.topics["t"] == replace(image.topics["t"], revision=0)
    entries = (KeyValue(keys.partition_key(PREFIX, "t", 0), put_partition("t", 0).value, 1, 9, 1),)
    listed = from_listing(PREFIX, Listing(entries, 12), without)
    assert listed.topics["t"] == without.topics["t"]
    unknown = from_listing(PREFIX, Listing(entries, 12))
    assert (unknown.topics, list(unknown.keyless), unknown.keyless["t"].id) == ({}, ["t"], b"t" * 16)
    gone = after(listed, Event("delete", keys.partition_key(PREFIX, "t", 0), b"", 11))
    assert (gone.topics, gone.topics_by_id, gone.keyless) == ({}, {}, {})


def test_a_deletion_is_known_by_the_topics_id() -> None:
    key, deletion = keys.deleted_key(PREFIX, b"t" * 16), Deletion("t", (1, 2), 5)
    image = after(Image(PREFIX), Event("put", key, encode_deletion(deletion), 7))
    assert image.deleted == {b"t" * 16: replace(deletion, revision=7)}
    assert after(image, Event("delete", key, b"", 8)).deleted == {}


def test_partitions_of_an_earlier_topic_of_that_name_do_not_count() -> None:
    image = after(Image(PREFIX), put_topic("t", 1, b"n" * 16), put_partition("t", 0, b"o" * 16))
    assert image.topics["t"].missing == (0,)


def test_partitions_above_the_count_wait_for_it() -> None:
    image = after(Image(PREFIX), *with_topic("t", 1), put_partition("t", 1))
    assert len(image.topics["t"].partitions) == 1
    assert len(after(image, put_topic("t", 2)).topics["t"].partitions) == 2


def test_a_deleted_topic_and_broker_are_gone() -> None:
    image = after(
        Image(PREFIX), *with_topic("t", 1), Event("put", keys.broker_key(PREFIX, 1), encode_broker(BROKER), 4)
    )
    gone = after(
        image,
        Event("delete", keys.partition_key(PREFIX, "t", 0), b"", 10),
        Event("delete", keys.topic_key(PREFIX, "t"), b"", 10),
        Event("delete", keys.broker_key(PREFIX, 1), b"", 10),
    )
    assert (gone.topics, gone.topics_by_id, gone.unfinished, gone.brokers) == ({}, {}, {}, {})


def test_settings_are_folded_for_the_cluster_and_each_broker() -> None:
    cluster, own = keys.cluster_config_key(PREFIX), keys.broker_config_key(PREFIX, 1)
    image = after(Image(PREFIX), Event("put", cluster, b'{"a":"1"}', 7), Event("put", own, b'{"a":"2"}', 8))
    assert image.cluster_config == {"a": "1"}
    assert image.broker_configs == {1: {"a": "2"}}
    assert image.config_revisions == {cluster: 7, own: 8}
    gone = after(image, Event("delete", own, b"", 9))
    assert (gone.broker_configs, gone.config_revisions) == ({}, {cluster: 7})


def test_a_registration_and_a_partition_come_back_as_they_were_written() -> None:
    broker = Broker(
        2,
        {},
        "i2",
        5,
        replication=Endpoint("127.0.0.1", 7),
        boot="b",
        previous=Previous("i1", "a", True),
        state="leaving",
    )
    state = PartitionState(
        0,
        2,
        4,
        (2, 3),
        (3, 2, 5),
        9,
        incarnations={2: "i2", 3: "x"},
        controller=6,
        lost=Lost(3, 10, 12),
        least_start=7,
    )
    image = after(
        Image(PREFIX),
        Event("put", keys.broker_key(PREFIX, 2), encode_broker(broker), 4),
        put_topic("t", 1),
        Event("put", keys.partition_key(PREFIX, "t", 0), encode_partition(b"t" * 16, state), 9),
    )
    assert image.brokers == {2: broker}
    assert image.brokers[2].revision == 4
    assert image.partition("t", 0) == state


def test_a_partition_written_before_incarnations_were_has_none() -> None:
    old = b'{"id":"%s","leader":1,"leader_epoch":3,"isr":[1],"replicas":[1]}' % (b"t" * 16).hex().encode()
    image = after(Image(PREFIX), put_topic("t", 1), Event("put", keys.partition_key(PREFIX, "t", 0), old, 9))
    assert image.partition("t", 0) == PartitionState(0, 1, 3, (1,), (1,), 9)


def test_what_elections_run_on_is_folded_and_taken_away_again() -> None:
    end = ReplicaEnd(b"t" * 16, "i", 3, 5, 10, 9)
    image = after(
        Image(PREFIX),
        Event("put", keys.controller_key(PREFIX), b'{"broker":2,"epoch":7}', 3),
        Event("put", keys.election_key(PREFIX, 12), b'{"broker":2}', 4),
        Event("put", keys.ends_key(PREFIX, "t", 0, 2), encode_end(end), 5),
        Event("put", keys.order_key(PREFIX, "t", 0), b'{"kind":"unclean"}', 6),
        Event("put", keys.draining_key(PREFIX, 3), b"{}", 7),
    )
    assert image.controls == Controls(
        ElectedController(2, 7, 3), {12: 4}, {("t", 0): {2: end}}, {("t", 0): Order("unclean", 6)}, frozenset({3})
    )
    gone = [
        keys.election_key(PREFIX, 12),
        keys.ends_key(PREFIX, "t", 0, 2),
        keys.order_key(PREFIX, "t", 0),
        keys.draining_key(PREFIX, 3),
    ]
    assert after(image, *(Event("delete", key, b"", 9) for key in gone)).controls == Controls(
        ElectedController(2, 7, 3)
    )


def test_keys_of_others_are_passed_over() -> None:
    image = after(
        Image(PREFIX), Event("put", "/headrace/other/topics/t", b"?", 3), Event("put", PREFIX + "new", b"?", 3)
    )
    assert image.topics == {}


def test_a_report_that_makes_no_sense_is_named() -> None:
    with pytest.raises(CoordinationError, match="/headrace/c/ends/t/0/1"):
        after(Image(PREFIX), Event("put", keys.ends_key(PREFIX, "t", 0, 1), b"{}", 3))


@pytest.mark.parametrize("value", [b"not json", b"[]", b"{}", b'{"id":"zz"}'])
def test_a_value_that_makes_no_sense_is_named(value: bytes) -> None:
    with pytest.raises(CoordinationError, match="/headrace/c/topics/t"):
        after(Image(PREFIX), Event("put", keys.topic_key(PREFIX, "t"), value, 3))
