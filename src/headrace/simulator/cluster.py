"""One simulated cluster under load and faults, from its first start to the comparison of its replicas.

The course of a run: brokers start, topics are made, load and faults begin; then every fault is healed, the load comes
to its end, and the cluster has `settle_seconds` to have all replicas in sync and every batch acknowledged. Then the
logs are compared with all that clients were told. A run depends on its scenario alone, so it can be repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import traceback
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final

from headrace.cluster import keys
from headrace.cluster.image import Image, PartitionState, apply, from_listing
from headrace.errors import CorruptBatch, StorageFailed
from headrace.records import kernel
from headrace.records.batch import batches
from headrace.simulator.broker import CLUSTER, JOBS, LEDGER, WORKERS, builder, create_topics
from headrace.simulator.contents import key_of, parse_content
from headrace.simulator.faults import Faults
from headrace.simulator.harm import ANY
from headrace.simulator.history import MARKER, History, Record, Trace, Violation
from headrace.simulator.load import Load
from headrace.simulator.machine import Machine
from headrace.simulator.retention import RetentionRule
from headrace.simulator.scenario import Scenario
from headrace.simulator.share_load import ShareLoad
from headrace.storage.log import Log, ReadResult, TopicPartition
from headrace.virtual.coordination import CoordinationStore
from headrace.virtual.loop import VirtualLoop
from headrace.virtual.network import VirtualNetwork
from headrace.virtual.quorum import CoordinationQuorum

START_SECONDS: Final = 30.0
LOOK_SECONDS: Final = 0.05
READ_BYTES: Final = 1 << 20


@dataclass(slots=True)
class Outcome:
    seed: int
    violation: str
    faults: dict[str, int]
    counts: dict[str, int]
    fault_list: list[str]
    trace_sum: str
    events: int
    simulated_seconds: float
    last_lines: list[str]


class Cluster:
    def __init__(self, scenario: Scenario, trace: Trace) -> None:
        seed = scenario.seed
        self.scenario = scenario
        self.loop = VirtualLoop(seed=seed, jitter_seconds=scenario.jitter_seconds)
        self.clock = self.loop.clock
        self.network = VirtualNetwork(self.clock, seed, scenario.link_seconds)
        self.store = (CoordinationQuorum if scenario.quorum else CoordinationStore)(self.clock, seed)
        self.trace = trace
        self.history = History(trace, self.clock.now)
        build = builder(scenario)
        self.machines = [
            Machine(id, self.loop, self.network, self.store, trace, seed * 16 + id, scenario.sync_seconds, build)
            for id in range(1, scenario.brokers + 1)
        ]
        self.faults = Faults(scenario, self, self.history)
        self.load = Load(scenario, self.network, self.clock, self.machines, self.history)
        if self.load.transactions is not None:
            self.faults.sight = self.load.transactions.sight()
        if self.load.shares is not None:
            self.faults.share_sight = self.load.shares.sight()
            leads_move = scenario.moves or scenario.administered
            self.load.shares.judge.is_calm = lambda: not leads_move and not self.faults.list
        self._retention = RetentionRule(scenario.retention, self.history)
        plans = {LEDGER: scenario.transactions, JOBS: scenario.shares}
        self._retentions = {
            topic: RetentionRule({} if plan is None else plan.retention, self.history) for topic, plan in plans.items()
        }
        """Of topics with settings of their own."""
        self.failure: BaseException | None = None
        self.loop.set_exception_handler(self._failed)
        self._image: Image | None = None
        self._restores = 0

    # The course.

    async def run(self) -> None:
        for machine in self.machines:
            machine.start()
        await self._wait(lambda: all(machine.participant for machine in self.machines), START_SECONDS, self._not_up)
        await self.create_topics()
        self._look()
        self.load.start()
        if self.scenario.shares is not None:
            await asyncio.sleep(self.scenario.shares.calm_seconds)
        self.faults.start()
        await asyncio.sleep(self.scenario.load_seconds)
        await self.faults.finish()
        self.trace.note(self.clock.now(), "healed")
        self.load.stop()
        await self._wait(lambda: not self._unsettled(), self.scenario.settle_seconds, self._unsettled)
        self._compare()

    async def _wait(self, condition: Callable[[], object], seconds: float, why: Callable[[], str]) -> None:
        end = self.clock.now() + seconds
        while not condition():
            if self.clock.now() > end:
                raise Violation(f"after {seconds:g} s: {why()}; {self._states()}")
            await asyncio.sleep(LOOK_SECONDS)

    def _failed(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and self.scenario.troubles:
            # A broker goes on after that; asyncio only tells of it.
            self.history.counts["errors that nobody caught"] += 1
            return
        if self.failure is None:
            self.failure = error if isinstance(error, BaseException) else Violation(str(context.get("message")))
        self.loop.stop()

    async def create_topics(self) -> None:
        first = self.machines[0]
        assert first.process is not None
        assert first.participant is not None
        partitions = self.scenario.offsets_partitions
        await first.process.run(create_topics(first.participant, self.scenario, partitions))
        transactions = self.load.transactions
        for where in transactions.partitions() if transactions is not None else ():
            plan = self.scenario.transactions if where.topic == LEDGER else None
            retained = plan is not None and bool(plan.retention)
            self.history.watch(where, may_lose=plan is not None and plan.unclean, retained=retained)
        if self.load.shares is not None:
            await self._watch_jobs(self.load.shares)
        retained, key = bool(self.scenario.retention), key_of if self.scenario.compacted else None
        for topic in self.scenario.topics:
            may_lose = topic.durability != "disk" and self.faults.regime == ANY
            for where in topic.all_partitions():
                self.history.watch(where, may_lose=may_lose, retained=retained, key_of=key)

    async def _watch_jobs(self, shares: ShareLoad) -> None:
        """Every broker has to know where the group begins."""

        def is_known() -> bool:
            participants = [machine.participant for machine in self.machines]
            return all(each is not None and WORKERS in each.view.image.group_configs for each in participants)

        await self._wait(is_known, START_SECONDS, lambda: "the settings of the share group are not known")
        plan = shares.plan
        for where in shares.jobs:
            key = key_of if plan.compacted else None
            self.history.watch(where, may_lose=False, retained=bool(plan.retention), key_of=key)

    # What can be seen of it.

    def image(self) -> Image:
        """The metadata as coordination has it."""
        known, store = self._image, self.store
        if self._restores != store.restores:
            self._restores, known = store.restores, None
        if known is not None and known.revision == store.revision:
            return known
        prefix = keys.cluster_prefix(CLUSTER)
        changes = (
            None if known is None or known.revision < store.compacted else store.changes(prefix, known.revision + 1)
        )
        if known is None or changes is None:
            self._image = from_listing(prefix, store.list(prefix))
        else:
            self._image = apply(known, changes)
        return self._image

    def controller(self) -> Machine | None:
        found = self.store.get(keys.controller_key(keys.cluster_prefix(CLUSTER)))
        broker = -1 if found is None else int(keys.decode(found.key, found.value)["broker"])
        return next((machine for machine in self.machines if machine.id == broker), None)

    def registered(self, machine: Machine) -> str:
        broker = self.image().brokers.get(machine.id)
        return "" if broker is None else broker.incarnation

    def some_partition(self, chance: random.Random) -> TopicPartition | None:
        known = self.history.partitions()
        return chance.choice(known) if known else None

    def state_of(self, where: TopicPartition) -> PartitionState | None:
        return self.image().partition(where.topic, where.partition)

    def all_in_sync(self) -> bool:
        """Whether every partition has all its replicas in sync, in the lives that they live now; but for those that a
        move is only about to add."""
        image = self.image()
        if len(image.brokers) != len(self.machines) or not all(machine.participant for machine in self.machines):
            return False
        return all(
            state.incarnations.get(broker) == image.brokers[broker].incarnation
            for topic in image.topics.values()
            for state in topic.partitions
            for broker in state.replicas
            if broker not in state.adding
        )

    def replicas(self, where: TopicPartition) -> list[Machine]:
        """The machines that hold the partition, or are to."""
        state = self.state_of(where)
        return [machine for machine in self.machines if state is not None and machine.id in state.replicas]

    def _look(self) -> None:
        """Note who leads and where watermarks are, time and again."""
        for machine in self.machines:
            if machine.participant is None:
                continue
            wall_ms = machine.take_furthest_wall_ms()
            for where in self.history.partitions():
                partition = machine.replica(where)
                if partition is None:
                    continue
                if partition.leading:
                    self.history.leads(where, partition.epoch, machine.life)
                    self.load.clients.look(machine, where, partition)
                    rule = self._retentions.get(where.topic, self._retention)
                    if rule:
                        rule.look(machine, where, partition, wall_ms)
                # A follower may begin anew for damage, and what a sick disk does not read is damage; and it may have
                # kept a watermark above what a loss of all page caches has left to its leader.
                scenario = self.scenario
                spared = scenario.bytes_flip or scenario.decays or scenario.troubles or self.history.may_lose(where)
                if partition.leading or not spared:
                    transactions = self.load.transactions
                    who = machine.life if transactions is None else transactions.holder(machine, where, partition)
                    self.history.watermark(where, partition.epoch, who, partition.high_watermark)
            if self.load.renewal is not None:
                self.load.renewal.look(machine)
            if self.load.transactions is not None:
                scenario = self.scenario
                may_begin_anew = (
                    scenario.bytes_flip or scenario.decays or scenario.troubles or self.load.transactions.plan.unclean
                )
                self.load.transactions.look(machine, followers=not may_begin_anew)
        self.clock.call_later(LOOK_SECONDS, self._look)

    def _judged(self) -> list[tuple[History, TopicPartition]]:
        """Every partition, and what has been seen of it."""
        renewed = [] if self.load.renewal is None else self.load.renewal.judged()
        return [*((self.history, where) for where in self.history.partitions()), *renewed]

    def _not_up(self) -> str:
        return "not started: " + ", ".join(machine.name for machine in self.machines if machine.participant is None)

    def _unsettled(self) -> str:
        """Why the cluster is not at rest; empty if it is."""
        if (down := [machine.name for machine in self.machines if machine.participant is None]) != []:
            return f"{', '.join(down)} not up"
        if (waiting := self.load.waiting) != 0:
            return f"{waiting} batches are not acknowledged"
        if not self.all_in_sync():
            return "not all in sync"
        if (doubts := self.image().controls.doubts) != {}:
            return f"brokers {sorted(doubts)} doubt the metadata"
        if self.scenario.moves and (moving := self._moving()):
            return moving
        if self.load.renewal is not None and (why := self.load.renewal.unsettled(self.machines, self.image())):
            return why
        if self.load.transactions is not None and (why := self.load.transactions.unsettled()):
            return why
        if self.load.shares is not None and (why := self.load.shares.unsettled()):
            return why
        for history, where in self._judged():
            ends = {machine.name: _ends(machine, where) for machine in self.replicas(where)}
            end = next(iter(ends.values()), (-1, -2))
            if len(set(ends.values())) != 1 or len(set(end)) != 1:
                return f"{where}: end and watermark differ: {ends}"
            if (behind := history.behind(where, end[0])) != "":
                return behind
        return self._damage() if self.scenario.bytes_flip or self.scenario.decays else ""

    def _moving(self) -> str:
        """The first partition that is not where it is to be, or is still where it was."""
        image = self.image()
        for name, topic in image.topics.items():
            for state in topic.partitions:
                where = TopicPartition(name, state.index)
                if state.target:
                    return f"{where} moves from {state.replicas} to {state.target}, in sync are {state.isr}"
                if image.controls.draining.intersection(state.replicas):
                    return f"{where} is on a broker that is drained: {state.replicas} {set(image.controls.draining)}"
                for machine in self.machines:
                    if machine.id not in state.replicas and machine.holds(where):
                        return f"{where} moved to {state.replicas}, and {machine.life} still has it"
        return ""

    def _damage(self) -> str:
        """Read everything, as clients would sooner or later: what is found damaged is to be mended."""
        for machine, where in ((machine, at) for _, at in self._judged() for machine in self.replicas(at)):
            assert machine.process is not None
            try:
                if not machine.process.context.run(_read_through, machine, where):
                    return f"{machine.life} is still reading {where}"
            except (CorruptBatch, StorageFailed) as error:
                return f"{machine.life}: {error}"
        return ""

    def _states(self) -> str:
        image = self.image()
        return (
            "; ".join(
                f"{topic.name}-{state.index} leader {state.leader} epoch {state.leader_epoch} isr {list(state.isr)}"
                f" of {list(state.replicas)}"
                for topic in image.topics.values()
                for state in topic.partitions
            )
            + f"; brokers {sorted(image.brokers)}"
        )

    # The end.

    def _compare(self) -> None:
        transactional: dict[TopicPartition, tuple[int, bytes]] = {}
        shared: dict[TopicPartition, tuple[int, int, Collection[int]]] = {}
        states = [state for topic in self.image().topics.values() for state in topic.partitions]
        self.history.counts["partitions with accepted losses"] += sum(state.lost is not None for state in states)
        for history, where in self._judged():
            logs = {machine.name: _log(machine, where) for machine in self.replicas(where)}
            starts = {log.start_offset for log in logs.values()}
            is_transactional = self.load.transactions is not None and where in self.load.transactions.partitions()
            if is_transactional and self.scenario.transactions and self.scenario.transactions.compacted:
                self._compare_contents(where, logs)
                continue
            is_shared = self.load.shares is not None and where.topic == JOBS
            if is_shared:
                ends = max(log.end_offset for log in logs.values())
                shared[where] = max(starts), ends, self._wanted(where, logs.values())
            if history.watched(where).key_of is not None:
                self._compare_compacted(where, logs)
                continue
            whole = {name: _bytes(log, max(starts)) for name, log in logs.items()}
            if len(set(whole.values())) != 1:
                sizes = {name: len(data) for name, data in whole.items()}
                raise Violation(f"{where}: replicas differ below the watermark: {sizes}")
            records, contents = _records(next(iter(whole.values())))
            history.check(where, records, contents, starts)
            self.history.counts["records"] += len(records)
            self.history.counts["gone"] += max(starts)
            if is_transactional:
                transactional[where] = max(starts), next(iter(whole.values()))
        if self.load.transactions is not None:
            self.load.transactions.compare(transactional)
        if self.load.shares is not None:
            self.load.shares.compare(shared)

    def _wanted(self, where: TopicPartition, logs: Iterable[Log]) -> set[int]:
        """What nobody may have passed over: of a compacted topic the last record of each key, of others all."""
        each = [_records(_bytes(log, log.start_offset))[0] for log in logs]
        if self.history.watched(where).key_of is not None:
            return set(self.history.latest(where, max(each, key=len)).values())
        return {record.offset for records in each for record in records}

    def _compare_compacted(self, where: TopicPartition, logs: dict[str, Log]) -> None:
        """Each replica compacts by itself: they agree in what two of them have, and in the last of each key."""
        latest: dict[bytes, int] | None = None
        for name, (records, contents) in self._compare_contents(where, logs).items():
            log = logs[name]
            found = self.history.latest(where, records)
            latest = found if latest is None else latest
            if found != latest:
                raise Violation(f"{where}: the last of each key: {found} on {name}, {latest} on another")
            self.history.check(where, records, contents, [log.start_offset])
            self.history.counts["records"] += len(records)
            self.history.counts["compacted away"] += log.end_offset - log.start_offset - len(records)

    def _compare_contents(
        self, where: TopicPartition, logs: dict[str, Log]
    ) -> dict[str, tuple[list[Record], dict[int, bytes]]]:
        """No two replicas have different records at one offset; answers what each has."""
        known: dict[int, bytes] = {}
        each = {name: _records(_bytes(log, log.start_offset)) for name, log in logs.items()}
        for name, (_, contents) in each.items():
            for offset, content in contents.items():
                if known.setdefault(offset, content) != content:
                    raise Violation(f"{where}: {name} has {content!r} at {offset}, another {known[offset]!r}")
        return each

    def close(self) -> None:
        for machine in self.machines:
            machine.wanted = False
            if machine.process is not None:
                machine.process.die()
                machine.buried.append(machine.process)
            for process in machine.buried:
                process.bury()
        self.loop.close()


def _log(machine: Machine, where: TopicPartition) -> Log:
    partition = machine.replica(where)
    if partition is None:
        raise Violation(f"{machine.life} holds no replica of {where}")
    return partition.log


def _read_through(machine: Machine, where: TopicPartition) -> bool:
    """False if a broker checks no more in one turn; what it has checked it knows the next time."""
    partition = machine.replica(where)
    assert partition is not None
    offset = partition.log.start_offset
    while offset < partition.high_watermark:
        before = offset
        for header, _ in batches(memoryview(_content(partition.read(offset, READ_BYTES, warm=True)))):
            offset = header.next_offset
        if offset == before:
            return False
    return True


def _ends(machine: Machine, where: TopicPartition) -> tuple[int, int]:
    partition = machine.replica(where)
    return (-1, -2) if partition is None else (partition.log.written_offset, partition.high_watermark)


def _content(result: ReadResult) -> bytes:
    return b"".join(part.file.pread(part.count, part.position) for part in result.slices)


def _bytes(log: Log, offset: int) -> bytes:
    parts = []
    while offset < log.written_offset:
        before = offset
        for header, view in batches(memoryview(_content(log.read(offset, READ_BYTES, log.written_offset, warm=True)))):
            parts.append(bytes(view))
            offset = header.next_offset
        if offset == before:
            raise Violation(f"{log.topic_partition}: nothing can be read at {offset}")
    return b"".join(parts)


def _records(data: bytes) -> tuple[list[Record], dict[int, bytes]]:
    records: list[Record] = []
    contents: dict[int, bytes] = {}
    for header, view in batches(memoryview(data)):
        for record in kernel.records(view):
            contents[record.offset] = record.value or b""
            if header.is_control:
                records.append(Record(record.offset, header.leader_epoch, MARKER, 0))
            else:
                records.append(Record(record.offset, header.leader_epoch, *parse_content(record.value or b"")))
    return records, contents


def _place(error: BaseException) -> str:
    """Where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return " < ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in reversed(frames[-6:]))


def simulate(scenario: Scenario) -> Outcome:
    """Run one scenario from beginning to end. What the rooms raise by mistake counts as a violation too."""
    trace = Trace()
    cluster = Cluster(scenario, trace)
    violation = ""
    try:
        cluster.loop.run_until_complete(cluster.run())
    except Exception as raised:  # noqa: BLE001 - whatever a room raises by mistake is a finding
        error = cluster.failure or raised
        violation = str(error) if isinstance(error, Violation) else f"{error!r} {_place(error)}"
    finally:
        with contextlib.suppress(RuntimeError):
            cluster.close()
    return Outcome(
        scenario.seed,
        violation,
        faults=dict(cluster.faults.counts),
        counts=dict(cluster.history.counts),
        fault_list=cluster.faults.list,
        trace_sum=trace.sum,
        events=trace.count,
        simulated_seconds=cluster.clock.now(),
        last_lines=list(trace.lines) if violation else [],
    )
