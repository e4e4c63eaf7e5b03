"""A sector that cannot be read is damage like a wrong byte: told, not served, and copied again from another replica."""

from __future__ import annotations

import errno
import os

import pytest

from headrace.errors import HeadraceError, StorageFailed
from headrace.ports.disk import read_whole
from headrace.virtual.disk import VirtualDisk
from proving import proves
from replication.scene import Broker, Scene

FOLDER = "/data/orders/orders-0"
RECORDS = 40
WHERE = 20
PAYLOAD, HEADER = "payload", "header"


def bad_sector(disk: VirtualDisk, layout: str, what: str = PAYLOAD, size: int = 1000, nth: int = WHERE) -> str:
    """In the record with offset 20, or another, or in the header of its batch; answers the path."""
    folder = "/data/@commitlog" if layout == "shared" else FOLDER
    for path in [f"{folder}/{name}" for name in disk.list(folder) if name.endswith(".log")]:
        position = read_whole(disk, path).find(value(nth, size))
        if position >= 0:
            disk.go_bad(path, position + size // 2 if what == PAYLOAD else position - 60)
            return path
    raise AssertionError("the record is not there")


def value(nth: int, size: int = 1000) -> bytes:
    return (b"%d." % nth * size)[:size]


def filled(layout: str, size: int = 1000, brokers: tuple[int, ...] = (1, 2, 3)) -> Scene:
    scene = Scene(layout=layout, brokers=brokers, topic={"segment_bytes": 1 << 20, "durability": "disk"})
    scene.elect(1, brokers)
    for nth in range(RECORDS):
        scene.until_answered(scene.produce(value(nth, size)))
    scene.settle()
    return scene


def readable(broker: Broker) -> tuple[set[int], list[HeadraceError]]:
    """Offsets that a consumer gets, each by a fetch of its own; and what else it hears."""
    partition = broker.partition()
    found, errors = set(), list[HeadraceError]()
    for offset in range(partition.log.start_offset, partition.high_watermark):
        try:
            got = partition.read(offset, 1, warm=True)
            assert b"".join(piece.read() for piece in got.slices)
            found.add(offset)
        except HeadraceError as error:
            errors.append(error)
        except OSError:
            pass  # while it was sent: the connection ends
    return found, errors


@proves("J1")
@pytest.mark.parametrize("what", [PAYLOAD, HEADER])
@pytest.mark.parametrize("layout", ["partitioned", "shared"])
def test_a_leader_that_cannot_read_a_record_tells_and_serves_the_others(layout: str, what: str) -> None:
    scene = filled(layout)
    one = scene.alive[1]
    bad_sector(scene.disks[1], layout, what)
    readable(one)  # what this process wrote it does not look at again, until it could not be sent
    found, errors = readable(one)
    # The sector may touch the neighbours; behind a header that is gone the next entry of the index leads on.
    near = set(range(WHERE - 1, WHERE + 5)) if what == HEADER else {WHERE}
    assert set(one.partitions.damaged) == {one.partition()}
    assert set(one.partitions.damaged.values()) <= near
    assert set(range(RECORDS)) - near <= found < set(range(RECORDS))
    assert errors
    assert all(isinstance(error, StorageFailed) for error in errors), "clients ask again: another one is to lead"


@proves("J1")
@pytest.mark.parametrize("what", [PAYLOAD, HEADER])
@pytest.mark.parametrize("layout", ["partitioned", "shared"])
def test_it_is_mended_once_it_follows(layout: str, what: str) -> None:
    scene = filled(layout)
    one = scene.alive[1]
    bad_sector(scene.disks[1], layout, what)
    readable(one)
    readable(one)
    scene.elect(2, (1, 2, 3))
    scene.until("mending", lambda: not one.partitions.damaged)
    scene.until("the return", lambda: len(scene.keys[0].isr) == 3)
    scene.settle()
    assert readable(one) == (set(range(RECORDS)), [])


@proves("J1")
@pytest.mark.parametrize("layout", ["partitioned", "shared"])
def test_a_leader_notices_when_it_copies_to_a_follower(layout: str) -> None:
    """Large slices are read only when they are sent: the link ends, for all partitions, but not for ever."""
    size = 100_000
    scene = filled(layout, size)
    one = scene.alive[1]
    scene.kill(2)
    scene.elect(1, (1, 3))
    disk = scene.disks[2]
    disk.remove_folder("/data")
    disk.make_folder("/data")
    bad_sector(scene.disks[1], layout, size=size)
    two = scene.start(2)
    scene.tell(2)
    scene.until("the report", lambda: one.partition() in one.partitions.damaged)
    scene.until("a copy of what comes before", lambda: two.log().end_offset == WHERE)
    scene.elect(3, (1, 3))
    scene.until("the copy", lambda: len(scene.keys[0].isr) == 3 and not one.partitions.damaged)
    scene.settle()
    assert readable(one) == readable(two) == (set(range(RECORDS)), [])


@pytest.mark.parametrize("layout", ["partitioned", "shared"])
def test_a_follower_cuts_nothing_for_a_leader_that_cannot_read_the_same_record(layout: str) -> None:
    scene = filled(layout)
    for number in (1, 2):
        bad_sector(scene.disks[number], layout)
    readable(scene.alive[2])
    readable(scene.alive[2])
    scene.run(10)
    assert scene.alive[2].log().end_offset == RECORDS
    scene.elect(3, (1, 2, 3))
    scene.until("mending", lambda: not any(each.partitions.damaged for each in scene.alive.values()))
    scene.until("the return", lambda: len(scene.keys[0].isr) == 3)
    scene.settle()


@proves("J1")
@pytest.mark.parametrize("layout", ["partitioned", "shared"])
def test_a_follower_does_not_drop_what_its_leader_cannot_read_elsewhere(layout: str) -> None:
    """Each has what the other has lost: they mend each other, one after the other."""
    scene = filled(layout, brokers=(1, 2))
    one, two = scene.alive[1], scene.alive[2]
    bad_sector(scene.disks[2], layout)
    bad_sector(scene.disks[1], layout, nth=30)
    for _ in range(2):
        readable(two)
    scene.run(10)
    assert two.log().end_offset == RECORDS
    assert len(scene.keys[0].isr) == 2, "it can still lead"
    assert one.partition() in one.partitions.damaged
    scene.elect(2, (1, 2))
    scene.until("mending", lambda: not one.partitions.damaged and len(scene.keys[0].isr) == 2)
    scene.elect(1, (1, 2))
    scene.until("mending", lambda: not two.partitions.damaged and len(scene.keys[0].isr) == 2)
    scene.settle()
    assert readable(one) == readable(two) == (set(range(RECORDS)), [])


def test_a_long_log_is_read_piece_by_piece_before_a_follower_drops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.replication.leader_session.INSPECTION_BYTES", 3000)
    scene = filled("partitioned")
    bad_sector(scene.disks[2], "partitioned")
    for _ in range(2):
        readable(scene.alive[2])
    scene.until("mending", lambda: not scene.alive[2].partitions.damaged)
    scene.until("the return", lambda: len(scene.keys[0].isr) == 3)
    scene.settle()
    assert readable(scene.alive[2]) == (set(range(RECORDS)), [])


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
@pytest.mark.parametrize("layout", ["partitioned", "shared"])
def test_a_shortage_is_no_damage(layout: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = filled(layout)
    one = scene.alive[1]
    one.log().doubt()

    def short(*_: object) -> bytes:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr("headrace.virtual.disk.VirtualFile.pread", short)
        with pytest.raises(StorageFailed):
            one.partition().read(WHERE, 1, warm=True)
    assert not one.partitions.damaged
    assert readable(one) == (set(range(RECORDS)), [])


@pytest.mark.parametrize("layout", ["partitioned", "shared"])
def test_alone_it_says_that_the_record_is_damaged(layout: str) -> None:
    """Nobody else can be asked: a consumer has to hear it, and may go on behind it."""
    scene = filled(layout, brokers=(1,))
    one = scene.alive[1]
    bad_sector(scene.disks[1], layout)
    readable(one)
    found, errors = readable(one)
    assert found == set(range(RECORDS)) - {WHERE}
    assert [error.kafka_code for error in errors] == [2]
    scene.until_answered(scene.produce(b"more"))
