"""Stands in for the module `cython` where Cython is not installed: the code runs as Python, and hints mean nothing."""

from collections.abc import Callable
from typing import Final, TypeVar

Kind = TypeVar("Kind")

compiled: Final = False


def cclass(kind: Kind) -> Kind:
    return kind


def no_gc(kind: Kind) -> Kind:
    return kind


def freelist(_size: int) -> Callable[[Kind], Kind]:
    return no_gc
