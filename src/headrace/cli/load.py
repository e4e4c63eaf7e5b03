"""`headrace load`: made-up traffic into a topic, with a ledger for `audit` and a trace for `report`."""

from __future__ import annotations

import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import click

from headrace.cli import EXIT_INTERRUPTED
from headrace.cli.completers import topic_names
from headrace.cli.options import compression_option, json_option, with_connect
from headrace.cli.output import format_bytes, show_json
from headrace.client.admin import operations
from headrace.client.admin.cluster import Cluster
from headrace.client.errors import UnknownTopic
from headrace.errors import HeadraceError, OperatorError
from headrace.records.codecs import Codec

if TYPE_CHECKING:
    from headrace.arrow.load_generator import Amount, LoadProducer, Tally
    from headrace.arrow.traffic import Shape
    from headrace.arrow.write import Writer

DEFAULT_RECORDS: Final = 100_000
PROGRESS_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True)
class _Setup:
    """What all producers of a run share."""

    topic: str
    shape: Shape
    amount: Amount
    codec: Codec
    seed: int
    ledger: str | None
    traces: str | None


@click.command()
@click.argument("topic", shell_complete=topic_names)
@click.option(
    "--kind", type=click.Choice(["orders", "clicks"]), default="orders", show_default=True, help="What events."
)
@click.option("--value-bytes", type=click.IntRange(1), metavar="N", help="Random bytes of this size instead of events.")
@click.option("--keys", type=click.IntRange(0), default=10_000, show_default=True, help="Different keys; 0 for none.")
@click.option(
    "--skew", type=click.FloatRange(0), default=1.1, show_default=True, help="How uneven keys are; 0 for even."
)
@click.option("--records", type=click.IntRange(1), help=f"Send so many in all; {DEFAULT_RECORDS:,} without --duration.")
@click.option("--duration", type=click.FloatRange(0, min_open=True), metavar="SECONDS", help="Send for so long.")
@click.option(
    "--rate", type=click.FloatRange(0, min_open=True), help="Records a second in all; else as fast as it goes."
)
@click.option("--producers", type=click.IntRange(1, 64), default=1, show_default=True, help="Producers at a time.")
@click.option("--partitions", type=click.IntRange(1), help="Create the topic with so many, if it is not there.")
@compression_option
@click.option("--ledger", metavar="DIR", help="Note every acknowledged record there, for `pipeline audit`.")
@click.option("--traces", metavar="DIR", help="Note when each batch went and came there, for `pipeline report`.")
@click.option("--seed", type=click.IntRange(0), help="The same seed makes the same events; else no two runs do.")
@json_option
@with_connect
def load(
    connect: Callable[[], Cluster],
    topic: str,
    kind: str,
    value_bytes: int | None,
    keys: int,
    skew: float,
    records: int | None,
    duration: float | None,
    rate: float | None,
    producers: int,
    partitions: int | None,
    compression: str,
    ledger: str | None,
    traces: str | None,
    seed: int | None,
    as_json: bool,
) -> int:
    """Send made-up traffic to TOPIC: orders, clicks, or random bytes.

    The exit code is 0 only if every record was acknowledged.
    """
    try:
        from headrace.arrow.load_generator import Amount
        from headrace.arrow.traffic import Shape
    except ImportError as error:
        raise OperatorError(f"{error.name} is not installed: pip install 'headrace[arrow]' numpy") from None
    if records is None and duration is None:
        records = DEFAULT_RECORDS
    if records is not None:
        producers = min(producers, records)
    shape = Shape("bytes" if value_bytes else kind, keys, skew, value_bytes or 0)
    amount = Amount(records, duration, rate)
    # An audit takes the same content at a place that nobody claims for a record sent twice.
    drawn = secrets.randbits(64) if seed is None else seed
    setup = _Setup(topic, shape, amount, Codec[compression.upper()], drawn, ledger, traces)
    with connect() as cluster:
        _make_topic(cluster, topic, partitions)
    run = _Run(setup, connect, producers)
    signal.signal(signal.SIGINT, run.interrupt)
    run.run()
    run.report(as_json)
    if run.interrupted:
        return EXIT_INTERRUPTED
    return 1 if run.failed or run.errors else 0


def _make_topic(cluster: Cluster, topic: str, partitions: int | None) -> None:
    if partitions is None:
        cluster.topic(topic, create=True)
        return
    try:
        found = len(cluster.topic(topic).partitions)
    except UnknownTopic:
        operations.create_topic(cluster, topic, partitions=partitions)
        return
    if found != partitions:
        raise OperatorError(
            f"topic {topic!r} is there with {found} partitions, not {partitions}; leave --partitions out"
        )


