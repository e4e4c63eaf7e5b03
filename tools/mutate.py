#!/usr/bin/env python
"""Change the code where records could be lost, one small thing at a time, and see what finds it.

    tools/mutate.py --rooms partitions,replication [--only NAME.py] [--tests tests/replication] [--seeds 40] [--again]

A mutant is one comparison turned, one condition dropped, one number off by one, one call left out. First the tests run
that enter the changed function, the quickest first; then seeds of the simulator. What nothing finds is a survivor: a
check that no test needs, or a change that means the same. `tests/simulator/survivors.toml` explains those of the second
kind.

Everything runs in children of this one process, forked after all is imported; a mutant is put into the function's code
there, and no file is ever changed. A file that changes meanwhile ends the run, because the mutant would be one of other
code than was imported. What is known is kept in `.work/mutants.jsonl`, by function and change, and is not run again
unless asked for. A fork and a swapped code object cost a hundredth of a second, a new process as the common mutation
tools use it two seconds: that is why this is not one of them.
"""

from __future__ import annotations

import argparse
import ast
import copy
import functools
import importlib
import io
import json
import logging
import os
import re
import signal
import sys
import time
import tomllib
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
KNOWN = ROOT / ".work" / "mutants.jsonl"
EXPLAINED = ROOT / "tests" / "simulator" / "survivors.toml"
TESTS_MAX = 250
"""Tests of one mutant, the quickest of those that enter the function."""
CHILD_SECONDS = 180
SEED_SECONDS = 2.0
"""Of a child, for each seed that it is given; one that takes longer has been brought to a standstill."""
PASSED, FAILED, HUNG = 0, 1, 2

ROOMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "partitions": (
        ("partitions/*.py",),
        ("tests/partitions", "tests/replication", "tests/cluster/test_participant.py"),
    ),
    "replication": (("replication/*.py",), ("tests/replication", "tests/cluster/test_participant.py")),
    "storage": (
        (
            "storage/commit*.py",
            "storage/segments/recovery.py",
            "storage/commitlog/recovery.py",
            "storage/commitlog/commitlog.py",
        ),
        ("tests/storage",),
    ),
    "cluster": (("cluster/isr_writer.py", "cluster/controller_core.py"), ("tests/cluster", "tests/placement")),
    "groups": (
        ("groups/*.py", "coordinators/*.py"),
        ("tests/groups", "tests/coordinators", "tests/kafka_protocol/test_group_loading.py"),
    ),
}
"""What is changed in a room, and the tests that stand for it."""

TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OTHER_CALL = {"min": "max", "max": "min", "any": "all", "all": "any"}
ONLY_TELLS = re.compile(r"(log|logger|logging)\.(debug|info|warning|error|exception)|say")
"""Left out, they change nothing that a test should insist on."""


@dataclass(frozen=True, slots=True)
class Mutant:
    path: str
    function: str
    line: int
    change: str
    nth: int
    """Among the changes of this function that read the same."""

    @property
    def name(self) -> str:
        return f"{self.path}:{self.function}: {self.change}" + (f" ({self.nth + 1})" if self.nth else "")


@dataclass(slots=True)
class Verdict:
    name: str
    line: int
    found_by: str
    """A test, `seed 17`, or nothing."""


# What can be changed.


def _changes(function: ast.AST) -> Iterator[tuple[ast.AST, str, Callable[[ast.AST], None]]]:
    """Places of a function with what is done there: the node, how it reads, and the act on a copy of that node."""
    for node in ast.walk(function):
        if isinstance(node, ast.Compare):
            for at, operator in enumerate(node.ops):
                turned = TURNED[type(operator)]
                yield node, f"{ast.unparse(node)} -> {turned.__name__}", functools.partial(_turn, at=at, to=turned)
        if isinstance(node, ast.BoolOp):
            for at, operand in enumerate(node.values):
                if _is_nothing(operand):
                    continue  # `or ""` left out is still empty
                told = f"{ast.unparse(node)} -> without {ast.unparse(operand)}"
                yield node, told, functools.partial(_without, at=at)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node, f"{ast.unparse(node)} -> not not", _twice_not
        if isinstance(node, ast.If) and not node.orelse and _leaves(node.body[-1]):
            yield node, f"if {ast.unparse(node.test)} -> never", _never
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub) and _is_number(node.right):
            yield node, f"{ast.unparse(node)} -> one less", functools.partial(_shift, by=-1)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in OTHER_CALL:
            yield node, f"{ast.unparse(node)} -> {OTHER_CALL[node.func.id]}", _other_call
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not _only_tells(node.value):
            yield node, f"{ast.unparse(node)} -> left out", _leave_out


def _is_nothing(node: ast.AST) -> bool:
    """An empty literal, which is as false as what would stand in its place."""
    return (isinstance(node, ast.Constant) and not node.value) or (isinstance(node, ast.Dict) and not node.keys)


def _only_tells(call: ast.Call) -> bool:
    return ONLY_TELLS.fullmatch(ast.unparse(call.func)) is not None


