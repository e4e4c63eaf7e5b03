from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from headrace.cluster import keys
from headrace.cluster.changes import Changes
from headrace.cluster.config import ConfigChange, Configs, Operation, changed, durability_altered_at, effective
from headrace.cluster.image import Broker, Endpoint, encode_broker
from headrace.cluster.topics import CreateTopic, EnlargeTopic, TopicLimits, Topics, draft_topic, plan_create
from headrace.cluster.view import ClusterView
from headrace.coordination.embedded import EmbeddedCoordination
from headrace.errors import (
    HeadraceError,
    InvalidAssignment,
    InvalidConfig,
    InvalidPartitions,
    InvalidReplication,
    InvalidRequest,
    InvalidTopicName,
    PolicyViolation,
    TopicExists,
    UnknownPartition,
)
from headrace.placement.ring import Ring
from headrace.placement.spread import Site
from headrace.ports.coordination import TransactionResult
from headrace.settings.values import TOPIC_BY_NAME, load
from headrace.virtual.clock import VirtualClock
from proving import proves

NOW_MS = 1_700_000_000_000
PREFIX = "/headrace/c/"
LIMITS = TopicLimits(num_partitions=3, partitions_max=2000)
SETTINGS = load(environment={})


@dataclass(slots=True)
class Node:
    coordination: EmbeddedCoordination
    view: ClusterView
    topics: Topics
    configs: Configs


def counted_ids() -> Callable[[], bytes]:
    numbers = iter(range(1, 1000))
    return lambda: next(numbers).to_bytes(16, "big")


def unexpected(error: BaseException) -> None:
    raise AssertionError(error)


@asynccontextmanager
async def node(folder: Path, brokers: int = 1) -> AsyncIterator[Node]:
    clock = VirtualClock()
    coordination = EmbeddedCoordination(str(folder / "metadata.sqlite"), clock)
    for broker in range(1, brokers + 1):
        value = encode_broker(Broker(broker, {"x": Endpoint("h", broker)}, "i", 0))
        await coordination.put(keys.broker_key(PREFIX, broker), value)
    view = ClusterView(coordination, PREFIX, clock, unexpected)
    await view.start()
    changes = Changes(coordination, view)
    try:
        topics = Topics(changes, lambda: LIMITS, counted_ids(), lambda: NOW_MS)
        yield Node(coordination, view, topics, Configs(changes, lambda: SETTINGS))
    finally:
        await view.close()
        await coordination.close()


@proves("J7", "R4")
def test_a_topic_is_created_seen_kept_and_deleted(tmp_path: Path) -> None:
    async def body() -> None:
        async with node(tmp_path) as one:
            topic = await one.topics.create(CreateTopic("t", overrides={"retention.ms": "5"}))
            assert one.view.image.topics["t"] is topic
            assert [state.replicas for state in topic.partitions] == [(1,)] * 3
            assert {(state.leader, state.leader_epoch, state.isr) for state in topic.partitions} == {(1, 0, (1,))}
        async with node(tmp_path) as one:
            assert one.view.image.topics["t"] == topic
            await one.topics.delete("t")
            assert one.view.image.topics == {}
            assert (await one.coordination.list(PREFIX + "partitions/")).entries == ()
            with pytest.raises(UnknownPartition, match="no topic 't'"):
                await one.topics.delete("t")

    asyncio.run(body())


@proves("J7")
def test_a_deletion_that_comes_too_late_spares_the_topic_that_was_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        async with node(tmp_path) as one:
            await one.topics.create(CreateTopic("t"))
            transact = one.coordination.transact

            async def overtaken(*args: Any) -> TransactionResult:
                monkeypatch.undo()
                await one.topics.delete("t")
                await one.topics.create(CreateTopic("t", partitions=5))
                return await transact(*args)

            monkeypatch.setattr(one.coordination, "transact", overtaken)
            with pytest.raises(UnknownPartition, match="another has its name"):
                await one.topics.delete("t")
            assert len(one.view.image.topics["t"].partitions) == 5

    asyncio.run(body())


