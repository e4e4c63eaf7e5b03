"""Format, lint, types, layers and tidiness: `check.py`; `check.py --changed`: lint and types of what changed alone.

What changed is what differs from the branch that this one left (its upstream, origin/main or main) and what is not in
git yet. Types are checked with PySpark where it is installed. Where it is not, what comes from it is Any: then a
subclass of it, a value of it that is returned, and a comment that only its types ask for are no errors.
"""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
BIN: Final = Path(sys.executable).parent
PYTHON_FILES: Final = ("src", "tests", "tools", "bench", "examples", "setup.py")
WITHOUT_SPARK: Final = ("--allow-subclassing-any", "--no-warn-return-any", "--no-warn-unused-ignores")
BASES: Final = ("@{upstream}", "origin/main", "main", "HEAD")


def changed() -> list[str]:
    """Python files that are there and are not as in the commit where this branch began."""
    bases = (_git("merge-base", "HEAD", base) for base in BASES)
    base = next((found[0] for found in bases if found), None)
    names = {*_git("ls-files", "--others", "--exclude-standard"), *(_git("diff", "--name-only", base) if base else ())}
    return sorted(
        name for name in names if name.startswith(PYTHON_FILES) and name.endswith(".py") and (ROOT / name).is_file()
    )


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []


def commands(*, only_changed: bool) -> list[list[str]]:
    files = changed() if only_changed else list(PYTHON_FILES)
    if not files:
        return []
    flags = () if importlib.util.find_spec("pyspark") else WITHOUT_SPARK
    found = [
        [str(BIN / "ruff"), "format", "--check", *files],
        [str(BIN / "ruff"), "check", *files],
        [str(BIN / "mypy"), *flags, *files],
    ]
    if not only_changed:
        found += [[str(BIN / "lint-imports"), "--no-logo"], [sys.executable, "-m", "pytest", "tests/test_tidy.py"]]
    return found


def main(arguments: list[str]) -> int:
    for command in commands(only_changed="--changed" in arguments):
        print("+", shlex.join(command), flush=True)
        done = subprocess.run(command, cwd=ROOT, check=False)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
