"""Batches built record by record: the same bytes as the kernel's, read by an independent codec, compiled and not."""

import asyncio
import logging
import time
from collections.abc import Awaitable
from types import ModuleType
from typing import Any

import pytest
from aiokafka.record.default_records import DefaultRecordBatch
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import BatchTooLarge, InvalidRecord, NotLeader, RequestTimedOut
from headrace.records import batch, kernel
from headrace.records.codecs import Codec
from headrace.records.record import NewRecord
from hypotheses import examples
from proving import proves

MOST = 2**62
NOW_MS = 1_700_000_000_000
CODECS = st.sampled_from(list(Codec))
CONTENT = st.none() | st.binary(max_size=300)
TIMES_MS = st.integers(NOW_MS - 10_000, NOW_MS + 10_000) | st.integers(-1, MOST // 2)
HEADERS = st.lists(st.tuples(st.text(max_size=80), CONTENT), max_size=4)
RECORDS = st.lists(st.tuples(TIMES_MS, CONTENT, CONTENT, HEADERS), min_size=1, max_size=30)
LARGE = 1 << 24

both_forms = examples(60)


class Sender:
    """As much of a sender as deliveries ask for."""

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer
        self.deadlines: list[float | None] = []

    def wait(self, delivery: Any, deadline: float | None) -> None:
        self.deadlines.append(deadline)
        if self.answer is not None:
            self.answer(delivery.sent)

    def awaited(self, delivery: Any) -> Awaitable[Any]:
        async def report() -> Any:
            self.wait(delivery, None)
            return delivery.result()

        return report()


def sent_batch(building: ModuleType, sender: Sender | None = None) -> Any:
    return building.SentBatch("orders", 3, sender or Sender())


def open_batch(building: ModuleType, codec: int = 0, room: int = LARGE, first_bytes: int = 4096) -> Any:
    return building.OpenBatch(sent_batch(building), codec, room, first_bytes)


@proves("R6", "J1")
@given(new=RECORDS, first_bytes=st.integers(0, 5000))
@both_forms
def test_a_batch_built_one_by_one_is_the_one_built_at_once(
    building: ModuleType, new: list[NewRecord], first_bytes: int
) -> None:
    built = open_batch(building, first_bytes=first_bytes)
    assert [built.append(*fields) for fields in new] == list(range(len(new)))
    assert built.record_bytes == built.size - batch.HEADER_BYTES
    data = built.seal(77, 2, 9, batch.TRANSACTIONAL)
    whole = kernel.build(new, producer_id=77, producer_epoch=2, base_sequence=9, attributes=batch.TRANSACTIONAL)
    assert data == whole
    assert (built.count, built.first_ms, built.size) == (len(new), new[0][0], len(whole))


@proves("R6", "J1")
@given(new=RECORDS, codec=CODECS)
@both_forms
def test_an_independent_codec_reads_what_was_built(building: ModuleType, new: list[NewRecord], codec: Codec) -> None:
    built = open_batch(building, codec)
    for fields in new:
        built.append(*fields)
    data = built.seal(5, 0, 0)
    theirs = DefaultRecordBatch(bytes(data))
    assert theirs.validate_crc()
    assert [(r.timestamp, r.key, r.value, list(r.headers)) for r in theirs] == [tuple(fields) for fields in new]
    header = batch.check_produced(memoryview(data))
    assert (header.codec, header.producer_id, header.base_sequence) == (codec, 5, 0)
    assert [found[1:] for found in kernel.records(data)] == [tuple(fields) for fields in new]


@given(new=RECORDS, codec=CODECS)
@both_forms
def test_a_sealed_batch_is_signed_again_in_place(building: ModuleType, new: list[NewRecord], codec: Codec) -> None:
    built = open_batch(building, codec)
    for fields in new:
        built.append(*fields)
    first = built.seal(1, 0, 40)
    size = built.size
    again = built.seal(2, 7, 0)
    assert again is first
    assert built.size == size == len(again)
    header = batch.check_produced(memoryview(again))
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (2, 7, 0)
    assert built.append(NOW_MS, None, b"late") == -1


def test_a_batch_that_could_not_be_packed_is_packed_when_it_is_sealed_again(
    building: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_memory(*_: object) -> bytes:
        raise MemoryError

    built = open_batch(building, Codec.ZSTD)
    built.append(NOW_MS, None, b"value")
    with monkeypatch.context() as patch:
        patch.setattr(building, "compress", without_memory)
        with pytest.raises(MemoryError):
            built.seal(1, 0, 0)
    assert [record.value for record in kernel.records(built.seal(1, 0, 0))] == [b"value"]


@given(RECORDS, RECORDS, CODECS)
@both_forms
def test_a_batch_used_again_is_as_one_that_is_new(
    building: ModuleType, before: list[NewRecord], new: list[NewRecord], codec: Codec
) -> None:
    used, fresh = open_batch(building, codec, first_bytes=100), open_batch(building, codec)
    for record in before:
        used.append(*record)
    used.seal(1, 2, 3)
    used.pinned = True
    used.sent.finish(5, 7)
    used.reuse()
    assert not used.sent.done
    for record in new:
        assert used.append(*record) == fresh.append(*record)
    for name in ("count", "size", "record_bytes", "first_ms", "max_ms", "sealed", "pinned"):
        assert getattr(used, name) == getattr(fresh, name), name
    assert used.seal(4, 5, 6) == fresh.seal(4, 5, 6)
    assert (used.sent.base_offset, used.sent.append_ms) == (-1, -1)


def test_a_batch_takes_records_up_to_its_room_and_one_of_any_size(building: ModuleType) -> None:
    built = open_batch(building, room=1000, first_bytes=100)
    places = [built.append(NOW_MS, None, bytes(90)) for _ in range(12)]
    assert places == [*range(9), -1, -1, -1]
    assert built.size <= 1000
    assert len(built.seal()) == built.size
    assert batch.check(built.seal()).record_count == 9
    alone = open_batch(building, room=1000)
    assert alone.append(NOW_MS, None, bytes(50_000)) == 0
    assert alone.append(NOW_MS, None, b"") == -1
    assert kernel.records(alone.seal())[0].value == bytes(50_000)


def test_a_record_that_is_refused_leaves_the_batch_as_it_was(building: ModuleType) -> None:
    built = open_batch(building)
    with pytest.raises(InvalidRecord, match="at least one record"):
        built.seal()
    for wrong in (MOST, -MOST):
        with pytest.raises(InvalidRecord, match="timestamp"):
            built.append(wrong, None, b"v")
    with pytest.raises(InvalidRecord, match="not valid text"):
        built.append(NOW_MS, None, b"v", [("\ud800", b"")])
    with pytest.raises(TypeError, match="header is bytes"):
        built.append(NOW_MS, None, b"v", [("name", 5)])
    assert built.append(NOW_MS + 5, b"k", b"v", [("name", None)]) == 0
    assert built.append(NOW_MS, b"k", b"v") == 1
    header = batch.check(built.seal())
    assert (header.base_timestamp_ms, header.max_timestamp_ms) == (NOW_MS + 5, NOW_MS + 5)


def test_a_delivery_tells_where_its_record_went(building: ModuleType) -> None:
    sent = sent_batch(building)
    delivery = building.Delivery(sent, 4, NOW_MS)
    assert not delivery.done
    assert not sent.finish(100)
    assert delivery.done
    assert delivery.result() == ("orders", 3, 104, NOW_MS)
    assert delivery.exception() is None
    assert not sent.fail(NotLeader("too late"))
    assert delivery.result(0) == building.Report("orders", 3, 104, NOW_MS)


def test_the_brokers_time_counts_where_it_gives_one_and_an_unknown_offset_stays_unknown(building: ModuleType) -> None:
    stamped, untold = sent_batch(building), sent_batch(building)
    stamped.finish(7, NOW_MS + 50)
    untold.finish(-1)
    assert building.Delivery(stamped, 1, NOW_MS).result().timestamp_ms == NOW_MS + 50
    assert building.Delivery(untold, 1, NOW_MS).result().offset == -1


def test_a_delivery_that_failed_raises_what_happened(building: ModuleType) -> None:
    sent = sent_batch(building)
    delivery = building.Delivery(sent, 0, NOW_MS)
    error = NotLeader("broker 2 does not lead orders-3")
    sent.fail(error)
    assert delivery.exception() is error
    with pytest.raises(NotLeader):
        delivery.result()


def test_waiting_drives_the_sender_and_has_an_end(building: ModuleType) -> None:
    sender = Sender()
    delivery = building.Delivery(sent_batch(building, sender), 0, NOW_MS)
    started = time.monotonic()
    with pytest.raises(RequestTimedOut, match="orders-3"):
        delivery.result(0.5)
    with pytest.raises(RequestTimedOut):
        delivery.exception(0)
    assert sender.deadlines[0] is not None
    assert sender.deadlines[0] >= started + 0.5
    sender.answer = lambda sent: sent.finish(9)
    assert delivery.result().offset == 9
    assert sender.deadlines[-1] is None
    assert delivery.result().offset == 9
    assert len(sender.deadlines) == 3


def test_a_delivery_can_be_awaited(building: ModuleType) -> None:
    delivery = building.Delivery(sent_batch(building, Sender(lambda sent: sent.finish(12))), 2, NOW_MS)

    async def wait() -> Any:
        return await delivery

    assert asyncio.run(wait()).offset == 14


def test_callbacks_run_once_each_in_their_order(building: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    sent = sent_batch(building)
    heard: list[tuple[str, Any]] = []

    def fails(delivery: Any) -> None:
        raise ValueError("the callback's own")

    first, second = building.Delivery(sent, 0, NOW_MS), building.Delivery(sent, 1, NOW_MS)
    first.add_callback(lambda delivery: heard.append(("first", delivery)))
    first.add_callback(fails)
    second.add_callback(lambda delivery: heard.append(("second", delivery)))
    assert sent.finish(0)
    assert heard == []
    with caplog.at_level(logging.ERROR):
        sent.run_callbacks()
    assert heard == [("first", first), ("second", second)]
    assert "orders-3" in caplog.text
    sent.run_callbacks()
    assert len(heard) == 2
    second.add_callback(lambda delivery: heard.append(("late", delivery)))
    assert heard[2:] == [("late", second)]


def test_records_of_a_batch_that_is_split_have_fates_of_their_own(building: ModuleType) -> None:
    whole, parts = sent_batch(building), [sent_batch(building) for _ in range(3)]
    records = [building.Delivery(whole, place, NOW_MS) for place in range(5)]
    heard: list[Any] = []
    for record in records[:4]:
        record.add_callback(heard.append)
    whole.split([(0, parts[0]), (2, parts[1])])
    parts[1].split([(0, parts[2]), (2, sent_batch(building))])
    assert parts[0].finish(70)
    assert [record.done for record in records] == [True, True, False, False, False]
    assert [record.result().offset for record in records[:2]] == [70, 71]
    parts[0].run_callbacks()
    assert parts[2].fail(NotLeader("no"))
    parts[2].run_callbacks()
    assert heard == records[:4]
    assert isinstance(records[3].exception(), NotLeader)
    records[3].add_callback(heard.append)
    records[4].add_callback(heard.append)
    assert heard == [*records[:4], records[3]]


def test_a_record_that_moves_takes_its_callbacks_along(building: ModuleType) -> None:
    before, after = sent_batch(building), building.SentBatch("orders", 1, Sender())
    heard: list[Any] = []
    stays, moves = building.Delivery(before, 0, NOW_MS), building.Delivery(before, 1, NOW_MS)
    stays.add_callback(heard.append)
    moves.add_callback(heard.append)
    moves.move(after, 0)
    assert after.finish(50)
    after.run_callbacks()
    assert heard == [moves]
    assert moves.result()[:3] == ("orders", 1, 50)
    before.fail(NotLeader("gone"))
    before.run_callbacks()
    assert heard == [moves, stays]
    assert "delivered" in repr(moves)
    assert "failed" in repr(stays)


def test_a_batch_ends_where_the_format_does(building: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    if building.compiled:
        pytest.skip("two gigabytes would be needed")
    monkeypatch.setattr(building, "MOST_BATCH_BYTES", 2000)
    with pytest.raises(BatchTooLarge, match="orders"):
        open_batch(building).append(NOW_MS, None, bytes(3000))
