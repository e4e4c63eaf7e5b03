"""Which brokers a registry names, on virtual time; and how it hears whether etcd still has its cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from headrace.cluster import keys
from headrace.cluster.image import LEAVING, Broker, encode_broker
from headrace.cluster.view import ClusterView
from headrace.coordination.embedded import EmbeddedCoordination
from headrace.registry.cluster_view import AdvertisedView
from headrace.registry.pulse import PULSE_SECONDS, SILENT_SECONDS, Pulse
from headrace.virtual.clock import VirtualClock
from proving import proves

PREFIX = "/headrace/c/"
DROP_AFTER_S = 30.0
TURNS = 10
"""Of the loop, in which a pulse is asked for and answered."""


class Brokers:
    """The keys of some brokers, written as they would."""

    def __init__(self, coordination: EmbeddedCoordination, view: ClusterView) -> None:
        self._coordination = coordination
        self._view = view

    async def come(self, number: int, state: str = "live") -> None:
        broker = replace(Broker(number, {}, "i", 0), state=state)
        await self._seen(await self._coordination.put(keys.broker_key(PREFIX, number), encode_broker(broker)))

    async def go(self, number: int) -> None:
        await self._seen(await self._coordination.delete(keys.broker_key(PREFIX, number)))

    async def _seen(self, revision: int) -> None:
        await self._view.wait_for(lambda image: image.revision >= revision, 10)


@asynccontextmanager
async def followed(folder: Path, drop_after_s: float) -> AsyncIterator[tuple[VirtualClock, Brokers, AdvertisedView]]:
    clock = VirtualClock()
    coordination = EmbeddedCoordination(str(folder / "keys.sqlite"), clock)
    view = ClusterView(coordination, PREFIX, clock, _unexpected)
    await view.start()
    told = AdvertisedView(view, clock, drop_after_s)
    try:
        yield clock, Brokers(coordination, view), told
    finally:
        told.close()
        await view.close()
        await coordination.close()


def _unexpected(error: BaseException) -> None:
    raise AssertionError(error)


@proves("R1")
def test_a_broker_without_its_lease_is_dropped_when_the_time_that_was_set_is_over(tmp_path: Path) -> None:
    async def body() -> None:
        async with followed(tmp_path, DROP_AFTER_S) as (clock, brokers, told):
            for number in (1, 2, 3):
                await brokers.come(number)
            await brokers.go(1)
            clock.advance(DROP_AFTER_S / 2)
            await brokers.go(2)
            assert set(told.image.brokers) == {1, 2, 3}
            await brokers.come(1)
            clock.advance(DROP_AFTER_S * 0.6)
            assert set(told.image.brokers) == {1, 2, 3}, "1 is back in time; 2 has a while to go"
            kept = told.image
            clock.advance(DROP_AFTER_S * 0.6)
            assert set(told.image.brokers) == {1, 3}
            assert set(kept.brokers) == {1, 2, 3}, "an image is replaced, not edited"
            await brokers.come(3, LEAVING)
            await brokers.go(3)
            assert set(told.image.brokers) == {1}, "it said that it would go"

    asyncio.run(body())


@proves("R1")
def test_a_broker_is_dropped_with_its_lease_unless_told_otherwise(tmp_path: Path) -> None:
    async def body() -> None:
        async with followed(tmp_path, 0) as (_, brokers, told):
            await brokers.come(1)
            await brokers.come(2)
            await brokers.go(1)
            assert set(told.image.brokers) == {2}

    asyncio.run(body())


def test_a_pulse_tells_silence_a_lost_key_and_another_cluster(tmp_path: Path) -> None:
    async def body() -> None:
        clock = VirtualClock()
        coordination = EmbeddedCoordination(str(tmp_path / "keys.sqlite"), clock)
        await coordination.put(keys.CLUSTER_ID, keys.encode("ours"))
        failures: list[BaseException] = []
        pulse = Pulse(coordination, clock, "ours", failures.append)
        running = asyncio.get_running_loop().create_task(pulse.run())

        async def beat(count: int) -> None:
            for _ in range(count):
                clock.advance(PULSE_SECONDS)
                for _ in range(TURNS):
                    await asyncio.sleep(0)

        await beat(3)
        assert (pulse.silent, pulse.trouble) == (False, "")
        await coordination.delete(keys.CLUSTER_ID)
        await beat(int(SILENT_SECONDS / PULSE_SECONDS) + 2)
        assert (pulse.silent, "is gone" in pulse.trouble) == (True, True)
        await coordination.put(keys.CLUSTER_ID, keys.encode("ours"))
        await beat(2)
        assert (pulse.silent, pulse.trouble, failures) == (False, "", [])
        await coordination.put(keys.CLUSTER_ID, keys.encode("another"))
        await beat(2)
        assert "etcd holds cluster 'another' now" in str(failures[0])
        assert running.done()
        await coordination.close()

    asyncio.run(body())
