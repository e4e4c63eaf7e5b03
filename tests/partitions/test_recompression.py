"""Batches that are stored in their topic's codec: order, refusals and bounds while some of them are being worked on."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import (
    BatchTooLarge,
    CorruptBatch,
    NotLeader,
    OutOfOrderSequence,
    RequestTimedOut,
    StorageFailed,
)
from headrace.partitions import recompression
from headrace.partitions.partition import Partition
from headrace.records import kernel
from headrace.records.batch import batches, sign
from headrace.records.codecs import Codec
from headrace.settings.values import log_settings
from partitions.held_threads import Threads
from partitions.led import BROKER, Led, Outcome
from proving import proves

NAMES = {"uncompressed": Codec.NONE, "gzip": Codec.GZIP, "snappy": Codec.SNAPPY, "lz4": Codec.LZ4, "zstd": Codec.ZSTD}


@pytest.fixture
def led() -> Led:
    return Led()


@pytest.fixture
def threads(led: Led, monkeypatch: pytest.MonkeyPatch) -> Threads:
    monkeypatch.setattr(recompression, "AT_A_TIME", 4)
    return Threads(led)


def batch(value: bytes, codec: int = Codec.NONE, sequence: int = -1, count: int = 1) -> bytes:
    producer = {"producer_id": 7, "producer_epoch": 0, "base_sequence": sequence} if sequence >= 0 else {}
    return bytes(kernel.build([(1_750_000_000_000, b"k", value, [])] * count, codec, **producer))


def stored(partition: Partition) -> list[tuple[int, int, bytes | None]]:
    """Codec, offset and value of the first record of each batch."""
    slices = partition.read(0, 1 << 24).slices
    data = b"".join(part.file.pread(part.count, part.position) for part in slices)
    return [
        (header.codec, header.base_offset, kernel.records(view)[0].value) for header, view in batches(memoryview(data))
    ]


@pytest.mark.parametrize("wanted", NAMES)
@pytest.mark.parametrize("sent", list(Codec))
def test_a_batch_is_stored_in_the_codec_of_its_topic(threads: Threads, wanted: str, sent: Codec) -> None:
    partition = threads.led.lead(compression_type=wanted)
    produced = threads.produce(partition, batch(b"value" * 100, sent))
    assert bool(threads.tasks) == (sent != NAMES[wanted])
    threads.finish_all()
    assert produced.offset == 0
    assert stored(partition) == [(NAMES[wanted], 0, b"value" * 100)]


@proves("J2")
def test_a_batch_in_the_right_codec_is_not_touched(threads: Threads) -> None:
    partition = threads.led.lead(compression_type="zstd", compression_zstd_level=19)
    sent = batch(b"value" * 100, Codec.ZSTD)
    assert threads.produce(partition, sent).offset == 0
    (part,) = partition.read(0, 1 << 20).slices
    assert part.file.pread(part.count, part.position)[16:] == sent[16:]


def test_levels_are_heeded(threads: Threads) -> None:
    text = b"".join(b"%d,%d;" % (n * n % 1009, n) for n in range(20_000))
    for codec, low, high in (("gzip", 1, 9), ("lz4", 9, 12), ("zstd", -5, 19)):
        sizes = []
        for level in (low, high):
            given: dict[str, Any] = {"compression_type": codec, f"compression_{codec}_level": level}
            partition = threads.led.lead(f"{codec}{level}", **given)
            threads.produce(partition, batch(text))
            threads.finish_all()
            assert stored(partition) == [(NAMES[codec], 0, text)]
            sizes.append(partition.log.size_bytes)
        assert sizes[0] > sizes[1], codec


@proves("F3")
def test_batches_are_appended_in_the_order_in_which_they_came(threads: Threads) -> None:
    partition = threads.led.lead(compression_type="lz4")
    sent = [
        threads.produce(partition, batch(b"%d" % n, codec))
        for n, codec in enumerate([Codec.GZIP, Codec.LZ4, Codec.ZSTD, Codec.NONE, Codec.LZ4])
    ]
    threads.finish(2)
    threads.finish(1)
    assert partition.log.end_offset == 0
    threads.finish()
    assert [one.offset for one in sent] == [0, 1, 2, 3, 4]
    assert stored(partition) == [(Codec.LZ4, n, b"%d" % n) for n in range(5)]
    assert threads.recompression.queued_bytes == 0
    assert not partition.recompressing


def test_other_partitions_do_not_wait(threads: Threads) -> None:
    slow, quick = threads.led.lead(compression_type="gzip"), threads.led.lead(index=1, compression_type="gzip")
    threads.produce(slow, batch(b"a"))
    assert threads.produce(quick, batch(b"b", Codec.GZIP)).offset == 0


@proves("J10")
def test_an_idempotent_producer_may_have_several_in_flight(threads: Threads) -> None:
    partition = threads.led.lead(compression_type="snappy")
    sent = [threads.produce(partition, batch(b"%d" % n, Codec.NONE, n)) for n in range(3)]
    again = threads.produce(partition, batch(b"1", Codec.NONE, 1))
    for nth in (3, 2, 1, 0):
        threads.finish(nth)
    assert [one.offset for one in (*sent, again)] == [0, 1, 2, 1]
    assert len(stored(partition)) == 3


def test_a_setting_that_changes_lets_nothing_overtake(threads: Threads) -> None:
    partition = threads.led.lead(compression_type="gzip")
    first = threads.produce(partition, batch(b"first"))
    partition.log.settings = log_settings({}, {})
    second = threads.produce(partition, batch(b"second"))
    assert second.outcome is None
    threads.finish_all()
    assert (first.offset, second.offset) == (0, 1)
    assert threads.produce(partition, batch(b"third")).offset == 2


# Refusals


def damaged(sequence: int) -> bytes:
    """Signed, but what it says is compressed is not."""
    wrong = bytearray(batch(b"x", Codec.NONE, sequence))
    wrong[22] |= Codec.GZIP
    sign(wrong)
    return bytes(wrong)


def test_what_does_not_unpack_is_refused_and_not_overtaken(threads: Threads) -> None:
    partition = threads.led.lead(compression_type="zstd")
    first = threads.produce(partition, damaged(0))
    second = threads.produce(partition, batch(b"1", Codec.NONE, 1))
    threads.finish(1)
    threads.finish()
    assert isinstance(first.outcome, CorruptBatch)
    assert isinstance(second.outcome, OutOfOrderSequence)
    for n in range(2):
        threads.produce(partition, batch(b"%d" % n, Codec.NONE, n))
    threads.finish_all()
    assert [value for _, _, value in stored(partition)] == [b"0", b"1"]


def test_an_unforeseen_failure_refuses_its_batch_alone(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    def recode(view: memoryview, *_: object) -> bytearray:
        raise MemoryError(f"no room for {len(view)} bytes")

    partition = threads.led.lead(compression_type="zstd")
    monkeypatch.setattr(recompression, "recode", recode)
    first = threads.produce(partition, batch(b"0"))
    second = threads.produce(partition, batch(b"1", Codec.ZSTD))
    threads.finish_all()
    assert isinstance(first.outcome, StorageFailed)
    assert second.offset == 0


def test_what_is_too_large_in_its_codec_is_refused(threads: Threads) -> None:
    partition = threads.led.lead(compression_type="uncompressed", max_message_bytes=1000)
    produced = threads.produce(partition, batch(bytes(2000), Codec.ZSTD))
    threads.finish_all()
    assert isinstance(produced.outcome, BatchTooLarge)
    assert partition.log.end_offset == 0


def test_a_role_that_ends_meanwhile_refuses_what_waits_and_it_is_not_overtaken(threads: Threads) -> None:
    led = threads.led
    old = led.lead(compression_type="zstd")
    first = threads.produce(old, batch(b"0", Codec.NONE, 0))
    new = led.partitions.lead(old.log, 1, {BROKER: ""})
    with pytest.raises(OutOfOrderSequence):
        threads.produce(new, batch(b"1", Codec.ZSTD, 1))
    threads.finish_all()
    assert isinstance(first.outcome, NotLeader)
    assert new.log.end_offset == 0
    for n in range(2):
        threads.produce(new, batch(b"%d" % n, Codec.NONE, n))
    threads.finish_all()
    assert [value for _, _, value in stored(new)] == [b"0", b"1"]


# Bounds


@proves("L7")
def test_the_bytes_that_wait_are_bounded(led: Led) -> None:
    size = len(batch(b"x" * 100, Codec.NONE, 0))
    threads = Threads(led, queued_bytes=2 * size, queued_most_bytes=3 * size)
    partition = led.lead(compression_type="gzip")
    told: list[int] = []
    sent = []
    for n in range(3):
        assert not threads.recompression.is_full
        sent.append(threads.produce(partition, batch(b"x" * 100, Codec.NONE, n)))
    assert threads.recompression.is_full
    threads.recompression.when_room(lambda: told.append(threads.recompression.queued_bytes))
    with pytest.raises(RequestTimedOut, match="wait to be recompressed"):
        threads.produce(partition, batch(b"x" * 100, Codec.NONE, 3))
    threads.finish()
    assert not told
    threads.finish_all()
    assert told == [size]
    assert [one.offset for one in sent] == [0, 1, 2]
    threads.produce(partition, batch(b"x" * 100, Codec.NONE, 3))
    threads.finish_all()
    assert partition.log.end_offset == 4


def test_a_first_batch_for_which_there_was_no_room_is_not_overtaken(led: Led) -> None:
    size = len(batch(b"x"))
    threads = Threads(led, queued_bytes=size, queued_most_bytes=size)
    partition = led.lead(compression_type="gzip")
    threads.produce(partition, batch(b"x"))
    with pytest.raises(RequestTimedOut):
        threads.produce(partition, batch(b"0", Codec.NONE, 0))
    threads.finish_all()
    with pytest.raises(OutOfOrderSequence):
        threads.produce(partition, batch(b"1", Codec.GZIP, 1))


def test_what_will_be_refused_anyway_is_not_recompressed(led: Led) -> None:
    view = memoryview(batch(b"value"))
    partition = led.lead(compression_type="gzip", max_message_bytes=len(view))
    assert partition.stored_otherwise(view)
    assert not partition.stored_otherwise(memoryview(batch(b"larger")))
    assert not partition.stored_otherwise(memoryview(batch(b"value", Codec.GZIP)))
    assert not partition.stored_otherwise(view[:10]), "no batch"
    assert not led.lead(index=1).stored_otherwise(view), "as it comes"
    assert not led.partitions.follow(partition.log, 1, 2).stored_otherwise(view), "not led here"


def test_only_a_few_are_worked_on_at_a_time(led: Led, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompression, "AT_A_TIME", 2)
    threads = Threads(led)
    partition = led.lead(compression_type="gzip")
    sent = [threads.produce(partition, batch(b"%d" % n)) for n in range(5)]
    assert len(threads.tasks) == 2
    threads.finish_all()
    assert [one.offset for one in sent] == [0, 1, 2, 3, 4]


# What Headrace itself appends.


@pytest.mark.parametrize("acks", [1, -1])
def test_a_submission_is_stored_in_the_codec_of_its_topic_if_it_is_a_users(threads: Threads, acks: int) -> None:
    led = threads.led
    partition = led.lead(compression_type="lz4")

    def sent(value: bytes, codec: Codec, *, recompress: bool) -> Outcome:
        outcome = Outcome()
        made = bytearray(batch(value, codec))
        led.partitions.submit(partition, made, acks, 1000, outcome, recompress=recompress)
        led.partitions.end_turn()
        return outcome

    ours = sent(b"ours", Codec.GZIP, recompress=False)
    same = sent(b"same", Codec.LZ4, recompress=True)
    assert (ours.offset, same.offset, threads.tasks) == (0, 1, [])
    other = sent(b"other", Codec.GZIP, recompress=True)
    assert other.waiting
    threads.finish_all()
    assert other.offset == 2
    assert stored(partition) == [(Codec.GZIP, 0, b"ours"), (Codec.LZ4, 1, b"same"), (Codec.LZ4, 2, b"other")]
    led.partitions.recompression = None
    assert sent(b"as it comes", Codec.GZIP, recompress=True).offset == 3


def test_a_submission_that_cannot_be_recompressed_hears_why(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    led = threads.led
    partition, outcome = led.lead(compression_type="lz4"), Outcome()

    def fail(*_: object) -> bytearray:
        raise CorruptBatch("it does not unpack")

    monkeypatch.setattr(recompression, "recode", fail)
    led.partitions.submit(partition, bytearray(batch(b"x")), 1, 1000, outcome, recompress=True)
    threads.finish_all()
    assert isinstance(outcome.error, CorruptBatch)
