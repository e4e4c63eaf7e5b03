"""`--where`: a condition on the fields of a JSON value, such as `order.total > 3 and status in ['new', 'paid']`.

    condition   = clause { "or" clause }
    clause      = negation { "and" negation }
    negation    = "not" negation | "(" condition ")" | comparison
    comparison  = operand [ ( "=" | "==" | "!=" | "<" | "<=" | ">" | ">=" | "in" | "contains" ) operand ]
    operand     = number | text in quotes | true | false | null | "[" operand, ... "]" | field
    field       = name { "." name | "[" number or text in quotes "]" }

A field that is not there is null. Values of different types are unequal, and neither is less. `contains` looks for a
part of a text, an element of a list or a field of an object; `in` is the same the other way round. An operand alone
holds unless it is null or false. A value that is not JSON meets no condition.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable
from typing import Any, Final

Condition = Callable[[bytes | None], bool]
"""Whether a record's value meets it."""
_Term = Callable[[Any], Any]
"""What it is, of a document."""

DEPTH_MAX: Final = 50

_TOKEN: Final = re.compile(
    r"""\s*(?:
        (?P<number>-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)
      | (?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
      | (?P<name>[^\W\d][\w-]*)
      | (?P<mark>==|!=|<=|>=|[=<>()\[\],.])
    )""",
    re.VERBOSE,
)
_CONSTANTS: Final = {"true": True, "false": False, "null": None}
_WORDS: Final = frozenset({"and", "or", "not", "in", "contains"})
_ORDERS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def parse_condition(text: str) -> Condition:
    """ValueError says where the text goes wrong, and what would be right there."""
    term = _Parser(text).parse()

    def met(value: bytes | None) -> bool:
        if value is None:
            return False
        try:
            document = json.loads(value)
        except (ValueError, RecursionError):
            return False
        return _holds(term(document))

    return met


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = _tokens(text)
        self._next = 0
        self._depth = 0

    def parse(self) -> _Term:
        term = self._alternatives()
        if self._next < len(self._tokens):
            raise self._wrong("and, or, or the end")
        return term

    def _alternatives(self) -> _Term:
        terms = [self._clause()]
        while self._take("or"):
            terms.append(self._clause())
        return terms[0] if len(terms) == 1 else lambda document: any(_holds(term(document)) for term in terms)

    def _clause(self) -> _Term:
        terms = [self._negation()]
        while self._take("and"):
            terms.append(self._negation())
        return terms[0] if len(terms) == 1 else lambda document: all(_holds(term(document)) for term in terms)

    def _negation(self) -> _Term:
        self._descend()
        if self._take("not"):
            negated = self._negation()
            term: _Term = lambda document: not _holds(negated(document))  # noqa: E731
        elif self._take("("):
            term = self._alternatives()
            self._expect(")")
        else:
            term = self._comparison()
        self._depth -= 1
        return term

    def _comparison(self) -> _Term:
        left = self._operand()
        compare = _comparison_of(self._peek())
        if compare is None:
            return left
        self._next += 1
        right = self._operand()
        return lambda document: compare(left(document), right(document))

    def _operand(self) -> _Term:
        kind, token, _ = self._tokens[self._next] if self._next < len(self._tokens) else ("end", "", 0)
        if kind == "mark" and token == "[":
            self._next += 1
            return self._list()
        if kind not in {"number", "text", "name"} or (kind == "name" and token in _WORDS):
            raise self._wrong("a field, a number, a text in quotes or a list")
        self._next += 1
        if kind == "name" and token not in _CONSTANTS:
            return self._field(token)
        constant = _CONSTANTS[token] if kind == "name" else _constant(token)
        return lambda _: constant

    def _list(self) -> _Term:
        self._descend()
        items: list[_Term] = []
        while not self._take("]"):
            if items:
                self._expect(",")
            items.append(self._operand())
        self._depth -= 1
        return lambda document: [item(document) for item in items]

    def _field(self, name: str) -> _Term:
        steps: list[str | int] = [name]
        while (mark := self._peek()) in {".", "["}:
            self._next += 1
            kind, token, _ = self._tokens[self._next] if self._next < len(self._tokens) else ("end", "", 0)
            if kind not in ({"name"} if mark == "." else {"number", "text"}):
                raise self._wrong("the name of a field" if mark == "." else "a number, or a name in quotes")
            self._next += 1
            steps.append(token if mark == "." else _constant(token))
            if mark == "[":
                self._expect("]")
        return lambda document: _find(document, steps)

    def _descend(self) -> None:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise ValueError(f"more than {DEPTH_MAX} conditions or lists within one another")

    def _peek(self) -> str | None:
        """The next token, if it is not a text in quotes."""
        if self._next == len(self._tokens) or self._tokens[self._next][0] in {"text", "number"}:
            return None
        return self._tokens[self._next][1]

    def _take(self, token: str) -> bool:
        found = self._peek() == token
        self._next += found
        return found

    def _expect(self, token: str) -> None:
        if not self._take(token):
            raise self._wrong(token)

    def _wrong(self, expected: str) -> ValueError:
        if self._next == len(self._tokens):
            return ValueError(f"{self._text!r} ends where {expected} is expected")
        _, token, at = self._tokens[self._next]
        return ValueError(f"{token} at place {at + 1} of {self._text!r}, where {expected} is expected")


def _tokens(text: str) -> list[tuple[str, str, int]]:
    """Kind, text and place of each."""
    found, at = [], 0
    end = len(text.rstrip())
    while at < end:
        token = _TOKEN.match(text, at)
        if token is None or token.lastgroup is None:
            raise ValueError(f"{text[at:].strip()[:10]!r} at place {at + 1} of {text!r} cannot be read")
        found.append((token.lastgroup, token[token.lastgroup], token.start(token.lastgroup)))
        at = token.end()
    return found


def _constant(token: str) -> Any:
    if token[0] not in "'\"":
        return json.loads(token)
    return re.sub(r"\\(.)", r"\1", token[1:-1])


def _find(document: Any, steps: list[str | int]) -> Any:
    for step in steps:
        if isinstance(step, str):
            document = document.get(step) if isinstance(document, dict) else None
        else:
            inside = isinstance(document, list) and -len(document) <= step < len(document)
            document = document[step] if inside else None
    return document


def _comparison_of(token: str | None) -> Callable[[Any, Any], bool] | None:
    if token in {"=", "=="}:
        return _equal
    if token == "!=":
        return lambda left, right: not _equal(left, right)
    if token == "contains":
        return _contains
    if token == "in":
        return lambda left, right: _contains(right, left)
    order = _ORDERS.get(token or "")
    if order is None:
        return None
    return lambda left, right: _comparable(left, right) and order(left, right)


def _equal(left: Any, right: Any) -> bool:
    return bool(left == right) and isinstance(left, bool) == isinstance(right, bool)


def _comparable(left: Any, right: Any) -> bool:
    return all(isinstance(each, str) for each in (left, right)) or all(
        isinstance(each, int | float) and not isinstance(each, bool) for each in (left, right)
    )


def _contains(whole: Any, part: Any) -> bool:
    if isinstance(whole, list):
        return any(_equal(each, part) for each in whole)
    return isinstance(whole, str | dict) and isinstance(part, str) and part in whole


def _holds(value: Any) -> bool:
    return value is not None and value is not False
