"""A byte that changed on the disk behind the back of the process that wrote it: found before a good copy is dropped."""

from __future__ import annotations

import pytest

from headrace.ports.disk import read_whole
from headrace.virtual.disk import VirtualDisk
from proving import proves
from replication.test_replicas_with_bad_sectors import FOLDER, RECORDS, bad_sector, filled, readable, value

CHANGED = 30

layouts = pytest.mark.parametrize("layout", ["partitioned", "shared"])


def change(disk: VirtualDisk, layout: str) -> None:
    """A byte of the record with offset 30."""
    folder = "/data/@commitlog" if layout == "shared" else FOLDER
    for path in [f"{folder}/{name}" for name in disk.list(folder) if name.endswith(".log")]:
        position = read_whole(disk, path).find(value(CHANGED))
        if position >= 0:
            disk.flip(path, position + 500)


@proves("J1")
@layouts
def test_a_follower_does_not_drop_what_has_changed_at_its_leader(layout: str) -> None:
    scene = filled(layout, brokers=(1, 2))
    one, two = scene.alive[1], scene.alive[2]
    bad_sector(scene.disks[2], layout)
    change(scene.disks[1], layout)
    for _ in range(2):
        readable(two)
    scene.run(10)
    assert two.log().end_offset == RECORDS
    assert len(scene.keys[0].isr) == 2, "it can still lead"
    assert one.partitions.damaged == {one.partition(): CHANGED}
    scene.elect(2, (1, 2))
    scene.until("mending", lambda: not one.partitions.damaged and len(scene.keys[0].isr) == 2)
    scene.elect(1, (1, 2))
    scene.until("mending", lambda: not two.partitions.damaged and len(scene.keys[0].isr) == 2, 60)
    scene.settle()
    assert readable(one) == readable(two) == (set(range(RECORDS)), [])


@proves("J1")
@layouts
def test_a_leader_hears_that_nobody_can_take_what_it_sends(layout: str) -> None:
    scene = filled(layout)
    one = scene.alive[1]
    scene.kill(2)
    scene.elect(1, (1, 3))
    scene.disks[2].remove_folder("/data")
    scene.disks[2].make_folder("/data")
    change(scene.disks[1], layout)
    two = scene.start(2)
    scene.tell(2)
    scene.until("a copy of what comes before", lambda: two.log().end_offset == CHANGED)
    scene.until("the report", lambda: one.partitions.damaged == {one.partition(): CHANGED})
    scene.elect(3, (1, 3))
    scene.until("the copy", lambda: len(scene.keys[0].isr) == 3 and not one.partitions.damaged)
    scene.settle()
    assert readable(one) == readable(two) == (set(range(RECORDS)), [])


@layouts
def test_damage_is_not_forgotten_because_its_bytes_can_be_read(layout: str) -> None:
    scene = filled(layout)
    one = scene.alive[1]
    change(scene.disks[1], layout)
    one.partition().found_damage(CHANGED)
    scene.run(40)
    assert one.partitions.damaged == {one.partition(): CHANGED}
