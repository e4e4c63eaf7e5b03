"""Fetching over HTTP by topic, partition, offset and count: JSON and raw batches, waiting, bounds, damage."""

from __future__ import annotations

import base64
import threading

import pytest

from brokers import wait_for
from headrace.errors import NotLeader
from headrace.http import fetch
from headrace.ports.disk import FileSlice
from headrace.records import batch, kernel
from headrace.records.codecs import Codec
from headrace.records.record import NewRecord
from headrace.storage.log import TopicPartition
from http_port import Answer, HttpPort
from proving import proves

TEN = {"records": [{"key": f"k{n}", "value": f"v{n}"} for n in range(10)]}


def get(port: HttpPort, query: str = "", topic: str = "orders", partition: int | str = 0) -> Answer:
    return port.get(f"/topics/{topic}/partitions/{partition}/records{query}")


def append(port: HttpPort, raw: bytearray, topic: str = "orders") -> None:
    """Append a batch as a Kafka producer would."""

    def on_loop() -> None:
        partition = port.partitions.get(topic, 0)
        partition.append(memoryview(raw), 1)
        port.partitions.touch(partition)
        port.partitions.end_turn()

    port.on_loop(on_loop)


def records(*values: bytes) -> list[NewRecord]:
    return [(1_700_000_000_000 + n, None, value, []) for n, value in enumerate(values)]


@proves("G18")
def test_records_are_read_by_offset_and_count(port: HttpPort) -> None:
    port.produce("/topics/orders/records", TEN)
    answer = get(port, "?offset=3&count=4")
    assert answer.status == 200
    assert [(record["offset"], record["key"], record["value"]) for record in answer.json["records"]] == [
        (n, f"k{n}", f"v{n}") for n in range(3, 7)
    ]
    assert {name: value for name, value in answer.json.items() if name != "records"} == {
        "topic": "orders",
        "partition": 0,
        "next_offset": 7,
        "high_watermark": 10,
        "last_stable_offset": 10,
        "start_offset": 0,
    }


@proves("G18")
def test_following_next_offset_reads_everything_once(port: HttpPort) -> None:
    for n in range(7):
        port.produce("/topics/orders/records", {"records": [{"value": f"{n}-{m}"} for m in range(n + 1)]})
    seen: list[str] = []
    offset = 0
    while True:
        found = get(port, f"?offset={offset}&count=3").json
        if not found["records"]:
            break
        seen += [record["value"] for record in found["records"]]
        offset = found["next_offset"]
    assert seen == [f"{n}-{m}" for n in range(7) for m in range(n + 1)]
    assert offset == found["high_watermark"] == 28


def begin_at(port: HttpPort, offset: int) -> None:
    partition = port.partitions.get("orders", 0)
    port.on_loop(lambda: port.partitions.delete_before(partition, offset))
    wait_for("the start", lambda: partition.start_offset == offset)


def test_the_ends_of_a_log_have_names(port: HttpPort) -> None:
    port.produce("/topics/orders/records", TEN)
    begin_at(port, 4)
    assert get(port, "?offset=earliest&count=1").json["records"][0]["offset"] == 4
    assert get(port, "?count=1").json["records"][0]["offset"] == 4
    latest = get(port, "?offset=latest").json
    assert (latest["records"], latest["next_offset"], latest["start_offset"]) == ([], 10, 4)


@pytest.mark.parametrize("offset", [3, 11, 10**18])
def test_an_offset_outside_the_log_is_told_with_its_range(port: HttpPort, offset: int) -> None:
    port.produce("/topics/orders/records", TEN)
    begin_at(port, 4)
    answer = get(port, f"?offset={offset}")
    assert (answer.status, answer.error["kind"], answer.error["code"]) == (416, "OffsetOutOfRange", 1)
    assert f"offset {offset} is outside 4 to 10" in answer.error["message"]


@proves("J1")
@pytest.mark.parametrize("codec", list(Codec))
def test_compressed_batches_of_kafka_producers_are_unpacked(port: HttpPort, codec: Codec) -> None:
    port.create("orders")
    append(port, kernel.build(records(b"first", b"\xff\xfe", b"third" * 1000), codec))
    found = get(port).json["records"]
    assert found[0] == {"offset": 0, "timestamp": 1_700_000_000_000, "key": None, "value": "first"}
    assert base64.b64decode(found[1]["value_base64"]) == b"\xff\xfe"
    assert found[2]["value"] == "third" * 1000


