"""`headrace log`: a data folder read offline, of either layout. No broker is needed, and nothing in it is changed but
by `convert` (see `cli.convert`).

Exit code 0: whole. 1: not whole, with a line for every problem: file, byte, offset, reason.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Final

import click

from headrace.cli.convert import convert
from headrace.cli.formats import format_json
from headrace.cli.options import json_option
from headrace.cli.output import format_bytes, show_json, show_table
from headrace.cli.times import format_time_ms
from headrace.errors import DataFolderError, HeadraceError
from headrace.records import kernel
from headrace.records.codecs import Codec
from headrace.storage import folder
from headrace.storage.log import TopicPartition
from headrace.storage.offline.report import CommitFileReport, DumpedBatch, PartitionReport, Problem, SegmentReport
from headrace.storage.offline.transactions import ABORTED, COMMITTED
from headrace.storage.offline.transactions import NONE as NO_TRANSACTION
from headrace.storage.offline.verify import dump as dump_batches
from headrace.storage.offline.verify import inspect_folder, transactions_of
from headrace.storage.offline.verify import reports as verify_reports
from headrace.system.disk import SystemDisk

LOG_ENDING: Final = ".log"
_DUMP_LINE: Final = "{:<24} {:>12} {:>12} {:>8} {:>10} {:<7} {:<24} {:>8} {:<14} {}"


def _selection(command: click.decorators.FC) -> click.decorators.FC:
    for option in (
        json_option,
        click.option("--partition", type=click.IntRange(0), help="Only this partition."),
        click.option("--topic", help="Only this topic."),
        click.argument("data", metavar="DIR"),
    ):
        command = option(command)
    return command


@click.group()
def log() -> None:
    """Read a data folder offline: what is in it, and is it whole. Convert it to the other layout."""


log.add_command(convert)


@log.command()
@_selection
def verify(data: str, topic: str | None, partition: int | None, as_json: bool) -> int:
    """Check every byte of the data folder DIR and say what is not as it should be."""
    disk, data = _open(data)
    whole_folder = inspect_folder(disk, data)
    _warn_of_broker(whole_folder.holder)
    problems = list(whole_folder.problems)
    reports: list[PartitionReport] = []
    files: list[CommitFileReport] = []
    chosen = _choose(disk, data, topic, partition)
    for report in _with_progress(verify_reports(disk, data), data):
        if isinstance(report, CommitFileReport):
            files.append(report)
            problems += report.problems
        elif report.topic_partition in chosen:
            reports.append(report)
            problems += report.problems
    if as_json:
        show_json(
            {
                "layout": whole_folder.layout,
                "whole": not problems,
                "commit_log": [{"path": file.path, "frames": file.frames, "bytes": file.size_bytes} for file in files],
                "set_aside": list(whole_folder.strays),
                "partitions": [_partition_row(report) for report in reports],
                "problems": [_problem_row(problem) for problem in problems],
            }
        )
    else:
        _show_verified(f"{data} ({whole_folder.layout})", reports, files, whole_folder.strays, problems)
    return 1 if problems else 0


def _show_verified(
    data: str,
    reports: list[PartitionReport],
    files: list[CommitFileReport],
    strays: Iterable[str],
    problems: list[Problem],
) -> None:
    rows = [
        {
            "partition": str(report.topic_partition),
            "segment": os.path.basename(segment.path),
            **_segment_row(segment),
        }
        for report in reports
        for segment in report.segments
    ]
    if rows:
        show_table(rows, ("partition", "segment", "first", "next", "batches", "records", "bytes", "compacted"))
    for report in reports:
        _show_transactions(report)
    for stray in strays:
        click.echo(f"set aside, not checked: {stray}")
    for problem in problems:
        click.echo(str(problem))
    size = format_bytes(sum(report.size_bytes for report in reports))
    kept = f"{len(rows)} segments"
    if files:
        kept = f"{len(files)} commit files of {format_bytes(sum(file.size_bytes for file in files))}"
    content = f"{len(reports)} partitions, {kept}, {sum(r.records for r in reports)} records, {size}"
    click.echo(f"{data} is {'whole' if not problems else f'NOT whole, problems: {len(problems)}'}; {content}")


def _show_transactions(report: PartitionReport) -> None:
    found = report.transactions
    if not found.ended and not found.opened:
        return
    counts = f"{found.count(COMMITTED)} committed, {found.count(ABORTED)} aborted, {len(found.opened)} open"
    click.echo(f"{report.topic_partition}: transactions: {counts}")
    for producer_id, first_offset in found.opened.items():
        click.echo(f"{report.topic_partition}: open since offset {first_offset}, of producer {producer_id}")


def _partition_row(report: PartitionReport) -> dict[str, Any]:
    return {
        "topic": report.topic_partition.topic,
        "partition": report.topic_partition.partition,
        "topic_id": report.topic_id.hex() if report.topic_id else None,
        "start": report.start_offset,
        "end": report.end_offset,
        "segments": [{"path": segment.path, **_segment_row(segment)} for segment in report.segments],
        "transactions": {
            "committed": report.transactions.count(COMMITTED),
            "aborted": report.transactions.count(ABORTED),
            "open": [{"producer_id": id_, "first": first} for id_, first in report.transactions.opened.items()],
        },
    }


def _segment_row(segment: SegmentReport) -> dict[str, Any]:
    return {
        "first": segment.base_offset,
        "next": segment.next_offset,
        "batches": segment.batches,
        "records": segment.records,
        "bytes": segment.size_bytes,
        "compacted": segment.compacted,
    }


def _problem_row(problem: Problem) -> dict[str, Any]:
    return {"path": problem.path, "position": problem.position, "offset": problem.offset, "what": problem.what}


@log.command()
@_selection
@click.option("--records", "with_records", is_flag=True, help="Print the records of each batch, as JSON lines.")
def dump(data: str, topic: str | None, partition: int | None, as_json: bool, with_records: bool) -> int:
    """Print every batch in the data folder DIR, one a line; with --json one object a line."""
    disk, data = _open(data)
    _warn_of_broker(folder.holder(disk, data))
    chosen = _choose(disk, data, topic, partition)
    if not as_json:
        columns = ("PARTITION", "FIRST", "LAST", "RECORDS", "BYTES", "CODEC", "TIMESTAMP", "PRODUCER")
        click.echo(_DUMP_LINE.format(*columns, "TRANSACTION", "PLACE"))
    broken = 0
    for topic_partition in chosen:
        # What became of them is told by markers further on.
        transactions = transactions_of(disk, data, topic_partition)
        for found in dump_batches(disk, data, topic_partition):
            if isinstance(found, Problem):
                broken += 1
                click.echo(json.dumps({"problem": _problem_row(found)}) if as_json else str(found))
                continue
            outcome = transactions.of_batch(found.header)
            click.echo(json.dumps(_batch_row(found, outcome)) if as_json else _batch_line(found, outcome))
            if with_records:
                broken += _print_records(disk, found)
    return 1 if broken else 0


def _batch_row(found: DumpedBatch, transaction: str) -> dict[str, Any]:
    header = found.header
    return {
        "topic": found.topic_partition.topic,
        "partition": found.topic_partition.partition,
        "first": header.base_offset,
        "last": header.last_offset,
        "records": header.record_count,
        "bytes": header.size_bytes,
        "codec": _codec_name(header.codec),
        "epoch": header.leader_epoch,
        "max_timestamp": header.max_timestamp_ms,
        "producer_id": header.producer_id,
        "producer_epoch": header.producer_epoch,
        "sequence": header.base_sequence,
        "control": header.is_control,
        "transaction": None if transaction == NO_TRANSACTION else transaction,
        "path": found.path,
        "position": found.position,
    }


def _batch_line(found: DumpedBatch, transaction: str) -> str:
    header = found.header
    return _DUMP_LINE.format(
        str(found.topic_partition),
        header.base_offset,
        header.last_offset,
        header.record_count,
        header.size_bytes,
        _codec_name(header.codec),
        format_time_ms(header.max_timestamp_ms),
        header.producer_id if header.producer_id >= 0 else "-",
        transaction,
        f"{os.path.basename(found.path)}:{found.position}",
    )


def _codec_name(codec: int) -> str:
    return Codec(codec).name.lower() if codec in Codec._value2member_map_ else f"codec {codec}"


def _print_records(disk: SystemDisk, found: DumpedBatch) -> int:
    """Print the records of a batch; 1 if they do not unpack."""
    file = disk.open(found.path)
    try:
        records = kernel.records(file.pread(found.header.size_bytes, found.position))
    except HeadraceError as error:
        click.echo(f"{found.path} at byte {found.position}, offset {found.header.base_offset}: {error}")
        return 1
    finally:
        file.close()
    where = found.topic_partition
    sys.stdout.buffer.write(b"".join([format_json(where.topic, where.partition, record) for record in records]))
    sys.stdout.buffer.flush()
    return 0


def _open(data: str) -> tuple[SystemDisk, str]:
    """The disk, and the folder's absolute path; DataFolderError if it is none of ours."""
    disk, path = SystemDisk(), os.path.abspath(data)
    if not os.path.isdir(path):
        raise DataFolderError(f"there is no folder {path}")
    if not disk.exists(f"{path}/{folder.LOCK_FILE}"):
        raise DataFolderError(
            f"{path} is not the data folder of a broker; it is what `headrace serve --data` was given"
        )
    return disk, path


