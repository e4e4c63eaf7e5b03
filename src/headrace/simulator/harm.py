"""What can be done to machines, links and coordination of a simulated cluster; everything ends after so many seconds.

Page caches: in the regime `spare` one machine at a time loses its power, and the next only when all replicas are in
sync again, so that nothing that was acknowledged may be lost at any level; in the regime `any` it happens at all times,
and to all machines at once, and then topics that rely on page caches may lose.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

from headrace.cluster import keys
from headrace.cluster.image import Image, PartitionState
from headrace.cluster.orders import plan_moves
from headrace.ports.coordination import Delete, Put
from headrace.simulator.connection import CLIENT
from headrace.simulator.machine import Machine
from headrace.storage.log import TopicPartition
from headrace.virtual.clock import VirtualClock
from headrace.virtual.coordination import CoordinationStore
from headrace.virtual.network import VirtualNetwork

SPARE: Final = "spare"
ANY: Final = "any"
PATIENCE_SECONDS: Final = 3.0
LOOK_SECONDS: Final = 0.005
MEND_SECONDS: Final = 1.0


class Scene(Protocol):
    """The cluster that harm is done to, seen from outside."""

    clock: VirtualClock
    network: VirtualNetwork
    store: CoordinationStore
    machines: list[Machine]

    def all_in_sync(self) -> bool: ...
    def image(self) -> Image: ...
    def some_partition(self, chance: random.Random) -> TopicPartition | None: ...
    def state_of(self, where: TopicPartition) -> PartitionState | None: ...
    def controller(self) -> Machine | None: ...
    def registered(self, machine: Machine) -> str:
        """The incarnation that the machine is registered with; empty if it is not."""
        ...


class Harm:
    def __init__(
        self, scene: Scene, chance: random.Random, regime: str, *, lag_seconds: float, lease_seconds: float
    ) -> None:
        self.random = chance
        self.regime = regime
        self.lag_seconds = lag_seconds
        self.lease_seconds = lease_seconds
        self.clock = scene.clock
        self.network = scene.network
        self.store = scene.store
        self.machines = scene.machines
        self.all_in_sync = scene.all_in_sync
        self.image = scene.image
        self.state_of = scene.state_of
        self.controller = scene.controller
        self.registered = scene.registered
        self.running = False
        """Whether new harm may be done."""
        self.keeps_power: Callable[[Machine], bool] = lambda _: False
        """Of a machine that would lose too much with its power: it loses its process instead."""
        self._scene = scene
        self._ends: dict[int, Callable[[], object]] = {}
        self._number = 0

    def some_partition(self) -> TopicPartition | None:
        return self._scene.some_partition(self.random)

    def some_machine(self) -> Machine:
        return self.random.choice(self.machines)

    def leader_of(self, where: TopicPartition | None) -> Machine | None:
        state = None if where is None else self.state_of(where)
        return next((each for each in self.machines if state is not None and each.id == state.leader), None)

    def until(self, seconds: float, end: Callable[[], object]) -> None:
        number = self._number = self._number + 1
        self._ends[number] = end
        self.clock.call_later(seconds, lambda: self._end(number))

    def _end(self, number: int) -> None:
        end = self._ends.pop(number, None)
        if end is not None:
            end()

    def heal(self) -> None:
        """End all of it; nothing is left broken but what was lost."""
        self.running = False
        for number in list(self._ends):
            self._end(number)
        for machine in self.machines:
            machine.resume()
            machine.start()

    # Machines.

    def kill(self, machine: Machine, seconds: float) -> str:
        machine.wanted = False
        machine.kill()
        self.until(seconds, machine.start)
        return machine.name

    def kill_once(self, whom: Callable[[], Machine | None], seconds: float) -> None:
        """Kill a machine a moment after it can be named."""
        patience, delay = self.clock.now() + PATIENCE_SECONDS + seconds, self.random.uniform(0, 0.1)

        def kill(found: Machine) -> None:
            if self.running:
                self.kill(found, seconds)

        def look() -> None:
            found = whom()
            if found is not None:
                self.clock.call_later(delay, partial(kill, found))
            elif self.running and self.clock.now() < patience:
                self.clock.call_later(LOOK_SECONDS, look)

        look()

    def cut_power(self, machine: Machine, seconds: float) -> None:
        machine.wanted = False
        if self.keeps_power(machine):
            machine.kill()
        else:
            machine.cut_power()
        self.until(seconds, machine.start)

    def lose_what_may_be(self, machine: Machine, seconds: float) -> None:
        """Its page cache, if that may be, or else its process."""
        if self.regime == ANY or self.all_in_sync():
            self.cut_power(machine, seconds)
        else:
            self.kill(machine, seconds)

    def pause(self, machine: Machine, seconds: float) -> str | None:
        if machine.paused:
            return None
        process = machine.process
        machine.pause()
        self.until(seconds, lambda: machine.resume() if machine.process is process else None)
        return machine.name

    def stop(self, machine: Machine, seconds: float) -> str | None:
        if machine.participant is None or machine.stopping or machine.paused:
            return None
        machine.wanted = False
        machine.stop()
        self.until(seconds, machine.start)
        return machine.name

    def slow_disk(self, machine: Machine, sync_seconds: float, seconds: float) -> str:
        machine.sync_seconds = (sync_seconds / 2, sync_seconds)
        self.until(seconds, lambda: setattr(machine, "sync_seconds", machine.quick_sync_seconds))
        return machine.name

    # Orders, of an operator whom nothing keeps from coordination.

    def order_move(self, where: TopicPartition, target: Sequence[int] | None) -> None:
        """None: the move under way is cancelled."""
        targets = {(where.topic, where.partition): target}
        plan = plan_moves(self.image(), targets, keep_count=True, refusals={})
        for step in plan.steps if self.store.running else ():
            self.store.transact(step.compares, step.actions)

    def drain(self, machine: Machine, seconds: float) -> None:
        key = keys.draining_key(self.image().prefix, machine.id)
        self.store.transact((), (Put(key, keys.encode({})),))
        self.until(seconds, lambda: self.store.transact((), (Delete(key),)))

    # Links.

    def cut(self, one: Machine, other: Machine, seconds: float) -> None:
        self.network.cut(one.name, other.name)
        self.until(seconds, lambda: self.network.heal(one.name, other.name))

    def cut_one_way(self, source: Machine, target: Machine, seconds: float) -> None:
        self.network.cut_one_way(source.name, target.name)
        self.until(seconds, lambda: self.network.heal(source.name, target.name))

    def slow(self, one: Machine, other: Machine, delay_seconds: float, seconds: float) -> None:
        self.network.slow(one.name, other.name, (0.0, delay_seconds))
        self.until(seconds, lambda: self.network.slow(one.name, other.name, None))

    def hush(self, machine: Machine, seconds: float) -> None:
        """Its clients do not reach it."""
        self.network.cut_one_way(CLIENT, machine.name)
        self.until(seconds, lambda: self.network.heal(machine.name, CLIENT))

    def reset(self, one: Machine, other: Machine) -> None:
        """What was under way between them is lost."""
        self.network.reset(one.name, other.name)

    def cut_off(self, machine: Machine, seconds: float) -> None:
        """From coordination."""
        self.store.cut(machine.name)
        self.until(seconds, lambda: self.store.heal(machine.name))

    def isolate(self, machine: Machine, seconds: float, *, from_clients: bool) -> None:
        peers = [each.name for each in self.machines if each is not machine]
        for peer in [*peers, CLIENT] if from_clients else peers:
            self.network.cut(machine.name, peer)
            self.until(seconds, partial(self.network.heal, machine.name, peer))
