"""`headrace export`: a topic, as far as it reaches now, in a file of JSON lines or Parquet.

What is read are spans: a record that the log no longer has is an error, never left out. The file is counted again
before it gets its name.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import click

from headrace.cli import EXIT_TERMINATED
from headrace.cli.completers import topic_names
from headrace.cli.formats import format_json
from headrace.cli.options import json_option, with_reader
from headrace.cli.output import counted, format_bytes, show_json
from headrace.cli.progress import Progress
from headrace.cli.record_files import ARROW_MISSING, count_lines, file_kind, open_lines, whole_file
from headrace.cli.record_reader import Start, log_bounds, parse_until
from headrace.cli.signals import Terminated, terminable
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.fetch import Span, span_records
from headrace.errors import OperatorError


@click.command()
@click.argument("topic", shell_complete=topic_names)
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE")
@click.option("--partition", "partitions", type=click.IntRange(0), multiple=True, help="Only this one; repeat.")
@click.option("--from", "start", default="beginning", metavar="OFFSET|-N|TIME", help="As of `headrace consume`.")
@click.option("--until", metavar="OFFSET|TIME", help="Only records before it.")
@click.option("--force", is_flag=True, help="Replace FILE if it is there.")
@json_option
@with_reader
def export(
    cluster: Cluster,
    topic: str,
    path: Path,
    partitions: tuple[int, ...],
    start: str,
    until: str | None,
    force: bool,
    as_json: bool,
) -> int:
    """Copy TOPIC to FILE: keys, values, headers, timestamps, partitions and offsets.

    The name of FILE says what it is: .jsonl, .jsonl.gz or .parquet. Records that
    come while it runs are left out. FILE is there when all of it is.
    """
    kind = file_kind(path)
    until_offset, until_ms = parse_until(until)
    numbers = [cluster.partition(topic, n).index for n in partitions]
    spans = _spans(cluster, topic, numbers, Start.parse(start), until_offset)
    try:
        with terminable(), whole_file(path, replace=force) as temporary:
            total = sum(span.next_offset - span.first_offset for span in spans)
            with Progress("offsets", total) as progress:
                write = _write_json if kind == "json" else _write_parquet
                written = write(cluster, topic, spans, temporary, until_ms, progress)
            size_bytes = temporary.stat().st_size
    except Terminated:
        return EXIT_TERMINATED
    if as_json:
        counts = {str(n): written[n] for n in sorted(written)}
        show_json({"file": str(path), "records": written.total(), "bytes": size_bytes, "partitions": counts})
    else:
        click.echo(f"{counted(written.total(), 'record')} of {topic} in {path}, {format_bytes(size_bytes)}", err=True)
    return 0


def _spans(cluster: Cluster, topic: str, numbers: list[int], start: Start, until_offset: int | None) -> list[Span]:
    found = cluster.topic(topic)
    chosen = numbers or [partition.index for partition in found.partitions]
    firsts = start.find(cluster, topic, chosen)
    _, ends = log_bounds(cluster, topic, chosen)
    lasts = {n: ends[n] if until_offset is None else min(ends[n], until_offset) for n in chosen}
    return [Span(topic, n, firsts[n], lasts[n], found.topic_id) for n in chosen if firsts[n] < lasts[n]]


def _write_json(
    cluster: Cluster, topic: str, spans: list[Span], path: Path, until_ms: int | None, progress: Progress
) -> Counter[int]:
    written: Counter[int] = Counter()
    with open_lines(path, "wb") as (file, _):
        for span in spans:
            for records, passed in span_records(cluster, span):
                if until_ms is not None:
                    records = [record for record in records if record.timestamp_ms < until_ms]
                file.write(b"".join([format_json(topic, span.partition, record) for record in records]))
                written[span.partition] += len(records)
                progress.advance(passed)
    found = count_lines(path)
    if found != written.total():
        raise OperatorError(f"{path} has {found} lines of {written.total()} that were written: nothing was kept")
    return written


def _write_parquet(
    cluster: Cluster, topic: str, spans: list[Span], path: Path, until_ms: int | None, progress: Progress
) -> Counter[int]:
    try:
        from headrace.arrow import topic_file
    except ImportError:
        raise OperatorError(ARROW_MISSING) from None
    return topic_file.write_file(
        cluster,
        spans,
        path,
        topic=topic,
        partition_count=len(cluster.topic(topic).partitions),
        until_ms=until_ms,
        passed=progress.advance,
    )
