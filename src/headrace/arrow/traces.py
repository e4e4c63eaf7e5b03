"""Trace records: when records were sent and when they were acknowledged. What `headrace pipeline report` reads.

A folder of Parquet files with a row for what went to a partition at once:

    producer         string
    topic            string
    partition        int32
    sent_at          timestamp[us, UTC]   when it was due: under a fixed rate a late start counts as latency
    acknowledged_at  timestamp[us, UTC]   when the answer was read, or the failure known
    records          int64
    bytes            int64                of keys and values
    error            string               null if it was acknowledged, else why it was not

The latency of a record is that of its row. Files get their names when they are whole; a killed producer's trace ends
early.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pyarrow as pa

from headrace.arrow.rolling_files import RollingFiles
from headrace.records.arrow import TIMESTAMP_TYPE

SCHEMA: Final = pa.schema(
    [
        ("producer", pa.string()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("sent_at", TIMESTAMP_TYPE),
        ("acknowledged_at", TIMESTAMP_TYPE),
        ("records", pa.int64()),
        ("bytes", pa.int64()),
        ("error", pa.string()),
    ]
)


def open_traces(folder: str | Path, producer: str) -> RollingFiles:
    """Takes record batches of SCHEMA; several producers may share the folder."""
    return RollingFiles(folder, f"{producer}-trace", SCHEMA)
