"""Audit over topics, data folders and archives: planted faults are each found and named, and nothing else is.

How they are planted. Archive: rows are taken out, doubled, exchanged and altered before the table is written. Data
folder: bytes of the segments are changed while the broker is stopped. Topic: a record is really sent twice; a broker
cannot be made to lose, swap or alter one, so there the ledger is altered, which gives the same relation of the two.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

import headrace.arrow
from brokers import Broker
from cli.conftest import COMMAND, environment
from headrace.arrow.ledger import SCHEMA
from headrace.cli.main import main
from headrace.client.admin import groups
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.produce import Produced, produce
from headrace.client.producer.request import Outgoing
from headrace.errors import OperatorError
from headrace.pipelines.audit import AuditOptions, run
from headrace.pipelines.stores import archive as archive_store
from headrace.pipelines.summary import Progress, Summary
from headrace.records import kernel
from headrace.records.batch import batches
from proving import proves

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RECORDS = 200_000
PARTITIONS = 3
TOPIC = "orders"
ARCHIVED = ("topic", "partition", "offset", "timestamp", "timestampType", "key", "value", "headers")
Finding = tuple[Any, ...]


class Scene:
    """A stopped or running broker that took traffic from two producers, with their ledger."""

    def __init__(self, broker: Broker, folder: Path, records: int, *options: str) -> None:
        self.broker = broker
        self.folder = folder
        self.ledger = str(folder / "ledger")
        self.load(records, *options)
        self.claims = pq.read_table(self.ledger)
        self.rows = headrace.arrow.read(TOPIC, bootstrap=broker.bootstrap, columns=ARCHIVED).read_all()

    def load(self, records: int, *options: str) -> None:
        command = ["load", TOPIC, "--partitions", str(PARTITIONS), "--records", str(records), "--producers", "2"]
        subprocess.run(
            [*COMMAND, *command, "--ledger", self.ledger, *options],
            env=environment(self.broker.bootstrap),
            check=True,
            capture_output=True,
        )

    def claim(self, partition: int, offset: int) -> dict[str, Any]:
        here = pc.and_(pc.equal(self.claims["partition"], partition), pc.equal(self.claims["offset"], offset))
        (row,) = self.claims.filter(here).to_pylist()
        return dict(row)

    def named(self, what: str, partition: int, offset: int) -> Finding:
        """The finding on the record that was acknowledged at a place."""
        claim = self.claim(partition, offset)
        return (what, claim["producer"], claim["sequence"], partition, offset)

    def commit(self, places: dict[int, int] | None = None) -> dict[int, int]:
        """As an archive does: all that is there, but for what is given. The ends."""
        ends = {
            n: pc.max(self.rows.filter(pc.equal(self.rows["partition"], n))["offset"]).as_py() + 1 for n in range(3)
        }
        offsets = {(TOPIC, n): offset for n, offset in {**ends, **(places or {})}.items()}
        with Cluster(self.broker.bootstrap) as cluster:
            groups.commit_offsets(cluster, "headrace-archive", offsets)
        return ends


def audit(spark: SparkSession, **options: Any) -> Summary:
    return run(spark, AuditOptions(**options), Progress())


def found_in(summary: Summary, store: str) -> set[Finding]:
    rows = [row for table in summary.tables if table.title == "findings" for row in table.rows]
    names = ("what", "producer", "sequence", "partition", "offset")
    return {tuple(row[name] for name in names) for row in rows if str(row["store"]).startswith(store)}


def archive(rows: pa.Table, folder: Path, dead_letters: int = 0) -> str:
    """The last rows go to the table of dead letters."""
    dead = rows.slice(len(rows) - dead_letters).drop(["timestampType"])
    write_deltalake(str(folder / "dead_letters"), dead.append_column("reason", pa.repeat("not JSON", dead_letters)))
    rows = rows.slice(0, len(rows) - dead_letters)
    dated = rows.append_column("date", rows["timestamp"].cast(pa.timestamp("us")).cast(pa.date32()))
    write_deltalake(str(folder / "records"), dated, partition_by=["topic", "date"])
    return str(folder)


def planted(rows: pa.Table) -> tuple[pa.Table, dict[str, list[tuple[int, int]]]]:
    """The rows with one loss, duplicate, swap, altered value and altered timestamp, and the places of each."""
    shares = {"lost": 0.1, "twice": 0.3, "swap": 0.5, "bad": 0.8, "late": 0.9}
    at = {name: int(len(rows) * share) for name, share in shares.items()}
    values = rows["value"].combine_chunks().to_pylist()
    values[at["bad"]] = values[at["bad"]].replace(b'"order"', b'"0rder"')
    other = at["swap"] + 1
    values[at["swap"]], values[other] = values[other], values[at["swap"]]
    keys = rows["key"].combine_chunks().to_pylist()
    keys[at["swap"]], keys[other] = keys[other], keys[at["swap"]]
    times = rows["timestamp"].to_numpy().copy()
    times[at["swap"]], times[other] = times[other], times[at["swap"]]
    times[at["late"]] += 1_000_000
    changed = rows
    for name, column in (("value", pa.array(values)), ("key", pa.array(keys)), ("timestamp", pa.array(times))):
        field = rows.schema.field(name)
        changed = changed.set_column(rows.schema.get_field_index(name), field, column.cast(field.type))
    changed = pa.concat_tables(
        [changed.slice(0, at["lost"]), changed.slice(at["lost"] + 1), changed.slice(at["twice"], 1)]
    )

    def place(nth: int) -> tuple[int, int]:
        return rows["partition"][nth].as_py(), rows["offset"][nth].as_py()

    places = {
        "lost": [place(at["lost"])],
        "duplicated": [place(at["twice"])],
        "out_of_order": [place(at["swap"]), place(other)],
        "corrupted": [place(at["bad"]), place(at["late"])],
    }
    return changed, places


@pytest.fixture(scope="module")
def scene(brokers: Any, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(brokers.start(), tmp_path_factory.mktemp("audit"), RECORDS)


@proves("S6")
def test_nothing_is_found_where_nothing_is_wrong(spark: SparkSession, scene: Scene, tmp_path: Path) -> None:
    scene.commit()
    summary = audit(
        spark,
        ledgers=(scene.ledger, f"{scene.ledger}/../ledger"),  # one folder is read once
        bootstrap=scene.broker.bootstrap,
        data=(str(scene.broker.data),),
        archive=archive(scene.rows, tmp_path, dead_letters=10),
    )
    assert summary.ok, summary
    assert summary.facts["verdict"] == "clean"
    producers, stores = summary.tables
    assert [row["records"] for row in stores.rows] == [RECORDS] * 3
    assert sum(row["found"] for row in producers.rows) == 3 * RECORDS
    assert len({row["producer"] for row in producers.rows}) == 2


@proves("S6")
def test_faults_in_an_archive_are_found_and_named(spark: SparkSession, scene: Scene, tmp_path: Path) -> None:
    rows, places = planted(scene.rows)
    findings = tmp_path / "findings.jsonl"
    summary = audit(spark, ledgers=(scene.ledger,), archive=archive(rows, tmp_path / "archive"), findings=str(findings))
    expected = {scene.named(what, *place) for what, each in places.items() for place in each}
    assert found_in(summary, "archive") == expected
    assert not summary.ok
    written = [json.loads(line) for line in findings.read_text().splitlines()]
    assert {
        (row["what"], row["producer"], row["sequence"], row["partition"], row["offset"]) for row in written
    } == expected
    assert [row["unclaimed"] for row in summary.tables[1].rows] == [0]


@proves("S6")
def test_faults_in_a_topic_are_found_and_named(spark: SparkSession, scene: Scene, tmp_path: Path) -> None:
    ledger, expected = altered_ledger(scene, tmp_path)
    twin = scene.claim(1, 10)
    place = send_again(scene.broker.bootstrap, scene.rows, (1, 10))
    expected.add(("duplicated", twin["producer"], twin["sequence"], *place))
    summary = audit(spark, ledgers=(ledger,), bootstrap=scene.broker.bootstrap)
    assert found_in(summary, "topics") == expected
    # The ledger that was altered to look like a swap also contradicts itself.
    assert {finding[0] for finding in found_in(summary, "ledger")} == {"out_of_order"}


def altered_ledger(scene: Scene, folder: Path) -> tuple[str, set[Finding]]:
    """A claim for what was never sent, two places exchanged, and a claim for other content than was sent."""
    claims = scene.claims.sort_by([("partition", "ascending"), ("offset", "ascending")])
    offsets, digests = claims["offset"].to_numpy().copy(), claims["digest"].to_numpy().copy()
    producers = claims["producer"].to_pylist()
    swap = next(n for n in range(1000, 2000) if producers[n] == producers[n + 1])
    bad = 2500
    pair = [claims.slice(swap, 1).to_pylist()[0], claims.slice(swap + 1, 1).to_pylist()[0]]
    offsets[swap], offsets[swap + 1] = offsets[swap + 1], offsets[swap]
    digests[bad] ^= 1
    columns = {name: claims[name] for name in SCHEMA.names}
    changed = pa.table({**columns, "offset": offsets, "digest": digests}, schema=SCHEMA)
    end = 1 + max(offset for n, offset in zip(claims["partition"].to_pylist(), offsets, strict=True) if n == 2)
    phantom = {**pair[0], "sequence": RECORDS, "partition": 2, "offset": end, "digest": 1}
    (folder / "ledger").mkdir()
    pq.write_table(
        pa.concat_tables([changed, pa.Table.from_pylist([phantom], SCHEMA)]), folder / "ledger" / "a.parquet"
    )
    wrong = claims.slice(bad, 1).to_pylist()[0]
    return str(folder / "ledger"), {
        ("lost", phantom["producer"], RECORDS, 2, end),
        ("out_of_order", pair[0]["producer"], pair[0]["sequence"], 0, pair[1]["offset"]),
        ("out_of_order", pair[1]["producer"], pair[1]["sequence"], 0, pair[0]["offset"]),
        ("corrupted", wrong["producer"], wrong["sequence"], 0, wrong["offset"]),
    }


def send_again(bootstrap: str, rows: pa.Table, place: tuple[int, int]) -> tuple[int, int]:
    """Send a record of the topic once more, as a producer that retries without care does; where it went."""
    here = pc.and_(pc.equal(rows["partition"], place[0]), pc.equal(rows["offset"], place[1]))
    (row,) = rows.filter(here).to_pylist()
    batch = kernel.build([(int(row["timestamp"].timestamp() * 1000), row["key"], row["value"], [])], 0)
    with Cluster(bootstrap) as cluster:
        (result,) = produce(cluster, [Outgoing(TOPIC, place[0], batch)])
    assert isinstance(result, Produced)
    return place[0], result.base_offset


@proves("S6", "S11")
def test_faults_in_a_data_folder_are_found_and_named(
    spark: SparkSession, scene: Scene, fresh_broker: Callable[..., Broker], tmp_path: Path
) -> None:
    """The bytes of a copy are changed; checksums are made right again, so that only the audit can tell."""
    broker = fresh_broker()
    small = Scene(broker, tmp_path, 5_000)
    broker.stop()
    folder = tmp_path / "copy"
    shutil.copytree(broker.data, folder)
    swap, bad = alter_segment(folder / TOPIC / f"{TOPIC}-0")
    lost = cut_last_batch(folder / TOPIC / f"{TOPIC}-1")
    twin, again = repeat_last_batch(folder / TOPIC / f"{TOPIC}-2")
    summary = audit(spark, ledgers=(small.ledger,), data=(str(folder),), shown=10_000)
    first = small.claim(2, twin)
    duplicated = [("duplicated", *small.named("", 2, twin + n)[1:3], 2, again + n) for n in range(again - twin)]
    assert first["sequence"] == duplicated[0][2]
    assert found_in(summary, "data") == {
        small.named("out_of_order", 0, swap),
        small.named("out_of_order", 0, swap + 1),
        small.named("corrupted", 0, bad),
        *(small.named("lost", 1, offset) for offset in lost),
        *duplicated,
    }


def segment_of(partition: Path) -> Path:
    return max(partition.glob("*.log"))


def alter_segment(partition: Path) -> tuple[int, int]:
    """Exchange the contents of two records of the first batch, alter a third; their offsets."""
    path = segment_of(partition)
    data = bytearray(path.read_bytes())
    header, batch = next(iter(batches(memoryview(bytes(data)))))
    found = kernel.records(batch)
    new = [[record.timestamp_ms, record.key, record.value, record.headers] for record in found]
    new[3], new[4] = new[4], new[3]
    value = new[7][2]
    assert isinstance(value, bytes)
    new[7][2] = value[:-3] + b"?" + value[-2:]
    rebuilt = kernel.build(
        [tuple(each) for each in new],  # type: ignore[misc]
        0,
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        base_sequence=header.base_sequence,
    )
    # Base offset and leader epoch are outside the checksum.
    struct.pack_into(">q", rebuilt, 0, header.base_offset)
    struct.pack_into(">i", rebuilt, 12, header.leader_epoch)
    data[: len(batch)] = rebuilt
    path.write_bytes(data)
    return found[3].offset, found[7].offset


def cut_last_batch(partition: Path) -> range:
    """Take the last batch away; the offsets that were in it."""
    path = segment_of(partition)
    data = path.read_bytes()
    *_, (header, batch) = batches(memoryview(data))
    path.write_bytes(data[: len(data) - len(batch)])
    return range(header.base_offset, header.next_offset)


def repeat_last_batch(partition: Path) -> tuple[int, int]:
    """Append the last batch once more; where it was, and where it is again."""
    path = segment_of(partition)
    data = path.read_bytes()
    *_, (header, batch) = batches(memoryview(data))
    again = bytearray(batch)
    struct.pack_into(">q", again, 0, header.next_offset)
    path.write_bytes(data + again)
    return header.base_offset, header.next_offset


@proves("S6")
def test_deleted_and_not_yet_archived_records_are_not_lost(
    spark: SparkSession, fresh_broker: Callable[..., Broker], tmp_path: Path
) -> None:
    broker = fresh_broker()
    scene = Scene(broker, tmp_path, 3_000)
    rows = scene.rows
    archived = rows.filter(pc.or_(pc.not_equal(rows["partition"], 0), pc.less(rows["offset"], 100)))
    folder = archive(archived, tmp_path / "archive")
    with pytest.raises(OperatorError, match="--archive-group"):
        audit(spark, ledgers=(scene.ledger,), bootstrap=broker.bootstrap, archive=folder)
    ends = scene.commit({0: 100})
    delete_records(broker, 50)
    summary = audit(spark, ledgers=(scene.ledger,), bootstrap=broker.bootstrap, archive=folder)
    assert summary.ok, summary
    producers = summary.tables[0].rows
    assert sum(row["deleted"] for row in producers if row["store"] == "topics") == 50
    assert sum(row["pending"] for row in producers if row["store"] != "topics") == ends[0] - 100
    assert summary.facts["verdict"] == f"clean, {ends[0] - 100} records not archived yet"
    # Without the committed offsets all of it has to be in the archive.
    alone = audit(spark, ledgers=(scene.ledger,), archive=folder, shown=3)
    assert sum(row["lost"] for row in alone.tables[0].rows) == ends[0] - 100
    assert alone.facts["findings_not_shown"] == ends[0] - 100 - 3

    # What the topic has let go of before it was archived is nowhere.
    delete_records(broker, 103)
    summary = audit(spark, ledgers=(scene.ledger,), bootstrap=broker.bootstrap, archive=folder)
    assert found_in(summary, "archive") == {scene.named("lost", 0, offset) for offset in (100, 101, 102)}
    assert summary.facts["verdict"] == f"3 findings, {ends[0] - 103} records not archived yet"

    # An archive that runs: what it commits after its files were listed is not expected to be in them.
    store = archive_store(spark, folder, [TOPIC], broker.bootstrap, "headrace-archive")
    scene.commit()
    assert [(each.next_offset, each.complete) for each in store.bounds()] == [
        (103, False),
        (ends[1], True),
        (ends[2], True),
    ]


def delete_records(broker: Broker, before: int) -> None:
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    for future in admin.delete_records([TopicPartition(TOPIC, 0, before)]).values():
        future.result(30)


@proves("S6")
def test_the_exit_code_says_whether_all_agree(
    spark: SparkSession,
    scene: Scene,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command itself, in the session of the tests."""
    monkeypatch.setattr("headrace.cli.pipelines.audit.spark_session", lambda *_: contextlib.nullcontext(spark))
    monkeypatch.delenv("HEADRACE_BOOTSTRAP", raising=False)
    command = ["pipeline", "audit", "--ledger", scene.ledger, "--archive"]
    assert main([*command, archive(scene.rows, tmp_path / "whole")]) == 0
    assert "verdict: clean" in capsys.readouterr().out
    assert main([*command, archive(scene.rows.slice(1), tmp_path / "short"), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    (finding,) = told["findings"]
    assert (told["ok"], finding["what"], finding["offset"]) == (False, "lost", 0)


@proves("S6")
def test_more_faults_than_the_driver_can_hold_are_counted(
    spark: SparkSession, scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.pipelines.audit.COLLECTED_MAX", 100)
    summary = audit(spark, ledgers=(scene.ledger,), archive=archive(scene.rows.slice(1_000), tmp_path))
    (store,) = summary.tables[1].rows
    assert not summary.ok
    assert (store["faults"], store["not_told_apart"], store["unclaimed"]) == (1_000, 900, 0)
    assert sum(row["lost"] for row in summary.tables[0].rows) == 100
    assert summary.facts["verdict"] == "1000 findings"


def test_a_ledger_that_is_not_there_is_told(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="has no ledger"):
        audit(spark, ledgers=(str(tmp_path),), data=("/nowhere",))


@pytest.mark.long
@pytest.mark.timeout(1800)
@proves("S6")
def test_one_fault_of_each_kind_in_ten_million_records(
    spark: SparkSession, fresh_broker: Callable[..., Broker], tmp_path: Path, proof_report: Callable[..., None]
) -> None:
    records = 10_000_000
    broker = fresh_broker()
    scene = Scene(broker, tmp_path, records, "--value-bytes", "100", "--keys", "0")
    rows = scene.rows
    clean = archive(rows, tmp_path / "clean")
    changed, places = plant_in_columns(rows)
    faulty = archive(changed, tmp_path / "faulty")
    del changed
    figures: dict[str, object] = {"records": records}
    for name, options in {"topic": {"bootstrap": broker.bootstrap}, "archive": {"archive": clean}}.items():
        began = time.monotonic()
        assert audit(spark, ledgers=(scene.ledger,), **options).ok
        figures[f"{name}_clean_seconds"] = round(time.monotonic() - began, 1)
    began = time.monotonic()
    summary = audit(spark, ledgers=(scene.ledger,), archive=faulty)
    figures["archive_with_faults_seconds"] = round(time.monotonic() - began, 1)
    expected = {scene.named(what, *place) for what, each in places.items() for place in each}
    assert found_in(summary, "archive") == expected
    proof_report(**figures, found=sorted(what for what, *_ in expected))


def plant_in_columns(rows: pa.Table) -> tuple[pa.Table, dict[str, list[tuple[int, int]]]]:
    """As `planted`, but for a table too large for Python objects: only the rows around each place are rewritten."""
    cuts = [int(len(rows) * share) for share in (0, 0.2, 0.4, 0.6, 0.8, 1)]
    parts: list[pa.Table] = []
    places: dict[str, list[tuple[int, int]]] = {}
    for nth, what in enumerate(("lost", "duplicated", "out_of_order", "corrupted", "")):
        part = rows.slice(cuts[nth], cuts[nth + 1] - cuts[nth])
        first = {name: part.slice(0, 2)[name].to_pylist() for name in part.column_names}
        order = {"lost": [1], "duplicated": [0, 0, 1], "out_of_order": [1, 0]}.get(what, [0, 1])
        head = {name: [column[n] for n in order] for name, column in first.items()}
        if what == "out_of_order":
            head["partition"], head["offset"] = first["partition"], first["offset"]
        if what == "corrupted":
            head["value"][0] = bytes([head["value"][0][0] ^ 1]) + head["value"][0][1:]
        if what:
            hit = range(2) if what == "out_of_order" else range(1)
            places[what] = [(first["partition"][n], first["offset"][n]) for n in hit]
        parts += [pa.table(head, schema=part.schema), part.slice(2)]
    return pa.concat_tables(parts), places
