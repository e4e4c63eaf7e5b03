"""`headrace consume`: records of a topic on standard output, up to the end of the log or on and on.

With a group, what was printed is committed after it has left this process, so a crash repeats records and loses none;
records that a filter passed over are committed as well. SIGTERM ends it as ctrl-C does: what was printed is committed,
and the group's other members have the partitions at once.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import click

from headrace.cli import EXIT_FAILED, EXIT_TERMINATED
from headrace.cli.completers import group_names, topic_names
from headrace.cli.formats import Format, make_format
from headrace.cli.options import time_ms, with_reader
from headrace.cli.progress import Progress
from headrace.cli.record_filter import RecordFilter, filter_options, make_filter
from headrace.cli.record_reader import Chunk, GroupReader, Reader, Start, parse_until
from headrace.cli.signals import Terminated, terminable
from headrace.cli.times import EXPECTED
from headrace.client.admin.cluster import Cluster
from headrace.client.fetch_requests import FetchLimits

FOLLOW_WAIT_MS: Final = 500
TAIL_MAX: Final = 1_000_000
"""Of every partition so many records are held at a time."""


@click.command()
@click.argument("topic", shell_complete=topic_names)
@click.option(
    "--from", "start", metavar="beginning|end|OFFSET|-N|TIME",
    help="Where to start; -N is N before the end of each partition.  [default: beginning]",
)  # fmt: skip
@click.option(
    "--since", "--from-time", "since", metavar="TIME",
    help=f"Only records that are not older than {EXPECTED}; with --group, where it begins.",
)  # fmt: skip
@click.option("--until", metavar="OFFSET|TIME", help="Only records before it.")
@click.option(
    "--tail", type=click.IntRange(1, TAIL_MAX), metavar="N",
    help="The last N records: the last of all partitions, merged by time.",
)  # fmt: skip
@click.option("--partition", "partitions", type=click.IntRange(0), multiple=True, help="Only this one; repeat.")
@click.option(
    "--group",
    "group_id",
    metavar="GROUP",
    shell_complete=group_names,
    help="Read as a member, from where the group left off; --from and --since are for where it has not been yet.",
)
@click.option("--follow", "-f", is_flag=True, help="Wait for more at the end instead of stopping.")
@click.option("--count", "-n", type=click.IntRange(1), metavar="N", help="Stop after N records were printed.")
@filter_options
@click.option(
    "--format",
    "format_name",
    default="value",
    show_default=True,
    metavar="FORMAT",
    help="value, key-value, json, or a template: %k key, %v value, %o offset, %p partition, %t topic, "
    "%T timestamp, %h headers.",
)
@click.option("--json", "as_json", is_flag=True, help="The same as --format json: what produce --json-lines takes.")
@click.option("--key-separator", default="\t", metavar="TEXT", help="For key-value.  [default: tab]")
@with_reader
def consume(cluster: Cluster, topic: str, format_name: str, as_json: bool, key_separator: str, **given: Any) -> int:
    """Print the records of TOPIC, and stop at what is its end now.

    \b
    headrace consume orders --tail 10 --follow
    headrace consume orders --since yesterday --until '1h ago' --key 4711
    headrace consume orders --where 'order.total > 100 and status = "new"' --json
    """
    _check(given)
    try:
        format_record = make_format("json" if as_json else format_name, key_separator.encode())
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--format") from None
    try:
        with terminable():
            return _consume(cluster, topic, format_record, given)
    except Terminated:
        return EXIT_TERMINATED


def _check(given: dict[str, Any]) -> None:
    """Options that have no meaning together."""
    for one, other, why in (
        ("start", "since", ""),
        ("tail", "start", ""),
        ("tail", "since", ""),
        ("tail", "count", ""),
        ("group_id", "partitions", ": the group assigns partitions"),
        ("group_id", "tail", ": a group goes on where it left off"),
        ("group_id", "until", ": what the group left out would count as read"),
        ("follow", "until", ""),
    ):
        if given[one] and given[other]:
            names = {"start": "from", "group_id": "group", "partitions": "partition"}
            first, second = (names.get(name, name).replace("_", "-") for name in (one, other))
            raise click.UsageError(f"--{first} and --{second} exclude each other{why}")


def _consume(cluster: Cluster, topic: str, format_record: Format, given: dict[str, Any]) -> int:
    until_offset, until_ms = parse_until(given["until"])
    where = _start(given["start"], given["since"])
    # What is left out counts as read by a group.
    since_ms = where.time_ms if where and given["since"] is not None and given["group_id"] is None else None
    wanted = make_filter(given["key"], given["grep"], given["headers"], given["where"], until_ms, since_ms)
    if where is not None and until_offset is not None and (where.offset or 0) > until_offset:
        raise click.UsageError(f"--until {until_offset} is before --from {where.offset}")
    follow, count = given["follow"], given["count"]
    reader = _reader(cluster, topic, where, wanted, until_offset, given)
    shows = not follow and (wanted.is_search or not sys.stdout.isatty())
    try:
        if _tell_beyond(reader, topic, where, follow):
            return EXIT_FAILED
        with Progress("offsets", None if given["tail"] else reader.left, shown=shows) as progress:
            printer = _Printer(topic, format_record, reader, progress)
            if given["tail"]:
                for chunk in reader.tail(given["tail"], progress.advance):
                    printer.show(chunk)
            if follow or not given["tail"]:
                for chunk in reader.read(count, follow):
                    printer.show(chunk)
            if printer.printed == count:
                return 0
    finally:
        reader.close()
    return _tell_unread(reader)


def _reader(
    cluster: Cluster,
    topic: str,
    where: Start | None,
    wanted: RecordFilter,
    until_offset: int | None,
    given: dict[str, Any],
) -> Reader:
    limits = FetchLimits(max_wait_ms=FOLLOW_WAIT_MS)
    if given["group_id"] is not None:
        cluster.topic(topic)
        return GroupReader(cluster, topic, given["group_id"], where, limits, wanted)
    numbers = [cluster.partition(topic, n).index for n in given["partitions"]]
    chosen = numbers or [p.index for p in cluster.topic(topic).partitions]
    return Reader(cluster, topic, chosen, where, limits, wanted, until_offset)


class _Printer:
    """Writes chunks to standard output, and counts what it wrote."""

    def __init__(self, topic: str, format_record: Format, reader: Reader, progress: Progress) -> None:
        self._topic = topic
        self._format = format_record
        self._reader = reader
        self._progress = progress
        self.printed = 0

    def show(self, chunk: Chunk) -> None:
        if chunk.records:
            self._progress.hide()
            partition = chunk.partition
            lines = [self._format(self._topic, partition, record) for record in chunk.records]
            sys.stdout.buffer.write(b"".join(lines))
            sys.stdout.buffer.flush()
            self.printed += len(chunk.records)
        self._reader.done(chunk.partition, chunk.next_offset)
        self._progress.advance(chunk.passed, f"{self.printed:,} printed")


def _tell_beyond(reader: Reader, topic: str, where: Start | None, follow: bool) -> bool:
    """Say which partitions end before the offset to start at; whether there is nothing to read because all do."""
    if where is None or where.offset is None:
        return False
    beyond = reader.beyond()
    for partition, end in beyond.items():
        what = "waiting for it" if follow else "nothing to read there"
        click.echo(f"headrace: {topic}-{partition} ends at {end}, before offset {where.offset}: {what}", err=True)
    return bool(beyond) and not follow and len(beyond) == reader.partition_count


def _tell_unread(reader: Reader) -> int:
    """Say which partitions are missing from what was printed; the exit code."""
    unread = reader.unread()
    if unread:
        click.echo(f"headrace: not read, as no broker leads them: {unread}; their brokers have to come back", err=True)
    return EXIT_FAILED if unread else 0


def _start(start: str | None, since: str | None) -> Start | None:
    if since is not None:
        return Start(time_ms=time_ms(since, "--since / --from-time"))
    return None if start is None else Start.parse(start)
