"""The acks of a producer on the wire, seen between it and a real broker."""

from __future__ import annotations

import asyncio

import pytest

from brokers import wait_for
from client.wire_tap import Seen, WireTap
from headrace import Producer, aio
from headrace.records import kernel
from headrace.records.batch import read_header
from headrace.wire import api as apis
from proving import proves


def all_produced(tap: WireTap, count: int) -> dict[bytes, Seen]:
    wait_for(f"{count} records on the wire", lambda: len(produced(tap)) == count)
    return produced(tap)


def produced(tap: WireTap) -> dict[bytes, Seen]:
    """Requests by the value of each record in them."""
    return {
        record.value or b"": seen
        for seen in tap.of(apis.PRODUCE)
        for topic in seen.body.topic_data
        for partition in topic.partition_data
        for record in kernel.records(partition.records)
    }


@proves("R6", "J8")
@pytest.mark.parametrize("acks", [-1, 0, 1])
def test_the_acks_of_a_producer_and_of_a_send_reach_the_broker(acks: int, tap: WireTap) -> None:
    others = [other for other in (-1, 0, 1) if other != acks]
    with Producer(tap.address, acks=acks, client_id=f"acks {acks}") as producer:
        producer.send("acks", b"as the producer")
        producer.send_async("acks", b"async as the producer")
        producer.send_ordered("acks", b"ordered as the producer", b"k")
        for other in others:
            producer.send("acks", b"send %d" % other, acks=other)
            producer.send_async("acks", b"async %d" % other, acks=other)
            producer.send_ordered("acks", b"ordered %d" % other, b"k", acks=other)
        producer.send_oneway("acks", b"one way")
    asked = all_produced(tap, 10)
    wanted = {
        **{b"%sas the producer" % way: acks for way in (b"", b"async ", b"ordered ")},
        **{b"%s %d" % (way, other): other for way in (b"send", b"async", b"ordered") for other in others},
        b"one way": 0,
    }
    assert {value: seen.body.acks for value, seen in asked.items()} == wanted
    assert {value for value, seen in asked.items() if seen.answer is None} == {
        value for value, acks in wanted.items() if acks == 0
    }, "only acks 0 has no answer"


@proves("R6")
def test_only_batches_that_all_replicas_acknowledge_carry_sequences(tap: WireTap) -> None:
    with Producer(tap.address, client_id="sequences") as producer:
        for acks in (-1, 0, 1):
            producer.send("sequences", b"%d" % acks, acks=acks)
    asked = all_produced(tap, 3)
    numbered = {
        value: read_header(seen.body.topic_data[0].partition_data[0].records).producer_id >= 0
        for value, seen in asked.items()
    }
    assert numbered == {b"-1": True, b"0": False, b"1": False}


@proves("R6")
def test_acks_on_asyncio_reach_the_broker(tap: WireTap) -> None:
    async def main() -> None:
        async with aio.Producer(tap.address, acks=1) as producer:
            await producer.send("acks", b"1")
            await producer.send("acks", b"-1", acks=-1)
            await producer.send("acks", b"0", acks=0)
            producer.send_oneway("acks", b"00")

    asyncio.run(main())
    asked = all_produced(tap, 4)
    assert all(int(value) == seen.body.acks for value, seen in asked.items())
