"""The house style, as far as a program can see it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "headrace"
MODULES = sorted(SOURCE.rglob("*.py"))
MODULE_LINES_LONG = 700
MODULE_LINES_SHORT = 60
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


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def nodes_of(tree: ast.Module) -> list[ast.AST]:
    return list(ast.walk(tree))


def committed() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git clone")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def calls(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in nodes_of(tree):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func)


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in nodes_of(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def dotted(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.Module) -> Iterator[str]:
    """Every name that an import statement brings in, with its module, wherever it stands."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def importers() -> dict[str, set[str]]:
    """By module the modules of the package that import it."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in MODULES:
        for name in imported(tree_of(path)):
            found[name].add(dotted(path))
    return found


def test_modules_that_may_hold_two_ideas_or_half_of_one_are_named() -> None:
    """One public idea a module. A length is a hint and no rule: this warns, a reader decides."""
    users, found = importers(), []
    for path in MODULES:
        lines, using = len(path.read_text().splitlines()), users[dotted(path)]
        if lines > MODULE_LINES_LONG:
            found.append(f"{short(path)}: {lines} lines, is there a second idea in it?")
        elif lines < MODULE_LINES_SHORT and path.name != "__init__.py" and len(using) == 1:
            found.append(f"{short(path)}: {lines} lines, and only {min(using)} imports it")
    if found:
        warnings.warn("\n".join(["one public idea a module?", *found]), stacklevel=1)


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
        for node in nodes_of(tree_of(path))
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


def test_the_way_of_a_message_leads_to_functions_that_are_there() -> None:
    text = (ROOT / "docs" / "DESIGN.md").read_text()
    way = " ".join(text.partition("## 1.")[2].partition("## 2.")[0].split())
    steps = re.findall(r"`([\w/]+\.py)`, `([\w.]+)`", way)
    assert len(steps) >= 10
    for path, name in steps:
        found: list[ast.stmt] = list(tree_of(SOURCE / path).body)
        for part in name.split("."):
            named = [node for node in found if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part]
            assert named, f"docs/DESIGN.md: {path} has no {name}"
            found = named[0].body


@pytest.mark.parametrize("document", ["DESIGN.md", "SIMULATOR.md", "GLOSSARY.md", "CLIENT.md", "SPARK.md"])
def test_files_that_a_document_names_are_there(document: str) -> None:
    named = re.findall(r"`(?:src/headrace/)?([\w/]+\.py)`", (ROOT / "docs" / document).read_text())
    missing = [path for path in named if not any((place / path).exists() for place in (SOURCE, ROOT))]
    assert not [path for path in missing if "/" in path]


def test_lines_of_documents_are_wrapped() -> None:
    generated = ("INVENTORY.md", "PROOF.md", "SETTINGS.md", "API.md", "CLI.md")
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        is_code = False
        for number, line in enumerate(path.read_text().splitlines(), 1):
            is_code ^= line.startswith("```")
            if path.name not in generated and not is_code and not line.startswith(("|", "    ")):
                assert len(line) <= 120 or "](" in line, f"{path.name}:{number} has {len(line)} characters"


def test_the_picture_of_the_rooms_is_current() -> None:
    ran = subprocess.run(
        [sys.executable, "tools/house.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert not ran.returncode, ran.stderr
