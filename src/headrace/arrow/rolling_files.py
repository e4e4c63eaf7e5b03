"""Rows into a folder of Parquet files, a file at a time, for writers that may be killed at any moment.

A file is written as `<name>-<nnnnnn>.parquet.tmp`, synced, and renamed to `.parquet` when it is whole. Rows wait in
memory for at most `interval_ms` or until there are `file_rows` of them: that much a kill loses, and never more. What
has its name is complete; a `.tmp` that stays behind is to be ignored.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Final, Self

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.errors import OperatorError

FILE_ROWS: Final = 1_000_000
INTERVAL_MS: Final = 1_000
SUFFIX: Final = ".parquet"


class RollingFiles:
    """Safe for several threads. Use as a context manager, or close it."""

    def __init__(
        self,
        folder: str | Path,
        name: str,
        schema: pa.Schema,
        *,
        file_rows: int = FILE_ROWS,
        interval_ms: int = INTERVAL_MS,
        rising: tuple[str, ...] = (),
    ) -> None:
        """`rising` names whole-number columns that mostly rise: stored as differences they take little room."""
        self._folder = Path(folder)
        self._name = name
        self._schema = schema
        self._file_rows = file_rows
        self._interval_s = interval_ms / 1000
        self._encodings = dict.fromkeys(rising, "DELTA_BINARY_PACKED")
        self._repeated = [field.name for field in schema if pa.types.is_string(field.type)]
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = 0
        self._files = 0
        self._failure: OperatorError | None = None
        self._change = threading.Condition()
        self._writing = threading.Lock()
        self._closed = False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OperatorError(f"cannot make the folder {folder}: {error.strerror}") from None
        self._thread = threading.Thread(target=self._write_in_time, name=f"files of {name}", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, rows: pa.RecordBatch) -> None:
        """Take rows of the schema. A file that could not be written before is told here."""
        with self._change:
            self._check()
            assert not self._closed
            self._waiting.append(rows)
            self._waiting_rows += len(rows)
            full = self._waiting_rows >= self._file_rows
            self._change.notify()
        if full:
            self.flush()

    def flush(self) -> None:
        """Everything added so far is in files with their names when this returns."""
        with self._writing:
            with self._change:
                rows, self._waiting, self._waiting_rows = self._waiting, [], 0
            if rows:
                self._write(pa.Table.from_batches(rows, self._schema))
        self._check()

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._change.notify()
        self._thread.join()
        self.flush()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _write_in_time(self) -> None:
        """Runs in a thread of its own, so that rows do not wait for the next ones to be added."""
        while True:
            with self._change:
                self._change.wait_for(lambda: self._closed or self._waiting)
                self._change.wait_for(lambda: self._closed, self._interval_s)
                if self._closed:
                    return
            try:
                self.flush()
            except OperatorError:
                return

    def _write(self, table: pa.Table) -> None:
        path = self._folder / f"{self._name}-{self._files:06}{SUFFIX}"
        unfinished = path.with_name(path.name + ".tmp")
        try:
            with unfinished.open("wb") as file:
                pq.write_table(table, file, use_dictionary=self._repeated, column_encoding=self._encodings or None)
                file.flush()
                os.fsync(file.fileno())
            unfinished.rename(path)
        except OSError as error:
            self._failure = OperatorError(f"cannot write {path}: {error.strerror or error}")
            return
        self._files += 1
