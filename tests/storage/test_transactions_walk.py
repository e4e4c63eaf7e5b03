"""An OSError at every disk call of every operation on a log with transactions, one by one, in both layouts. After each
the process stops, is killed, or the machine loses power; a healthy start must know what the log's batches say.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import product

import pytest

from disk_calls import NUMBERS, DiskCalls
from headrace.errors import HeadraceError
from headrace.storage.folder import PARTITIONED, SHARED
from headrace.storage.local_log import LocalLog
from headrace.storage.log import Log
from headrace.virtual.disk import VirtualDisk
from proving import proves
from storage.harness import Harness, sim_harness
from storage.transactional import Writer, check_agrees, ignore

KILLED, DARK, STOPPED = "killed", "dark", "stopped"
WAYS = list(product(NUMBERS, (KILLED, DARK, STOPPED)))


class World:
    def __init__(self, layout: str, *, compact: bool) -> None:
        self.harness: Harness = sim_harness(layout)
        self.harness.file_bytes = 2048
        policy = {"cleanup_policy": "compact", "min_cleanable_dirty_ratio": 0.0, "delete_retention_ms": 1000}
        self.harness.log(
            durability="disk",
            segment_bytes=1024,
            index_interval_bytes=150,
            file_delete_delay_ms=0,
            **(policy if compact else {}),
        )
        self.writer = Writer()
        self.count = 0

    @property
    def disk(self) -> VirtualDisk:
        assert isinstance(self.harness.disk, VirtualDisk)
        return self.harness.disk

    @property
    def log(self) -> Log:
        return self.harness.log()

    def fill(self) -> None:
        """Some transactions over each other, one of them open from the beginning."""
        self.writer.write(self.log, 9)
        for _ in range(8):
            self.transaction()
        self.harness.settle()

    def transaction(self) -> None:
        producer_id = self.count % 3
        self.writer.write(self.log, producer_id, (b"k%d" % (self.count % 4), b"v%d" % self.count))
        self.writer.write(self.log, (self.count + 1) % 3, (b"x", b"%d" % self.count))
        self.harness.write()
        self.writer.mark(self.log, producer_id, committed=self.count % 2 == 0)
        self.harness.write()
        self.count += 1

    def append(self) -> None:
        for _ in range(6):
            with suppress(HeadraceError):
                self.transaction()
        self.harness.settle()

    def truncate(self) -> None:
        self.log.truncate(13)
        self.harness.settle()

    def delete(self) -> None:
        self.log.delete_before(12, ignore)
        self.harness.settle()

    def pass_time(self) -> None:
        for seconds in (61, 1, 1):
            self.harness.advance(seconds)

    def compact(self) -> None:
        """Twice, so that markers go too."""
        self.writer.mark(self.log, 9, committed=False)
        self.harness.write()
        for _ in range(2):
            self.transaction()
            for _ in range(40):
                self.harness.advance(0.5)

    def stop(self) -> None:
        assert self.harness.store is not None
        self.harness.store.close()

    def start(self) -> None:
        self.harness.open()
        self.load()

    def load(self) -> None:
        log = self.log
        assert isinstance(log, LocalLog)
        for _ in log.producers.steps():
            pass

    def kill(self) -> None:
        if self.harness.store is not None:
            self.disk.trouble = None
            self.harness.store.abandon()
        self.disk.release()

    def end(self, way: str) -> None:
        if way == STOPPED and self.harness.store is not None:
            self.harness.store.close()
        self.kill()
        if way == DARK:
            self.disk.crash(7)


def nothing(_world: World) -> None:
    return


def lose_index(world: World) -> None:
    world.stop()
    for name in world.disk.list("/data/orders/orders-0"):
        if name.endswith(".txnindex"):
            world.disk.remove(f"/data/orders/orders-0/{name}")


OPERATIONS: dict[str, tuple[Callable[[World], None], Callable[[World], None]]] = {
    "append": (nothing, World.append),
    "truncation": (nothing, World.truncate),
    "deletion": (nothing, World.delete),
    "checkpoint": (nothing, World.pass_time),
    "stop": (nothing, World.stop),
    "start after a stop": (World.stop, World.start),
    "start after a kill": (World.kill, World.start),
    "start without the index": (lose_index, World.start),
    "compaction": (nothing, World.compact),
}


def world_of(name: str, layout: str) -> World:
    world = World(layout, compact=name == "compaction")
    world.fill()
    OPERATIONS[name][0](world)
    return world


@proves("T2", "F7")
@pytest.mark.thorough
@pytest.mark.parametrize("layout", [PARTITIONED, SHARED])
@pytest.mark.parametrize("name", list(OPERATIONS))
def test_what_is_known_of_transactions_survives_an_error_at_each_disk_call(name: str, layout: str) -> None:
    world = world_of(name, layout)
    world.disk.trouble = calls = DiskCalls()
    OPERATIONS[name][1](world)
    world.disk.trouble = None
    count = calls.by_name.total()
    assert count
    for nth in range(1, count + 1):
        number, way = WAYS[nth % len(WAYS)]
        world = world_of(name, layout)
        world.disk.trouble = calls = DiskCalls(nth, number)
        with suppress(OSError, HeadraceError):
            OPERATIONS[name][1](world)
        world.disk.trouble = None
        try:
            world.end(way)
            world.harness.open()
            world.harness.settle()
            check_agrees(world.log)
            world.append()
            check_agrees(world.log)
        except Exception as error:
            raise AssertionError(f"call {nth} of {count}, {calls.failed}, {way}: {error!r}") from error
