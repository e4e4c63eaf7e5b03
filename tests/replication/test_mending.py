"""Damage on one replica: never served, never elected in the middle of mending, and copied again from a healthy one."""

from __future__ import annotations

import errno
from contextlib import suppress

import pytest

from headrace.errors import CorruptBatch, StorageFailed
from headrace.ports.disk import read_whole
from headrace.storage.log import Log
from headrace.virtual.disk import VirtualDisk
from proving import proves
from replication.scene import Broker, Scene

FORMAT_AT = 16
"""Of a batch: offset, length and leader epoch come before."""


def damaged(layout: str) -> tuple[Scene, Broker]:
    """Three replicas of 40 records; the second broker is started again, and its disk has a wrong byte in the middle."""
    scene = Scene(layout=layout, topic={"segment_bytes": 2000, "durability": "disk"})
    scene.elect(1, (1, 2, 3))
    for nth in range(40):
        scene.until_answered(scene.produce(b"%d" % nth * 50))
    scene.settle()
    scene.run(70)
    scene.alive[2].store.close()
    scene.kill(2)
    disk = scene.disks[2]
    flip(disk, "/data/@commitlog" if layout == "shared" else "/data/orders/orders-0")
    scene.start(2)
    key = scene.keys[0]
    key.isr[2], key.revision = scene.alive[2].incarnation, key.revision + 1
    for number in scene.alive:
        scene.tell(number)
    scene.until_copying()
    return scene, scene.alive[2]


def flip(disk: VirtualDisk, folder: str, value: bytes = b"20") -> None:
    """A wrong byte in the record with offset 20, or with another value."""
    for path in [f"{folder}/{name}" for name in disk.list(folder) if name.endswith(".log")]:
        position = read_whole(disk, path).find(value * 50)
        if position >= 0:
            disk.flip(path, position)


HEADER_BYTES = pytest.mark.parametrize("byte", [FORMAT_AT, 50, 52, 56], ids=["format", "id", "epoch", "sequence"])
"""What a wrong bit in the header of a batch says wrongly of it, or of its producer."""


def flip_header(disk: VirtualDisk, folder: str, byte: int) -> None:
    """A wrong bit in the header of the batch with offset 20."""
    for path in [f"{folder}/{name}" for name in disk.list(folder) if name.endswith(".log")]:
        data = read_whole(disk, path)
        position = data.find(b"20" * 50)
        if position >= 0:
            disk.flip(path, data.rfind((20).to_bytes(8, "big"), 0, position) + byte, 0x02)


def read_all(broker: Broker) -> None:
    partition = broker.partition()
    offset = 0
    while offset < partition.high_watermark:
        partition.read(offset, 1, warm=True)
        offset += 1


@proves("J1")
@HEADER_BYTES
@pytest.mark.parametrize("layout", ["partitioned", "shared"])
def test_a_follower_that_cannot_append_because_of_its_own_damage_copies_it_again(layout: str, byte: int) -> None:
    """An append looks for the producers of the log, and what tells of them behind the last snapshot is broken."""
    scene = Scene(layout=layout)
    scene.elect(1, (1, 2, 3))
    for nth in range(40):
        scene.until_answered(scene.produce(b"%d" % nth * 50))
    scene.settle()
    scene.alive[2].store.close()
    scene.kill(2)
    disk = scene.disks[2]
    for name in disk.list("/data/orders/orders-0"):
        if name.endswith(".snapshot"):
            disk.remove(f"/data/orders/orders-0/{name}")
    flip_header(disk, "/data/@commitlog" if layout == "shared" else "/data/orders/orders-0", byte)
    scene.start(2)
    scene.elect(1, (1, 3))
    scene.until_answered(scene.produce(b"more"))
    scene.until("the return", lambda: len(scene.keys[0].isr) == 3)
    scene.settle()
    read_all(scene.alive[2])
    assert len(scene.alive[2].values()) == 41


