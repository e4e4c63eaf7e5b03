"""kcat as a test client: one process per call."""

from __future__ import annotations

import itertools
import subprocess

from clients.records import Record

DEADLINE_S = 120.0
KEY_END, RECORD_END = "\x01k\x01", "\x01r\x01"


def kcat(*arguments: str, stdin: bytes = b"") -> bytes:
    done = subprocess.run(
        ["kcat", *arguments], input=stdin, capture_output=True, timeout=DEADLINE_S, check=False
    )  # fmt: skip
    assert done.returncode == 0, f"kcat {' '.join(arguments)}: {done.stderr.decode()}"
    return done.stdout


def has_null(record: Record) -> bool:
    return record.value is None or record.key is None


class Kcat:
    """An empty key or value is sent as null with -Z, as empty without: runs of each kind go out together."""

    name = "kcat"
    sets_timestamps = False
    null_headers = False
    any_bytes_in_headers = False

    def produce(self, bootstrap: str, topic: str, records: list[Record], codec: str = "none", acks: int = -1) -> None:
        for (partition, headers, nulls), run in itertools.groupby(
            records, key=lambda r: (r.partition, r.headers, has_null(r))
        ):
            command = ["-P", "-b", bootstrap, "-t", topic, "-p", str(partition), "-z", codec, "-X", f"acks={acks}"]
            command += ["-K", KEY_END, "-D", RECORD_END, *(["-Z"] if nulls else [])]
            for name, value in headers:
                assert value is not None
                command += ["-H", f"{name}={value.decode()}"]
            sent = b"".join(
                (r.key or b"") + KEY_END.encode() + (r.value or b"") + RECORD_END.encode() for r in run
            )  # fmt: skip
            kcat(*command, stdin=sent)

    def consume(self, bootstrap: str, counts: dict[str, int]) -> dict[str, list[Record]]:
        read = {}
        for topic, count in counts.items():
            form = "%T %K %S %p %o\\n%h\\n%k%s\\n"
            where = ["-C", "-b", bootstrap, "-t", topic, "-p", "0", "-o", "beginning", "-c", str(count), "-q"]
            read[topic] = parse(kcat(*where, "-f", form))
        return read

    def offset_at(self, bootstrap: str, topic: str, timestamp_ms: int) -> int | None:
        where = ["-C", "-b", bootstrap, "-t", topic, "-p", "0", "-o", f"s@{timestamp_ms}", "-c", "1", "-e", "-q"]
        said = kcat(*where, "-f", "%o")
        return int(said) if said else None


def parse(output: bytes) -> list[Record]:
    records = []
    while output:
        numbers, headers, output = output.split(b"\n", 2)
        timestamp_ms, key_bytes, value_bytes, partition, offset = map(int, numbers.split())
        key, output = output[: max(key_bytes, 0)], output[max(key_bytes, 0) :]
        value, output = output[: max(value_bytes, 0)], output[max(value_bytes, 0) + 1 :]
        records.append(
            Record(
                None if value_bytes < 0 else value,
                None if key_bytes < 0 else key,
                tuple(header_of(part) for part in headers.split(b",") if part),
                timestamp_ms,
                partition,
                offset,
            )
        )
    return records


def header_of(text: bytes) -> tuple[str, bytes | None]:
    name, _, value = text.partition(b"=")
    return name.decode(), None if value == b"NULL" else value