def _choose(disk: SystemDisk, data: str, topic: str | None, partition: int | None) -> dict[TopicPartition, str]:
    chosen = {
        found: path
        for found, path in folder.partitions(disk, data)
        if topic in (None, found.topic) and partition in (None, found.partition)
    }
    if not chosen and (topic is not None or partition is not None):
        raise DataFolderError(f"{data} holds no such partition")
    return chosen


def _warn_of_broker(holder: str | None) -> None:
    if holder is not None:
        click.echo(
            f"headrace: a broker (process {holder}) runs on this folder; its newest batches may look torn", err=True
        )


Report = PartitionReport | CommitFileReport


def _with_progress(reports: Iterator[Report], data: str) -> Iterator[Report]:
    """The same reports, with a bar on the terminal that follows them."""
    if not sys.stderr.isatty():
        yield from reports
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("verifying", total=_log_bytes(data))
        shared = False
        for report in reports:
            if isinstance(report, CommitFileReport):
                shared = True
                progress.update(task, advance=report.size_bytes, description=os.path.basename(report.path))
            else:
                # In a commit log the bytes of partitions have been counted with its files.
                advance = 0 if shared else report.size_bytes
                progress.update(task, advance=advance, description=str(report.topic_partition))
            yield report


def _log_bytes(data: str) -> int:
    return sum(
        os.path.getsize(os.path.join(path, name))
        for path, _, names in os.walk(data)
        for name in names
        if name.endswith(LOG_ENDING)
    )
