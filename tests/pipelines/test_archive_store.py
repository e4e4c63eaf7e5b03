"""An archive in S3-compatible storage, moto's server: written, read, committed by one of many, unreachable."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

import headrace.arrow
from brokers import DIES_WITH_PARENT, Broker
from clients.topics import create_topic
from headrace.arrow.history import DeltaVersion, History
from headrace.arrow.locations import ObjectPath, location
from headrace.errors import OperatorError
from headrace.pipelines import archive_tables, delta
from headrace.pipelines.archive_files import FileSet
from headrace.pipelines.archive_sink import ArchiveWriter, FilesWritten
from headrace.pipelines.archive_state import CHECKPOINT
from headrace.pipelines.archive_tables import RECORDS
from headrace.spark.faults import VARIABLE
from pipelines.archived_world import INSIDE, PARTITIONS, World
from proving import proves
from s3_server import BUCKET, S3Server, in_environment
from spark.standalone import LOOPBACK, SETTINGS

DRIVER = Path(__file__).parent.parent / "spark" / "standalone_driver.py"
COMMAND = (sys.executable, "-m", "headrace.cli.main")
STEPS = ("archived", "compacted", "indexed", "latest", "audited", "archive_asked", "replayed", "whole_history")
RECORD_COUNT = 1800
DEADLINE_S = 500.0
SOON_S = 1.0
# Of a whole command, on a machine that does much else.
TOLD_WITHIN_S = 60.0


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("store"))
    with in_environment(server.environment):
        yield server
    server.stop()


@pytest.fixture
def place(store: S3Server) -> Path:
    return location(f"s3://{BUCKET}/{uuid.uuid4().hex[:8]}/archive")


@proves("S12", "S14")
def test_an_archive_in_a_store_and_the_broker_are_all_that_was_ever_written(
    broker: Broker, place: Path, seed: int
) -> None:
    draw = random.Random(seed)
    world = World(broker, place, draw)
    for _ in range(15):
        draw.choice([world.produce, world.archive, world.archive, world.delete, world.compact])()
        assert world.read() == {n: rows for n, rows in world.written.items() if rows}


def rows(first: int, count: int) -> pa.RecordBatch:
    at = pa.array([1_700_000_000_000_000] * count, pa.timestamp("us", tz="UTC"))
    columns = {
        "topic": pa.array(["t"] * count),
        "partition": pa.array([0] * count, pa.int32()),
        "offset": pa.array(range(first, first + count), pa.int64()),
        "timestamp": at,
        "timestampType": pa.array([0] * count, pa.int32()),
        "key": pa.array([b"k"] * count, pa.binary()),
        "value": pa.array([b"v"] * count, pa.binary()),
        "headers": pa.nulls(count, INSIDE.field("headers").type),
    }
    return pa.RecordBatch.from_pydict(columns)


@proves("S4", "S14")
def test_of_many_that_commit_the_same_offsets_at_once_one_does(place: Path) -> None:
    """As if as many machines filled one archive, each with a checkpoint of its own."""
    archive_tables.make_records(place / RECORDS)

    def fill(nth: int) -> str:
        files = FileSet(place / RECORDS, f"q{nth}-00000000-00000", INSIDE, by_date=True)
        files.add(rows(0, 100))
        done = files.close()
        try:
            delta.append(
                place / RECORDS,
                [file.add_action() for file in done],
                app_id=f"q{nth}",
                app_version=0,
                check=lambda table: archive_tables.refuse_repeats(DeltaVersion(table), done),
            )
        except OperatorError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(6) as writers:
        told = sorted(writers.map(fill, range(6)))
    assert told[0] == ""
    assert all("t-0 is archived up to offset 99, and now 0 comes again" in each for each in told[1:])
    table = DeltaTable(str(place / RECORDS))
    assert table.version() == 1
    assert table.to_pyarrow_table()["offset"].to_pylist() == list(range(100))


@proves("S4", "S14")
def test_a_commit_that_comes_after_its_batch_was_given_up_has_its_files(place: Path) -> None:
    """The request was under way when its answer was not waited for any longer."""
    archive_tables.make_records(place / RECORDS)
    writer = ArchiveWriter(place, "q", delta.to_spark(pa.schema([("topic", pa.string()), *INSIDE])))

    def written() -> FilesWritten:
        files = FileSet(place / RECORDS, f"q-00000000-{uuid.uuid4().hex[:5]}", INSIDE, by_date=True)
        files.add(rows(0, 100))
        return FilesWritten(tuple(files.close()), ())

    late = written()
    writer.abort([late], 0)
    delta.append(place / RECORDS, [file.add_action() for file in late.records], app_id="q", app_version=0)
    writer.commit([written()], 0)
    assert DeltaTable(str(place / RECORDS)).to_pyarrow_table()["offset"].to_pylist() == list(range(100))
    assert len(list((place / RECORDS).rglob("*.parquet"))) == 1, "the second run has cleared up"
    writer.abort([written()], 1)
    assert archive_tables.sweep(place, "q") == 1


@proves("S4", "S14")
def test_what_a_killed_task_had_not_finished_is_not_there(place: Path) -> None:
    writing = f"""
