"""Brokers of two versions in one cluster: an older one leaves alone what only a newer one knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import pytest

from cluster.participants import Cluster, run
from headrace.cluster import keys
from headrace.cluster.changes import Plan
from headrace.cluster.config import ConfigChange, Operation, changed, plan_broker, plan_group, plan_topic
from headrace.cluster.image import Image, Topic, encode_topic
from headrace.errors import InvalidConfig
from headrace.ports.coordination import Put
from headrace.settings.values import BROKER_BY_NAME, GROUP_BY_NAME, TOPIC_BY_NAME, Setting

NEWER = {"of.a.newer.version": "7"}


def test_a_topic_setting_that_only_a_newer_broker_knows_is_ignored_and_kept() -> None:
    async def body(cluster: Cluster) -> None:
        for machine in cluster.machines.values():
            await machine.start()
        await cluster.create()
        await cluster.produce(b"a")
        topic = cluster.image().topics["t"]
        newer = replace(topic, overrides={"flush.ms": "11", **NEWER})
        put = Put(keys.topic_key(cluster.image().prefix, "t"), encode_topic(newer, 1))
        assert cluster.store.transact([], [put]).succeeded
        await cluster.until(lambda: cluster[1].replica().log.settings.flush_ms == 11)
        assert await cluster.produce(b"b") == 1
        change = ConfigChange("flush.ms", Operation.SET, "12")
        await cluster[1].process.run(cluster[1].participant.configs.alter_topic("t", [change]))
        await cluster.until(lambda: cluster[2].replica().log.settings.flush_ms == 12)
        assert cluster.image().topics["t"].overrides == {"flush.ms": "12", **NEWER}
        leader = cluster.leader()
        assert leader is not None
        leader.kill()
        assert await cluster.produce(b"c") == 2, "a controller elects by the settings that it knows"
        await leader.start()
        await cluster.until(lambda: len(cluster.state().isr) == 3)
        assert leader.replica().log.settings.flush_ms == 12

    run(3, body)


Alter = Callable[[Mapping[str, str]], Mapping[str, str]]


def one_set(known: Mapping[str, Setting], name: str, value: str) -> Alter:
    return lambda current: changed(current, [ConfigChange(name, Operation.SET, value)], known, {})


def all_set(given: Mapping[str, str]) -> Alter:
    return lambda _: given


def written(plan: Plan) -> bytes:
    (action,) = plan.steps[0].actions
    assert isinstance(action, Put)
    return action.value


def test_a_setting_that_is_not_known_here_stays_and_nobody_can_give_one() -> None:
    topics = {"t": Topic("t", bytes(16), (), NEWER)}
    image = Image("/headrace/x/", topics=topics, broker_configs={1: NEWER}, group_configs={"g": NEWER})
    for plan, known, name in (
        (partial(plan_topic, image, "t"), TOPIC_BY_NAME, "flush.ms"),
        (partial(plan_broker, image, 1), BROKER_BY_NAME, "num.partitions"),
        (partial(plan_group, image, "g"), GROUP_BY_NAME, "consumer.session.timeout.ms"),
    ):
        put = written(plan(one_set(known, name, "45000" if known is GROUP_BY_NAME else "12")))
        assert b'"of.a.newer.version"' in put
        assert name.encode() in put
        for given in ({"of.a.newer.version": "8"}, {**NEWER, "another": "1"}):
            with pytest.raises(InvalidConfig, match="unknown"):
                plan(all_set(given))
