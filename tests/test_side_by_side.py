"""The tool that runs all tests in two processes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parent.parent / "tools" / "side_by_side.py"


def test_what_an_earlier_run_has_proven_is_not_told_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.spec_from_file_location("side_by_side", TOOL)
    assert found is not None
    assert found.loader is not None
    tool = importlib.util.module_from_spec(found)
    found.loader.exec_module(tool)
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "WORK", tmp_path)
    (tmp_path / "proven-pipelines.json").write_text(json.dumps({"S1": {"test_old": "passed"}}))
    # There are no tests here: no part comes so far as to tell anything.
    assert tool.run(tmp_path / "proven.json", []) != 0
    assert json.loads((tmp_path / "proven.json").read_text()) == {}
