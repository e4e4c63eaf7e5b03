"""Jobs of a user: topics through SQL or Python to topics and tables, over restarts and kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from brokers import DIES_WITH_PARENT, Broker, wait_for
from headrace.errors import OperatorError
from headrace.pipelines import run
from headrace.pipelines.summary import Summary
from json_topics import create, fill, json_values, new_name, records
from proving import proves

COMMAND_DEADLINE_S = 300
SMALL = ("--master", "local[1]", "--spark-conf", "spark.driver.memory=512m")


class Job:
    """A job's file in a folder of its own, run in the shared session or as a process."""

    def __init__(self, spark: SparkSession, broker: Broker, folder: Path) -> None:
        self.spark = spark
        self.broker = broker
        self.folder = folder
        self.path = folder / "job.sql"

    def write(self, text: str, name: str = "job.sql") -> None:
        self.path = self.folder / name
        self.path.write_text(text)

    def options(self, **how: Any) -> run.JobOptions:
        return run.JobOptions(self.path, self.broker.bootstrap, self.folder / "checkpoint", **how)

    def run(self, **how: Any) -> Summary:
        return run.run(self.spark, self.options(**how))

    def refused(self, **how: Any) -> str:
        with pytest.raises(OperatorError) as caught:
            self.run(**how)
        return str(caught.value)

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "headrace.cli.main", "pipeline", "run", str(self.path), "--json", *SMALL]
        return subprocess.Popen(
            [*DIES_WITH_PARENT, *command, "--checkpoint", str(self.folder / "checkpoint"), *arguments],
            env={**os.environ, "HEADRACE_BOOTSTRAP": self.broker.bootstrap, **environment},
            cwd=self.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def table(self, name: str) -> list[dict[str, Any]]:
        path = str(self.folder / name)
        return DeltaTable(path).to_pyarrow_table().to_pylist() if DeltaTable.is_deltatable(path) else []


@pytest.fixture
def job(spark: SparkSession, broker: Broker, tmp_path: Path) -> Job:
    return Job(spark, broker, tmp_path)


def at(minute: int, second: int = 0) -> str:
    return datetime(2026, 11, 16, 12, minute, second, tzinfo=UTC).isoformat()


@proves("S10")
def test_a_sql_job_writes_a_table_and_goes_on_where_it_ended(job: Job) -> None:
    orders, customers = new_name("orders"), new_name("customers")
    create(job.broker.bootstrap, orders, 2)
    create(job.broker.bootstrap, customers)
    fill(job.broker.bootstrap, customers, [{"id": 0, "name": "Ada"}, {"id": 1, "name": "São/B=c d"}])
    fill(job.broker.bootstrap, orders, [{"n": n, "who": {"id": n % 3}} for n in range(30)], key="n")
    job.write(
        f"-- Orders with names.\n"
        f"create temporary view named as select o.n, c.name\n"
        f"  from stream {orders} o join {customers} c on c.id = o.who.id;\n"
        f"insert into table './the named' partitioned by (name) select n, name from named where n >= ${{least:0}};\n"
    )
    first = job.run()
    assert first.facts["records_read"] >= 30
    expected = {(n, ["Ada", "São/B=c d"][n % 3]) for n in range(30) if n % 3 < 2}
    assert {(row["n"], row["name"]) for row in job.table("the named")} == expected

    # Fields that were guessed stay as they were, whatever comes later.
    fill(job.broker.bootstrap, orders, [{"n": n, "more": "x", "who": {"id": 0}} for n in range(30, 35)], key="n")
    job.path.write_text(job.path.read_text() + "-- the same job\n")
    job.run()
    expected |= {(n, "Ada") for n in range(30, 35)}
    assert sorted((row["n"], row["name"]) for row in job.table("the named")) == sorted(expected)
    assert "is not the job that the checkpoint" in job.refused(settings={"least": "41"})

    # A changed job that is let through goes on where the former one ended.
    fill(job.broker.bootstrap, orders, [{"n": n, "who": {"id": 0}} for n in range(40, 45)], key="n")
    job.run(settings={"least": "41"}, accept_change=True)
    expected |= {(n, "Ada") for n in range(41, 45)}
    assert sorted((row["n"], row["name"]) for row in job.table("the named")) == sorted(expected)
    assert job.run(settings={"least": "41"}).facts["records_read"] == 0


@proves("S10")
def test_a_sql_job_sends_what_a_watermark_has_closed_to_a_topic(job: Job) -> None:
    orders, minutes, running = new_name("orders"), new_name("per") + "-minute", new_name("running")
    create(job.broker.bootstrap, orders)
    create(job.broker.bootstrap, minutes)
    create(job.broker.bootstrap, running)
    job.write(
        f"create topic view {orders} (city string, amount double, placed timestamp);\n"
        f"insert into topic `{minutes}` select city as _key, window.start as minute, sum(amount) as revenue\n"
        f"  from stream {orders} watermark placed delay of interval 1 minute\n"
        f"  group by window(placed, '1 minute'), city;\n"
        f"insert into topic {running} options (mode = 'update')\n"
        f"  select city as _key, count(*) as orders from stream {orders} group by city;\n"
    )
    fill(job.broker.bootstrap, orders, [{"city": "Oslo", "amount": 1.5, "placed": at(0, s)} for s in (1, 2)])
    fill(job.broker.bootstrap, orders, [{"city": "Bern", "amount": 4, "placed": at(0, 3)}])
    job.run()
    assert records(job.broker.bootstrap, minutes) == []
    assert json_values(job.broker.bootstrap, running) in (
        [{"orders": 2}, {"orders": 1}],
        [{"orders": 1}, {"orders": 2}],
    )
    # As if Spark had died before it noted that the batch was done: it is run again.
    for name in ("0", ".0.crc"):
        (job.folder / "checkpoint" / f"topic-{running}" / "commits" / name).unlink()
    job.run()
    assert len(records(job.broker.bootstrap, running)) == 2
    fill(job.broker.bootstrap, orders, [{"city": "Oslo", "amount": 8, "placed": at(3)}])
    job.run()
    closed = {
        (message.key().decode(), json.loads(message.value())["revenue"], json.loads(message.value())["minute"][:16])
        for message in records(job.broker.bootstrap, minutes)
    }
    assert closed == {("Oslo", 3.0, "2026-11-16T12:00"), ("Bern", 4.0, "2026-11-16T12:00")}
    assert json_values(job.broker.bootstrap, running)[-1] == {"orders": 3}


@proves("S10")
def test_a_python_job_copies_records_as_they_are(job: Job) -> None:
    source, copy = new_name("source"), new_name("copy")
    create(job.broker.bootstrap, source)
    sent = [b"\xff\x00", None, b"", b"text"]
    fill(job.broker.bootstrap, source, sent, headers=[("h", b"\xfe"), ("h", None)])
    job.write(
        "def job(topics):\n"
        f"    rows = topics.read_stream('{source}').where('_offset >= 0')\n"
        f"    topics.write(rows.select('_key', '_value', '_headers', '_timestamp'), topics.settings['to'])\n",
        "job.py",
    )
    summary = job.run(settings={"to": copy})
    assert summary.facts["topics_created"] == [copy]
    found, originals = records(job.broker.bootstrap, copy), records(job.broker.bootstrap, source)
    key = str
    assert sorted((key(m.value()), m.headers(), m.timestamp()) for m in found) == sorted(
        (key(m.value()), m.headers(), m.timestamp()) for m in originals
    )


@proves("S10")
@pytest.mark.parametrize("point", [pytest.param("files-written:1", marks=pytest.mark.long), "table-committed:1"])
def test_a_killed_job_leaves_an_exact_table_and_no_gap_in_the_topic(job: Job, point: str) -> None:
    source, copy = new_name("source"), new_name("copy")
    create(job.broker.bootstrap, source, 2)
    create(job.broker.bootstrap, copy)
    fill(job.broker.bootstrap, source, [{"n": n} for n in range(200)], key="n")
    job.write(
        f"create topic view {source} (n bigint) options (maxOffsetsPerTrigger = '60');\n"
        f"insert into topic {copy} select _key, n, n * n as square from stream {source};\n"
        f"insert into table 'copied' select n, _partition, _offset from stream {source};\n"
    )
    process = job.start(HEADRACE_DIE_AT=point)
    _, errors = process.communicate(timeout=COMMAND_DEADLINE_S)
    assert process.returncode == -signal.SIGKILL, errors
    committed = len(job.table("copied"))
    assert committed == (60 if point.startswith("files") else 120)
    job.run()
    assert sorted(row["n"] for row in job.table("copied")) == list(range(200))
    sent = Counter(value["n"] for value in json_values(job.broker.bootstrap, copy))
    assert sorted(sent) == list(range(200))
    left = {path.name for path in (job.folder / "copied").glob("*.parquet")}
    assert left == {Path(uri).name for uri in DeltaTable(str(job.folder / "copied")).file_uris()}


@proves("S10")
def test_a_followed_job_ends_on_a_signal_and_nothing_is_read_twice(job: Job) -> None:
    source, copy = new_name("source"), new_name("copy")
    create(job.broker.bootstrap, source)
    create(job.broker.bootstrap, copy)
    job.write(f"create topic view {source} (n bigint);\ninsert into topic {copy} select n from stream {source};\n")
    process = job.start("--follow", "--trigger", "0.2")
    fill(job.broker.bootstrap, source, [{"n": n} for n in range(50)])
    wait_for("the copy", lambda: process.poll() is not None or len(records(job.broker.bootstrap, copy)) >= 50, 120, 0.3)
    fill(job.broker.bootstrap, source, [{"n": 50}])
    wait_for("more", lambda: process.poll() is not None or len(records(job.broker.bootstrap, copy)) >= 51, 60, 0.3)
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=COMMAND_DEADLINE_S)
    assert process.returncode == 0, errors
    summary = json.loads(out)
    assert summary["interrupted"]
    assert summary["records_read"] == 51
    assert job.run().facts["records_read"] == 0
    assert sorted(value["n"] for value in json_values(job.broker.bootstrap, copy)) == list(range(51))


