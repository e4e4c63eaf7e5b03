"""`format("headrace-log")` on folders that brokers have left behind, and on one that a broker runs on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition

from brokers import Broker, Brokers, wait_for
from clients.records import CODECS, Record, samples_for
from clients.with_confluent import ConfluentKafka, record_of
from headrace.cli.main import main
from headrace.client.admin import operations
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.produce import produce
from headrace.client.producer.request import Outgoing
from headrace.errors import DataFolderError, SettingError
from headrace.pipelines import replicas
from headrace.pipelines.stores import data_folder
from headrace.records import kernel
from headrace.records.batch import HEADER_BYTES, batches, sign
from headrace.records.codecs import Codec
from headrace.records.record import NewRecord
from headrace.spark import log_options, log_plan, log_reader
from headrace.spark.log_plan import LogProblem, SharedSplit, Split
from headrace.storage.folder import PARTITIONED, SHARED
from headrace.storage.offline.convert import ConversionOptions, convert
from headrace.storage.segments.index import OffsetIndex
from headrace.system.clock import LoopClock
from headrace.system.disk import SystemDisk
from proving import proves

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NEVER_CHECK = {"retention.check.ms": 600_000, "log.cleaner.backoff.ms": 600_000}
DEADLINE_S = 120.0


class Left(NamedTuple):
    """What a broker has left behind."""

    data: Path
    before_compaction: Path
    consumed: dict[str, list[Record]]
    """By topic, what confluent-kafka read from the broker before it was stopped."""


def fill(bootstrap: str) -> None:
    client = ConfluentKafka()
    samples = samples_for(client)
    with Cluster(bootstrap) as cluster:
        compact = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.01"}
        for topic, partitions, configs in (
            ("mixed", 2, {"segment.bytes": "20000"}),
            ("states", 1, {"segment.bytes": "2048", **compact}),
            ("shortened", 1, {"segment.bytes": "2048"}),
        ):
            configs = {"retention.ms": "-1", "index.interval.bytes": "500", **configs}
            operations.create_topic(cluster, topic, partitions=partitions, configs=configs)
        for n, codec in enumerate(CODECS):
            client.produce(bootstrap, "mixed", samples, codec)
            more = [Record(b"%d" % i, key=b"k", partition=1) for i in range(n * 10)]
            client.produce(bootstrap, "mixed", more, codec)
        for n in range(30):
            states: list[NewRecord] = [(n, b"key %d" % k, None if k == n % 7 else b"%d" % n * 20, []) for k in range(5)]
            states.append((n, b"once %d" % n if n % 9 == 0 else b"often", b"stays", []))
            produce(cluster, [Outgoing("states", 0, kernel.build(states, n % len(Codec)))])
        for n in range(20):
            produce(
                cluster, [Outgoing("shortened", 0, kernel.build([(n, None, b"%d" % i * 99, []) for i in range(4)]))]
            )
        operations.delete_records(cluster, "shortened", {0: 42})


def consume(bootstrap: str, topic: str) -> list[Record]:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "unused", "enable.partition.eof": True})
    try:
        unread = set(consumer.list_topics(topic, DEADLINE_S).topics[topic].partitions)
        consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in unread])
        found: list[Record] = []
        while unread:
            message = consumer.poll(DEADLINE_S)
            assert message is not None, f"nothing more within {DEADLINE_S} s"
            error = message.error()
            if error is None:
                found.append(record_of(message))
            else:
                assert error.code() == KafkaError._PARTITION_EOF, error
                unread.discard(message.partition())
        return found
    finally:
        consumer.close()


@pytest.fixture(scope="module")
def left(brokers: Brokers, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Left:
    if request.config.getoption("--apache-kafka"):
        pytest.skip("Apache Kafka's folders are not read")
    broker = brokers.start(NEVER_CHECK)
    fill(broker.bootstrap)
    broker.stop()
    before = Path(shutil.copytree(broker.data, tmp_path_factory.mktemp("log") / "before"))
    compacting = brokers.start({"retention.check.ms": 10}, data=broker.data)
    states = broker.data / "states" / "states-0"
    wait_for("compaction", lambda: list(states.glob("*.sum")), DEADLINE_S)
    compacting.stop()
    # A broker that changes nothing is asked what there is.
    broker = brokers.start(NEVER_CHECK, data=broker.data)
    consumed = {topic: consume(broker.bootstrap, topic) for topic in ("mixed", "states", "shortened")}
    broker.stop()
    return Left(broker.data, before, consumed)


@pytest.fixture
def data(left: Left, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(left.data, tmp_path / "data"))


def load(spark: SparkSession, *folders: Path, **options: str) -> DataFrame:
    paths = ",".join(map(str, folders))
    return spark.read.format("headrace-log").options(**options).load(paths)


def as_records(rows: list[dict[str, Any]]) -> list[Record]:
    return [
        Record(
            row["value"],
            row["key"],
            tuple((each["key"], each["value"]) for each in row["headers"] or ()),
            int(row["timestamp"].timestamp() * 1000),
            row["partition"],
            row["offset"],
        )
        for row in rows
    ]


def in_order(records: list[Record]) -> list[Record]:
    return sorted(records, key=lambda record: (record.partition, record.offset))


def read(options: Mapping[str, str]) -> Iterator[pa.RecordBatch | LogProblem]:
    """As Spark's tasks do, without Spark."""
    chosen = log_options.parse(options)
    planned = log_plan.plan(SystemDisk(), chosen)
    yield from planned.problems
    for split in planned.splits:
        yield from log_reader.read_split(split, chosen.columns, thorough=True)


