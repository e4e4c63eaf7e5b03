"""The driver of test_standalone.py: every source, sink and pipeline on a cluster, in one session.

Run as `python standalone_driver.py REQUEST`, a JSON file with the fields of `Request`, by a Python that has the
package and none of the tests: executors have neither this file nor what is beside it. What was found is written as JSON
to `result` in its folder, by the name of the step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

import headrace
from headrace.arrow.locations import location
from headrace.cli.sql import archived_topics
from headrace.client.admin import operations
from headrace.client.admin.cluster import Cluster
from headrace.pipelines import archive, audit, compact, index, latest, replay, report, run
from headrace.pipelines.replay_archive import ArchiveReplay
from headrace.pipelines.statements import split
from headrace.pipelines.summary import Progress
from headrace.pipelines.views import Views
from headrace.spark import session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

WITH_EXECUTOR = "partition int, offset long, digest long, executor string, worker string, package string"
TASKS = "8"
TRIES = 5
JOB = """\
create topic view `{topic}` (`order` string, country string);
insert into topic `{topic}-job` select country as _key, `order` from stream `{topic}`;
insert into table './orders' partitioned by (country) select `order`, country from stream `{topic}`;
"""


@dataclass(frozen=True, slots=True)
class Request:
    """`records` of the topic were made by `headrace load`, with its `ledger` and `traces`; `data` is the broker's."""

    master: str
    settings: dict[str, str]
    bootstrap: str
    topic: str
    records: int
    data: str
    ledger: str
    traces: str
    folder: str
    archive: str
    """A folder, or a place in a store."""
    kills: int
    """Executors that are killed while a stream writes."""
    batches: int
    """Into how many it is cut."""
    steps: tuple[str, ...] = ()
    """All, if none is named."""


