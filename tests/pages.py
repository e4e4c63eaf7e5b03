"""Pages of the docs, and a reader who types what they say: `pages.py [--with spark] docs/HOWTO.md ...` runs pages.

What stands in a fence is told by its language:

    console     lines that begin with `$ ` are typed, in one bash per page; what stands below is what they print. A
                command goes on in the next line after a backslash, or up to the end of its here document.
    sh          the lines are typed, and what they print is not shown
    python      is run; all of a page in one program. A fence `text` right below it is what it prints.
    sql         is given to `headrace sql`
    text, json, toml, yaml, ini     are not typed: output, or a file

In output `...` stands for anything within a line, and on a line of its own for any lines; blanks count as one. A
command may fail only if the last line that is shown of it says so (`headrace: ...` or `Error: ...`).

A comment on the lines before a fence says what else is to be known; it is not seen where the page is read:

    <!-- not run: why -->       what cannot be run in a test
    <!-- file: NAME -->         the fence is the content of a file, which is written
    <!-- with: etcd -->         spark, or pipelines (`make prove`); before the title of a page, of all its fences
    <!-- set-up: COMMAND -->    typed before, as what the reader has done already
    <!-- again: until when -->  what is typed is typed again until it prints what is shown

Pages speak of a broker at 127.0.0.1:9092 with its HTTP port at 8082: the reader has one of its own, in a folder of its
own, and ports are exchanged in what is typed and in what is shown. With etcd there is no broker: pages start clusters.
`headrace sql`, `headrace pipeline` and programs that a page has written run in this process: one JVM is for all.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import secrets
import selectors
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from brokers import DIES_WITH_PARENT, Brokers
from headrace.cli.local.plan import free_block
from headrace.cli.main import main as headrace

ROOT: Final = Path(__file__).resolve().parent.parent
PAGES: Final = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/*.md")),
    *(ROOT / folder / "README.md" for folder in ("deploy", "examples")),
)
SIGNATURES: Final = ROOT / "docs" / "API.md"
RECIPES: Final = ROOT / "docs" / "CLIENT.md"
"""Run by tests/client/test_recipes.py."""
BIN: Final = Path(sys.executable).parent
KAFKA, HTTP = 9092, 8082
CLUSTER_PORTS: Final = 140
RUN: Final = ("console", "sh", "python", "sql")
SHOWN: Final = ("text", "json", "toml", "yaml", "ini")
FAILED: Final = re.compile(r"(headrace|Error): ")
IN_PROCESS: Final = re.compile(r"(headrace (sql|pipeline)|python \w+\.py)[^|>&;]*")
COMMAND_DEADLINE_S: Final = 240.0
AGAIN_S: Final = 60.0
PAUSE_S: Final = 0.5

_FENCE: Final = re.compile(
    r"(?P<marks>(?:^<!--[^\n]*-->\n)*)^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.M | re.S
)
_MARK: Final = re.compile(r"<!-- (?P<kind>[\w -]+): (?P<value>.*?) -->")


@dataclass(frozen=True, slots=True)
class Block:
    """A fence of a page, with what the comments before it say."""

    page: str
    line: int
    language: str
    text: str
    marks: dict[str, str] = field(default_factory=dict)
    shown: str | None = None
    """What a Python block prints, where the page says it."""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def runs(self) -> bool:
        return "file" in self.marks or (self.language in RUN and "not run" not in self.marks)


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    of_page = dict(_MARK.findall(text.partition("\n# ")[0] if text.startswith("<!--") else ""))
    found: list[Block] = []
    end = 0
    for fence in _FENCE.finditer(text):
        line = text.count("\n", 0, fence.start("language")) + 1
        name = str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name
        inner = "".join(part.removeprefix(fence["indent"]) for part in fence["text"].splitlines(keepends=True))
        marks = {**of_page, **dict(_MARK.findall(fence["marks"]))}
        if (
            found
            and fence["language"] == "text"
            and found[-1].language == "python"
            and not text[end : fence.start()].strip()
        ):
            last = found[-1]
            found[-1] = Block(last.page, last.line, last.language, last.text, last.marks, inner)
        found.append(Block(name, line, fence["language"], inner, marks))
        end = fence.end()
    return found


def pages_with(group: str | None) -> list[Path]:
    """The pages that have fences of that group to be run."""
    named = [page for page in PAGES if page not in (SIGNATURES, RECIPES)]
    return [page for page in named if any(b.runs and b.marks.get("with") == group for b in blocks_of(page))]


def commands_of(block: Block) -> Iterator[tuple[str, list[str] | None]]:
    """What is typed, and the lines that are shown of it; None where none are."""
    if block.language == "sql":
        yield f"headrace sql {shlex.quote(block.text.strip())}", None
        return
    prompt = "$ " if block.language == "console" else ""
    lines = block.text.splitlines()
    at = 0
    while at < len(lines):
        assert lines[at].startswith(prompt), f"{block.place}: the fence does not begin with a command, `$ `"
        command, at = lines[at].removeprefix(prompt), at + 1
        until = re.search(r"<<-?\s*'?(\w+)'?", command)
        while at < len(lines) and (command.endswith("\\") or (until and command.splitlines()[-1] != until[1])):
            command, at = f"{command}\n{lines[at].removeprefix('> ')}", at + 1
        shown = []
        while prompt and at < len(lines) and not lines[at].startswith(prompt):
            shown.append(lines[at])
            at += 1
        if command.strip() and not command.lstrip().startswith("#"):
            yield command, shown or None


def differs(shown: Iterable[str], printed: str) -> str | None:
    """None if that was printed, up to blanks and what `...` stands for; else both."""
    pattern = ""
    for line in shown:
        words = " ".join(line.split())
        if words == "...":
            pattern += r"(?:.*\n)*?"
        elif words:
            pattern += re.escape(words).replace(re.escape("..."), ".*?") + r"\n"
    plain = "".join(f"{' '.join(line.split())}\n" for line in printed.splitlines() if line.strip())
    if re.fullmatch(pattern, plain):
        return None
    return f"the page says\n{chr(10).join(shown)}\n\nand it printed\n{printed}"


class Shell:
    """A bash that is given one command after the other."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._bash = subprocess.Popen(
            [*DIES_WITH_PARENT, "bash", "--noprofile", "--norc"],
            cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._end = f"end-{secrets.token_hex(8)}"

    def run(self, command: str) -> tuple[int, str]:
        """Exit code, and what was printed on both outputs."""
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        self._bash.stdin.write(f"{{ {command}\n}} </dev/null\necho {self._end} $?\n".encode())
        self._bash.stdin.flush()
        printed, deadline = b"", time.monotonic() + COMMAND_DEADLINE_S
        ended = re.compile(rb"^" + self._end.encode() + rb" (\d+)\n", re.M)
        with selectors.DefaultSelector() as selector:
            selector.register(self._bash.stdout, selectors.EVENT_READ)
            while not (found := ended.search(printed)):
                assert selector.select(deadline - time.monotonic()), f"{command} does not end: {printed.decode()}"
                read = os.read(self._bash.stdout.fileno(), 65536)
                assert read, f"{command} has ended the shell: {printed.decode()}"
                printed += read
        return int(found[1]), printed[: found.start()].decode(errors="replace")

    def close(self) -> None:
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        self._bash.stdin.close()
        self._bash.stdout.close()
        self._bash.kill()
        self._bash.wait()


