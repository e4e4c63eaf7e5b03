"""Files of records: JSON lines as `consume --json` prints them (.jsonl, .ndjson, .json, with .gz behind), and Parquet.

The name says which. A file that is written has another name until it is whole and on disk, so one that has its name is
complete; what a kill leaves behind begins with `.tmp`.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final, Literal

from headrace.cli.produce import LINE_MAX_BYTES
from headrace.errors import OperatorError
from headrace.pipelines.durable import sync

Kind = Literal["json", "parquet"]

SUFFIXES: Final = ".jsonl, .ndjson or .json, each with .gz behind if you like, or .parquet"
GZIP_LEVEL: Final = 6
CHUNK_BYTES: Final = 1 << 20
ARROW_MISSING: Final = "Parquet needs pyarrow: pip install 'headrace[arrow]'; JSON lines (.jsonl) need nothing"


def file_kind(path: Path) -> Kind:
    name = path.name.lower()
    if name.endswith(".parquet"):
        return "parquet"
    if name.removesuffix(".gz").endswith((".jsonl", ".ndjson", ".json")):
        return "json"
    raise OperatorError(f"{path.name} does not say what kind of file it is: end it in {SUFFIXES}")


@contextmanager
def whole_file(path: Path, *, replace: bool) -> Iterator[Path]:
    """A name to write to; the file gets its own when all went well, and is deleted otherwise."""
    if path.exists() and not replace:
        raise OperatorError(f"{path} is there already; --force replaces it")
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path)
    except OSError as error:
        raise OperatorError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def open_lines(path: Path, mode: Literal["rb", "wb"]) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """A file to read lines from or write them to, and the one below it that knows its place: the same without gzip."""
    with path.open(mode) as below:
        if not path.name.lower().endswith(".gz"):
            yield below, below
            return
        with gzip.GzipFile(fileobj=below, mode=mode, compresslevel=GZIP_LEVEL, mtime=0) as file:
            yield file, below  # type: ignore[misc]


def count_lines(path: Path) -> int:
    with open_lines(path, "rb") as (file, _):
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(CHUNK_BYTES), b""))


def read_file_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Without their newlines. A line without end is refused, and what cannot be read or unpacked any further."""
    while line := _read_line(file):
        if len(line) > LINE_MAX_BYTES:
            raise OperatorError(f"a line of more than {LINE_MAX_BYTES} bytes: records so large cannot be sent")
        yield line.rstrip(b"\r\n")


def _read_line(file: IO[bytes]) -> bytes:
    try:
        return file.readline(LINE_MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise OperatorError(f"the file cannot be read any further: {error}") from None