@proves("S10")
def test_a_table_and_a_checkpoint_that_do_not_belong_together_are_refused(job: Job) -> None:
    source = new_name("source")
    create(job.broker.bootstrap, source)
    fill(job.broker.bootstrap, source, [{"n": n} for n in range(30)])
    job.write(f"create topic view {source} (n bigint);\ninsert into table 'x' select n from stream {source};\n")
    job.run()
    fill(job.broker.bootstrap, source, [{"n": n} for n in range(30, 35)])
    checkpoint = job.folder / "checkpoint" / "table-x"
    checkpoint.rename(job.folder / "moved")
    assert "has batch 0 of this job" in job.refused()
    (job.folder / "moved").rename(checkpoint)
    (job.folder / "x").rename(job.folder / "y")
    assert "is gone" in job.refused()
    (job.folder / "y").rename(job.folder / "x")
    job.run()
    assert sorted(row["n"] for row in job.table("x")) == list(range(35))
    (job.folder / "checkpoint").rename(job.folder / "another")
    assert "would have them twice" in job.refused()
    assert len(job.table("x")) == 35
    job.run(accept_change=True)
    assert len(job.table("x")) == 70


def test_a_job_has_its_checkpoint_beside_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "daily.sql").touch()
    (tmp_path / "linked.sql").symlink_to(tmp_path / "jobs" / "daily.sql")
    beside = tmp_path / "jobs" / ".headrace" / "checkpoints" / "daily"
    monkeypatch.chdir(tmp_path)
    assert run.JobOptions(Path("jobs/daily.sql"), "").folder == beside
    assert run.JobOptions(Path("linked.sql"), "").folder == beside
    monkeypatch.chdir(tmp_path / "jobs")
    assert run.JobOptions(Path("daily.sql"), "").folder == beside
    assert run.JobOptions(Path("daily.sql"), "", Path("mine")).folder == tmp_path / "jobs" / "mine"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("select 1", "line 1: a job cannot do anything with `select`"),
        ("set a.b=1", "writes nothing"),
        ("\n\ninsert into orders select 1", "line 3: write `insert into topic NAME"),
        ("insert into topic x", "has no select"),
        ("insert into topic x select 1 as n", "reads no stream"),
        ("insert into table './x' select * from {topic}", "reads no stream"),
        ("insert into topic x select _value, _offset + 1 as n from stream {topic}", "_value is the whole value"),
        ("insert into topic x select _key from stream {topic}", "a record needs a value"),
        ("insert into topic x options (mode = 'often') select _value from stream {topic}", "mode 'often'"),
        ("insert into table 'x' partitioned by (day) select n from stream {topic}", "partitioned by day"),
        ("create topic view {topic} (n int", "not closed"),
        ("insert into topic x select ${{what}} from stream {topic}", "--set what=VALUE"),
        ("insert into topic x select _value from stream {topic}x", "did you mean {topic}"),
    ],
)
def test_jobs_that_make_no_sense_are_refused(job: Job, text: str, says: str) -> None:
    topic = new_name("given")
    create(job.broker.bootstrap, topic)
    fill(job.broker.bootstrap, topic, [{"n": 1}])
    job.write(text.format(topic=topic))
    assert says.format(topic=topic) in job.refused()


def test_a_file_that_is_no_job_and_a_checkpoint_in_use_are_told(job: Job) -> None:
    job.write("x = 1", "job.py")
    assert "no function `job`" in job.refused()
    job.write("def job(topics:", "job.py")
    assert "line 1" in job.refused()
    job.write("", "job.txt")
    assert ".sql or .py" in job.refused()
    with run._locked(job.options().folder):
        job.write("set a.b=1")
        assert f"runs already, as process {os.getpid()}" in job.refused()
