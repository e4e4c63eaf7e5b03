"""`headrace produce`: lines in, records out, and an exit code that says whether all of them were acknowledged."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import click

from headrace.cli import formats
from headrace.cli.lines import read_lines
from headrace.cli.options import json_option, pairs, with_cluster
from headrace.cli.output import show_json
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.producer import Acknowledged, Producer
from headrace.errors import OperatorError
from headrace.records.codecs import Codec
from headrace.records.record import Header

ACKS: Final = {"0": 0, "1": 1, "-1": -1, "all": -1}
PROGRESS_SECONDS: Final = 0.5
REASONS_SHOWN: Final = 5
EXIT_INTERRUPTED: Final = 130


@click.command()
@click.argument("topic")
@click.option("--file", "path", metavar="FILE", help="Read this file instead of standard input.")
@click.option("--key-separator", metavar="TEXT", help="What stands between key and value; else there is no key.")
@click.option("--json-lines", is_flag=True, help="Each line is an object: key, value, headers, partition, timestamp.")
@click.option("--header", "headers", multiple=True, metavar="NAME=VALUE", help="A header for every record; repeat.")
@click.option("--partition", type=click.IntRange(0), help="Send here; else by hash of the key, else spread.")
@click.option("--acks", type=click.Choice(list(ACKS)), default="all", show_default=True, help="Who must have it.")
@click.option(
    "--compression",
    type=click.Choice([codec.name.lower() for codec in Codec]),
    default="none",
    show_default=True,
    help="How batches are packed.",
)
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
    codec, separator = Codec[compression.upper()], key_separator.encode() if key_separator else None
    with _ledger(ledger_folder, topic) as on_acknowledged:
        producer = Producer(cluster, topic, acks=ACKS[acks], codec=codec, on_acknowledged=on_acknowledged)
        intake = _Intake(producer, fixed, partition, separator, json_lines)
        signal.signal(signal.SIGINT, intake.interrupt)
        intake.run(_open(path), linger / 1000)
        producer.flush()
    _report(producer, as_json)
    if intake.interrupted:
        return EXIT_INTERRUPTED
    return 1 if producer.failed else 0


@contextmanager
def _ledger(folder: str | None, topic: str) -> Iterator[Callable[[Acknowledged], None] | None]:
    """What the producer tells of acknowledged batches goes to a ledger in the folder, if there is one."""
    if folder is None:
        yield None
        return
    try:
        from headrace.arrow.ledger import Ledger, add_records, producer_name
    except ImportError:
        raise OperatorError("--ledger needs pyarrow: pip install 'headrace[arrow]'") from None

    with Ledger(folder, producer_name("produce")) as ledger:

        def note(batch: Acknowledged) -> None:
            add_records(ledger, topic, batch.partition, batch.base_offset, batch.sequences, batch.records)

        yield note


def _open(path: str | None) -> int:
    if path is None:
        return sys.stdin.fileno()
    try:
        return os.open(path, os.O_RDONLY)
    except OSError as error:
        raise OperatorError(f"cannot read {path}: {error.strerror}") from None


class _Intake:
    """Turns lines into records and hands them to the producer."""

    def __init__(
        self,
        producer: Producer,
        headers: list[Header],
        partition: int | None,
        key_separator: bytes | None,
        json_lines: bool,
    ) -> None:
        self._producer = producer
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
                self._producer.flush()
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
            self._producer.flush()
            sent = f"the {self._producer.acknowledged} records before it were sent"
            raise OperatorError(f"line {self._line_number}: {error}; {sent}") from None
        timestamp_ms = int(time.time() * 1000) if parsed.timestamp_ms is None else parsed.timestamp_ms
        record = (timestamp_ms, parsed.key, parsed.value, [*self._headers, *parsed.headers])
        self._producer.add(record, self._partition if parsed.partition is None else parsed.partition)

    def _show_progress(self) -> None:
        if self._shows_progress and time.monotonic() >= self._progress_due:
            self._progress_due = time.monotonic() + PROGRESS_SECONDS
            click.echo(f"\r\x1b[K{self._producer.acknowledged} records acknowledged", nl=False, err=True)


def _report(producer: Producer, as_json: bool) -> None:
    if as_json:
        partitions = {str(n): producer.per_partition[n] for n in sorted(producer.per_partition)}
        show_json({"acknowledged": producer.acknowledged, "failed": producer.failed, "partitions": partitions})
    reasons = Counter(str(failure) for failure in producer.failures)
    for reason, batches in reasons.most_common(REASONS_SHOWN):
        click.echo(f"headrace: {reason} ({batches} {'batch' if batches == 1 else 'batches'})", err=True)
    if producer.failed:
        total = producer.acknowledged + producer.failed
        click.echo(f"headrace: {producer.failed} of {total} records were not acknowledged", err=True)
    elif not as_json:
        count = len(producer.per_partition)
        where = f"in {count} partition{'' if count == 1 else 's'}"
        click.echo(f"{producer.acknowledged} records acknowledged {where}", err=True)
