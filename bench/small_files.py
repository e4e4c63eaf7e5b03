"""A day of one-minute batches in an archive, with and without `--merge`: files, what merging costs, and queries.

    python bench/small_files.py --records 500

Batches are written and committed as the archive's sink does it, 1440 of them, without a broker: each leaves a file for
every partition. The two archives grow in turns, minute by minute, in one process; queries take turns too. Prints a line
of JSON per step. What was merged is removed a day later, so the disk holds both for that long: `mb_on_disk`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable
from pyspark.sql import functions as F

from headrace.arrow.archive import Archive, Work, list_files
from headrace.arrow.history import History, read_part
from headrace.client.admin.query import RecordQuery
from headrace.pipelines import archive_tables, delta
from headrace.pipelines.archive_files import FileSet
from headrace.pipelines.archive_sink import ArchiveWriter, FilesWritten
from headrace.pipelines.archive_tables import RECORD_COLUMNS, RECORDS, RECORDS_SCHEMA
from headrace.pipelines.small_files import MergeOptions, SmallFiles
from headrace.spark import session

TOPIC: Final = "orders"
PARTITIONS: Final = 4
MINUTES: Final = 1440
VALUE_BYTES: Final = 100
START_US: Final = 1_794_700_800_000_000
INSIDE: Final = pa.schema([field for field in RECORDS_SCHEMA if field.name not in ("topic", "date")])
ROWS: Final = pa.schema([RECORDS_SCHEMA.field(name) for name in RECORD_COLUMNS])


class Day:
    """An archive that is filled minute by minute."""

    def __init__(self, folder: Path, records: int, merges: bool) -> None:
        self.folder = folder
        self.name = "merged" if merges else "not merged"
        self._records = records
        self._small = SmallFiles(folder, MergeOptions()) if merges else None
        self.commits: list[float] = []
        self.merging_s = 0.0
        archive_tables.make_records(folder / RECORDS)
        self._writer = ArchiveWriter(folder, "q", delta.to_spark(ROWS))

    def minute(self, number: int, batches: list[pa.RecordBatch]) -> None:
        files = FileSet(self.folder / RECORDS, f"q-{number:08}-00000", INSIDE, by_date=True)
        for rows in batches:
            files.add(rows)
        message = FilesWritten(tuple(files.close()), ())
        self.commits.append(timed(lambda: self._writer.commit([message], number))[0])
        if self._small is not None:
            small = self._small
            self.merging_s += timed(lambda: [None for _ in iter(small.merge_some, False)])[0]

    def told(self) -> dict[str, Any]:
        files = list_files(DeltaTable(str(self.folder / RECORDS)))
        on_disk = list((self.folder / RECORDS).glob("topic=*/*/*.parquet"))
        facts: dict[str, Any] = {
            "archive": self.name,
            "files": len(files),
            "records": sum(file.rows for file in files),
            "mb": mb(sum(file.size_bytes for file in files)),
            "mb_on_disk": mb(sum(path.stat().st_size for path in on_disk)),
            "commit_ms_first_hour": ms(statistics.median(self.commits[:60])),
            "commit_ms_last_hour": ms(statistics.median(self.commits[-60:])),
        }
        if self._small is not None:
            facts |= {"files_merged": self._small.merged, "merging_s": round(self.merging_s, 1)}
        return facts


def minute(number: int, records: int, draw: np.random.Generator) -> list[pa.RecordBatch]:
    first = number * records
    offsets = np.arange(first, first + records)
    times = pa.array(START_US + number * 60_000_000 + np.arange(records) * (60_000_000 // records))
    batches = []
    for partition in range(PARTITIONS):
        drawn = pa.py_buffer(draw.bytes(records * VALUE_BYTES))
        values = pa.FixedSizeBinaryArray.from_buffers(pa.binary(VALUE_BYTES), records, [None, drawn])
        columns = {
            "topic": pa.repeat(TOPIC, records),
            "partition": pa.array(np.full(records, partition, np.int32)),
            "offset": pa.array(offsets),
            "timestamp": times.cast(RECORDS_SCHEMA.field("timestamp").type),
            "timestampType": pa.array(np.zeros(records, np.int32)),
            "key": pa.array([b"key-%d" % (n % 1000) for n in offsets.tolist()], pa.binary()),
            "value": values.cast(pa.binary()),
            "headers": pa.nulls(records, RECORDS_SCHEMA.field("headers").type),
        }
        batches.append(pa.RecordBatch.from_pydict(columns, ROWS))
    return batches


def whole_history(folder: Path) -> int:
    history = History(folder)
    spans = {partition: (0, end) for (_, partition), end in history.ends.items()}
    parts = history.parts(TOPIC, spans)
    return sum(len(rows) for part in parts for rows in read_part(part, ("partition", "offset", "value")))


def by_offset(folder: Path, records: int) -> int:
    wanted = RecordQuery(TOPIC, ids=((1, records * MINUTES // 3),))
    return len(list(Archive(folder).find(wanted, True, Work())))


def by_hour(folder: Path) -> int:
    from_ms = START_US // 1000 + 7 * 3_600_000
    wanted = RecordQuery(TOPIC, from_ms=from_ms, to_ms=from_ms + 60_000)
    return len(list(Archive(folder).find(wanted, True, Work())))


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    answer = work()
    return time.perf_counter() - began, answer


def ms(seconds: float) -> float:
    return round(seconds * 1000, 1)


def mb(size_bytes: int) -> float:
    return round(size_bytes / 1e6, 1)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--records", type=int, default=500, help="of each partition in a minute")
    asked.add_argument("--minutes", type=int, default=MINUTES)
    asked.add_argument("--runs", type=int, default=5)
    asked.add_argument("--master", default="local[2]")
    given = asked.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        draw = np.random.default_rng(1)
        days = [Day(Path(scratch) / str(merges), given.records, merges) for merges in (False, True)]
        for number in range(given.minutes):
            batches = minute(number, given.records, draw)
            for day in days:
                day.minute(number, batches)
        for day in days:
            print(json.dumps(day.told()), flush=True)
        spark = session.start("headrace bench", given.master, {"spark.log.level": "ERROR"})

        def by_spark(folder: Path) -> int:
            rows = delta.read(spark, folder / RECORDS)
            return int(rows.agg(F.count("value"), F.max("offset")).collect()[0][0])

        queries: dict[str, Callable[[Path], int]] = {
            "whole history (headrace.arrow)": whole_history,
            "count of values (Spark)": by_spark,
            "one record by offset": lambda folder: by_offset(folder, given.records),
            "a minute by time": by_hour,
        }
        for name, query in queries.items():
            taken: dict[str, list[float]] = {day.name: [] for day in days}
            for _ in range(given.runs):
                answers = []
                for day in days:
                    seconds, answer = timed(lambda query=query, day=day: query(day.folder))  # type: ignore[misc]
                    taken[day.name].append(seconds)
                    answers.append(answer)
                assert len(set(answers)) == 1, answers
            print(json.dumps({"query": name, **{f"{key} ms": ms(statistics.median(v)) for key, v in taken.items()}}))
        spark.stop()


if __name__ == "__main__":
    main()
