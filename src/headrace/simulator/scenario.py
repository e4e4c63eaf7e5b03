"""What one seed stands for: brokers, topics, settings and load, all drawn from it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Final

from headrace.simulator.courses import COURSES, OF_PAGE_CACHES, OF_POWER
from headrace.simulator.harm import ANY, SPARE
from headrace.storage.folder import PARTITIONED, SHARED
from headrace.storage.log import TopicPartition

REPLICAS: Final = 3
DELETIONS_SHARE: Final = 0.4
RETENTION_SHARE: Final = 0.2
COMPACTED_SHARE: Final = 0.2
ADMINISTERED_SHARE: Final = 0.2
RESTORED_SHARE: Final = 1 / 12
RENEWED_SHARE: Final = 1 / 8
QUORUM_SHARE: Final = 0.2
MOVES_SHARE: Final = 1 / 6
TRANSACTIONS_SHARE: Final = 1 / 5
TRANSACTIONS_LOAD_SECONDS: Final = 3.0
SHARES_SHARE: Final = 1 / 6
SHARES_LOAD_SECONDS: Final = 2.5
JOBS_DELETIONS_SHARE: Final = 0.3
JOBS_RETENTION_SHARE: Final = 0.15
JOBS_COMPACTED_SHARE: Final = 0.2
RESETS_SHARE: Final = 0.25
SLOW_SYNC_SECONDS: Final = 0.1
"""Where syncs take so long, locks last longer too: or they are over before anything can be acknowledged."""
LEDGER_DELETIONS_SHARE: Final = 0.3
LEDGER_RETENTION_SHARE: Final = 0.15
MEMBERS_SHARE: Final = 0.5
PASSING_SHARE: Final = 0.25
UNCLEAN_SHARE: Final = 0.12
CLASSIC: Final = "classic"
CONSUMER: Final = "consumer"
IN_BETWEEN: Final = "in between"
AT_THE_END: Final = "at the end"
DECAY_SHARE: Final = 0.25
NO_COURSE_SHARE: Final = 0.4
COURSE_LOAD_SECONDS: Final = 2.0
TROUBLES_OF: Final = {4: ("fail start", "short of descriptors", "disk full"), 5: ("fail start", "fail call")}
"""By the last digit of a seed to base 8."""

DECAYS_OF: Final = (0, 1, 3, 6)
"""By the same digit: where disks have no other trouble."""

COMPACTION: Final = {"cleanup.policy": "compact", "segment.bytes": "1024", "min.cleanable.dirty.ratio": "0.01"}


@dataclass(frozen=True, slots=True)
class ScenarioTopic:
    name: str
    partitions: int
    durability: str
    overrides: dict[str, str]

    def all_partitions(self) -> list[TopicPartition]:
        return [TopicPartition(self.name, index) for index in range(self.partitions)]


@dataclass(frozen=True, slots=True)
class TransactionPlan:
    """Who works in transactions (`transaction_load`), on topics of their own that are always synced."""

    partitions: int
    copied_partitions: int
    """0: nobody copies."""
    writers: int
    owners: int
    """Of transactions that no timeout ends."""
    versions: tuple[int, ...]
    """Of the protocol that producers speak."""
    timeouts_ms: tuple[int, ...]
    state_partitions: int
    """Of __transaction_state."""
    compacted: bool
    """Whether the ledger is; then nobody copies it."""
    deletions: bool = False
    """Whether records of the ledger are deleted, also of transactions that are open."""
    retention: dict[str, str] = field(default_factory=dict)
    """What the ledger is kept for. Empty: for ever."""
    members: str = ""
    """By which protocol those who copy share the ledger as members of a group. Empty: each has its partition."""
    passing: bool = False
    """Whether transactions write to one topic more, which is deleted and made anew meanwhile."""
    unclean: bool = False
    """Whether the ledger may be led by who lacks records; then nobody copies it."""


@dataclass(frozen=True, slots=True)
class SharePlan:
    """A share group (`share_load`), on a topic of its own that is always synced."""

    partitions: int
    members: int
    """More than partitions."""
    lock_ms: int
    delivery_limit: int
    record_locks_max: int
    shares: tuple[float, ...]
    """How often a member accepts, releases, rejects, renews, or says nothing."""
    record_limits: float
    """Of fetches, those that ask for so many records and not for whole batches."""
    state_partitions: int
    """Of __share_group_state."""
    compacted_states: bool
    """Whether that is compacted all the time."""
    calm_seconds: float
    """Before the first fault."""
    compacted: bool = False
    """Whether its records have keys, and of each key's the latest stays."""
    deletions: bool = False
    retention: dict[str, str] = field(default_factory=dict)
    """What its records are kept for. Empty: for ever."""
    reset: str = ""
    """Whether the group's start is set anew: while it has much to do, or when it has done everything. Empty: never."""


