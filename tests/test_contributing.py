"""What CONTRIBUTING.md, README.md and the pre-commit hooks tell a contributor to run is there."""

from __future__ import annotations

import re
from pathlib import Path

import check

ROOT = Path(__file__).resolve().parent.parent
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = {target for line in re.findall(r"^([a-z][a-z ]*):(?!=)", MAKEFILE, re.MULTILINE) for target in line.split()}


def test_every_make_target_that_is_named_is_there() -> None:
    unknown = []
    for file in (ROOT / "CONTRIBUTING.md", ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = file.read_text()
        blocks = "".join(re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
        named = {*re.findall(r"`make ([a-z]+)", text), *re.findall(r"^make ([a-z]+)", blocks, re.MULTILINE)}
        unknown += [f"{file.name}: make {target}" for target in sorted(named - TARGETS)]
    assert unknown == []


def test_every_file_that_is_named_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"\b(?:docs|src|tests|tools|bench)/[\w/.]*\w", text)
    assert [path for path in named if not (ROOT / path).exists() and path != "tests/x.py"] == []


def test_hooks_run_what_make_check_and_make_quick_run() -> None:
    entries = set(re.findall(r"^ +entry: (.+)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.MULTILINE))
    whole_tree = [" ".join(command) for command in check.commands(only_changed=False) if "pytest" in command]
    whole_tree += [" ".join(command) for command in check.commands(only_changed=False) if "lint-imports" in command[0]]
    expected = {command.replace(f"{check.BIN}/", ".venv/bin/") for command in whole_tree}
    assert entries == {*expected, ".venv/bin/python tools/check.py --changed", "make quick"}
