"""What the JVM and Spark's Python workers say on standard error, without two things that tell nothing to anyone.

One is the warning of every start of Spark 4 about incubator modules, which no option silences. The other is the
traceback of a worker whose rows were no longer wanted, as after every LIMIT and every show().

And what a person waits for before the first row, which takes seconds: a line on a terminal, and nothing elsewhere.
"""

from __future__ import annotations

import os
import re
import select
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

STDERR: Final = 2
HELD_FOR_S: Final = 3.0
COUNTED_S: Final = 0.5
CLEAR_LINE: Final = "\r\x1b[2K"

_NOISE: Final = tuple(
    tuple(re.compile(line) for line in lines)
    for lines in (
        (rb"WARNING: Using incubator modules: ",),
        (
            rb"Traceback \(most recent call last\):\s*$",
            rb' +File "[^"]*pyspark/daemon\.py", line \d+, in manager',
            rb' +File "[^"]*pyspark/daemon\.py", line \d+, in worker',
            rb"BrokenPipeError: ",
        ),
    )
)

_OF_PROGRAM: Final = re.compile(rb"    ")


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Say what is waited for and since when, if standard error is a terminal; the line goes when the wait is over."""
    if not os.isatty(STDERR):
        yield
        return
    # Others' output is filtered meanwhile, and held back: this has a way of its own to the terminal.
    screen, over = os.dup(STDERR), threading.Event()
    counting = threading.Thread(target=_count, args=(screen, what, over), name="spark-waiting", daemon=True)
    counting.start()
    try:
        yield
    finally:
        over.set()
        counting.join()
        os.close(screen)


def _count(screen: int, what: str, over: threading.Event) -> None:
    began = time.monotonic()
    with suppress(OSError):
        while True:
            since = f" ({time.monotonic() - began:.0f} s)"
            most = (os.get_terminal_size(screen).columns or len(what) + len(since) + 1) - 1
            os.write(screen, f"{CLEAR_LINE}{what[: max(most - len(since), 0)]}{since}".encode())
            if over.wait(COUNTED_S):
                break
        os.write(screen, CLEAR_LINE.encode())


@contextmanager
def without_noise() -> Iterator[None]:
    """Programs started meanwhile speak through a filter, as long as they and this process live."""
    try:
        screen = os.dup(STDERR)
    except OSError:
        yield
        return
    ours, of_others = os.pipe()
    os.dup2(of_others, STDERR)
    os.close(of_others)
    threading.Thread(target=_pass_on, args=(ours, screen), name="spark-stderr", daemon=True).start()
    try:
        yield
    finally:
        os.dup2(screen, STDERR)


def _pass_on(source: int, screen: int) -> None:
    quiet = Quiet()
    while True:
        ready = select.select([source], [], [], HELD_FOR_S if quiet.holds else None)[0]
        said = os.read(source, 1 << 16) if ready else b""
        passed = quiet.take(said) if said else quiet.let_go()
        with suppress(OSError):
            while passed:
                passed = passed[os.write(screen, passed) :]
        if ready and not said:
            return


class Quiet:
    """Takes what is said, gives what is to be seen, and holds back lines that may turn out to be noise."""

    def __init__(self) -> None:
        self._held = b""

    @property
    def holds(self) -> bool:
        return bool(self._held)

    def let_go(self) -> bytes:
        held, self._held = self._held, b""
        return held

    def take(self, said: bytes) -> bytes:
        *whole_lines, unfinished = (self.let_go() + said).split(b"\n")
        lines = [line + b"\n" for line in whole_lines]
        passed = b""
        while lines:
            matched, is_noise = _longest_match(lines)
            if matched == len(lines) and not is_noise:
                break
            if not is_noise:
                passed += lines[0]
            lines = lines[matched if is_noise else 1 :]
        self._held = b"".join(lines) + unfinished
        return passed


def _longest_match(lines: list[bytes]) -> tuple[int, bool]:
    """How many of the first lines are as in some noise, and whether that is all of it."""
    return max(_match(noise, lines) for noise in _NOISE)


def _match(noise: tuple[re.Pattern[bytes], ...], lines: list[bytes]) -> tuple[int, bool]:
    """A traceback shows the lines of the program, or it does not: that depends on where PySpark was found."""
    expected = 0
    for matched, line in enumerate(lines):
        if expected and _OF_PROGRAM.match(line):
            continue
        if not noise[expected].match(line):
            return (matched if expected else 0), False
        expected += 1
        if expected == len(noise):
            return matched + 1, True
    return len(lines), False
