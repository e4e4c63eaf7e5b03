"""The archive against what an independent client reads of the topic, in a shared session: nothing is killed here."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from confluent_kafka.admin import AdminClient
from deltalake import DeltaTable

from brokers import Broker, free_port, wait_for
from clients.topics import create_topic
from headrace.arrow.archive import row_group_bounds
from headrace.client.admin import groups
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.operations import delete_records
from headrace.errors import HeadraceError, OperatorError
from headrace.pipelines import archive, archive_state
from pipelines.archives import (
    archive_rows,
    committed,
    orphans,
    parquet_table,
    produce,
    records_table,
    topic_rows,
    values,
)
from proving import proves

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def topic(broker: Broker) -> str:
    return create_topic(broker, f"t{uuid.uuid4().hex[:8]}", 3, retention_ms=-1)


def options(broker: Broker, to: Path, *topics: str, **more: object) -> archive.ArchiveOptions:
    return archive.ArchiveOptions(to, broker.bootstrap, topics, **more)  # type: ignore[arg-type]


@proves("S4")
@pytest.mark.timeout(600)
def test_the_archive_is_the_topic_record_for_record(
    spark: SparkSession, broker: Broker, topic: str, tmp_path: Path
) -> None:
    """Twice, from the checkpoint; then without it, and with a second topic: the table says where to go on."""
    produce(broker.bootstrap, topic, values(3000), partitions=2)
    chosen = options(broker, tmp_path / "a", topic, max_offsets_per_trigger=1000)
    summary = archive.run(spark, chosen)
    expected = topic_rows(broker.bootstrap, topic)
    assert archive_rows(records_table(tmp_path / "a")) == expected
    assert (summary.ok, summary.facts["records"], summary.facts["lag"]) == (True, 3000, 0)
    ends = {(topic, 0): 1500, (topic, 1): 1500, (topic, 2): 0}
    assert {row["partition"]: row["next_offset"] for row in summary.tables[0].rows} == {0: 1500, 1: 1500}
    assert {place: at for place, at in committed(broker.bootstrap).items() if place[0] == topic} == ends

    produce(broker.bootstrap, topic, values(100, seed=1), partitions=3)
    assert archive.run(spark, chosen).facts["records"] == 100
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    produce(broker.bootstrap, topic, values(50, seed=2), partitions=3)
    other = create_topic(broker, f"{topic}-other", retention_ms=-1)
    produce(broker.bootstrap, other, values(10))
    assert archive.run(spark, chosen).facts["records"] == 50
    assert archive.run(spark, options(broker, tmp_path / "a", topic, other)).facts["records"] == 10
    assert archive.run(spark, options(broker, tmp_path / "a", topic, other)).facts["records"] == 0
    table = records_table(tmp_path / "a")
    assert archive_rows(table, topic) == topic_rows(broker.bootstrap, topic)
    assert archive_rows(table, other) == topic_rows(broker.bootstrap, other)
    assert orphans(tmp_path / "a") == []


@proves("S4")
def test_the_table_has_statistics_by_which_files_are_skipped(
    spark: SparkSession, broker: Broker, topic: str, tmp_path: Path
) -> None:
    produce(broker.bootstrap, topic, values(3000), partitions=2)
    archive.run(spark, options(broker, tmp_path / "a", topic))
    files = DeltaTable(str(tmp_path / "a" / "records")).get_add_actions(flatten=True)
    listed = pa.table(files).to_pylist()
    assert {file["partition.topic"] for file in listed} == {topic}
    assert all(file["min.partition"] == file["max.partition"] for file in listed)
    assert sum(file["num_records"] for file in listed) == 3000
    assert all(
        file["min.timestamp"].date() == file["max.timestamp"].date() == file["partition.date"] for file in listed
    )


@proves("S4")
def test_values_that_do_not_decode_become_dead_letters(
    spark: SparkSession, broker: Broker, topic: str, tmp_path: Path
) -> None:
    good = [json.dumps({"user": f"u{n}", "amount": n, "offset": n % 7}).encode() for n in range(200)]
    bad = [b"{", b"", b"\xff\xfe{}", b'{"user": "x"} and more', b"[1]", b"7"]
    produce(broker.bootstrap, topic, [*good, *bad, None])
    decode = {"decode": "json", "max_offsets_per_trigger": 60}
    summary = archive.run(spark, options(broker, tmp_path / "a", topic, **decode))
    assert (summary.facts["records"], summary.facts["dead_letters"]) == (201, 6)
    rows = records_table(tmp_path / "a").sort_by("offset").to_pylist()
    assert [(r["user"], r["amount"], r["_offset"]) for r in rows[:200]] == [(f"u{n}", n, n % 7) for n in range(200)]
    assert (rows[200]["user"], rows[200]["value"], rows[200]["offset"]) == (None, None, 206)
    assert rows[0]["value"] == good[0]
    dead = DeltaTable(str(tmp_path / "a" / "dead_letters")).to_pyarrow_table().sort_by("offset").to_pylist()
    assert [(r["offset"], r["value"]) for r in dead] == list(enumerate(bad, 200))
    told = [r["reason"] for r in dead]
    broken = "the value is not JSON"
    assert told[:4] == [broken, broken, "the value is not UTF-8", "the value goes on after its JSON"]
    assert all("does not fit" in reason for reason in told[4:])

    # Another schema: a column more, no values kept, and nothing comes twice. A type that differs is refused.
    produce(broker.bootstrap, topic, [b'{"user": "x", "late": 1.5}\n', b"no", b'{"late": "x"}'])
    more = {**decode, "schema": "user string, late double", "drop_value": True}
    summary = archive.run(spark, options(broker, tmp_path / "a", topic, **more))
    assert (summary.facts["records"], summary.facts["dead_letters"]) == (1, 2)
    last = records_table(tmp_path / "a").sort_by("offset").to_pylist()[-1]
    assert (last["user"], last["late"], last["amount"], last["value"]) == ("x", 1.5, None, None)
    with pytest.raises(OperatorError, match=r"column user of .* is string, and now it would be bigint"):
        archive.run(spark, options(broker, tmp_path / "a", topic, **{**decode, "schema": "user bigint"}))


@proves("S4", "S7")
def test_plain_parquet_is_the_other_choice(spark: SparkSession, broker: Broker, topic: str, tmp_path: Path) -> None:
    chosen = options(broker, tmp_path / "a", topic, format="parquet", max_offsets_per_trigger=300)
    produce(broker.bootstrap, topic, values(500), partitions=3)
    assert archive.run(spark, chosen).facts["records"] == 500
    produce(broker.bootstrap, topic, values(40), partitions=3)
    assert archive.run(spark, chosen).facts["records"] == 40
    assert archive_rows(parquet_table(tmp_path / "a")) == topic_rows(broker.bootstrap, topic)
    for path in (tmp_path / "a" / "records").glob("topic=*/*/*.parquet"):
        with pq.ParquetFile(path) as opened:
            assert all(None not in bounds for _, bounds in row_group_bounds(opened))
    with pytest.raises(OperatorError, match="holds a Parquet archive"):
        archive.run(spark, options(broker, tmp_path / "a", topic))
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    with pytest.raises(OperatorError, match="its checkpoint is gone"):
        archive.run(spark, chosen)


def test_a_table_or_a_topic_that_is_not_what_it_was_is_refused(
    spark: SparkSession, broker: Broker, topic: str, tmp_path: Path
) -> None:
    produce(broker.bootstrap, topic, values(20))
    chosen = options(broker, tmp_path / "a", topic)
    archive.run(spark, chosen)
    shutil.move(tmp_path / "a" / "records", tmp_path / "records")
    with pytest.raises(OperatorError, match="its table records/ is gone"):
        archive.run(spark, chosen)
    shutil.move(tmp_path / "records", tmp_path / "a" / "records")
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.delete_topics([topic])[topic].result(30)
    create_topic(broker, topic)
    with pytest.raises(OperatorError, match="was made anew"):
        archive.run(spark, chosen)


@proves("S4")
@pytest.mark.parametrize("lost", ["checkpoint", "identity"])
def test_a_topic_made_anew_and_longer_than_the_old_one_is_not_mixed_in(
    spark: SparkSession, broker: Broker, topic: str, tmp_path: Path, lost: str
) -> None:
    """Neither is its group told anything: a broker would delete what was never archived."""
    produce(broker.bootstrap, topic, values(20))
    archive.run(spark, options(broker, tmp_path / "a", topic))
    old = archive_rows(records_table(tmp_path / "a"))
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.delete_topics([topic])[topic].result(30)
    create_topic(broker, topic, retention_ms=-1)
    produce(broker.bootstrap, topic, values(50, seed=1))
    chosen = options(broker, tmp_path / "a", topic)
    if lost == "checkpoint":
        shutil.rmtree(tmp_path / "a" / "checkpoints")
    else:
        chosen = options(broker, tmp_path / "a", topic, create_topic(broker, f"{topic}-other"))
    for _ in range(2):
        with pytest.raises(OperatorError, match=f"topic {topic} was made anew"):
            archive.run(spark, chosen)
    assert archive_rows(records_table(tmp_path / "a")) == old
    assert committed(broker.bootstrap).get((topic, 0), 0) <= 20


@proves("S4")
def test_an_archive_that_was_overtaken_goes_on_only_when_told_to(
    spark: SparkSession, broker: Broker, topic: str, tmp_path: Path
) -> None:
    produce(broker.bootstrap, topic, values(20))
    archive.run(spark, options(broker, tmp_path / "a", topic))
    produce(broker.bootstrap, topic, values(20, seed=1))
    with Cluster(broker.bootstrap) as cluster:
        delete_records(cluster, topic, {0: 30})
    with pytest.raises(Exception, match=r"offsets 20 to 29 .*--accept-loss"):
        archive.run(spark, options(broker, tmp_path / "a", topic))
    told = archive.run(spark, options(broker, tmp_path / "a", topic, accept_loss=True))
    assert told.facts["lost_offsets"] == 10
    kept = [row.offset for row in archive_rows(records_table(tmp_path / "a"))]
    assert kept == [*range(20), *range(30, 40)]


def test_topic_ids_of_an_archive_that_kept_none_come_from_its_checkpoint(
    spark: SparkSession, broker: Broker, topic: str, tmp_path: Path
) -> None:
    produce(broker.bootstrap, topic, values(5))
    archive.run(spark, options(broker, tmp_path / "a", topic))
    kept = archive_state.origin(tmp_path / "a").topics
    (tmp_path / "a" / "archive.json").unlink()
    assert archive_state.origin(tmp_path / "a").topics == kept != {}


@proves("S4")
def test_a_second_archive_does_not_speak_for_the_first(
    spark: SparkSession, broker: Broker, topic: str, tmp_path: Path
) -> None:
    produce(broker.bootstrap, topic, values(20))
    archive.run(spark, options(broker, tmp_path / "a", topic))
    produce(broker.bootstrap, topic, values(100, seed=1))
    for starting in ("earliest", "latest"):
        with pytest.raises(OperatorError, match=r"another archive .* give this one a --group of its own"):
            archive.check(options(broker, tmp_path / "b", topic, starting=starting))
    assert committed(broker.bootstrap)[topic, 0] == 20
    # A commit of nobody's: the group may be taken, but nothing that it waits for is passed over.
    with Cluster(broker.bootstrap) as cluster:
        groups.commit_offsets(cluster, "headrace-archive", {(topic, 0): 20, (topic, 1): 0, (topic, 2): 0})
    with pytest.raises(OperatorError, match=r"-0 from offset 20 on, and --starting latest would begin at 120"):
        archive.run(spark, options(broker, tmp_path / "b", topic, starting="latest"))
    own = options(broker, tmp_path / "b", topic, starting="latest", group=f"{topic}-b")
    assert archive.run(spark, own).facts["records"] == 0
    assert committed(broker.bootstrap, own.group)[topic, 0] == 120
    assert committed(broker.bootstrap)[topic, 0] == 20


@proves("S4")
def test_ctrl_c_ends_an_archive_with_the_batch_that_runs(
    spark: SparkSession, broker: Broker, topic: str, tmp_path: Path
) -> None:
    """To the user who waits for all of it that is a failure, to the one who follows it is the end."""
    produce(broker.bootstrap, topic, values(3000), partitions=3)
    small = {"max_offsets_per_trigger": 150, "trigger_s": 0.1}

    def version() -> int:
        there = DeltaTable.is_deltatable(str(tmp_path / "a" / "records"))
        return DeltaTable(str(tmp_path / "a" / "records")).version() if there else 0

    def press_ctrl_c(after: int) -> None:
        wait_for("a batch", lambda: version() > after, 300)
        os.kill(os.getpid(), signal.SIGINT)

    held = 0
    for follow in (False, True):
        presser = threading.Thread(target=press_ctrl_c, args=(version(),))
        presser.start()
        summary = archive.run(spark, options(broker, tmp_path / "a", topic, follow=follow, **small))
        presser.join()
        assert summary.ok == follow
        held += summary.facts["records"]
        assert len(records_table(tmp_path / "a")) == held < 3000
        assert sum(at for place, at in committed(broker.bootstrap).items() if place[0] == topic) <= held
    assert archive.run(spark, options(broker, tmp_path / "a", topic)).facts["records"] == 3000 - held
    assert archive_rows(records_table(tmp_path / "a")) == topic_rows(broker.bootstrap, topic)


@proves("S4")
def test_the_broker_deletes_only_what_the_archive_has(
    spark: SparkSession, fresh_broker: Callable[..., Broker], tmp_path: Path
) -> None:
    broker = fresh_broker(settings={"retention.check.ms": 50})
    short = {"retention_ms": 1, "segment_bytes": 1024, "file_delete_delay_ms": 0}
    kept = create_topic(broker, "kept", retention_archived="true", **short)
    control = create_topic(broker, "control", **short)
    for name in (kept, control):
        for part in range(10):
            produce(broker.bootstrap, name, values(50, seed=part))
    wait_for("retention of the topic without archive", lambda: len(topic_rows(broker.bootstrap, control)) < 500)
    expected = topic_rows(broker.bootstrap, kept)
    assert len(expected) == 500
    archive.run(spark, options(broker, tmp_path / "a", kept))
    wait_for("retention after the archive", lambda: len(topic_rows(broker.bootstrap, kept)) < 500)
    assert archive_rows(records_table(tmp_path / "a")) == expected


def test_what_cannot_be_archived_is_said_before_anything_starts(broker: Broker, topic: str, tmp_path: Path) -> None:
    good = options(broker, tmp_path / "a", topic)
    with pytest.raises(HeadraceError, match=r"there is no topic 'nowhere'"):
        archive.check(options(broker, tmp_path / "a", "nowhere"))
    with pytest.raises(HeadraceError, match=r"127\.0\.0\.1"):
        archive.check(archive.ArchiveOptions(tmp_path / "a", f"127.0.0.1:{free_port()}", (topic,)))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letters").touch()
    with pytest.raises(OperatorError, match="holds something else"):
        archive.check(options(broker, tmp_path / "full", topic))
    with pytest.raises(OperatorError, match="cannot be written"):
        archive.check(options(broker, tmp_path / "full" / "letters", topic))
    archive.check(good)


def test_two_archives_of_one_folder_exclude_each_other(broker: Broker, topic: str, tmp_path: Path) -> None:
    """The lock of a process that was killed is taken over."""
    hold = "import sys, pathlib\nfrom headrace.pipelines.archive_state import locked\n"
    hold += "with locked(pathlib.Path(sys.argv[1])):\n    print('locked', flush=True)\n    sys.stdin.read()\n"
    other = subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path / "a")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert other.stdout is not None
    assert other.stdin is not None
    assert other.stdout.readline() == b"locked\n"
    with pytest.raises(OperatorError, match=f"another archive, process {other.pid}"):
        archive.check(options(broker, tmp_path / "a", topic))
    other.kill()
    other.wait()
    archive.check(options(broker, tmp_path / "a", topic))
    other.stdout.close()
    other.stdin.close()


def test_a_full_disk_is_told_with_its_folder_and_the_archive_goes_on_after(
    spark: SparkSession, broker: Broker, topic: str, tmp_path: Path
) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"tmpfs cannot be mounted here: {mounted.stderr.decode().strip()}")
    try:
        noise = [os.urandom(100) for _ in range(20_000)]
        produce(broker.bootstrap, topic, noise, partitions=2)
        with pytest.raises(HeadraceError, match=f"the archive {folder}/a cannot be written: No space left on device"):
            archive.run(spark, options(broker, folder / "a", topic))
        subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)
        assert archive.run(spark, options(broker, folder / "a", topic)).facts["lag"] == 0
        assert archive_rows(records_table(folder / "a")) == topic_rows(broker.bootstrap, topic)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