def test_bytes_in_the_answer_are_bounded_but_one_record_always_fits(port: HttpPort) -> None:
    port.create("orders")
    append(port, kernel.build(records(*[b"x" * 1000] * 20), Codec.ZSTD))
    assert len(get(port, "?max_bytes=5500").json["records"]) == 5
    assert len(get(port, "?max_bytes=1").json["records"]) == 1
    assert get(port, "?max_bytes=5500").json["next_offset"] == 5


@proves("G18")
def test_a_fetch_waits_for_the_first_record(port: HttpPort) -> None:
    port.create("orders")
    answers: list[Answer] = []
    waiting = threading.Thread(target=lambda: answers.append(get(port, "?wait_ms=60000")))
    waiting.start()
    wait_for("the fetch to wait", lambda: port.on_loop(lambda: len(port.partitions.deadlines)))
    port.produce("/topics/orders/records", b"at last", "text/plain")
    waiting.join(30)
    assert [record["value"] for record in answers[0].json["records"]] == ["at last"]


def test_a_wait_that_ends_is_an_empty_answer(port: HttpPort) -> None:
    port.create("orders")
    answer = get(port, "?wait_ms=10")
    assert (answer.status, answer.json["records"], answer.json["next_offset"]) == (200, [], 0)


def test_a_fetch_that_waits_hears_that_its_partition_goes(port: HttpPort) -> None:
    port.create("orders")
    answers: list[Answer] = []
    waiting = threading.Thread(target=lambda: answers.append(get(port, "?wait_ms=60000")))
    waiting.start()
    wait_for("the fetch to wait", lambda: port.on_loop(lambda: len(port.partitions.deadlines)))
    port.on_loop(lambda: port.partitions.drop(TopicPartition("orders", 0), NotLeader("moved")))
    waiting.join(30)
    assert (answers[0].status, answers[0].error["kind"]) == (503, "NotLeader")


@proves("G18", "J2")
def test_raw_batches_come_as_they_are_in_the_log(port: HttpPort) -> None:
    port.create("orders")
    sent = [kernel.build(records(b"%d" % n, b"more"), Codec.LZ4) for n in range(5)]
    for raw in sent:
        append(port, raw)
    answer = get(port, "?format=binary&offset=3&count=4")
    assert answer.headers["Content-Type"] == "application/octet-stream"
    found = list(batch.batches(memoryview(answer.body)))
    assert [header.base_offset for header, _ in found] == [2, 4, 6]
    assert [bytes(view[batch.CRC_AT :]) for _, view in found] == [bytes(raw[batch.CRC_AT :]) for raw in sent[1:4]]
    assert (answer.headers["X-Next-Offset"], answer.headers["X-High-Watermark"]) == ("8", "10")
    assert answer.headers["X-Start-Offset"] == "0"


def test_raw_batches_are_never_cut(port: HttpPort) -> None:
    port.create("orders")
    sizes = []
    for n in range(5):
        raw = kernel.build(records(bytes(1000 + n)))
        sizes.append(len(raw))
        append(port, raw)
    for max_bytes in (1, 1500, 2500, 5000, 8000):
        answer = get(port, f"?format=binary&max_bytes={max_bytes}")
        whole = list(batch.batches(memoryview(answer.body)))
        assert sum(header.size_bytes for header, _ in whole) == len(answer.body) > 0
        assert len(answer.body) <= max(max_bytes, sizes[0])
        assert answer.headers["X-Next-Offset"] == str(len(whole))


@proves("G9")
def test_a_large_raw_answer_is_a_slice_of_the_file(port: HttpPort) -> None:
    port.create("orders", max_message_bytes=8 << 20)
    raw = kernel.build(records(bytes(range(256)) * 8192))
    append(port, raw)
    answer = get(port, "?format=binary&max_bytes=4000000")
    assert answer.body[batch.CRC_AT :] == raw[batch.CRC_AT :]


def test_an_empty_raw_answer_is_empty(port: HttpPort) -> None:
    port.create("orders")
    answer = get(port, "?format=binary")
    assert (answer.status, answer.body, answer.headers["X-Next-Offset"]) == (200, b"", "0")


def test_segments_are_read_one_after_the_other(port: HttpPort) -> None:
    port.create("orders", segment_bytes=1024)
    for n in range(50):
        port.produce("/topics/orders/records", b"%04d" % n * 50, "text/plain")
    seen: list[str] = []
    while True:
        found = get(port, f"?offset={len(seen)}&count=1000").json["records"]
        if not found:
            break
        seen += [record["value"][:4] for record in found]
    assert seen == [f"{n:04d}" for n in range(50)]