def rows_of(found: list[pa.RecordBatch | LogProblem]) -> list[dict[str, Any]]:
    return [row for each in found if not isinstance(each, LogProblem) for row in each.to_pylist()]


def problems_of(found: list[pa.RecordBatch | LogProblem]) -> list[LogProblem]:
    return [each for each in found if isinstance(each, LogProblem)]


def segments(data: Path, topic: str, partition: int = 0) -> list[Path]:
    return [path for path in sorted((data / topic / f"{topic}-{partition}").glob("*.log")) if path.stat().st_size]


def batches_of(log: Path) -> list[tuple[int, int, int]]:
    """Position, base offset and next offset of each batch."""
    found, position = [], 0
    for header, _ in batches(memoryview(log.read_bytes())):
        found.append((position, header.base_offset, header.next_offset))
        position += header.size_bytes
    return found


def flip(log: Path, position: int) -> None:
    content = bytearray(log.read_bytes())
    content[position] ^= 0x10
    log.write_bytes(content)


@proves("S11")
@pytest.mark.parametrize("topic", ["mixed", "states", "shortened"])
def test_rows_are_what_a_client_read_from_the_broker(spark: SparkSession, left: Left, topic: str) -> None:
    frame = load(spark, left.data, topic=topic, includeHeaders="true")
    assert in_order(as_records(frame.toArrow().to_pylist())) == in_order(left.consumed[topic])
    assert frame.rdd.getNumPartitions() >= len(segments(left.data, topic))


@proves("S11")
def test_compaction_leaves_gaps_and_deleted_records_are_no_rows(left: Left) -> None:
    states = rows_of(list(read({"path": str(left.data), "topic": "states"})))
    assert len(states) < states[-1]["offset"]
    assert len(list((left.data / "states" / "states-0").glob("*.sum"))) > 0
    shortened = rows_of(list(read({"path": str(left.data), "topic": "shortened"})))
    assert [row["offset"] for row in shortened] == list(range(42, 80))
    assert segments(left.data, "shortened")[0].name < f"{42:020d}.log"


