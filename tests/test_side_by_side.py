"""The tool that runs the tests side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import side_by_side


def test_what_an_earlier_run_has_proven_is_not_told_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "ROOT", tmp_path)
    monkeypatch.setattr(side_by_side, "WORK", tmp_path)
    (tmp_path / "proven-pipelines.json").write_text(json.dumps({"S1": {"test_old": "passed"}}))
    # There are no tests here: no part comes so far as to tell anything.
    assert side_by_side.run(tmp_path / "proven.json", []) != 0
    assert json.loads((tmp_path / "proven.json").read_text()) == {}
