"""`headrace produce`: lines in, records out, and an exit code that says whether all of them were acknowledged."""

from __future__ import annotations

import os
import select
import signal
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final, Self

import click

from headrace.cli import EXIT_INTERRUPTED, formats
from headrace.cli.completers import topic_names
from headrace.cli.options import compression_option, json_option, pairs, with_cluster
from headrace.cli.output import counted, show_json
from headrace.cli.partition_mapping import BY_KEY, ROUND_ROBIN, PartitionMapping, partitions_option
from headrace.client.admin.cluster import Cluster
from headrace.client.errors import UnknownTopic
from headrace.client.producer.producer import Producer
from headrace.errors import HeadraceError, OperatorError
from headrace.records.builder import Delivery
from headrace.records.record import Header, NewRecord

ACKS: Final = {"0": 0, "1": 1, "-1": -1, "all": -1}
PROGRESS_SECONDS: Final = 0.5
REASONS_SHOWN: Final = 5
FAILURES_KEPT: Final = 100
BATCH_BYTES: Final = 256 << 10
RECORD_BYTES: Final = 1 << 30
"""It is the topic's limit that counts."""
CHUNK_BYTES: Final = 256 << 10
LINE_MAX_BYTES: Final = 64 << 20


@click.command()
@click.argument("topic", shell_complete=topic_names)
@click.option("--file", "path", metavar="FILE", help="Read this file instead of standard input.")
@click.option("--key-separator", metavar="TEXT", help="What stands between key and value; else there is no key.")
@click.option("--json-lines", is_flag=True, help="Each line is an object: key, value, headers, partition, timestamp.")
@click.option("--header", "headers", multiple=True, metavar="NAME=VALUE", help="A header for every record; repeat.")
@click.option("--partition", type=click.IntRange(0), help="Send here; else by hash of the key, else spread.")
@partitions_option
@click.option("--acks", type=click.Choice(list(ACKS)), default="all", show_default=True, help="Who must have it.")
@compression_option
@click.option("--ledger", "ledger_folder", metavar="DIR", help="Note every acknowledged record there, for an audit.")
@click.option("--linger", default=50, show_default=True, metavar="MS", help="Send when input pauses for so long.")
@json_option
@with_cluster
def produce(
    cluster: Cluster,
    topic: str,
    path: str | None,
    key_separator: str | None,
    json_lines: bool,
    headers: tuple[str, ...],
    partition: int | None,
    partitions: str,
    acks: str,
    compression: str,
    ledger_folder: str | None,
    linger: int,
    as_json: bool,
) -> int:
    """Send lines to TOPIC, each line a record.

    The exit code is 0 only if every record was acknowledged. A file is looked
    through before anything of it is sent; of a pipe it is told what was sent
    before a line that is wrong.

    --partitions is for every line; fit, the default, only for copies, which are
    JSON lines with an offset. Lines without a key go many at a time to one
    partition, then to another: round-robin deals them out one by one.
    """
    if json_lines and key_separator is not None:
        raise click.UsageError("--json-lines and --key-separator exclude each other")
    if partition is not None and partitions in (BY_KEY, ROUND_ROBIN):
        raise click.UsageError(f"--partition and --partitions {partitions} exclude each other")
    if ledger_folder is not None and not ACKS[acks]:
        raise click.UsageError("--ledger needs acknowledgements: --acks 1 or all")
    fixed: list[Header] = [(name, value.encode()) for name, value in pairs(headers, "--header").items()]
    separator = key_separator.encode() if key_separator else None
    with (
        _ledger(ledger_folder, topic) as note,
        Outbox(cluster, topic, acks=ACKS[acks], codec=compression, linger_ms=linger, note=note) as outbox,
    ):
        mapping = PartitionMapping(partitions, topic, outbox.partition_count or 0)
        intake = _Intake(outbox, fixed, partition, mapping, separator, json_lines)
        signal.signal(signal.SIGINT, intake.interrupt)
        descriptor = _open(path)
        intake.check(descriptor)
        intake.run(descriptor, linger / 1000)
        outbox.flush()
    _report(outbox, as_json)
    mapping.tell()
    if intake.interrupted:
        return EXIT_INTERRUPTED
    return 1 if outbox.failed else 0


Note = Callable[[int, int | None, Sequence[int], Sequence[NewRecord]], None]
"""Partition and first offset of an acknowledged batch (None: the broker had it already), of each record how many came
before it, and the records."""


@contextmanager
def _ledger(folder: str | None, topic: str) -> Iterator[Note | None]:
    """Acknowledged batches go to a ledger in the folder, if there is one."""
    if folder is None:
        yield None
        return
    try:
        from headrace.arrow.ledger import Ledger, add_records, producer_name
    except ImportError:
        raise OperatorError("--ledger needs pyarrow: pip install 'headrace[arrow]'") from None

    with Ledger(folder, producer_name("produce")) as ledger:
        yield partial(add_records, ledger, topic)


