"""A start that ends before the broker is registered leaves everything as the last stop left it."""

from __future__ import annotations

import asyncio

import pytest

from cluster.participants import DATA, Cluster, Machine, run
from cluster.test_participant import started
from headrace.cluster import keys
from headrace.cluster.image import NO_LEADER
from headrace.cluster.incarnation import read_incarnation
from headrace.errors import CoordinationError


async def give_up(cluster: Cluster, machine: Machine, *, cancelled: bool) -> None:
    """Open it, register while coordination is out of reach, and end it."""
    participant = machine.make()
    await machine.process.run(participant.open())
    cluster.store.cut(machine.host)
    joining = asyncio.ensure_future(machine.process.run(participant.join({})))
    if cancelled:
        await asyncio.sleep(1)
        joining.cancel()
    with pytest.raises(asyncio.CancelledError if cancelled else CoordinationError):
        await joining
    cluster.store.heal(machine.host)
    await machine.stop()


@pytest.mark.parametrize("cancelled", [True, False], ids=["by a signal", "by an error"])
def test_brokers_that_stopped_in_order_still_lead_after_starts_that_were_given_up(cancelled: bool) -> None:
    async def body(cluster: Cluster) -> None:
        await started(cluster)
        await cluster.create()
        await cluster.produce(b"a")
        for machine in cluster.machines.values():
            await machine.stop()
        for machine in cluster.machines.values():
            await give_up(cluster, machine, cancelled=cancelled)
            found = read_incarnation(machine.disk, DATA)
            assert found is not None
            assert found.clean
        for number in (1, 3):  # the last to stop was in sync alone
            await cluster[number].start()
        await cluster.until(lambda: cluster.state().leader != NO_LEADER)

    run(3, body)


def test_a_registration_whose_answer_did_not_come_is_taken_back() -> None:
    async def body(cluster: Cluster) -> None:
        machine = cluster[1]
        participant = machine.make()
        await machine.process.run(participant.open())
        key = keys.broker_key(participant.prefix, 1)
        joining = asyncio.ensure_future(machine.process.run(participant.join({})))
        for _ in range(1000):
            if cluster.store.get(key) is not None:
                break
            await asyncio.sleep(0.0001)
        assert not joining.done()
        joining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await joining
        await cluster.until(lambda: cluster.store.get(key) is None, 1)
        await machine.stop()

    run(1, body)
