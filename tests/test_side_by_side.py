"""The tool that runs the tests side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import side_by_side

from brokers import wait_for
from spark import process_tree


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


def test_when_the_checks_fail_parts_under_way_end_with_all_that_they_started_even_if_they_heed_no_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_by_side, "ROOT", tmp_path)
    monkeypatch.setattr(side_by_side, "WORK", tmp_path)
    monkeypatch.setattr(side_by_side, "ENDS_WITHIN_S", 0.5)
    # As a test that runs a pipeline within itself, and its JVM; and one that goes by itself, and leaves its child.
    commands = {
        "stubborn": "trap '' TERM; sleep 600 & echo $! > stubborn; wait",
        "parting": "(trap '' TERM; exec sleep 600) & echo $! > parting; trap 'echo > asked; exit 0' TERM; wait",
        "checks": "until [ -s stubborn ] && [ -s parting ]; do :; done; exit 1",
        "next": "echo > begun",
    }
    lanes = side_by_side.Lanes({name: ["sh", "-c", text] for name, text in commands.items()}, "checks", 3)
    lanes.run()
    assert lanes.codes == {"checks": 1, "stubborn": side_by_side.STOPPED, "parting": side_by_side.STOPPED}
    assert (tmp_path / "asked").exists()
    children = [int((tmp_path / name).read_text()) for name in ("stubborn", "parting")]
    wait_for("the children of parts to end", lambda: not any(map(process_tree.lives, children)))
