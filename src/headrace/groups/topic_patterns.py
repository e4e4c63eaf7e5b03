"""Regular expressions that members subscribe with: RE2's syntax, matched against whole topic names. No I/O.

A pattern comes from a client and runs in the broker, so its cost is bounded by its form and not by our patience: it is
read into a nondeterministic automaton of at most `STATES_MAX` states, and names are run through the deterministic one
that is made of it as far as they need it. Each character of a name costs one look into a table, once that is made; who
runs all names through one sees to it that not too much has to be made (`LOOKED_AT_MAX`).
What such an automaton cannot do (backreferences, looking ahead or behind) RE2 does not have either: it is refused, as
is what is no expression. Names of topics have few characters (`ALPHABET`), so a class is a set of those. Names of
other kinds, as transactional ids, may have any (`any_text`): those that neither ASCII nor the pattern has are alike.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from headrace.errors import InvalidPattern

ALPHABET: Final = frozenset(string.ascii_letters + string.digits + "._-")
PATTERN_CHARS_MAX: Final = 4096
STATES_MAX: Final = 5000
DEPTH_MAX: Final = 100
REPEAT_MAX: Final = 1000
"""As in RE2."""
LOOKED_AT_MAX: Final = 500_000
"""States that are looked at until a pattern is refused: some tenths of a second. Most patterns look at a few hundred,
however many names there are; one that remembers much of each name, as `.*[a-m].{500}` does, looks anew for each."""
KEPT_MAX: Final = 2000
"""States of the deterministic automaton that are kept; beyond them it begins anew."""

_WORD: Final = frozenset(string.ascii_letters + string.digits + "_")
_DIGIT: Final = frozenset(string.digits)
_ASCII: Final = frozenset(map(chr, range(128)))
_GRAPH: Final = frozenset(string.ascii_letters + string.digits + string.punctuation)
_CLASSES: Final = {"d": _DIGIT, "w": _WORD, "s": frozenset(" \t\n\f\r")}
_CONTROLS: Final = {"a": "\a", "f": "\f", "t": "\t", "n": "\n", "r": "\r", "v": "\v"}
_POSIX: Final = {
    "alnum": frozenset(string.ascii_letters + string.digits),
    "alpha": frozenset(string.ascii_letters),
    "ascii": _ASCII,
    "blank": frozenset(" \t"),
    "cntrl": _ASCII - _GRAPH - {" "},
    "digit": _DIGIT,
    "graph": _GRAPH,
    "lower": frozenset(string.ascii_lowercase),
    "print": _GRAPH | {" "},
    "punct": frozenset(string.punctuation),
    "space": frozenset(" \t\n\v\f\r"),
    "upper": frozenset(string.ascii_uppercase),
    "word": _WORD,
    "xdigit": frozenset(string.hexdigits),
}
_UNICODE: Final = {
    "L": _POSIX["alpha"],
    "Ll": _POSIX["lower"],
    "Lu": _POSIX["upper"],
    "N": _DIGIT,
    "Nd": _DIGIT,
    "P": _POSIX["punct"] - frozenset("$+<=>^`|~"),
    "Latin": _POSIX["alpha"],
}

_OTHER: Final = "\uffff"
"""Stands for each character that is not in the alphabet; it is none itself."""
_RANGE_MAX: Final = 1000
"""Characters of a range outside of ASCII, as of a script's letters."""

Place = Callable[[str, str], bool]
"""Whether a name may stand here, between this character and the next; "" at the ends."""


def _at_word(before: str, after: str) -> bool:
    return (before in _WORD) != (after in _WORD)


_PLACES: Final[dict[str, Place]] = {
    "^": lambda before, _after: before == "",
    "$": lambda _before, after: after == "",
    "b": _at_word,
    "B": lambda before, after: not _at_word(before, after),
}
_PLACE_ESCAPES: Final = {"A": "^", "z": "$", "b": "b", "B": "B"}


# What a pattern says.


@dataclass(frozen=True, slots=True)
class _Chars:
    of: frozenset[str]


@dataclass(frozen=True, slots=True)
class _At:
    place: str


@dataclass(frozen=True, slots=True)
class _Sequence:
    parts: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    parts: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Repeat:
    part: _Node
    least: int
    most: int | None


_Node = _Chars | _At | _Sequence | _Choice | _Repeat


