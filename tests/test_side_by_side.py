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


def test_a_part_that_passed_says_one_line_and_one_that_failed_says_all_and_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(side_by_side, "ROOT", tmp_path)
    monkeypatch.setattr(side_by_side, "WORK", tmp_path)
    failed = (
        "E   assert 1 == 2\nFAILED tests/a.py::test_b[1-2] - assert\nFAILED tests/a.py::test_b[3] - assert\n1 failed"
    )
    said = {"wire": ("...\n3 passed in 1 s", 0), "shared": (failed, 1), "cli": ("Killed", 137), "empty": ("", 0)}
    commands = {name: ["sh", "-c", f"printf '%s' '{text}'; exit {code}"] for name, (text, code) in said.items()}
    lanes = side_by_side.Lanes(commands, "checks", 1)
    lanes.run()
    side_by_side.tell_all(lanes, 7.0)
    assert side_by_side.outcome(lanes) == 1
    told = capfd.readouterr().out.splitlines()
    assert told[:2] == ["4 parts, 1 at a time; what they say is in tests-*.log", "wire: 0 s; 3 passed in 1 s"]
    assert "E   assert 1 == 2" in told
    assert told[-3:-1] == [
        "all together: 7 s",
        "to run again what failed: make test ARGS='--layout shared tests/a.py::test_b'",
    ]
    assert told[-1].startswith("to run again what failed: make test  # cli did not come to its end")
