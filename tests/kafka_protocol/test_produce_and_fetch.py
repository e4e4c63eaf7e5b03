"""Produce and Fetch as a client sees them on the wire."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from brokers import Broker
from headrace.records import kernel
from headrace.records.batch import batches
from headrace.wire import api as apis
from headrace.wire.message import Message
from kafka_protocol.raw import NOW_MS, Raw, batch_of, values
from proving import proves

Connect = Callable[[Broker], Raw]


@proves("G5", "L4")
@pytest.mark.parametrize("durability", ["memory", "os", "disk"])
@pytest.mark.parametrize("acks", [0, 1, -1])
def test_each_durability_takes_each_acks(
    broker: Broker, connect: Connect, topic: str, durability: str, acks: int
) -> None:
    raw = connect(broker)
    raw.create(topic, durability=durability)
    for n in range(5):
        if acks == 0:
            raw.send_produce(topic, batch_of([b"%d" % n]), acks)
        else:
            answer = raw.produce(topic, batch_of([b"%d" % n]), acks)
            assert (answer.error_code, answer.base_offset) == (0, n)
    fetched = raw.fetch(topic, 0, wait_ms=5000, min_bytes=5 * 62)
    assert values(fetched.records) == [b"0", b"1", b"2", b"3", b"4"]
    assert fetched.high_watermark == 5


def test_other_acks_are_refused(broker: Broker, connect: Connect, topic: str) -> None:
    raw = connect(broker)
    raw.create(topic)
    assert raw.produce(topic, batch_of([b"x"]), acks=7).error_code == 21


@proves("J10")
def test_duplicates_gaps_and_old_epochs_of_an_idempotent_producer_are_answered_as_kafka_does(
    broker: Broker, connect: Connect, topic: str
) -> None:
    raw = connect(broker)
    raw.create(topic)
    given = raw.call(apis.INIT_PRODUCER_ID, 4, transactional_id=None, transaction_timeout_ms=0)
    other = raw.call(apis.INIT_PRODUCER_ID, 4, transactional_id=None, transaction_timeout_ms=0)
    assert given.producer_id != other.producer_id

    def send(sequence: int, epoch: int = 0, count: int = 2) -> tuple[int, int]:
        batch = batch_of([b"v"] * count, producer_id=given.producer_id, producer_epoch=epoch, base_sequence=sequence)
        answer = raw.produce(topic, batch, acks=-1)
        return answer.error_code, answer.base_offset

    assert [send(0), send(2), send(4)] == [(0, 0), (0, 2), (0, 4)]
    assert send(2) == (0, 2), "a duplicate is answered with where it went"
    assert send(8)[0] == 45, "a gap"
    assert send(6) == (0, 6)
    assert send(0, epoch=1) == (0, 8)
    assert send(8, epoch=0)[0] == 47, "an old epoch"
    renewed = raw.call(
        apis.INIT_PRODUCER_ID,
        4,
        transactional_id=None,
        transaction_timeout_ms=0,
        producer_id=given.producer_id,
        producer_epoch=1,
    )
    assert (renewed.producer_id, renewed.producer_epoch) == (given.producer_id, 2)
    assert raw.fetch(topic).high_watermark == 10


@proves("J1")
def test_a_wrong_crc_an_old_format_and_a_batch_too_large_are_refused_and_nothing_is_stored(
    broker: Broker, connect: Connect, topic: str
) -> None:
    raw = connect(broker)
    raw.create(topic, max_message_bytes="1000")
    flipped = bytearray(batch_of([b"damaged"]))
    flipped[-3] ^= 1
    old = bytearray(batch_of([b"old"]))
    old[16] = 1
    assert raw.produce(topic, bytes(flipped)).error_code == 2
    assert raw.produce(topic, bytes(old)).error_code == 87
    assert raw.produce(topic, batch_of([b"x" * 2000])).error_code == 10
    assert raw.produce(topic, batch_of([b"a"]) + batch_of([b"b"])).error_code == 2
    assert raw.produce("no-such-topic", batch_of([b"x"])).error_code == 3
    assert raw.produce(topic, batch_of([b"x"]), partition=9).error_code == 3
    assert raw.fetch(topic).high_watermark == 0


@proves("J9")
def test_many_topics_and_partitions_in_one_produce_and_one_fetch(broker: Broker, connect: Connect, topic: str) -> None:
    raw = connect(broker)
    names = [f"{topic}-{n}" for n in range(5)]
    for name in names:
        raw.create(name, partitions=4)
    data = [
        Message(name=name, partition_data=[Message(index=p, records=batch_of([b"%d" % p])) for p in range(4)])
        for name in names
    ]
    produced = raw.call(apis.PRODUCE, 8, transactional_id=None, acks=1, timeout_ms=5000, topic_data=data)
    rows = [row for found in produced.responses for row in found.partition_responses]
    assert [(row.error_code, row.base_offset) for row in rows] == [(0, 0)] * 20
    asked = [Message(topic=name, partitions=[_asked(partition) for partition in range(4)]) for name in names]
    fetched = raw.call(
        apis.FETCH,
        11,
        replica_id=-1,
        max_wait_ms=0,
        min_bytes=1,
        max_bytes=1 << 24,
        isolation_level=1,
        session_id=0,
        session_epoch=-1,
        topics=asked,
        forgotten_topics_data=[],
        rack_id="",
    )
    found = {(t.topic, p.partition_index): values(p.records) for t in fetched.responses for p in t.partitions}
    assert found == {(name, p): [b"%d" % p] for name in names for p in range(4)}


def _asked(partition: int) -> Message:
    return Message(
        partition=partition, current_leader_epoch=-1, fetch_offset=0, log_start_offset=-1, partition_max_bytes=1 << 20
    )


def test_a_fetch_waits_for_min_bytes_or_its_time(broker: Broker, connect: Connect, topic: str) -> None:
    raw, other = connect(broker), connect(broker)
    raw.create(topic)
    assert not raw.fetch(topic, 0, wait_ms=50).records
    waiting = raw.send_fetch(topic, 0, wait_ms=20_000, min_bytes=200)
    other.produce(topic, batch_of([b"too little"]))
    other.produce(topic, batch_of([b"x" * 200]))
    correlation_id, answer = raw.receive(apis.FETCH, 12)
    assert correlation_id == waiting
    assert values(answer.responses[0].partitions[0].records) == [b"too little", b"x" * 200]


def test_byte_limits_cut_a_fetch_but_never_the_first_batch(broker: Broker, connect: Connect, topic: str) -> None:
    raw = connect(broker)
    raw.create(topic)
    for _ in range(3):
        raw.produce(topic, batch_of([b"x" * 5000]))
    whole = raw.fetch(topic, 0)
    assert len(values(whole.records)) == 3
    assert values(raw.fetch(topic, 1, partition_max_bytes=10).records) == [b"x" * 5000]
    assert values(raw.fetch(topic, 1, max_bytes=10).records) == [b"x" * 5000]


@pytest.mark.parametrize("isolation", [0, 1])
def test_only_the_first_partition_with_records_may_exceed_what_is_left(
    broker: Broker, connect: Connect, topic: str, isolation: int
) -> None:
    """A client may take no more than it has asked for, but for a batch that is larger alone."""
    raw = connect(broker)
    raw.create(topic, partitions=3)
    for partition, size in ((1, 5000), (2, 5000), (2, 100)):
        raw.produce(topic, batch_of([b"x" * size]), partition=partition)
    asked = [Message(topic=topic, partitions=[_asked(partition) for partition in range(3)])]
    given: dict[str, object] = {"replica_id": -1, "max_wait_ms": 0, "min_bytes": 1, "isolation_level": isolation}
    given |= {"session_id": 0, "session_epoch": -1, "topics": asked, "forgotten_topics_data": [], "rack_id": ""}
    for max_bytes, sizes in ((10, [0, 1, 0]), (6000, [0, 1, 0]), (1 << 20, [0, 1, 2])):
        (found,) = raw.call(apis.FETCH, 11, max_bytes=max_bytes, **given).responses
        assert [len(values(part.records)) for part in found.partitions] == sizes


def test_offsets_outside_the_log_and_other_epochs_are_named(broker: Broker, connect: Connect, topic: str) -> None:
    raw = connect(broker)
    raw.create(topic)
    raw.produce(topic, batch_of([b"a", b"b"]))
    assert raw.fetch(topic, 3).error_code == 1
    assert raw.fetch(topic, -1).error_code == 1
    assert raw.fetch(topic, 2).error_code == 0
    assert raw.fetch(topic, 0, epoch=99).error_code == 75
    assert raw.fetch("no-such-topic", 0).error_code == 3


@proves("J2")
def test_batches_come_back_byte_for_byte_but_for_their_place(broker: Broker, connect: Connect, topic: str) -> None:
    raw = connect(broker)
    raw.create(topic)
    sent = [bytes(kernel.build([(1000 + n, b"k", b"v" * 100, ())], codec)) for n, codec in enumerate([0, 1, 2, 3, 4])]
    for batch in sent:
        raw.produce(topic, batch)
    records = memoryview(raw.fetch(topic).records)
    stored = [bytes(view) for _, view in batches(records)]
    assert [view[16:] for view in stored] == [batch[16:] for batch in sent]


@pytest.mark.parametrize("version", [7, 8, 9, 12])
def test_all_records_of_a_batch_that_are_wrong_are_named(
    broker: Broker, connect: Connect, topic: str, version: int
) -> None:
    raw = connect(broker)
    raw.create(topic, cleanup_policy="compact")
    keys = [b"a", None, b"b", None]
    answer = raw.produce(topic, bytes(kernel.build([(NOW_MS, key, b"v", ()) for key in keys])), version=version)
    assert (answer.error_code, answer.base_offset) == (87, -1)
    if version >= 8:
        assert [wrong.batch_index for wrong in answer.record_errors] == [1, 3]
        assert all("no key" in wrong.batch_index_error_message for wrong in answer.record_errors)
        assert "record 1 of the batch has no key" in answer.error_message
    assert raw.produce(topic, bytes(kernel.build([(NOW_MS, b"a", b"v", ())])), version=version).base_offset == 0


def test_records_from_another_time_are_named_where_the_topic_says_so(
    broker: Broker, connect: Connect, topic: str
) -> None:
    raw = connect(broker)
    raw.create(topic, message_timestamp_before_max_ms="3600000", message_timestamp_after_max_ms="3600000")
    now_ms = int(time.time() * 1000)
    times_ms = [now_ms, NOW_MS, now_ms + 7_200_000]
    answer = raw.produce(topic, bytes(kernel.build([(time_ms, None, b"v", ()) for time_ms in times_ms])))
    assert (answer.error_code, [wrong.batch_index for wrong in answer.record_errors]) == (32, [1, 2])
    assert raw.produce(topic, bytes(kernel.build([(now_ms, None, b"v", ())]))).error_code == 0


def test_append_time_replaces_the_producers_clock_where_the_topic_says_so(
    broker: Broker, connect: Connect, topic: str
) -> None:
    raw = connect(broker)
    raw.create(topic, message_timestamp_type="LogAppendTime")
    answer = raw.produce(topic, batch_of([b"a"]))
    assert answer.log_append_time_ms > 1_700_000_000_000
    (header, view), *_ = batches(memoryview(raw.fetch(topic).records))
    assert header.append_time
    assert kernel.records(view)[0].timestamp_ms == answer.log_append_time_ms


def test_a_deleted_topic_answers_who_waits_for_it(broker: Broker, connect: Connect, topic: str) -> None:
    raw, other = connect(broker), connect(broker)
    raw.create(topic)
    raw.send_fetch(topic, 0, wait_ms=20_000)
    deleted = other.call(apis.DELETE_TOPICS, 6, topics=[Message(name=topic, topic_id=bytes(16))], timeout_ms=5000)
    assert deleted.responses[0].error_code == 0
    assert raw.receive(apis.FETCH, 12)[1].responses[0].partitions[0].error_code == 3
