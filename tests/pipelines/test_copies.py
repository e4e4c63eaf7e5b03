"""Audit of topics that were made of others, by sinks and replays: each record of the ledger once, whatever was killed.

The kills are the short forms. A table is written to a topic under a name, and an archive replayed; what they leave is
judged by `headrace pipeline audit --copy`, as readers of committed records see it, and as others may.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

import headrace.arrow
from brokers import Broker
from cli.conftest import COMMAND, environment
from clients.topics import create_topic
from headrace.cli.main import main
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.transactions import list_transactions
from headrace.pipelines import archive
from headrace.spark.faults import VARIABLE
from pipelines import table_driver
from pipelines.fault_actors import SCHEMA, TOPIC, lines, send
from proving import proves
from spark.driver_process import DEADLINE_S, DriverProcess
from spark.standalone import LOOPBACK

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PARTITIONS = 2
LOUD = "upper(cast(value as string))"
DECODED = ("--value", LOUD, "--where", "get_json_object(cast(value as string), '$.country') = 'NO'")
KILLS = 20
TABLE_KILLS = 10
Audit = Callable[..., dict[str, Any]]


class Scene:
    """A broker of its own, a ledger of what was sent to it, and an archive; one record in seven is put aside."""

    def __init__(self, broker: Broker, folder: Path) -> None:
        self.broker, self.folder = broker, folder
        self.ledger, self.archive = folder / "ledger", folder / "archive"
        create_topic(broker, TOPIC, PARTITIONS, retention_ms=-1)

    def fill(self, spark: SparkSession, count: int) -> None:
        send(self.broker, self.ledger, lines(0, count))
        options = archive.ArchiveOptions(self.archive, self.broker.bootstrap, (TOPIC,), decode="json", schema=SCHEMA)
        assert archive.run(spark, options).ok

    def table_driver(self, to: str, name: str, where: str = "true", die_at: str = "") -> DriverProcess:
        """The archive's table of records to a topic, in a driver that may be killed."""
        table = str(self.archive / "records")
        command = [sys.executable, table_driver.__file__, self.broker.bootstrap, table, to, name, where]
        known = {**LOOPBACK, "PYTHONPATH": os.pathsep.join(sys.path), "PYSPARK_PYTHON": sys.executable}
        return DriverProcess(command, {**known, **({VARIABLE: die_at} if die_at else {})}, self.folder)

    def replay_command(self, to: str, *more: str) -> list[str]:
        where = ["--archive", str(self.archive), "--topic", TOPIC, "--to", to, "--bootstrap", self.broker.bootstrap]
        return [*COMMAND, "pipeline", "replay", *where, *more]

    def replay(self, to: str, *more: str, die_at: str = "") -> int:
        known = {**environment(None), **({VARIABLE: die_at} if die_at else {})}
        return subprocess.run(self.replay_command(to, *more), env=known, capture_output=True, check=False).returncode

    def nothing_is_open(self) -> bool:
        with Cluster(self.broker.bootstrap) as cluster:
            return not list_transactions(cluster, states=["Ongoing", "PrepareCommit", "PrepareAbort"])


@pytest.fixture
def scene(fresh_broker: Callable[..., Broker], tmp_path: Path) -> Scene:
    return Scene(fresh_broker(), tmp_path)