@proves("S6")
@pytest.mark.parametrize("layout", [PARTITIONED, SHARED])
def test_an_audit_knows_what_compaction_and_deletion_have_removed(spark: SparkSession, data: Path, layout: str) -> None:
    if layout == SHARED:
        loop = asyncio.new_event_loop()
        convert(SystemDisk(), LoopClock(loop), str(data), ConversionOptions(SHARED))
        loop.close()
    store = data_folder(spark, str(data), ["states", "shortened"])
    kept = {(bound.topic, bound.first_offset, bound.compacted) for bound in store.bounds()}
    assert kept == {("states", 0, True), ("shortened", 42, False)}
    # Damage does not look like compaction: here a batch counts fewer records than offsets.
    for split in log_plan.plan(SystemDisk(), log_options.parse({"path": str(data), "topic": "shortened"})).splits:
        for run in split.runs[3:4] if isinstance(split, SharedSplit) else ():
            content = bytearray(Path(run.path).read_bytes())
            content[run.position + HEADER_BYTES - 1] ^= 4
            Path(run.path).write_bytes(content)
    assert {(bound.topic, bound.first_offset, bound.compacted) for bound in store.bounds()} == kept


def test_a_large_segment_is_cut_where_the_index_leads(left: Left) -> None:
    for topic, partition_bytes in (("mixed", "5000"), ("states", "300"), ("shortened", "700")):
        whole = list(read({"path": str(left.data), "topic": topic}))
        options = {"path": str(left.data), "topic": topic, "maxPartitionBytes": partition_bytes}
        assert (rows_of(list(read(options))), problems_of(whole)) == (rows_of(whole), [])
        plans = [
            log_plan.plan(SystemDisk(), log_options.parse(each))
            for each in (options, {"path": options["path"], "topic": topic})
        ]
        # How large the batches of "mixed" are is up to the client.
        assert topic == "mixed" or len(plans[0].splits) > len(plans[1].splits)


