"""What a worker of Spark has imported is looked through once, not after every task."""

from __future__ import annotations

import subprocess
import sys

import pytest

from brokers import Broker
from headrace.client.admin import cluster as admin_cluster
from headrace.spark.connections import IDLE_MAX, cluster_at
from proving import proves

TASKS = """
import gc
from headrace.spark.connections import begin_task

seen = []
for _ in range(4):
    begin_task()
    seen.append(gc.get_freeze_count())
    gc.collect()
assert seen[0] == 0, seen
assert seen[1] > 10_000, seen
assert seen[1] == seen[2] == seen[3], seen
"""


@proves("S2")
def test_what_is_imported_is_put_aside_when_a_second_task_begins() -> None:
    subprocess.run([sys.executable, "-c", TASKS], check=True)


def test_connections_of_a_task_are_those_of_the_next_one(broker: Broker) -> None:
    def task() -> set[int]:
        with cluster_at(broker.bootstrap, 5_000) as one, cluster_at(broker.bootstrap, 5_000) as two:
            assert one is not two
            return {id(one.controller()), id(two.controller())}

    first = task()
    assert len(first) == IDLE_MAX
    assert task() == task() == first


def test_coordinators_of_ids_that_are_used_once_are_not_remembered_for_ever(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_cluster, "COORDINATORS_MAX", 3)
    with cluster_at(broker.bootstrap, 5_000) as cluster:
        for nth in range(10):
            assert cluster.transaction_coordinator(f"attempt-{nth}") is cluster.transaction_coordinator(
                f"attempt-{nth}"
            )
            assert len(cluster._coordinators) <= 3
