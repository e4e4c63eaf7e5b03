"""Reading old data from the shared commit log: runs that lie apart are read ahead together."""

from __future__ import annotations

from headrace.ports.disk import FileSlice
from headrace.records.batch import batches
from headrace.storage.log import ReadResult, TopicPartition
from headrace.virtual.disk import VirtualDisk
from storage.harness import TOPIC, Harness, append, batch

OTHER = TopicPartition("payments", 0)
RUNS = 6


def cold_runs(shared: Harness) -> int:
    """Runs of one partition with another's between them, none of them in memory; answers the bytes of one."""
    run = batch(b"one", b"two")
    for _ in range(RUNS):
        for where in (TOPIC, OTHER):
            append(shared.log(where), batch(b"one", b"two"))
            shared.write()
    shared.reopen()
    assert isinstance(shared.disk, VirtualDisk)
    for name in shared.disk.list(f"{shared.data}/@commitlog"):
        shared.disk.evict(f"{shared.data}/@commitlog/{name}")
    return len(run)


def read(shared: Harness, max_bytes: int, *, warm: bool = False) -> ReadResult:
    log = shared.log(TOPIC)
    return log.read(0, max_bytes, log.written_offset, warm=warm)


def first_offsets(slices: tuple[FileSlice, ...]) -> list[int]:
    return [
        header.base_offset
        for piece in slices
        for header, _ in batches(memoryview(piece.file.pread(piece.count, piece.position)))
    ]


def test_a_cold_read_names_all_that_it_wants_and_what_a_reader_will_ask_for_next(shared: Harness) -> None:
    size = cold_runs(shared)
    found = read(shared, 2 * size)
    assert found.count == 0
    assert first_offsets(found.wanted) == [0, 2, 4]
    assert first_offsets(found.beyond) == [6, 8]


def test_what_was_read_ahead_is_served_without_looking_again(shared: Harness) -> None:
    size = cold_runs(shared)
    found = read(shared, 3 * size, warm=True)
    assert first_offsets(found.slices) == [0, 2, 4]
    assert (found.wanted, found.beyond) == ((), ())


def test_a_reader_of_what_was_served_before_gets_nothing_read_ahead(shared: Harness) -> None:
    size = cold_runs(shared)
    read(shared, 3 * size, warm=True)
    found = read(shared, 3 * size)
    assert first_offsets(found.slices) == [0, 2, 4]
    assert found.beyond == ()
