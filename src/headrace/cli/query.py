"""`headrace query`: records by key, by partition and offset, or by time, in brokers or an archive. Starts no Spark.

In the brokers a search by key reads the whole topic, unless that has a key index. An archive also has what the brokers
have deleted, as long as it was archived. By key it needs no more than the key index and the row groups it names; what
was archived after the last `headrace pipeline index` is searched, and a line on standard error says how much that was.
Standard error also names matching dead letters, and says when an archive keeps no values.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from headrace.cli.completers import topic_names
from headrace.cli.formats import Format, make_format
from headrace.cli.options import LOCATION, isolation_option, time_ms, with_connect
from headrace.cli.output import counted
from headrace.cli.progress import Progress
from headrace.cli.times import EXPECTED
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.query import RecordQuery, find
from headrace.errors import OperatorError
from headrace.records.isolation import isolation_of

if TYPE_CHECKING:
    from headrace.arrow.archive import Work

SHOWN: Final = "%p:%o %T %k %v"
DEAD_SHOWN: Final = 5


@click.command()
@click.option("--topic", required=True, shell_complete=topic_names, help="Records of this topic.")
@click.option("--key", help="Records with this key, as UTF-8.")
@click.option("--hex-key", metavar="HEX", help="Records with this key, for keys that are not text.")
@click.option("--offset", "ids", multiple=True, metavar="P:O", help="The record at offset O of partition P; repeat.")
@click.option("--from", "from_time", metavar="TIME", help=f"Records from this time on: {EXPECTED}.")
@click.option("--to", "to_time", metavar="TIME", help="Records before this time.")
@click.option("--archive", "folder", type=LOCATION, metavar="DIR", help="Look in this archive, not in brokers.")
@click.option(
    "--order", type=click.Choice(["newest", "offset"]), default="newest", show_default=True,
    help="By timestamp, newest first, or by partition and offset.",
)  # fmt: skip
@click.option("--limit", "-n", type=click.IntRange(1), metavar="N", help="Stop after N records.  [default: all]")
@click.option("--format", "format_name", default=SHOWN, show_default=True, help="As of `headrace consume`.")
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
@isolation_option
@with_connect
def query(
    topic: str,
    key: str | None,
    hex_key: str | None,
    ids: tuple[str, ...],
    from_time: str | None,
    to_time: str | None,
    folder: Path | None,
    connect: Callable[[], Cluster],
    order: str,
    limit: int | None,
    format_name: str,
    as_json: bool,
    isolation: str,
) -> None:
    """Find records in the brokers, or in an archive: there also those that the brokers have deleted.

    \b
    headrace query --topic orders --key 4711
    headrace query --topic orders --offset 3:1200 --json
    headrace query --archive DIR --topic orders --from '2h ago' --to '1h ago' --limit 10
    """
    if key is None and hex_key is None and not ids and from_time is None and to_time is None:
        raise click.UsageError("give --key, --hex-key, --offset, --from or --to; --from @0 is everything")
    try:
        format_record = make_format("json" if as_json else format_name)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--format") from None
    wanted = RecordQuery(topic, _key(key, hex_key), _ids(ids), _time(from_time, "--from"), _time(to_time, "--to"))
    if folder is not None:
        if isolation == "uncommitted":
            raise click.UsageError("an archive has only what is committed: --isolation uncommitted is for brokers")
        _in_archive(folder, wanted, format_record, order == "newest", limit)
        return
    with connect() as cluster:
        cluster.isolation = isolation_of(isolation)
        _in_brokers(cluster, wanted, format_record, order == "newest", limit)


def _in_brokers(
    cluster: Cluster, wanted: RecordQuery, format_record: Format, newest_first: bool, limit: int | None
) -> None:
    count, began = 0, time.monotonic()
    with Progress("offsets") as progress:
        found = find(cluster, wanted, newest_first=newest_first, limit=limit, scanned=progress.advance_of)
        for partition, record in found:
            progress.hide()
            sys.stdout.buffer.write(format_record(wanted.topic, partition, record))
            count += 1
        searched = progress.done
    sys.stdout.buffer.flush()
    line = f"{counted(count, 'record')}, found in {(time.monotonic() - began) * 1000:.0f} ms"
    if searched and wanted.key is not None:
        line += (
            f"; {searched} offsets were searched, as there is no key index: "
            f"`headrace topic alter {wanted.topic} --config key.index=true` has one built"
        )
    click.echo(line, err=True)


def _in_archive(
    folder: Path, wanted: RecordQuery, format_record: Format, newest_first: bool, limit: int | None
) -> None:
    try:
        from headrace.arrow import archive as archives
    except ImportError:
        raise OperatorError("pyarrow and deltalake are not installed: pip install 'headrace[spark]'") from None
    began = time.monotonic()
    work, count, nulls = archives.Work(), 0, 0
    archive = archives.Archive(folder)
    for partition, record in itertools.islice(archive.find(wanted, newest_first, work), limit):
        sys.stdout.buffer.write(format_record(wanted.topic, partition, record))
        count += 1
        nulls += record.value is None
    sys.stdout.buffer.flush()
    click.echo(_records_found(count, wanted, work, time.monotonic() - began), err=True)
    if nulls and archive.drops_values():
        click.echo(
            f"headrace: {nulls} records have no value because the archive keeps none (--drop-value), not because none "
            f"was sent; their decoded columns are in {folder / 'records'}",
            err=True,
        )
    if dead := archive.dead_letters(wanted):
        click.echo(_dead_letters_found(dead, folder), err=True)


def _dead_letters_found(dead: list[tuple[int, int, str]], folder: Path) -> str:
    shown = [f"{partition}:{offset} ({reason})" for partition, offset, reason in dead[:DEAD_SHOWN]]
    more = f" and {len(dead) - DEAD_SHOWN} more" if len(dead) > DEAD_SHOWN else ""
    return f"headrace: {len(dead)} dead letters match, in {folder / 'dead_letters'}: {', '.join(shown)}{more}"


def _records_found(count: int, wanted: RecordQuery, work: Work, elapsed_s: float) -> str:
    """`3 records, 2 row groups of 2 files read in 21 ms`, and what of it was not indexed."""
    line = f"{count} records, {work.row_groups} row groups of {work.files} files read in {elapsed_s * 1000:.0f} ms"
    if wanted.key is None or wanted.ids or not work.files_not_indexed:
        return line
    return (
        f"{line}; {work.files_not_indexed} files are newer than the index and were searched (`headrace pipeline index`)"
    )


def _key(key: str | None, hex_key: str | None) -> bytes | None:
    if key is not None and hex_key is not None:
        raise click.UsageError("--key and --hex-key exclude each other")
    if hex_key is None:
        return None if key is None else os.fsencode(key)
    try:
        return bytes.fromhex(hex_key)
    except ValueError:
        raise click.BadParameter(f"{hex_key!r} is not hexadecimal", param_hint="--hex-key") from None


def _ids(given: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    found = []
    for text in given:
        partition, colon, offset = text.partition(":")
        if not (colon and partition.isdecimal() and offset.isdecimal()):
            raise click.BadParameter(f"{text!r} is not PARTITION:OFFSET", param_hint="--offset")
        found.append((int(partition), int(offset)))
    return tuple(found)


def _time(text: str | None, option: str) -> int | None:
    return None if text is None else time_ms(text, option)
