"""Standard output whose failure is told once, in one line: a full disk, a closed descriptor, a reader that has gone.

Only a write to it knows that it was standard output that failed: an OSError that a command ends with may be of any
file. After a failure nothing more is written, not even by the interpreter's exit, which would complain again.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, Final

from headrace.errors import OperatorError

DESCRIPTOR: Final = 1


class OutputFailed(OperatorError):
    """What was to be printed could not be written."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"cannot write to standard output: {error.strerror or error}")
        self.is_reader_gone = isinstance(error, BrokenPipeError)
        """`| head -1` has seen enough: that is no failure."""


class _Output(io.RawIOBase):
    """The descriptor; raises OutputFailed, and swallows what comes after."""

    def __init__(self, *, closed: bool) -> None:
        self.failure = OutputFailed(OSError(errno.EBADF, os.strerror(errno.EBADF))) if closed else None
        self._is_told = False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return DESCRIPTOR

    def isatty(self) -> bool:
        return self.failure is None and os.isatty(DESCRIPTOR)

    def write(self, data: Any, /) -> int:
        if not memoryview(data).nbytes:
            return 0  # click asks so whether bytes can be written, and a full device says no
        if self.failure is None:
            try:
                return os.write(DESCRIPTOR, data)
            except BlockingIOError:
                raise
            except OSError as error:
                self.failure = OutputFailed(error)
        if not self._is_told:
            self._is_told = True
            raise self.failure
        return memoryview(data).nbytes


@contextmanager
def told_output() -> Iterator[None]:
    """Let `sys.stdout` be one that raises OutputFailed; one that is not the process's own stays as it is."""
    before: IO[str] | None = sys.stdout
    if before is not sys.__stdout__:
        yield
        return
    text = sys.stdout = _wrap(_Output(closed=before is None), before)
    try:
        yield
        text.flush()
    finally:
        sys.stdout = before


def _wrap(output: _Output, before: IO[str] | None) -> io.TextIOWrapper:
    """Encoded and sent on as Python has set up its own."""
    if not isinstance(before, io.TextIOWrapper):
        return io.TextIOWrapper(io.BufferedWriter(output), encoding="utf-8")
    return io.TextIOWrapper(
        io.BufferedWriter(output),
        encoding=before.encoding,
        errors=before.errors,
        line_buffering=before.line_buffering or before.write_through,
    )