@proves("J1")
@HEADER_BYTES
@pytest.mark.parametrize("layout", ["partitioned", "shared"])
def test_a_leader_that_cannot_tell_its_producers_for_damage_wants_to_follow(layout: str, byte: int) -> None:
    scene = Scene(layout=layout, topic={"durability": "disk"})
    scene.elect(1, (1, 2, 3))
    for nth in range(40):
        scene.until_answered(scene.produce(b"%d" % nth * 50, producer=(7, 0, nth)))
    scene.settle()
    scene.alive[2].store.close()
    scene.kill(2)
    disk, folder = scene.disks[2], "/data/orders/orders-0"
    for name in disk.list(folder):
        if name.endswith(".snapshot"):
            disk.remove(f"{folder}/{name}")
    flip_header(disk, "/data/@commitlog" if layout == "shared" else folder, byte)
    scene.start(2)
    scene.elect(2, (2, 1, 3))
    refused = scene.produce(b"more", producer=(7, 0, 40))
    assert isinstance(refused.error, StorageFailed), "its own fault, not the producer's"
    assert scene.alive[2].partition() in scene.alive[2].partitions.damaged
    scene.elect(1, (1, 2, 3))
    scene.until_answered(scene.produce(b"more", producer=(7, 0, 40)))
    scene.until("mending", lambda: not scene.alive[2].partitions.damaged)
    scene.until("the return", lambda: len(scene.keys[0].isr) == 3)
    scene.settle()
    assert len(scene.alive[2].values()) == 41


@proves("J1")
@pytest.mark.parametrize("layout", ["partitioned", "shared"])
@pytest.mark.parametrize("producer", [(7, 0, 40), (-1, -1, -1)], ids=["idempotent", "plain"])
def test_a_leader_that_is_alone_takes_records_without_what_damage_says_of_producers(
    layout: str, producer: tuple[int, int, int]
) -> None:
    scene = Scene(layout=layout, topic={"durability": "disk", "min.insync.replicas": "1"})
    scene.elect(1, (1, 2, 3))
    for nth in range(40):
        scene.until_answered(scene.produce(b"%d" % nth * 50, producer=(7, 0, nth)))
    scene.settle()
    for number in (1, 2, 3):
        scene.alive[number].store.close()
        scene.kill(number)
    disk, folder = scene.disks[2], "/data/orders/orders-0"
    for name in disk.list(folder):
        if name.endswith(".snapshot"):
            disk.remove(f"{folder}/{name}")
    flip_header(disk, "/data/@commitlog" if layout == "shared" else folder, 52)
    scene.start(2)
    scene.elect(2, (2,))
    refused = scene.produce(b"more", producer=producer)
    assert isinstance(refused.error, StorageFailed), "its own fault, not the producer's"
    partition = scene.alive[2].partition()
    assert scene.alive[2].partitions.damaged == {partition: 20}
    scene.until_answered(scene.produce(b"more", producer=producer))
    scene.until_answered(scene.produce(b"39" * 50, producer=(7, 0, 39)))
    assert partition.log.end_offset == 41
    assert readable(scene.alive[2]) == set(range(41)) - {20}


def readable(broker: Broker) -> set[int]:
    log, found = broker.partition().log, set()
    for offset in range(log.start_offset, log.end_offset):
        with suppress(CorruptBatch):
            log.read(offset, 1, log.end_offset)
            found.add(offset)
    return found


@proves("J1")
@pytest.mark.parametrize("layout", ["partitioned", "shared"])
def test_what_lies_before_the_damage_is_not_dropped_for_a_leader_that_is_damaged_there(layout: str) -> None:
    scene = Scene(layout=layout, topic={"durability": "disk"})
    scene.elect(1, (1, 2, 3))
    for nth in range(40):
        scene.until_answered(scene.produce(b"%d" % nth * 50, producer=(7, 0, nth)))
    scene.settle()
    folder = "/data/orders/orders-0"
    logs = "/data/@commitlog" if layout == "shared" else folder
    for number in (1, 2, 3):
        scene.alive[number].store.close()
        scene.kill(number)
    for name in scene.disks[2].list(folder):
        if name.endswith(".snapshot"):
            scene.disks[2].remove(f"{folder}/{name}")
    flip_header(scene.disks[2], logs, FORMAT_AT)
    flip(scene.disks[1], logs, b"5")
    scene.start(1)
    scene.start(2)
    scene.elect(2, (2, 1))
    assert scene.produce(b"more", producer=(7, 0, 40)).error is not None
    scene.elect(1, (1, 2))
    scene.until("mending", lambda: not scene.alive[2].partitions.damaged)
    scene.until("the copy", lambda: scene.alive[2].partition().log.end_offset == 40)
    assert readable(scene.alive[2]) == set(range(40))


