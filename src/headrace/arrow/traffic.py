"""Made-up traffic that looks like the real one, built a column at a time: orders, clicks, or plain bytes.

Orders and clicks are JSON objects with a key (a customer, a user). Few keys are busy and many are rare: the n-th
busiest has a share of 1 / n ** skew. Every record differs from all others of its producer. The same seed gives the same
traffic, but for its timestamps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.records.arrow import TIMESTAMP_TYPE, partitions_of

_COUNTRIES: Final = (("DE", 22), ("FR", 17), ("GB", 15), ("ES", 12), ("IT", 11), ("PL", 9), ("NL", 8), ("SE", 6))
_STATUSES: Final = (("paid", 86), ("pending", 9), ("refused", 4), ("returned", 1))
_REFERRERS: Final = (("search", 45), ("direct", 30), ("newsletter", 15), ("friend", 10))
_ITEMS: Final = 2_000


@dataclass(frozen=True, slots=True)
class Shape:
    """What the traffic is like. `value_bytes` is for plain bytes; without `keys` records have none."""

    kind: str = "orders"
    keys: int = 10_000
    skew: float = 1.1
    value_bytes: int = 100


class Traffic:
    """The traffic of one producer."""

    def __init__(self, shape: Shape, partition_count: int, *, seed: int, producer: int = 0) -> None:
        self._shape = shape
        self._partition_count = partition_count
        self._random = np.random.default_rng([seed, producer])
        self._producer = producer
        self._made = 0
        self._sticky = producer
        if shape.keys:
            name = {"orders": "customer", "clicks": "user", "bytes": "key"}[shape.kind]
            numbers = pa.array(np.arange(shape.keys)).cast(pa.string())
            padded = pc.utf8_lpad(numbers, len(str(shape.keys - 1)), "0")
            self._keys = pc.binary_join_element_wise(name, padded, "-")
            self._partitions_of_keys = partitions_of(self._keys.cast(pa.binary()), partition_count).to_numpy()
            weights = 1 / np.arange(1, shape.keys + 1) ** shape.skew
            self._busyness = np.cumsum(weights) / weights.sum()

    def chunk(self, count: int, from_us: int, to_us: int) -> pa.RecordBatch:
        """The next rows: `key`, `value`, `timestamp`, spread evenly over a span of time, and their `partition`."""
        chosen = None
        if self._shape.keys:
            # Rounding may leave the last share a little below one.
            chosen = np.minimum(np.searchsorted(self._busyness, self._random.random(count)), self._shape.keys - 1)
        times = pa.array(np.linspace(from_us, to_us, count, endpoint=False).astype(np.int64) // 1000 * 1000)
        timestamps = times.cast(TIMESTAMP_TYPE)
        keys = None if chosen is None else self._keys.take(pa.array(chosen))
        value = {"orders": self._orders, "clicks": self._clicks, "bytes": self._bytes}[self._shape.kind]
        columns = {"value": value(count, keys, timestamps), "timestamp": timestamps}
        if keys is not None:
            columns["key"] = keys.cast(pa.binary())
        columns["partition"] = pa.array(self._places(chosen, count), pa.int32())
        self._made += count
        return pa.RecordBatch.from_pydict(columns)

    def _places(self, chosen: Any, count: int) -> Any:
        if chosen is not None:
            return self._partitions_of_keys[chosen]
        # Without keys, chunks go to the partitions in turn.
        self._sticky += 1
        return np.full(count, self._sticky % self._partition_count, np.int32)

    def _orders(self, count: int, customers: Any, timestamps: Any) -> Any:
        cents = self._random.gamma(2.0, 2_500.0, count).astype(np.int64) + 99
        parts = [
            *('{"order":"', f"{self._producer}-", self._numbers(count), '"'),
            *((',"customer":"', customers, '"') if customers is not None else ()),
            *(',"country":"', self._choose(_COUNTRIES, count)),
            *('","item":"item-', _text(self._random.integers(_ITEMS, size=count))),
            *('","quantity":', _text(self._random.geometric(0.6, count))),
            *(',"price":', _text(cents // 100), ".", pc.utf8_lpad(_text(cents % 100), 2, "0")),
            *(',"status":"', self._choose(_STATUSES, count)),
            *('","at":"', _iso(timestamps), '"}'),
        ]
        return _join(parts)

    def _clicks(self, count: int, users: Any, timestamps: Any) -> Any:
        parts = [
            *('{"click":"', f"{self._producer}-", self._numbers(count), '"'),
            *((',"user":"', users, '"') if users is not None else ()),
            *(',"page":"/items/', _text(self._random.integers(_ITEMS, size=count))),
            *('","referrer":"', self._choose(_REFERRERS, count)),
            *('","spent_ms":', _text(self._random.lognormal(8.0, 1.2, count).astype(np.int64))),
            *(',"at":"', _iso(timestamps), '"}'),
        ]
        return _join(parts)

    def _bytes(self, count: int, keys: Any, timestamps: Any) -> Any:
        size = self._shape.value_bytes
        content = pa.py_buffer(self._random.bytes(count * size))
        offsets = pa.array(np.arange(count + 1, dtype=np.int32) * size)
        return pa.Array.from_buffers(pa.binary(), count, [None, offsets.buffers()[1], content])

    def _numbers(self, count: int) -> Any:
        return _text(np.arange(self._made, self._made + count))

    def _choose(self, weighted: Sequence[tuple[str, int]], count: int) -> Any:
        names, weights = zip(*weighted, strict=True)
        shares = np.cumsum(weights) / sum(weights)
        chosen = np.minimum(np.searchsorted(shares, self._random.random(count)), len(names) - 1)
        return pa.array(names).take(pa.array(chosen))


def _text(numbers: Any) -> Any:
    return pa.array(numbers).cast(pa.string())


def _iso(timestamps: Any) -> Any:
    """Each moment is written out once: a chunk has few different ones."""
    moments = timestamps.cast(pa.timestamp("ms", tz="UTC")).dictionary_encode()
    return pc.strftime(moments.dictionary, format="%Y-%m-%dT%H:%M:%SZ").take(moments.indices)


def _join(parts: Sequence[Any]) -> Any:
    return pc.binary_join_element_wise(*parts, "").cast(pa.binary())
