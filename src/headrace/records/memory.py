"""Bytes as kernels see them: buffers as arrays of numbers, copies, numbers of several bytes.

This is what kernels use that run as Python. Compiled ones have the same functions, on pointers and inlined, from
`memory.pxd`.
"""

from __future__ import annotations

from typing import Any


def octets(buffer: bytearray) -> Any:
    return buffer


def ints(buffer: bytearray) -> Any:
    return memoryview(buffer).cast("i")


def longs(buffer: bytearray) -> Any:
    return memoryview(buffer).cast("q")


def copy(out: Any, at: int, data: Any, start: int, size: int) -> None:
    out[at : at + size] = data[start : start + size]


def number(data: Any, pos: int, size: int) -> int:
    """A signed big-endian number of 2, 4 or 8 bytes."""
    return int.from_bytes(data[pos : pos + size], "big", signed=True)