@proves("J7")
@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (CreateTopic("a b"), InvalidTopicName, "a-z"),
        (CreateTopic("__consumer_offsets"), InvalidTopicName, "reserved"),
        (CreateTopic("there"), TopicExists, "already"),
        (CreateTopic("the_re.x"), InvalidTopicName, "differs from topic 'the.re.x'"),
        (CreateTopic("t", partitions=0), InvalidPartitions, "1 to 10000"),
        (CreateTopic("t", partitions=-2), InvalidPartitions, "-2 partitions"),
        (CreateTopic("t", partitions=10_001), InvalidPartitions, "10000"),
        (CreateTopic("t", partitions=6000), PolicyViolation, r"partitions\.max"),
        (CreateTopic("t", replication_factor=3), InvalidReplication, "2 live brokers"),
        (CreateTopic("t", replication_factor=0), InvalidReplication, "at least 1"),
        (CreateTopic("t", overrides={"retention": "1"}), InvalidConfig, r"retention\."),
        (CreateTopic("t", overrides={"retention.ms": "soon"}), InvalidConfig, "whole number"),
        (CreateTopic("t", partitions=1, assignments={0: [1]}), InvalidRequest, "not with both"),
        (CreateTopic("t", assignments={0: [1], 2: [1]}), InvalidAssignment, "without a gap"),
        (CreateTopic("t", assignments={0: [1], 1: [1, 2]}), InvalidAssignment, "same number"),
        (CreateTopic("t", assignments={0: []}), InvalidAssignment, "at least one"),
        (CreateTopic("t", assignments={0: [1, 1]}), InvalidAssignment, "one replica"),
        (CreateTopic("t", assignments={0: [9]}), InvalidAssignment, r"live are \[1, 2\]"),
    ],
)
@pytest.mark.parametrize("validate_only", [False, True])
def test_a_topic_that_cannot_be_is_refused_with_the_reason(
    tmp_path: Path, request_: CreateTopic, error: type[HeadraceError], words: str, validate_only: bool
) -> None:
    async def body() -> None:
        async with node(tmp_path, brokers=2) as one:
            await one.topics.create(CreateTopic("there"))
            await one.topics.create(CreateTopic("the.re.x"))
            with pytest.raises(error, match=words):
                await one.topics.create(request_, validate_only=validate_only)
            assert set(one.view.image.topics) == {"there", "the.re.x"}

    asyncio.run(body())


def test_validation_answers_the_topic_and_changes_nothing(tmp_path: Path) -> None:
    async def body() -> None:
        async with node(tmp_path, brokers=2) as one:
            draft = await one.topics.create(CreateTopic("t", 4, 2), validate_only=True)
            assert [state.replicas for state in draft.partitions] == [(1, 2), (2, 1), (1, 2), (2, 1)]
            assert (await one.coordination.list(PREFIX + "topics/")).entries == ()

    asyncio.run(body())


def test_explicit_assignments_are_followed(tmp_path: Path) -> None:
    async def body() -> None:
        async with node(tmp_path, brokers=3) as one:
            topic = await one.topics.create(CreateTopic("t", assignments={0: [3, 1], 1: [2, 3]}))
            assert [state.replicas for state in topic.partitions] == [(3, 1), (2, 3)]
            assert [state.leader for state in topic.partitions] == [3, 2]

    asyncio.run(body())


@proves("L1", "J7")
def test_new_and_added_partitions_go_where_the_topic_s_placement_says(tmp_path: Path) -> None:
    async def body() -> None:
        async with node(tmp_path, brokers=5) as one:
            ring = Ring([Site(n) for n in range(1, 6)])
            await one.topics.create(CreateTopic("r", 4, 3, overrides={"placement": "ring"}))
            await one.topics.enlarge(EnlargeTopic("r", 9))
            placed = [state.replicas for state in one.view.image.topics["r"].partitions]
            assert placed == [ring.replicas_of("r", n, 3) for n in range(9)]
            spread = await one.topics.create(CreateTopic("s", 5, 3))
            assert {state.leader for state in spread.partitions} == {1, 2, 3, 4, 5}
            by_default = replace(LIMITS, placement="ring")
            draft = draft_topic(one.view.image, CreateTopic("d", 4, 2), by_default, b"d" * 16)
            assert [state.replicas for state in draft.partitions] == [ring.replicas_of("d", n, 2) for n in range(4)]
            with pytest.raises(InvalidConfig, match="spread, ring"):
                await one.topics.create(CreateTopic("x", overrides={"placement": "anywhere"}))

    asyncio.run(body())


@proves("L3")
@pytest.mark.parametrize("placement", ["spread", "ring"])
def test_a_draining_broker_takes_no_new_partitions(tmp_path: Path, placement: str) -> None:
    async def body() -> None:
        async with node(tmp_path, brokers=3) as one:
            drained = await one.coordination.put(keys.draining_key(PREFIX, 2), b"{}")
            await one.view.wait_for(lambda image: image.revision >= drained, 5.0)
            topic = await one.topics.create(CreateTopic("t", 8, 2, overrides={"placement": placement}))
            assert {frozenset(state.replicas) for state in topic.partitions} == {frozenset({1, 3})}
            with pytest.raises(InvalidReplication, match="2 live brokers"):
                await one.topics.create(CreateTopic("u", 1, 3))

    asyncio.run(body())