@dataclass(frozen=True, slots=True)
class Scenario:
    seed: int
    layouts: tuple[str, ...]
    topics: tuple[ScenarioTopic, ...]
    settings: dict[str, int]
    sync_seconds: tuple[float, float]
    link_seconds: tuple[float, float]
    jitter_seconds: float
    load_seconds: float
    batch_pause_seconds: float
    in_flight: int
    producers: int
    follower_reads: float
    regime: str = SPARE
    """Whose page caches may be lost: one at a time, all in sync in between; or any at any time."""
    courses: tuple[str, ...] = ()
    syncs_fail: bool = False
    bytes_flip: bool = False
    decays: bool = False
    """Whether bytes flip on two machines while brokers run there."""
    groups: int = 0
    """Consumer groups, each with two members."""
    deletions: bool = False
    """Whether records are deleted that consumers have read."""
    troubles: tuple[str, ...] = ()
    """Of disks: kinds of `faults.TROUBLES`."""
    retention: dict[str, str] = field(default_factory=dict)
    """What topics are kept for: their settings of time or size. Empty: for ever."""
    compacted: bool = False
    """Whether records have keys, and of each key's the latest stays."""
    administered: bool = False
    """Whether leaders are elected by hand, and settings of topics changed."""
    quorum: bool = False
    """Whether coordination has three nodes, each with faults of its own."""
    moves: bool = False
    """Whether there is a fourth broker, and partitions are moved to it and back, and brokers drained."""
    renewed: bool = False
    """Whether one topic more is deleted and made anew time and again."""
    restored: bool = False
    """Whether coordination is put back to an older copy."""
    settle_seconds: float = 150.0
    """How long it may take to come to rest. A leader that resigned for damage, leads again and is still damaged asks to
    be replaced again after a minute."""
    transactions: TransactionPlan | None = None
    shares: SharePlan | None = None

    @property
    def brokers(self) -> int:
        return len(self.layouts)

    @property
    def offsets_partitions(self) -> int:
        """Of the topic in which groups keep their offsets; 0 if there is nobody who needs it."""
        copies = self.transactions is not None and self.transactions.copied_partitions
        return self.settings["offsets.topic.partitions"] if self.groups or copies or self.shares else 0

    def overrides(self, topic: ScenarioTopic) -> dict[str, str]:
        """The settings that a topic is made with."""
        return {**topic.overrides, **self.retention, **(COMPACTION if self.compacted else {})}


def draw(seed: int, *, shares: bool = True) -> Scenario:
    """Of those without transactions some have a share group, unless there shall be none."""
    scenario = draw_plain(seed)
    chance = random.Random(f"{seed} transactional load")
    # Nothing is promised any more once an older copy is accepted.
    if chance.random() < TRANSACTIONS_SHARE and not scenario.restored:
        return transacting(scenario, chance)
    chance = random.Random(f"{seed} shared load")
    is_shared = shares and chance.random() < SHARES_SHARE and not scenario.restored
    return sharing(scenario, chance) if is_shared else scenario


def draw_shared(seed: int) -> Scenario:
    """A share group and nothing else, whatever the seed."""
    chance = random.Random(f"{seed} shared load alone")
    scenario = replace(
        draw_plain(seed),
        sync_seconds=chance.choice(((0.0002, 0.003), (0.002, 0.02))),
        link_seconds=chance.choice(((0.0001, 0.001), (0.001, 0.01))),
        topics=(),
        groups=0,
        retention={},
        compacted=False,
        deletions=False,
        administered=False,
        renewed=False,
        restored=False,
        settle_seconds=60.0,
        batch_pause_seconds=chance.choice((0.1, 0.2)),
        producers=1,
        load_seconds=0.0,
    )
    return sharing(scenario, chance)


