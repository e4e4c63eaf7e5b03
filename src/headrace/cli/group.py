"""`headrace group`: consumer groups and share groups, their members, their lag, and where they go on reading."""

from __future__ import annotations

from typing import Any

import click

from headrace.cli.completers import group_names, topic_names
from headrace.cli.options import json_option, time_ms, with_cluster
from headrace.cli.output import show_json, show_rows, show_table
from headrace.cli.times import EXPECTED
from headrace.cli.watch import watch_option
from headrace.client.admin import groups
from headrace.client.admin.cluster import Cluster
from headrace.client.fetch_requests import MOMENTS


@click.group()
def group() -> None:
    """List, describe, reset and delete consumer groups; list, describe and delete share groups."""


@group.command("list")
@json_option
@watch_option
@with_cluster
def list_groups(cluster: Cluster, as_json: bool) -> None:
    """List consumer groups and share groups."""
    rows = [
        {"group": listed.group_id, "state": listed.state, "type": listed.type, "protocol": listed.protocol_type}
        for listed in groups.list_groups(cluster)
    ]
    show_rows(rows, ("group", "state", "type", "protocol"), as_json)


@group.command()
@click.argument("name", shell_complete=group_names)
@json_option
@watch_option
@with_cluster
def describe(cluster: Cluster, name: str, as_json: bool) -> None:
    """Show the members of group NAME and its lag in each partition."""
    described = groups.describe_group(cluster, name)
    lags = groups.group_lag(cluster, described)
    rows = [_lag_row(found) for found in lags]
    authors = sorted({found.author for found in lags if found.author})
    members = [
        {
            "member": member.member_id,
            "instance": member.instance_id,
            "client": member.client_id,
            "host": member.host,
            "partitions": sum(map(len, member.assignment.values())),
            **_progress(member),
        }
        for member in described.members
    ]
    if as_json:
        head = {"group": name, "state": described.state, "type": described.type, "assignor": described.assignor}
        epochs = {"epoch": described.epoch, "assignment_epoch": described.assignment_epoch}
        show_json({**head, **epochs, "committed_by": authors, "members": members, "partitions": rows})
        return
    total = sum(row["lag"] or 0 for row in rows)
    epoch = "" if described.epoch is None else f"epoch {described.epoch}, assigned in {described.assignment_epoch}, "
    click.echo(f"group {name}, {described.state}, assignor {described.assignor or '-'}, {epoch}lag {total}")
    for author in authors:
        click.echo(f"committed by {author}")
    if members:
        more = () if described.epoch is None else ("target", "epoch")
        show_table(members, ("member", "instance", "client", "host", "partitions", *more))
        click.echo()
    show_table(rows, ("topic", "partition", "committed", "end", "lag", "member"))


def _progress(member: groups.GroupMember) -> dict[str, Any]:
    """Of a member of the consumer protocol: how many partitions it is to have, and which epoch it has reached."""
    if member.target is None:
        return {}
    return {"target": sum(map(len, member.target.values())), "epoch": member.epoch}


def _lag_row(found: groups.PartitionLag) -> dict[str, Any]:
    return {
        "topic": found.topic,
        "partition": found.partition,
        "committed": found.committed,
        "end": found.end,
        "lag": found.lag,
        "member": found.member_id,
    }


@group.command()
@click.argument("name", shell_complete=group_names)
@click.option("--to", "target", required=True, metavar="earliest|latest|OFFSET|TIME", help=f"TIME is {EXPECTED}.")
@click.option(
    "--topic",
    "topics",
    multiple=True,
    shell_complete=topic_names,
    help="Only this topic; repeat. Else all the group has read.",
)
@click.option("--partition", "only", type=click.IntRange(0), multiple=True, help="Only this partition; repeat.")
@click.option("--dry-run", is_flag=True, help="Show what would be committed, and change nothing.")
@json_option
@with_cluster
def reset(
    cluster: Cluster,
    name: str,
    target: str,
    topics: tuple[str, ...],
    only: tuple[int, ...],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Let group NAME go on reading elsewhere. It must have no members at the time."""
    moment, offset = _target(target)
    resets = groups.plan_reset(cluster, name, moment=moment, offset=offset, topics=topics, partitions=only)
    for found in resets:
        if offset is not None and found.offset != offset:
            where = f"{found.topic}-{found.partition}"
            click.echo(f"headrace: {where} does not have offset {offset}; {found.offset} is the nearest", err=True)
    rows = [
        {"topic": found.topic, "partition": found.partition, "committed": found.committed, "new": found.offset}
        for found in resets
    ]
    if not dry_run:
        groups.commit_offsets(cluster, name, {(found.topic, found.partition): found.offset for found in resets})
    if as_json:
        show_json({"group": name, "dry_run": dry_run, "partitions": rows})
    else:
        show_table(rows, ("topic", "partition", "committed", "new"))


def _target(text: str) -> tuple[int | None, int | None]:
    """A moment, or an offset."""
    if text in MOMENTS:
        return MOMENTS[text], None
    if text.isdigit():
        return None, int(text)
    return time_ms(text, "--to", ", nor earliest, latest or an offset"), None


@group.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=group_names)
@with_cluster
def delete(cluster: Cluster, names: tuple[str, ...]) -> None:
    """Delete groups with their committed offsets. They must have no members."""
    for name in names:
        groups.delete_group(cluster, name)
        click.echo(f"deleted group {name}")
