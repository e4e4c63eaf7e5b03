"""Data folders with everything that a log can have been through, for tests that read them offline."""

from __future__ import annotations

import hashlib
import random

from headrace.records.batch import BatchHeader
from headrace.storage.log import Log, TopicPartition
from headrace.virtual.clock import VirtualClock
from headrace.virtual.disk import VirtualDisk
from storage.harness import Harness, append, batch

START_MS = 1_750_000_000_000
SMALL = {"segment_bytes": 1024, "index_interval_bytes": 150}


class FolderHarness(Harness):
    """Every topic has an id of its own, as in a cluster."""

    def topic_id(self, topic: str) -> bytes:
        return hashlib.blake2b(topic.encode(), digest_size=16).digest()


def folder_harness(layout: str) -> FolderHarness:
    clock = VirtualClock()
    return FolderHarness(VirtualDisk(clock), clock, "/data", layout=layout)


def copied(log: Log, base_offset: int, *values: bytes, epoch: int = 0) -> None:
    """Put a batch where a compacted log has one, as a follower does."""
    view = memoryview(bytearray(batch(*values, timestamp_ms=START_MS + base_offset)))
    view[:8] = base_offset.to_bytes(8, "big")
    view[12:16] = epoch.to_bytes(4, "big")
    log.append_copied(view)


def fill(harness: Harness, *, rounds: int = 30, gaps: bool = True) -> list[TopicPartition]:
    """Partitions: busy with two epochs and an idempotent producer; with gaps; cut; with a raised start; begun anew;
    empty. Written in turns, so that a commit log has them mixed."""
    names = [TopicPartition("busy", 0), TopicPartition("cut", 0), TopicPartition("cut", 1), TopicPartition("late", 0)]
    busy, short, raised, late = (harness.log(each, **SMALL) for each in names)
    sparse = harness.log(TopicPartition("sparse", 0), **SMALL) if gaps else None
    for n in range(rounds):
        append(busy, batch(b"v%d" % n, timestamp_ms=START_MS + n * 7, producer=(9, 0, n)), epoch=n * 3 // rounds)
        for each in (short, raised):
            append(each, batch(b"one", b"two %d" % n, timestamp_ms=START_MS + n))
        if sparse is not None:
            copied(sparse, n * 3 + n % 2, b"s%d" % n)
        harness.write()
    short.truncate(rounds + 1)
    append(short, batch(b"after the cut"), epoch=1)
    raised.delete_before(rounds + 1)
    late.restart_at(1000)
    append(late, batch(b"late"), epoch=2)
    harness.write()
    harness.log(TopicPartition("empty", 0))
    harness.settle()
    return list(harness.expected)


def fill_at_random(harness: Harness, chance: random.Random, *, gaps: bool = True) -> None:
    """Appends, truncations, raised starts and new beginnings of some partitions, in any order."""
    logs = {each: harness.log(each, **SMALL) for each in (TopicPartition(f"t{n // 2}", n % 2) for n in range(6))}
    sequences = dict.fromkeys(logs, 0)
    epochs = dict.fromkeys(logs, 0)
    anew = list(logs)[::3]
    for step in range(chance.randrange(150)):
        where = chance.choice(list(logs))
        log, action = logs[where], chance.random()
        if action < 0.8:
            values = [chance.randbytes(chance.choice((0, 5, 300))) for _ in range(chance.randrange(1, 4))]
            if gaps and chance.random() < 0.2:
                copied(log, log.end_offset + chance.randrange(5), *values, epoch=epochs[where])
            else:
                producer = (chance.randrange(3), 0, sequences[where]) if chance.random() < 0.3 else (-1, -1, -1)
                append(log, batch(*values, timestamp_ms=START_MS + step, producer=producer), epoch=epochs[where])
            sequences[where] += len(values)
        elif action < 0.86:
            log.truncate(chance.randrange(log.start_offset, log.end_offset + 1))
            epochs[where] += 1
        elif action < 0.93:
            log.delete_before(chance.randrange(log.start_offset, log.written_offset + 1))
        elif action < 0.95 and where in anew:
            log.restart_at(log.end_offset + chance.randrange(50))
            epochs[where] += 1
        if chance.random() < 0.5:
            harness.write()
    harness.write()
    harness.settle()


def contents(log: Log) -> list[tuple[BatchHeader, bytes]]:
    """Every batch that holds something wanted. Unlike reads it does not mind that nothing follows to the end."""
    found = log.headers(log.start_offset) if log.start_offset < log.written_offset else iter(())
    batches = [(header, part.file.pread(header.size_bytes, part.position)) for header, part in found]
    return [(header, data) for header, data in batches if header.next_offset > log.start_offset]


def stop(harness: Harness) -> None:
    assert harness.store is not None
    harness.store.close()
    harness.store = None
