"""The line that shows how far a search has come."""

from __future__ import annotations

import os
import sys

import pytest

from headrace.cli import progress
from headrace.cli.progress import Progress
from proving import proves


def shown(monkeypatch: pytest.MonkeyPatch, *, shown: bool = True) -> str:
    """What a terminal gets of some work."""
    terminal, side = os.openpty()
    with os.fdopen(side, "w") as stderr, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        patch.setattr(progress, "EVERY_SECONDS", 0.0)
        with Progress("offsets", 200, shown=shown) as work:
            work.advance(50, "3 printed")
            work.hide()
            work.advance(150)
        os.write(side, b"end")
        found = b""
        while not found.endswith(b"end"):  # a terminal hands over what was written in parts, and later
            found += os.read(terminal, 10_000)
    os.close(terminal)
    return found.decode().removesuffix("end")


@proves("U1")
def test_long_work_shows_how_far_it_is_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.0)
    clear = "\r\x1b[K"
    first, hidden, last, after = shown(monkeypatch).removeprefix(clear).split(clear)
    assert first.startswith("[#####---------------]  25% of 200 offsets")
    assert first.endswith("3 printed")
    assert last == "[####################] 100% of 200 offsets"
    assert (hidden, after) == ("", "")


def test_quick_work_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FIRST_SECONDS", 3600.0)
    assert shown(monkeypatch) == ""
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.0)
    assert shown(monkeypatch, shown=False) == ""
