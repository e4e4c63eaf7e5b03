"""The checkpoint: what is no checkpoint is damaged, and one that cannot be written is tried again."""

from __future__ import annotations

import errno
import json
from typing import Any

import pytest
from crc32c import crc32c

from headrace.errors import HeadraceError, StorageFailed
from headrace.ports.disk import read_whole
from headrace.storage import checkpoint
from headrace.storage.checkpoint import LogPoint
from headrace.storage.log import TopicPartition
from headrace.virtual.disk import VirtualDisk
from storage.harness import TOPIC, TOPIC_ID, Harness, append, batch, values

PATH = "/data/@checkpoint"
POINT: list[Any] = ["orders", 0, TOPIC_ID.hex(), True, 5, 0, 5, 0, 400, 1_750_000_000_000, [[3, 1_750_000_000_000]], 2]

NO_POINTS: list[Any] = [7, None, "orders", {}, POINT[:-1], [*POINT, 1], []]
OF_NO_FIELD: list[Any] = [{}, None, 1.5, [[1]]]


def signed(body: bytes) -> bytes:
    return b"%08x\n%b\n" % (crc32c(body), body)


def with_logs(*logs: object) -> bytes:
    return signed(json.dumps({"version": 3, "logs": logs}).encode())


def changed(at: int, value: object) -> bytes:
    return with_logs([*POINT[:at], value, *POINT[at + 1 :]])


def test_what_was_encoded_is_decoded() -> None:
    assert checkpoint.decode(with_logs(POINT)) == {TOPIC: LogPoint._make([*POINT[:-2], [(3, 1_750_000_000_000)], 2])}


def test_one_that_knows_nothing_of_truncations_is_read() -> None:
    old = signed(json.dumps({"version": 1, "logs": [POINT[:-1]]}).encode())
    assert checkpoint.decode(old) == {TOPIC: LogPoint._make([*POINT[:-2], [(3, 1_750_000_000_000)], 0])}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"zz\n{}\n",
        with_logs(POINT)[:-5],
        *(signed(body) for body in (b"", b"{", b"{}", b"[]", b"7", b"null", b"\xff\xfe", b"[" * 100_000)),
        *(signed(json.dumps(body).encode()) for body in ({"version": 2, "logs": []}, {"version": 3}, {"version": [3]})),
        *(with_logs(logs) for logs in NO_POINTS),
        *(changed(at, value) for at in range(12) for value in OF_NO_FIELD),
        *(changed(at, "x") for at in (1, 3, 4, 9, 10, 11)),
        *(changed(at, 1) for at in (0, 2, 3, 10)),
    ],
)
def test_anything_else_is_damaged(sim: Harness, content: bytes) -> None:
    append(sim.log(), batch(b"kept"))
    sim.write()
    assert sim.store is not None
    sim.store.close()
    file = sim.disk.open(PATH, writable=True)
    file.truncate(0)
    file.pwritev([content], 0)
    assert checkpoint.read(sim.disk, "/data") is None
    sim.open()
    assert values(sim.log()) == [b"kept"]


@pytest.mark.parametrize("failing", ["write", "sync", "name"])
def test_a_checkpoint_that_fails_does_not_stop_the_next(sim: Harness, failing: str) -> None:
    assert isinstance(sim.disk, VirtualDisk)
    log = sim.log()
    sim.settle()
    if failing == "write":
        sim.disk.fail_write(PATH + ".tmp", errno.EIO)
    elif failing == "sync":
        sim.disk.fail_sync(PATH + ".tmp", errno.EIO)
    else:
        sim.disk.fail_sync("/data", errno.EIO)
    append(log, batch(b"a", b"b"))
    append(log, batch(b"c"))
    sim.write()
    sim.disk.hold_syncs()
    log.delete_before(1)  # wants a checkpoint, which fails
    sim.clock.run_soon()
    log.delete_before(2)  # wants another
    sim.clock.run_soon()
    sim.disk.release_syncs()
    sim.settle()
    sim.advance(10)
    points = checkpoint.decode(read_whole(sim.disk, PATH))
    assert points is not None
    assert points[TOPIC].start_offset == 2
    assert sim.store is not None
    sim.store.create(TopicPartition("late", 0), TOPIC_ID, log.settings)
    sim.advance(61)
    points = checkpoint.decode(read_whole(sim.disk, PATH))
    assert points is not None
    assert len(points) == 2


@pytest.mark.parametrize("seed", range(5))
def test_a_deletion_of_records_is_told_when_it_outlives_a_loss_of_power(sim: Harness, seed: int) -> None:
    assert isinstance(sim.disk, VirtualDisk)
    log = sim.log(durability="disk")
    for i in range(6):
        append(log, batch(b"%d" % i))
    sim.write()
    sim.settle()
    told: list[HeadraceError | None] = []
    sim.disk.hold_syncs()
    log.delete_before(3, told.append)
    log.delete_before(3, told.append)
    sim.clock.run_soon()
    assert (log.start_offset, told) == (3, [])
    sim.disk.release_syncs()
    sim.settle()
    assert told == [None, None]
    log = sim.kill(seed)
    assert (log.start_offset, values(log)) == (3, [b"3", b"4", b"5"])


def test_a_deletion_of_records_that_is_not_safe_says_so(sim: Harness) -> None:
    assert isinstance(sim.disk, VirtualDisk)
    log = sim.log()
    append(log, batch())
    sim.write()
    sim.disk.fail_write(PATH + ".tmp", errno.EIO)
    told: list[HeadraceError | None] = []
    log.delete_before(1, told.append)
    sim.settle()
    assert [type(error) for error in told] == [StorageFailed]


def test_a_start_counts_as_safe_when_a_checkpoint_holds_it(sim: Harness) -> None:
    assert isinstance(sim.disk, VirtualDisk)
    log = sim.log()
    for _ in range(9):
        append(log, batch())
    sim.write()
    sim.settle()
    sim.disk.fail_write(PATH + ".tmp", errno.EIO)
    log.delete_before(2)
    sim.settle()
    assert (log.start_offset, log.safe_start_offset) == (2, 0)
    sim.advance(6)
    assert log.safe_start_offset == 0, "nobody has asked again"
    log.delete_before(3)
    sim.settle()
    assert (log.start_offset, log.safe_start_offset) == (3, 3)
    log = sim.kill(1)
    assert (log.start_offset, log.safe_start_offset) == (3, 3)


def test_a_checkpoint_from_before_a_new_beginning_makes_no_start_safe(sim: Harness) -> None:
    assert isinstance(sim.disk, VirtualDisk)
    log = sim.log()
    for _ in range(9):
        append(log, batch())
    sim.write()
    sim.settle()
    sim.disk.hold_syncs()
    log.delete_before(7)
    sim.clock.run_soon()
    log.restart_at(5)
    sim.disk.release_syncs()
    sim.settle()
    assert (log.start_offset, log.safe_start_offset) == (5, 0)
    log.restart_at(0)
    assert (log.start_offset, log.safe_start_offset) == (0, 0)


def test_a_checksum_in_other_letters_is_not_whole() -> None:
    """A flipped bit makes a capital of a letter, and no other number."""
    sealed = next(each for each in map(checkpoint.seal, ({"n": n} for n in range(99))) if each[:8] != each[:8].upper())
    assert checkpoint.unseal(sealed)
    with pytest.raises(ValueError, match="CRC"):
        checkpoint.unseal(sealed[:8].upper() + sealed[8:])