class _Run:
    """Producers in threads of their own: what takes time in them runs without the interpreter's lock."""

    def __init__(self, setup: _Setup, connect: Callable[[], Cluster], producers: int) -> None:
        self.interrupted = False
        self.errors: list[HeadraceError] = []
        self._setup = setup
        self._connect = connect
        self._stop = threading.Event()
        self._producers: list[LoadProducer] = []
        self._threads = [
            threading.Thread(target=self._produce, args=(number, setup.amount.share(number, producers)), daemon=True)
            for number in range(producers)
        ]
        self._elapsed_s = 0.0

    @property
    def tallies(self) -> list[Tally]:
        return [producer.tally for producer in self._producers]

    @property
    def acknowledged(self) -> int:
        return sum(tally.acknowledged for tally in self.tallies)

    @property
    def failed(self) -> int:
        return sum(tally.failed for tally in self.tallies)

    def interrupt(self, *_: object) -> None:
        """Ctrl-C: what is on its way is waited for. A second one ends it at once."""
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True
        self._stop.set()

    def run(self) -> None:
        began = time.monotonic()
        for thread in self._threads:
            thread.start()
        shows_progress = sys.stderr.isatty()
        for thread in self._threads:
            while thread.is_alive():
                thread.join(PROGRESS_SECONDS)
                self._elapsed_s = time.monotonic() - began
                if shows_progress:
                    rate = self.acknowledged / self._elapsed_s
                    text = f"{self.acknowledged:,} records acknowledged, {rate:,.0f}/s"
                    click.echo(f"\r\x1b[K{text}", nl=False, err=True)
        if shows_progress:
            click.echo("\r\x1b[K", nl=False, err=True)

    def _produce(self, number: int, amount: Amount) -> None:
        from headrace.arrow.ledger import Ledger, producer_name
        from headrace.arrow.load_generator import LoadProducer
        from headrace.arrow.traces import open_traces
        from headrace.arrow.traffic import Traffic

        setup, name = self._setup, producer_name("load")
        try:
            with ExitStack() as stack:
                writer, partition_count = self._open()
                producer = LoadProducer(
                    stack.enter_context(writer),
                    setup.topic,
                    Traffic(setup.shape, partition_count, seed=setup.seed, producer=number),
                    name=name,
                    ledger=stack.enter_context(Ledger(setup.ledger, name)) if setup.ledger else None,
                    trace=stack.enter_context(open_traces(setup.traces, name)) if setup.traces else None,
                )
                self._producers.append(producer)
                producer.run(amount, self._stop)
        except HeadraceError as error:
            self.errors.append(error)
            self._stop.set()

    def _open(self) -> tuple[Writer, int]:
        """A writer, which its cluster belongs to from then on, and the number of the topic's partitions."""
        from headrace.arrow.write import Writer

        with ExitStack() as opening:
            cluster = opening.enter_context(self._connect())
            partition_count = len(cluster.topic(self._setup.topic, expected=True).partitions)
            writer = Writer(self._setup.topic, codec=self._setup.codec, cluster=cluster)
            opening.pop_all()
        return writer, partition_count

    def report(self, as_json: bool) -> None:
        from headrace.arrow.load_generator import latencies

        sent_bytes = sum(tally.bytes for tally in self.tallies)
        seconds = max(self._elapsed_s, 1e-9)
        took = latencies(self.tallies)
        for reason in dict.fromkeys(
            [*map(str, self.errors), *(failure for tally in self.tallies for failure in tally.failures)]
        ):
            click.echo(f"headrace: {reason}", err=True)
        if self.failed:
            total = self.acknowledged + self.failed
            click.echo(f"headrace: {self.failed} of {total} records were not acknowledged", err=True)
        told: dict[str, Any] = {
            "topic": self._setup.topic,
            "producers": len(self._threads),
            "acknowledged": self.acknowledged,
            "failed": self.failed,
            "bytes": sent_bytes,
            "seconds": round(seconds, 3),
            "records_per_s": round(self.acknowledged / seconds, 1),
            "mb_per_s": round(sent_bytes / seconds / 1e6, 2),
            "latency_ms": None if took is None else {name: round(value, 3) for name, value in asdict(took).items()},
        }
        if as_json:
            show_json(told)
            return
        click.echo(f"{self.acknowledged:,} records ({format_bytes(sent_bytes)}) acknowledged in {seconds:.1f} s")
        click.echo(f"{told['records_per_s']:,.0f} records/s, {told['mb_per_s']:,.1f} MB/s")
        if took is not None:
            click.echo(
                f"latency ms: mean {took.mean:.1f}, p50 {took.p50:.1f}, p99 {took.p99:.1f}, p999 {took.p999:.1f}"
            )
