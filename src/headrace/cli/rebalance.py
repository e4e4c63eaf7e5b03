"""`headrace cluster rebalance`: as many replicas and leaderships on every broker as on the others.

Moves are orders, and the data follows; leaders change only when their new replicas have it. So it waits for the moves
that it ordered, and then lets the preferred leaders be elected.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any, Final

import click

from headrace.cli import EXIT_FAILED
from headrace.cli.cluster_reach import ReachedCluster, with_reached
from headrace.cli.options import json_option
from headrace.cli.output import format_bytes, optional_bytes, show_json, show_table
from headrace.cli.placement import move_rows
from headrace.client.admin import operations, placement
from headrace.client.admin.placement import PlacementPlan, Where
from headrace.client.errors import Refusal

WAIT_SECONDS: Final = 600.0
ASK_AGAIN_SECONDS: Final = 0.25
REASONS_SHOWN: Final = 5
LATER: Final = (
    "when `headrace partition list` shows no moves, `headrace partition elect` lets the preferred leaders lead"
)


@click.command()
@click.option("--dry-run", is_flag=True, help="Show what would be moved where, and change nothing.")
@click.option(
    "--wait",
    "wait_seconds",
    type=click.FloatRange(0),
    default=WAIT_SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for the moves, to elect leaders then; 0 leaves that to you.",
)
@json_option
@with_reached
def rebalance(cluster: ReachedCluster, dry_run: bool, wait_seconds: float, as_json: bool) -> int:
    """Move replicas, with their data, until every broker holds and leads as much.

    Topics placed on the ring go where the ring says. `headrace partition list`
    shows the moves under way. When they are done, leaders are elected; the exit
    code is 0 only if all of it came about.
    """
    plan = placement.plan_placement(cluster, "rebalance")
    elections = len(_misled(cluster, plan))
    told: dict[str, Any] = {"elections": elections}
    if not as_json:
        show_plan(plan, partition_sizes(cluster), as_json=False)
        click.echo(f"{elections} leaderships to change")
    if dry_run or not (plan.moves or elections):
        _end(cluster, plan, told, "nothing was changed", as_json)
        return 0
    ordered = {(move.topic, move.partition): move.after for move in plan.moves}
    if ordered:
        placement.order_moves(cluster, ordered)
    left = _wait_for_moves(cluster, ordered, wait_seconds)
    if left:
        _end(cluster, plan, told | {"moving": left}, f"{left} of {len(ordered)} moves are under way; {LATER}", as_json)
        return EXIT_FAILED if wait_seconds else 0
    refused = _elect(cluster, told)
    _end(cluster, plan, told, f"{len(ordered)} moves done, {told['elected']} leaders elected", as_json)
    for refusal in refused[:REASONS_SHOWN]:
        click.echo(f"headrace: {refusal}", err=True)
    return EXIT_FAILED if refused else 0


def _misled(cluster: ReachedCluster, plan: PlacementPlan) -> list[Where]:
    """Partitions that would not be led by their preferred leaders when the plan is carried out."""
    after = {(move.topic, move.partition): move.after for move in plan.moves}
    return [
        (name, partition.index)
        for name, topic in cluster.retry(cluster.topology).topics.items()
        for partition in topic.partitions
        if partition.leader_id != (after.get((name, partition.index)) or partition.replicas)[0]
    ]


def _wait_for_moves(cluster: ReachedCluster, ordered: Collection[Where], wait_seconds: float) -> int:
    """How many of those ordered are still under way when the time is up."""
    give_up = time.monotonic() + wait_seconds
    try:
        while left := sum((move.topic, move.partition) in ordered for move in placement.moves_under_way(cluster)):
            if time.monotonic() >= give_up:
                return left
            time.sleep(ASK_AGAIN_SECONDS)
    except KeyboardInterrupt:
        click.echo(f"headrace: the moves go on; {LATER}", err=True)
        raise
    return 0


def _elect(cluster: ReachedCluster, told: dict[str, Any]) -> list[Refusal]:
    found = placement.elect_leaders(cluster, "preferred")
    refused = [refusal for refusal in found.values() if refusal is not None]
    told["elected"] = len(found) - len(refused)
    return refused


def _end(cluster: ReachedCluster, plan: PlacementPlan, told: dict[str, Any], said: str, as_json: bool) -> None:
    if as_json:
        show_json(plan_as_json(plan, partition_sizes(cluster)) | told)
    else:
        click.echo(said)


def partition_sizes(cluster: ReachedCluster) -> dict[tuple[str, int], int]:
    """Bytes of the largest replica of each partition, as far as brokers answer."""
    sizes: dict[tuple[str, int], int] = {}
    for size in operations.describe_log_folders(cluster, brokers=cluster.answering):
        where = size.topic, size.partition
        sizes[where] = max(size.size_bytes, sizes.get(where, 0))
    return sizes


def plan_as_json(plan: PlacementPlan, sizes: dict[tuple[str, int], int]) -> dict[str, Any]:
    return {"draining": list(plan.draining), "moves": move_rows(plan, sizes)}


def show_plan(plan: PlacementPlan, sizes: dict[tuple[str, int], int], as_json: bool) -> None:
    if as_json:
        show_json(plan_as_json(plan, sizes))
        return
    rows = move_rows(plan, sizes)
    if rows:
        shown = [{**row, "copied": optional_bytes(row["copied_bytes"])} for row in rows]
        show_table(shown, ("topic", "partition", "from", "to", "copied"))
    copied = sum(row["copied_bytes"] or 0 for row in rows)
    more = " and what nobody answers for" if any(row["copied_bytes"] is None for row in rows) else ""
    click.echo(f"{len(rows)} partitions to move, {format_bytes(copied)}{more} to copy")
