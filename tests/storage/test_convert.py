"""A folder that was given the other layout holds the same, whatever interrupted that."""

from __future__ import annotations

import errno
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import DataFolderError
from headrace.storage import folder
from headrace.storage.commitlog.log import SharedLog
from headrace.storage.folder import PARTITIONED, SHARED
from headrace.storage.log import Tail, TopicPartition
from headrace.storage.offline import verify
from headrace.storage.offline.convert import ConversionOptions, Summary, convert
from headrace.storage.segments.log import PartitionedLog
from headrace.virtual.disk import VirtualDisk
from proving import proves
from storage.folders import FolderHarness, contents, fill, fill_at_random, folder_harness, stop
from storage.harness import Harness, append, batch, settings
from storage.test_compaction import COMPACTED, compact, put

OTHER = {PARTITIONED: SHARED, SHARED: PARTITIONED}
LOGS = TopicPartition("keys", 0)
KILLER = """
import asyncio, os, signal, sys
from headrace.storage.offline.convert import ConversionOptions, convert
from headrace.settings.values import log_settings
from headrace.system.clock import LoopClock
from headrace.system.disk import SystemDisk
data, target, step, nth = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
seen = 0
def tell(name, done, total):
    global seen
    seen += step in (name, "any")
    if seen > nth:
        os.kill(os.getpid(), signal.SIGKILL)
small = log_settings({}, {"segment.bytes": "2000"})
options = ConversionOptions(target, commit_file_bytes=4096, settings=lambda _: small)
convert(SystemDisk(), LoopClock(asyncio.new_event_loop()), data, options, tell)
"""


def state_of(harness: Harness) -> dict[tuple[TopicPartition, int], Any]:
    """Everything that is to be the same; the store is stopped again."""
    harness.open()
    found: dict[tuple[TopicPartition, int], Any] = {}
    for where in harness.expected:
        log = harness.log(where)
        assert isinstance(log, PartitionedLog | SharedLog)
        known = {each: (state.epoch, state.batches) for each, state in log.producers.states.items()}
        bounds = (log.topic_id, log.start_offset, log.end_offset, log.cleanings)
        times = [log.offset_for_time(header.max_timestamp_ms) for header, _ in contents(log)]
        for part, value in enumerate((bounds, log.epochs.entries, known, contents(log), times)):
            found[where, part] = value
    stop(harness)
    return found


def options(layout: str, **more: Any) -> ConversionOptions:
    small = settings(segment_bytes=2000, index_interval_bytes=300)
    return ConversionOptions(layout, commit_file_bytes=4096, settings=lambda _: small, **more)


def change(harness: Harness, **more: Any) -> Summary:
    done = convert(harness.disk, harness.clock, harness.data, options(OTHER[harness.layout], **more))
    if not done.dry_run:
        harness.layout = done.target
    return done


def whole(harness: Harness) -> bool:
    found = verify.inspect_folder(harness.disk, harness.data)
    assert found.layout == harness.layout
    problems = [problem for report in verify.reports(harness.disk, harness.data) for problem in report.problems]
    return not problems and not found.problems and "@convert" not in harness.disk.list(harness.data)


def files(disk: VirtualDisk, path: str = "/data") -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for name in disk.list(path):
        try:
            found |= files(disk, f"{path}/{name}")
        except NotADirectoryError:
            file = disk.open(f"{path}/{name}")
            found[file.path] = file.pread(file.size(), 0)
    return found


def filled(layout: str) -> Harness:
    """With gaps in either layout."""
    harness = folder_harness(layout)
    fill(harness)
    if layout == PARTITIONED:
        log = harness.log(LOGS, **COMPACTED)
        for i in range(60):
            put(harness, log, b"key%d" % (i * i % 9), b"%d" % i)
        compact(harness)
    stop(harness)
    return harness


