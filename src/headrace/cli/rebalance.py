"""`headrace cluster rebalance`: as many replicas and leaderships on every broker as on the others."""

from __future__ import annotations

import click

from headrace.cli.cluster_reach import ReachedCluster, with_reached
from headrace.cli.options import json_option
from headrace.cli.output import format_bytes, optional_bytes, show_json, show_table
from headrace.cli.placement import move_rows
from headrace.client.admin import operations, placement
from headrace.client.admin.placement import PlacementPlan


@click.command()
@click.option("--dry-run", is_flag=True, help="Show what would be moved where, and change nothing.")
@json_option
@with_reached
def rebalance(cluster: ReachedCluster, dry_run: bool, as_json: bool) -> None:
    """Move replicas, with their data, until every broker holds and leads as much.

    Topics placed on the ring go where the ring says. `headrace partition list`
    shows the moves under way.
    """
    plan = placement.plan_placement(cluster, "rebalance")
    show_plan(plan, partition_sizes(cluster), as_json)
    if plan.moves and not dry_run:
        placement.order_moves(cluster, {(move.topic, move.partition): move.after for move in plan.moves})
    if not as_json:
        click.echo(f"{len(plan.moves)} moves ordered" if plan.moves and not dry_run else "nothing was changed")


def partition_sizes(cluster: ReachedCluster) -> dict[tuple[str, int], int]:
    """Bytes of the largest replica of each partition, as far as brokers answer."""
    sizes: dict[tuple[str, int], int] = {}
    for size in operations.describe_log_folders(cluster, brokers=cluster.answering):
        where = size.topic, size.partition
        sizes[where] = max(size.size_bytes, sizes.get(where, 0))
    return sizes


def show_plan(plan: PlacementPlan, sizes: dict[tuple[str, int], int], as_json: bool) -> None:
    rows = move_rows(plan, sizes)
    if as_json:
        show_json({"draining": list(plan.draining), "moves": rows})
        return
    if rows:
        shown = [{**row, "copied": optional_bytes(row["copied_bytes"])} for row in rows]
        show_table(shown, ("topic", "partition", "from", "to", "copied"))
    copied = sum(row["copied_bytes"] or 0 for row in rows)
    more = " and what nobody answers for" if any(row["copied_bytes"] is None for row in rows) else ""
    click.echo(f"{len(rows)} partitions to move, {format_bytes(copied)}{more} to copy")