@pytest.fixture
def audit(
    spark: SparkSession, scene: Scene, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Audit:
    """`headrace pipeline audit` in the session of the tests; what it tells."""
    monkeypatch.setattr("headrace.cli.pipelines.audit.spark_session", lambda *_: contextlib.nullcontext(spark))

    def run(*arguments: str, ok: bool = True) -> dict[str, Any]:
        capsys.readouterr()
        where = ["--ledger", str(scene.ledger), "--bootstrap", scene.broker.bootstrap]
        code = main(["pipeline", "audit", *where, "--json", *arguments])
        told: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert (code, told["ok"]) == ((0, True) if ok else (1, False)), told
        return told

    return run


def counts(told: dict[str, Any], store: str) -> Counter[str]:
    """Of a store, how many of each verdict; and what there was to be, and what there is besides."""
    found: Counter[str] = Counter()
    for row in told["producers"]:
        if row["store"] == store:
            found.update({name: n for name, n in row.items() if isinstance(n, int)})
    found["unclaimed"] = sum(row["unclaimed"] for row in told["stores"] if row["store"] == store)
    return +found


@proves("S3", "S5", "S6")
def test_what_is_made_of_a_topic_is_each_record_once_whoever_was_killed(
    scene: Scene, spark: SparkSession, audit: Audit
) -> None:
    """From the archive's table by a named write of Spark, and by replays of all of it and of its dead letters."""
    scene.fill(spark, 2000)
    decoded = scene.table_driver("decoded", "nightly", die_at="sink-decided:0")
    assert decoded.wait() == -signal.SIGKILL, decoded.told()
    assert not scene.nothing_is_open()
    table_driver.write(spark, scene.broker.bootstrap, scene.archive / "records", "decoded", "nightly")
    table_driver.write(spark, scene.broker.bootstrap, scene.archive / "records", "decoded", "nightly")
    for point in ("replay-written:1", "replay-committed:2"):
        assert scene.replay("again", "--rate", "500", die_at=point) == -signal.SIGKILL
    assert scene.replay("again") == scene.replay("aside", "--dead-letters") == 0
    assert scene.nothing_is_open()

    told = audit("--copy", f"{TOPIC}=again")
    assert counts(told, "copy again") == {"acknowledged": 2000, "found": 2000}
    bad = len(DeltaTable(str(scene.archive / "dead_letters")).to_pyarrow_table())
    told = audit("--archive", str(scene.archive), "--copy", f"{TOPIC}=aside", "--dead-letters")
    assert counts(told, "copy aside") == {"acknowledged": bad, "found": bad}
    told = audit("--copy", f"{TOPIC}=decoded", *DECODED)
    assert counts(told, "copy decoded") == {"acknowledged": 2000 - bad, "found": 2000 - bad}

    # Who reads what is not committed sees what the killed replay had written.
    told = audit("--copy", f"{TOPIC}=again", "--isolation", "uncommitted", ok=False)
    seen = counts(told, "copy again")
    assert (seen["acknowledged"], seen["found"], seen["lost"]) == (2000, 2000, 0)
    assert seen["duplicated"] > 0
    assert told["isolation"] == "uncommitted"


@proves("S6")
def test_faults_in_a_copy_are_found_and_named(scene: Scene, audit: Audit) -> None:
    send(scene.broker, scene.ledger, lines(0, 500))
    columns = ("partition", "offset", "key", "value", "headers")
    rows = headrace.arrow.read(TOPIC, bootstrap=scene.broker.bootstrap, columns=columns).read_all()
    copied = pa.concat_tables([rows.slice(0, 100), rows.slice(101), rows.slice(250, 1), rows.slice(250, 1)])
    sent = copied.select(["key", "value", "headers"]).combine_chunks()
    headrace.arrow.write("copied", sent, bootstrap=scene.broker.bootstrap)
    headrace.arrow.write("copied", pa.table({"value": [b"of somebody else"]}), bootstrap=scene.broker.bootstrap)
    told = audit("--copy", f"{TOPIC}=copied", ok=False)
    assert counts(told, "copy copied") == {
        "acknowledged": 500, "found": 499, "lost": 1, "duplicated": 2, "unclaimed": 1,
    }  # fmt: skip

    def place(nth: int) -> tuple[int, int]:
        return rows["partition"][nth].as_py(), rows["offset"][nth].as_py()

    named = sorted((row["what"], (row["partition"], row["offset"])) for row in told["findings"])
    assert named == [("duplicated", place(250)), ("duplicated", place(250)), ("lost", place(100))]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--copy", TOPIC), "write TOPIC=OTHER"),
        (("--value", "upper(value)"), "say how a --copy was made"),
    ],
)
def test_what_cannot_be_asked_of_a_copy_is_told(
    scene: Scene, capsys: pytest.CaptureFixture[str], arguments: Sequence[str], says: str
) -> None:
    where = ["--ledger", str(scene.ledger), "--bootstrap", scene.broker.bootstrap]
    assert main(["pipeline", "audit", *where, *arguments]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.timeout(3600)
@proves("S3", "S5", "S6")
def test_twenty_kills_of_a_replay_and_ten_of_writes_of_a_table(
    scene: Scene, spark: SparkSession, audit: Audit, seed: int, proof_report: Callable[..., None]
) -> None:
    """At random moments, often when a window is written and not committed, and of the writes at every named point too.
    The broker is killed now and then."""
    began, draw = time.monotonic(), random.Random(seed)
    kills: Counter[str] = Counter()
    scene.fill(spark, 40_000)
    replay = scene.replay_command("again", "--rate", "600")
    ended: int | None = None
    while ended != 0:
        at = f"replay-written:{draw.randrange(3)}" if kills["replay"] < KILLS and draw.random() < 0.5 else ""
        known = {**environment(None), VARIABLE: at} if at else environment(None)
        process = subprocess.Popen(replay, env=known, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if draw.random() < 0.2:
            scene.broker.restart(clean=False)
            kills["broker"] += 1
        ended = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            ended = process.wait(draw.uniform(1, 5) if kills["replay"] < KILLS and not at else DEADLINE_S)
        if ended is None:
            process.kill()
            ended = process.wait()
        kills["replay"] += ended == -signal.SIGKILL
    assert kills["replay"] >= KILLS
    table, points = scene.archive / "records", ["sink-written:0", "sink-decided:0", "sink-ended:0"]
    for number in range(TABLE_KILLS):
        name, where = f"load {number}", f"offset % {TABLE_KILLS} = {number}"
        driver = scene.table_driver("decoded", name, where, die_at=points[number] if number < len(points) else "")
        if number < len(points):
            assert driver.wait() == -signal.SIGKILL, driver.told()
        else:
            time.sleep(draw.uniform(4, 14))
            driver.kill()
        kills["driver of a write"] += 1
        table_driver.write(spark, scene.broker.bootstrap, table, "decoded", name, where)
        print(f"{time.monotonic() - began:.0f} s: {dict(kills)}", flush=True)
    assert scene.nothing_is_open()
    told = audit("--archive", str(scene.archive), "--copy", f"{TOPIC}=again")
    replayed = counts(told, "copy again")
    told = audit("--archive", str(scene.archive), "--copy", f"{TOPIC}=decoded", *DECODED)
    decoded = counts(told, "copy decoded")
    seen = counts(audit("--copy", f"{TOPIC}=again", "--isolation", "uncommitted", ok=False), "copy again")
    for found in (replayed, decoded):
        assert found == {"acknowledged": found["acknowledged"], "found": found["acknowledged"]}
    proof_report(
        kills=dict(kills),
        replayed=replayed["found"],
        written_from_a_table=decoded["found"],
        lost=0,
        duplicated=0,
        left_open=0,
        seen_more_than_once_uncommitted=seen["duplicated"],
        seconds=round(time.monotonic() - began),
    )