def sharing(scenario: Scenario, chance: random.Random) -> Scenario:
    """With a share group beside the rest of the load."""
    partitions = chance.randint(1, 3)
    compacted = chance.random() < JOBS_COMPACTED_SHARE
    strains = random.Random(f"{scenario.seed} shared strain")
    plan = SharePlan(
        partitions=partitions,
        members=partitions + chance.randint(1, 2),
        lock_ms=chance.choice((300, 700, 1500)) * (1 if scenario.sync_seconds[1] < SLOW_SYNC_SECONDS else 4),
        delivery_limit=chance.choice((2, 3, 5, 1000, 1000)),
        record_locks_max=chance.choice((5, 20, 2000)),
        shares=chance.choice(((0.7, 0.1, 0.05, 0.05, 0.1), (0.4, 0.2, 0.05, 0.15, 0.2), (0.9, 0.0, 0.0, 0.0, 0.1))),
        record_limits=chance.choice((0.0, 0.5)),
        state_partitions=chance.randint(1, 2),
        compacted_states=chance.random() < 0.5,
        calm_seconds=chance.choice((0.0, 1.0)),
        compacted=compacted,
        deletions=not compacted and strains.random() < JOBS_DELETIONS_SHARE,
        retention=_kept(strains) if not compacted and strains.random() < JOBS_RETENTION_SHARE else {},
        reset=strains.choice((IN_BETWEEN, AT_THE_END)) if strains.random() < RESETS_SHARE else "",
    )
    settings = {
        "group.share.record.lock.duration.ms": plan.lock_ms,
        "group.share.min.record.lock.duration.ms": 100,
        "group.share.max.record.lock.duration.ms": 5000,
        "group.share.delivery.count.limit": plan.delivery_limit,
        "group.share.partition.max.record.locks": plan.record_locks_max,
        "group.share.session.timeout.ms": 1000,
        "group.share.heartbeat.interval.ms": 300,
    }
    if plan.retention:
        settings["retention.check.ms"] = 100
    if plan.compacted or plan.compacted_states:
        settings["log.cleaner.backoff.ms"] = 100
    load_seconds = max(scenario.load_seconds, SHARES_LOAD_SECONDS)
    return replace(scenario, shares=plan, load_seconds=load_seconds, settings=scenario.settings | settings)


def transacting(scenario: Scenario, chance: random.Random) -> Scenario:
    """With transactions beside the rest of the load."""
    compacted = chance.random() < COMPACTED_SHARE
    plan = TransactionPlan(
        partitions=chance.randint(1, 3),
        copied_partitions=0 if compacted else chance.randint(0, 2),
        writers=chance.randint(1, 3),
        owners=chance.choice((0, 0, 1)),
        versions=chance.choice(((1,), (2,), (1, 2))),
        timeouts_ms=chance.choice(((500,), (1500,), (500, 3000))),
        state_partitions=chance.randint(1, 2),
        compacted=compacted,
    )
    settings = {"log.cleaner.backoff.ms": 100 if compacted else chance.choice((100, 15_000))}
    plan = _strained(plan, scenario)
    if plan.retention:
        settings["retention.check.ms"] = 100
    if plan.members == CONSUMER:
        settings |= {"group.consumer.session.timeout.ms": 1000, "group.consumer.heartbeat.interval.ms": 300}
    load_seconds = max(scenario.load_seconds, TRANSACTIONS_LOAD_SECONDS)
    return replace(scenario, transactions=plan, load_seconds=load_seconds, settings=scenario.settings | settings)


def _strained(plan: TransactionPlan, scenario: Scenario) -> TransactionPlan:
    """What else the ledger and those who copy it go through."""
    chance = random.Random(f"{scenario.seed} transactional strain")
    # A broker that hears in one go that a replica has left it and that its topic is deleted keeps the log, and says so.
    passing = chance.random() < PASSING_SHARE and not scenario.moves
    flips = scenario.bytes_flip or scenario.decays
    if chance.random() < UNCLEAN_SHARE and not (plan.compacted or flips):
        # Where an epoch has several transactions, nobody can tell that the end of one is lost when the next writes.
        return replace(plan, copied_partitions=0, versions=(2,), unclean=True, passing=passing)
    members = chance.choice((CLASSIC, CONSUMER)) if chance.random() < MEMBERS_SHARE else ""
    plan = replace(plan, members=members if plan.copied_partitions else "", passing=passing)
    if plan.compacted:
        return plan
    retention = _kept(chance) if chance.random() < LEDGER_RETENTION_SHARE else {}
    return replace(plan, deletions=chance.random() < LEDGER_DELETIONS_SHARE, retention=retention)


def draw_plain(seed: int) -> Scenario:
    """Without transactions and share groups."""
    chance = random.Random(f"{seed} moves")
    scenario = _draw(seed)
    # What was moved away since the copy, and deleted, would have to come from where a restored copy has no replicas.
    if chance.random() < MOVES_SHARE and not scenario.restored:
        return moved(scenario, chance)
    # A copy may bring back a topic whose records are deleted.
    is_renewed = random.Random(f"{seed} renewal").random() < RENEWED_SHARE and not scenario.restored
    return replace(scenario, renewed=is_renewed)


def moved(scenario: Scenario, chance: random.Random) -> Scenario:
    """With a fourth broker, and moves that get so many bytes a second."""
    layouts = *scenario.layouts, chance.choice((PARTITIONED, SHARED))
    pace = {"replica.catchup.bytes.per.second": chance.choice((5000, 20_000, 50 << 20))}
    return replace(scenario, moves=True, decays=False, layouts=layouts, settings=scenario.settings | pace)


