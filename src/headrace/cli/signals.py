"""SIGTERM and ctrl-C for commands that have something to end well."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from headrace.cli import EXIT_INTERRUPTED, EXIT_TERMINATED


class Terminated(BaseException):
    """SIGTERM has come; like KeyboardInterrupt, no error that anything may catch on the way."""


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises Terminated; a second one ends the process as it would any other."""

    def terminate(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Interruption:
    """Use as a context manager. The first ctrl-C or SIGTERM is noted in `exit_code`, and a second raises."""

    _CODES: Final = {signal.SIGINT: EXIT_INTERRUPTED, signal.SIGTERM: EXIT_TERMINATED}

    def __init__(self) -> None:
        self.exit_code = 0

    def __enter__(self) -> Interruption:
        self._before = {number: signal.signal(number, self._note) for number in self._CODES}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        if self.exit_code:
            raise KeyboardInterrupt
        self.exit_code = self._CODES[signal.Signals(number)]
