"""`headrace cluster`: the brokers there are, what each of them carries, and a cluster on this machine to try it on."""

from __future__ import annotations

from typing import Any

import click

from headrace.cli import health
from headrace.cli.accept_metadata import accept_metadata
from headrace.cli.cluster_reach import ReachedCluster, with_reached
from headrace.cli.local.commands import down, kill, start, status, up
from headrace.cli.local.demo import demo_loss
from headrace.cli.options import json_option
from headrace.cli.output import optional_bytes, show_json, show_table
from headrace.cli.rebalance import rebalance
from headrace.client.admin import operations


@click.group()
def cluster() -> None:
    """Describe a cluster and its brokers; run one on this machine."""


for command in (up, status, start, kill, demo_loss, down, rebalance, accept_metadata):
    cluster.add_command(command)


@cluster.command()
@json_option
@with_reached
def describe(cluster: ReachedCluster, as_json: bool) -> int:
    """Show the cluster's id, its brokers, what each leads and stores, and which
    partitions are not as they should be.

    The exit code is 0 only if every broker has answered.
    """
    described = operations.describe_cluster(cluster)
    partitions = [part for found in cluster.retry(cluster.topology).topics.values() for part in found.partitions]
    stored = dict.fromkeys(cluster.answering, 0)
    for size in operations.describe_log_folders(cluster, brokers=cluster.answering):
        stored[size.broker_id] = stored.get(size.broker_id, 0) + size.size_bytes
    rows: list[dict[str, Any]] = [
        {
            "broker": broker.broker_id,
            "address": str(broker.address),
            "rack": broker.rack,
            "controller": broker.broker_id == described.controller_id,
            "leads": sum(part.leader_id == broker.broker_id for part in partitions),
            "replicas": sum(broker.broker_id in part.replicas for part in partitions),
            "layout": _layout(cluster, broker.broker_id),
            "stored_bytes": stored.get(broker.broker_id),
            "answers": broker.broker_id not in cluster.silent,
        }
        for broker in described.brokers
    ]
    found = health.ask(cluster)
    if as_json:
        told = {
            "cluster_id": described.cluster_id,
            "controller": described.controller_id,
            "brokers": rows,
            "partition_count": found.partition_count,
            "leaderless": found.leaderless,
            "behind": found.behind,
            "below_factor": found.below_factor,
            "in_doubt": found.in_doubt,
        }
        show_json(told)
    else:
        click.echo(f"cluster {described.cluster_id}")
        shown = [{**row, "stored": optional_bytes(stored.get(row["broker"]))} for row in rows]
        show_table(shown, ("broker", "address", "rack", "controller", "leads", "replicas", "layout", "stored"))
        health.show(found)
    return 1 if cluster.silent else 0


def _layout(cluster: ReachedCluster, broker_id: int) -> str | None:
    """How the broker keeps its logs; brokers that are not Headrace do not say."""
    if broker_id in cluster.silent:
        return None
    settings = operations.describe_configs(cluster, "broker", str(broker_id))
    return next((setting.value for setting in settings if setting.name == "log.layout"), None)
