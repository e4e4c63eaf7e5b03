"""The sink from Spark, exactly once: what readers of committed records see, whatever is run again or killed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PySparkException

import headrace.arrow
from brokers import Broker, wait_for
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.transactions import end_transactions, list_transactions
from headrace.spark import decision_log
from headrace.spark.decisions import WRITE, Decision
from headrace.spark.faults import VARIABLE
from proving import proves
from spark import process_tree, sink_driver
from spark.confluent_rows import create_topic, numbered, send
from spark.driver_process import DEADLINE_S, DriverProcess
from spark.older_broker import OlderBroker
from spark.standalone import LOOPBACK, Standalone

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.readwriter import DataFrameWriter

DRIVER = Path(sink_driver.__file__)
ROWS_AT_ONCE = "spark.sql.execution.arrow.maxRecordsPerBatch"
DRIVER_KILLS = 20
# The others run on a standalone master, whose executors are JVMs of their own.
LOCAL_KILLS = 14


def values(broker: Broker, topic: str, isolation: str = "committed") -> list[bytes]:
    found = headrace.arrow.read(topic, bootstrap=broker.bootstrap, columns=["value"], isolation=isolation).read_all()
    return sorted(found["value"].to_pylist())


def open_transactions(broker: Broker) -> list[str]:
    with Cluster(broker.bootstrap) as cluster:
        listed = list_transactions(cluster, states=["Ongoing", "Empty", "PrepareCommit", "PrepareAbort"])
    return [each.transactional_id for each in listed if each.transactional_id.count(".") > 1]


def decided(broker: Broker) -> list[Decision]:
    with Cluster(broker.bootstrap) as cluster:
        return list(decision_log.every(cluster, 30_000))


def writer(broker: Broker, frame: DataFrame, topic: str, **given: str) -> DataFrameWriter:
    return frame.write.format("headrace").options(bootstrap=broker.bootstrap, topic=topic, **given).mode("append")


def numbers(spark: SparkSession, count: int, tasks: int = 2) -> DataFrame:
    return spark.range(0, count, 1, tasks).selectExpr("cast(id as string) as value")


@proves("S3")
def test_a_task_that_fails_and_is_run_again_writes_once(spark: SparkSession, broker: Broker, tmp_path: Path) -> None:
    topic = create_topic(broker, partitions=2)
    frame = numbers(spark, 20_000).selectExpr("cast(null as binary) as key", "cast(value as binary) as value")
    before = spark.conf.get(ROWS_AT_ONCE)
    spark.conf.set(ROWS_AT_ONCE, "200")
    try:
        writer(broker, sink_driver.failing_once(frame, tmp_path / "failed"), topic).save()
    finally:
        spark.conf.set(ROWS_AT_ONCE, str(before))
    assert (tmp_path / "failed").exists()
    assert values(broker, topic) == sorted(b"%d" % n for n in range(20_000))
    assert len(values(broker, topic, "uncommitted")) > 20_000, "it had written before it failed"
    assert open_transactions(broker) == []


@proves("S3")
def test_a_write_under_a_name_is_done_once(spark: SparkSession, broker: Broker) -> None:
    topic, name = create_topic(broker, partitions=2), f"nightly {uuid.uuid4()}"
    for count in (100, 200):
        writer(broker, numbers(spark, count), topic, writeId=name).save()
        assert len(values(broker, topic)) == 100
    writer(broker, numbers(spark, 50), topic, writeId=f"{name} 2").save()
    writer(broker, numbers(spark, 25), topic).save()
    assert len(values(broker, topic)) == 175
    other = create_topic(broker)
    writer(broker, numbers(spark, 10), other, writeId=name).save()
    assert len(values(broker, other)) == 10, "a name is of a write to a topic"
    assert open_transactions(broker) == []
    known = [each.batch.query for each in decided(broker) if each.batch.query.startswith(WRITE + name)]
    assert sorted(known) == sorted([f"{WRITE}{name}@{topic}", f"{WRITE}{name} 2@{topic}", f"{WRITE}{name}@{other}"])


@proves("S3")
def test_batches_of_a_write_are_told_apart_by_their_numbers(
    spark: SparkSession, broker: Broker, tmp_path: Path
) -> None:
    """As foreachBatch has them. One that is run again is written once, and one decision is remembered of all."""
    topic, other, name = create_topic(broker, partitions=2), create_topic(broker), f"loud {uuid.uuid4()}"
    scene = Copy(broker, tmp_path)
    scene.send(300)

    def both(rows: DataFrame, batch: int) -> None:
        numbered = {"writeId": name, "batchId": str(batch), "checkpointLocation": str(scene.checkpoint)}
        for to in (topic, other):
            writer(broker, rows.select("value"), to, **numbered).save()

    options = {"bootstrap": broker.bootstrap, "subscribe": scene.source, "startingOffsets": "earliest"}
    read = spark.readStream.format("headrace").options(**options, maxOffsetsPerTrigger="200").load()
    stream = read.writeStream.foreachBatch(both).option("checkpointLocation", str(scene.checkpoint))
    for _ in range(2):
        assert stream.trigger(availableNow=True).start().awaitTermination(int(DEADLINE_S))
        expected = sorted(b"v%d" % n for n in range(300))
        assert values(broker, topic) == values(broker, other) == expected
        last = scene.batches("commits") - 1
        # Spark died before it had noted that the batch was done.
        (scene.checkpoint / "commits" / str(last)).unlink()
        (scene.checkpoint / "commits" / f".{last}.crc").unlink(missing_ok=True)
    known = {each.batch.query: each.batch.number for each in decided(broker) if name in each.batch.query}
    assert known == {f"{WRITE}{name}@{topic}": last, f"{WRITE}{name}@{other}": last}
    with pytest.raises(PySparkException, match="batch 0 comes after batch"):
        both(numbers(spark, 5), 0)
    assert values(broker, topic) == expected


@proves("S3")
def test_foreach_batch_with_an_older_checkpoint_is_refused_and_passes_over_nothing(
    spark: SparkSession, broker: Broker, tmp_path: Path
) -> None:
    scene, name = Copy(broker, tmp_path), f"restored {uuid.uuid4()}"

    def write(rows: DataFrame, batch: int) -> None:
        numbered = {"writeId": name, "batchId": str(batch), "checkpointLocation": str(scene.checkpoint)}
        writer(broker, rows.select("value"), scene.target, **numbered).save()

    def run() -> None:
        given = {"bootstrap": broker.bootstrap, "subscribe": scene.source, "startingOffsets": "earliest"}
        stream = spark.readStream.format("headrace").options(**given).load().writeStream.foreachBatch(write)
        started = stream.option("checkpointLocation", str(scene.checkpoint)).trigger(availableNow=True).start()
        assert started.awaitTermination(int(DEADLINE_S))

    for n in range(3):
        scene.send(50)
        run()
        shutil.copytree(scene.checkpoint, tmp_path / f"kept-{n}")
    scene.send(50)
    for kept, told in (
        (0, "batch 1 comes after batch 2 of this query was committed"),
        (1, "batch 2 of this query was committed before, with other offsets than it has now"),
    ):
        shutil.rmtree(scene.checkpoint)
        shutil.copytree(tmp_path / f"kept-{kept}", scene.checkpoint)
        with pytest.raises(PySparkException, match=told):
            run()
        assert values(broker, scene.target) == sorted(b"v%d" % n for n in range(150))
        assert open_transactions(broker) == []
    shutil.rmtree(scene.checkpoint)
    with pytest.raises(PySparkException, match=r"batch 0 comes after batch 2 .* give the writes another writeId"):
        run()
    shutil.rmtree(scene.checkpoint)
    shutil.copytree(tmp_path / "kept-2", scene.checkpoint)
    run()
    scene.check_all()


@proves("S3")
def test_a_checkpoint_that_was_deleted_is_a_new_query_and_an_older_one_is_refused(
    spark: SparkSession, broker: Broker, tmp_path: Path
) -> None:
    scene = Copy(broker, tmp_path)
    (tmp_path / "failed").touch()

    def run() -> None:
        copy = sink_driver.copy(spark, broker.bootstrap, scene.source, scene.target, scene.checkpoint, 1000)
        assert copy.trigger(availableNow=True).start().awaitTermination(int(DEADLINE_S))

    for n in range(3):
        scene.send(100)
        run()
        shutil.copytree(scene.checkpoint, tmp_path / f"kept-{n}")
    scene.check_all()
    scene.send(100)
    for kept, told in (
        (0, "batch 1 comes after batch 2 of this query was committed"),
        (1, "batch 2 of this query was committed before, with other offsets than it has now"),
    ):
        shutil.rmtree(scene.checkpoint)
        shutil.copytree(tmp_path / f"kept-{kept}", scene.checkpoint)
        for _ in range(2):
            with pytest.raises(PySparkException, match=told):
                run()
        assert values(broker, scene.target) == sorted(b"v%d" % n for n in range(300)), "its batch has other rows"
        assert open_transactions(broker) == []
    shutil.rmtree(scene.checkpoint)
    run()
    assert values(broker, scene.target) == sorted([b"v%d" % n for n in range(300)] + [b"v%d" % n for n in range(400)])
    assert open_transactions(broker) == []


@proves("S3")
def test_a_write_that_fails_leaves_nothing_to_be_seen(spark: SparkSession, broker: Broker) -> None:
    topic = create_topic(broker, partitions=2, max_message_bytes=100_000)
    frame = spark.range(0, 100, 1, 2).selectExpr(
        "cast(id as string) as key", "if(id = 77, repeat('x', 200000), 'small') as value"
    )
    with pytest.raises(PySparkException) as error:
        writer(broker, frame, topic).save()
    told = str(error.value)
    assert "a row of partition 1 of the frame, with key '77', has 200002 bytes, and topic" in told
    assert "takes 100000 in a batch (max.message.bytes)" in told
    assert values(broker, topic) == []
    assert open_transactions(broker) == []


@proves("S3")
def test_transactions_that_the_broker_refuses_are_told_and_at_least_once_is_a_choice(
    spark: SparkSession, fresh_broker: Callable[..., Broker]
) -> None:
    """Also to those who have asked for nothing: exactly once is the default."""
    broker = fresh_broker(settings={"transaction.two.phase.commit.enable": "false"})
    topic = create_topic(broker)
    told = "cannot be: the broker allows no two-phase transactions"
    for given, asked in (
        ({"delivery": "exactly-once"}, "option delivery=exactly-once"),
        ({"writeId": "x"}, "option writeId='x'"),
        ({}, "what is the default, exactly once,"),
    ):
        with pytest.raises(PySparkException, match=f"{asked} {told}"):
            writer(broker, numbers(spark, 10), topic, **given).save()
    assert values(broker, topic) == []
    writer(broker, numbers(spark, 10), topic, delivery="at-least-once").save()
    assert len(values(broker, topic)) == 10


@proves("S3")
def test_a_broker_that_knows_no_two_phase_transactions_is_written_to_at_least_once_and_that_is_said(
    spark: SparkSession, fresh_broker: Callable[..., Broker], driver_log: Path, tmp_path: Path
) -> None:
    """Unless exactly once was asked for. In a stream it is said once, not with each batch or task."""
    older = OlderBroker()
    broker = fresh_broker(advertise=(older.bootstrap,))
    host, _, port = broker.bootstrap.rpartition(":")
    older.upstream = host, int(port)
    topic = create_topic(broker)
    at = {"bootstrap": older.bootstrap, "topic": topic}

    def said() -> int:
        return driver_log.read_text(errors="replace").count("rows are written at least once")

    def write(**given: str) -> None:
        numbers(spark, 10).write.format("headrace").options(**at, **given).mode("append").save()

    for given, asked in (
        ({"delivery": "exactly-once"}, "option delivery=exactly-once"),
        ({"writeId": "x"}, "option writeId='x'"),
    ):
        with pytest.raises(PySparkException, match=f"{asked} cannot be: the broker has no two-phase transactions"):
            write(**given)
    assert values(broker, topic) == []
    before = said()
    write(delivery="at-least-once")
    assert said() == before
    write()
    assert said() == before + 1
    source = create_topic(broker)
    send(broker, source, numbered(400))
    given = {"bootstrap": older.bootstrap, "subscribe": source, "startingOffsets": "earliest"}
    read = spark.readStream.format("headrace").options(**given, maxOffsetsPerTrigger="100").load().select("value")
    stream = read.writeStream.format("headrace").options(**at, checkpointLocation=str(tmp_path / "checkpoint"))
    assert stream.trigger(availableNow=True).start().awaitTermination(int(DEADLINE_S))
    assert said() == before + 2
    assert len(values(broker, topic)) == 20 + 400
    older.close()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"delivery": "twice"}, "option delivery='twice' is not understood; write exactly-once or at-least-once"),
        ({"delivery": "at-least-once", "writeId": "x"}, "option writeId needs delivery=exactly-once"),
        ({"batchId": "1"}, "option batchId numbers the writes of one name"),
        ({"writeId": "x", "batchId": "-1"}, "option batchId='-1' is not understood; write a number from 0 on"),
        ({"writeId": "x", "batchId": "1"}, "option batchId needs checkpointLocation, that of the stream"),
        (
            {"writeId": "x", "batchId": "1", "checkpointLocation": "/nowhere"},
            "option checkpointLocation='/nowhere' has no offsets of a batch 1",
        ),
    ],
)
def test_what_cannot_be_is_told(spark: SparkSession, broker: Broker, given: dict[str, str], told: str) -> None:
    with pytest.raises(PySparkException, match=told):
        writer(broker, numbers(spark, 1), create_topic(broker), **given).save()


class Copy:
    """A stream from topic to topic, in drivers that are killed."""

    def __init__(self, broker: Broker, folder: Path) -> None:
        self.broker = broker
        self.folder = folder
        self.checkpoint = folder / "checkpoint"
        self.source, self.target = create_topic(broker, 2), create_topic(broker, 2)
        self.sent = 0

    def send(self, count: int) -> None:
        send(self.broker, self.source, numbered(count, self.sent))
        self.sent += count

    def driver(self, *, rows: int = 400, die_at: str = "", master: str = "local[2]", how: str = "") -> DriverProcess:
        command = [sys.executable, str(DRIVER), master, self.broker.bootstrap, self.source, self.target]
        command += [str(self.checkpoint), str(rows), how]
        known = {**LOOPBACK, "PYTHONPATH": os.pathsep.join(sys.path), "PYSPARK_PYTHON": sys.executable}
        return DriverProcess(command, {**known, **({VARIABLE: die_at} if die_at else {})}, self.folder)

    def batches(self, log: str = "offsets") -> int:
        """How many batches Spark has begun; by its log of commits, how many it has finished."""
        listed = (self.checkpoint / log).glob("[0-9]*")
        return max((int(path.name) for path in listed if path.name.isdigit()), default=-1) + 1

    def known(self) -> Decision | None:
        return next(iter(decided(self.broker)), None)

    def check(self) -> int:
        """What is seen is there once, whatever is seen of it."""
        found = values(self.broker, self.target)
        assert len(found) == len(set(found))
        return len(found)

    def check_all(self) -> None:
        assert values(self.broker, self.target) == sorted(b"v%d" % n for n in range(self.sent))
        assert open_transactions(self.broker) == []


@pytest.fixture
def scene(fresh_broker: Callable[..., Broker], tmp_path: Path) -> Copy:
    return Copy(fresh_broker(), tmp_path)


@proves("S3")
def test_a_driver_killed_after_its_decision_is_made_up_for(scene: Copy, spark: SparkSession) -> None:
    """One of its transactions was committed, one not. The last run is in the session of the tests."""
    scene.send(1000)
    driver = scene.driver(die_at="sink-decided:1")
    assert driver.wait() == -signal.SIGKILL, driver.told()
    known = scene.known()
    assert known is not None
    assert known.batch.number == 1
    assert len(known.prepared) == 2
    assert scene.check() == 400
    with Cluster(scene.broker.bootstrap) as cluster:
        end_transactions(cluster, known.prepared[:1], commit=True)
    copy = sink_driver.copy(spark, scene.broker.bootstrap, scene.source, scene.target, scene.checkpoint, 400)
    assert copy.trigger(availableNow=True).start().awaitTermination(int(DEADLINE_S))
    scene.check_all()
    known = scene.known()
    assert known is not None
    assert known.batch.number == 2
    assert len(known.before) == 1


@proves("S3")
def test_a_batch_without_rows_when_it_is_run_again_has_those_that_were_decided(
    scene: Copy, spark: SparkSession
) -> None:
    """Its filter was changed after its driver had died, and no other batch follows."""
    scene.send(400)
    driver = scene.driver(die_at="sink-decided:0")
    assert driver.wait() == -signal.SIGKILL, driver.told()
    assert scene.check() == 0
    assert len(open_transactions(scene.broker)) == 2
    given = {"bootstrap": scene.broker.bootstrap, "subscribe": scene.source, "startingOffsets": "earliest"}
    read = spark.readStream.format("headrace").options(**given, columns="key,value").load().where("value is null")
    write = read.writeStream.format("headrace").option("bootstrap", scene.broker.bootstrap)
    changed = write.option("topic", scene.target).option("checkpointLocation", str(scene.checkpoint))
    assert changed.trigger(availableNow=True).start().awaitTermination(int(DEADLINE_S))
    scene.check_all()


@proves("S3")
def test_a_query_that_is_stopped_in_mid_batch_holds_up_nobody(
    spark: SparkSession, broker: Broker, tmp_path: Path
) -> None:
    """Its tasks are killed when they have written, and none of them has told anything."""
    scene = Copy(broker, tmp_path)
    scene.send(20_000)
    (tmp_path / "failed").touch()
    before = spark.conf.get(ROWS_AT_ONCE)
    spark.conf.set(ROWS_AT_ONCE, "200")
    try:
        copy = sink_driver.copy(
            spark, broker.bootstrap, scene.source, scene.target, scene.checkpoint, 20_000, stuck=True
        )
        query = copy.start()
        wait_for("tasks to write", lambda: len(values(broker, scene.target, "uncommitted")) > 0, DEADLINE_S)
        query.stop()
    finally:
        spark.conf.set(ROWS_AT_ONCE, str(before))
    wait_for("what its tasks have left to be ended", lambda: not open_transactions(broker), DEADLINE_S)
    assert values(broker, scene.target) == []
    again = sink_driver.copy(spark, broker.bootstrap, scene.source, scene.target, scene.checkpoint, 20_000)
    assert again.trigger(availableNow=True).start().awaitTermination(int(DEADLINE_S))
    scene.check_all()


@pytest.mark.long
@pytest.mark.timeout(1500)
@proves("S3")
def test_a_driver_killed_at_every_named_point_of_the_sink(scene: Copy, proof_report: Callable[..., None]) -> None:
    points = ("sink-written:1", "sink-decided:2", "sink-ended:3", "sink-written:4")
    scene.send(2400)
    for point in points:
        driver = scene.driver(die_at=point)
        assert driver.wait() == -signal.SIGKILL, driver.told()
        known, number = scene.known(), int(point[-1])
        assert known is not None
        assert known.batch.number == (number - 1 if "written" in point else number), point
        assert scene.check() == 400 * (number + 1 if "ended" in point else number), point
    driver = scene.driver()
    assert driver.wait() == 0, driver.told()
    scene.check_all()
    proof_report(driver_killed_at=", ".join(points), rows=scene.sent, lost=0, duplicated=0, left_open=0)


@pytest.fixture
def standalone(tmp_path: Path) -> Iterator[Callable[[], Standalone]]:
    """A cluster that is started when it is first asked for."""
    started: list[Standalone] = []

    def give() -> Standalone:
        if not started:
            (tmp_path / "cluster").mkdir()
            started.append(Standalone(tmp_path / "cluster"))
        return started[0]

    yield give
    for cluster in started:
        cluster.stop()


@pytest.mark.long
@pytest.mark.timeout(5400)
@proves("S3")
def test_twenty_kills_of_the_sinks_driver_and_more_of_everything_else(
    scene: Copy, standalone: Callable[[], Standalone], seed: int, proof_report: Callable[..., None]
) -> None:
    """At random moments; local drivers first, then some with executors of their own."""
    began, draw = time.monotonic(), random.Random(seed)
    kills: Counter[str] = Counter()
    moments: Counter[str] = Counter()
    gave_up = 0
    while kills["driver"] < DRIVER_KILLS:
        scene.send(3000)
        cluster = None if kills["driver"] < LOCAL_KILLS else standalone()
        driver = scene.driver(rows=300, how="follow", master=cluster.address if cluster else "local[2]")
        before = scene.batches()
        wait_for("a batch to begin", lambda: scene.batches() > before or not driver.runs, DEADLINE_S)  # noqa: B023
        for _ in range(draw.randrange(3)):
            time.sleep(draw.uniform(0, 3))
            strike(scene, driver, cluster, draw, kills)
        time.sleep(draw.uniform(0, 4))
        if driver.runs:
            driver.kill()
            kills["driver"] += 1
            begun, done = scene.batches(), scene.batches("commits")
            moments["within a batch" if begun > done else "between batches"] += 1
        else:
            assert driver.wait() == 1, driver.told()
            gave_up += 1
        seen = scene.check()
        print(f"{time.monotonic() - began:.0f} s: {dict(kills)}, {seen} rows, gave up: {gave_up}", flush=True)
    last = scene.driver(rows=100_000)
    assert last.wait() == 0, last.told()
    scene.check_all()
    proof_report(
        kills=dict(kills),
        moments_of_driver_kills=dict(moments),
        drivers_that_gave_up=gave_up,
        rows=scene.sent,
        batches=scene.batches(),
        lost=0,
        duplicated=0,
        left_open=0,
        seconds=round(time.monotonic() - began),
    )


@pytest.mark.long
@proves("S3", "S9")
def test_attempts_that_lost_against_speculative_ones_are_seen_by_nobody(
    scene: Copy, standalone: Callable[[], Standalone], proof_report: Callable[..., None]
) -> None:
    """On a cluster, where Spark speculates: slow attempts have written rows, and nothing ever tells of them. They end
    only as another attempt was done first. The short form, without Spark, is in test_sink_commits.py."""
    batches, rows = 3, 20_000
    scene.send(batches * rows)
    driver = scene.driver(rows=rows, how="speculate", master=standalone().address)
    assert driver.wait() == 0, driver.told()
    slow = len(list(scene.folder.glob("slow-*")))
    assert slow == scene.batches() >= batches
    scene.check_all()
    seen = len(values(scene.broker, scene.target, "uncommitted"))
    assert seen > scene.sent, "they had written before they lost"
    proof_report(attempts_that_lost=slow, rows=scene.sent, rows_of_these=seen - scene.sent, lost=0, duplicated=0)


def strike(
    scene: Copy, driver: DriverProcess, cluster: Standalone | None, draw: random.Random, kills: Counter[str]
) -> None:
    victim = draw.choice(["worker", "worker", "broker", *(["executor"] * 3 if cluster else [])])
    if victim == "broker":
        scene.broker.restart(clean=False)
        kills["broker"] += 1
        return
    below = cluster.below() if cluster else []
    if victim == "executor":
        found = [pid for pid in below if process_tree.is_executor(pid)]
    else:
        found = driver.workers() + [pid for pid in below if process_tree.is_python_worker(pid)]
    if found:
        kills[victim] += process_tree.kill([draw.choice(found)])


def test_a_write_without_a_name_is_remembered_by_nobody(spark: SparkSession, broker: Broker) -> None:
    before = {each.batch.query for each in decided(broker)}
    writer(broker, numbers(spark, 10), create_topic(broker)).save()
    assert {each.batch.query for each in decided(broker)} == before
