"""Valid frames with random but sensible values, for every API and version: what fuzzers start from.

The same seed gives the same frames. Waits are short and topics few, so that a live broker answers them at once.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from crc32c import crc32c

from headrace.wire import codec, schema
from headrace.wire.api import KAFKA_APIS
from headrace.wire.message import Message
from headrace.wire.schema import Direction, Field, Struct

TOPICS = ("sample-a", "sample-b", "sample_c.1")
GROUPS = ("sample-group", "other-group")
TRANSACTIONAL_IDS = ("sample-transactions", "other-transactions")
CLIENT_ID = "sample-client"
MAX_PARTITIONS = 4


class Frame(NamedTuple):
    """A complete frame: length, header, body."""

    api_key: int
    version: int
    data: bytes


class Body(NamedTuple):
    api_key: int
    version: int
    direction: Direction
    data: bytes


def valid_request_frames(seed: int = 0, per_version: int = 2) -> Iterator[Frame]:
    """`per_version` complete request frames of every served (API, version)."""
    for nth, body in enumerate(valid_bodies("request", seed, per_version)):
        yield Frame(
            body.api_key,
            body.version,
            codec.write_request(body.api_key, body.version, nth + 1, CLIENT_ID, body.data),
        )


def valid_bodies(direction: Direction, seed: int = 0, per_version: int = 2) -> Iterator[Body]:
    """`per_version` bodies of every served (API, version), without header."""
    rng = random.Random(seed)
    encode = codec.encode_request if direction == "request" else codec.encode_response
    for api in KAFKA_APIS.values():
        for version in range(api.min_version, api.max_version + 1):
            spec = schema.load(api.key, version, direction)
            for _ in range(per_version):
                yield Body(api.key, version, direction, encode(api.key, version, message(spec, rng)))


def message(spec: Struct, rng: random.Random) -> Message:
    """A message of sensible values."""
    return Message(**{field.name: _value(field, rng) for field in spec.fields})


def record_batch(rng: random.Random) -> bytes:
    """A whole record batch of magic 2 with one to four records and a true CRC."""
    count = rng.randint(1, 4)
    records = b""
    for nth in range(count):
        value = rng.randbytes(rng.randint(0, 20))
        body = bytes((0, 0, nth * 2, 1, len(value) * 2)) + value + b"\0"
        records += bytes((len(body) * 2,)) + body
    checked = struct.pack(">hiqqqhii", 0, count - 1, 1_000, 1_000, -1, -1, -1, count) + records
    return struct.pack(">qiibI", 0, len(checked) + 9, -1, 2, crc32c(checked)) + checked


_BY_NAME: dict[str, Callable[[random.Random], Any]] = {
    "acks": lambda rng: rng.choice((-1, 1)),
    "assignor": lambda rng: "range",
    "config_names": lambda rng: "retention.ms",
    "configuration_keys": lambda rng: "retention.ms",
    "coordinator_keys": lambda rng: rng.choice(GROUPS),
    "count": lambda rng: rng.randint(1, MAX_PARTITIONS),
    "current_leader_epoch": lambda rng: -1,
    "error_code": lambda rng: rng.choice((0, 0, 3, 6)),
    "fetch_offset": lambda rng: rng.randint(0, 9),
    "generation_id": lambda rng: rng.randint(-1, 3),
    "group_id": lambda rng: rng.choice(GROUPS),
    "group_instance_id": lambda rng: rng.choice((None, "instance-1")),
    "groups": lambda rng: rng.choice(GROUPS),
    "groups_names": lambda rng: rng.choice(GROUPS),
    "host": lambda rng: "127.0.0.1",
    "isolation_level": lambda rng: rng.randint(0, 1),
    "key": lambda rng: rng.choice(GROUPS),
    "key_type": lambda rng: rng.randint(0, 1),
    "max_bytes": lambda rng: 1 << 20,
    "max_wait_ms": lambda rng: rng.randint(0, 20),
    "member_id": lambda rng: "",
    "min_bytes": lambda rng: rng.randint(0, 1),
    "name": lambda rng: rng.choice(TOPICS),
    "num_partitions": lambda rng: rng.randint(1, MAX_PARTITIONS),
    "partition_max_bytes": lambda rng: 1 << 20,
    "port": lambda rng: 9092,
    "producer_epoch": lambda rng: -1,
    "producer_id": lambda rng: -1,
    "protocol_type": lambda rng: "consumer",
    "rebalance_timeout_ms": lambda rng: 100,
    "replica_id": lambda rng: -1,
    "replication_factor": lambda rng: 1,
    "resource_name": lambda rng: rng.choice(TOPICS),
    "resource_type": lambda rng: 2,
    "session_epoch": lambda rng: -1,
    "session_id": lambda rng: 0,
    "session_timeout_ms": lambda rng: 6_000,
    "timestamp": lambda rng: rng.choice((-1, -2, -3, 1_000)),
    "topic": lambda rng: rng.choice(TOPICS),
    "topic_name": lambda rng: rng.choice(TOPICS),
    "topic_names": lambda rng: rng.choice(TOPICS),
    "transactional_ids": lambda rng: rng.choice(TRANSACTIONAL_IDS),
    "v3_and_below_transactional_id": lambda rng: rng.choice(TRANSACTIONAL_IDS),
}

_BY_KIND: dict[str, Callable[[random.Random], Any]] = {
    "bool": lambda rng: rng.random() < 0.5,
    "string": lambda rng: rng.choice(("", "range", "sample", "naïve-ключ")),
    "bytes": lambda rng: rng.randbytes(rng.randint(0, 24)),
    "records": record_batch,
    "uuid": lambda rng: rng.randbytes(16),
    "timedelta_i32": lambda rng: rng.randint(10, 500),
    "timedelta_i64": lambda rng: rng.randint(-1, 500),
    "datetime_i64": lambda rng: rng.randint(-1, 1 << 40),
}


def _value(field: Field, rng: random.Random) -> Any:
    if field.nullable and field.name not in _BY_NAME and rng.random() < 0.25:
        return None
    if field.is_array:
        return [_single(field, rng) for _ in range(rng.randint(0 if field.tag is not None else 1, 3))]
    return _single(field, rng)


def _single(field: Field, rng: random.Random) -> Any:
    if field.struct is not None:
        return message(field.struct, rng)
    if field.name == "transactional_id":
        return rng.choice((None, *TRANSACTIONAL_IDS) if field.nullable else TRANSACTIONAL_IDS)
    make = _BY_NAME.get(field.name) or _BY_KIND.get(field.kind)
    return make(rng) if make is not None else rng.randint(0, MAX_PARTITIONS - 1)
