"""The topic in which the Spark sink keeps its decisions, as others see it."""

from __future__ import annotations

from collections.abc import Callable

from brokers import Broker
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.operations import create_topic, list_topics
from headrace.pipelines import replay
from headrace.spark import decision_log, plan
from headrace.spark.options import Topics


def test_the_sinks_own_topic_is_listed_and_matched_by_nobody(fresh_broker: Callable[..., Broker]) -> None:
    broker = fresh_broker()
    with Cluster(broker.bootstrap) as cluster:
        for name in (decision_log.TOPIC, replay.PROGRESS_TOPIC, "orders"):
            create_topic(cluster, name, partitions=1)
        assert [topic.name for topic in list_topics(cluster)] == ["orders"]
        assert {decision_log.TOPIC, replay.PROGRESS_TOPIC} < {each.name for each in list_topics(cluster, internal=True)}
        assert plan.find(cluster, Topics(pattern=".*")).places == (("orders", 0),)
        assert plan.find(cluster, Topics(names=(decision_log.TOPIC,))).places == ((decision_log.TOPIC, 0),)
