"""Following the cluster's keys through failures of coordination and keys that cannot be read."""

from __future__ import annotations

import asyncio
import logging

import pytest

from cluster.participants import Cluster, run
from headrace.cluster import keys
from headrace.errors import CoordinationError
from headrace.ports.coordination import Listing
from proving import proves


@proves("G16")
def test_a_listing_that_fails_after_compaction_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(cluster: Cluster) -> None:
        machine = cluster[1]
        await machine.start()
        coordination = machine.participant.coordination
        real, failures = coordination.list, [CoordinationError("no answer"), CoordinationError("no answer")]

        async def listed(prefix: str) -> Listing:
            if failures:
                raise failures.pop()
            found: Listing = await real(prefix)
            return found

        monkeypatch.setattr(coordination, "list", listed)
        cluster.store.break_watches()
        other = cluster.store.client("elsewhere", cluster.loop.clock)
        await other.put(keys.draining_key(machine.participant.prefix, 7), b"{}")
        await other.compact(await other.put("elsewhere", b""))
        await cluster.until(lambda: 7 in machine.participant.view.image.controls.draining)
        assert not failures

    run(1, body)


def test_a_key_that_cannot_be_read_is_told_of_and_does_no_harm_once_it_is_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body(cluster: Cluster) -> None:
        machine = cluster[1]
        await machine.start()
        coordination, prefix = machine.participant.coordination, machine.participant.prefix
        bad = keys.partition_key(prefix, "t", 0)
        await machine.process.run(coordination.put(bad, b"no JSON"))
        await asyncio.sleep(5)
        told = [record.message for record in caplog.records if record.name == "headrace.cluster.view"]
        assert len(told) < 3
        assert bad in told[0]
        await machine.process.run(coordination.delete(bad))
        await machine.process.run(coordination.put(keys.draining_key(prefix, 7), b"{}"))
        await cluster.until(lambda: 7 in machine.participant.view.image.controls.draining)

    with caplog.at_level(logging.WARNING):
        run(1, body)
