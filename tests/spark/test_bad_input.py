"""What cannot be read or written is told in Spark's own form: an exception of PySpark with one line that names what it
is and what to do, before anything is written."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import AnalysisException, PySparkException, StreamingQueryException

from brokers import Broker, Brokers
from headrace.cli.pipelines.options import OWN_ERROR
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.transactions import list_transactions
from headrace.pipelines import query_watch
from pipelines.archived_world import World
from proving import proves
from spark.confluent_rows import create_topic, delete_topic, numbered, rows_of, send
from spark.conftest import NO_STORE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DEADLINE_S = 120
TRIES = 3
LONGEST = 400
"""Of the line that tells."""
MOST_LINES = 40
"""Of all that an exception says, with where in our code it was raised."""


@pytest.fixture(scope="module")
def strict(brokers: Brokers) -> Iterator[Broker]:
    """Makes no topic that was not asked for, and allows no two-phase transactions."""
    settings = {"auto.create.topics.enable": "false", "transaction.two.phase.commit.enable": "false"}
    broker = brokers.start(settings=settings)
    yield broker
    broker.discard()


def told_by(run: Callable[[], Any], *kinds: type[Exception]) -> str:
    """The line of our own in what PySpark raises. On a busy machine Spark may give up a process of Python before that
    has come to say anything."""
    for _ in range(TRIES):
        with pytest.raises(PySparkException) as caught:
            run()
        if not any(text in str(caught.value) for text in query_watch.WORKER_LOST):
            break
    assert isinstance(caught.value, kinds or PySparkException), repr(caught.value)
    lines = str(caught.value).strip().splitlines()
    assert len(lines) <= MOST_LINES, lines
    ours = [OWN_ERROR.sub("", line.strip()) for line in lines if OWN_ERROR.match(line.strip())]
    assert ours, lines
    assert len(ours[-1]) <= LONGEST, ours
    return ours[-1]


class Place:
    """A topic of three records as a stream, and another one to write to."""

    def __init__(self, spark: SparkSession, broker: Broker, folder: Path) -> None:
        self.spark, self.broker, self.folder = spark, broker, folder
        self.source = create_topic(broker)
        send(broker, self.source, numbered(3))
        self.target = create_topic(broker, max_message_bytes=100_000)

    def rows(self, columns: str, *, stream: bool) -> DataFrame:
        read = self.spark.readStream if stream else self.spark.read
        given = {"bootstrap": self.broker.bootstrap, "subscribe": self.source, "startingOffsets": "earliest"}
        return read.format("headrace").options(**given).load().selectExpr(*columns.split("; "))

    def write(self, columns: str, *, stream: bool, **given: str) -> None:
        frame = self.rows(columns, stream=stream)
        options = {"bootstrap": self.broker.bootstrap, "topic": self.target, **given}
        chosen = {name: value for name, value in options.items() if value}
        if stream:
            write = frame.writeStream.format("headrace").options(**chosen)
            checkpoint = write.option("checkpointLocation", str(self.folder / "checkpoint"))
            checkpoint.trigger(availableNow=True).start().awaitTermination(DEADLINE_S)
        else:
            frame.write.format("headrace").options(**chosen).mode("append").save()

    def written(self) -> list[Any]:
        with Cluster(self.broker.bootstrap) as cluster:
            assert [each for each in list_transactions(cluster) if each.state == "Ongoing"] == []
        return rows_of(self.broker, self.target)


@pytest.fixture
def place(spark: SparkSession, broker: Broker, tmp_path: Path) -> Place:
    return Place(spark, broker, tmp_path)


@proves("S3")
@pytest.mark.parametrize("stream", [False, True], ids=["batch", "stream"])
@pytest.mark.parametrize(
    ("columns", "given", "told"),
    [
        ("key; offset", {}, "there is no column 'value' to write, only key, offset: make one, such as"),
        ("offset as value", {}, "column 'value' is bigint; to be written it has to be string or binary: cast it"),
        ("value; offset as key", {}, "column 'key' is bigint; to be written it has to be string or binary: cast it"),
        ("value; offset as partition", {}, "column 'partition' is bigint; to be written it has to be int: cast it"),
        ("value; offset as timestamp", {}, "column 'timestamp' is bigint; to be written it has to be timestamp: cast"),
        ("value; map('a', value) as headers", {}, "column 'headers' is map<string,binary>; to be written it has to be"),
        ("value", {"topic": ""}, "no topic to write to: set option topic, or have a column 'topic'"),
        ("value; offset as topic", {"topic": ""}, "column 'topic' is bigint; to be written it has to be string: cast"),
    ],
)
def test_rows_that_the_sink_cannot_take(
    place: Place, stream: bool, columns: str, given: dict[str, str], told: str
) -> None:
    found = told_by(lambda: place.write(columns, stream=stream, **given), AnalysisException, StreamingQueryException)
    assert found.startswith(told)
    assert place.written() == []


@proves("S3")
def test_a_row_of_a_stream_that_is_too_large_is_named(place: Place) -> None:
    large = "key; if(offset = 1, repeat('x', 200000), 'small') as value"
    found = told_by(lambda: place.write(large, stream=True), StreamingQueryException)
    assert "has 200002 bytes" in found
    assert f"topic '{place.target}' takes 100000 in a batch (max.message.bytes); leave the row out, or `headr" in found
    assert place.written() == []


@proves("S3")
@pytest.mark.parametrize("stream", [False, True], ids=["batch", "stream"])
@pytest.mark.parametrize(
    ("given", "told"),
    [({"delivery": "exactly-once"}, "option delivery=exactly-once"), ({}, "what is the default, exactly once,")],
    ids=["asked for", "by default"],
)
def test_transactions_that_the_broker_refuses(
    spark: SparkSession, strict: Broker, tmp_path: Path, stream: bool, given: dict[str, str], told: str
) -> None:
    place = Place(spark, strict, tmp_path)
    found = told_by(lambda: place.write("value", stream=stream, **given))
    assert found.startswith(f"{told} cannot be: the broker allows no two-phase transactions (transaction.two.phase.")
    assert found.endswith("delivery=at-least-once does without")
    assert place.written() == []


@proves("S3")
@pytest.mark.parametrize(
    "stream",
    [
        False,
        # Spark runs a task three times, and each waits for the topic to appear.
        pytest.param(True, marks=pytest.mark.long),
    ],
    ids=["batch", "stream"],
)
def test_a_topic_that_is_not_there_to_be_written_to(
    spark: SparkSession, strict: Broker, tmp_path: Path, stream: bool
) -> None:
    place = Place(spark, strict, tmp_path)
    found = told_by(lambda: place.write("value", stream=stream, topic="nowhere"))
    assert found == "there is no topic 'nowhere'; `headrace topic create nowhere` makes it"


@proves("S1", "S2")
@pytest.mark.parametrize("stream", [False, True], ids=["batch", "stream"])
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"subscribe": "nowhere"}, "there is no topic 'nowhere'; `headrace topic create nowhere` makes it"),
        ({"columns": "key,valu"}, "option columns has 'valu'; write some of key,value,topic,partition,offset"),
    ],
)
def test_what_the_source_cannot_read(place: Place, stream: bool, given: dict[str, str], told: str) -> None:
    assert told_by(lambda: read(place, stream, **given)).startswith(told)


def read(place: Place, stream: bool, **given: str) -> None:
    options = {"bootstrap": place.broker.bootstrap, "subscribe": place.source, **given}
    if stream:
        rows = place.spark.readStream.format("headrace").options(**options).load()
        write = rows.writeStream.format("noop").option("checkpointLocation", str(place.folder / "checkpoint"))
        write.trigger(availableNow=True).start().awaitTermination(DEADLINE_S)
    else:
        place.spark.read.format("headrace").options(**options).load().collect()


@proves("S12")
@pytest.mark.parametrize("stream", [False, True], ids=["batch", "stream"])
def test_an_archive_that_is_not_of_the_topic(place: Place, stream: bool, seed: int) -> None:
    world = World(place.broker, place.folder / "archive", random.Random(seed))
    world.produce()
    nothing = str(place.folder / "nothing")
    found = told_by(lambda: read(place, stream, subscribe=world.topic, history=nothing))
    assert found == f"{nothing} has no archive; `headrace pipeline archive --to {nothing}` makes one"
    delete_topic(place.broker, world.topic)
    create_topic(place.broker, name=world.topic)
    found = told_by(lambda: read(place, stream, subscribe=world.topic, history=str(world.folder)))
    assert "which was made anew since" in found
    assert found.endswith("read the topic without its history, or the archive alone")


@proves("S12", "S14")
@pytest.mark.parametrize("stream", [False, True], ids=["batch", "stream"])
def test_a_store_that_does_not_answer(place: Place, stream: bool) -> None:
    archive = "s3://archives/of-orders"
    found = told_by(lambda: read(place, stream, history=archive, startingOffsets="earliest"))
    assert found.startswith(f"{archive} cannot be reached at {NO_STORE['AWS_ENDPOINT_URL']}: ")
    assert "see to AWS_ENDPOINT_URL, AWS_REGION, and the credentials" in found


@proves("S1", "S2")
@pytest.mark.parametrize("stream", [False, True], ids=["batch", "stream"])
def test_a_schema_that_topics_do_not_have(place: Place, stream: bool) -> None:
    reader = place.spark.readStream if stream else place.spark.read
    given = {"bootstrap": place.broker.bootstrap, "subscribe": place.source}

    def ask(schema: str) -> str:
        rows = reader.format("headrace").options(**given).schema(schema)

        def run() -> None:
            if stream:
                write = rows.load().writeStream.format("noop").option("checkpointLocation", str(place.folder / "c"))
                write.trigger(availableNow=True).start().awaitTermination(DEADLINE_S)
            else:
                rows.load().collect()

        return told_by(run)

    assert ask("value string").startswith("column 'value' of the schema is binary; columns are key, value, topic")
    assert ask("country string").startswith(
        "column 'country' of the schema is not there; columns are key, value, topic"
    )