@proves("J7")
def test_a_topic_larger_than_a_transaction_appears_whole(tmp_path: Path) -> None:
    async def body() -> None:
        async with node(tmp_path) as one:
            seen: list[int] = []
            one.view.listen(lambda _, new: seen.append(len(new.topics["t"].partitions) if "t" in new.topics else 0))
            await one.topics.create(CreateTopic("t", 1000))
            await one.topics.enlarge(EnlargeTopic("t", 1450))
            assert {count for count in seen if count} == {1000, 1450}
            assert [state.index for state in one.view.image.topics["t"].partitions] == list(range(1450))

    asyncio.run(body())


@proves("J7")
def test_a_creation_cut_short_is_removed_at_the_next_start(tmp_path: Path) -> None:
    async def body() -> None:
        async with node(tmp_path) as one:
            steps = plan_create(one.view.image, CreateTopic("t", 250), LIMITS, b"x" * 16).steps
            for step in steps[:2]:
                await one.coordination.transact(step.compares, step.actions)
        async with node(tmp_path) as one:
            assert "t" not in one.view.image.topics
            with pytest.raises(TopicExists, match="being created"):
                await one.topics.create(CreateTopic("t"))
            await one.topics.finish_interrupted()
            assert one.view.image.unfinished == {}
            assert (await one.coordination.list(PREFIX + "partitions/")).entries == ()
            assert len((await one.topics.create(CreateTopic("t"))).partitions) == 3

    asyncio.run(body())


@proves("J7")
def test_a_topic_is_enlarged_and_never_shrunk(tmp_path: Path) -> None:
    async def body() -> None:
        async with node(tmp_path, brokers=2) as one:
            first = await one.topics.create(CreateTopic("t", assignments={0: [2]}))
            await one.topics.enlarge(EnlargeTopic("t", 3, assignments=[[1], [2]]))
            grown = one.view.image.topics["t"]
            assert grown.id == first.id
            assert [state.replicas for state in grown.partitions] == [(2,), (1,), (2,)]
            for count in (3, 1):
                with pytest.raises(InvalidPartitions, match="has 3 partitions"):
                    await one.topics.enlarge(EnlargeTopic("t", count))
            with pytest.raises(InvalidAssignment, match="2 partitions are added"):
                await one.topics.enlarge(EnlargeTopic("t", 5, assignments=[[1]]))
            with pytest.raises(PolicyViolation):
                await one.topics.enlarge(EnlargeTopic("t", 5000))
            with pytest.raises(UnknownPartition):
                await one.topics.enlarge(EnlargeTopic("none", 5), validate_only=True)
            await one.topics.enlarge(EnlargeTopic("t", 9), validate_only=True)
            assert one.view.image.topics["t"] is grown

    asyncio.run(body())


def test_of_many_creators_of_one_name_one_wins(tmp_path: Path) -> None:
    async def body() -> None:
        async with node(tmp_path) as one:
            requests = [one.topics.create(CreateTopic("t", 250)) for _ in range(5)]
            results = await asyncio.gather(*requests, return_exceptions=True)
            assert sum(isinstance(result, TopicExists) for result in results) == 4
            assert len(one.view.image.topics["t"].partitions) == 250

    asyncio.run(body())


def test_changes_of_one_topic_by_many_all_arrive(tmp_path: Path) -> None:
    async def body() -> None:
        async with node(tmp_path) as one:
            await one.topics.create(CreateTopic("t"))
            names = ["retention.ms", "retention.bytes", "segment.ms", "segment.bytes", "flush.ms"]
            alterations = [one.configs.alter_topic("t", [ConfigChange(name, Operation.SET, "5000")]) for name in names]
            await asyncio.gather(*alterations, one.topics.enlarge(EnlargeTopic("t", 8)))
            topic = one.view.image.topics["t"]
            assert topic.overrides == dict.fromkeys(names, "5000")
            assert len(topic.partitions) == 8

    asyncio.run(body())


