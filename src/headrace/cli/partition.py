"""`headrace partition`: where every replica is and how far it has come; moving one, electing leaders."""

from __future__ import annotations

import click

from headrace.cli import placement as views
from headrace.cli.cluster_reach import ReachedCluster, with_reached
from headrace.cli.completers import topic_names
from headrace.cli.options import json_option
from headrace.cli.output import NOTHING, show_json, show_table
from headrace.cli.watch import watch_option
from headrace.client.admin import placement
from headrace.client.errors import Refusal
from headrace.errors import ErrorCode


@click.group()
def partition() -> None:
    """List and move partitions, elect their leaders."""


@partition.command("list")
@click.option("--topic", shell_complete=topic_names, help="Only this topic.")
@click.option("--by", type=click.Choice(["topic", "broker"]), default="topic", show_default=True, help="Which view.")
@click.option("--internal", is_flag=True, help="Also topics that brokers keep for themselves.")
@json_option
@watch_option
@with_reached
def list_partitions(cluster: ReachedCluster, topic: str | None, by: str, internal: bool, as_json: bool) -> None:
    """List replicas with in-sync flag and watermark: by topic, or by the broker that holds them."""
    if topic is not None:
        cluster.topic(topic)
    found = views.ask(cluster)
    rows = (views.partition_rows if by == "topic" else views.held_rows)(found, topic, internal)
    if as_json:
        show_json(rows)
        return
    if by == "broker":
        show_table(rows, ("broker", "live", "role", "topic", "partition", "in_sync", "watermark"))
        return
    for row in rows:
        row["watermarks"] = [NOTHING if mark is None else mark for mark in row["watermarks"]]
    columns = ["topic", "partition", "leader", "epoch", "replicas", "in_sync", "watermarks"]
    columns += [name for name in ("down", "moving_to", "lost") if any(row[name] for row in rows)]
    show_table(rows, columns)


@partition.command()
@click.argument("topic", shell_complete=topic_names)
@click.argument("number", type=click.IntRange(0), metavar="PARTITION")
@click.option(
    "--to", "target", metavar="BROKER,...", help="The brokers that shall hold it, the preferred leader first."
)
@click.option("--cancel", is_flag=True, help="End the move that is under way, and stay.")
@with_reached
def move(cluster: ReachedCluster, topic: str, number: int, target: str | None, cancel: bool) -> None:
    """Move a partition to other brokers, with its data."""
    if cancel == (target is not None):
        raise click.UsageError("give --to BROKER,... or --cancel")
    cluster.partition(topic, number)
    brokers = None if target is None else _brokers(target)
    placement.order_moves(cluster, {(topic, number): brokers})
    click.echo(f"{topic}-{number} " + ("stays where it is" if brokers is None else f"is being moved to {target}"))


def _brokers(text: str) -> list[int]:
    try:
        return [int(item) for item in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of broker numbers such as 1,2,3", param_hint="--to") from None


@partition.command()
@click.argument("topic", required=False, shell_complete=topic_names)
@click.argument("number", type=click.IntRange(0), required=False, metavar="[PARTITION]")
@click.option("--preferred", "kind", flag_value="preferred", default=True, help="The first replica leads again.")
@click.option(
    "--unclean",
    "kind",
    flag_value="unclean",
    help="A partition without a leader gets one from whatever replica is alive: what that one lacks is lost.",
)
@json_option
@with_reached
def elect(cluster: ReachedCluster, topic: str | None, number: int | None, kind: str, as_json: bool) -> int:
    """Elect leaders: of all partitions, of those of TOPIC, or of one.

    The exit code is 0 only if every election came about.
    """
    if kind == "unclean" and number is None:
        raise click.UsageError("an unclean election can lose records: name TOPIC and PARTITION")
    wanted = None
    if topic is not None:
        numbers = [part.index for part in cluster.topic(topic).partitions] if number is None else [number]
        wanted = [(topic, cluster.partition(topic, each).index) for each in numbers]
    found = placement.elect_leaders(cluster, kind, wanted)
    rows = [
        {
            "topic": where[0],
            "partition": where[1],
            "result": _result(refusal),
        }
        for where, refusal in sorted(found.items())
    ]
    if as_json:
        show_json(rows)
    elif rows:
        show_table(rows, ("topic", "partition", "result"))
    else:
        click.echo("every partition is led by its preferred leader")
    return 1 if any(refusal is not None and not _is_needless(refusal) for refusal in found.values()) else 0


def _is_needless(refusal: Refusal) -> bool:
    return refusal.kafka_code == ErrorCode.ELECTION_NOT_NEEDED


def _result(refusal: Refusal | None) -> str:
    if refusal is None:
        return "elected"
    return "not needed" if _is_needless(refusal) else str(refusal)
