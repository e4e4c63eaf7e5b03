"""`headrace produce`: lines in, records out, and an exit code that says whether all of them were acknowledged."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final, Self

import click

from headrace.cli import EXIT_INTERRUPTED, formats
from headrace.cli.options import compression_option, json_option, pairs, with_cluster
from headrace.cli.output import show_json
from headrace.client.admin.cluster import Cluster
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
@click.argument("topic")
@click.option("--file", "path", metavar="FILE", help="Read this file instead of standard input.")
@click.option("--key-separator", metavar="TEXT", help="What stands between key and value; else there is no key.")
@click.option("--json-lines", is_flag=True, help="Each line is an object: key, value, headers, partition, timestamp.")
@click.option("--header", "headers", multiple=True, metavar="NAME=VALUE", help="A header for every record; repeat.")
@click.option("--partition", type=click.IntRange(0), help="Send here; else by hash of the key, else spread.")
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
    acks: str,
    compression: str,
    ledger_folder: str | None,
    linger: int,
    as_json: bool,
) -> int:
    """Send lines to TOPIC, each line a record.

    The exit code is 0 only if every record was acknowledged.
    """
    if json_lines and key_separator is not None:
        raise click.UsageError("--json-lines and --key-separator exclude each other")
    if ledger_folder is not None and not ACKS[acks]:
        raise click.UsageError("--ledger needs acknowledgements: --acks 1 or all")
    fixed: list[Header] = [(name, value.encode()) for name, value in pairs(headers, "--header").items()]
    separator = key_separator.encode() if key_separator else None
    with (
        _ledger(ledger_folder, topic) as note,
        _Outbox(cluster, topic, acks=ACKS[acks], codec=compression, linger_ms=linger, note=note) as outbox,
    ):
        intake = _Intake(outbox, fixed, partition, separator, json_lines)
        signal.signal(signal.SIGINT, intake.interrupt)
        intake.run(_open(path), linger / 1000)
        outbox.flush()
    _report(outbox, as_json)
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
        return sys.stdin.fileno()
    try:
        return os.open(path, os.O_RDONLY)
    except OSError as error:
        raise OperatorError(f"cannot read {path}: {error.strerror}") from None


class _Outbox:
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
        cluster.topic(topic, create=True)
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

    def add(self, record: NewRecord, partition: int | None) -> None:
        self._raise_fault()
        if partition is not None:
            self._cluster.partition(self._topic, partition)
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
        outbox: _Outbox,
        headers: list[Header],
        partition: int | None,
        key_separator: bytes | None,
        json_lines: bool,
    ) -> None:
        self._outbox = outbox
        self._headers = headers
        self._partition = partition
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

    def run(self, descriptor: int, linger_seconds: float) -> None:
        chunks = read_lines(descriptor, linger_seconds)
        while (lines := self._next_lines(chunks)) is not None:
            if not lines:
                self._outbox.flush()
            for line in lines:
                self._add(line)
            self._show_progress()
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
            if self._json_lines:
                parsed = formats.parse_json_line(line)
            else:
                parsed = formats.parse_line(line, self._key_separator)
        except ValueError as error:
            self._outbox.flush()
            sent = f"the {self._outbox.acknowledged} records before it were sent"
            raise OperatorError(f"line {self._line_number}: {error}; {sent}") from None
        timestamp_ms = int(time.time() * 1000) if parsed.timestamp_ms is None else parsed.timestamp_ms
        record = (timestamp_ms, parsed.key, parsed.value, [*self._headers, *parsed.headers])
        self._outbox.add(record, self._partition if parsed.partition is None else parsed.partition)

    def _show_progress(self) -> None:
        if self._shows_progress and time.monotonic() >= self._progress_due:
            self._progress_due = time.monotonic() + PROGRESS_SECONDS
            click.echo(f"\r\x1b[K{self._outbox.acknowledged} records acknowledged", nl=False, err=True)


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
        chunk = os.read(descriptor, CHUNK_BYTES)
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


def _report(outbox: _Outbox, as_json: bool) -> None:
    if as_json:
        partitions = {str(n): outbox.per_partition[n] for n in sorted(outbox.per_partition)}
        show_json({"acknowledged": outbox.acknowledged, "failed": outbox.failed, "partitions": partitions})
    reasons = Counter(str(failure) for failure in outbox.failures)
    for reason, batches in reasons.most_common(REASONS_SHOWN):
        click.echo(f"headrace: {reason} ({batches} {'batch' if batches == 1 else 'batches'})", err=True)
    if outbox.failed:
        total = outbox.acknowledged + outbox.failed
        click.echo(f"headrace: {outbox.failed} of {total} records were not acknowledged", err=True)
    elif not as_json:
        count = len(outbox.per_partition)
        where = f"in {count} partition{'' if count == 1 else 's'}"
        click.echo(f"{outbox.acknowledged} records acknowledged {where}", err=True)