def test_topic_settings_are_replaced_whole_or_altered_one_by_one(tmp_path: Path) -> None:
    async def body() -> None:
        async with node(tmp_path) as one:
            await one.topics.create(CreateTopic("t", overrides={"retention.ms": "1", "flush.ms": "2"}))

            def overrides() -> Mapping[str, str]:
                return one.view.image.topics["t"].overrides

            await one.configs.alter_topic("t", [ConfigChange("cleanup.policy", Operation.APPEND, "compact")])
            assert overrides() == {"retention.ms": "1", "flush.ms": "2", "cleanup.policy": "delete,compact"}
            await one.configs.alter_topic("t", [ConfigChange("retention.ms", Operation.DELETE)])
            await one.configs.alter_topic("t", {"retention.bytes": "9"}, validate_only=True)
            assert set(overrides()) == {"flush.ms", "cleanup.policy"}
            await one.configs.alter_topic("t", {"retention.bytes": "9"})
            assert overrides() == {"retention.bytes": "9"}
            for name, text in (("nonsense", "1"), ("flush.ms", "0"), ("cleanup.policy", "burn")):
                with pytest.raises(InvalidConfig, match=name):
                    await one.configs.alter_topic("t", [ConfigChange(name, Operation.SET, text)])
            with pytest.raises(UnknownPartition):
                await one.configs.alter_topic("none", {})

    asyncio.run(body())


@pytest.mark.parametrize(("name", "value"), [("durability", "disk"), ("reliability", "all-replicas")])
def test_a_topic_remembers_that_its_durability_was_another(tmp_path: Path, name: str, value: str) -> None:
    async def body() -> None:
        async with node(tmp_path) as one:

            def altered_at() -> int:
                return durability_altered_at(one.view.image, one.view.image.topics["t"])

            await one.topics.create(CreateTopic("t"))
            await one.configs.alter_topic("t", [ConfigChange("flush.ms", Operation.SET, "9")])
            assert altered_at() == 0
            change = ConfigChange(name, Operation.SET, value)
            await one.configs.alter_broker(None, [replace(change, name=f"log.{name}")])
            assert altered_at() == one.view.image.revision
            await one.configs.alter_topic("t", [change])
            await one.configs.alter_topic("t", [ConfigChange("flush.ms", Operation.SET, "8")])
            assert altered_at() == one.view.image.revision

    asyncio.run(body())


def test_list_settings_are_appended_to_and_subtracted_from_as_in_effect() -> None:
    def policy(current: Mapping[str, str], operation: Operation, value: str) -> str:
        change = ConfigChange("cleanup.policy", operation, value)
        return changed(current, [change], TOPIC_BY_NAME, {"cleanup.policy": ("compact",)})["cleanup.policy"]

    assert policy({}, Operation.APPEND, "delete") == "compact,delete"
    assert policy({}, Operation.APPEND, "compact") == "compact"
    assert policy({"cleanup.policy": "delete,compact"}, Operation.SUBTRACT, "delete") == "compact"
    with pytest.raises(InvalidConfig, match="not a list"):
        changed({}, [ConfigChange("flush.ms", Operation.APPEND, "1")], TOPIC_BY_NAME, {})
    with pytest.raises(InvalidRequest, match="needs a value"):
        changed({}, [ConfigChange("flush.ms", Operation.SET)], TOPIC_BY_NAME, {})
    with pytest.raises(InvalidConfig, match=r"unknown setting 'flush.mss'; did you mean 'flush.ms'\?"):
        changed({}, [ConfigChange("flush.mss", Operation.SET, "1")], TOPIC_BY_NAME, {})
    with pytest.raises(InvalidRequest, match="once"):
        changed({}, [ConfigChange("flush.ms", Operation.DELETE)] * 2, TOPIC_BY_NAME, {})


def test_broker_settings_are_altered_for_one_or_for_all(tmp_path: Path) -> None:
    async def body() -> None:
        async with node(tmp_path) as one:
            await one.configs.alter_broker(None, [ConfigChange("log.retention.ms", Operation.SET, "7")])
            await one.configs.alter_broker(None, [ConfigChange("num.partitions", Operation.SET, "4")])
            await one.configs.alter_broker(1, {"log.retention.ms": "8"})
            mine, other = (effective(SETTINGS, one.view.image, broker) for broker in (1, 2))
            assert (mine.values["log.retention.ms"], mine.sources["log.retention.ms"]) == (8, "broker")
            assert (other.values["log.retention.ms"], other.sources["log.retention.ms"]) == (7, "cluster")
            assert mine["num.partitions"] == 4
            with pytest.raises(InvalidConfig, match="restart"):
                await one.configs.alter_broker(1, {"node.id": "8"})
            with pytest.raises(InvalidConfig, match="unknown"):
                await one.configs.alter_broker(1, {"nonsense": "8"})
            await one.configs.alter_broker(1, {})
            await one.configs.alter_broker(1, {})
            assert one.view.image.broker_configs == {}

    asyncio.run(body())
