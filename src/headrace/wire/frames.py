"""Frames of the Kafka protocol: a four-byte length, not counting itself, then that many bytes.

`split` looks at the bytes received so far and copies nothing: it says where the complete frames are and how
many bytes the first incomplete one needs.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from headrace.errors import ProtocolError

LENGTH_BYTES: Final = 4

_length = struct.Struct(">i").unpack_from


class Frames(NamedTuple):
    """What a buffer holds: complete frames as (start, end) of their contents, and what follows them."""

    complete: list[tuple[int, int]]
    rest: int
    """Where the first incomplete frame, with its length, begins: everything before it is used up."""
    needed_bytes: int
    """How many bytes the incomplete frame has from `rest` on in all, its length included; 4 while that is unknown."""


def split(buffer: memoryview, filled: int, max_frame_bytes: int, pos: int = 0) -> Frames:
    """The frames in `buffer[pos:filled]`; a length below zero or above `max_frame_bytes` is a ProtocolError."""
    complete: list[tuple[int, int]] = []
    while filled - pos >= LENGTH_BYTES:
        (length,) = _length(buffer, pos)
        if not 0 <= length <= max_frame_bytes:
            raise ProtocolError(
                f"a frame of {length} bytes was announced; frames of 0 to {max_frame_bytes} bytes are accepted"
            )
        start = pos + LENGTH_BYTES
        if start + length > filled:
            return Frames(complete, pos, LENGTH_BYTES + length)
        pos = start + length
        complete.append((start, pos))
    return Frames(complete, pos, LENGTH_BYTES)