def _turn(node: ast.AST, at: int, to: type[ast.cmpop]) -> None:
    assert isinstance(node, ast.Compare)
    node.ops[at] = to()


def _without(node: ast.AST, at: int) -> None:
    assert isinstance(node, ast.BoolOp)
    # The one that is left out still has to bind its names.
    neutral = ast.Constant(isinstance(node.op, ast.And))
    node.values[at] = ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), [node.values[at], neutral])


def _twice_not(node: ast.AST) -> None:
    assert isinstance(node, ast.UnaryOp)
    node.operand = ast.UnaryOp(ast.Not(), node.operand)


def _leaves(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Return | ast.Raise | ast.Continue | ast.Break)


def _never(node: ast.AST) -> None:
    assert isinstance(node, ast.If)
    node.test = ast.BoolOp(ast.And(), [node.test, ast.Constant(False)])


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int and node.value > 0


def _shift(node: ast.AST, by: int) -> None:
    assert isinstance(node, ast.BinOp)
    assert isinstance(node.right, ast.Constant)
    assert isinstance(node.right.value, int)
    node.right = ast.Constant(node.right.value + by)


def _other_call(node: ast.AST) -> None:
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Name)
    node.func.id = OTHER_CALL[node.func.id]


def _leave_out(node: ast.AST) -> None:
    assert isinstance(node, ast.Expr)
    node.value = ast.Constant(None)


