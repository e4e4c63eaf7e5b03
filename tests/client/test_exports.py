"""The public names: there when asked for, and not loaded before."""

from __future__ import annotations

import subprocess
import sys

import headrace
import headrace.aio


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
