"""Which row it was that a topic has refused because it is too large."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from headrace.arrow.write import WriteFailed
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.operations import describe_configs
from headrace.errors import ErrorCode, OperatorError

LIMIT: Final = "max.message.bytes"


def name_large_row(
    cluster: Cluster, topic: str, rows: pa.RecordBatch, failed: WriteFailed, where: Callable[[int], str]
) -> None:
    """OperatorError for the largest of the rows that were not taken, if it is that one which is too large. `where` says
    of a row, by its number among these, whence it came."""
    if failed.kafka_code != ErrorCode.MESSAGE_TOO_LARGE:
        return
    names = [name for name in ("key", "value") if name in rows.schema.names]
    sizes = reduce(pc.add, (pc.fill_null(pc.binary_length(rows[name]), 0) for name in names))
    refused = pc.if_else(pc.is_null(failed.written["offset"]), sizes, -1)
    size_bytes = pc.max(refused).as_py()
    number = pc.index(refused, size_bytes).as_py()
    key = rows["key"][number].as_py() if "key" in names else None
    configs = {each.name: each.value for each in describe_configs(cluster, "topic", topic)}
    limit = configs.get(LIMIT) or "0"
    if size_bytes > int(limit):
        raise OperatorError(
            f"{where(number)}, with key {key!r}, has {size_bytes} bytes, and topic {topic!r} takes {limit} in a batch "
            f"({LIMIT}); leave the row out, or `headrace config set topic {topic} {LIMIT}=...`"
        ) from None