def _functions(tree: ast.AST, owner: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """The functions of a module and of its classes, by qualified name; those within functions are part of them."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{owner}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{owner}{node.name}", node


def mutants_of(path: Path) -> Iterator[Mutant]:
    for name, function in _functions(ast.parse(path.read_text())):
        counted: Counter[str] = Counter()
        for node, change, _ in _changes(function):
            yield Mutant(str(path.relative_to(SOURCE)), name, getattr(node, "lineno", 0), change, counted[change])
            counted[change] += 1


def changed_code(mutant: Mutant) -> types.CodeType:
    """The code of the mutant's function."""
    tree = copy.deepcopy(ast.parse((SOURCE / mutant.path).read_text()))
    function = next(node for name, node in _functions(tree) if name == mutant.function)
    alike = [(node, act) for node, change, act in _changes(function) if change == mutant.change]
    node, act = alike[mutant.nth]
    act(node)
    module = compile(ast.fix_missing_locations(tree), str(SOURCE / mutant.path), "exec")
    return next(code for code in _codes(module) if code.co_qualname == mutant.function)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes(constant)


def put_in(mutant: Mutant) -> None:
    """Let the function of this process be the mutant."""
    found: Any = importlib.import_module(mutant.path.removesuffix(".py").replace("/", "."))
    for part in mutant.function.split("."):
        found = vars(found)[part]
    for name in ("fget", "func", "__func__", "__wrapped__"):
        found = (
            getattr(found, name, found) if not isinstance(found, types.FunctionType) or name == "__wrapped__" else found
        )
    found.__code__ = changed_code(mutant)


# Who finds it.


def in_child(work: Callable[[], object], seconds: float) -> tuple[int, Any]:
    """Run it in a fork; how that ended, and what it said."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.close(reading)
        code = FAILED
        try:
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                said = work()
            os.write(writing, json.dumps(said).encode())
            code = PASSED
        finally:
            os._exit(code)
    os.close(writing)
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(child, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    with open(reading, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    if os.WIFSIGNALED(status):
        return HUNG, None
    return os.WEXITSTATUS(status), json.loads(said) if said else None


class Entered:
    """A plugin of pytest: which functions of ours each test enters, and how long it takes."""

    def __init__(self) -> None:
        self.tests: dict[str, tuple[float, set[str]]] = {}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        entered: set[str] = set()
        source = str(SOURCE)

        def note(frame: types.FrameType, event: str, _: object) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(source):
                entered.add(
                    f"{frame.f_code.co_filename[len(source) + 1 :]}:{frame.f_code.co_qualname.split('.<locals>')[0]}"
                )

        began = time.monotonic()
        sys.setprofile(note)
        yield
        sys.setprofile(None)
        self.tests[item.nodeid] = time.monotonic() - began, entered


class FirstFailure:
    def __init__(self) -> None:
        self.test = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.test:
            self.test = report.nodeid


QUIET = (
    "-q",
    "-x",
    "--seed",
    "1",
    "--hypothesis-seed",
    "1",
    "-m",
    "not long",
    "--timeout",
    "30",
    "--timeout-method",
    "thread",
)


def tests_of(paths: list[str]) -> dict[str, tuple[float, list[str]]]:
    """Which functions these tests enter; run once, in a child."""

    def work() -> object:
        entered = Entered()
        pytest.main([*QUIET, "--maxfail", "1000", "--deselect", "none", *paths], plugins=[entered])
        return {test: (seconds, sorted(names)) for test, (seconds, names) in entered.tests.items()}

    code, found = in_child(work, 3600)
    if code != PASSED or not found:
        raise SystemExit(f"mutate: {' '.join(paths)} could not be run")
    return found  # type: ignore[no-any-return]


def found_by(mutant: Mutant, tests: list[str], seeds: range) -> str:
    def run_tests() -> object:
        put_in(mutant)
        first = FirstFailure()
        code = pytest.main([*QUIET, *tests], plugins=[first])
        return first.test or ("" if code == 0 else f"exit code {code}")

    def run_seeds() -> object:
        from headrace.simulator.cluster import simulate
        from headrace.simulator.scenario import draw

        put_in(mutant)
        logging.disable(logging.CRITICAL)
        return next((seed for seed in seeds if simulate(draw(seed)).violation), 0)

    if tests:
        code, said = in_child(run_tests, CHILD_SECONDS)
        if code == HUNG:
            return "tests that hang"
        if code == FAILED or said:
            return str(said or "tests that break off")
    if len(seeds) == 0:
        return ""
    code, said = in_child(run_seeds, 30 + SEED_SECONDS * len(seeds))
    if code == HUNG:
        return "seeds that hang"
    return "a seed that breaks off" if code == FAILED else f"seed {said}" if said else ""


def written() -> dict[Path, tuple[int, int]]:
    """When each file of ours was written, and its size."""
    found = {path: path.stat() for folder in (SOURCE, ROOT / "tests") for path in folder.rglob("*.py")}
    return {path: (about.st_mtime_ns, about.st_size) for path, about in found.items()}


def refuse_changes(imported: dict[Path, tuple[int, int]]) -> None:
    """End before a verdict on code that is not what was imported."""
    changed = sorted(str(path.relative_to(ROOT)) for path, _ in imported.items() ^ written().items())
    if changed:
        raise SystemExit(f"mutate: {changed[0]} has changed since it was imported: run it again, on a copy of the tree")


def prepare(tests: list[str]) -> None:
    """Import all that children need, so that each begins with it."""
    sys.path[:0] = [str(SOURCE), str(ROOT / "tests")]
    os.chdir(ROOT)
    importlib.import_module("headrace.simulator.cluster")
    with redirect_stdout(io.StringIO()):
        pytest.main([*QUIET, "--collect-only", *tests])


def known_verdicts() -> dict[str, Verdict]:
    lines = KNOWN.read_text().splitlines() if KNOWN.exists() else []
    return {found["name"]: Verdict(**found) for found in map(json.loads, lines)}


def tell(verdicts: list[Verdict]) -> int:
    explained = tomllib.loads(EXPLAINED.read_text()) if EXPLAINED.exists() else {}
    survivors = [each for each in verdicts if not each.found_by]
    open_ = [each for each in survivors if each.name not in explained]
    by_seed = sum(each.found_by.startswith(("seed", "a seed")) for each in verdicts)
    found = len(verdicts) - len(survivors)
    print(
        f"{len(verdicts)} mutants: {found - by_seed} found by tests, {by_seed} by the simulator, "
        f"{len(survivors) - len(open_)} explained, {len(open_)} survive"
    )
    for each in open_:
        print(f"  {each.name}  (line {each.line})")
    return 1 if open_ else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", default=",".join(ROOMS), help="of " + ", ".join(ROOMS))
    parser.add_argument("--only", default="", help="mutants whose name contains one of these, comma between")
    parser.add_argument("--tests", default="", help="in place of the rooms' own, comma between")
    parser.add_argument("--every", type=int, default=1, help="take each n-th mutant")
    parser.add_argument("--seeds", type=int, default=40, help="of the simulator, for what no test finds")
    parser.add_argument("--again", action="store_true", help="run also those that nothing found the last time")
    given = parser.parse_args()
    rooms = given.rooms.split(",")
    only = given.only.split(",")
    imported = written()
    tests = {room: given.tests.split(",") if given.tests else list(ROOMS[room][1]) for room in rooms}
    prepare([path for room in rooms for path in tests[room]])
    known = known_verdicts()
    told: list[Verdict] = []
    KNOWN.parent.mkdir(exist_ok=True)
    for room in rooms:
        paths = sorted(path for pattern in ROOMS[room][0] for path in (SOURCE / "headrace").glob(pattern))
        mutants = [each for path in paths for each in mutants_of(path) if any(part in each.name for part in only)]
        mutants = mutants[:: given.every]
        entered = tests_of(tests[room]) if any(each.name not in known or given.again for each in mutants) else {}
        for nth, mutant in enumerate(mutants, 1):
            verdict = known.get(mutant.name)
            if verdict is None or (given.again and not verdict.found_by):
                enter = [
                    (took, test)
                    for test, (took, names) in entered.items()
                    if f"{mutant.path}:{mutant.function}" in names
                ]
                quickest = [test for _, test in sorted(enter)[:TESTS_MAX]]
                verdict = Verdict(mutant.name, mutant.line, found_by(mutant, quickest, range(1, given.seeds + 1)))
                refuse_changes(imported)
                with KNOWN.open("a") as file:
                    file.write(json.dumps(asdict(verdict)) + "\n")
                print(f"{room} {nth}/{len(mutants)} {mutant.name}: {verdict.found_by or 'SURVIVES'}", flush=True)
            told.append(verdict)
    return tell(told)


if __name__ == "__main__":
    sys.exit(main())
