"""`headrace group`: consumer groups, their members, their lag, and where they go on reading."""

from __future__ import annotations

from typing import Any

import click

from headrace.cli.options import json_option, time_ms, with_cluster
from headrace.cli.output import show_json, show_rows, show_table
from headrace.cli.times import EXPECTED
from headrace.client.admin import groups
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.fetch import list_offsets, offsets_at
from headrace.client.errors import Refusal
from headrace.client.fetch_requests import EARLIEST, LATEST
from headrace.errors import ErrorCode, OperatorError


@click.group()
def group() -> None:
    """List, describe, reset and delete consumer groups."""


@group.command("list")
@json_option
@with_cluster
def list_groups(cluster: Cluster, as_json: bool) -> None:
    """List consumer groups."""
    rows = [
        {"group": listed.group_id, "state": listed.state, "type": listed.protocol_type}
        for listed in groups.list_groups(cluster)
    ]
    show_rows(rows, ("group", "state", "type"), as_json)


@group.command()
@click.argument("name")
@json_option
@with_cluster
def describe(cluster: Cluster, name: str, as_json: bool) -> None:
    """Show the members of group NAME and its lag in each partition."""
    described = groups.describe_group(cluster, name)
    rows = _lag_rows(cluster, described)
    members = [
        {
            "member": member.member_id,
            "instance": member.instance_id,
            "client": member.client_id,
            "host": member.host,
            "partitions": sum(map(len, member.assignment.values())),
        }
        for member in described.members
    ]
    if as_json:
        head = {"group": name, "state": described.state, "assignor": described.assignor}
        show_json({**head, "members": members, "partitions": rows})
        return
    total = sum(row["lag"] or 0 for row in rows)
    click.echo(f"group {name}, {described.state}, assignor {described.assignor or '-'}, lag {total}")
    if members:
        show_table(members, ("member", "instance", "client", "host", "partitions"))
        click.echo()
    show_table(rows, ("topic", "partition", "committed", "end", "lag", "member"))


def _lag_rows(cluster: Cluster, described: groups.GroupDescription) -> list[dict[str, Any]]:
    committed = groups.fetch_offsets(cluster, described.group_id)
    owners = {
        (topic, partition): member.member_id
        for member in described.members
        for topic, partitions in member.assignment.items()
        for partition in partitions
    }
    ends = _ends(cluster, {*committed, *owners})
    rows = []
    for topic, partition in sorted({*committed, *owners}):
        at, end = committed.get((topic, partition)), ends.get((topic, partition))
        rows.append(
            {
                "topic": topic,
                "partition": partition,
                "committed": at,
                "end": end,
                "lag": None if end is None else max(0, end - (at or 0)),
                "member": owners.get((topic, partition)),
            }
        )
    return rows


def _ends(cluster: Cluster, partitions: set[tuple[str, int]]) -> dict[tuple[str, int], int]:
    """Ends of the logs; partitions of topics that are gone are left out."""
    topics = cluster.retry(lambda: cluster.topology(sorted({topic for topic, _ in partitions}))).topics
    ends: dict[tuple[str, int], int] = {}
    for name, topic in topics.items():
        wanted = [n for t, n in partitions if t == name and n < len(topic.partitions)]
        found = list_offsets(cluster, name, dict.fromkeys(wanted, LATEST))
        ends.update(((name, n), found[n].offset) for n in wanted)
    return ends


@group.command()
@click.argument("name")
@click.option("--to", "target", required=True, metavar="earliest|latest|OFFSET|TIME", help=f"TIME is {EXPECTED}.")
@click.option("--topic", "topics", multiple=True, help="Only this topic; repeat. Else all the group has read.")
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
    committed = groups.fetch_offsets(cluster, name)
    _refuse_members(cluster, name)
    wanted = topics or tuple(sorted({topic for topic, _ in committed}))
    if not wanted:
        raise OperatorError(f"group {name!r} has committed nothing; say with --topic what it shall read")
    rows: list[dict[str, Any]] = []
    for topic in wanted:
        numbers = [cluster.partition(topic, n).index for n in only] or [
            p.index for p in cluster.topic(topic).partitions
        ]
        goals = _goals(cluster, topic, numbers, target)
        rows += [
            {"topic": topic, "partition": n, "committed": committed.get((topic, n)), "new": goals[n]} for n in numbers
        ]
    if not dry_run:
        groups.commit_offsets(cluster, name, {(row["topic"], row["partition"]): row["new"] for row in rows})
    if as_json:
        show_json({"group": name, "dry_run": dry_run, "partitions": rows})
    else:
        show_table(rows, ("topic", "partition", "committed", "new"))


def _refuse_members(cluster: Cluster, name: str) -> None:
    try:
        described = groups.describe_group(cluster, name)
    except Refusal as refusal:
        if refusal.kafka_code == ErrorCode.GROUP_ID_NOT_FOUND:
            return
        raise
    if described.members:
        raise OperatorError(f"group {name!r} is in use (members: {len(described.members)}); stop its consumers first")


def _goals(cluster: Cluster, topic: str, partitions: list[int], target: str) -> dict[int, int]:
    """The offset to go to in each partition, never outside its log."""
    if target == "earliest":
        found = list_offsets(cluster, topic, dict.fromkeys(partitions, EARLIEST))
        return {n: found[n].offset for n in partitions}
    ends = list_offsets(cluster, topic, dict.fromkeys(partitions, LATEST))
    if target == "latest":
        return {n: ends[n].offset for n in partitions}
    if target.isdigit():
        starts = list_offsets(cluster, topic, dict.fromkeys(partitions, EARLIEST))
        return {n: min(max(int(target), starts[n].offset), ends[n].offset) for n in partitions}
    at_ms = time_ms(target, "--to", ", nor earliest, latest or an offset")
    return offsets_at(cluster, topic, partitions, at_ms)


@group.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@with_cluster
def delete(cluster: Cluster, names: tuple[str, ...]) -> None:
    """Delete groups with their committed offsets. They must have no members."""
    for name in names:
        groups.delete_group(cluster, name)
        click.echo(f"deleted group {name}")
