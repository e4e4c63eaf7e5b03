"""`headrace pipeline run`: a user's job, each of its outputs a streaming query with a checkpoint.

    CHECKPOINT/job.json     {"id", "fingerprint", "schemas"}
    CHECKPOINT/job.lock     locked by the process that runs
    CHECKPOINT/<output>/    Spark's checkpoint of that query

`job.json` names the batches of tables (id), tells a changed job (fingerprint), and keeps the fields that were guessed
from samples, so that a restart sees the same columns (schemas). It is on disk before a query starts. After a crash
Spark runs the last batch again: a table takes it once, and so does a topic for those who read what is committed, unless
its option `delivery` says otherwise. A run that ends by itself or by a signal has finished its batches.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.types import StructType

from headrace.client.admin import operations
from headrace.client.admin.cluster import Cluster
from headrace.client.errors import UnknownTopic
from headrace.errors import DataFolderError, OperatorError
from headrace.pipelines import durable, job, query_watch
from headrace.pipelines.job import Output, Topics
from headrace.pipelines.query_watch import Batches
from headrace.pipelines.summary import Progress, Summary, Table, rate
from headrace.pipelines.table_sink import TableSink
from headrace.pipelines.views import Views
from headrace.spark.sink import AT_LEAST_ONCE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

CHECKPOINTS: Final = Path(".headrace") / "checkpoints"
STATE: Final = "job.json"
LOCK: Final = "job.lock"
START_WITHIN_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class JobOptions:
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
    """What was seen of the batches of a query, which may be started anew."""

    output: Output
    seen: Batches = field(default_factory=Batches)
    batches: int = 0
    records: int = 0

    def see(self, query: StreamingQuery) -> None:
        for each in self.seen.fresh(query):
            self.records += max(0, each["numInputRows"])
            self.batches += 1

    def row(self) -> dict[str, Any]:
        return {
            "output": self.output.kind,
            "to": self.output.target,
            "records_read": self.records,
            "batches": self.batches,
        }


def run(spark: SparkSession, options: JobOptions, progress: Progress | None = None) -> Summary:
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
            with query_watch.signals() as stopping:
                running = [Running(output) for output in topics.outputs]
                start = partial(_start_all, spark, topics.outputs, options, state)
                interrupted = query_watch.run(start, partial(_look, running, progress), stopping)
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


def _begin(options: JobOptions, print_of_job: str) -> State:
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
    durable.save_json(folder / STATE, {"id": state.id, "fingerprint": state.fingerprint, "schemas": state.schemas})


def _make_topics(bootstrap: str, outputs: Sequence[Output]) -> list[str]:
    """Topics that are written to and not there, with the broker's default settings."""
    made = []
    with Cluster(bootstrap) as cluster:
        for output in outputs:
            if output.kind == "topic":
                try:
                    cluster.topic(output.target)
                except UnknownTopic:
                    operations.create_topic(cluster, output.target)
                    made.append(output.target)
    return made


def _start_all(
    spark: SparkSession, outputs: Sequence[Output], options: JobOptions, state: State
) -> list[StreamingQuery]:
    queries: list[StreamingQuery] = []
    try:
        for output in outputs:
            queries.append(_start(spark, output, options, state))
            _wait_until_reading(queries[-1])
    except BaseException:
        for each in queries:
            each.stop()
        raise
    return queries


def _wait_until_reading(query: StreamingQuery) -> None:
    """Queries that start together start their Python workers together, and Spark gives each only ten seconds."""
    patience = Progress()
    while query.status["message"].startswith("Initializing") and patience.elapsed_s < START_WITHIN_S:
        if query_watch.ended(query):
            return


def _start(spark: SparkSession, output: Output, options: JobOptions, state: State) -> StreamingQuery:
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
        named = {"writeId": f"{state.id}-{output.name}", "checkpointLocation": str(options.folder / output.name)}
        is_named = sent.get("delivery") != AT_LEAST_ONCE
        writer = output.rows.writeStream.foreachBatch(partial(_send, sent | (named if is_named else {})))
    writer = writer.option("checkpointLocation", str(options.folder / output.name)).outputMode(output.mode)
    if options.follow:
        return writer.trigger(processingTime=f"{options.trigger_s:g} seconds").start()
    return writer.trigger(availableNow=True).start()


def _send(options: Mapping[str, str], rows: DataFrame, batch: int) -> None:
    """A batch that Spark runs again is known by its number, and by what the checkpoint has of it."""
    numbered = {"batchId": str(batch)} if "writeId" in options else {}
    rows.write.format("headrace").options(**options, **numbered).mode("append").save()


def _look(running: Sequence[Running], progress: Progress, queries: Sequence[StreamingQuery]) -> None:
    for each, query in zip(running, queries, strict=True):
        each.see(query)
    records = sum(each.records for each in running)
    batches = sum(each.batches for each in running)
    progress.say(f"read {records:,} records in {batches:,} batches, {rate(records, progress.elapsed_s)}")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One run of a checkpoint at a time."""
    try:
        durable.make_folder(folder)
        (folder / LOCK).touch()
    except OSError as error:
        raise DataFolderError(f"{folder} cannot be written: {error.strerror}; give another --checkpoint") from None

    def taken(by: str) -> DataFolderError:
        return DataFolderError(f"the job runs already, as process {by}: it holds {folder}")

    with durable.locked(folder / LOCK, taken):
        yield