@proves("J1")
@pytest.mark.parametrize("layout", ["partitioned", "shared"])
def test_a_follower_copies_again_what_it_finds_damaged(layout: str) -> None:
    scene, broker = damaged(layout)
    with pytest.raises(StorageFailed):
        read_all(broker)
    scene.run(0.5)
    scene.until("the return", lambda: len(scene.keys[0].isr) == 3)
    assert [change.removed for change in scene.changes] == [(2,), ()]
    read_all(broker)
    scene.settle()
    assert len(broker.values()) == 40


def test_a_member_cuts_nothing_before_it_has_left_the_set() -> None:
    """Were it elected meanwhile, what is committed behind the damage would be lost."""
    scene, broker = damaged("partitioned")
    scene.held = []
    with pytest.raises(StorageFailed):
        read_all(broker)
    scene.run(5)
    assert broker.log().end_offset == 40
    waiting = scene.produce(b"more")
    scene.run(1)
    assert waiting.waiting
    scene.release_answers()
    scene.until_answered(waiting)
    scene.settle()
    assert len(broker.values()) == 41


@proves("J3")
@pytest.mark.parametrize("layout", ["partitioned", "shared"])
def test_a_broker_started_anew_cuts_nothing_while_its_last_run_is_a_member(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller may carry the membership over at any time, by what the broker held when it was started."""
    scene = Scene(layout=layout, topic={"segment_bytes": 2000, "durability": "disk"})
    scene.elect(1, (1, 2, 3))
    for nth in range(40):
        scene.until_answered(scene.produce(b"%d" % nth * 50))
    scene.settle()
    scene.alive[2].store.close()
    scene.kill(2)
    flip(scene.disks[2], "/data/@commitlog" if layout == "shared" else "/data/orders/orders-0")
    broker = scene.start(2)
    scene.tell(2)
    broker.partition().found_damage(20)
    broker.replication.tick()

    isr: list[set[int]] = []
    truncate = type(broker.log()).truncate

    def cut(log: Log, offset: int) -> None:
        isr.append(set(scene.keys[0].isr))
        truncate(log, offset)

    monkeypatch.setattr(type(broker.log()), "truncate", cut)
    scene.until("mending", lambda: not broker.partitions.damaged)
    assert isr == [{1, 3}]
    scene.until("the return", lambda: 2 in scene.keys[0].isr)
    scene.settle()
    assert len(broker.values()) == 40


def test_a_leader_with_damage_is_mended_once_it_follows() -> None:
    scene, broker = damaged("partitioned")
    scene.elect(2, (1, 2, 3))
    scene.until_answered(scene.produce(b"more"))
    with pytest.raises(StorageFailed):
        read_all(broker)
    scene.run(5)
    assert broker.log().end_offset == 41
    scene.elect(1, (1, 2, 3))
    scene.until("its leaving the set", lambda: any(change.removed == (2,) for change in scene.changes))
    scene.until("the return", lambda: len(scene.keys[0].isr) == 3)
    scene.settle()
    read_all(broker)


def test_nothing_is_cut_where_the_leader_is_damaged_too() -> None:
    scene, broker = damaged("partitioned")
    disk = scene.disks[1]
    scene.alive[1].store.close()
    scene.kill(1)
    flip(disk, "/data/orders/orders-0")
    scene.start(1)
    scene.elect(1, (1, 2, 3))
    with pytest.raises(StorageFailed):
        read_all(broker)
    scene.run(10)
    assert broker.log().end_offset == 40
    scene.elect(3, (1, 2, 3))
    scene.until("mending", lambda: not any(each.partitions.damaged for each in scene.alive.values()))
    scene.until("the return", lambda: len(scene.keys[0].isr) == 3)
    scene.settle()
    for each in scene.alive.values():
        read_all(each)


def test_damage_that_is_found_while_the_link_is_opened_again_is_mended() -> None:
    scene, broker = damaged("partitioned")
    scene.run(1)
    scene.network.reset("b1", "b2")
    scene.until("the end of the link", lambda: broker.replication._leaders[1].link is None)
    with pytest.raises(StorageFailed):
        read_all(broker)
    scene.until("mending", lambda: not broker.partitions.damaged)
    scene.until("the return", lambda: len(scene.keys[0].isr) == 3)
    scene.settle()
    read_all(broker)


def test_a_cut_that_fails_holds_up_its_partition_alone() -> None:
    scene, broker = damaged("partitioned")
    scene.run(1)
    link = broker.replication._leaders[1]
    before = link.connects
    folder = "/data/orders/orders-0"
    scene.disks[2].fail_open(f"{folder}/{20:020d}.1.cut", errno.ENOSPC)
    with pytest.raises(StorageFailed):
        read_all(broker)
    scene.until("mending", lambda: not broker.partitions.damaged)
    scene.until("the return", lambda: len(scene.keys[0].isr) == 3)
    scene.settle()
    assert link.connects == before


def restarted_without_watermarks(layout: str) -> tuple[Scene, Broker]:
    """All three hold 40 committed records and were started again. The leader does not know how far is committed, and a
    second member, which has a wrong byte, reaches it before the third does."""
    scene = Scene(layout=layout, topic={"durability": "disk"})
    scene.elect(1, (1, 2, 3))
    for nth in range(40):
        scene.until_answered(scene.produce(b"%d" % nth * 50))
    for number in (1, 2, 3):
        scene.alive[number].store.close()
        scene.kill(number)
        if scene.disks[number].exists("/data/@watermarks"):
            scene.disks[number].remove("/data/@watermarks")
    flip(scene.disks[2], "/data/@commitlog" if layout == "shared" else "/data/orders/orders-0")
    for number in (1, 2, 3):
        scene.start(number)
    scene.network.cut("b1", "b3")
    leader = scene.elect(1, (1, 2, 3))
    assert leader.core is not None
    assert (leader.high_watermark, leader.core.epoch_start) == (0, 40)
    return scene, scene.alive[2]


@proves("J1")
@pytest.mark.parametrize("layout", ["partitioned", "shared"])
def test_what_the_epoch_began_with_is_not_cut_by_a_member_while_the_watermark_is_an_old_one(layout: str) -> None:
    scene, broker = restarted_without_watermarks(layout)
    scene.held = []  # its leaving is not answered
    broker.partition().found_damage(20)
    scene.run(5)
    assert broker.log().end_offset == 40, "cut while it could be elected"
    assert [change.removed for change in scene.changes] == [(2,)]
    scene.release_answers()
    scene.until("the return", lambda: 2 in scene.keys[0].isr)
    scene.kill(1)
    scene.network.heal("b1", "b3")
    scene.elect(2, (2, 3))
    scene.settle()
    assert len(broker.values()) == len(scene.alive[3].values()) == 40


@pytest.mark.parametrize("layout", ["partitioned", "shared"])
def test_a_member_that_never_held_all_that_the_epoch_began_with_stays_one(layout: str) -> None:
    """Then that is not committed; nothing that is would be lost with it."""
    scene = Scene(layout=layout)
    scene.elect(1, (1, 2, 3))
    scene.until_answered(scene.produce(b"committed"))
    scene.settle()
    scene.network.cut("b1", "b3")
    waiting = scene.produce(b"on two of three")
    scene.until("the copy", lambda: scene.alive[2].log().end_offset == 2)
    assert waiting.waiting
    scene.kill(1)
    leader = scene.elect(2, (2, 3))
    assert leader.core is not None
    assert scene.alive[3].log().end_offset == 1 < leader.core.epoch_start
    scene.settle()
    assert scene.changes == []
