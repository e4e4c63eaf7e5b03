"""`headrace import`: the records of a file of JSON lines or Parquet to a topic.

What is told is what brokers have acknowledged: how many records, and up to which line of the file, or row, all of them.
A run that failed or was interrupted goes on behind that one with --skip: records behind it that were acknowledged too
are sent twice then, and none is lost. Lines are sent some thousand at a time, and each such round is acknowledged
before the next begins.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import click

from headrace.cli import EXIT_FAILED
from headrace.cli.completers import topic_names
from headrace.cli.formats import Line, parse_json_line
from headrace.cli.options import compression_option, json_option, with_connect
from headrace.cli.output import counted, show_json
from headrace.cli.partition_mapping import BY_KEY, FIT, KEEP, ROUND_ROBIN, PartitionMapping, partitions_option
from headrace.cli.produce import ACKS, Outbox
from headrace.cli.progress import Progress
from headrace.cli.record_files import ARROW_MISSING, file_kind, open_lines, read_file_lines
from headrace.cli.signals import Interruption
from headrace.client.admin import operations
from headrace.client.admin.cluster import Cluster
from headrace.client.errors import UnknownTopic
from headrace.errors import HeadraceError, OperatorError

if TYPE_CHECKING:
    import pyarrow as pa

    from headrace.arrow.topic_file import TopicFile

ROUND_LINES: Final = 10_000
ROUND_BYTES: Final = 16 << 20


@dataclass
class _Outcome:
    """What became of a file so far."""

    through: int
    """All lines up to this one are acknowledged, or were skipped."""
    acknowledged: Counter[int] = field(default_factory=Counter)
    """By partition."""
    failure: str | None = None
    exit_code: int = 0


@click.command("import")
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False, exists=True), metavar="FILE")
@click.argument("topic", shell_complete=topic_names)
@partitions_option
@click.option("--create", is_flag=True, help="Create TOPIC if it is not there, with as many partitions as FILE names.")
@click.option("--partition-count", type=click.IntRange(1), metavar="N", help="With --create: so many instead.")
@click.option("--skip", type=click.IntRange(0), default=0, metavar="N", help="Leave out the first N lines or rows.")
@compression_option
@json_option
@with_connect
def import_(
    path: Path,
    topic: str,
    connect: Callable[[], Cluster],
    partitions: str,
    create: bool,
    partition_count: int | None,
    skip: int,
    compression: str,
    as_json: bool,
) -> int:
    """Copy FILE, as `headrace export` or `headrace consume --json` writes it, to TOPIC.

    Keys, values, headers and timestamps stay as they are; --partitions says where
    records go. The exit code is 0 only if every record was acknowledged.
    """
    kind = file_kind(path)
    if path.exists() and not path.is_file():
        raise OperatorError(
            f"{path} is no regular file, which an import may read twice; `headrace produce --json-lines` takes a pipe"
        )
    file = None if kind == "json" else _parquet(path)
    with connect() as cluster:
        if not _exists(cluster, topic):
            if not create:
                raise OperatorError(f"there is no topic {topic!r}; --create makes it; nothing was sent")
            count = partition_count or (_partition_count(path) if file is None else file.partition_count)
            operations.create_topic(cluster, topic, partitions=count or operations.DEFAULT_COUNT)
        mapping = PartitionMapping(partitions, topic, len(cluster.topic(topic).partitions))
        with Interruption() as interruption:
            if file is None:
                outcome = _import_lines(cluster, topic, path, mapping, skip, compression, interruption)
            else:
                outcome = _import_rows(connect, topic, file, mapping, skip, compression, interruption)
    outcome.exit_code = EXIT_FAILED if outcome.failure else interruption.exit_code
    _report(outcome, path, "line" if file is None else "row", as_json)
    mapping.tell()
    return outcome.exit_code


def _exists(cluster: Cluster, topic: str) -> bool:
    try:
        cluster.topic(topic)
    except UnknownTopic:
        return False
    return True


def _partition_count(path: Path) -> int | None:
    """As many as make room for the greatest that a line names; the lines are read through for it."""
    most = -1
    with open_lines(path, "rb") as (file, _):
        for number, line in _parsed(file):
            if isinstance(line, str):
                raise OperatorError(f"line {number}: {line}; nothing was sent")
            most = max(most, -1 if line.partition is None else line.partition)
    return most + 1 if most >= 0 else None


def _parsed(file: IO[bytes]) -> Iterator[tuple[int, Line | str]]:
    """The number of each line that is not empty, and what it asks for, or what is wrong with it."""
    for number, line in enumerate(read_file_lines(file), 1):
        if line:
            try:
                yield number, parse_json_line(line)
            except ValueError as error:
                yield number, str(error)


def _import_lines(
    cluster: Cluster,
    topic: str,
    path: Path,
    mapping: PartitionMapping,
    skip: int,
    compression: str,
    interruption: Interruption,
) -> _Outcome:
    outcome = _Outcome(skip)
    with (
        Outbox(cluster, topic, acks=ACKS["all"], codec=compression, linger_ms=50, note=None) as outbox,
        open_lines(path, "rb") as (file, below),
        Progress("bytes", path.stat().st_size) as progress,
    ):
        outcome.acknowledged = outbox.per_partition
        try:
            for number, wrong in _send_rounds(outbox, file, mapping, skip):
                outcome.through = number
                progress.advance(below.tell() - progress.done, f"{outbox.acknowledged:,} acknowledged")
                outcome.failure = wrong
                if interruption.exit_code:
                    break
        except HeadraceError as error:
            outcome.failure = str(error)
    return outcome


def _send_rounds(
    outbox: Outbox, file: IO[bytes], mapping: PartitionMapping, skip: int
) -> Iterator[tuple[int, str | None]]:
    """The last line of each round when that is acknowledged, and why there is none behind it."""
    in_round, round_bytes, last = 0, 0, skip
    wrong = None
    for number, line in _parsed(file):
        if number <= skip:
            continue
        if isinstance(line, str):
            wrong = line
            break
        if mapping.choice == KEEP and line.partition is not None and line.partition >= mapping.count:
            wrong = mapping.refusal(line.partition)
            break
        _add(outbox, line, mapping)
        in_round, round_bytes, last = in_round + 1, round_bytes + len(line.value or b""), number
        if in_round >= ROUND_LINES or round_bytes >= ROUND_BYTES:
            in_round = round_bytes = 0
            _flush(outbox)
            yield last, None
    _flush(outbox)
    yield last, None if wrong is None else f"line {number}: {wrong}"


def _flush(outbox: Outbox) -> None:
    outbox.flush()
    if outbox.failed:
        raise OperatorError(f"{outbox.failures[0]}; {outbox.failed} records were not acknowledged")


def _add(outbox: Outbox, line: Line, mapping: PartitionMapping) -> None:
    timestamp_ms = int(time.time() * 1000) if line.timestamp_ms is None else line.timestamp_ms
    outbox.add((timestamp_ms, line.key, line.value, line.headers), mapping.place(line.partition))


def _parquet(path: Path) -> TopicFile:
    try:
        from headrace.arrow.topic_file import TopicFile
    except ImportError:
        raise OperatorError(ARROW_MISSING) from None
    return TopicFile(path)


def _import_rows(
    connect: Callable[[], Cluster],
    topic: str,
    file: TopicFile,
    mapping: PartitionMapping,
    skip: int,
    compression: str,
    interruption: Interruption,
) -> _Outcome:
    from headrace.arrow.write import Writer
    from headrace.records.codecs import Codec

    outcome = _Outcome(min(skip, file.row_count))
    least, most = file.partition_bounds()
    if least is not None and least < 0:
        raise OperatorError(f"a row has partition {least}; nothing was sent")
    if mapping.choice == KEEP and most is not None and most >= mapping.count:
        raise OperatorError(f"{mapping.refusal(most)}; nothing was sent")
    with (
        Writer(topic, cluster=connect(), codec=Codec[compression.upper()]) as writer,
        Progress("rows", file.row_count - outcome.through) as progress,
    ):
        place = _Rows(mapping).place
        try:
            for sent in file.send(writer, place, skip=skip, stop=lambda: _ends(outcome, interruption)):
                outcome.acknowledged.update(sent.partitions)
                if sent.failure is not None:
                    outcome.failure = outcome.failure or str(sent.failure)
                elif outcome.failure is None:
                    outcome.through += sent.count
                progress.advance(sent.count)
        except HeadraceError as error:
            outcome.failure = outcome.failure or str(error)
    return outcome


def _ends(outcome: _Outcome, interruption: Interruption) -> bool:
    return outcome.failure is not None or bool(interruption.exit_code)


class _Rows:
    """As PartitionMapping, for whole columns."""

    def __init__(self, mapping: PartitionMapping) -> None:
        self._mapping = mapping
        self._turn = 0

    def place(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        import pyarrow as pa
        import pyarrow.compute as pc

        count, names = self._mapping.count, rows.schema.names
        if self._mapping.choice == ROUND_ROBIN:
            turns = pa.array([(self._turn + nth) % count for nth in range(len(rows))], pa.int32())
            self._turn += len(rows)
            kept = rows.drop_columns(["partition"]) if "partition" in names else rows
            return kept.append_column("partition", turns)
        if "partition" not in names or self._mapping.choice == KEEP:
            return rows
        if self._mapping.choice == BY_KEY:
            return rows.drop_columns(["partition"])
        assert self._mapping.choice == FIT
        fits = pc.less(rows["partition"], count)
        self._mapping.moved += pc.sum(pc.invert(fits)).as_py() or 0
        place: Any = pc.if_else(fits, rows["partition"], pa.scalar(None, rows["partition"].type))
        return rows.set_column(names.index("partition"), "partition", place)


def _report(outcome: _Outcome, path: Path, unit: str, as_json: bool) -> None:
    count = outcome.acknowledged.total()
    if as_json:
        counts = {str(n): outcome.acknowledged[n] for n in sorted(outcome.acknowledged)}
        done = outcome.exit_code == 0
        show_json({"acknowledged": count, "through": outcome.through, "complete": done, "partitions": counts})
    if outcome.failure is not None:
        click.echo(f"headrace: {outcome.failure}", err=True)
    if outcome.exit_code:
        click.echo(
            f"headrace: {count} records were acknowledged, among them all up to {unit} {outcome.through} of "
            f"{path}; --skip {outcome.through} goes on there",
            err=True,
        )
    elif not as_json:
        click.echo(f"{counted(count, 'record')} of {path} acknowledged", err=True)