@proves("L5")
@pytest.mark.parametrize("layout", [PARTITIONED, SHARED])
def test_a_folder_holds_the_same_in_the_other_layout_and_back(layout: str) -> None:
    harness = filled(layout)
    before = state_of(harness)
    done = change(harness)
    assert (done.source, done.target, done.partitions) == (layout, OTHER[layout], len(harness.expected))
    assert whole(harness)
    assert state_of(harness) == before
    change(harness)
    assert whole(harness)
    assert state_of(harness) == before
    harness.open()
    for where in harness.expected:
        log = harness.log(where)
        assert append(log, batch(b"more"), epoch=9) == before[where, 0][2]
    harness.write()
    stop(harness)
    assert whole(harness)


@pytest.mark.parametrize("layout", [PARTITIONED, SHARED])
def test_folders_of_any_history_are_converted(layout: str, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(5):
        harness = folder_harness(layout)
        fill_at_random(harness, chance)
        if chance.random() < 0.5:
            stop(harness)
        else:
            assert harness.store is not None
            harness.store.abandon()
            harness.store = None
        if chance.random() < 0.3:
            done = change(harness)
            assert whole(harness)
            before = state_of(harness)
        else:
            before = state_of(harness)
            done = change(harness)
            assert whole(harness)
            assert state_of(harness) == before
        assert done.partitions == 6
        change(harness)
        assert whole(harness)
        assert state_of(harness) == before


class Stopped(Exception):
    pass


@pytest.mark.parametrize("layout", [PARTITIONED, SHARED])
@pytest.mark.thorough
def test_an_interrupted_conversion_goes_on_wherever_it_was(layout: str) -> None:
    harness = filled(layout)
    before = state_of(harness)
    steps: list[str] = []
    countdown = 0

    def tell(step: str, done: int, total: int) -> None:
        nonlocal countdown
        countdown -= 1
        steps.append(step)
        if countdown < 0:
            raise Stopped

    def run(target: str) -> Summary:
        return convert(harness.disk, harness.clock, harness.data, options(target), tell)

    target, resumed = OTHER[layout], 0
    for count in range(1000):
        countdown = count
        try:
            done = run(target)
        except Stopped:
            resumed += 1
            continue
        if done.source == layout:
            break
    assert resumed > 20
    assert {"check", "write", "written", "recheck", "compare", "swap", "move", "swapped", "remove"} <= set(steps)
    harness.layout = target
    assert whole(harness)
    assert state_of(harness) == before


@pytest.mark.thorough
@pytest.mark.parametrize("call", ["sync", "sync folder"])
@pytest.mark.parametrize("layout", [PARTITIONED, SHARED])
def test_what_an_earlier_run_could_not_sync_outlives_a_loss_of_power(layout: str, call: str, seed: int) -> None:
    """At every third of the calls: the next run syncs it, or builds it anew if the page cache cannot be trusted."""
    for nth in range(seed % 3, 40, 3):
        harness = filled(layout)
        before = state_of(harness)
        disk, left = harness.disk, nth
        assert isinstance(disk, VirtualDisk)

        def trouble(name: str, path: str) -> int:
            nonlocal left
            left -= name == call and path.startswith("/data/@convert/new")
            return errno.EIO if left < 0 else 0

        disk.trouble = trouble
        try:
            change(harness)
            return
        except (OSError, DataFolderError):
            disk.mend()
        disk.release()
        assert change(harness).resumed
        disk.crash(seed + nth)
        assert whole(harness)
        assert state_of(harness) == before


@pytest.mark.thorough
@pytest.mark.parametrize("layout", [PARTITIONED, SHARED])
def test_a_swap_goes_on_after_power_was_lost_at_any_of_its_moves(layout: str, seed: int) -> None:
    """Twice in a row: what the first run has moved, and not synced, is the second's to make last."""
    for nth in range(24):
        harness = filled(layout)
        before = state_of(harness)
        assert isinstance(harness.disk, VirtualDisk)
        countdown = nth

        def tell(step: str, done: int, total: int) -> None:
            nonlocal countdown
            countdown -= step in ("swap", "move", "swapped", "remove")
            if countdown < 0:
                raise Stopped

        for run in range(2):
            try:
                convert(harness.disk, harness.clock, harness.data, options(OTHER[layout]), tell)
            except Stopped:
                harness.disk.crash(seed + nth + run)
                countdown = nth % 5
            else:
                break
        if "@convert" in harness.disk.list(harness.data):
            countdown = 1 << 30
            convert(harness.disk, harness.clock, harness.data, options(OTHER[layout]), tell)
        harness.layout = OTHER[layout]
        assert whole(harness)
        assert state_of(harness) == before


@proves("L5")
@pytest.mark.thorough
@pytest.mark.parametrize("step", ["write", "compare", "move", "swapped"])
def test_a_killed_conversion_goes_on(real: Harness, step: str, seed: int) -> None:
    chance = random.Random(seed)
    layout = chance.choice((PARTITIONED, SHARED))
    real = FolderHarness(real.disk, real.clock, real.data, real.loop, layout=layout)
    fill(real)
    stop(real)
    before = state_of(real)
    target = OTHER[real.layout]
    killed = [(step, chance.randrange(3)), ("any", chance.randrange(60))]
    for name, nth in killed:
        done = kill_at(real.data, target, name, nth)
        if done == 0:
            break
        assert done == -signal.SIGKILL
    else:
        if folder.layout_of(real.disk, real.data) != target:
            assert kill_at(real.data, target, "never", 0) == 0
    if Path(real.data, "@convert").exists():
        assert kill_at(real.data, target, "never", 0) == 0
    real.layout = target
    assert whole(real)
    assert state_of(real) == before


def kill_at(data: str, target: str, step: str, nth: int) -> int:
    arguments = [sys.executable, "-c", KILLER, data, target, step, str(nth)]
    done = subprocess.run(arguments, capture_output=True, timeout=60, check=False)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr.decode()
    return done.returncode


def test_a_broker_does_not_start_on_a_folder_that_is_half_swapped() -> None:
    harness = filled(PARTITIONED)

    def tell(step: str, done: int, total: int) -> None:
        if step == "move":
            raise Stopped

    with pytest.raises(Stopped):
        convert(harness.disk, harness.clock, harness.data, options(SHARED), tell)
    for layout in (PARTITIONED, SHARED):
        harness.layout = layout
        with pytest.raises(DataFolderError, match="between partitioned and shared"):
            harness.open()
    with pytest.raises(DataFolderError, match="a conversion was interrupted"):
        verify.inspect_folder(harness.disk, harness.data)
    harness.layout = PARTITIONED
    assert change(harness).resumed
    assert whole(harness)


def test_what_was_built_of_an_older_state_is_not_used() -> None:
    harness = filled(PARTITIONED)

    def tell(step: str, done: int, total: int) -> None:
        if step == "compare":
            raise Stopped

    with pytest.raises(Stopped):
        convert(harness.disk, harness.clock, harness.data, options(SHARED), tell)
    harness.open()
    append(harness.log(TopicPartition("busy", 0)), batch(b"news"), epoch=5)
    harness.write()
    stop(harness)
    before = state_of(harness)
    change(harness)
    assert state_of(harness) == before


def test_what_an_earlier_run_left_damaged_is_built_anew() -> None:
    harness = filled(PARTITIONED)
    before = state_of(harness)
    assert isinstance(harness.disk, VirtualDisk)

    def tell(step: str, done: int, total: int) -> None:
        if step == "written":
            raise Stopped

    with pytest.raises(Stopped):
        convert(harness.disk, harness.clock, harness.data, options(SHARED), tell)
    harness.disk.flip(f"/data/@convert/new/@commitlog/{0:020d}.log", 300)
    assert change(harness).resumed
    assert state_of(harness) == before


@pytest.mark.parametrize("layout", [PARTITIONED, SHARED])
def test_a_dry_run_changes_nothing_and_says_what_there_is(layout: str) -> None:
    harness = filled(layout)
    assert isinstance(harness.disk, VirtualDisk)
    before = files(harness.disk)
    done = change(harness, dry_run=True)
    assert files(harness.disk) == before
    assert done.dry_run
    assert done.records > 100
    assert done.size_bytes > 1000


@pytest.mark.parametrize("layout", [PARTITIONED, SHARED])
def test_the_old_form_is_kept_if_asked(layout: str) -> None:
    harness = filled(layout)
    before = state_of(harness)
    done = change(harness, keep=True)
    assert done.kept == f"/data/@kept-{layout}-0"
    assert whole(harness)
    assert state_of(harness) == before
    kept = Harness(harness.disk, harness.clock, done.kept, expected=harness.expected, layout=layout)
    kept.disk.open(f"{done.kept}/layout", create=True, writable=True).pwritev([layout.encode()], 0)
    assert state_of(kept) == before
    assert change(harness, keep=True).kept == f"/data/@kept-{OTHER[layout]}-0"


def refuse(harness: Harness, match: str, **more: Any) -> None:
    assert isinstance(harness.disk, VirtualDisk)
    before = files(harness.disk)
    with pytest.raises(DataFolderError, match=match):
        change(harness, **more)
    after = {path: data for path, data in files(harness.disk).items() if path != "/data/@lock"}
    assert after == {path: data for path, data in before.items() if path != "/data/@lock"}


@pytest.mark.parametrize("layout", [PARTITIONED, SHARED])
def test_a_folder_in_use_or_with_too_little_room_or_damaged_is_refused(layout: str) -> None:
    harness = filled(layout)
    assert isinstance(harness.disk, VirtualDisk)
    used = sum(map(len, files(harness.disk).values()))
    harness.disk.capacity_bytes = used + 5000
    refuse(harness, r"has \d+ bytes free, and the new form takes \d+ more")
    harness.disk.capacity_bytes = 1 << 40
    harness.open()
    refuse(harness, "is in use by the broker")
    refuse(harness, "is in use by the broker", dry_run=True)
    stop(harness)
    path = next(path for path in sorted(files(harness.disk)) if path.endswith(".log") and harness.disk.size(path) > 200)
    harness.disk.flip(path, 150)
    refuse(harness, "is not whole, problems: ")
    harness.disk.flip(path, 150)
    harness.layout = OTHER[layout]
    refuse(harness, f"has the layout '{layout}' already")


@pytest.mark.parametrize("layout", [PARTITIONED, SHARED])
@pytest.mark.parametrize("times", [1, 2])
def test_a_folder_that_holds_less_than_it_did_is_left_to_a_broker(layout: str, times: int) -> None:
    """Else the next start would find nothing amiss, and the broker would count for what it has lost."""
    harness = folder_harness(layout)
    fill(harness)
    append(harness.log(TopicPartition("busy", 0)), batch(b"behind the checkpoint"), epoch=9)
    harness.write()
    assert harness.store is not None
    harness.store.abandon()
    disk = harness.disk
    assert isinstance(disk, VirtualDisk)
    disk.release()
    inside = "/data/@commitlog" if layout == SHARED else "/data/busy/busy-0"
    path = f"{inside}/{max(name for name in disk.list(inside) if name.endswith('.log'))}"
    disk.flip(path, disk.size(path) - 1)
    for _ in range(times):
        with pytest.raises(DataFolderError, match=r"may hold less.*start a broker"):
            change(harness)
    harness.open()
    assert harness.log(TopicPartition("busy", 0)).tail >= Tail.TORN
    stop(harness)
    change(harness)
    assert whole(harness)


def test_topics_with_one_id_are_refused(sim: Harness) -> None:
    fill(sim, rounds=3)
    stop(sim)
    refuse(sim, "have the topic id")


def test_a_disk_that_fills_up_is_told_and_the_rest_goes_on_later() -> None:
    harness = filled(PARTITIONED)
    before = state_of(harness)
    disk = harness.disk
    assert isinstance(disk, VirtualDisk)

    def tell(step: str, done: int, total: int) -> None:
        if step == "write" and done > total // 2:
            disk.capacity_bytes = 0

    with pytest.raises(DataFolderError, match="free some room and run this again"):
        convert(disk, harness.clock, harness.data, options(SHARED), tell)
    disk.capacity_bytes = 1 << 40
    assert change(harness).resumed
    assert state_of(harness) == before
