"""What the kernels share stands once for Python and once for C: both say the same."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import headrace.records
from headrace.records import batch, partitioner

RECORDS = Path(headrace.records.__path__[0])
SAME = {
    "varints": {"long_varint", "varint", "skip", "skip_headers", "varint_size", "put_varint"},
    "partitioner": {"murmur2"},
}


def of_python(name: str) -> dict[str, list[str]]:
    """The lines of each function, without its docstring."""
    text = (RECORDS / f"{name}.py").read_text()
    found = {}
    for function in ast.parse(text).body:
        if isinstance(function, ast.FunctionDef):
            first = function.body[1 if ast.get_docstring(function) else 0]
            found[function.name] = text.splitlines()[first.lineno - 1 : function.end_lineno]
    return found


def of_c(name: str) -> dict[str, list[str]]:
    """The lines of each function, without declarations."""
    text = (RECORDS / f"{name}.pxd").read_text()
    parts = re.findall(r"^cdef inline [^\n]*?(\w+)\([^\n]*\n((?: +[^\n]*\n)+)", text, re.MULTILINE)
    return {name: [line for line in body.splitlines() if not line.startswith("    cdef ")] for name, body in parts}


@pytest.mark.parametrize("name", SAME)
def test_inlined_functions_are_those_of_python(name: str) -> None:
    python, inlined = of_python(name), of_c(name)
    assert {function for function in inlined if inlined[function] == python[function]} == SAME[name]


def test_the_numbers_of_a_batch_are_those_of_python() -> None:
    text = (RECORDS / "batch.pxd").read_text()
    numbers = re.findall(r"^    (\w+) = (\w+)$", text, re.MULTILINE)
    (most,) = re.findall(r"#define HEADRACE_MOST (\w+)LL", text)
    told = {name: int(number, 0) for name, number in [*numbers, ("MOST", most)]}
    assert len(told) == 13
    assert told == {name: getattr(batch, name) for name in told}


def test_the_numbers_of_murmur2_are_those_of_python() -> None:
    text = (RECORDS / "partitioner.pxd").read_text()
    numbers = re.findall(r"#define HEADRACE_MURMUR_(\w+) (\w+)ULL", text)
    assert {name: int(number, 0) for name, number in numbers} == {
        name: getattr(partitioner, name) for name in ("SEED", "FACTOR", "HALF_WORD")
    }
