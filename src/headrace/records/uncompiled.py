"""Stands in for the module `cython` where Cython is not installed: tells that the code runs as Python."""

from typing import Final

compiled: Final = False
