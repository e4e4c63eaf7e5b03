"""`headrace pipeline run`: a user's job, each of its outputs a streaming query with a checkpoint.

    CHECKPOINT/job.json     {"id", "fingerprint", "schemas"}
    CHECKPOINT/job.lock     locked by the process that runs
    CHECKPOINT/<output>/    Spark's checkpoint of that query

`job.json` names the batches of tables (id), tells a changed job (fingerprint), and keeps the fields that were guessed
from samples, so that a restart sees the same columns (schemas). It is on disk before a query starts. After a crash
Spark runs the last batch again: a table takes it once, a topic may get its records twice. A run that ends by itself or
by a signal has finished its batches.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.types import StructType

from headrace.client import admin
from headrace.client.cluster import Cluster, UnknownTopic
from headrace.errors import DataFolderError, OperatorError
from headrace.spark import delta, faults
from headrace.spark.pipelines import job
from headrace.spark.pipelines.job import Output, Topics
from headrace.spark.pipelines.summary import Progress, Summary, Table, rate
from headrace.spark.table_sink import TableSink
from headrace.spark.views import Views

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

CHECKPOINTS: Final = Path(".headrace") / "checkpoints"
STATE: Final = "job.json"
LOCK: Final = "job.lock"
POLL_S: Final = 0.2
START_WITHIN_S: Final = 60.0
# How long a stop waits for batches that run; they are run again later if they take longer.
STOP_WITHIN_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Options:
    """`settings` are those of --set; `accept_change` lets a changed job go on with the checkpoint of the former one,
    and a job that begins add to tables that have rows."""

    path: Path
    bootstrap: str
    checkpoint: Path | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    follow: bool = False
    trigger_s: float = 1.0
    accept_change: bool = False

    @property
    def folder(self) -> Path:
        """Beside the job's file unless another is given: wherever it is run from, it is the same."""
        file = self.path.resolve()
        return (self.checkpoint or file.parent / CHECKPOINTS / file.stem).resolve()


@dataclass(frozen=True, slots=True)
class State:
    id: str
    fingerprint: str
    schemas: dict[str, Any]


@dataclass(slots=True)
class Running:
    """A query and what was seen of its batches."""

    output: Output
    query: StreamingQuery
    batch: int = -1
    batches: int = 0
    records: int = 0

    def see(self) -> None:
        for each in self.query.recentProgress:
            # A query without news reports too, under the number of the batch to come.
            if each["batchId"] > self.batch and "addBatch" in each["durationMs"]:
                self.batch = each["batchId"]
                self.records += max(0, each["numInputRows"])
                self.batches += 1
                faults.reached("batch-done", self.batch)

    def row(self) -> dict[str, Any]:
        return {
            "output": self.output.kind,
            "to": self.output.target,
            "records_read": self.records,
            "batches": self.batches,
        }


def run(spark: SparkSession, options: Options, progress: Progress | None = None) -> Summary:
    """Run a job over all that its topics have now, or with `follow` until a signal comes."""
    progress = progress or Progress()
    print_of_job = job.fingerprint(options.path, options.settings)
    with _locked(options.folder):
        state = _begin(options, print_of_job)
        views = Views(spark, options.bootstrap)
        views.sampled.update({topic: StructType.fromJson(known) for topic, known in state.schemas.items()})
        try:
            topics = Topics(views, options.settings, options.path.resolve().parent)
            job.load(options.path, topics)
            schemas = {topic: schema.jsonValue() for topic, schema in views.sampled.items()}
            _save(options.folder, State(state.id, print_of_job, schemas))
            made = _make_topics(options.bootstrap, topics.outputs)
            with _signals() as stopping:
                running = _start_all(spark, topics.outputs, options, state)
                interrupted = _follow(running, progress, stopping)
        finally:
            views.close()
        progress.done()
    facts = {
        "job": str(options.path),
        "checkpoint": str(options.folder),
        "records_read": sum(each.records for each in running),
        "seconds": round(progress.elapsed_s, 1),
        **({"topics_created": made} if made else {}),
        **({"interrupted": True} if interrupted else {}),
    }
    table = Table("outputs", ("output", "to", "records_read", "batches"), [each.row() for each in running])
    return Summary("run", facts, (table,), ok=options.follow or not interrupted)


def _begin(options: Options, print_of_job: str) -> State:
    former = _load(options.folder)
    if former is None:
        return State(secrets.token_hex(6), print_of_job, {})
    if former.fingerprint != print_of_job and not options.accept_change:
        raise OperatorError(
            f"{options.path} is not the job that the checkpoint {options.folder} was written by, so its progress and "
            "state may not fit: give another --checkpoint to read from the beginning, or --accept-change to go on here"
        )
    return former


