"""The same links on real sockets, files and syncs: sendfile, pieces as the kernel cuts them, TLS."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from certificates import self_signed
from headrace.records.batch import batches
from headrace.replication.replication import LinkTls, ReplicationSettings
from headrace.storage.log import Log
from partitions.led import batch
from proving import proves
from replication.real import RealGroup


def content(held: Log) -> bytes:
    offset, found = held.start_offset, b""
    while offset < held.written_offset:
        read = held.read(offset, 1 << 30, held.written_offset, warm=True)
        piece = b"".join(part.file.pread(part.count, part.position) for part in read.slices)
        found += piece
        offset = max(header.next_offset for header, _ in batches(memoryview(piece)))
    return found


async def copy(group: RealGroup, partitions: int) -> None:
    """Batches of all sizes, several to a turn; then all replicas are the same, byte for byte."""
    chance = random.Random(5)
    outcomes = []
    for _ in range(60):
        for index in range(partitions):
            size = chance.choice((10, 1000, 70_000, 700_000) if index == 0 else (10, 1000))
            outcomes.append(group.leader.produce(batch(chance.randbytes(size)), index))
        group.leader.partitions.end_turn()
        await asyncio.sleep(0)
    await group.until("answers", lambda: not any(outcome.waiting for outcome in outcomes))
    assert [outcome.calls[0][0] for outcome in outcomes] == [None] * len(outcomes)
    await group.until(
        "watermarks",
        lambda: all(
            broker.partition(index).high_watermark == 60 for broker in group.brokers for index in range(partitions)
        ),
    )
    for index in range(partitions):
        assert len({content(broker.partition(index).log) for broker in group.brokers}) == 1


@proves("F2", "F4")
@pytest.mark.parametrize("layout", ["partitioned", "shared"])
@pytest.mark.parametrize("durability", ["os", "disk"])
def test_replicas_on_real_disks_and_sockets_are_equal(tmp_path: Path, layout: str, durability: str) -> None:
    async def run() -> None:
        settings = ReplicationSettings(window_bytes=1 << 20)
        group = RealGroup(tmp_path, partitions=5, layout=layout, settings=settings, durability=durability)
        try:
            await copy(group, 5)
        finally:
            group.close()

    asyncio.run(run())


def test_links_can_be_encrypted(tmp_path: Path) -> None:
    async def run() -> None:
        certificate = self_signed(tmp_path)
        tls = LinkTls(certificate.server_context(), certificate.client_context())
        group = RealGroup(tmp_path, brokers=2, tls=tls)
        try:
            await copy(group, 1)
        finally:
            group.close()

    asyncio.run(run())
