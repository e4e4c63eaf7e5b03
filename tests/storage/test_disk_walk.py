"""An OSError at every disk call of every operation of a store, one by one, in both layouts (see `disk_walk`)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from disk_calls import NUMBERS, figures
from headrace.errors import DataFolderError
from headrace.storage import watermarks
from headrace.storage.folder import PARTITIONED, SHARED
from headrace.storage.watermarks import Watermarks
from headrace.virtual.clock import VirtualClock
from headrace.virtual.disk import VirtualDisk
from proving import proves
from storage.disk_walk import ENDINGS, Operation, Walk, World

SAMPLED = 12
CALLS_MAX = 200
"""Of an operation with more than this each call fails in one way, in turn; else in every way."""


def nothing(world: World) -> None:
    return


def lose_queues(world: World) -> None:
    world.kill()
    for where in ("plain", "compact"):
        inside = f"/data/{where}/{where}-0"
        for name in world.disk.list(inside):
            if name.endswith((".queue", ".index", "leader-epochs")):
                world.disk.remove(f"{inside}/{name}")


def convert_for_good(world: World) -> None:
    """What a conversion has finished outlives a loss of power at once. If a tail may have lost something it wants a
    broker's start and stop first."""
    try:
        world.convert()
    except DataFolderError as error:
        if "start a broker on the folder" not in str(error):
            raise
        assert world.harness.open().close()
        world.convert()
    world.lose_power(2)


OPERATIONS = {
    "start after a stop": Operation(World.stop, World.start),
    "start after a kill": Operation(World.kill, World.start),
    "start after a loss of power": Operation(lambda world: world.lose_power(1), World.start),
    "start after a failed sync": Operation(World.fail_a_sync, World.start),
    "start without derived files": Operation(lose_queues, World.start),
    "stop": Operation(nothing, World.stop),
    "checkpoint": Operation(nothing, World.checkpoint),
    "deletion": Operation(nothing, World.delete),
    "truncation": Operation(nothing, World.truncate),
    "new beginning": Operation(nothing, World.begin_anew),
    "roll": Operation(nothing, World.roll, achieves=World.has_rolled),
    "read": Operation(World.evict, World.read),
    "compaction": Operation(lambda world: world.append(12), World.compact, achieves=World.has_compacted),
    "rewriting": Operation(World.thin_out, World.rewrite, layouts=(SHARED,), achieves=World.has_rewritten),
    "retention": Operation(nothing, World.retain, achieves=lambda world: world.begins_at(14)),
    "retention by time": Operation(nothing, World.retain_by_time, achieves=lambda world: world.begins_at(18)),
    "deletion of a log": Operation(nothing, World.delete_log),
    "log made anew": Operation(nothing, World.make_anew),
    "conversion": Operation(World.stop, World.convert, convert_for_good),
    "conversion after a kill": Operation(World.kill, World.convert, convert_for_good),
}
LAYOUTS = PARTITIONED, SHARED


@proves("F7", "L4")
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("operation", "layout"),
    [(name, layout) for name, operation in OPERATIONS.items() for layout in operation.layouts],
)
def test_a_disk_that_fails_now_and_then_costs_no_record(operation: str, layout: str, seed: int) -> None:
    walk = Walk(layout, OPERATIONS[operation])
    step = max(1, walk.calls // SAMPLED)
    for nth in range(1 + seed % step, walk.calls + 1, step):
        walk.fail(nth, NUMBERS[nth % len(NUMBERS)], ENDINGS[nth // len(NUMBERS) % len(ENDINGS)], seed + nth)


@proves("F7", "L4")
@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_disk_that_fails_at_any_call_costs_no_record(
    layout: str, seed: int, proof_report: Callable[..., None]
) -> None:
    walks = {name: Walk(layout, each) for name, each in OPERATIONS.items() if layout in each.layouts}
    ways = [(number, ending) for number in NUMBERS for ending in ENDINGS]
    failures: list[str] = []
    for name, walk in walks.items():
        for nth in range(1, walk.calls + 1):
            for number, ending in ways if walk.calls <= CALLS_MAX else [ways[nth % len(ways)]]:
                try:
                    walk.fail(nth, number, ending, seed + nth)
                except AssertionError as error:
                    failures.append(f"{name}: {error}")
    proof_report(layout=layout, **figures(walks, failures))
    assert failures == []


@pytest.mark.parametrize("number", NUMBERS)
def test_a_watermark_file_that_could_not_be_written_is_the_old_one_or_the_new_one(number: int) -> None:
    """At every disk call of a write behind the loop, and of a stop."""
    topic, nth = bytes(16), 0
    while True:
        nth += 1
        clock = VirtualClock()
        disk = VirtualDisk(clock)
        disk.make_folder("/data")
        now = [(topic, 0, 5)]
        file = Watermarks(disk, clock, "/data", lambda now=now: now)  # type: ignore[misc]
        file.open()
        clock.advance(5)
        file.tick()
        clock.run_soon()
        now[0] = (topic, 0, 9)
        calls = 0

        def trouble(call: str, path: str, failing: int = nth) -> int:
            nonlocal calls
            calls += 1
            return number if calls == failing else 0

        disk.trouble = trouble
        clock.advance(5)
        file.tick()
        clock.run_soon()
        file.close()
        disk.trouble = None
        disk.release()
        assert watermarks.read(disk, "/data")[topic, 0] in (5, 9)
        if calls < nth:
            return