def _load(folder: Path) -> State | None:
    path = folder / STATE
    try:
        found = json.loads(path.read_text())
        return State(found["id"], found["fingerprint"], found["schemas"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError) as error:
        raise OperatorError(f"{path} cannot be read: {error}; give another --checkpoint") from None


def _save(folder: Path, state: State) -> None:
    temporary = folder / f"{STATE}.tmp"
    content = {"id": state.id, "fingerprint": state.fingerprint, "schemas": state.schemas}
    temporary.write_text(json.dumps(content) + "\n")
    delta.sync(temporary)
    temporary.rename(folder / STATE)
    delta.sync(folder / STATE)


def _make_topics(bootstrap: str, outputs: Sequence[Output]) -> list[str]:
    """Topics that are written to and not there, with the broker's default settings."""
    made = []
    with Cluster(bootstrap) as cluster:
        for output in outputs:
            if output.kind == "topic":
                try:
                    cluster.topic(output.target)
                except UnknownTopic:
                    admin.create_topic(cluster, output.target)
                    made.append(output.target)
    return made


def _start_all(spark: SparkSession, outputs: Sequence[Output], options: Options, state: State) -> list[Running]:
    running: list[Running] = []
    try:
        for output in outputs:
            running.append(Running(output, _start(spark, output, options, state)))
            _wait_until_reading(running[-1].query)
    except BaseException:
        for each in running:
            each.query.stop()
        raise
    return running


def _wait_until_reading(query: StreamingQuery) -> None:
    """Queries that start together start their Python workers together, and Spark gives each only ten seconds."""
    patience = Progress()
    while query.status["message"].startswith("Initializing") and patience.elapsed_s < START_WITHIN_S:
        if _ended(query):
            return


def _start(spark: SparkSession, output: Output, options: Options, state: State) -> StreamingQuery:
    sent = {"kafka.bootstrap.servers": options.bootstrap, "topic": output.target, **output.options}
    if output.kind == "table":
        sink = TableSink(Path(output.target), f"{state.id}-{output.name}", output.partition_by)
        sink.check_checkpoint(options.folder / output.name, options.accept_change)
        sink.prepare(spark, output.rows.schema)
        writer = output.rows.writeStream.foreachBatch(sink.write)
    elif output.mode == "append":
        writer = output.rows.writeStream.format("headrace").options(**sent)
    else:
        # Spark lets a sink in Python take rows in append mode only; a batch at a time they are the same to a topic.
        writer = output.rows.writeStream.foreachBatch(partial(_send, sent))
    writer = writer.option("checkpointLocation", str(options.folder / output.name)).outputMode(output.mode)
    if options.follow:
        return writer.trigger(processingTime=f"{options.trigger_s:g} seconds").start()
    return writer.trigger(availableNow=True).start()


def _send(options: Mapping[str, str], rows: DataFrame, batch: int) -> None:
    rows.write.format("headrace").options(**options).mode("append").save()


def _follow(running: Sequence[Running], progress: Progress, stopping: threading.Event) -> bool:
    """Wait until all queries have ended; one that fails ends the others. True if a signal came first."""
    try:
        waiting = list(running)
        while waiting:
            waiting = [each for each in waiting if not _ended(each.query)]
            _say(running, progress)
            if stopping.is_set() and waiting:
                for each in waiting:
                    _stop(each.query)
                return True
        return False
    except BaseException:
        for each in running:
            each.query.stop()
        raise
    finally:
        for each in running:
            each.see()


def _say(running: Sequence[Running], progress: Progress) -> None:
    for each in running:
        each.see()
    records = sum(each.records for each in running)
    batches = sum(each.batches for each in running)
    progress.say(f"read {records:,} records in {batches:,} batches, {rate(records, progress.elapsed_s)}")


def _ended(query: StreamingQuery) -> bool:
    """Wait a little for the end; an error of the query is raised here."""
    return bool(query.awaitTermination(POLL_S))  # type: ignore[arg-type]


def _stop(query: StreamingQuery) -> None:
    """Let the batch that runs come to its end first."""
    patience = Progress()
    while query.status["isTriggerActive"] and patience.elapsed_s < STOP_WITHIN_S:
        if _ended(query):
            return
    query.stop()


@contextmanager
def _signals() -> Iterator[threading.Event]:
    """SIGINT and SIGTERM ask for an end; a second SIGINT interrupts."""
    stopping = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopping
        return

    def asked(number: int, _: object) -> None:
        if stopping.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stopping.set()

    before = {number: signal.signal(number, asked) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One run of a checkpoint at a time. The lock goes with the process, however that ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+")
    except OSError as error:
        raise DataFolderError(f"{folder} cannot be written: {error.strerror}; give another --checkpoint") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise DataFolderError(
                f"the job runs already, as process {file.read().strip() or 'unknown'}: it holds {folder}"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
