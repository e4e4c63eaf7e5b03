#!/usr/bin/env python3
"""What tests need beside the package and the tools of `make check`, read from their source: `needs.py tests/x.py ...`.

Prints what is needed (see `NEEDS`). Files, folders and node ids are given as to pytest; its other arguments say nothing
here, and without a file or folder all tests are meant. A need is an import of a package that only the extras `spark`
and `iceberg` bring, or a command that is started: in the test, in what it imports from `tests` and the package, or in
the fixtures of a conftest.py that it names. Of the package counts what is imported with a module, not what a function
imports when it is called.

`needs.py --without tests/x ...` lists the test files there that need nothing.

Needs only a Python 3.11 with its standard library, because it runs before anything is installed.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
TESTS: Final = ROOT / "tests"
SOURCE: Final = ROOT / "src"

SPARK: Final = "spark"
"""PySpark, and what our pipelines use beside it; the other needs are commands."""
NEEDS: Final = (SPARK, "java", "etcd", "ip", "kcat", "node", "strace")
SPARK_PACKAGES: Final = frozenset(
    {"pyspark", "py4j", "deltalake", "pyiceberg", "pandas", "matplotlib", "headrace.spark", "headrace.pipelines"}
)
NEED_OF_WORD: Final = {**{name: name for name in ("etcd", "ip", "kcat", "node", "strace")}, "--etcd": "etcd"}

IMPORT: Final = re.compile(r"^(?:import ([\w.]+)|from ([\w.]+) import (\([^)]*\)|.*))", re.MULTILINE)


def tests_of(arguments: Iterable[str]) -> list[Path]:
    """The test files that are meant; none if nothing here says so, as for all."""
    named = [ROOT / argument.partition("::")[0] for argument in arguments if not argument.startswith("-")]
    places = [place for place in named if place.exists()]
    return sorted({file for place in places for file in ([place] if place.is_file() else place.rglob("test_*.py"))})


def needs_of(test: Path) -> set[str]:
    found = _needs_of_all([test])
    asked = _fixtures_asked(ast.walk(_tree(test)))
    for folder in test.parents:
        found |= _needs_of_fixtures(folder / "conftest.py", asked)
        if folder == TESTS:
            break
    return found | {"java"} if SPARK in found else found


def _needs_of_all(modules: Iterable[Path]) -> set[str]:
    """Of these modules and of all that they import."""
    found: set[str] = set()
    waiting, seen = list(modules), set[Path]()
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            own, imported = _needs_and_imports(module)
            found |= own
            waiting += imported
    return found


@cache
def _needs_and_imports(module: Path) -> tuple[set[str], list[Path]]:
    found, names = set[str](), list[str]()
    if TESTS in module.parents:
        found |= _commands(_tree(module))
        names += (name for node in _counting(_tree(module)) for name, _ in _imported(node))
    else:
        for whole, package, parts in IMPORT.findall(module.read_text()):
            names += [whole] if whole else [f"{package}.{part}" for part in re.findall(r"\w+", parts)]
    found |= _needs_of_names(names)
    return found, [file for name in names for file in _files(name)]


def _needs_of_fixtures(conftest: Path, asked: set[str]) -> set[str]:
    """Of the fixtures that are asked for there, of those that they ask for, and of the functions that they use."""
    if not conftest.exists():
        return set()
    tree = _tree(conftest)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    waiting = [name for name, node in functions.items() if name in asked or "autouse" in ast.unparse(node)]
    used, found = set[str](), set[str]()
    while waiting:
        function = functions.pop(waiting.pop(), None)
        if function is not None:
            found |= _commands(function)
            used |= {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
            waiting += (used | _fixtures_asked([function])) & functions.keys()
    names = [name for node in _counting(tree) for name, bound in _imported(node) if bound in used]
    return found | _needs_of_names(names) | _needs_of_all(file for name in names for file in _files(name))


def _needs_of_names(names: Iterable[str]) -> set[str]:
    packages = {".".join(name.split(".")[:length]) for name in names for length in (1, 2)}
    return set() if SPARK_PACKAGES.isdisjoint(packages) else {SPARK}


def _commands(tree: ast.AST) -> set[str]:
    """Commands and options as they stand among arguments."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.List | ast.Tuple):
            given = node.elts
        elif isinstance(node, ast.Call) and not _last_name(node.func)[:1].isupper():
            given = node.args
        else:
            continue
        words = [one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        found |= {NEED_OF_WORD[word] for word in words if word in NEED_OF_WORD}
    return found


def _fixtures_asked(nodes: Iterable[ast.AST]) -> set[str]:
    """The arguments of functions, and what `usefixtures` and `getfixturevalue` name."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names |= {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
        elif isinstance(node, ast.Call) and _last_name(node.func) in ("usefixtures", "getfixturevalue"):
            names |= {str(one.value) for one in node.args if isinstance(one, ast.Constant)}
    return names


def _counting(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below, but what is imported for types alone."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING"):
            yield child
            yield from _counting(child)


def _imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """What an import brings, by its whole name, and the name it has here."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, (alias.asname or alias.name).partition(".")[0]) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from ((f"{node.module}.{alias.name}", alias.asname or alias.name) for alias in node.names)


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@cache
def _files(name: str) -> tuple[Path, ...]:
    """The files here behind a name: those of the packages on the way, and the module."""
    found: list[Path] = []
    for top in (TESTS, SOURCE):
        at = top
        for part in name.split("."):
            at /= part
            found += [file for file in (at.with_suffix(".py"), at / "__init__.py") if file.is_file()]
            if not at.is_dir():
                break
    return tuple(found)


@cache
def _tree(module: Path) -> ast.Module:
    return ast.parse(module.read_text(), str(module))


def main(arguments: list[str]) -> int:
    tests = tests_of(arguments)
    if "--without" in arguments:
        print(*(test.relative_to(ROOT) for test in tests if not needs_of(test)), sep="\n")
    elif tests:
        found = set[str]().union(*map(needs_of, tests))
        print(*(need for need in NEEDS if need in found))
    else:
        print(*NEEDS)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
