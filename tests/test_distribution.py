"""What is published: what the package says of itself."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from headrace import __version__

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_licence_is_declared_and_there() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    assert PROJECT["license-files"] == ["LICENSE"]
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_version_stands_in_one_place() -> None:
    assert "version" not in PROJECT
    assigned = re.compile(rf"^[^#\n]*version[^#\n]*\b{re.escape(__version__)}\b", re.IGNORECASE | re.MULTILINE)
    files = [ROOT / "pyproject.toml", ROOT / "setup.py", *(ROOT / "src").rglob("*.py")]
    named = [str(file.relative_to(ROOT)) for file in files if assigned.search(file.read_text())]
    assert named == ["src/headrace/__init__.py"]


def test_every_extra_brings_something() -> None:
    assert [name for name, needed in PROJECT["optional-dependencies"].items() if not needed] == []
