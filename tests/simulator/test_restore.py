"""What a run promises after coordination was put back to an older copy."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from headrace.cluster import keys
from headrace.ports.coordination import Put
from headrace.simulator.broker import CLUSTER
from headrace.simulator.cluster import START_SECONDS, Cluster
from headrace.simulator.history import Trace
from headrace.simulator.restore import Restorer
from headrace.simulator.scenario import draw

SCENARIO = replace(draw(1), quorum=False)
LEASE_SECONDS = SCENARIO.settings["broker.lease.ms"] / 1000
LATER_SECONDS = 1e6
"""By then the restorer would have acted by itself."""
A_KEY = f"{keys.cluster_prefix(CLUSTER)}anything"


@pytest.mark.parametrize("silent", [False, True])
def test_nothing_is_promised_if_leases_end_before_their_brokers_hear_of_a_restore(silent: bool) -> None:
    """Nobody else can tell what they have seen. Who hears of it in time doubts it, and all is promised."""
    cluster = Cluster(SCENARIO, Trace())
    store, machines = cluster.store, cluster.machines

    def has_seen(revision: int) -> bool:
        return all(each.participant and each.participant.view.image.revision >= revision for each in machines)

    async def body() -> None:
        for machine in machines:
            machine.start()
        await cluster._wait(lambda: has_seen(1), START_SECONDS, str)
        restorer = Restorer(cluster.load.clients, CLUSTER, SCENARIO.seed, LATER_SECONDS)
        copy = store.snapshot()
        revision = store.transact((), [Put(A_KEY, b"{}")]).revision
        await cluster._wait(lambda: has_seen(revision), START_SECONDS, str)
        restorer._restore(copy)
        for machine in machines if silent else ():
            store.cut(machine.name)
        await asyncio.sleep(2 * LEASE_SECONDS)

    cluster.loop.run_until_complete(body())
    cluster.close()
    assert cluster.history.counts["restores"] == 1
    assert cluster.history.counts["spared"] == silent
