"""How fast a folder changes its layout: `python bench/converting.py [DIR]` from the clone's root.

Eight topics on the real disk, batches of 16 KB and of 1 KB, to `shared` and back, each beside a plain copy of the same
files (`cp`) in the same run. A conversion reads the folder, writes the new form, syncs it and compares both.
"""

import argparse
import asyncio
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import table

from headrace.records import kernel
from headrace.records.batch import read_header
from headrace.records.record import NewRecord
from headrace.settings.values import log_settings
from headrace.storage.log import TopicPartition
from headrace.storage.offline.convert import ConversionOptions, convert
from headrace.storage.segments.store import PartitionedStore
from headrace.system.clock import LoopClock
from headrace.system.disk import SystemDisk

TOPICS = 8
BATCHES_A_TURN = 8
VALUE_BYTES = 100
RECORD_BYTES = 110
SIZES = ((16 << 10, 400 << 20), (1 << 10, 100 << 20))
"""Bytes of a batch, and of all."""


def fill(disk: SystemDisk, clock: LoopClock, data: str, batch_bytes: int, total_bytes: int) -> None:
    store = PartitionedStore(disk, clock, data)
    store.open({})
    settings = log_settings({}, {"durability": "memory"})
    logs = [
        store.create(TopicPartition(f"topic-{n}", 0), hashlib.blake2b(b"%d" % n, digest_size=16).digest(), settings)
        for n in range(TOPICS)
    ]
    records: list[NewRecord] = [
        (1_750_000_000_000, None, os.urandom(VALUE_BYTES), []) for _ in range(batch_bytes // RECORD_BYTES)
    ]
    built = kernel.build(records)
    written = 0
    while written < total_bytes:
        for log in logs:
            for _ in range(BATCHES_A_TURN):
                view = memoryview(bytearray(built))
                log.append(view, read_header(view), 0)
                written += len(built)
        store.write_staged()
    store.close()


def copied_s(data: str) -> float:
    """Seconds for `cp` and `sync` of the same folder."""
    began = time.monotonic()
    subprocess.run(("cp", "-r", data, data + ".copy"), check=True)
    subprocess.run(("sync", "-f", data + ".copy"), check=True)
    seconds = time.monotonic() - began
    shutil.rmtree(data + ".copy")
    return seconds


def rows_for(folder: Path, batch_bytes: int, total_bytes: int) -> list[list[str]]:
    data = str(folder / "data")
    disk, clock = SystemDisk(), LoopClock(asyncio.new_event_loop())
    fill(disk, clock, data, batch_bytes, total_bytes)
    rows = []
    for layout in ("shared", "partitioned"):
        copy_s = copied_s(data)
        cpu_s = time.process_time()
        done = convert(disk, clock, data, ConversionOptions(layout), lambda *_: None)
        cpu_s = time.process_time() - cpu_s
        megabytes = done.size_bytes / 1e6
        rows.append(
            [
                f"{batch_bytes:,}",
                layout,
                f"{megabytes:.0f}",
                f"{megabytes / done.seconds:.0f}",
                f"{megabytes / cpu_s:.0f}",
                f"{done.seconds / copy_s:.1f}",
            ]
        )
    disk.close()
    shutil.rmtree(data)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python bench/converting.py", description=__doc__)
    parser.add_argument("folder", nargs="?", help="where to work, on the disk to be measured")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        rows = [row for batch_bytes, total in SIZES for row in rows_for(Path(scratch), batch_bytes, total)]
    print(table(["batch bytes", "to", "MB", "MB/s", "MB per CPU-s", "times cp"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