class _Parser:
    """Reads a pattern from left to right; InvalidPattern where it is none, or none that can be had."""

    def __init__(self, text: str, alphabet: frozenset[str]) -> None:
        self._text = text
        self._alphabet = alphabet
        self._position = 0
        self._depth = 0

    def read(self) -> _Node:
        node = self._choice(fold=False)
        if self._position < len(self._text):
            raise self._fault("a ) without its (")
        return node

    def _fault(self, what: str) -> InvalidPattern:
        return InvalidPattern(f"regular expression {self._text!r}: {what}, at character {self._position + 1}")

    def _peek(self, token: str) -> bool:
        return self._text.startswith(token, self._position)

    def _take(self, token: str) -> bool:
        found = self._peek(token)
        if found:
            self._position += len(token)
        return found

    def _next(self) -> str:
        if self._position >= len(self._text):
            raise self._fault("it ends too early")
        self._position += 1
        return self._text[self._position - 1]

    def _until(self, end: str) -> str:
        found = self._text.find(end, self._position)
        if found < 0:
            raise self._fault(f"{end} is missing")
        taken, self._position = self._text[self._position : found], found + len(end)
        return taken

    def _choice(self, *, fold: bool) -> _Node:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise self._fault(f"it is nested more than {DEPTH_MAX} deep")
        parts = []
        while True:
            part, fold = self._sequence(fold)
            parts.append(part)
            if not self._take("|"):
                break
        self._depth -= 1
        return parts[0] if len(parts) == 1 else _Choice(tuple(parts))

    def _sequence(self, fold: bool) -> tuple[_Node, bool]:
        """`fold`: whether small and large letters are one; flags change it up to the end of their group."""
        parts: list[_Node] = []
        while self._position < len(self._text) and not self._peek("|") and not self._peek(")"):
            if self._take("\\Q"):
                end = self._text.find("\\E", self._position)
                quoted = self._text[self._position : end if end >= 0 else len(self._text)]
                self._position += len(quoted) + (2 if end >= 0 else 0)
                parts += [_Chars(self._one(char, fold)) for char in quoted]
                continue
            found, fold = self._atom(fold)
            if found is not None:
                parts.append(self._repeated(found))
        return _Sequence(tuple(parts)), fold

    def _repeated(self, part: _Node) -> _Node:
        found = self._quantifier()
        if found is None:
            return part
        self._take("?")  # which of several matches is taken makes no difference to a whole name
        if self._quantifier() is not None:
            raise self._fault("a repetition is repeated")
        least, most = found
        return _Repeat(part, least, most)

    def _quantifier(self) -> tuple[int, int | None] | None:
        for token, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(token):
                return bounds
        if not self._peek("{"):
            return None
        end = self._text.find("}", self._position)
        first, comma, last = self._text[self._position + 1 : max(end, 0)].partition(",")
        if not first.isdecimal() or (last and not last.isdecimal()):
            return None
        self._position = end + 1
        least = int(first)
        most = least if not comma else int(last) if last else None
        if least > REPEAT_MAX or (most is not None and not least <= most <= REPEAT_MAX):
            raise self._fault(f"a number of repetitions is none of 0 to {REPEAT_MAX}")
        return least, most

    def _atom(self, fold: bool) -> tuple[_Node | None, bool]:
        char = self._next()
        if char == "(":
            return self._group(fold)
        if char == "[":
            return _Chars(self._class(fold)), fold
        if char == ".":
            return _Chars(self._alphabet), fold
        if char in "^$":
            return _At(char), fold
        if char in "*+?":
            raise self._fault("a repetition of nothing")
        if char == "\\":
            if self._position < len(self._text) and self._text[self._position] in _PLACE_ESCAPES:
                return _At(_PLACE_ESCAPES[self._next()]), fold
            return _Chars(self._escape(fold)), fold
        return _Chars(self._one(char, fold)), fold

    def _group(self, fold: bool) -> tuple[_Node | None, bool]:
        inside = fold
        if self._take("?"):
            if self._take("P<") or (self._peek("<") and not self._peek("<=") and not self._peek("<!")):
                self._take("<")
                self._until(">")
            else:
                inside = self._flags(fold)
                if self._take(")"):
                    return None, inside
                if not self._take(":"):
                    raise self._fault("a group of this kind is not served")
        node = self._choice(fold=inside)
        if not self._take(")"):
            raise self._fault(") is missing")
        return node, fold

    def _flags(self, fold: bool) -> bool:
        """Of i, m, s and U only the first makes a difference to names of topics."""
        on = True
        while self._position < len(self._text) and self._text[self._position] in "imsU-":
            flag = self._next()
            on = False if flag == "-" else on
            fold = on if flag == "i" else fold
        return fold

    def _class(self, fold: bool) -> frozenset[str]:
        negated = self._take("^")
        found: set[str] = set()
        first = True
        while first or not self._take("]"):
            if self._take("[:"):
                name = self._until(":]")
                known = _POSIX.get(name.removeprefix("^"))
                if known is None:
                    raise self._fault(f"there is no class [:{name}:]")
                found |= self._alphabet - known if name.startswith("^") else known
            else:
                found |= self._range(fold)
            first = False
        return self._alphabet - found if negated else self._alphabet & found

    def _range(self, fold: bool) -> frozenset[str]:
        low = self._member(fold)
        if isinstance(low, frozenset) or not self._peek("-") or self._peek("-]"):
            return low if isinstance(low, frozenset) else self._one(low, fold)
        self._take("-")
        high = self._member(fold)
        if isinstance(high, frozenset) or high < low:
            raise self._fault("a range of characters goes backwards, or to a class")
        found = frozenset(char for char in self._alphabet if low <= char <= high and char != _OTHER)
        return frozenset(same for char in found for same in self._one(char, fold))

    def _member(self, fold: bool) -> str | frozenset[str]:
        char = self._next()
        if char != "\\":
            return char
        start = self._position
        literal = self._character()
        if literal is not None:
            return literal
        self._position = start
        return self._escape(fold)

    def _escape(self, fold: bool) -> frozenset[str]:
        """Behind a backslash: a class or one character."""
        start = self._position
        literal = self._character()
        if literal is not None:
            return self._one(literal, fold)
        self._position = start
        char = self._next()
        if char.lower() in _CLASSES:
            known = _CLASSES[char.lower()]
            return self._alphabet & known if char.islower() else self._alphabet - known
        if char in "pP":
            name = self._until("}") if self._take("{") else self._next()
            negated = (char == "P") != name.startswith("^")
            script = _UNICODE.get(name.removeprefix("^"))
            if script is None:
                raise self._fault(f"the class {name} of Unicode is not served")
            return self._alphabet - script if negated else self._alphabet & script
        raise self._fault(f"\\{char} is not served")

    def _character(self) -> str | None:
        """The one character that the escape stands for, if it does."""
        char = self._next()
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char == "x":
            digits = self._until("}") if self._take("{") else self._next() + self._next()
            return self._code(digits, 16)
        if char == "0":
            start = self._position
            while self._position < min(start + 2, len(self._text)) and self._text[self._position] in "01234567":
                self._position += 1
            return self._code(self._text[start : self._position] or "0", 8)
        return None if char.isalnum() else char

    def _code(self, digits: str, number_system: int) -> str:
        try:
            return chr(int(digits, number_system))
        except (ValueError, OverflowError):
            raise self._fault(f"{digits} is no character") from None

    def _one(self, char: str, fold: bool) -> frozenset[str]:
        return self._alphabet & frozenset((char.lower(), char.upper()) if fold else char)


