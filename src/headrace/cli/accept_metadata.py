"""`headrace cluster accept-metadata`: metadata that was restored from an older copy holds."""

from __future__ import annotations

from dataclasses import asdict

import click

from headrace.cli.cluster_reach import ReachedCluster, with_reached
from headrace.cli.options import json_option
from headrace.cli.output import show_json, show_table
from headrace.client.admin.operations import MetadataDoubt, metadata_doubts


@click.command("accept-metadata")
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
        show_json({"accepted": bool(doubts) and not dry_run, "doubts": [_plain(doubt) for doubt in doubts]})
    elif not doubts:
        click.echo("no broker doubts the metadata: nothing was changed")
    else:
        _show(doubts)
        click.echo("nothing was changed" if dry_run else "accepted: partitions are led again as their replicas report")
    return 1 if doubts and dry_run else 0


def _plain(doubt: MetadataDoubt) -> dict[str, object]:
    rows = [{**asdict(row), "topic_id": row.topic_id.hex()} for row in doubt.differences]
    return {**asdict(doubt), "differences": rows}


def _show(doubts: list[MetadataDoubt]) -> None:
    for doubt in doubts:
        click.echo(
            f"broker {doubt.broker_id} has seen revision {doubt.seen_revision}, and found {doubt.found_revision}; "
            f"{doubt.difference_count} of its logs differ"
        )
        rows = [{**asdict(row), "topic_id": row.topic_id.hex()} for row in doubt.differences]
        if rows:
            show_table(rows, ("kind", "topic", "partition", "topic_id", "detail"))
