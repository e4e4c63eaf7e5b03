"""What a killed writer leaves at the end of a file is told from bytes that have changed since, in both layouts."""

from __future__ import annotations

import pytest

from headrace.records.codecs import Codec
from headrace.storage.folder import PARTITIONED, SHARED
from headrace.storage.log import Tail
from headrace.virtual.disk import VirtualDisk
from proving import proves
from storage.harness import Harness, append, batch, sim_harness, values

WHOLE = 3
LAYOUTS = pytest.mark.parametrize("layout", [PARTITIONED, SHARED])


def written(
    layout: str, codec: Codec = Codec.NONE, last: tuple[bytes, ...] = (b"value 3",)
) -> tuple[Harness, str, list[int]]:
    """A killed process's folder, the file with its records, and where in it each write ended."""
    harness = sim_harness(layout)
    log, sizes = harness.log(), []
    folder = f"{harness.data}/@commitlog" if layout == SHARED else f"{harness.data}/orders/orders-0"
    path = f"{folder}/{0:020d}.log"
    for nth in range(WHOLE + 1):
        append(log, batch(*(last if nth == WHOLE else (b"value %d" % nth,)), codec=codec))
        assert not harness.write()
        sizes.append(harness.disk.size(path))
    assert harness.store is not None
    harness.store.abandon()
    return harness, path, sizes


def cut(harness: Harness, path: str, size: int) -> None:
    file = harness.disk.open(path, writable=True)
    file.truncate(size)
    file.close()


def flip(harness: Harness, path: str, position: int, bit: int) -> None:
    assert isinstance(harness.disk, VirtualDisk)
    harness.disk.flip(path, position, 1 << bit)


def tail(harness: Harness) -> Tail:
    harness.open()
    return harness.log().tail


@proves("G14", "F7")
@pytest.mark.thorough
@LAYOUTS
@pytest.mark.parametrize("codec", list(Codec))
def test_a_file_that_ends_at_any_byte_of_its_last_write_is_cut_short(layout: str, codec: Codec) -> None:
    last = (b"value 3", b"", b"value 5" * 20)
    begin, end = written(layout, codec, last)[2][-2:]
    for size in range(begin + 1, end):
        harness, path, _ = written(layout, codec, last)
        cut(harness, path, size)
        assert tail(harness) is Tail.CUT_SHORT, f"{size - begin} bytes of {end - begin}"
        assert values(harness.log()) == [b"value %d" % nth for nth in range(WHOLE)]


@proves("G14", "J1")
@LAYOUTS
@pytest.mark.parametrize("bit", [0, 3, 7])
def test_a_byte_of_the_last_write_that_has_changed_is_no_cut(layout: str, bit: int) -> None:
    begin, end = written(layout)[2][-2:]
    for position in range(begin, end):
        harness, path, _ = written(layout)
        flip(harness, path, position, bit)
        assert tail(harness) is not Tail.CUT_SHORT, f"byte {position - begin}"


@proves("G14", "J1")
@LAYOUTS
def test_a_wrong_length_before_a_write_that_was_cut_is_no_cut(layout: str) -> None:
    length_at = 4 if layout == SHARED else 8
    for bit in range(32):
        harness, path, (*_, begin, cut_from, _) = written(layout)
        cut(harness, path, cut_from + 30)
        flip(harness, path, begin + length_at + bit // 8, bit % 8)
        assert tail(harness) in (Tail.TORN, Tail.HOLED), f"bit {bit}"


@proves("G14", "J1")
@LAYOUTS
@pytest.mark.parametrize("codec", list(Codec))
def test_a_wrong_length_among_other_wrong_bytes_is_no_cut(layout: str, codec: Codec) -> None:
    """No CRC is right any more, neither of the batch with the wrong length nor of the one behind it."""
    length_at = 4 if layout == SHARED else 8
    for bit in range(32):
        harness, path, (*_, begin, middle, end) = written(layout, codec)
        flip(harness, path, begin + length_at + bit // 8, bit % 8)
        flip(harness, path, middle - 2, 0)
        flip(harness, path, end - 2, 0)
        assert tail(harness) in (Tail.TORN, Tail.HOLED), f"bit {bit}"


@proves("G14", "J1")
@LAYOUTS
def test_a_wrong_length_and_another_wrong_byte_of_the_last_write_are_no_cut(layout: str) -> None:
    length_at = 4 if layout == SHARED else 8
    begin, end = written(layout)[2][-2:]
    for position in range(end - len(b"value 3"), end):
        for bit in range(0, 32, 5):
            harness, path, _ = written(layout)
            flip(harness, path, begin + length_at + bit // 8, bit % 8)
            flip(harness, path, position, 3)
            assert tail(harness) in (Tail.TORN, Tail.HOLED), f"bit {bit}, byte {position - end}"


@proves("G14", "F7", "J1")
def test_a_cut_is_told_from_a_wrong_length_in_a_batch_of_many_windows() -> None:
    last = tuple(b"%d" % nth * size for nth, size in enumerate([65_000, 500, 40, 200_000, 70_000, 3]))
    begin, end = written(PARTITIONED, last=last)[2][-2:]
    for size in (begin + 100, begin + 65_600, end - 70_000, end - 1):
        harness, path, _ = written(PARTITIONED, last=last)
        cut(harness, path, size)
        assert tail(harness) is Tail.CUT_SHORT, f"{size - begin} bytes of {end - begin}"
    harness, path, _ = written(PARTITIONED, last=last)
    flip(harness, path, begin + 8, 0)
    flip(harness, path, end - 100, 0)
    assert tail(harness) is Tail.TORN
