"""Faults drawn from a seed. Each run has its own choice of kinds and its own pace, so that rare ones meet in some.

Every fault ends by itself after a drawn time; `heal` ends them all. Courses (`simulator.courses`) are run here, one at
a time: their generator is asked for its next step when what it waits for has come.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Final

from headrace.simulator.connection import CLIENT
from headrace.simulator.courses import COURSES, OF_PAGE_CACHES, OF_POWER, Cast, Course
from headrace.simulator.decay import Decay, alone_in, batch_at, synced_batches
from headrace.simulator.harm import ANY, MEND_SECONDS, PATIENCE_SECONDS, SPARE, Harm, Scene
from headrace.simulator.history import History
from headrace.simulator.machine import Machine
from headrace.simulator.move_courses import MOVE_COURSES
from headrace.simulator.scenario import Scenario
from headrace.simulator.share_courses import SHARE_COURSES, ShareSight
from headrace.simulator.transaction_courses import TRANSACTION_COURSES, UNCLEAN_COURSES, TransactionSight
from headrace.virtual.quorum import CoordinationQuorum

BURST_SECONDS: Final = 0.02
COURSE_SECONDS_MAX: Final = 8.0

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
    "step clock",
)
FAIL_SYNC: Final = "fail sync"
FLIP_BYTE: Final = "flip byte"
FLIPS_MAX: Final = 4
DECAY: Final = "flip byte under broker"
UNHEARD_SHARE: Final = 0.25
TROUBLES: Final = ("fail start", "fail call", "short of descriptors", "disk full")
"""What calls of a disk can meet."""
NODE_FAULTS: Final = ("slow node", "cut off node", "part from node", "elect node")
"""What befalls single nodes of coordination, where it has several."""
CALLS_LOG2: Final = 8.0
ERROR_NUMBERS: Final = (errno.EIO, errno.EIO, errno.EMFILE, errno.ENOSPC, errno.EACCES)
CALLS_WITH_DESCRIPTOR: Final = frozenset({"open", "list"})
CLOCK_STEP_MS: Final = 1_800_000
"""Less than what timestamps of producers may be ahead by."""
KINDS: Final = (
    *SIMPLE,
    FAIL_SYNC,
    FLIP_BYTE,
    DECAY,
    *TROUBLES,
    *NODE_FAULTS,
    *COURSES,
    *MOVE_COURSES,
    *TRANSACTION_COURSES,
    *UNCLEAN_COURSES,
    *SHARE_COURSES,
)


class FailingCall:
    """`VirtualDisk.trouble`: one call fails, the n-th from now on, and with it every later one of the same path."""

    def __init__(self, nth: int, number: int) -> None:
        self._left = nth
        self._number = number
        self._path: str | None = None

    def __call__(self, call: str, path: str) -> int:
        if self._path is None:
            self._left -= 1
            if self._left > 0:
                return 0
            self._path = path
        return self._number if path == self._path else 0


class TooFewDescriptors:
    """`VirtualDisk.trouble`: a share of what needs a descriptor gets none."""

    def __init__(self, chance: random.Random, share: float) -> None:
        self._random = chance
        self._share = share

    def __call__(self, call: str, path: str) -> int:
        return errno.EMFILE if call in CALLS_WITH_DESCRIPTOR and self._random.random() < self._share else 0


class Faults:
    def __init__(self, scenario: Scenario, scene: Scene, history: History) -> None:
        self.random = random.Random(f"{scenario.seed} faults")
        self.harm = Harm(
            scene,
            self.random,
            scenario.regime,
            lag_seconds=scenario.settings["replica.lag.time.max.ms"] / 1000,
            lease_seconds=scenario.settings["broker.lease.ms"] / 1000,
        )
        self.counts: Counter[str] = Counter()
        self.list: list[str] = []
        self._synced, self._cached = (
            [
                where
                for topic in scenario.topics
                if (topic.durability == "disk") == synced
                for where in topic.all_partitions()
            ]
            for synced in (True, False)
        )
        self._clock = scene.clock
        self._machines = scene.machines
        self._history = history
        self._trace = history.trace
        self._kinds = self._choose(scenario.courses)
        if scenario.syncs_fail:
            self._kinds += [FAIL_SYNC] * max(1, len(self._kinds) // 2)
        self._kinds += [kind for kind in TROUBLES for _ in range(2) if kind in scenario.troubles]
        # Where page caches go at any time, two replicas may have lost what a third has damaged.
        if scenario.bytes_flip and (self.regime == SPARE or not self._cached):
            self._kinds += [FLIP_BYTE] * max(1, len(self._kinds) // 4)
        if scenario.decays and (self.regime == SPARE or not self._cached):
            self._kinds += [DECAY] * max(2, len(self._kinds) // 2)
        self._decay = Decay(scenario.seed, scene.machines, history, self.regime)
        self.harm.keeps_power = self._decay.keeps_power
        if scenario.retention or (scenario.transactions is not None and scenario.transactions.retention):
            self._kinds.append("step clock")
        if scenario.quorum:
            self._kinds += [*NODE_FAULTS, "compact"] * max(1, len(self._kinds) // 4)
        if scenario.moves:
            self._kinds += list(MOVE_COURSES) * max(1, len(self._kinds) // 6)
        if scenario.transactions is not None:
            self._kinds += list(TRANSACTION_COURSES) * max(1, len(self._kinds) // 6)
            if scenario.transactions.unclean:
                self._kinds += list(UNCLEAN_COURSES) * max(2, len(self._kinds) // 3)
        if scenario.shares is not None:
            self._kinds += list(SHARE_COURSES) * max(1, len(self._kinds) // 6)
            if scenario.shares.retention:
                self._kinds.append("step clock")
        self.share_sight: ShareSight | None = None
        """What can be seen of share groups, where there are any."""
        self.sight: TransactionSight | None = None
        """What can be seen of transactions, where there are any."""
        self._unheard = random.Random(f"{scenario.seed} unheard")
        self._worn = scene.machines[scenario.seed // 8 % len(scene.machines)]
        """The machine whose disk wears out: damage is found when it is read, so no other may have any."""
        self._mean_seconds = self.random.choice((0.1, 0.25, 0.5, 1.0))
        self._burst_share = self.random.choice((0.0, 0.3, 0.6))
        self._longest_seconds = self.random.choice((0.3, 1.0, 3.0))
        self._in_course = self._drawing = False
        self._ended: asyncio.Event | None = None

    @property
    def regime(self) -> str:
        return self.harm.regime

    def _choose(self, courses: tuple[str, ...]) -> list[str]:
        """A few kinds, so that they meet often; courses take up a good part of them, or all."""
        kinds = self._choose_simple()
        if not courses:
            return kinds
        return list(courses) if self.random.random() < 0.75 else [*kinds, *courses * 2]

    def _choose_simple(self) -> list[str]:
        """Where power may be lost at all times, it is."""
        kinds = self.random.sample(SIMPLE, self.random.randint(1, 8))
        if self.regime == ANY:
            return [*kinds, self.random.choice(("lose power", "lose all power"))]
        if self.random.random() < 0.4:
            kinds.append("lose power")
        return [kind for kind in kinds if kind != "lose all power"] or ["kill"]

    def start(self) -> None:
        self.harm.running = self._drawing = True
        self._next()

    async def finish(self) -> None:
        """Begin nothing new, let the course under way come to its end, then heal everything."""
        self._drawing = False
        if self._in_course:
            self._ended = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), COURSE_SECONDS_MAX)
        self.harm.heal()
        await self._decay.restart()
        if FAIL_SYNC in self._kinds or any(kind in self._kinds for kind in TROUBLES):
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
        if not self._drawing:
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

    def _apply(self, kind: str, seconds: float) -> str | None:
        """Do it; answers to whom, None if there was nobody."""
        if kind in COURSES or kind in MOVE_COURSES:
            return self._begin_course(kind)
        if kind in TRANSACTION_COURSES or kind in UNCLEAN_COURSES:
            return self._begin_transaction_course(kind)
        if kind in SHARE_COURSES:
            return self._begin_share_course(kind)
        if kind in NODE_FAULTS:
            return self._apply_to_node(kind, seconds)
        match kind.split():
            case ["kill", "two", "leaders"]:
                return self._kill_two_leaders(seconds)
            case ["return", "before", "leader"]:
                return self._return_before_leader(seconds)
            case ["kill" | "pause" as what, *who]:
                machine = self._whom(who)
                if machine is None or not machine.up:
                    return None
                return self.harm.kill(machine, seconds) if what == "kill" else self.harm.pause(machine, seconds)
            case ["lose", "power"]:
                return self._lose_power(seconds)
            case ["lose", "all", "power"]:
                for machine in self._machines:
                    self.harm.cut_power(machine, seconds * self.random.random())
                return ""
            case ["stop"]:
                return self.harm.stop(self.harm.some_machine(), seconds)
            case ["step", "clock"]:
                machine = self.harm.some_machine()
                machine.step_clock(round(self.random.uniform(-1, 1) * CLOCK_STEP_MS))
                return f"{machine.name} {machine.wall_offset_ms} ms"
            case ["slow", "disk"]:
                return self.harm.slow_disk(self.harm.some_machine(), self.random.choice((0.05, 0.5, 3.0)), seconds)
            case ["fail", "sync"]:
                return self._fail_sync(self.harm.some_machine(), seconds)
            case ["fail", "start" | "call"] | ["short", *_] | ["disk", "full"]:
                return self._trouble(kind, self.harm.some_machine(), seconds)
            case ["flip", "byte", *under] if under:
                return self._decay.strike()
            case ["flip", "byte"]:
                return self._flip_byte(self._worn, seconds)
            case ["cut" | "isolate" | "reset" | "slow", *_]:
                return self._apply_to_links(kind, seconds)
            case _:
                return self._apply_to_coordination(kind, seconds)

    def _whom(self, who: list[str]) -> Machine | None:
        if who == ["leader"]:
            return self.harm.leader_of(self.harm.some_partition())
        return self.harm.controller() if who == ["controller"] else self.harm.some_machine()

    # Courses.

    def _begin_course(self, kind: str) -> str | None:
        """One at a time."""
        where = self.harm.some_partition()
        meant = self._cached if kind in OF_PAGE_CACHES else self._synced if kind in OF_POWER else ()
        if where is not None and meant:
            where = self.random.choice(meant)
        state = None if where is None else self.harm.state_of(where)
        leader = self.harm.leader_of(where)
        if self._in_course or where is None or state is None or leader is None:
            return None
        replicas = [machine for machine in self._machines if machine.id in state.replicas]
        others = [machine for machine in replicas if machine is not leader]
        if not all(machine.participant and machine.id in state.isr for machine in replicas):
            return None
        follower, third = self.random.sample(others, 2)
        cast = Cast(where, leader, follower, third)
        spare = next((machine for machine in self._machines if machine not in replicas), None)
        if kind in COURSES:
            course = COURSES[kind](self.harm, cast)
        elif spare is not None and not state.target:
            course = MOVE_COURSES[kind](self.harm, cast, spare)
        else:
            return None
        self._in_course = True
        self._go_on(course)
        return f"{leader.name} {follower.name} {third.name} in {where}"

    def _begin_transaction_course(self, kind: str) -> str | None:
        """Whom it strikes shows when its moment has come."""
        if self._in_course or self.sight is None:
            return None
        self._in_course = True
        self._go_on((TRANSACTION_COURSES | UNCLEAN_COURSES)[kind](self.harm, self.sight))
        return ""

    def _begin_share_course(self, kind: str) -> str | None:
        if self._in_course or self.share_sight is None:
            return None
        self._in_course = True
        self._go_on(SHARE_COURSES[kind](self.harm, self.share_sight))
        return ""

    def _go_on(self, course: Course) -> None:
        step = next(course, None) if self.harm.running else None
        if step is None:
            self._end_course()
        elif callable(step):
            self._await(course, step)
        else:
            self._clock.call_later(step, partial(self._go_on, course))

    def _end_course(self) -> None:
        self._in_course = False
        if self._ended is not None:
            self._ended.set()

    def _await(self, course: Course, condition: Callable[[], bool]) -> None:
        """Look after every single call: the moment that is meant may last for one."""

        def give_up() -> None:
            self._clock.watch = None
            self._end_course()

        def look() -> None:
            if not self.harm.running:
                give_up()
            elif condition():
                self._clock.watch = None
                patience.cancel()
                self._go_on(course)

        patience = self._clock.call_later(PATIENCE_SECONDS, give_up)
        self._clock.watch = look

    # Simple ones.

    def _kill_two_leaders(self, seconds: float) -> str | None:
        """The next leader dies soon after it was elected, before it has told all that it knows."""
        where = self.harm.some_partition()
        first = self.harm.leader_of(where)
        if where is None or first is None or not first.up:
            return None
        self.harm.kill(first, seconds + PATIENCE_SECONDS)

        def next_leader() -> Machine | None:
            leader = self.harm.leader_of(where)
            return leader if leader is not None and leader is not first and leader.up else None

        self.harm.kill_once(next_leader, seconds)
        return f"{first.name} and who follows in {where}"

    def _return_before_leader(self, seconds: float) -> str | None:
        """A follower restarts, without its page cache where that may be, and its leader dies while it catches up."""
        where = self.harm.some_partition()
        leader = self.harm.leader_of(where)
        others = [machine for machine in self._machines if machine is not leader and machine.up]
        if where is None or leader is None or not others:
            return None
        follower = self.random.choice(others)
        self.harm.lose_what_may_be(follower, seconds)
        self.harm.kill_once(lambda: self.harm.leader_of(where) if follower.participant is not None else None, seconds)
        return f"{follower.name} in {where}"

    def _lose_power(self, seconds: float) -> str | None:
        if self.regime == SPARE and not self.harm.all_in_sync():
            return None
        machine = self.harm.some_machine()
        self.harm.cut_power(machine, seconds)
        return machine.name

    def _fail_sync(self, machine: Machine, seconds: float) -> str | None:
        if not machine.up:
            return None
        path = machine.fail_sync(unheard=self._unheard.random() < UNHEARD_SHARE)
        self.harm.until(seconds + MEND_SECONDS, machine.mend_disk)
        return f"{machine.name} {path}"

    def _trouble(self, kind: str, machine: Machine, seconds: float) -> str | None:
        if machine.disk.trouble is not None:
            return None
        what = ""
        match kind:
            case "fail start" | "fail call":
                nth = round(2 ** self.random.uniform(0, CALLS_LOG2))
                number = self.random.choice(ERROR_NUMBERS)
                if kind == "fail start":
                    self.harm.kill(machine, 0.0)
                machine.disk.trouble = FailingCall(nth, number)
                what = f" {errno.errorcode[number]} at call {nth}"
            case "short of descriptors":
                machine.disk.trouble = TooFewDescriptors(self.random, self.random.choice((0.1, 0.5, 1.0)))
            case _:
                machine.disk.fill(self.random.choice((0, 100, 5000)))
        self.harm.until(seconds, machine.well)
        self.harm.until(seconds + MEND_SECONDS, machine.mend_disk)
        return machine.name + what

    def _flip_byte(self, machine: Machine, seconds: float) -> str | None:
        """While no process runs there: one that runs has what it wrote in its page cache."""
        if self.counts[FLIP_BYTE] >= FLIPS_MAX or machine.stopping:
            return None
        if machine.up:
            self.harm.kill(machine, seconds)
        others = [each for each in self._machines if each is not machine]
        batches = synced_batches(machine)
        flipped = machine.flip_byte(alone_in(machine, others), power_may_go=self.regime == ANY)
        if flipped is None:
            return None
        path, position = flipped
        hit = batch_at(batches, path, position)
        if hit is not None:
            self._history.damaged(hit.topic_partition, hit.header.base_offset)
        return f"{machine.name} {path} at {position}"

    def _apply_to_links(self, kind: str, seconds: float) -> str | None:
        harm = self.harm
        network = harm.network
        one, other = self.random.sample(self._machines, 2)
        match kind:
            case "cut":
                harm.cut(one, other, seconds)
            case "cut one way":
                harm.cut_one_way(one, other, seconds)
            case "isolate":
                harm.isolate(one, seconds, from_clients=self.random.random() < 0.5)
                return one.name
            case "cut clients":
                network.cut_one_way(*self.random.choice(((CLIENT, one.name), (one.name, CLIENT))))
                self.harm.until(seconds, lambda: network.heal(one.name, CLIENT))
                return one.name
            case "reset":
                harm.reset(one, other)
            case "slow link":
                harm.slow(one, other, self.random.choice((0.02, 0.2, 1.0)), seconds)
            case "cut off coordination":
                harm.cut_off(one, seconds)
                return one.name
        return f"{one.name} {other.name}"

    # Coordination.

    def _apply_to_coordination(self, kind: str, seconds: float) -> str | None:
        store = self.harm.store
        match kind:
            case "stop coordination":
                if not store.running:
                    return None
                store.stop()
                self.harm.until(seconds, store.start)
            case "lose answers":
                store.answers_lost = self.random.choice((0.1, 0.5, 1.0))
                self.harm.until(seconds, lambda: setattr(store, "answers_lost", 0.0))
            case "late changes":
                store.late = self.random.choice((0.1, 0.5))
                self.harm.until(seconds, lambda: setattr(store, "late", 0.0))
            case "break watches":
                store.break_watches()
            case "compact":
                store.compact(store.revision)
        return ""

    def _apply_to_node(self, kind: str, seconds: float) -> str | None:
        store = self.harm.store
        assert isinstance(store, CoordinationQuorum)
        node = self.random.choice(store.nodes)
        name = f"node {node.number}"
        match kind:
            case "slow node":
                if node.lag_seconds:
                    return None
                store.slow(node, self.random.choice((0.05, 0.5, 3.0)))
                self.harm.until(seconds, partial(store.hasten, node))
                return f"{name} by {node.lag_seconds:g} s"
            case "cut off node":
                if node.is_cut_off:
                    return None
                store.cut_off(node)
                self.harm.until(seconds, partial(store.heal_node, node))
                return name
            case "part from node":
                machine = self.harm.some_machine()
                asked = store.asked[machine.name]
                store.part(machine.name, asked)
                self.harm.until(seconds, partial(store.join, machine.name, asked))
                return f"{machine.name} from {asked.number}"
            case _:
                if store.leader is None:
                    return None
                store.elect()
                return ""
