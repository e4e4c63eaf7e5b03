"""`headrace broker`: the brokers of a cluster, what each holds, and emptying one before it leaves."""

from __future__ import annotations

import click

from headrace.cli import placement as views
from headrace.cli.cluster_reach import ReachedCluster, with_reached
from headrace.cli.options import json_option
from headrace.cli.output import optional_bytes, show_json, show_rows, show_table
from headrace.cli.rebalance import partition_sizes, show_plan
from headrace.cli.watch import watch_option
from headrace.client.admin import operations, placement
from headrace.errors import OperatorError


@click.group()
def broker() -> None:
    """List, describe and drain brokers."""


@broker.command("list")
@json_option
@watch_option
@with_reached
def list_brokers(cluster: ReachedCluster, as_json: bool) -> None:
    """List brokers, also those that are down and hold something."""
    rows = views.broker_rows(views.ask(cluster))
    show_rows(rows, ("broker", "state", "address", "rack", "controller", "leads", "follows", "behind"), as_json)


@broker.command()
@click.argument("number", type=int)
@json_option
@watch_option
@with_reached
def describe(cluster: ReachedCluster, number: int, as_json: bool) -> None:
    """Show what broker NUMBER leads and follows, with watermarks, and what it stores."""
    found = views.ask(cluster)
    head = next((row for row in views.broker_rows(found) if row["broker"] == number), None)
    if head is None:
        raise OperatorError(f"there is no broker {number}; `headrace broker list` shows what there is")
    rows = [row for row in views.held_rows(found, None, True) if row["broker"] == number]
    sizes = {
        (size.topic, size.partition): size.size_bytes
        for size in operations.describe_log_folders(cluster, brokers={number} & set(cluster.answering))
    }
    for row in rows:
        row["stored_bytes"] = sizes.get((row["topic"], row["partition"]))
    if as_json:
        show_json({**head, "replicas": rows})
        return
    click.echo(
        f"broker {number}, {head['state']}, {head['address'] or 'no address'}"
        + (", controller" if head["controller"] else "")
        + f", {optional_bytes(sum(sizes.values()) if number in cluster.answering else None)} stored"
    )
    show_table(rows, ("role", "topic", "partition", "in_sync", "watermark", "stored_bytes"))


@broker.command()
@click.argument("number", type=int)
@click.option("--dry-run", is_flag=True, help="Show what would be moved where, and change nothing.")
@click.option("--cancel", is_flag=True, help="Let it take replicas again.")
@json_option
@with_reached
def drain(cluster: ReachedCluster, number: int, dry_run: bool, cancel: bool, as_json: bool) -> None:
    """Move everything away from broker NUMBER, and put nothing new on it.

    The controller moves replicas with their data, a few at a time; `headrace
    broker describe` shows what is left. The broker may be down for good.
    """
    action: placement.Action = "undrain" if cancel else "drain"
    plan = placement.plan_placement(cluster, action, number, dry_run=dry_run)
    if not cancel:
        show_plan(plan, partition_sizes(cluster), as_json)
    elif as_json:
        show_json({"draining": list(plan.draining)})
    if not as_json:
        done = "takes replicas again" if cancel else "is being drained"
        click.echo("nothing was changed" if dry_run else f"broker {number} {done}")
