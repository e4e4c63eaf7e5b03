"""An archive of some million records: the cost of its key index, and a lookup beside a scan of the same archive.

    python bench/archive_query.py --records 5000000

Prints a line of JSON per step. Lookups and scans take turns in one process, so what else the machine does weighs on
both. Compaction is measured beside `deltalake`'s own on a copy, with lookups by offset in what each has made.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, write_deltalake

from headrace.arrow.archive import Archive, Work, list_files
from headrace.client.admin.query import RecordQuery
from headrace.pipelines import compact, index
from headrace.pipelines.summary import Progress
from headrace.records.arrow import HEADERS_TYPE, TIMESTAMP_TYPE
from headrace.spark import session

TOPIC: Final = "orders"
PARTITIONS: Final = 4
FILES: Final = 48
VALUE_BYTES: Final = 100
KEYS_PER_RECORD: Final = 0.2
START_US: Final = 1_794_700_800_000_000


def make_archive(folder: Path, count: int) -> None:
    """Files of one partition each, as the archive writes them; keys are drawn evenly, values do not compress."""
    draw = np.random.default_rng(1)
    rows = count // FILES
    for nth in range(FILES):
        partition, first = nth % PARTITIONS, nth // PARTITIONS * rows
        offsets = np.arange(first, first + rows)
        keys = pc.binary_join_element_wise(
            "key-", pa.array(draw.integers(0, int(count * KEYS_PER_RECORD), rows)).cast("string"), ""
        )
        values = pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(VALUE_BYTES), rows, [None, pa.py_buffer(draw.bytes(rows * VALUE_BYTES))]
        )
        times = pa.array(START_US + offsets * 1000, TIMESTAMP_TYPE)
        table = pa.table(
            {
                "topic": pa.repeat(TOPIC, rows),
                "date": times.cast(pa.timestamp("us")).cast(pa.date32()),
                "partition": pa.array(np.full(rows, partition, np.int32)),
                "offset": pa.array(offsets),
                "timestamp": times,
                "timestampType": pa.array(np.zeros(rows, np.int32)),
                "key": keys.cast(pa.binary()),
                "value": values.cast(pa.binary()),
                "headers": pa.nulls(rows, HEADERS_TYPE),
            }
        )
        write_deltalake(str(folder / "records"), table, mode="append", partition_by=["topic", "date"])


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    answer = work()
    return time.perf_counter() - began, answer


def look_up(folder: Path, wanted: RecordQuery) -> list[Any]:
    return list(Archive(folder).find(wanted, True, Work()))


def scan(folder: Path, key: bytes) -> Any:
    """What a person would write without an index: a filter that pyarrow pushes down."""
    dataset = DeltaTable(str(folder / "records")).to_pyarrow_dataset()
    return dataset.to_table(filter=(pc.field("topic") == TOPIC) & (pc.field("key") == key))


def by_key(folder: Path, count: int, lookups: int, scans: int) -> dict[str, Any]:
    draw = random.Random(2)
    looked, scanned = [], []
    for nth in range(lookups):
        key = b"key-%d" % draw.randrange(int(count * KEYS_PER_RECORD))
        seconds, found = timed(lambda key=key: look_up(folder, RecordQuery(TOPIC, key)))  # type: ignore[misc]
        looked.append(seconds)
        if nth % (lookups // scans) == 0:
            seconds, rows = timed(lambda key=key: scan(folder, key))  # type: ignore[misc]
            scanned.append(seconds)
            assert rows.num_rows == len(found)
    p50, scan_p50 = statistics.median(looked), statistics.median(scanned)
    return {
        "lookup_p50_ms": ms(p50),
        "lookup_max_ms": ms(max(looked)),
        "scan_p50_ms": ms(scan_p50),
        "ratio": round(scan_p50 / p50),
    }


def by_offset(folder: Path, count: int, lookups: int) -> dict[str, Any]:
    draw = random.Random(3)
    seconds = [
        timed(
            lambda: look_up(
                folder, RecordQuery(TOPIC, ids=((draw.randrange(PARTITIONS), draw.randrange(count // PARTITIONS)),))
            )
        )[0]
        for _ in range(lookups)
    ]
    return {"lookup_by_offset_p50_ms": ms(statistics.median(seconds))}


def ms(seconds: float) -> float:
    return round(seconds * 1000, 1)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--records", type=int, default=5_000_000)
    asked.add_argument("--lookups", type=int, default=40)
    asked.add_argument("--scans", type=int, default=4)
    asked.add_argument("--master", default="local[2]")
    given = asked.parse_args()
    count = given.records

    def look(folder: Path) -> dict[str, Any]:
        return by_key(folder, count, given.lookups, given.scans) | by_offset(folder, count, given.lookups)

    with tempfile.TemporaryDirectory() as scratch:
        folder, copy = Path(scratch) / "archive", Path(scratch) / "copy"
        make_archive(folder, count)
        spark = session.start("headrace bench", given.master, {"spark.log.level": "ERROR"})
        seconds, summary = timed(lambda: index.run(spark, index.IndexOptions(folder), Progress()))
        size = summary.facts["index_bytes"]
        told("index", build_s=seconds, rows=summary.facts["index_rows"], bytes_per_record=size / count)
        told("archived", files=len(list_files(Archive(folder).table)), **look(folder))
        shutil.copytree(folder, copy)
        seconds, _ = timed(lambda: compact.run(spark, compact.CompactOptions(folder), Progress()))
        spark.stop()
        told("compacted", compact_s=seconds, files=len(list_files(Archive(folder).table)), **look(folder))
        seconds, _ = timed(DeltaTable(str(copy / "records")).optimize.compact)
        told("optimized by deltalake", compact_s=seconds, files=len(list_files(Archive(copy).table)), **look(copy))


def told(step: str, **figures: float) -> None:
    print(json.dumps({"step": step, **{name: round(figure, 1) for name, figure in figures.items()}}), flush=True)


if __name__ == "__main__":
    main()