class Tour:
    """Each method is a step, in the order in which they stand."""

    def __init__(self, spark: SparkSession, given: Request) -> None:
        self._spark = spark
        self._given = given
        self._archive = location(given.archive)

    def topic(self) -> list[list[Any]]:
        return rows(self._topic("partition,offset,digest").mapInArrow(with_executor, WITH_EXECUTOR))

    def data_folder(self) -> list[list[Any]]:
        reader = self._spark.read.format("headrace-log").options(topic=self._given.topic)
        return rows(reader.option("columns", "partition,offset,digest").load(self._given.data))

    def topic_while_an_executor_is_killed(self) -> dict[str, Any]:
        killed = self._empty_folder("killed-reading")
        read = self._topic("partition,offset,digest")
        found = rows(read.mapInArrow(partial(killing, kills=1, told=str(killed)), read.schema))
        return {"rows": found, "victims": victims(killed)}

    def stream_to_topic_while_executors_are_killed(self) -> dict[str, Any]:
        """The sink, exactly once: `<topic>-copy`."""
        killed, at_once = self._empty_folder("killed-writing"), self._given.records // self._given.batches
        read = self._stream("key,value", maxOffsetsPerTrigger=str(at_once), minPartitions=TASKS)
        self._write(read.mapInArrow(partial(killing, kills=self._given.kills, told=str(killed)), read.schema), "copy")
        return {"victims": victims(killed)}

    def rows_to_topic(self) -> None:
        """The sink of a batch: `<topic>-batch`, once by its name."""
        read = self._topic("key,value")
        writer = read.write.format("headrace").options(**self._to("batch"), writeId=self._given.topic)
        writer.mode("append").save()

    def archived(self) -> dict[str, Any]:
        given, half = self._given, self._given.records // 2
        options = archive.ArchiveOptions(self._archive, given.bootstrap, (given.topic,), max_offsets_per_trigger=half)
        return archive.run(self._spark, options).as_json()

    def compacted(self) -> dict[str, Any]:
        return compact.run(self._spark, compact.CompactOptions(self._archive), Progress()).as_json()

    def indexed(self) -> dict[str, Any]:
        return index.run(self._spark, index.IndexOptions(self._archive), Progress()).as_json()

    def latest(self) -> dict[str, Any]:
        return latest.run(self._spark, latest.LatestOptions(self._archive), Progress()).as_json()

    def audited(self) -> dict[str, Any]:
        given = self._given
        options = audit.AuditOptions(
            (given.ledger,), given.bootstrap, (given.topic,), data=(given.data,), archive=given.archive
        )
        return audit.run(self._spark, options, Progress()).as_json()

    def reported(self) -> dict[str, Any]:
        options = report.ReportOptions((self._given.traces,), str(Path(self._given.folder) / "report"))
        return report.run(self._spark, options, Progress()).as_json()

    def job(self) -> dict[str, Any]:
        """Orders to `<topic>-job` and to the table `orders`."""
        path = Path(self._given.folder) / "job.sql"
        path.write_text(JOB.format(topic=self._given.topic))
        return run.run(self._spark, run.JobOptions(path, self._given.bootstrap)).as_json()

    def archive_asked(self) -> list[list[Any]]:
        """As `headrace sql --archive` does."""
        archived = archived_topics(self._spark, self._given.archive)
        views = Views(self._spark, self._given.bootstrap, archived=archived)
        (statement,) = split(f"select count(*) as orders from {views.archive_prefix}.`{self._given.topic}`")
        found = rows(views.sql(statement))
        views.close()
        return found

    def replayed(self) -> dict[str, Any]:
        """To `<topic>-again`; the pipeline that needs no Spark."""
        given = self._given
        options = ArchiveReplay(self._archive, given.bootstrap, given.topic, f"{given.topic}-again")
        return replay.run(options).as_json()

    def whole_history(self) -> dict[str, Any]:
        """After the broker has deleted a third: a statement, and a stream to `<topic>-history`."""
        given = self._given
        with Cluster(given.bootstrap) as cluster:
            cut = {partition.index: given.records // 9 for partition in cluster.topic(given.topic).partitions}
            operations.delete_records(cluster, given.topic, cut)
        views = Views(self._spark, given.bootstrap, history=given.archive)
        (statement,) = split(f"select count(*), count(distinct _partition, _offset) from `{given.topic}`")
        ((count, distinct),) = views.sql(statement).collect()
        views.close()
        self._write(self._stream("key,value", history=given.archive), "history")
        return {"count": count, "distinct": distinct, "left": self._topic("offset").count()}

    def _empty_folder(self, name: str) -> Path:
        folder = Path(self._given.folder) / name
        folder.mkdir(exist_ok=True)
        return folder

    def _topic(self, columns: str) -> DataFrame:
        reader = self._spark.read.format("headrace").options(bootstrap=self._given.bootstrap, columns=columns)
        return reader.options(subscribe=self._given.topic, minPartitions=TASKS).load()

    def _stream(self, columns: str, **options: str) -> DataFrame:
        reader = self._spark.readStream.format("headrace").options(bootstrap=self._given.bootstrap, columns=columns)
        return reader.options(subscribe=self._given.topic, startingOffsets="earliest", **options).load()

    def _write(self, frame: DataFrame, target: str) -> None:
        writer = frame.writeStream.format("headrace").options(**self._to(target))
        checkpoint = str(Path(self._given.folder) / "checkpoints" / target)
        writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination()

    def _to(self, target: str) -> dict[str, str]:
        return {"bootstrap": self._given.bootstrap, "topic": f"{self._given.topic}-{target}"}


def rows(frame: DataFrame) -> list[list[Any]]:
    return [list(row) for row in frame.collect()]


def with_executor(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The rows with the executor that read them, its worker, and where it has the package from."""
    # An executor works in WORKER/APPLICATION/ID.
    here = Path.cwd()
    told = {"executor": here.name, "worker": here.parent.parent.name, "package": str(headrace.__file__)}
    for batch in batches:
        for name, value in told.items():
            batch = batch.append_column(name, pa.repeat(pa.scalar(value), len(batch)))
        yield batch


def killing(batches: Iterator[pa.RecordBatch], kills: int, told: str) -> Iterator[pa.RecordBatch]:
    """The same rows. As long as not so many executors were killed, a task that has handed some on kills its own."""
    for batch in batches:
        yield batch.slice(0, 1)
        for nth in range(kills):
            try:
                with Path(told, str(nth)).open("x") as file:
                    file.write(Path.cwd().name)
            except FileExistsError:
                continue
            os.kill(executor_pid(), signal.SIGKILL)
            signal.pause()  # the worker ends with its executor
        yield batch.slice(1)


def victims(killed: Path) -> list[str]:
    return [file.read_text() for file in killed.iterdir()]


def executor_pid() -> int:
    """The JVM above this Python worker."""
    pid = os.getpid()
    while b"CoarseGrainedExecutorBackend" not in Path(f"/proc/{pid}/cmdline").read_bytes():
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def patiently(step: Callable[[], Any]) -> Any:
    """All steps can be done again. Spark gives a Python process ten seconds to start, and busy machines need more."""
    for _ in range(TRIES - 1):
        try:
            return step()
        except (PySparkException, Py4JJavaError) as error:
            if "Python worker failed to connect back" not in str(error):
                raise
    return step()


def main(request: str) -> None:
    given = Request(**json.loads(Path(request).read_text()))
    began = time.monotonic()
    spark = session.start("headrace-standalone", given.master, given.settings)
    tour = Tour(spark, given)
    steps = [name for name, step in vars(Tour).items() if isinstance(step, Callable) and name[0] != "_"]  # type: ignore[arg-type]
    found: dict[str, Any] = {"package": headrace.__file__}
    for name in given.steps or steps:
        print(f"{time.monotonic() - began:.1f} s: {name}", flush=True)
        found[name] = patiently(getattr(tour, name))
    print(f"{time.monotonic() - began:.1f} s: done", flush=True)
    Path(given.folder, "result").write_text(json.dumps(found, default=str))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
