"""`headrace topic`: what topics there are, and changing them."""

from __future__ import annotations

from typing import Any

import click

from headrace.cli.completers import topic_names, topic_setting_names, topic_settings
from headrace.cli.options import json_option, pairs, with_cluster
from headrace.cli.output import counted, show_json, show_rows, show_table
from headrace.cli.setting_values import for_people
from headrace.cli.watch import watch_option
from headrace.client.admin import operations
from headrace.client.admin.cluster import Cluster
from headrace.client.connection.metadata import Topic


@click.group()
def topic() -> None:
    """Create, list, describe, alter and delete topics."""


@topic.command()
@click.argument("name")
@click.option("--partitions", type=click.IntRange(1), help="How many; else the broker's num.partitions.")
@click.option("--replicas", type=click.IntRange(1), help="Copies of each partition; else the broker's default.")
@click.option(
    "--config",
    "configs",
    multiple=True,
    metavar="NAME=VALUE",
    shell_complete=topic_settings,
    help="A topic setting; repeat.",
)
@click.option(
    "--like",
    metavar="TOPIC",
    shell_complete=topic_names,
    help="With the partitions, replicas and settings of this topic, where the other options do not say otherwise.",
)
@with_cluster
def create(
    cluster: Cluster,
    name: str,
    partitions: int | None,
    replicas: int | None,
    configs: tuple[str, ...],
    like: str | None,
) -> None:
    """Create topic NAME."""
    settings: dict[str, str] = {}
    if like is not None:
        pattern = cluster.topic(like).partitions
        partitions = partitions or len(pattern)
        replicas = replicas or max(len(partition.replicas) for partition in pattern)
        described = operations.describe_configs(cluster, "topic", like)
        settings = {entry.name: entry.value or "" for entry in described if entry.source == "topic"}
    operations.create_topic(
        cluster,
        name,
        partitions=partitions or operations.DEFAULT_COUNT,
        replicas=replicas or operations.DEFAULT_COUNT,
        configs=settings | pairs(configs, "--config"),
    )
    click.echo(f"created topic {name}")


@topic.command("list")
@click.option("--internal", is_flag=True, help="Also topics that brokers keep for themselves.")
@json_option
@watch_option
@with_cluster
def list_topics(cluster: Cluster, internal: bool, as_json: bool) -> None:
    """List topics."""
    rows = [
        {
            "topic": found.name,
            "partitions": len(found.partitions),
            "replicas": max((len(partition.replicas) for partition in found.partitions), default=0),
            "internal": found.is_internal,
        }
        for found in operations.list_topics(cluster, internal=internal)
    ]
    columns = ("topic", "partitions", "replicas")
    show_rows(rows, (*columns, "internal") if internal else columns, as_json)


@topic.command()
@click.argument("name", shell_complete=topic_names)
@json_option
@watch_option
@with_cluster
def describe(cluster: Cluster, name: str, as_json: bool) -> None:
    """Show the partitions of topic NAME and the settings that are its own."""
    found = cluster.topic(name)
    rows = _partition_rows(cluster, found)
    configs = operations.describe_configs(cluster, "topic", name)
    own = {entry.name: entry.value for entry in configs if entry.source == "topic"}
    indexed = any(entry.name == "key.index" and entry.value == "true" for entry in configs)
    lossy = _is_lossy(configs)
    if indexed:
        # It brings the records' codecs along, which no other command here wants.
        from headrace.client.admin import query

        positions = {position.partition: position.behind for position in query.index_positions(cluster, found)}
        for row in rows:
            row["key_index_behind"] = positions.get(row["partition"])
    if as_json:
        head = {"topic": name, "topic_id": found.topic_id.hex(), "settings": own, "lossy": lossy}
        show_json({**head, "partitions": rows})
        return
    click.echo(f"topic {name}, {counted(len(rows), 'partition')}, id {found.topic_id.hex()}")
    for setting, value in own.items():
        click.echo(f"  {setting} = {for_people(setting, value)}")
    if lossy:
        click.echo(
            "  lossy: acks=-1 is answered before all in-sync replicas have a record; see `headrace topic levels`"
        )
    shown = ("partition", "leader", "epoch", "replicas", "in_sync", "start", "end")
    show_table(rows, (*shown, "key_index_behind") if indexed else shown)