class Reader:
    """Types what a page says, in a folder of its own. `wrong` has what was not as the page says."""

    def __init__(self, folder: Path, ports: dict[int, int], *, cluster: bool = False) -> None:
        self._folder = folder
        self._there = ports
        self._said = {actual: said for said, actual in ports.items()}
        self._cluster = cluster
        self.wrong: list[str] = []
        self._names: dict[str, Any] = {"__name__": "__main__"}
        if not (folder / ".venv").exists():
            (folder / ".venv").symlink_to(BIN.parent)
            # Jobs keep what they have done beside their files.
            shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns(".*", "__pycache__"))
        self.environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "COLUMNS": "120", "HOME": str(folder)}
        for name in [name for name in self.environment if name.startswith(("HEADRACE_", "XDG_"))]:
            del self.environment[name]
        if not cluster:
            self.environment["HEADRACE_BOOTSTRAP"] = f"127.0.0.1:{ports[KAFKA]}"
        self._shell = Shell(folder, self.environment)

    def close(self) -> None:
        if self._cluster:
            for made in self._folder.glob("*/cluster.json"):
                self._shell.run(f"headrace cluster down --dir {made.parent}")
        self._shell.close()

    def read(self, block: Block) -> None:
        if "set-up" in block.marks:
            self._type(block, block.marks["set-up"], None)
        if "file" in block.marks:
            (self._folder / block.marks["file"]).write_text(self._here(block.text))
        elif block.language == "python":
            self._python(block)
        else:
            for command, shown in commands_of(block):
                self._type(block, command, shown)

    def _type(self, block: Block, command: str, shown: list[str] | None) -> None:
        end, pause = time.monotonic() + (AGAIN_S if "again" in block.marks else 0), threading.Event()
        while (wrong := self._wrong(command, shown)) and time.monotonic() < end:
            pause.wait(PAUSE_S)
        if wrong:
            self.wrong.append(f"{block.place}: {command}\n{wrong}")

    def _wrong(self, command: str, shown: list[str] | None) -> str | None:
        code, printed = self._run(self._here(command))
        printed = self._as_said(printed)
        if code and not (shown and FAILED.match(shown[-1])):
            return f"ended with {code}:\n{printed}"
        return differs(shown, printed) if shown else None

    def _run(self, command: str) -> tuple[int, str]:
        if not IN_PROCESS.fullmatch(command):
            return self._shell.run(command)
        program, *arguments = shlex.split(command, comments=True)
        with redirected(self.environment, self._folder) as printed:
            code = run_file(arguments) if program == "python" else headrace(arguments)
        return code, printed.getvalue()

    def _python(self, block: Block) -> None:
        code = compile(self._here(block.text), block.place, "exec")
        with redirected(self.environment, self._folder) as printed:
            exec(code, self._names)
        if block.shown is not None:
            wrong = differs(block.shown.splitlines(), self._as_said(printed.getvalue()))
            if wrong:
                self.wrong.append(f"{block.place}\n{wrong}")

    def _here(self, text: str) -> str:
        """As the page says it, for this folder and these ports."""
        if self._cluster:
            text = re.sub(r"cluster up (?=.*--brokers)", f"cluster up --base-port {self._there[KAFKA]} ", text)
        return exchanged(text, self._there).replace("/tmp/", f"{self._folder}/")

    def _as_said(self, text: str) -> str:
        return exchanged(text.replace(f"{self._folder}/", "/tmp/"), self._said)


