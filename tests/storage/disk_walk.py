"""An operation of a store, repeated with an OSError at its first disk call, then at its second, and so on.

After each: the process stops, is killed, or the machine loses power, and a healthy start must find every record that
was acknowledged, no deleted one, and what a stop that called itself clean had written.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from disk_calls import DiskCalls
from headrace.errors import HeadraceError
from headrace.records import kernel
from headrace.records.batch import batches
from headrace.records.record import NewRecord
from headrace.storage.commitlog.store import SharedStore
from headrace.storage.folder import PARTITIONED, SHARED, layout_of
from headrace.storage.log import Log, Phase, TopicPartition
from headrace.storage.offline.convert import FOLDER, ConversionOptions, convert
from headrace.storage.page_cache import are_warm
from headrace.storage.segments.log import PartitionedLog
from headrace.virtual.clock import VirtualClock
from headrace.virtual.disk import VirtualDisk
from storage.harness import Harness, append, settings

KEYS = 4
PLAIN, COMPACT = TopicPartition("plain", 0), TopicPartition("compact", 0)
SETTINGS: dict[TopicPartition, dict[str, object]] = {
    PLAIN: {
        "durability": "disk",
        "preallocate": "true",
        "segment_bytes": 1024,
        "index_interval_bytes": 150,
        "file_delete_delay_ms": 0,
    },
    COMPACT: {
        "durability": "disk",
        "cleanup_policy": "compact",
        "segment_bytes": 1024,
        "index_interval_bytes": 150,
        "min_cleanable_dirty_ratio": 0.0,
        "file_delete_delay_ms": 0,
    },
}
NO_TIMESTAMP = -1
ENDINGS = KILLED, DARK, STOPPED, STOPPED_AND_DARK = "killed", "dark", "stopped", "stopped and dark"


class WalkHarness(Harness):
    def topic_id(self, topic: str) -> bytes:
        return topic.encode().ljust(16, b".")


@dataclass(slots=True)
class Model:
    """What one log has been told and has acknowledged."""

    written: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    durable: int = 0
    start: int = 0
    """Acknowledged: nothing below it may come back."""
    asked_start: int = 0
    cut: int = 1 << 62
    """What lies from here on may be gone."""
    after: int = 0
    """The number of the last record that was written before this log was made: none up to it may be found here."""


class World:
    def __init__(self, layout: str) -> None:
        clock = VirtualClock()
        self.disk = VirtualDisk(clock)
        self.harness = WalkHarness(self.disk, clock, "/data", layout=layout, file_bytes=2048)
        self.models = {where: Model() for where in SETTINGS}
        self.clean = False
        """Whether the last stop called itself clean."""
        self._count = 0

    def fill(self) -> None:
        for where, chosen in SETTINGS.items():
            self.harness.log(where, **chosen)
        self.append(12)
        self.log(PLAIN).delete_before(3, self._deleted(PLAIN, 3))
        self.append(6)
        self.harness.settle()
        assert all(model.durable == 18 for model in self.models.values())

    def log(self, where: TopicPartition) -> Log:
        assert self.harness.store is not None
        found = self.harness.store.get(where)
        assert found is not None
        return found

    def append(self, count: int) -> None:
        """So many batches to each log that takes them, a turn each."""
        for _ in range(count):
            self._count += 1
            record = b"k%d" % (self._count % KEYS), b"v%d" % self._count
            taken: dict[TopicPartition, int] = {}
            for where in self.models:
                # Records without a time are as old as their file.
                new: NewRecord = NO_TIMESTAMP if where == PLAIN else self.harness.clock.wall_ms(), *record, []
                try:
                    taken[where] = append(self.log(where), memoryview(kernel.build([new])))
                except HeadraceError:
                    continue
            refused = {log.topic_partition for log, _ in self.harness.write()}
            for where, offset in taken.items():
                if where not in refused:
                    model = self.models[where]
                    model.written = {at: each for at, each in model.written.items() if at < offset} | {offset: record}
            self.harness.settle()
            self.note_durable()

    def note_durable(self) -> None:
        """What is acknowledged by now: a log that is offline acknowledges nothing more."""
        for where, model in self.models.items():
            log = self.log(where)
            if log.offline is None:
                model.durable = max(min(model.durable, model.cut), log.durable_offset)

    def _deleted(self, where: TopicPartition, offset: int) -> Callable[[HeadraceError | None], None]:
        self.models[where].asked_start = offset

        def done(error: HeadraceError | None) -> None:
            if error is None:
                self.models[where].start = offset

        return done

    # Operations.

    def delete(self) -> None:
        self.log(PLAIN).delete_before(9, self._deleted(PLAIN, 9))
        self.harness.settle()

    def truncate(self) -> None:
        self.models[PLAIN].cut = 14
        self.log(PLAIN).truncate(14)
        self.harness.settle()

    def begin_anew(self) -> None:
        self.models[PLAIN].cut = 0
        self.log(PLAIN).restart_at(100)
        self.harness.settle()

    def roll(self) -> None:
        """Segments and commit files are full after some batches."""
        self.append(12)

    def checkpoint(self) -> None:
        self.harness.advance(61)
        self.harness.settle()

    def compact(self) -> None:
        self.harness.advance(16)
        for _ in range(60):
            self.harness.advance(0.5)

    def stop(self) -> None:
        assert self.harness.store is not None
        self.clean = self.harness.store.close()

    def convert(self) -> None:
        """To the other layout, or on with what was begun."""
        harness = self.harness
        harness.store = None
        target = SHARED if harness.layout == PARTITIONED else PARTITIONED
        if layout_of(self.disk, harness.data) != target or self.disk.exists(f"{harness.data}/{FOLDER}"):
            small = settings(segment_bytes=1024, index_interval_bytes=150)
            convert(
                self.disk,
                harness.clock,
                harness.data,
                ConversionOptions(target, commit_file_bytes=2048, settings=lambda _: small),
            )
        harness.layout = target

    def retain(self) -> None:
        """Everything but the last segment is too much; what goes is not asked for by anybody."""
        log = self.log(PLAIN)
        log.settings = replace(log.settings, retention_bytes=1)
        self.models[PLAIN].asked_start = log.written_offset
        for _ in range(5):
            self.harness.advance(1.5)

    def retain_by_time(self) -> None:
        """Everything is too old by now."""
        log = self.log(PLAIN)
        log.settings = replace(log.settings, retention_ms=1000)
        self.models[PLAIN].asked_start = log.written_offset
        for _ in range(5):
            self.harness.advance(1.5)

    def delete_log(self) -> None:
        """Whoever serves it goes on if that fails: what is there by the next start is set aside then."""
        del self.models[PLAIN], self.harness.expected[PLAIN]
        assert self.harness.store is not None
        with suppress(OSError, HeadraceError):
            self.harness.store.delete(PLAIN)
        for _ in range(5):
            self.harness.advance(1.5)
        self.checkpoint()

    def make_anew(self) -> None:
        """A topic of the same name, with another id: what fails, of the deletion or the creation, is tried again."""
        self.delete_log()
        topic_id, chosen = b"anew".ljust(16, b"."), settings(**SETTINGS[PLAIN])
        assert self.harness.store is not None
        if self.harness.store.get(PLAIN) is not None:
            self.harness.store.delete(PLAIN)
        try:
            self.harness.store.create(PLAIN, topic_id, chosen)
        except (OSError, HeadraceError):
            self.harness.store.create(PLAIN, topic_id, chosen)
        self.harness.expected[PLAIN] = topic_id, chosen
        self.models[PLAIN] = Model(after=self._count)
        self.append(4)

    def thin_out(self) -> None:
        """Little is wanted of most commit files."""
        self.append(12)
        self.compact()
        self.log(PLAIN).delete_before(26, self._deleted(PLAIN, 26))
        self.harness.settle()

    def rewrite(self) -> None:
        for _ in range(60):
            self.harness.advance(0.5)

    def has_rewritten(self) -> bool:
        return isinstance(self.harness.store, SharedStore) and self.harness.store.rewriter.copied_bytes > 0

    def has_rolled(self) -> bool:
        log = self.log(PLAIN)
        if isinstance(log, PartitionedLog):
            return len(log.segments) == 3
        assert isinstance(self.harness.store, SharedStore)
        return self.harness.store.commit_log.number > 2

    def begins_at(self, offset: int) -> bool:
        return self.log(PLAIN).start_offset >= offset

    def has_compacted(self) -> bool:
        return len(self._records(self.log(COMPACT))) < 20

    def fail_a_sync(self) -> None:
        """Its last records are in the page cache alone; the process dies of it."""
        place = "/data/@commitlog" if self.harness.layout == SHARED else f"/data/{PLAIN.topic}/{PLAIN}"
        logs = sorted(name for name in self.disk.list(place) if name.endswith(".log"))
        self.disk.fail_sync(f"{place}/{logs[-1]}")
        self.append(1)
        assert self.log(PLAIN).offline is not None
        self.kill()

    def evict(self) -> None:
        """A new process has everything before it, and nothing in the page cache."""
        self.kill()
        self.start()
        for inside in ("/data/@commitlog", *(f"/data/{where.topic}/{where}" for where in self.models)):
            if self.disk.exists(inside):
                for name in self.disk.list(inside):
                    self.disk.evict(f"{inside}/{name}")

    def read(self) -> None:
        """What cannot be read is tried again."""
        for where in self.models:
            try:
                self._records(self.log(where))
            except (OSError, HeadraceError):
                self._records(self.log(where))

    def _records(self, log: Log) -> dict[int, tuple[bytes | None, bytes | None]]:
        """As consumers read them, who have what is not in the page cache read ahead."""
        found: dict[int, tuple[bytes | None, bytes | None]] = {}
        offset = log.start_offset
        while offset < log.written_offset:
            read = log.read(offset, 1 << 20, log.written_offset)
            if not are_warm(self.disk, [*read.wanted, *read.slices], lambda: None):
                self.harness.settle()
                read = log.read(offset, 1 << 20, log.written_offset, warm=True)
            before = offset
            for header, view in batches(memoryview(b"".join(piece.read() for piece in read.slices))):
                found |= {record.offset: (record.key, record.value) for record in kernel.records(view)}
                offset = header.next_offset
            assert offset > before, f"no progress at {offset}"
        return found

    def start(self) -> None:
        self.harness.open()
        self.harness.settle()

    # What happens to it.

    def kill(self) -> None:
        if self.harness.store is not None:
            self.disk.trouble = None
            self.harness.store.abandon()
        self.disk.release()

    def go_on(self) -> None:
        """As long as it runs, it takes records."""
        if self.harness.store is not None and self.harness.store.phase is Phase.OPEN:
            self.note_durable()
            self.append(2)

    def end(self, ending: str, seed: int) -> None:
        """Whatever a process does that could not start or stop: it closes what it has opened, and ends."""
        if ending in (STOPPED, STOPPED_AND_DARK) and self.harness.store is not None:
            self.clean = self.harness.store.close() or self.clean
        if ending in (DARK, STOPPED_AND_DARK):
            self.lose_power(seed)
        else:
            self.kill()

    def lose_power(self, seed: int) -> None:
        self.kill()
        self.disk.crash(seed)

    def check(self) -> None:
        """On a store that has been opened in health."""
        for where, model in self.models.items():
            log = self.log(where)
            assert log.offline is None
            end = min(max(model.written, default=-1) + 1 if self.clean else model.durable, model.cut)
            assert model.start <= log.start_offset <= max(model.start, model.asked_start, *self._anew(model)), where
            assert log.end_offset >= end, f"{where}: offsets from {log.end_offset} to {end - 1} are gone"
            found = self._records(log)
            assert all(int(value[1:]) > model.after for _, value in found.values() if value), where
            for offset, record in model.written.items():
                if offset in found and offset < model.cut:
                    assert found[offset] == record, where
            wanted = {at: each for at, each in model.written.items() if log.start_offset <= at < end}
            if where == COMPACT:  # the last record of each key is still there, or a later one
                for at, (key, value) in {key: (at, (key, value)) for at, (key, value) in wanted.items()}.values():
                    assert any(f >= at and each[0] == key for f, each in found.items()), f"{where}: {value!r} is gone"
            else:
                assert {at: each for at, each in found.items() if at in wanted} == wanted, where

    def _anew(self, model: Model) -> list[int]:
        return [100] if model.cut == 0 else []


Step = Callable[[World], None]


@dataclass(frozen=True, slots=True)
class Operation:
    """What is done before it, what it does, and what comes before a broker can start on the folder again."""

    prepare: Step
    operate: Step
    heal: Step = lambda _: None
    layouts: tuple[str, ...] = (PARTITIONED, SHARED)
    achieves: Callable[[World], bool] = lambda _: True
    """Whether it has done what it is here for, on a disk without trouble."""


class Walk:
    """One operation on one layout; `calls` are the disk calls that it has, `errors` the failures that were tried."""

    def __init__(self, layout: str, operation: Operation) -> None:
        self._layout = layout
        self._operation = operation
        self.errors: Counter[str] = Counter()
        self.by_name = self._count()
        self.calls = self.by_name.total()

    def _world(self) -> World:
        world = World(self._layout)
        world.fill()
        self._operation.prepare(world)
        return world

    def _count(self) -> Counter[str]:
        world = self._world()
        world.disk.trouble = calls = DiskCalls()
        self._operation.operate(world)
        world.disk.trouble = None
        assert self._operation.achieves(world)
        return calls.by_name

    def fail(self, nth: int, number: int, ending: str, seed: int) -> None:
        """Fail the call of that number; then end as said."""
        world = self._world()
        world.disk.trouble = calls = DiskCalls(nth, number)
        try:
            try:
                self._operation.operate(world)
                world.disk.trouble = None
                world.go_on()
            except (OSError, HeadraceError):
                world.disk.trouble = None
            self.errors[errno.errorcode[number]] += 1
            world.end(ending, seed)
            self._operation.heal(world)
            world.harness.open()
            world.harness.settle()
            world.check()
        except Exception as error:
            where = f"call {nth} of {self.calls}, {calls.failed}"
            raise AssertionError(f"{where}, {ending}, seed {seed}: {error!r}") from error
