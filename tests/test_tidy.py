"""The house style, as far as a program can see it."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "headrace"
MODULES = sorted(SOURCE.rglob("*.py"))
MODULE_LINES_MAX = 700
FUNCTION_LINES_MAX = 70
VAGUE_NAMES = ("Manager", "Helper", "Util", "Common", "Base", "Impl")
# Matched against what is committed, so the patterns are put together here and do not match this file.
UNFINISHED = re.compile("|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X")))
HOME_PATHS = re.compile("/(?:" + "|".join(("ho" + "me/", "ro" + "ot/", "wo" + "rk/", "Us" + "ers/")) + ")")
REGISTRIES = re.compile(
    "|".join(
        (
            "pypi" + r"\.org",
            "pythonhosted" + r"\.org",
            "npmjs" + r"\.(?:org|com)",
            "maven" + r"\.org",
            "deb" + r"\.debian",
        )
    )
)
VERSIONS_SERVED = re.compile(r"\bversions?\b.*\d", re.IGNORECASE)


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def committed() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git clone")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def calls(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func)


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_modules_are_one_idea_long() -> None:
    lengths = {short(path): len(path.read_text().splitlines()) for path in MODULES}
    assert {path: lines for path, lines in lengths.items() if lines >= MODULE_LINES_MAX} == {}


def test_functions_fit_on_a_screen() -> None:
    long = [
        f"{short(path)}:{function.lineno} {function.name}"
        for path in MODULES
        for function in functions(tree_of(path))
        if (function.end_lineno or 0) - function.lineno + 1 > FUNCTION_LINES_MAX
    ]
    assert long == []


def test_every_module_says_what_it_is_for() -> None:
    silent = [short(path) for path in MODULES if path.read_text().strip() and not ast.get_docstring(tree_of(path))]
    assert silent == []


def test_class_names_are_nouns_of_the_field() -> None:
    vague = [
        f"{short(path)} {node.name}"
        for path in MODULES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
        if any(re.search(part + "(?![a-z])", node.name) for part in VAGUE_NAMES)
    ]
    assert vague == []


def test_nothing_sleeps_in_the_broker() -> None:
    """The synchronous client and the command line may wait before they try again; the broker's loop never does."""
    inside = [path for path in MODULES if path.relative_to(SOURCE).parts[0] not in ("client", "cli")]
    sleeping = [
        f"{short(path)}:{line}" for path in inside for line, name in calls(tree_of(path)) if name == "time.sleep"
    ]
    assert sleeping == []


def test_only_the_command_line_prints() -> None:
    printing = [
        f"{short(path)}:{line}"
        for path in MODULES
        if SOURCE / "cli" not in path.parents
        for line, name in calls(tree_of(path))
        if name == "print"
    ]
    assert printing == []


def test_every_api_file_starts_with_the_versions_it_serves() -> None:
    unsaid = []
    for path in sorted((SOURCE / "kafka" / "api").glob("*.py")):
        opening = "\n".join((ast.get_docstring(tree_of(path)) or "").splitlines()[:4])
        if path.name != "__init__.py" and not VERSIONS_SERVED.search(opening):
            unsaid.append(short(path))
    assert unsaid == []


def lines_matching(pattern: re.Pattern[str], *, skip: tuple[str, ...] = ()) -> list[str]:
    found = []
    for path in committed():
        if short(path).startswith(skip):
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [f"{short(path)}:{n}" for n, line in enumerate(text.splitlines(), 1) if pattern.search(line)]
    return found


def test_nothing_is_left_unfinished() -> None:
    assert lines_matching(UNFINISHED) == []


def test_no_paths_of_one_machine() -> None:
    assert lines_matching(HOME_PATHS) == []


def test_no_registry_is_named() -> None:
    assert lines_matching(REGISTRIES) == []


def test_test_folders_are_no_packages() -> None:
    """tests/kafka or tests/http as a package would hide the real one from every test."""
    assert [short(path) for path in (ROOT / "tests").rglob("__init__.py")] == []


def test_test_files_have_names_of_their_own() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []
