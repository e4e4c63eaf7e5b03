"""A Dockerfile as its instructions: continued lines joined, comments left out, what is unknown refused."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

KNOWN = frozenset({
    "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "RUN", "STOPSIGNAL", "USER", "VOLUME",
    "WORKDIR",
})  # fmt: skip


@dataclass(frozen=True)
class Instruction:
    name: str
    text: str

    @property
    def words(self) -> list[str]:
        """The exec form, or the words of the other."""
        found: list[str] = json.loads(self.text) if self.text.startswith("[") else self.text.split()
        return found


@dataclass
class Stage:
    name: str
    base: str
    instructions: list[Instruction] = field(default_factory=list)

    def all(self, name: str) -> list[Instruction]:
        return [each for each in self.instructions if each.name == name]

    def last(self, name: str) -> Instruction:
        return self.all(name)[-1]

    def environment(self) -> dict[str, str]:
        """Of ENV name=value; values have no blanks here."""
        return dict(word.split("=", 1) for each in self.all("ENV") for word in each.words)


@dataclass(frozen=True)
class Ignored:
    """What of a clone does not come into the image: all but some names, and some patterns in those."""

    taken: frozenset[str]
    patterns: tuple[str, ...]


def read_ignored(path: Path) -> Ignored:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*", f"{path}: everything is left out first"
    taken = [line.removeprefix("!") for line in lines if line.startswith("!")]
    patterns = [line.removeprefix("**/") for line in lines if line.startswith("**/")]
    assert len(lines) == 1 + len(taken) + len(patterns), f"{path}: only * and !NAME and **/PATTERN are used here"
    return Ignored(frozenset(taken), tuple(patterns))


def read(path: Path) -> dict[str, Stage]:
    """Stages by name, in their order."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for line in filter(str.strip, joined.splitlines()):
        name, _, text = line.strip().partition(" ")
        assert name in KNOWN, f"{path}: {name} is no instruction that is used here"
        assert text.strip(), f"{path}: {name} says nothing"
        if name == "FROM":
            base, as_, called = text.split()
            assert as_ == "AS", f"{path}: a stage has a name: {line}"
            assert called not in stages, f"{path}: two stages are called {called}"
            stage = stages[called] = Stage(called, base)
            continue
        assert stage is not None, f"{path}: {name} before the first FROM"
        stage.instructions.append(Instruction(name, " ".join(text.split())))
    return stages