# The automata.


class _Automaton:
    """Each state leads on by one of its characters, or (None) without one to several, from some only at a place."""

    def __init__(self, node: _Node) -> None:
        self.chars: list[frozenset[str] | None] = []
        self.leads: list[tuple[int, ...]] = []
        self.places: list[Place | None] = []
        self._steps = 0
        self.end = self._add(None, ())
        self.start = self._build(node, self.end)

    def _add(self, chars: frozenset[str] | None, leads: tuple[int, ...], place: Place | None = None) -> int:
        self._count()
        self.chars.append(chars)
        self.leads.append(leads)
        self.places.append(place)
        return len(self.chars) - 1

    def _count(self) -> None:
        """Parts that come to no state, repeated again and again, are work too."""
        self._steps += 1
        if self._steps > 2 * STATES_MAX:
            raise InvalidPattern(f"a regular expression comes to more than {STATES_MAX} states")

    def _build(self, node: _Node, then: int) -> int:
        """The state from which the node leads to `then`."""
        self._count()
        match node:
            case _Chars(of):
                return self._add(of, (then,))
            case _At(place):
                return self._add(None, (then,), _PLACES[place])
            case _Sequence(parts):
                for part in reversed(parts):
                    then = self._build(part, then)
                return then
            case _Choice(parts):
                return self._add(None, tuple(self._build(part, then) for part in parts))
            case _Repeat(part, least, most):
                return self._repeat(part, least, most, then)

    def _repeat(self, part: _Node, least: int, most: int | None, then: int) -> int:
        if most is None:
            loop = self._add(None, ())
            self.leads[loop] = (self._build(part, loop), then)
            then = loop
        else:
            end = then
            for _ in range(most - least):
                then = self._add(None, (self._build(part, then), end))
        for _ in range(least):
            then = self._build(part, then)
        return then

    def reached(self, states: frozenset[int], before: str, after: str) -> set[int]:
        """What can be reached from these without a character, between these two."""
        found, waiting = set(states), list(states)
        while waiting:
            state = waiting.pop()
            place = self.places[state]
            if self.chars[state] is not None or (place is not None and not place(before, after)):
                continue
            for lead in self.leads[state]:
                if lead not in found:
                    found.add(lead)
                    waiting.append(lead)
        return found


