"""SQL as text: cut into statements, without understanding more of them than this project adds to Spark SQL.

Comments stay in what Spark gets (hints are written as comments) and do not count otherwise. A semicolon inside a
string, a quoted name or a comment ends nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from headrace.errors import OperatorError

_TOKEN: Final = re.compile(
    r"""(?P<comment>--[^\n]*|/\*.*?\*/)
      | (?P<string>'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.)*")
      | (?P<quoted>`(?:[^`]|``)*`)
      | (?P<word>[^\W\d]\w*)
      | (?P<end>;)
      | (?P<space>\s+)
      | (?P<sign>.)""",
    re.VERBOSE | re.DOTALL,
)
_VARIABLE: Final = re.compile(r"\$\{([A-Za-z_][\w.-]*)(?::([^}]*))?\}")


@dataclass(frozen=True, slots=True)
class Token:
    kind: str
    text: str
    at: int

    @property
    def word(self) -> str:
        """A bare word in lower case, as keywords are compared; empty for anything else."""
        return self.text.lower() if self.kind == "word" else ""

    @property
    def name(self) -> str:
        """What a name or a string stands for, without its quotes."""
        match self.kind:
            case "quoted":
                return self.text[1:-1].replace("``", "`")
            case "string":
                return re.sub(r"\\(.)", r"\1", self.text[1:-1])
            case _:
                return self.text


@dataclass(frozen=True, slots=True)
class Statement:
    """`tokens` leave out comments and space; `line` is where the statement begins in its file."""

    text: str
    tokens: tuple[Token, ...]
    line: int

    @property
    def fingerprint(self) -> str:
        """Equal for statements that differ only in comments and space."""
        return " ".join(token.text for token in self.tokens)

    def begins(self, *words: str) -> bool:
        return tuple(token.word for token in self.tokens[: len(words)]) == words

    def rest(self, index: int) -> str:
        """The text from a token on."""
        return self.text[self.tokens[index].at :] if index < len(self.tokens) else ""

    def streamed(self) -> frozenset[str]:
        """Names after the keyword STREAM: `from stream orders`, `from stream(orders)`."""
        found = set()
        for nth, token in enumerate(self.tokens[:-1]):
            if token.word == "stream":
                follows = self.tokens[nth + 1 : nth + 3]
                named = follows[1] if follows[0].text == "(" and len(follows) > 1 else follows[0]
                if named.kind in ("word", "quoted"):
                    found.add(named.name)
        return frozenset(found)


def split(sql: str) -> list[Statement]:
    """The statements between semicolons; empty ones are left out."""
    return list(_statements(sql))


def _statements(sql: str) -> Iterator[Statement]:
    tokens: list[Token] = []
    for found in _TOKEN.finditer(sql + ";"):
        kind = found.lastgroup or "sign"
        if kind == "end":
            if tokens:
                began = tokens[0].at
                moved = tuple(Token(token.kind, token.text, token.at - began) for token in tokens)
                yield Statement(sql[began : found.start()].rstrip(), moved, sql.count("\n", 0, began) + 1)
            tokens = []
        elif kind not in ("comment", "space"):
            tokens.append(Token(kind, found[0], found.start()))


def substitute(sql: str, values: Mapping[str, str]) -> str:
    """`${name}` as given, or `${name:default}`."""

    def value(found: re.Match[str]) -> str:
        name, default = found[1], found[2]
        if name in values:
            return values[name]
        if default is None:
            raise OperatorError(f"the job asks for ${{{name}}}: give it with --set {name}=VALUE")
        return default

    return _VARIABLE.sub(value, sql)
