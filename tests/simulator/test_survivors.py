"""What is explained in survivors.toml is still there: an explanation outlives the code that it was about unnoticed."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "mutate.py"


def test_every_explained_survivor_is_a_mutant_of_the_code_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.spec_from_file_location("mutate", TOOL)
    assert found is not None
    assert found.loader is not None
    tool = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, "mutate", tool)
    found.loader.exec_module(tool)
    explained = tomllib.loads(tool.EXPLAINED.read_text())
    paths = {name.partition(":")[0] for name in explained}
    mutants = {mutant.name for path in paths for mutant in tool.mutants_of(tool.SOURCE / path)}
    assert set(explained) - mutants == set()
    assert all(why.endswith(".") for why in explained.values())