def run_file(arguments: list[str]) -> int:
    before, sys.argv = sys.argv, arguments
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    finally:
        sys.argv = before
    return 0


@contextlib.contextmanager
def redirected(environment: dict[str, str], folder: Path) -> Iterator[io.StringIO]:
    """This process in that folder and environment; both outputs of Python are kept."""
    printed, before = io.StringIO(), dict(os.environ)
    os.environ.update(environment)
    try:
        with contextlib.chdir(folder), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            yield printed
    finally:
        for name in environment.keys() - before.keys():
            os.environ.pop(name, None)
        os.environ.update(before)


def exchanged(text: str, ports: dict[int, int]) -> str:
    return re.sub(r"(?<=[:\s=])\d{4,5}\b", lambda found: str(ports.get(int(found[0]), found[0])), text)


def read(page: Path, brokers: Brokers, folder: Path, group: str | None = None) -> int:
    """Read the fences of one group on a page, and answer how many they were."""
    chosen = [block for block in blocks_of(page) if block.runs and block.marks.get("with") == group]
    if not chosen:
        return 0
    cluster = group == "etcd"
    if cluster:
        base = free_block()
        ports = {KAFKA + number: base + number for number in range(CLUSTER_PORTS)}
    else:
        broker = brokers.start(settings={"group.initial.rebalance.delay.ms": 50})
        ports = {KAFKA: broker.host_port[1], HTTP: int(broker.http.rpartition(":")[2])}
    folder.mkdir(parents=True, exist_ok=True)
    reader = Reader(folder, ports, cluster=cluster)
    try:
        for block in chosen:
            reader.read(block)
    finally:
        reader.close()
    assert not reader.wrong, "\n\n".join(reader.wrong)
    return len(chosen)


def main(arguments: list[str]) -> None:
    group = arguments[1] if arguments[:1] == ["--with"] else None
    with tempfile.TemporaryDirectory(prefix="headrace-pages-") as folder:
        brokers = Brokers(Path(folder))
        try:
            for name in arguments[2:] if group else arguments:
                began = time.monotonic()
                # One folder for all: it is where a JVM, once started, takes its paths from.
                count = read(ROOT / name, brokers, Path(folder) / "reader", group)
                print(f"{name}: {count} blocks in {time.monotonic() - began:.1f} s", flush=True)
        finally:
            brokers.close()


if __name__ == "__main__":
    main(sys.argv[1:])
