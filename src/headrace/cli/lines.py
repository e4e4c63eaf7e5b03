"""Lines from a file, a pipe or a keyboard, with word of when nothing has come for a while."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from typing import Final

from headrace.errors import OperatorError

CHUNK_BYTES: Final = 256 << 10
LINE_MAX_BYTES: Final = 64 << 20


def read_lines(descriptor: int, idle_seconds: float) -> Iterator[list[bytes]]:
    """Lines without their newlines, as many as one read brought; an empty list when none came for `idle_seconds`.

    After an empty list it waits without end for the next line: being idle is told once.
    """
    rest = b""
    wait: float | None = None
    while True:
        if not select.select([descriptor], [], [], wait)[0]:
            wait = None
            yield []
            continue
        chunk = os.read(descriptor, CHUNK_BYTES)
        if not chunk:
            break
        *lines, rest = (rest + chunk).split(b"\n") if rest else chunk.split(b"\n")
        if len(rest) > LINE_MAX_BYTES:
            raise OperatorError(f"a line of more than {LINE_MAX_BYTES} bytes: records so large cannot be sent")
        if lines:
            wait = idle_seconds
            yield lines
    if rest:
        yield [rest]
