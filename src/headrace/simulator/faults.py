"""Faults drawn from a seed. Each run has its own choice of kinds and its own pace, so that rare ones meet in some.

Every fault ends by itself after a drawn time; `heal` ends them all. A machine that loses its power takes its page cache
with it: in the regime `spare` that happens to one machine at a time, and to the next only when all replicas are in sync
again, so that nothing that was acknowledged may be lost at any level; in the regime `any` at all times, and to all
machines at once, and then topics that rely on page caches may lose.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Final

from headrace.cluster.image import PartitionState
from headrace.sim.clock import VirtualClock
from headrace.sim.coordination import CoordinationStore
from headrace.sim.network import MemoryNetwork
from headrace.simulator.courses import COURSES, OF_PAGE_CACHES, Cast, Course
from headrace.simulator.history import Trace
from headrace.simulator.load import CLIENT
from headrace.simulator.machine import Machine
from headrace.simulator.scenario import Scenario
from headrace.storage.log import TopicPartition

SPARE: Final = "spare"
ANY: Final = "any"
BURST_SECONDS: Final = 0.02
PATIENCE_SECONDS: Final = 4.0
LOOK_SECONDS: Final = 0.005
STEP_LOOK_SECONDS: Final = 0.001
MEND_SECONDS: Final = 1.0

SIMPLE: Final = (
    "kill",
    "kill leader",
    "kill two leaders",
    "return before leader",
    "kill controller",
    "lose power",
    "lose all power",
    "pause",
    "pause leader",
    "pause controller",
    "stop",
    "cut",
    "cut one way",
    "isolate",
    "reset",
    "slow link",
    "slow disk",
    "cut off coordination",
    "stop coordination",
    "lose answers",
    "late changes",
    "break watches",
    "compact",
    "cut clients",
)
FAIL_SYNC: Final = "fail sync"
FLIP_BYTE: Final = "flip byte"
FLIPS_MAX: Final = 4
UNHEARD_SHARE: Final = 0.25
KINDS: Final = (*SIMPLE, FAIL_SYNC, FLIP_BYTE, *COURSES)


class Faults:
    def __init__(
        self,
        scenario: Scenario,
        clock: VirtualClock,
        network: MemoryNetwork,
        store: CoordinationStore,
        machines: list[Machine],
        trace: Trace,
        all_in_sync: Callable[[], bool],
        some_partition: Callable[[random.Random], TopicPartition | None],
        state_of: Callable[[TopicPartition], PartitionState | None],
        controller: Callable[[], Machine | None],
    ) -> None:
        self.random = random.Random(f"{scenario.seed} faults")
        self.lag_seconds = scenario.settings["replica.lag.time.max.ms"] / 1000
        self.lease_seconds = scenario.settings["broker.lease.ms"] / 1000
        self.counts: Counter[str] = Counter()
        self.list: list[str] = []
        self.regime = self.random.choice((SPARE, SPARE, ANY))
        self._cached = [
            where for topic in scenario.topics if topic.durability != "disk" for where in topic.all_partitions()
        ]
        self._clock = clock
        self._network = network
        self._store = store
        self._machines = machines
        self._trace = trace
        self._all_in_sync = all_in_sync
        self._some_partition = some_partition
        self.state_of = state_of
        self._controller = controller
        self._kinds = self._choose(scenario.courses)
        if scenario.syncs_fail:
            self._kinds += [FAIL_SYNC] * max(1, len(self._kinds) // 2)
        # Where page caches go at any time, two replicas may have lost what a third has damaged.
        if scenario.bytes_flip and (self.regime == SPARE or not self._cached):
            self._kinds += [FLIP_BYTE] * max(1, len(self._kinds) // 4)
        self._unheard = random.Random(f"{scenario.seed} unheard")
        self._worn = machines[scenario.seed // 8 % len(machines)]
        """The machine whose disk wears out: damage is found when it is read, so no other may have any."""
        self._mean_seconds = self.random.choice((0.2, 0.5, 1.0, 2.0))
        self._burst_share = self.random.choice((0.0, 0.3, 0.6))
        self._longest_seconds = self.random.choice((0.5, 2.0, 5.0))
        self._ends: dict[int, Callable[[], None]] = {}
        self._number = 0
        self._running = self._in_course = False

    def _choose(self, courses: tuple[str, ...]) -> list[str]:
        """A few kinds, so that they meet often; courses take up a good part of them, or all."""
        kinds = self._choose_simple()
        if not courses:
            return kinds
        return list(courses) if self.random.random() < 0.5 else [*kinds, *courses * 2]

    def _choose_simple(self) -> list[str]:
        """Where power may be lost at all times, it is."""
        kinds = self.random.sample(SIMPLE, self.random.randint(1, 8))
        if self.regime == ANY:
            return [*kinds, self.random.choice(("lose power", "lose all power"))]
        if self.random.random() < 0.4:
            kinds.append("lose power")
        return [kind for kind in kinds if kind != "lose all power"] or ["kill"]

    def start(self) -> None:
        self._running = True
        self._next()

    def heal(self) -> None:
        """End every fault; nothing is left broken but what was lost."""
        self._running = False
        for number in list(self._ends):
            self._end(number)
        for machine in self._machines:
            machine.resume()
            machine.start()
        if FAIL_SYNC in self._kinds:
            self._mend_disks()

    def _mend_disks(self) -> None:
        """Whoever looks after the machines restarts a broker whose log is offline, once its disk is well again."""
        for machine in self._machines:
            machine.mend_disk()
        self._clock.call_later(MEND_SECONDS, self._mend_disks)

    def _next(self) -> None:
        """Some come at once after another, while what that one began is still under way."""
        is_burst = self.random.random() < self._burst_share
        mean_seconds = BURST_SECONDS if is_burst else self._mean_seconds
        self._clock.call_later(self.random.expovariate(1 / mean_seconds), self._strike)

    def _strike(self) -> None:
        if not self._running:
            return
        kind = self.random.choice(self._kinds)
        seconds = self.random.uniform(0, self._longest_seconds)
        what = self._apply(kind, seconds)
        if what is not None:
            self.counts[kind] += 1
            line = f"{kind} {what} for {seconds:.2f} s".replace("  ", " ")
            self.list.append(f"{self._clock.now():8.3f} {line}")
            self._trace.note(self._clock.now(), f"fault: {line}")
        self._next()

    def _until(self, seconds: float, end: Callable[[], None]) -> None:
        self._number += 1
        number = self._number
        self._ends[number] = end
        self._clock.call_later(seconds, lambda: self._end(number))

    def _end(self, number: int) -> None:
        end = self._ends.pop(number, None)
        if end is not None:
            end()

    def _machine(self) -> Machine:
        return self.random.choice(self._machines)

    def _apply(self, kind: str, seconds: float) -> str | None:
        """Do it; answers to whom, None if there was nobody."""
        if kind in COURSES:
            return self._begin_course(kind)
        match kind.split():
            case ["kill", "two", "leaders"]:
                return self._kill_two_leaders(seconds)
            case ["return", "before", "leader"]:
                return self._return_before_leader(seconds)
            case ["kill" | "pause" as what, *who]:
                machine = self._whom(who)
                if machine is None or not machine.up:
                    return None
                return self.kill(machine, seconds) if what == "kill" else self._pause(machine, seconds)
            case ["lose", "power"]:
                return self._lose_power(seconds)
            case ["lose", "all", "power"]:
                for machine in self._machines:
                    self._cut_power(machine, seconds * self.random.random())
                return ""
            case ["stop"]:
                return self._stop(self._machine(), seconds)
            case ["slow", "disk"]:
                return self._slow_disk(self._machine(), seconds)
            case ["fail", "sync"]:
                return self._fail_sync(self._machine(), seconds)
            case ["flip", "byte"]:
                return self._flip_byte(self._worn, seconds)
            case ["cut" | "isolate" | "reset" | "slow", *_]:
                return self._apply_to_links(kind, seconds)
            case _:
                return self._apply_to_coordination(kind, seconds)

    def _whom(self, who: list[str]) -> Machine | None:
        if who == ["leader"]:
            where = self._some_partition(self.random)
            return None if where is None else self._leader_of(where)
        return self._controller() if who == ["controller"] else self._machine()

    def _leader_of(self, where: TopicPartition) -> Machine | None:
        state = self.state_of(where)
        return next((each for each in self._machines if state is not None and each.id == state.leader), None)

    # Courses.

    def _begin_course(self, kind: str) -> str | None:
        """One at a time."""
        where = self._some_partition(self.random)
        if where is not None and kind in OF_PAGE_CACHES and self._cached:
            where = self.random.choice(self._cached)
        state = None if where is None else self.state_of(where)
        leader = None if where is None else self._leader_of(where)
        if self._in_course or where is None or state is None or leader is None:
            return None
        others = [machine for machine in self._machines if machine is not leader]
        if not all(machine.participant and machine.id in state.isr for machine in self._machines):
            return None
        follower, third = self.random.sample(others, 2)
        self._in_course = True
        self._go_on(COURSES[kind](self, Cast(where, leader, follower, third)))
        return f"{leader.name} {follower.name} {third.name} in {where}"

    def _go_on(self, course: Course) -> None:
        step = next(course, None) if self._running else None
        if step is None:
            self._in_course = False
        elif callable(step):
            self._await(course, step, self._clock.now() + PATIENCE_SECONDS)
        else:
            self._clock.call_later(step, partial(self._go_on, course))

    def _await(self, course: Course, condition: Callable[[], bool], patience: float) -> None:
        if condition():
            self._go_on(course)
        elif self._running and self._clock.now() < patience:
            self._clock.call_later(STEP_LOOK_SECONDS, partial(self._await, course, condition, patience))
        else:
            self._in_course = False

    # Machines.

    def kill(self, machine: Machine, seconds: float) -> str:
        machine.wanted = False
        machine.kill()
        self._until(seconds, machine.start)
        return machine.name

    def _kill_two_leaders(self, seconds: float) -> str | None:
        """The next leader dies soon after it was elected, before it has told all that it knows."""
        where = self._some_partition(self.random)
        first = None if where is None else self._leader_of(where)
        if where is None or first is None or not first.up:
            return None
        self.kill(first, seconds + PATIENCE_SECONDS)

        def next_leader() -> Machine | None:
            leader = self._leader_of(where)
            return leader if leader is not None and leader is not first and leader.up else None

        self._kill_once(next_leader, seconds)
        return f"{first.name} and who follows in {where}"

    def _return_before_leader(self, seconds: float) -> str | None:
        """A follower restarts, without its page cache where that may be, and its leader dies while it catches up."""
        where = self._some_partition(self.random)
        leader = None if where is None else self._leader_of(where)
        others = [machine for machine in self._machines if machine is not leader and machine.up]
        if where is None or leader is None or not others:
            return None
        follower = self.random.choice(others)
        self.lose_what_may_be(follower, seconds)
        self._kill_once(lambda: self._leader_of(where) if follower.participant is not None else None, seconds)
        return f"{follower.name} in {where}"

    def _kill_once(self, whom: Callable[[], Machine | None], seconds: float) -> None:
        """Kill a machine a moment after it can be named."""
        patience, delay = self._clock.now() + PATIENCE_SECONDS + seconds, self.random.uniform(0, 0.1)

        def look() -> None:
            found = whom()
            if found is not None:
                self._clock.call_later(delay, partial(self._kill_while_running, found, seconds))
            elif self._running and self._clock.now() < patience:
                self._clock.call_later(LOOK_SECONDS, look)

        look()

    def _kill_while_running(self, machine: Machine, seconds: float) -> None:
        if self._running:
            self.kill(machine, seconds)

    def lose_what_may_be(self, machine: Machine, seconds: float) -> None:
        if self.regime == ANY or self._all_in_sync():
            self._cut_power(machine, seconds)
        else:
            self.kill(machine, seconds)

    def _lose_power(self, seconds: float) -> str | None:
        if self.regime == SPARE and not self._all_in_sync():
            return None
        machine = self._machine()
        self._cut_power(machine, seconds)
        return machine.name

    def _cut_power(self, machine: Machine, seconds: float) -> None:
        machine.wanted = False
        machine.cut_power()
        self._until(seconds, machine.start)

    def _pause(self, machine: Machine, seconds: float) -> str | None:
        if machine.paused:
            return None
        process = machine.process
        machine.pause()
        self._until(seconds, lambda: machine.resume() if machine.process is process else None)
        return machine.name

    def _stop(self, machine: Machine, seconds: float) -> str | None:
        if machine.participant is None or machine.stopping or machine.paused:
            return None
        machine.wanted = False
        machine.stop()
        self._until(seconds, machine.start)
        return machine.name

    def _slow_disk(self, machine: Machine, seconds: float) -> str:
        machine.sync_seconds = (0.0, self.random.choice((0.05, 0.5, 3.0)))
        self._until(seconds, lambda: setattr(machine, "sync_seconds", machine.quick_sync_seconds))
        return machine.name

    def _fail_sync(self, machine: Machine, seconds: float) -> str | None:
        if not machine.up:
            return None
        path = machine.fail_sync(unheard=self._unheard.random() < UNHEARD_SHARE)
        self._until(seconds + MEND_SECONDS, machine.mend_disk)
        return f"{machine.name} {path}"

    def _flip_byte(self, machine: Machine, seconds: float) -> str | None:
        """While no process runs there: one that runs has what it wrote in its page cache."""
        if self.counts[FLIP_BYTE] >= FLIPS_MAX or machine.stopping:
            return None
        if machine.up:
            self.kill(machine, seconds)
        return machine.flip_byte()

    # Links.

    def cut(self, one: Machine, other: Machine, seconds: float) -> None:
        self._network.cut(one.name, other.name)
        self._until(seconds, lambda: self._network.heal(one.name, other.name))

    def cut_one_way(self, source: Machine, target: Machine, seconds: float) -> None:
        self._network.cut_one_way(source.name, target.name)
        self._until(seconds, lambda: self._network.heal(source.name, target.name))

    def slow(self, one: Machine, other: Machine, delay_seconds: float, seconds: float) -> None:
        self._network.slow(one.name, other.name, (0.0, delay_seconds))
        self._until(seconds, lambda: self._network.slow(one.name, other.name, None))

    def hush(self, machine: Machine, seconds: float) -> None:
        self._network.cut_one_way(CLIENT, machine.name)
        self._until(seconds, lambda: self._network.heal(machine.name, CLIENT))

    def reset(self, one: Machine, other: Machine) -> None:
        """What was under way between them is lost."""
        self._network.reset(one.name, other.name)

    def cut_off(self, machine: Machine, seconds: float) -> None:
        self._store.cut(machine.name)
        self._until(seconds, lambda: self._store.heal(machine.name))

    def _apply_to_links(self, kind: str, seconds: float) -> str | None:
        network = self._network
        one, other = self.random.sample(self._machines, 2)
        match kind:
            case "cut":
                self.cut(one, other, seconds)
            case "cut one way":
                self.cut_one_way(one, other, seconds)
            case "isolate":
                peers = [machine.name for machine in self._machines if machine is not one]
                if self.random.random() < 0.5:
                    peers.append(CLIENT)
                for peer in peers:
                    network.cut(one.name, peer)
                    self._until(seconds, partial(network.heal, one.name, peer))
                return one.name
            case "cut clients":
                network.cut_one_way(*self.random.choice(((CLIENT, one.name), (one.name, CLIENT))))
                self._until(seconds, lambda: network.heal(one.name, CLIENT))
                return one.name
            case "reset":
                self.reset(one, other)
            case "slow link":
                self.slow(one, other, self.random.choice((0.02, 0.2, 1.0)), seconds)
            case "cut off coordination":
                self.cut_off(one, seconds)
                return one.name
        return f"{one.name} {other.name}"

    # Coordination.

    def _apply_to_coordination(self, kind: str, seconds: float) -> str | None:
        store = self._store
        match kind:
            case "stop coordination":
                if not store.running:
                    return None
                store.stop()
                self._until(seconds, store.start)
            case "lose answers":
                store.answers_lost = self.random.choice((0.1, 0.5, 1.0))
                self._until(seconds, lambda: setattr(store, "answers_lost", 0.0))
            case "late changes":
                store.late = self.random.choice((0.1, 0.5))
                self._until(seconds, lambda: setattr(store, "late", 0.0))
            case "break watches":
                store.break_watches()
            case "compact":
                store.compact(store.revision)
        return ""