class _State:
    """Of the deterministic automaton: where the other one may be, behind a character of this kind."""

    __slots__ = ("ends", "leads", "previous", "states")

    def __init__(self, states: frozenset[int], previous: str) -> None:
        self.states = states
        self.previous = previous
        self.leads: dict[str, _State] = {}
        self.ends: bool | None = None


def any_text(pattern: str) -> frozenset[str]:
    """The alphabet of names that may have any character, as far as this pattern can tell them apart: those of ASCII,
    and those that it has itself, alone or between the ends of a range."""
    drawn = {char for char in pattern if not char.isascii()}
    spelt = {chr(int(digits, 16)) for digits in re.findall(r"\\x\{([0-9a-fA-F]{1,5})\}", pattern)}
    found = drawn | spelt
    ends = sorted(found)
    for low, high in pairwise(ends):
        if ord(high) - ord(low) <= _RANGE_MAX and len(found) <= PATTERN_CHARS_MAX:
            found.update(map(chr, range(ord(low), ord(high))))
    return _ASCII | found | {same for char in found for same in (char.lower(), char.upper())} | {_OTHER}


class TopicPattern:
    """A regular expression over names of topics, or of another alphabet. InvalidPattern if it is none."""

    def __init__(self, text: str, alphabet: frozenset[str] = ALPHABET) -> None:
        if len(text) > PATTERN_CHARS_MAX:
            raise InvalidPattern(f"a regular expression has {len(text)} characters; {PATTERN_CHARS_MAX} are allowed")
        self.text = text
        self.looked_at = 0
        """States of the nondeterministic automaton, over all names until now: what it has cost."""
        self._alphabet = alphabet
        self._automaton = _Automaton(_Parser(text, alphabet).read())
        self._forget()

    def _forget(self) -> None:
        self._start = _State(frozenset((self._automaton.start,)), "")
        self._kept: dict[tuple[frozenset[int], str], _State] = {}

    def matches(self, name: str) -> bool:
        """Whether it describes the whole name."""
        state = self._start
        for char in name:
            lead = state.leads.get(char)
            state = self._step(state, char) if lead is None else lead
            if not state.states:
                return False
        if state.ends is None:
            state.ends = self._automaton.end in self._automaton.reached(state.states, state.previous, "")
        return state.ends

    def matches_in_time(self, name: str) -> bool:
        """The same, for who has many names: InvalidPattern when it has cost too much."""
        if self.looked_at > LOOKED_AT_MAX:
            raise InvalidPattern(f"regular expression {self.text!r} takes too long over all names")
        return self.matches(name)

    def _step(self, state: _State, char: str) -> _State:
        automaton = self._automaton
        reached = automaton.reached(state.states, state.previous, char)
        self.looked_at += len(reached)
        seen = char if char in self._alphabet else _OTHER
        found = frozenset(automaton.leads[one][0] for one in reached if seen in (automaton.chars[one] or ()))
        key = found, "_" if char in _WORD else "-"
        lead = self._kept.get(key)
        if lead is None:
            if len(self._kept) >= KEPT_MAX:
                self._forget()
            lead = self._kept[key] = _State(*key)
        state.leads[char] = lead
        return lead
