"""The asynchronous producer, consumers, listeners and admin client, made of those for threads; `--check` compares.

Both faces are one text. What differs between threads and asyncio stands in pairs with the same names: the modules
`headrace.client.consumer.threads` and `headrace.aio.tasks`; `headrace.client.admin.calls` and `headrace.aio.calls`;
what the module of the producer has before its public class, and `headrace.aio.appender`. The rest follows from a rule:
a method that waits is a coroutine function, and who calls one awaits it. What waits is named in WAITS; methods that
call it are found, and those that call them. As httpcore's script of that name, the other way round: threads are what
most programs use, so their text is the one that is written, and read, by hand.

What is made is committed, so that an install, a wheel, mypy and ruff need to know nothing of this; a test compares it.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
SOURCE: Final = ROOT / "src" / "headrace"
HEAD: Final = "# Made by tools/unasync.py of src/headrace/{source}: change that one, then run `make unasync`.\n"
WAITS: Final = frozenset(
    {
        *(f"{driver}.{name}" for driver in ("driver", "self._driver") for name in ("wait", "turn", "cede", "tell")),
        *("self._changed.wait", "self._changed.wait_for", "self._ended.wait", "self._crew.join"),
        *(f"{driver}.{name}" for driver in ("driver", "self._driver") for name in ("have", "callbacks_ended")),
        *(
            "self._appender.send",
            "self._producer.send",
            "self._producer.close",
            "self._producer.flush",
            "self._producer._transact",
            *("self._producer._wait_for", "self._producer._commit_when_written", "before.wait", "before._settle"),
            "self._listening.halt",
            "self._close_consumer",
        ),
        *("self._calls.call", "self._calls.close"),
        *("source.take", "source.step_aside", "source.tell", "blocking", "call", "work"),
    }
)
"""Besides the methods that are found to wait: calls as they are written."""
ALWAYS: Final = frozenset({"__enter__", "__exit__"})
WORDS: Final = (
    (r"\bheadrace\.client\.consumer\.(consumer|listener)\b", r"headrace.aio.\1"),
    (r"\bheadrace\.client\.consumer\.threads\b", "headrace.aio.tasks"),
    (r"\bheadrace\.client\.share\.share_consumer\b", "headrace.aio.share_consumer"),
    (r"\bheadrace\.client\.producer\.(producer|transaction)\b", r"headrace.aio.\1"),
    (r"\bheadrace\.client\.admin\.calls\b", "headrace.aio.calls"),
    (r"(?m)^    with Admin", "    async with Admin"),
    (r"(?m)^        admin\.create_topic", "        await admin.create_topic"),
    (r"print\(admin\.", "print(await admin."),
    (r"\b__(enter|exit|iter)__\b", r"__a\1__"),
    (r"The public producer, for threads: any of them may send, .*", "The public producer, for coroutines of one loop."),
    (
        r"partitions; thread-safe\. Use .*",
        "partitions, on the loop where it is made. Close it, or use `async with`.",
    ),
    (r'key=b"42"\) +# waits', 'key=b"42")  # waits'),
    (
        r"The delivery says what becomes of it; `callback\(delivery\)` hears of it",
        "`await` the delivery, or let `callback(delivery)` hear what becomes of it",
    ),
    (r"has failed, and callbacks have heard which", "has failed; deliveries say which"),
    (r"A close that is interrupted", "A close that is cancelled"),
    (r"# delivery\.result\(\) waits", "# await delivery"),
    (r"(?m)^    with Producer", "    async with Producer"),
    (r"(?m)^        (report = |)producer\.(send|flush)\(", r"        \1await producer.\2("),
    (r"(?m)^        with producer\.transaction", "        async with producer.transaction"),
    (r"(?m)^            t\.send_offsets", "            await t.send_offsets"),
    (r"`with producer\.transaction", "`async with producer.transaction"),
    (r"use it with `with`", "use it with `async with`"),
    (
        r"(?<=and not before: )what is in the queue is lost if the process dies\.\n",
        "what is in the queue is lost if the process dies.\n\n"
        "`send_async` never waits: records for a topic that is not known yet are set aside, in order, until it is; "
        "where the\nqueue is full and the policy is to wait, it raises QueueFull, and `await send(...)` waits "
        "instead.\n",
    ),
    (r"\bthreads\b", "tasks"),
    (r"\bthread\b", "task"),
    (r"(?m)^    with (Share|)Consumer", r"    async with \1Consumer"),
    (r"(?m)^        for record in consumer", "        async for record in consumer"),
    (r"for tasks: `poll`", "for asyncio: `poll`"),
    (r"The share consumer for tasks", "The share consumer for asyncio"),
    (r"Push on tasks: a function", "Push on asyncio: an async function"),
    (r"Call a function for every record", "Call an async function for every record"),
    (
        r"Use one consumer from one task at a time; only `close` may come from another",
        "Make it where its loop runs, and use it from one task at a time",
    ),
    (r"The public admin client, for tasks", "The public admin client, for asyncio"),
    (
        r"Any task may use it; calls run .*",
        "Any task of its loop may use it; calls run one after another, in a thread of the client's own, so that the "
        "loop goes on\nmeanwhile (`headrace.aio.calls` says why). A call that is cancelled is given up; the broker may "
        "have done it.",
    ),
    (r"(?m)^from collections\.abc import ", "from collections.abc import AsyncIterator, "),
)


@dataclass(frozen=True, slots=True)
class Module:
    source: str
    target: str
    instead: str = ""
    """A statement in place of what stands before the class that is public, beside its imports and constants."""


MODULES: Final = (
    Module("client/consumer/consumer.py", "aio/consumer.py"),
    Module("client/consumer/listener.py", "aio/listener.py"),
    Module("client/share/share_consumer.py", "aio/share_consumer.py"),
    Module("client/admin/admin.py", "aio/admin.py"),
    Module("client/producer/transaction.py", "aio/transaction.py"),
    Module(
        "client/producer/producer.py", "aio/producer.py", "from headrace.aio.appender import RecordAppender, connect\n"
    ),
)
Edit = tuple[int, int, int, int, str]
"""From line and column to line and column, lines from 1: what stands there instead."""


def made(module: Module) -> str:
    """The text of the asynchronous module."""
    text = public_part((SOURCE / module.source).read_text(), module.instead)
    edits = [edit for node in ast.parse(text).body if isinstance(node, ast.ClassDef) for edit in edits_of(node)]
    lines = text.splitlines(keepends=True)
    for line, column, end_line, end_column, new in sorted(edits, reverse=True):
        last = lines[end_line - 1][end_column:]
        lines[line - 1 : end_line] = [lines[line - 1][:column] + new + last]
    text = "".join(lines)
    for pattern, word in WORDS:
        text = re.sub(pattern, word, text)
    return formatted(HEAD.format(source=module.source) + text, SOURCE / module.target)


def public_part(text: str, instead: str) -> str:
    """Without what `instead` brings in: the definitions before the last class, which is the public one."""
    if not instead:
        return text
    body = ast.parse(text).body
    imports = [node.end_lineno or 0 for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    definitions = [node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    defined = [min((node, *node.decorator_list), key=lambda each: each.lineno).lineno - 1 for node in definitions]
    lines = text.splitlines(keepends=True)
    parts = lines[: imports[-1]], [instead], lines[imports[-1] : defined[0]], lines[defined[-1] :]
    return "".join(line for part in parts for line in part)


def edits_of(found: ast.ClassDef) -> Iterator[Edit]:
    methods = {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}
    waiting = waiting_of(methods)
    generators = {name for name in waiting if is_generator(methods[name])}
    awaited = {f"self.{name}" for name in waiting - generators} | WAITS
    for name, method in methods.items():
        if name in waiting:
            yield method.lineno, method.col_offset, method.lineno, method.col_offset, "async "
        if (name in generators or name == "__iter__") and method.returns is not None:
            returns = method.returns
            yield returns.lineno, returns.col_offset, returns.lineno, returns.col_offset, "Async"
        for node in own(method):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in awaited:
                yield node.lineno, node.col_offset, node.lineno, node.col_offset, "await "
            if isinstance(node, ast.YieldFrom) and name in generators:
                each = f"for each in {ast.unparse(node.value)}:\n{' ' * node.col_offset}    yield each"
                yield node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0, each


def waiting_of(methods: dict[str, ast.FunctionDef]) -> set[str]:
    """The methods that wait: those that call what does, and those that call them."""
    calls = {
        name: {ast.unparse(node.func) for node in own(method) if isinstance(node, ast.Call)}
        for name, method in methods.items()
    }
    waiting = set(ALWAYS & methods.keys())
    while more := {
        name
        for name in methods.keys() - waiting
        if calls[name] & (WAITS | {f"self.{each}" for each in waiting if not is_generator(methods[each])})
    }:
        waiting |= more
    return waiting


def is_generator(method: ast.FunctionDef) -> bool:
    return any(isinstance(node, ast.Yield | ast.YieldFrom) for node in own(method))


def own(node: ast.AST) -> Iterator[ast.AST]:
    """What a method does itself, without what functions in it do when they are called."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.Lambda):
            yield child
            yield from own(child)


def formatted(text: str, path: Path) -> str:
    for command in (["check", "--quiet", "--fix-only", "--select", "I,F401"], ["format"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(path), "-"]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return text


def main(arguments: list[str]) -> int:
    stale = []
    for module in MODULES:
        target, text = SOURCE / module.target, made(module)
        if arguments == ["--check"]:
            stale += [module.target] if target.read_text() != text else []
        else:
            target.write_text(text)
    if stale:
        print(f"not what tools/unasync.py makes: {', '.join(stale)}; run `make unasync`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