def _is_lossy(configs: list[operations.Config]) -> bool:
    """Whether acknowledged records can be lost by a change of leader; brokers that are not Headrace do not say."""
    from headrace.partitions.levels import is_lossy
    from headrace.settings.declared import LEVELS

    values = {entry.name: entry.value or "" for entry in configs}
    values |= LEVELS.get(values.get("reliability", ""), {})
    values |= {entry.name: entry.value or "" for entry in configs if entry.source == "topic"}
    chosen = [values.get(name) for name in ("durability", "replication.point", "replication.policy")]
    return None not in chosen and is_lossy(*map(str, chosen))


def _partition_rows(cluster: Cluster, found: Topic) -> list[dict[str, Any]]:
    # What reads logs brings checksums and codecs with it, which take longer to load than all the rest of a command.
    from headrace.client.admin.fetch import list_offsets
    from headrace.client.fetch_requests import EARLIEST, LATEST

    led = [partition.index for partition in found.partitions if partition.leader_id >= 0]
    starts = list_offsets(cluster, found.name, dict.fromkeys(led, EARLIEST))
    ends = list_offsets(cluster, found.name, dict.fromkeys(led, LATEST))
    return [
        {
            "partition": partition.index,
            "leader": partition.leader_id if partition.leader_id >= 0 else None,
            "epoch": partition.leader_epoch,
            "replicas": list(partition.replicas),
            "in_sync": list(partition.in_sync),
            "start": starts[partition.index].offset if partition.index in starts else None,
            "end": ends[partition.index].offset if partition.index in ends else None,
        }
        for partition in found.partitions
    ]


@topic.command()
@click.argument("name", shell_complete=topic_names)
@click.option("--partitions", type=click.IntRange(1), help="Raise the number of partitions to this.")
@click.option(
    "--config",
    "configs",
    multiple=True,
    metavar="NAME=VALUE",
    shell_complete=topic_settings,
    help="Set a topic setting; repeat.",
)
@click.option(
    "--unset",
    multiple=True,
    metavar="NAME",
    shell_complete=topic_setting_names,
    help="Bring a setting back to its default; repeat.",
)
@with_cluster
def alter(
    cluster: Cluster, name: str, partitions: int | None, configs: tuple[str, ...], unset: tuple[str, ...]
) -> None:
    """Change topic NAME. Partitions can be added, not taken away."""
    if not (partitions or configs or unset):
        raise click.UsageError("nothing to change: give --partitions, --config or --unset")
    if configs or unset:
        operations.alter_configs(cluster, "topic", name, values=pairs(configs, "--config"), unset=unset)
    if partitions:
        operations.create_partitions(cluster, name, partitions)
    click.echo(f"altered topic {name}")


@topic.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=topic_names)
@with_cluster
def delete(cluster: Cluster, names: tuple[str, ...]) -> None:
    """Delete topics with all that is in them."""
    for name in names:
        operations.delete_topic(cluster, name)
        click.echo(f"deleted topic {name}")


@topic.command()
@json_option
def levels(as_json: bool) -> None:
    """Show the named reliability levels: what each can lose, and when a topic is unavailable.

    `headrace topic create NAME --config reliability=LEVEL` chooses one. acks=-1 waits
    for it; a lossy level can lose acknowledged records when its leader changes.
    """
    from headrace.partitions.levels import NAMED

    rows = [
        {
            "level": level.name,
            "durability": level.durability,
            "replication_point": level.point,
            "policy": level.policy,
            "lossy": level.is_lossy,
            "loses_records_when": level.loses,
            "is_unavailable": level.unavailable,
        }
        for level in NAMED
    ]
    show_rows(rows, tuple(rows[0]), as_json)