def _open(path: str | None) -> int:
    if path is None:
        if sys.stdin is None:
            raise OperatorError("standard input is closed; pipe lines in, or give --file")
        return sys.stdin.fileno()
    try:
        return os.open(path, os.O_RDONLY)
    except OSError as error:
        raise OperatorError(f"cannot read {path}: {error.strerror}") from None


class Outbox:
    """Records on their way to one topic, and a count of what became of them. Callbacks come one at a time."""

    def __init__(
        self, cluster: Cluster, topic: str, *, acks: int, codec: str, linger_ms: float, note: Note | None
    ) -> None:
        self.acknowledged = 0
        self.failed = 0
        self.failures: list[HeadraceError] = []
        self.per_partition: Counter[int] = Counter()
        self._cluster = cluster
        self._topic = topic
        self._note = note
        self._taken = 0
        self._batch: list[tuple[int, NewRecord]] = []
        self._fault: Exception | None = None
        # It is not created before there is a record for it; but a broker that does not answer is told now.
        found = cluster.retry(lambda: cluster.topology([topic])).topics.get(topic)
        self.partition_count = None if found is None else len(found.partitions)
        """None: there is no such topic yet."""
        self._producer = Producer(
            cluster.bootstrap,
            acks=acks,
            codec=codec,
            batch_bytes=BATCH_BYTES,
            interval_ms=linger_ms,
            max_record_bytes=RECORD_BYTES,
            delivery_timeout_ms=cluster.timeout_ms,
            tls=cluster.tls,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # All is flushed, or was interrupted: then nothing is waited for.
        self._producer.close(0)

    def open(self) -> int:
        """Let the topic be there; how many partitions it has."""
        if self.partition_count is None:
            self.partition_count = len(self._cluster.topic(self._topic, create=True).partitions)
        return self.partition_count

    def add(self, record: NewRecord, partition: int | None) -> None:
        self._raise_fault()
        if partition is not None:
            self.check_partition(partition)
        timestamp_ms, key, value, headers = record
        heard = self._heard if self._note is None else partial(self._heard_noted, self._taken, record)
        self._taken += 1
        self._producer.send_async(
            self._topic,
            value,
            key=key,
            headers=headers,
            partition=partition,
            timestamp_ms=timestamp_ms,
            callback=heard,
        )

    def check_partition(self, partition: int) -> None:
        """Raises ValueError for one that the topic does not have."""
        if self.partition_count is not None and partition >= self.partition_count:
            raise ValueError(str(UnknownTopic(self._topic, partition, self.partition_count)))

    def flush(self) -> None:
        """Send everything added so far and wait for its acknowledgement."""
        self._producer.flush()
        self._raise_fault()

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault

    def _heard(self, delivery: Delivery) -> None:
        batch = delivery.batch()
        if batch.error is None:
            self.acknowledged += 1
            self.per_partition[batch.partition] += 1
            return
        self.failed += 1
        if len(self.failures) < FAILURES_KEPT and not (self.failures and self.failures[-1] is batch.error):
            self.failures.append(batch.error)

    def _heard_noted(self, sequence: int, record: NewRecord, delivery: Delivery) -> None:
        batch = delivery.batch()
        self._batch.append((sequence, record))
        if not batch.callbacks:  # this was the last one of its batch
            ended, self._batch = self._batch, []
            try:
                if batch.error is None and self._note is not None:
                    base_offset = None if batch.base_offset < 0 else batch.base_offset
                    self._note(batch.partition, base_offset, *zip(*ended, strict=True))
            except Exception as error:  # noqa: BLE001
                # It is raised in the thread that adds: nobody would hear of it here.
                self._fault = self._fault or error
        self._heard(delivery)


class _Intake:
    """Turns lines into records and hands them to the outbox."""

    def __init__(
        self,
        outbox: Outbox,
        headers: list[Header],
        partition: int | None,
        mapping: PartitionMapping,
        key_separator: bytes | None,
        json_lines: bool,
    ) -> None:
        self._outbox = outbox
        self._headers = headers
        self._partition = partition
        self._mapping = mapping
        self._key_separator = key_separator
        self._json_lines = json_lines
        self.interrupted = False
        self._waiting = False
        self._line_number = 0
        self._progress_due = time.monotonic() + PROGRESS_SECONDS
        self._shows_progress = sys.stderr.isatty() and not sys.stdin.isatty()

    def interrupt(self, *_: object) -> None:
        """Ctrl-C: take no more lines, but send those that were taken. A second one ends it at once."""
        waiting, self._waiting = self._waiting, False
        if waiting or self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt
        self.interrupted = True

    def check(self, descriptor: int) -> None:
        """Look through a file before anything of it is sent. Of lines that are all values nothing can be wrong."""
        if not (self._json_lines or self._key_separator) or not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return
        start = os.lseek(descriptor, 0, os.SEEK_CUR)
        for lines in read_lines(descriptor, 0):
            if self.interrupted:
                return
            for line in lines:
                self._line_number += 1
                try:
                    parsed = self._parse(line)
                    if parsed.partition is not None and self._mapping.keeps(parsed.is_copy):
                        self._outbox.check_partition(parsed.partition)
                except ValueError as error:
                    raise OperatorError(f"line {self._line_number}: {error}; nothing was sent") from None
            self._show_progress(f"{self._line_number} lines looked through")
        self._line_number = 0
        os.lseek(descriptor, start, os.SEEK_SET)

    def run(self, descriptor: int, linger_seconds: float) -> None:
        chunks = read_lines(descriptor, linger_seconds)
        while (lines := self._next_lines(chunks)) is not None:
            if not lines:
                self._outbox.flush()
            for line in lines:
                self._add(line)
            self._show_progress(f"{self._outbox.acknowledged} records acknowledged")
        if self._shows_progress:
            click.echo("\r\x1b[K", nl=False, err=True)

    def _next_lines(self, chunks: Iterator[list[bytes]]) -> list[bytes] | None:
        """The next lines; None at the end of input and after ctrl-C."""
        if self.interrupted:
            return None
        try:
            self._waiting = True
            lines = next(chunks, None)
            self._waiting = False
            return lines
        except KeyboardInterrupt:
            return None

    def _add(self, line: bytes) -> None:
        self._line_number += 1
        try:
            parsed = self._parse(line)
            timestamp_ms = int(time.time() * 1000) if parsed.timestamp_ms is None else parsed.timestamp_ms
            record = (timestamp_ms, parsed.key, parsed.value, [*self._headers, *parsed.headers])
            named = self._partition if parsed.partition is None else parsed.partition
            self._mapping.count = self._outbox.open()
            self._outbox.add(record, self._mapping.place(named) if self._mapping.holds_for(parsed.is_copy) else named)
        except ValueError as error:
            self._outbox.flush()
            count = self._outbox.acknowledged
            sent = f"of the records before it {count} were sent" if count else "nothing was sent"
            raise OperatorError(f"line {self._line_number}: {error}; {sent}") from None

    def _parse(self, line: bytes) -> formats.Line:
        if self._json_lines:
            return formats.parse_json_line(line)
        return formats.parse_line(line, self._key_separator)

    def _show_progress(self, text: str) -> None:
        if self._shows_progress and time.monotonic() >= self._progress_due:
            self._progress_due = time.monotonic() + PROGRESS_SECONDS
            click.echo(f"\r\x1b[K{text}", nl=False, err=True)


def read_lines(descriptor: int, idle_seconds: float) -> Iterator[list[bytes]]:
    """Lines without their newlines, as many as one read brought; an empty list when none came for `idle_seconds`.

    After an empty list it waits without end for the next line: being idle is told once.
    """
    rest = b""
    wait: float | None = None
    while True:
        if not select.select([descriptor], [], [], wait)[0]:
            wait = None
            yield []
            continue
        try:
            chunk = os.read(descriptor, CHUNK_BYTES)
        except OSError as error:
            raise OperatorError(f"cannot read the input: {error.strerror}") from None
        if not chunk:
            break
        *lines, rest = (rest + chunk).split(b"\n") if rest else chunk.split(b"\n")
        if len(rest) > LINE_MAX_BYTES:
            raise OperatorError(f"a line of more than {LINE_MAX_BYTES} bytes: records so large cannot be sent")
        if lines:
            wait = idle_seconds
            yield lines
    if rest:
        yield [rest]


def _report(outbox: Outbox, as_json: bool) -> None:
    if as_json:
        partitions = {str(n): outbox.per_partition[n] for n in sorted(outbox.per_partition)}
        show_json({"acknowledged": outbox.acknowledged, "failed": outbox.failed, "partitions": partitions})
    reasons = Counter(str(failure) for failure in outbox.failures)
    for reason, batches in reasons.most_common(REASONS_SHOWN):
        click.echo(f"headrace: {reason} ({batches} {'batch' if batches == 1 else 'batches'})", err=True)
    if outbox.failed:
        total = outbox.acknowledged + outbox.failed
        click.echo(f"headrace: {outbox.failed} of {total} records were not acknowledged", err=True)
    elif not as_json and not outbox.acknowledged:
        click.echo("no line came in: nothing was sent", err=True)
    elif not as_json:
        count = len(outbox.per_partition)
        where = f"in {counted(count, 'partition')}"
        click.echo(f"{counted(outbox.acknowledged, 'record')} acknowledged {where}", err=True)
