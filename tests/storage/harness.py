"""A store on the real disk or on the fault-injecting one, and batches to put into it."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from headrace.errors import HeadraceError
from headrace.ports.disk import Disk
from headrace.records import kernel
from headrace.records.batch import BatchHeader, batches, read_header
from headrace.records.codecs import Codec
from headrace.records.record import NewRecord
from headrace.settings.values import LogSettings, log_settings
from headrace.storage.commitlog.rewriter import REWRITE_SHARE
from headrace.storage.commitlog.store import SharedStore
from headrace.storage.folder import PARTITIONED, SHARED
from headrace.storage.log import Log, ReadResult, TopicPartition
from headrace.storage.segments.store import PartitionedStore
from headrace.system.disk import SystemDisk
from headrace.virtual.clock import VirtualClock
from headrace.virtual.disk import VirtualDisk

TOPIC = TopicPartition("orders", 0)
TOPIC_ID = bytes(range(16))
DEADLINE_SECONDS = 120.0


def settings(**overrides: object) -> LogSettings:
    """Topic settings by their names with underscores for dots."""
    return log_settings({}, {name.replace("_", "."): str(value) for name, value in overrides.items()})


def batch(
    *values: bytes,
    key: bytes | None = None,
    timestamp_ms: int = 1_750_000_000_000,
    producer: tuple[int, int, int] = (-1, -1, -1),
    codec: Codec = Codec.NONE,
) -> memoryview:
    records: list[NewRecord] = [(timestamp_ms + i, key, value, []) for i, value in enumerate(values or (b"value",))]
    producer_id, producer_epoch, base_sequence = producer
    built = kernel.build(
        records, codec, producer_id=producer_id, producer_epoch=producer_epoch, base_sequence=base_sequence
    )
    return memoryview(built)


def append(log: Log, view: memoryview, epoch: int = 0) -> int:
    return log.append(view, read_header(view), epoch)


def content(result: ReadResult) -> bytes:
    return b"".join(part.file.pread(part.count, part.position) for part in result.slices)


def read_all(log: Log, max_bytes: int = 1 << 20) -> list[tuple[BatchHeader, bytes]]:
    """Every whole batch, by reads that follow each other as a consumer's do."""
    found: list[tuple[BatchHeader, bytes]] = []
    offset = log.start_offset
    while offset < log.written_offset:
        before = offset
        for header, view in batches(memoryview(content(log.read(offset, max_bytes, log.written_offset)))):
            found.append((header, bytes(view)))
            offset = header.next_offset
        assert offset > before, f"no progress at {offset}"
    return found


def values(log: Log) -> list[bytes | None]:
    return [record.value for _, view in read_all(log) for record in kernel.records(view)]


Store = PartitionedStore | SharedStore


@dataclass(slots=True)
class Harness:
    """One data folder that can be stopped, crashed and opened again."""

    disk: Disk
    clock: VirtualClock
    data: str
    loop: asyncio.AbstractEventLoop | None = None
    expected: dict[TopicPartition, tuple[bytes, LogSettings]] = field(default_factory=dict)
    store: Store | None = None
    layout: str = PARTITIONED
    file_bytes: int = 4096
    rewrite_share: float = REWRITE_SHARE
    retention_check_ms: int = 1000
    events: list[tuple[TopicPartition, int]] = field(default_factory=list)
    archived: dict[TopicPartition, int] = field(default_factory=dict)
    commits: bool = True
    """Whether logs are told that everything written is committed."""

    def open(self, **overrides: object) -> Store:
        self.store = self.new_store()
        self.store.on_durable(lambda log: self.events.append((log.topic_partition, log.durable_offset)))
        self.store.open(self.expected)
        self.commit()
        return self.store

    def new_store(self) -> Store:
        if self.layout == SHARED:
            return SharedStore(
                self.disk,
                self.clock,
                self.data,
                checkpoint_ms=60_000,
                retention_check_ms=self.retention_check_ms,
                archived_offset=lambda where: self.archived.get(where, 0),
                file_bytes=self.file_bytes,
                rewrite_share=self.rewrite_share,
            )
        return PartitionedStore(
            self.disk,
            self.clock,
            self.data,
            checkpoint_ms=60_000,
            retention_check_ms=self.retention_check_ms,
            archived_offset=lambda where: self.archived.get(where, 0),
        )

    def topic_id(self, topic: str) -> bytes:
        """In the shared layout frames are told apart by topic ids, so every topic needs its own."""
        if self.layout == PARTITIONED or topic == TOPIC.topic:
            return TOPIC_ID
        return hashlib.blake2b(topic.encode(), digest_size=16).digest()

    def log(self, topic_partition: TopicPartition = TOPIC, /, **overrides: object) -> Log:
        """The log of a new or known partition in an open store."""
        if self.store is None:
            self.open()
        assert self.store is not None
        found = self.store.get(topic_partition)
        if found is None:
            chosen, topic_id = settings(**overrides), self.topic_id(topic_partition.topic)
            found = self.store.create(topic_partition, topic_id, chosen)
            self.expected[topic_partition] = (topic_id, chosen)
        return found

    def write(self) -> list[tuple[Log, HeadraceError]]:
        """Write what was staged; on one node that is all there is to committing it."""
        assert self.store is not None
        failures = self.store.write_staged()
        self.commit()
        return failures

    def commit(self) -> None:
        assert self.store is not None
        if self.commits:
            for log in self.store.logs():
                log.committed_offset = log.written_offset

    def settle(self) -> None:
        """Let everything that was asked of the disk come back."""
        if self.loop is not None:
            self.loop.run_until_complete(self._answered())
        self.clock.run_soon()

    async def _answered(self) -> None:
        assert isinstance(self.disk, SystemDisk)
        end = time.monotonic() + DEADLINE_SECONDS
        self.clock.run_soon()
        while self.disk.unanswered:
            assert time.monotonic() < end, "the disk does not answer"
            await asyncio.sleep(0)

    def advance(self, seconds: float) -> None:
        """Let time pass in ticks."""
        assert self.store is not None
        self.clock.advance(seconds)
        self.store.tick()
        self.settle()

    def reopen(self) -> Log:
        """Clean stop and start."""
        assert self.store is not None
        self.store.close()
        self.open()
        return self.log()

    def kill(self, seed: int | None = None) -> Log:
        """The process dies; with a seed, and on the fault-injecting disk, the machine as well."""
        assert self.store is not None
        self.store.abandon()
        if seed is not None:
            assert isinstance(self.disk, VirtualDisk)
            self.disk.crash(seed)
        self.open()
        return self.log()


def sim_harness(layout: str = PARTITIONED) -> Harness:
    clock = VirtualClock()
    return Harness(VirtualDisk(clock), clock, "/data", layout=layout)


def real_harness(folder: str, layout: str = PARTITIONED) -> Iterator[Harness]:
    loop = asyncio.new_event_loop()
    disk = SystemDisk(loop, sync_helper=True)
    harness = Harness(disk, VirtualClock(), folder, loop, layout=layout)
    yield harness
    if harness.store is not None:
        harness.store.abandon()
    disk.close()
    loop.close()
