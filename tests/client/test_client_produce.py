"""Ready-made batches out, record sets in."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from brokers import Broker
from client.conftest import MakeTopic
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.fetch import Position, fetch, list_offsets, offsets_at, read_batches
from headrace.client.admin.produce import Produced, init_producer_id, produce
from headrace.client.errors import Refusal, UnknownTopic
from headrace.client.fetch_requests import EARLIEST, LATEST, MAX_TIMESTAMP, FetchLimits
from headrace.client.producer.request import Outgoing, encode_parts
from headrace.records import kernel
from headrace.records.batch import CONTROL
from headrace.records.record import NewRecord, Record
from headrace.wire import api as apis
from headrace.wire.codec import encode_request
from headrace.wire.message import Message
from proving import proves


def records(*values: bytes, timestamp_ms: int | None = None) -> list[NewRecord]:
    now_ms = int(time.time() * 1000) if timestamp_ms is None else timestamp_ms
    return [(now_ms, None, value, []) for value in values]


def values_of(
    cluster: Cluster, topic: str, partition: int = 0, offset: int = 0, count: int = 1000
) -> list[bytes | None]:
    return [record.value for record in records_of(cluster, topic, partition, offset, count)]


def records_of(cluster: Cluster, topic: str, partition: int = 0, offset: int = 0, count: int = 1000) -> list[Record]:
    found = read_batches(cluster, topic, partition, offset, count)
    every = [record for _, batch in found.batches for record in kernel.records(batch)]
    return [record for record in every if found.first_offset <= record.offset < found.next_offset]


@pytest.mark.parametrize("version", range(3, 14))
def test_a_request_in_parts_is_the_request_of_the_schema(version: int) -> None:
    topic_ids = {"orders": b"1" * 16, "häfen": b"2" * 16}
    outgoing = [Outgoing("orders", 1, b"x" * 200), Outgoing("häfen", 0, b"y"), Outgoing("orders", 2, b"")]
    parts = encode_parts(version, outgoing, topic_ids, acks=-1, timeout_ms=1234)
    expected = Message(
        transactional_id=None,
        acks=-1,
        timeout_ms=1234,
        topic_data=[
            Message(name=name, topic_id=topic_id, partition_data=[Message(index=n, records=b) for n, b in batches])
            for name, topic_id, batches in (
                ("orders", b"1" * 16, [(1, b"x" * 200), (2, b"")]),
                ("häfen", b"2" * 16, [(0, b"y")]),
            )
        ],
    )
    assert b"".join(parts) == encode_request(apis.PRODUCE, version, expected)
    assert any(part is outgoing[0].batch for part in parts)


@proves("G4", "G5", "G17", "J9")
@pytest.mark.parametrize("acks", [1, -1])
def test_batches_go_to_their_partitions_and_are_answered_one_by_one(
    cluster: Cluster, topic: MakeTopic, acks: int
) -> None:
    name = topic(partitions=3)
    identity = init_producer_id(cluster)
    outgoing = [
        Outgoing(
            name,
            n % 3,
            kernel.build(
                records(b"%d" % n, b"second"),
                producer_id=identity.producer_id,
                producer_epoch=identity.producer_epoch,
                base_sequence=n // 3 * 2,
            ),
        )
        for n in range(9)
    ]
    answers = produce(cluster, outgoing, acks=acks)
    assert [a.base_offset for a in answers if isinstance(a, Produced)] == [0, 0, 0, 2, 2, 2, 4, 4, 4]
    assert values_of(cluster, name, 1) == [b"1", b"second", b"4", b"second", b"7", b"second"]


@proves("G5")
def test_acks_0_is_not_answered_and_still_written(cluster: Cluster, topic: MakeTopic) -> None:
    name = topic()
    assert produce(cluster, [Outgoing(name, 0, kernel.build(records(b"quiet")))], acks=0) == [Produced(-1, -1)]
    produce(cluster, [Outgoing(name, 0, kernel.build(records(b"loud")))])
    assert values_of(cluster, name) == [b"quiet", b"loud"]


@proves("J10")
def test_a_batch_sent_twice_under_a_producer_id_is_kept_once(cluster: Cluster, topic: MakeTopic) -> None:
    name = topic()
    identity = init_producer_id(cluster)
    batch = kernel.build(
        records(b"once"),
        producer_id=identity.producer_id,
        producer_epoch=identity.producer_epoch,
        base_sequence=0,
    )
    for _ in range(3):
        (answer,) = produce(cluster, [Outgoing(name, 0, batch)])
        assert isinstance(answer, Produced)
        assert answer.base_offset in (0, -1)
    assert values_of(cluster, name) == [b"once"]


def test_a_refused_batch_is_named_and_the_others_are_written(cluster: Cluster, topic: MakeTopic) -> None:
    name = topic(partitions=2)
    control = kernel.build(records(b"no"), attributes=CONTROL)
    refused, taken = produce(cluster, [Outgoing(name, 0, control), Outgoing(name, 1, kernel.build(records(b"yes")))])
    assert isinstance(refused, Refusal)
    assert f"produce to {name}-0" in str(refused)
    assert isinstance(taken, Produced)


def test_a_partition_that_is_not_there_is_told_at_once(cluster: Cluster, topic: MakeTopic) -> None:
    name = topic(partitions=2)
    (answer,) = produce(cluster, [Outgoing(name, 2, kernel.build(records(b"x")))])
    assert isinstance(answer, UnknownTopic)
    assert "only 0 to 1" in str(answer)


@proves("G18")
def test_records_are_read_by_topic_partition_offset_and_count(cluster: Cluster, topic: MakeTopic) -> None:
    name = topic()
    batches = [kernel.build(records(*(b"%d" % n for n in range(first, first + 10)))) for first in range(0, 50, 10)]
    produce(cluster, [Outgoing(name, 0, batch) for batch in batches])
    assert values_of(cluster, name, offset=7, count=5) == [b"7", b"8", b"9", b"10", b"11"]
    assert values_of(cluster, name, offset=20, count=10) == [b"%d" % n for n in range(20, 30)]
    assert values_of(cluster, name, offset=48, count=100) == [b"48", b"49"]
    assert values_of(cluster, name, offset=50, count=1) == []
    assert len(read_batches(cluster, name, 0, 20, 10).batches) == 1
    with pytest.raises(Refusal, match="offset out of range"):
        read_batches(cluster, name, 0, 51, 1)


@proves("G18")
def test_a_count_larger_than_one_answer_takes_several(cluster: Cluster, topic: MakeTopic) -> None:
    name = topic()
    batches = [kernel.build(records(*(b"%d" % n for n in range(first, first + 10)))) for first in range(0, 200, 10)]
    produce(cluster, [Outgoing(name, 0, batch) for batch in batches])
    small = FetchLimits(max_wait_ms=0, min_bytes=0, max_bytes=300, partition_max_bytes=300)
    found = read_batches(cluster, name, 0, 5, 150, small)
    assert (found.first_offset, found.next_offset, found.high_watermark) == (5, 155, 200)
    assert [header.base_offset for header, _ in found.batches] == list(range(0, 160, 10))


@proves("J9")
def test_many_partitions_are_fetched_in_one_round(cluster: Cluster, topic: MakeTopic) -> None:
    name = topic(partitions=4)
    produce(cluster, [Outgoing(name, n, kernel.build(records(b"%d" % n))) for n in range(4)])
    fetched = fetch(cluster, [Position(name, n, 0) for n in range(4)])
    found = {f.position.partition: [r.value for _, b in f.whole_batches() for r in kernel.records(b)] for f in fetched}
    assert found == {n: [b"%d" % n] for n in range(4)}
    assert all(f.high_watermark == 1 for f in fetched)


def test_offsets_by_place_and_by_time(cluster: Cluster, topic: MakeTopic) -> None:
    name = topic(partitions=2)
    first_ms = int(time.time() * 1000) - 10_000
    outgoing = [
        Outgoing(name, 0, kernel.build(records(b"x", timestamp_ms=first_ms + n * 100))) for n in (0, 1, 5, 3, 4)
    ]
    produce(cluster, outgoing)
    latest = list_offsets(cluster, name, {0: LATEST, 1: LATEST})
    assert {n: found.offset for n, found in latest.items()} == {0: 5, 1: 0}
    assert list_offsets(cluster, name, {0: EARLIEST})[0].offset == 0
    greatest = list_offsets(cluster, name, {0: MAX_TIMESTAMP})[0]
    assert (greatest.offset, greatest.timestamp_ms) == (2, first_ms + 500)
    assert list_offsets(cluster, name, {0: first_ms + 50})[0].offset == 1
    assert offsets_at(cluster, name, [0, 1], first_ms + 501) == {0: 5, 1: 0}


@proves("G6")
def test_many_requests_leave_in_one_vectored_write(broker: Broker, topic: MakeTopic, tmp_path: Path) -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    script = textwrap.dedent("""
        import sys
        from headrace.client.admin.cluster import Cluster
        from headrace.client.admin.produce import produce
        from headrace.client.producer.request import Outgoing
        from headrace.records import kernel
        with Cluster(sys.argv[1]) as cluster:
            batch = kernel.build([(1, None, b"v" * 1000, [])])
            produce(cluster, [Outgoing(sys.argv[2], n % 2, batch) for n in range(8)])
    """)
    trace = tmp_path / "trace"
    command = [sys.executable, "-c", script, broker.bootstrap, topic(partitions=2)]
    traced = subprocess.run(
        ["strace", "-f", "-qq", "-e", "trace=sendmsg", "-o", trace, *command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    if "ptrace" in traced.stderr:
        pytest.skip(f"strace may not trace here: {traced.stderr.strip()}")
    assert traced.returncode == 0, traced.stderr
    writes = re.findall(r"msg_iovlen=(\d+).* = (\d+)$", trace.read_text(), re.MULTILINE)
    # Four requests of two batches each, and all of them in one call: head, fields, batch, fields, batch, fields.
    assert [(int(parts), int(sent) > 8 * 1000) for parts, sent in writes if int(sent) > 1000] == [(24, True)]