def _draw(seed: int) -> Scenario:
    chance = random.Random(f"{seed} scenario")
    courses = _courses(seed)
    lease_ms = chance.choice((500, 700, 1200))
    settings: dict[str, int] = {
        "broker.lease.ms": lease_ms,
        "replica.lag.time.max.ms": chance.choice((700, 1500)),
        "replica.link.timeout.ms": chance.choice((200, 600)),
        "replica.window.bytes": 1 << 16,
        "replica.catchup.bytes.per.second": chance.choice((5000, 50 << 20)),
        "checkpoint.ms": chance.choice((300, 60_000)),
        "commitlog.file.bytes": 1 << 16,
        "offsets.topic.partitions": 1 + seed % 2,
        "group.initial.rebalance.delay.ms": 100,
    }
    retention = _retention(seed)
    compacted = not retention and random.Random(f"{seed} compaction").random() < COMPACTED_SHARE
    if retention or compacted:
        settings |= {"retention.check.ms": 100, "log.cleaner.backoff.ms": 100}
    restored = random.Random(f"{seed} restore").random() < RESTORED_SHARE
    names = ("kept", "cached")
    topics = []
    for name, durability in zip(names, ("disk", "os"), strict=True):
        if name == "cached" and chance.random() < 0.3:
            continue
        overrides = {
            "durability": durability,
            "min.insync.replicas": "2",
            "segment.bytes": chance.choice(("1024", "4096", "1073741824")),
            "segment.index.bytes": "1024",
            "index.interval.bytes": "256",
            "flush.ms": chance.choice(("50", "500")),
        }
        topics.append(ScenarioTopic(name, chance.randint(1, 2), durability, overrides))
    return Scenario(
        seed=seed,
        layouts=tuple(chance.choice((PARTITIONED, SHARED)) for _ in range(REPLICAS)),
        topics=tuple(topics),
        settings=settings,
        sync_seconds=chance.choice(((0.0002, 0.003), (0.002, 0.02), (0.01, 0.2))),
        link_seconds=chance.choice(((0.0001, 0.001), (0.0001, 0.001), (0.001, 0.02), (0.0, 0.1))),
        jitter_seconds=chance.choice((0.0, 0.0005, 0.005)),
        load_seconds=max(chance.choice((1.5, 3.0, 5.0)), COURSE_LOAD_SECONDS if courses else 0.0),
        batch_pause_seconds=chance.choice((0.04, 0.08, 0.2)),
        in_flight=chance.choice((1, 3, 5)),
        producers=chance.choice((1, 2)),
        follower_reads=chance.choice((0.0, 0.3)),
        regime=_regime(seed, courses),
        courses=courses,
        syncs_fail=seed % 8 == 2,
        bytes_flip=seed % 8 == 7,
        decays=seed % 8 in DECAYS_OF and random.Random(f"{seed} decay").random() < DECAY_SHARE,
        groups=random.Random(f"{seed} groups").choice((0, 1, 1, 2)),
        deletions=not compacted and random.Random(f"{seed} deletions").random() < DELETIONS_SHARE,
        troubles=TROUBLES_OF.get(seed % 8, ()),
        retention=retention,
        compacted=compacted,
        administered=random.Random(f"{seed} administration").random() < ADMINISTERED_SHARE,
        restored=restored,
        quorum=not restored and random.Random(f"{seed} quorum").random() < QUORUM_SHARE,
    )


def _retention(seed: int) -> dict[str, str]:
    chance = random.Random(f"{seed} retention")
    return _kept(chance) if chance.random() < RETENTION_SHARE else {}


def _kept(chance: random.Random) -> dict[str, str]:
    """For a time, up to a size, or both."""
    by_size, by_time = {"retention.bytes": "3000"}, {"retention.ms": chance.choice(("300", "1500"))}
    return {"segment.bytes": "1024", **chance.choice((by_size, by_time, by_size | by_time))}


def _courses(seed: int) -> tuple[str, ...]:
    """Of most runs; what one of them needs of page caches must suit the other."""
    chance = random.Random(f"{seed} plan")
    if chance.random() < NO_COURSE_SHARE:
        return ()
    first, second = chance.sample(list(COURSES), 2)
    unsuited = OF_POWER if first in OF_PAGE_CACHES else OF_PAGE_CACHES if first in OF_POWER else ()
    return (first,) if second in unsuited or chance.random() < 0.5 else (first, second)


def _regime(seed: int, courses: tuple[str, ...]) -> str:
    if any(course in OF_POWER for course in courses):
        return ANY
    if any(course in OF_PAGE_CACHES for course in courses):
        return SPARE
    return random.Random(f"{seed} regime").choice((SPARE, SPARE, ANY))