import os, signal, sys
from pipelines.test_archive_store import *
files = FileSet(location({str(place)!r}) / RECORDS, "q-00000000-00000", INSIDE, by_date=True)
files.add(rows(0, 100))
files._flush(next(iter(files._open)))
os.kill(os.getpid(), signal.SIGKILL)
"""
    known = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", writing], env=known, capture_output=True, check=False)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    assert list((place / RECORDS).rglob("*.parquet")) == []


def tour(
    broker: Broker, place: Path, folder: Path, steps: Sequence[str] = STEPS, topic: str = "", **environment: str
) -> tuple[int, dict[str, Any]]:
    """As tests/spark/test_standalone.py does on a cluster, with a local master."""
    request = {
        "master": "local[2]", "settings": SETTINGS, "bootstrap": broker.bootstrap, "topic": topic,
        "records": RECORD_COUNT, "data": str(broker.data), "ledger": str(folder / "ledger"), "traces": "",
        "folder": str(folder), "archive": str(place), "kills": 0, "batches": 1, "steps": steps,
    }  # fmt: skip
    (folder / "request").write_text(json.dumps(request))
    ran = subprocess.run(
        [*DIES_WITH_PARENT, sys.executable, DRIVER, folder / "request"],
        env={**LOOPBACK, **os.environ, **environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    print(ran.stdout, ran.stderr[-3000:])
    found = json.loads((folder / "result").read_text()) if ran.returncode == 0 else {}
    return ran.returncode, found


def loaded(broker: Broker, folder: Path) -> str:
    """A topic with a ledger, and topics to write to."""
    topic = create_topic(broker, f"stored-{uuid.uuid4().hex[:6]}", PARTITIONS)
    for target in ("again", "history"):
        create_topic(broker, f"{topic}-{target}", PARTITIONS)
    load = ["load", topic, "--records", str(RECORD_COUNT), "--ledger", str(folder / "ledger")]
    subprocess.run([*COMMAND, *load, "--bootstrap", broker.bootstrap], check=True, capture_output=True)
    return topic


def records_of(broker: Broker, topic: str) -> list[tuple[bytes, bytes]]:
    found = headrace.arrow.read(topic, bootstrap=broker.bootstrap, columns=["key", "value"]).read_all().to_pylist()
    return sorted((row["key"], row["value"]) for row in found)


@proves("S4", "S5", "S6", "S7", "S12", "S14")
@pytest.mark.timeout(DEADLINE_S + 60)
def test_every_pipeline_reads_and_writes_an_archive_in_a_store(broker: Broker, place: Path, tmp_path: Path) -> None:
    topic = loaded(broker, tmp_path)
    sent = records_of(broker, topic)
    status, found = tour(broker, place, tmp_path, topic=topic)
    assert status == 0
    assert found["archived"]["records"] == RECORD_COUNT
    assert found["compacted"]["files_merged"] > found["compacted"]["files_written"] > 0
    assert found["indexed"]["records_indexed"] == RECORD_COUNT
    assert found["audited"]["ok"], found["audited"]
    assert found["archive_asked"] == [[RECORD_COUNT]]
    assert found["replayed"]["records"] == RECORD_COUNT
    assert found["whole_history"]["left"] < found["whole_history"]["count"] == RECORD_COUNT
    assert records_of(broker, f"{topic}-again") == records_of(broker, f"{topic}-history") == sent
    # Its readers do not see the checkpoint, and know how far it is.
    assert sum(History(place).ends.values()) == RECORD_COUNT
    assert {path.name for path in (place / CHECKPOINT / "commits").iterdir()} == {"1"}
    # As another reader of Delta sees it.
    archived = DeltaTable(str(place / RECORDS)).to_pyarrow_table(columns=["key", "value"]).to_pylist()
    assert sorted((row["key"], row["value"]) for row in archived) == sent
    latest = DeltaTable(str(place / "latest")).to_pyarrow_table(columns=["key"])["key"].to_pylist()
    assert sorted(latest) == sorted({key for key, _ in sent})
    key = sent[0][0].decode()
    asked = ["query", "--archive", str(place), "--topic", topic, "--key", key, "--format", "%v"]
    told = subprocess.run([*COMMAND, *asked], capture_output=True, text=True, check=True)
    assert sorted(told.stdout.split("\n")[:-1]) == sorted(
        value.decode() for found, value in sent if found == sent[0][0]
    )
    assert "1 row groups of 1 files read" in told.stderr, "the index says where"


@pytest.mark.long
@pytest.mark.timeout(4 * DEADLINE_S)
@proves("S4", "S14")
def test_an_archive_in_a_store_is_exactly_once_wherever_its_driver_dies(
    broker: Broker, store: S3Server, tmp_path: Path, proof_report: Callable[..., None]
) -> None:
    points = ("files-written", "table-committed", "table-committed:1")
    for lost in (False, True):
        folder = tmp_path / f"checkpoint-lost-{lost}"
        folder.mkdir()
        place, topic = location(f"s3://{BUCKET}/{folder.name}"), loaded(broker, folder)
        for point in points:
            status, _ = tour(broker, place, folder, ["archived"], topic, **{VARIABLE: point})
            assert status == -signal.SIGKILL
            if lost:
                (folder / ".headrace").rename(folder / f"lost-{point}")
        assert tour(broker, place, folder, ["archived"], topic)[0] == 0
        archived = DeltaTable(str(place / RECORDS)).to_pyarrow_table(columns=["key", "value"]).to_pylist()
        assert sorted((row["key"], row["value"]) for row in archived) == records_of(broker, topic)
    proof_report(driver_killed_at=", ".join(points), with_and_without_its_checkpoint=True, lost=0, duplicated=0)


def refused(*arguments: str, **environment: str) -> str:
    """The one line of a command that fails."""
    began = time.monotonic()
    ran = subprocess.run(
        [*COMMAND, *arguments], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert time.monotonic() - began < TOLD_WITHIN_S
    (line,) = ran.stderr.splitlines()
    return line


@proves("S14")
def test_a_store_that_does_not_answer_is_told_in_one_line(broker: Broker, place: Path) -> None:
    topic = create_topic(broker, f"stored-{uuid.uuid4().hex[:6]}", 1)
    archive = ["pipeline", "archive", "--topic", topic, "--to", str(place), "--bootstrap", broker.bootstrap]
    for command in (archive, ["query", "--archive", str(place), "--topic", topic, "--key", "k"]):
        told = refused(*command, AWS_ENDPOINT_URL="http://127.0.0.1:9")
        assert f"{place}" in told
        assert "cannot be reached at http://127.0.0.1:9: " in told
        assert "see to AWS_ENDPOINT_URL, AWS_REGION, and the credentials in AWS_ACCESS_KEY_ID and" in told
    told = refused("query", "--archive", "s3://nowhere/archive", "--topic", topic, "--key", "k")
    assert f"there is no bucket nowhere at {os.environ['AWS_ENDPOINT_URL']}: make it, or give another" in told
    told = refused("query", "--archive", str(place), "--topic", topic, "--key", "k")
    assert f"{place} has no archive; `headrace pipeline archive --to {place}` makes one" in told


@proves("S14")
def test_a_store_that_is_silent_is_not_waited_for_without_end(place: Path) -> None:
    assert isinstance(place, ObjectPath)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with in_environment({"AWS_ENDPOINT_URL": endpoint}), pytest.raises(OperatorError, match="cannot be reached"):
            place.check(timeout_s=SOON_S)


@proves("S14")
def test_addresses_that_are_no_place_for_an_archive_are_told(store: S3Server) -> None:
    for address in ("s3://", "s3://bucket/a name", "s3://bucket/%20"):
        with pytest.raises(OperatorError, match="write s3://BUCKET/PREFIX"):
            location(address)
    with pytest.raises(OperatorError, match="is neither a folder nor s3://BUCKET/PREFIX"):
        location("gs://bucket/archive")
    assert str(location("s3a://bucket/archive/")) == "s3://bucket/archive"
    assert location("some/folder") == Path("some/folder")