@pytest.mark.parametrize("piece_bytes", [1, 700, 5000])
def test_pieces_of_any_size_give_the_same_rows(left: Left, monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    options = {"path": str(left.data), "topics": "mixed,states,shortened"}
    whole = rows_of(list(read(options)))
    monkeypatch.setattr(log_reader, "PIECE_BYTES", piece_bytes)
    assert rows_of(list(read(options))) == whole


def test_bytes_are_read_from_the_disk_once(left: Left) -> None:
    chosen = log_options.parse({"path": str(left.data), "topic": "mixed"})
    splits = log_plan.plan(SystemDisk(), chosen).splits
    before = bytes_read()
    assert rows_of([found for split in splits for found in log_reader.read_split(split, chosen.columns)])
    logs = sum(log.stat().st_size for partition in (0, 1) for log in segments(left.data, "mixed", partition))
    # Indexes, epochs and checkpoints come on top.
    assert logs <= bytes_read() - before < 1.5 * logs


def bytes_read() -> int:
    """What this process has read by system calls, from the page cache too."""
    return int(Path("/proc/self/io").read_text().split()[1])


@proves("S11")
def test_extra_columns_say_where_a_record_lies(spark: SparkSession, left: Left) -> None:
    frame = load(spark, left.data, topics="mixed,states", columns="offset,segment,topic,partition,folder,digest")
    assert frame.columns == ["offset", "segment", "topic", "partition", "folder", "digest"]
    rows = frame.collect()
    for row in rows:
        assert int(row.segment[:20]) <= row.offset
        assert (Path(row.folder) / row.topic / f"{row.topic}-{row.partition}" / row.segment).exists()
    assert {row.topic for row in rows} == {"mixed", "states"}
    only = load(spark, left.data, topic="mixed", partitions="1", columns="segment")
    assert only.count() == sum(record.partition == 1 for record in left.consumed["mixed"])
    both = load(spark, left.data, left.before_compaction, topicsPattern="mi.*")
    assert both.columns[-1] == "folder"
    assert both.count() == 2 * len(left.consumed["mixed"])


@proves("S11")
def test_a_whole_folder_has_no_problems(spark: SparkSession, left: Left) -> None:
    assert load(spark, left.data, table="problems").collect() == []


@proves("S11")
def test_a_torn_tail_is_a_problem_and_no_failure(spark: SparkSession, data: Path) -> None:
    log = segments(data, "mixed", 1)[-1]
    position, first, _ = batches_of(log)[-1]
    log.write_bytes(log.read_bytes()[:-3])
    rows = load(spark, data, topic="mixed", partitions="1", columns="offset").collect()
    assert sorted(row.offset for row in rows) == list(range(first))
    torn, missing = load(spark, data, topic="mixed", table="problems").orderBy("kind", ascending=False).collect()
    assert torn[:-1] == (str(data), "mixed", 1, log.name, position, first, "torn")
    assert "the log ends before it" in torn.reason
    assert (missing.kind, missing.offset) == ("missing", first)


@proves("S11")
def test_a_flipped_byte_is_named_with_offset_segment_and_byte(spark: SparkSession, data: Path) -> None:
    log = segments(data, "shortened")[-2]
    position, first, following = batches_of(log)[1]
    flip(log, position + HEADER_BYTES + 5)
    wanted = f"shortened-0 at offset {first}, segment {log.name}, byte {position} in {data}: batch .* bears CRC"
    with pytest.raises(Exception, match=wanted) as failed:
        load(spark, data, topic="shortened").count()
    assert "mode=PERMISSIVE" in str(failed.value)
    rows = load(spark, data, topic="shortened", mode="permissive").collect()
    assert {row.offset for row in rows} == set(range(42, 80)) - set(range(first, following))
    (problem,) = load(spark, data, topic="shortened", table="problems").collect()
    assert problem[:-1] == (str(data), "shortened", 0, log.name, position, first, "corrupt")


def test_a_batch_that_does_not_unpack_is_left_out_alone(data: Path) -> None:
    log = segments(data, "shortened")[-1]
    content = bytearray(log.read_bytes())
    position, first, following = batches_of(log)[0]
    end = batches_of(log)[1][0]
    # The count of attributes and lengths is nonsense, but the CRC is right: a producer sent it so.
    content[position + HEADER_BYTES] = 0xFF
    batch = content[position:end]
    sign(batch)
    content[position:end] = batch
    log.write_bytes(content)
    found = list(read({"path": str(data), "topic": "shortened"}))
    (problem,) = problems_of(found)
    assert (problem.kind, problem.offset, problem.position, problem.fails) == ("corrupt", first, position, True)
    assert [row["offset"] for row in rows_of(found)] == [n for n in range(42, 80) if not first <= n < following]


def test_damage_among_deleted_records_fails_nothing(data: Path) -> None:
    log = segments(data, "shortened")[0]
    position, _, following = batches_of(log)[0]
    assert following <= 42
    flip(log, position + HEADER_BYTES)
    found = list(read({"path": str(data), "topic": "shortened"}))
    assert [problem.fails for problem in problems_of(found)] in ([], [False])
    assert [row["offset"] for row in rows_of(found)] == list(range(42, 80))


def test_a_damaged_last_batch_that_was_synced_is_no_torn_tail(data: Path) -> None:
    log = segments(data, "shortened")[-1]
    position, first, _ = batches_of(log)[-1]
    flip(log, position + HEADER_BYTES)
    (problem,) = problems_of(list(read({"path": str(data), "topic": "shortened"})))
    assert (problem.kind, problem.offset, problem.fails) == ("corrupt", first, True)
    # Without a checkpoint nobody knows that it was.
    (data / "@checkpoint").unlink()
    (problem,) = problems_of(list(read({"path": str(data), "topic": "shortened"})))
    assert (problem.kind, problem.offset, problem.fails) == ("torn", first, False)


def test_a_missing_segment_is_a_hole(data: Path) -> None:
    first, second, third = segments(data, "shortened")[-3:]
    second.unlink()
    found = list(read({"path": str(data), "topic": "shortened"}))
    (problem,) = problems_of(found)
    assert (problem.kind, problem.segment, problem.fails) == ("missing", first.name, True)
    assert problem.offset == int(second.stem)
    assert f"to {int(third.stem) - 1} are missing" in problem.reason
    offsets = [row["offset"] for row in rows_of(found)]
    assert int(second.stem) not in offsets
    assert int(third.stem) in offsets


@proves("S11")
def test_a_wrong_index_costs_no_rows(data: Path) -> None:
    for topic in ("mixed", "states"):
        options = {"path": str(data), "topic": topic, "maxPartitionBytes": "3000"}
        whole = rows_of(list(read(options)))
        for index in (data / topic).glob("*/*.index"):
            entries = b"".join((n << 32 | n * 100 + 7).to_bytes(8, "little") for n in range(1, 40))
            index.write_bytes(entries + OffsetIndex.last_entry(0))
        found = list(read(options))
        assert rows_of(found) == whole
        assert {problem.kind for problem in problems_of(found)} == {"index"}


def test_a_damaged_checkpoint_and_epochs_are_told(data: Path) -> None:
    (data / "@checkpoint").write_bytes(b"00000000\n{}\n")
    epochs = data / "mixed" / "mixed-0" / "leader-epochs"
    epochs.write_bytes(epochs.read_bytes() + b"?")
    found = problems_of(list(read({"path": str(data), "topic": "mixed"})))
    assert [problem.kind for problem in found] == ["checkpoint", "epochs"]
    assert not any(problem.fails for problem in found)


def test_an_unfinished_compaction_counts_as_recovery_would_have_it(left: Left, data: Path, tmp_path: Path) -> None:
    whole = rows_of(list(read({"path": str(data), "topic": "states"})))
    folder, old = data / "states" / "states-0", left.before_compaction / "states" / "states-0"
    first = next(folder.glob("*.sum")).stem
    for name in (folder / f"{first}{ending}" for ending in (".index", ".timeindex", ".sum", ".log")):
        name.rename(f"{name}.swap")
    for path in old.glob("*.log"):  # the swap counts, but the old segments are there still
        if not (folder / path.name).exists():
            shutil.copy(path, folder)
    (folder / f"{first}.log.cleaned").write_bytes(b"nothing")
    (folder / f"{5:020d}.log.deleted").write_bytes(b"nothing")
    shutil.copytree(folder, folder.with_name("states-0.stray-0"))
    after = list(read({"path": str(data), "topic": "states"}))
    assert (rows_of(after), problems_of(after)) == (whole, [])


@proves("S11")
def test_compaction_between_plan_and_read_gives_no_record_twice(left: Left, tmp_path: Path) -> None:
    before = Path(shutil.copytree(left.before_compaction, tmp_path / "data"))
    options = {"path": str(before), "topic": "states"}
    chosen = log_options.parse(options)
    old = rows_of(list(read(options)))
    splits = log_plan.plan(SystemDisk(), chosen).splits
    assert len(splits) > 2
    found: list[pa.RecordBatch | LogProblem] = []
    for nth, split in enumerate(splits):
        if nth == 1:
            shutil.rmtree(before / "states")
            shutil.copytree(left.data / "states", before / "states")
        found += log_reader.read_split(split, chosen.columns)
    offsets = [row["offset"] for row in rows_of(found)]
    assert sorted(set(offsets)) == offsets
    assert {row["offset"] for row in rows_of(list(read(options)))} <= set(offsets) <= {row["offset"] for row in old}
    assert problems_of(found) == []


def test_what_a_running_broker_deleted_meanwhile_is_told(data: Path) -> None:
    chosen = log_options.parse({"path": str(data), "topic": "mixed"})
    splits = log_plan.plan(SystemDisk(), chosen).splits
    segments(data, "mixed")[0].unlink()
    (problem,) = problems_of(list(log_reader.read_split(splits[0], chosen.columns)))
    assert (problem.kind, problem.offset, problem.fails) == ("removed", 0, True)


@proves("S11")
def test_a_folder_is_read_while_its_broker_runs(spark: SparkSession, broker: Broker, tmp_path: Path) -> None:
    sent = [Record(b"%d" % n, timestamp_ms=n + 1) for n in range(500)]
    ConfluentKafka().produce(broker.bootstrap, "read-while-running", sent, "lz4")
    folder = broker.data / "read-while-running"  # elsewhere the broker itself may write meanwhile
    names = sorted(path.name for path in folder.rglob("*"))
    found = load(spark, broker.data, topic="read-while-running").orderBy("offset").collect()
    assert [bytes(row.value) for row in found] == [record.value for record in sent]
    assert load(spark, broker.data, topic="read-while-running", table="problems").count() == 0
    assert sorted(path.name for path in folder.rglob("*")) == names


@proves("S11")
def test_replicas_that_differ_are_told_apart(
    spark: SparkSession,
    left: Left,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("headrace.cli.pipelines.compare.spark_session", lambda *_: contextlib.nullcontext(spark))
    command = ["pipeline", "compare", str(left.data), str(data)]
    assert main(command) == 0
    assert "different: 0" in capsys.readouterr().out
    log = segments(data, "mixed", 1)[-1]
    position, first, _ = batches_of(log)[-1]
    content = bytearray(log.read_bytes())
    changed = kernel.build([(r.timestamp_ms, r.key, b"other" if r.offset == first + 2 else r.value, r.headers)
                            for r in kernel.records(bytes(content[position:]))])  # fmt: skip
    changed[:16] = content[position : position + 8] + changed[8:12] + content[position + 12 : position + 16]
    log.write_bytes(content[:position] + changed)
    shortened = segments(data, "shortened")[-1]
    cut, cut_first, cut_following = batches_of(shortened)[-1]
    shortened.write_bytes(shortened.read_bytes()[:cut])
    found = replicas.compare(spark, str(left.data), str(data)).orderBy("topic", "offset").collect()
    assert [(row.topic, row.partition, row.offset, row.difference) for row in found] == [
        ("mixed", 1, first + 2, replicas.DIFFERENT),
        *(("shortened", 0, offset, replicas.LEFT_ONLY) for offset in range(cut_first, cut_following)),
    ]
    assert found[0].left_digest != found[0].right_digest
    assert (found[0].left_segment, found[1].right_segment) == (log.name, None)
    assert main([*command, "--topic", "shortened"]) == 0, "what is only on one side may be on its way"
    capsys.readouterr()
    assert main([*command, "--show", "1", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["different"], told["left_only"], told["right_only"]) == (1, cut_following - cut_first, 0)
    assert [row["offset"] for row in told["differences"]] == [first + 2]


@proves("S11")
def test_wrong_input_is_refused_when_it_is_loaded(spark: SparkSession, left: Left, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=f"there is no folder {tmp_path / 'none'}"):
        load(spark, tmp_path / "none")
    with pytest.raises(Exception, match=f"{tmp_path} is not the data folder of a broker"):
        load(spark, tmp_path)
    with pytest.raises(Exception, match=r"has no topic 'order'; there is .*mixed, shortened, states"):
        load(spark, left.data, topic="order")
    with pytest.raises(Exception, match="unknown option 'subscribe'"):
        load(spark, left.data, subscribe="mixed")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "no data folder was given"),
        ({"path": "hdfs://somewhere/data"}, "a data folder is one of this machine's"),
        ({"topic": "mixed", "topicsPattern": "m.*"}, "exclude each other"),
        ({"topicsPattern": "("}, "not a regular expression"),
        ({"partitions": "zero"}, "option partitions='zero'"),
        ({"columns": "offset,colour"}, "option columns has 'colour'"),
        ({"columns": ""}, "option columns is empty"),
        ({"table": "rows"}, "write records or problems"),
        ({"mode": "DROPMALFORMED"}, "write FAILFAST or PERMISSIVE"),
        ({"maxPartitionBytes": "0"}, "option maxPartitionBytes='0'"),
        ({"includeHeaders": "maybe"}, "write true or false"),
        ({"topics": "nothing"}, "has no topic 'nothing'"),
        ({"topicsPattern": "nothing.*"}, "has no topic that 'nothing"),
        ({"topic": "mixed", "partitions": "1,2"}, "has no partition 2"),
    ],
)
def test_wrong_options_are_named(left: Left, options: dict[str, str], told: str) -> None:
    given = options if not options or "path" in options else {"path": str(left.data), **options}
    with pytest.raises((SettingError, DataFolderError), match=told):
        log_plan.plan(SystemDisk(), log_options.parse(given))


def test_a_worker_that_does_not_see_the_folder_says_so(tmp_path: Path) -> None:
    split = Split(str(tmp_path / "gone"), str(tmp_path / "gone" / "t" / "t-0"), "t", 0, 0, 10, 0, 0, False)
    with pytest.raises(DataFolderError, match="every worker has to see it"):
        list(log_reader.read_split(split, ["offset"]))
