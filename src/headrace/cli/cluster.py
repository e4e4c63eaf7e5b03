"""`headrace cluster`: the brokers there are, what each of them carries, and a cluster on this machine to try it on."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from headrace.cli import health, placement
from headrace.cli.cluster_reach import ReachedCluster, with_reached
from headrace.cli.local.commands import down, kill, start, status, up
from headrace.cli.local.demo import demo_loss
from headrace.cli.options import json_option
from headrace.cli.output import optional_bytes, show_json, show_table
from headrace.cli.rebalance import rebalance
from headrace.cli.watch import watch_option
from headrace.client.admin import operations
from headrace.client.admin.operations import MetadataDoubt, metadata_doubts


@click.group()
def cluster() -> None:
    """Describe a cluster and its brokers; run one on this machine."""


for command in (up, status, start, kill, demo_loss, down, rebalance):
    cluster.add_command(command)


@cluster.command()
@json_option
@watch_option
@with_reached
def describe(cluster: ReachedCluster, as_json: bool) -> int:
    """Show the cluster's id, its brokers, what each leads and stores, and which
    partitions are not as they should be.

    The exit code is 0 only if every broker has answered, also those that hold
    something and are down.
    """
    described = operations.describe_cluster(cluster)
    addresses = {broker.broker_id: str(broker.address) for broker in described.brokers}
    stored = dict.fromkeys(cluster.answering, 0)
    for size in operations.describe_log_folders(cluster, brokers=cluster.answering):
        stored[size.broker_id] = stored.get(size.broker_id, 0) + size.size_bytes
    rows: list[dict[str, Any]] = [
        {
            "broker": row.broker,
            "state": health.state_of(row.live, row.broker in cluster.silent),
            "address": addresses.get(row.broker),
            "rack": row.rack,
            "controller": row.broker == described.controller_id,
            "leads": len(row.leads),
            "replicas": len(row.leads) + len(row.follows),
            "layout": _layout(cluster, row.broker) if row.live else None,
            "stored_bytes": stored.get(row.broker),
            "answers": row.live and row.broker not in cluster.silent,
        }
        for row in placement.brokers_of(cluster.retry(cluster.topology))
    ]
    found = health.ask(cluster, cluster.silent)
    if as_json:
        asked = {"cluster_id": described.cluster_id, "controller": described.controller_id, "brokers": rows}
        show_json(asdict(found) | asked)
    else:
        click.echo(f"cluster {described.cluster_id}")
        shown = [{**row, "stored": optional_bytes(stored.get(row["broker"]))} for row in rows]
        show_table(shown, ("broker", "state", "address", "rack", "controller", "leads", "replicas", "layout", "stored"))
        health.show(found)
    return 0 if all(row["answers"] for row in rows) else 1


def _layout(cluster: ReachedCluster, broker_id: int) -> str | None:
    """How the broker keeps its logs; brokers that are not Headrace do not say."""
    if broker_id in cluster.silent:
        return None
    settings = operations.describe_configs(cluster, "broker", str(broker_id))
    return next((setting.value for setting in settings if setting.name == "log.layout"), None)


@cluster.command("accept-metadata")
@click.option("--dry-run", is_flag=True, help="Show what brokers hold that the metadata does not know; change nothing.")
@json_option
@with_reached
def accept_metadata(cluster: ReachedCluster, dry_run: bool, as_json: bool) -> int:
    """Let the cluster go on with metadata that was restored from an older copy.

    When brokers find that coordination has gone back to an older state, they change nothing until an operator
    has decided. Better than this: stop the brokers, put newer metadata back, start them. With this, what the
    metadata says now holds: every partition waits until all its replicas have said what they hold and goes on
    with the one that holds most; logs of topics that have vanished are set aside and not deleted.

    Start every broker first. The exit code is 1 if --dry-run finds a doubt.
    """
    doubts = metadata_doubts(cluster)
    if doubts and not dry_run:
        metadata_doubts(cluster, accept=True)
    if as_json:
        show_json({"accepted": bool(doubts) and not dry_run, "doubts": [_doubt_json(doubt) for doubt in doubts]})
    elif not doubts:
        click.echo("no broker doubts the metadata: nothing was changed")
    else:
        _show_doubts(doubts)
        click.echo("nothing was changed" if dry_run else "accepted: partitions are led again as their replicas report")
    return 1 if doubts and dry_run else 0


def _doubt_json(doubt: MetadataDoubt) -> dict[str, object]:
    return {**asdict(doubt), "differences": _difference_rows(doubt)}


def _difference_rows(doubt: MetadataDoubt) -> list[dict[str, object]]:
    return [{**asdict(row), "topic_id": row.topic_id.hex()} for row in doubt.differences]


def _show_doubts(doubts: list[MetadataDoubt]) -> None:
    for doubt in doubts:
        click.echo(
            f"broker {doubt.broker_id} has seen revision {doubt.seen_revision}, and found {doubt.found_revision}; "
            f"{doubt.difference_count} of its logs differ"
        )
        if rows := _difference_rows(doubt):
            show_table(rows, ("kind", "topic", "partition", "topic_id", "detail"))
