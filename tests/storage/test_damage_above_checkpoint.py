"""Damage above the checkpoint, found by a start on the kernel that ran on since the batches were written: nothing of it
can be a torn write but the last, so what is whole behind it stays."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest

from headrace.errors import CorruptBatch
from headrace.records import kernel
from headrace.records.batch import batches
from headrace.storage.commitlog.frames import APPEND, FRAME_BYTES
from headrace.storage.folder import PARTITIONED, SHARED
from headrace.storage.log import Log, Tail, TopicPartition
from headrace.virtual.disk import VirtualDisk
from proving import proves
from storage.harness import TOPIC, Harness, append, batch, content, sim_harness

LAYOUTS = pytest.mark.parametrize("layout", [PARTITIONED, SHARED])
BATCHES = 8
VALUES = [b"value %d. " % n * 30 for n in range(BATCHES)]
OTHER = TopicPartition("payments", 0)


def filled(layout: str, a_write: int = 1, *, segment_bytes: int = 1 << 20) -> Harness:
    """Synced, but in no checkpoint; each turn writes so many batches."""
    sim = sim_harness(layout)
    sim.file_bytes = segment_bytes
    log = sim.log(durability="disk", segment_bytes=segment_bytes)
    for n, value in enumerate(VALUES):
        append(log, batch(value))
        if (n + 1) % a_write == 0:
            assert not sim.write()
            sim.settle()
    return sim


def files(sim: Harness) -> list[str]:
    assert sim.store is not None
    folder = f"{sim.data}/@commitlog" if sim.layout == SHARED else f"{sim.data}/orders/orders-0"
    return [f"{folder}/{name}" for name in sorted(sim.disk.list(folder)) if name.endswith(".log")]


def flip(sim: Harness, what: bytes, back: int = 0) -> None:
    """A bit of this value, or of what stands so many bytes before it."""
    assert isinstance(sim.disk, VirtualDisk)
    for path in files(sim):
        file = sim.disk.open(path)
        at = file.pread(file.size(), 0).rfind(what)
        if at >= 0:
            sim.disk.flip(path, at - back)
            return
    raise AssertionError(what)


def started(sim: Harness, *, same_boot: bool = True) -> Log:
    assert sim.store is not None
    sim.store.abandon()
    sim.store = sim.new_store()
    sim.store.open(sim.expected, same_boot=same_boot)
    sim.commit()
    return sim.log()


def read(log: Log) -> Iterator[bytes | None]:
    """What can be read, offset by offset."""
    for offset in range(log.start_offset, log.end_offset):
        try:
            piece = content(log.read(offset, 1, log.written_offset, warm=True))
        except CorruptBatch:
            continue
        for _, view in batches(memoryview(piece)):
            yield from (record.value for record in kernel.records(view))


@proves("F7", "J1")
@LAYOUTS
@pytest.mark.parametrize("a_write", [1, 4, 8])
@pytest.mark.parametrize("segment_bytes", [1024, 1 << 20])
@pytest.mark.parametrize("nth", range(BATCHES - 1))
def test_a_batch_that_is_damaged_costs_none_behind_it(layout: str, a_write: int, segment_bytes: int, nth: int) -> None:
    sim = filled(layout, a_write, segment_bytes=segment_bytes)
    flip(sim, VALUES[nth])
    others = [value for value in VALUES if value != VALUES[nth]]
    log = started(sim)
    assert (log.end_offset, log.tail) == (BATCHES, Tail.WHOLE)
    assert list(read(log)) == others
    assert log.first_damaged_offset() == nth
    assert append(log, batch(b"next")) == BATCHES
    assert not sim.write()
    for same_boot in (True, False):
        assert list(read(started(sim, same_boot=same_boot))) == [*others, b"next"]
    assert list(read(sim.reopen())) == [*others, b"next"]


@proves("F7", "J1")
@pytest.mark.parametrize(
    ("damaged", "moved", "lost"),
    [
        ([2], 3, [2, 3]), ([2, 4], 3, [2, 3, 4]), ([0], 1, [0, 1]), ([5], 6, [5, 6]),
        ([2], 4, [2, 4]), ([2, 5], 4, [2, 4, 5]),  # what is whole between the two is right
    ],
)  # fmt: skip
def test_a_base_offset_behind_damage_is_believed_only_as_far_as_what_follows_bears_it_out(
    damaged: list[int], moved: int, lost: list[int]
) -> None:
    """It is outside the CRC. Taken for true, it would leave nothing that could follow it."""
    sim = filled(PARTITIONED)
    for nth in damaged:
        flip(sim, VALUES[nth])
    flip(sim, VALUES[moved], bytes(batch(VALUES[moved])).find(VALUES[moved]) - 5)
    log = started(sim)
    assert (log.end_offset, log.tail) == (BATCHES, Tail.WHOLE)
    assert list(read(log)) == [value for nth, value in enumerate(VALUES) if nth not in lost]


@LAYOUTS
def test_after_a_loss_of_power_it_may_be_a_torn_write(layout: str) -> None:
    sim = filled(layout)
    flip(sim, VALUES[3])
    log = started(sim, same_boot=False)
    assert (log.end_offset, log.tail) == (3, Tail.HOLED)
    assert list(read(log)) == VALUES[:3]


@proves("F5", "F7")
@LAYOUTS
@pytest.mark.parametrize("nth", [None, 0, 3, BATCHES - 1])
def test_the_write_that_died_with_its_process_is_cut(layout: str, nth: int | None) -> None:
    sim = filled(layout)
    append(sim.log(), batch(b"nobody was told of it"))
    before = sim.disk.size(files(sim)[-1])
    assert not sim.write()
    file = sim.disk.open(files(sim)[-1], writable=True)
    file.truncate(file.size() - 5)
    if nth is not None:
        flip(sim, VALUES[nth])
    log = started(sim)
    last = nth == BATCHES - 1 and layout == PARTITIONED  # its size is not known, as a frame's is
    assert log.tail is (Tail.TORN if last else Tail.CUT_SHORT)
    assert log.end_offset == BATCHES - last
    assert list(read(log)) == [value for n, value in enumerate(VALUES) if n != nth]
    assert layout == SHARED or last or sim.disk.size(files(sim)[-1]) == before


@proves("F5")
@LAYOUTS
@pytest.mark.parametrize("base", [BATCHES, BATCHES + 2])
def test_a_batch_in_the_value_of_a_torn_one_is_not_taken_for_what_follows(layout: str, base: int) -> None:
    sim = filled(layout)
    inner = bytearray(batch(b"inner"))
    inner[:8] = base.to_bytes(8, "big")
    append(sim.log(), batch(bytes(inner), b"the rest", b"of it"))
    assert not sim.write()
    file = sim.disk.open(files(sim)[-1], writable=True)
    file.truncate(file.size() - 5)
    log = started(sim)
    assert (log.end_offset, log.tail) == (BATCHES, Tail.CUT_SHORT)
    assert list(read(log)) == VALUES


def with_another(frames_behind: int) -> Harness:
    """A commit log with two partitions, the other one's frames behind all of the first's."""
    sim = filled(SHARED)
    other = sim.log(OTHER, durability="disk")
    for n in range(frames_behind):
        append(other, batch(b"other %d" % n))
        assert not sim.write()
    sim.settle()
    return sim


def header_of(sim: Harness, value: bytes) -> int:
    """How many bytes before the value its frame begins."""
    file = sim.disk.open(files(sim)[-1])
    data = file.pread(file.size(), 0)
    return data.rfind(value) - data.rfind(APPEND, 0, data.rfind(value))


@proves("F7", "J1")
def test_a_broken_frame_that_others_of_its_partition_follow_is_missed() -> None:
    sim = with_another(2)
    flip(sim, VALUES[3], header_of(sim, VALUES[3]) - FRAME_BYTES // 2)
    log = started(sim)
    assert (log.end_offset, log.tail) == (BATCHES, Tail.WHOLE)
    assert list(read(log)) == [*VALUES[:3], *VALUES[4:]]
    assert log.first_damaged_offset() == 3
    log.truncate(3)
    assert log.first_damaged_offset() is None
    # Nothing of the other came before the broken bytes, and all behind them.
    assert sim.log(OTHER).tail is Tail.WHOLE
    assert list(read(sim.log(OTHER))) == [b"other 0", b"other 1"]


@proves("F7", "G14")
@pytest.mark.parametrize("dies", [False, True])
def test_the_end_of_a_partition_is_in_doubt_where_its_last_frame_may_have_been_broken(dies: bool) -> None:
    """The frames of others behind it stay, and nothing tells whose it was."""
    sim = with_another(2)
    flip(sim, VALUES[-1], header_of(sim, VALUES[-1]) - FRAME_BYTES // 2)
    if dies:
        assert isinstance(sim.disk, VirtualDisk)
        sim.disk.fail_write(f"{sim.data}/@checkpoint.tmp", errno.EIO)
        with pytest.raises(OSError, match="Input/output error"):
            started(sim)
    log = started(sim)
    assert (log.end_offset, log.tail) == (BATCHES - 1, Tail.HOLED)
    assert list(read(log)) == VALUES[:-1]
    if not dies:
        assert sim.log(OTHER).tail is Tail.WHOLE
    assert list(read(sim.log(OTHER))) == [b"other 0", b"other 1"]
    assert started(sim).tail is Tail.WHOLE, "it was judged"
    assert sim.log(TOPIC).end_offset == BATCHES - 1
