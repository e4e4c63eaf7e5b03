"""The public names: there when asked for, and not loaded before."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import headrace
import headrace.aio
from headrace.client.errors import NeverSent
from headrace.errors import HeadraceError, OperatorError
from proving import proves

SOURCE = Path(headrace.__file__).parent
ROOMS = ("client", "aio", "records/builder.py", "records/router.py", "records/codecs.py", "records/consumer_records.py")
"""Whose code a program runs that uses the public names."""


def test_every_public_name_is_there() -> None:
    for module in (headrace, headrace.aio):
        for name in module.__all__:
            assert getattr(module, name) is not None
            assert name in dir(module)
    assert headrace.Record is headrace.aio.Record


def test_a_name_that_is_not_there_is_refused_as_by_any_module() -> None:
    assert not hasattr(headrace, "Producers")
    assert not hasattr(headrace.aio, "Producers")


def test_the_client_is_loaded_when_it_is_asked_for() -> None:
    program = """
import sys, headrace
before = [name for name in sys.modules if name.startswith(("headrace.client", "headrace.records"))]
headrace.Producer
print(before, "headrace.client.producer.producer" in sys.modules, "headrace.client.consumer.consumer" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] True False"


def raised() -> set[type[HeadraceError]]:
    """Every error that is named in the code of the client."""
    found: set[type[HeadraceError]] = set()
    for path in (each for room in ROOMS for each in (SOURCE / room, *(SOURCE / room).rglob("*.py")) if each.is_file()):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
        names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
        things = [getattr(module, name, None) for name in names]
        found |= {thing for thing in things if isinstance(thing, type) and issubclass(thing, HeadraceError)}
    return found


@proves("U2")
def test_every_error_of_the_client_can_be_imported_from_headrace() -> None:
    # What was never sent is told as BrokerUnreachable or NoBroker; an OperatorError by what it is about.
    told = {kind for kind in raised() if not issubclass(kind, NeverSent)} - {OperatorError}
    assert {headrace.NoBroker, headrace.BatchTooLarge, headrace.RequestTimedOut} < told
    missing = {kind.__name__ for kind in told if getattr(headrace, kind.__name__, None) is not kind}
    assert not missing
    of_threads = {headrace.ForkedEngine, headrace.CalledWithin}
    missing = {kind.__name__ for kind in told - of_threads if getattr(headrace.aio, kind.__name__, None) is not kind}
    assert not missing
