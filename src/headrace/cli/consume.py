"""`headrace consume`: records of a topic on standard output, up to the end of the log or on and on.

With a group, what was printed is committed after it has left this process, so a crash repeats records and loses none.
"""

from __future__ import annotations

import sys
from typing import Final

import click

from headrace.cli.formats import make_format
from headrace.cli.options import time_ms, with_cluster
from headrace.cli.record_reader import GroupReader, Reader, Start
from headrace.cli.times import EXPECTED
from headrace.client.admin.cluster import Cluster
from headrace.client.fetch_requests import FetchLimits

FOLLOW_WAIT_MS: Final = 500


@click.command()
@click.argument("topic")
@click.option("--from", "start", metavar="beginning|end|OFFSET", help="Where to start.  [default: beginning]")
@click.option("--from-time", metavar="TIME", help=f"Start at {EXPECTED}.")
@click.option("--partition", "partitions", type=click.IntRange(0), multiple=True, help="Only this one; repeat.")
@click.option("--group", "group_id", metavar="GROUP", help="Read as a member, from where the group left off.")
@click.option("--follow", "-f", is_flag=True, help="Wait for more at the end instead of stopping.")
@click.option("--count", "-n", type=click.IntRange(1), metavar="N", help="Stop after N records.")
@click.option(
    "--format",
    "format_name",
    default="value",
    show_default=True,
    metavar="FORMAT",
    help="value, key-value, json, or a template: %k key, %v value, %o offset, %p partition, %t topic, "
    "%T timestamp, %h headers.",
)
@click.option("--key-separator", default="\t", metavar="TEXT", help="For key-value.  [default: tab]")
@with_cluster
def consume(
    cluster: Cluster,
    topic: str,
    start: str | None,
    from_time: str | None,
    partitions: tuple[int, ...],
    group_id: str | None,
    follow: bool,
    count: int | None,
    format_name: str,
    key_separator: str,
) -> None:
    """Print the records of TOPIC, and stop at what is its end now."""
    if start is not None and from_time is not None:
        raise click.UsageError("--from and --from-time exclude each other")
    if group_id is not None and partitions:
        raise click.UsageError("--group and --partition exclude each other: the group assigns partitions")
    try:
        format_record = make_format(format_name, key_separator.encode())
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--format") from None
    where = _start(start, from_time)
    limits = FetchLimits(max_wait_ms=FOLLOW_WAIT_MS)
    reader: Reader
    if group_id is None:
        numbers = [cluster.partition(topic, n).index for n in partitions]
        reader = Reader(cluster, topic, numbers or [p.index for p in cluster.topic(topic).partitions], where, limits)
    else:
        cluster.topic(topic)
        reader = GroupReader(cluster, topic, group_id, where, limits)
    try:
        for partition, records in reader.read(count, follow):
            sys.stdout.buffer.write(b"".join([format_record(topic, partition, record) for record in records]))
            sys.stdout.buffer.flush()
            reader.done(partition, records[-1].offset + 1)
    finally:
        reader.close()


def _start(start: str | None, from_time: str | None) -> Start | None:
    if from_time is not None:
        return Start(time_ms=time_ms(from_time, "--from-time"))
    match start:
        case None:
            return None
        case "beginning":
            return Start.beginning()
        case "end":
            return Start.end()
        case _ if start.isascii() and start.isdigit():
            return Start(offset=int(start))
        case _:
            raise click.BadParameter(f"{start!r} is not beginning, end or an offset", param_hint="--from")