# Faults


def first_slice(port: HttpPort) -> FileSlice:
    def find() -> FileSlice:
        log = port.partitions.get("orders", 0).log
        return log.read(0, 1, log.written_offset).slices[0]

    return port.on_loop(find)


def test_what_is_not_in_the_page_cache_is_read_ahead_first(faulty_port: HttpPort) -> None:
    port = faulty_port
    port.produce("/topics/orders/records", TEN)
    for format in ("json", "binary"):
        path = first_slice(port).file.path
        port.on_loop(lambda path=path: port.faults.evict(path))  # type: ignore[misc]
        assert get(port, f"?format={format}").status == 200
        file = port.on_loop(lambda path=path: port.disk.open(path))  # type: ignore[misc]
        assert port.on_loop(lambda file=file: file.in_cache(0, 100))  # type: ignore[misc]


def test_a_damaged_batch_is_never_served_as_records(faulty_port: HttpPort) -> None:
    port = faulty_port
    port.produce("/topics/orders/records", TEN)
    piece = first_slice(port)
    port.on_loop(lambda: port.faults.flip(piece.file.path, piece.position + batch.HEADER_BYTES + 5))
    answer = get(port)
    assert (answer.status, answer.error["kind"]) == (503, "StorageFailed")
    assert "orders-0 is damaged at offset 0" in answer.error["message"]
    assert 'headrace_damaged_offset{topic="orders",partition="0"} 0' in port.get("/metrics").body.decode()
    assert "1 of 1 partitions cannot be read everywhere" in port.get("/").body.decode()


def test_a_batch_whose_inside_is_malformed_is_named_with_the_way_around_it(port: HttpPort) -> None:
    port.create("orders")
    raw = kernel.build(records(b"good"))
    raw[batch.HEADER_BYTES] ^= 0x7E
    batch.sign(raw)
    append(port, raw)
    append(port, kernel.build(records(b"behind it")))
    answer = get(port)
    assert (answer.status, answer.error["kind"]) == (422, "InvalidRecord")
    assert "go on at offset 1, or use format=binary" in answer.error["message"]
    assert get(port, "?offset=1").json["records"][0]["value"] == "behind it"
    assert get(port, "?format=binary").status == 200


# What is refused


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("?offset=x", "offset: 'x' is not a whole number from 0 to 9223372036854775807, earliest, latest or @"),
        ("?offset=-1", "is not a whole number"),
        ("?offset=99999999999999999999", "is not a whole number"),
        ("?count=0", "count: '0' is not a whole number from 1 to 10000"),
        ("?count=10001", "count: '10001' is not a whole number from 1 to 10000"),
        ("?max_bytes=0", "max_bytes: '0' is not a whole number from 1"),
        (f"?max_bytes={fetch.JSON_MAX_BYTES + 1}", "max_bytes"),
        ("?wait_ms=300001", "wait_ms: '300001' is not a whole number from 0 to 300000"),
        ("?wait_ms=-1", "wait_ms"),
        ("?format=xml", "format: 'xml' is neither json nor binary"),
        ("?ofset=1", "unknown query parameter 'ofset'; "),
        ("?offset=1&offset=2", "a query parameter is given twice"),
    ],
)
def test_a_query_that_is_wrong_says_what_would_be_right(port: HttpPort, query: str, says: str) -> None:
    port.create("orders")
    answer = get(port, query)
    assert answer.status == 400
    assert says in answer.error["message"]


def test_a_topic_or_partition_that_is_not_there_is_told(port: HttpPort) -> None:
    port.create("orders")
    assert get(port, topic="other").status == 404
    assert "GET /topics lists those there are" in get(port, topic="other").error["message"]
    assert port.get("/topics").json["topics"][0]["name"] == "orders"
    assert get(port, partition=1).status == 404
    assert get(port, partition=2**31).status == 400
    assert get(port, partition="first").error["message"].startswith("the partition: 'first' is not a whole number")


def test_a_partition_that_another_broker_leads_names_it(port: HttpPort) -> None:
    port.create("orders")
    port.on_loop(lambda: port.partitions.drop(TopicPartition("orders", 0)))
    answer = get(port)
    assert (answer.status, answer.error["kind"], answer.error["retriable"]) == (503, "NotLeader", True)
    assert "is led by broker 7" in answer.error["message"]
