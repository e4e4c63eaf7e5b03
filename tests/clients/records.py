"""Records as the client tests compare them, and the samples that every client writes and reads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Protocol

CODECS: Final = ("none", "gzip", "snappy", "lz4", "zstd")
FIRST_TIMESTAMP_MS: Final = 1_700_000_000_000


@dataclass(frozen=True, slots=True)
class Record:
    value: bytes | None
    key: bytes | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp_ms: int | None = None
    partition: int = 0
    offset: int | None = None


class Client(Protocol):
    """What the tests ask of each client library; every call opens and closes its own connections."""

    name: str
    sets_timestamps: bool
    null_headers: bool
    any_bytes_in_headers: bool

    def produce(self, bootstrap: str, topic: str, records: list[Record], codec: str = "none", acks: int = -1) -> None:
        """Write in this order, and return when all are acknowledged (or sent, with acks 0)."""

    def consume(self, bootstrap: str, counts: dict[str, int]) -> dict[str, list[Record]]:
        """Read that many records of each topic from its beginning, in the order they come per topic."""

    def offset_at(self, bootstrap: str, topic: str, timestamp_ms: int) -> int | None:
        """The first offset of partition 0 at or after that time, None where there is none."""


def samples_for(client: Client) -> list[Record]:
    """Keys, values, headers and times of all kinds, as far as this client can write them."""
    records = [
        Record(b"plain"),
        Record(b"with a key", key=b"key"),
        Record(None, key=b"tombstone"),
        Record(b"", key=b"empty value"),
        Record(b"empty key", key=b""),
        Record("größer, 水車".encode(), key="ключ".encode()),
        Record(b"headers", headers=(("one", b"1"), ("two", b"zwei"))),
        Record(b"empty header", headers=(("nothing", b""),)),
        Record(bytes(range(48, 127)) * 1500, key=b"long"),
        *(Record(b"small %d" % n, key=b"k%d" % (n % 3)) for n in range(20)),
    ]
    if client.null_headers:
        records.append(Record(b"null header", headers=(("null", None), ("twice", b"a"), ("twice", b"b"))))
    if client.any_bytes_in_headers:
        records.append(Record(bytes(range(256)), key=bytes(range(255, -1, -1)), headers=(("raw", b"\x00\xff,="),)))
    if client.sets_timestamps:
        # Every seventh one is older than the one before: time need not rise within a log.
        records = [
            replace(record, timestamp_ms=FIRST_TIMESTAMP_MS + 1000 * n - (5000 if n % 7 == 6 else 0))
            for n, record in enumerate(records)
        ]
    return records
