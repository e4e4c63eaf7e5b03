"""Which records of a topic are wanted: by key, text, header, JSON fields and time. All that is given has to hold."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from headrace.cli.json_condition import Condition, parse_condition
from headrace.records.record import Header, Record

F = TypeVar("F", bound=Callable[..., Any])
Matches = Callable[[Record], bool]


@dataclass(frozen=True, slots=True)
class RecordFilter:
    """`matches` is None where every record is wanted."""

    key: bytes | None = None
    pattern: re.Pattern[str] | None = None
    headers: tuple[Header, ...] = ()
    """A value of None stands for any."""
    condition: Condition | None = None
    until_ms: int | None = None
    since_ms: int | None = None

    @property
    def is_search(self) -> bool:
        """Whether records may have to be looked at that are not shown."""
        return self != RecordFilter()

    def choose(self, records: Iterable[Record]) -> list[Record]:
        tests = self._tests()
        return [record for record in records if all(test(record) for test in tests)]

    def _tests(self) -> list[Matches]:
        """Those that are given, the quick ones first."""
        key, until_ms, since_ms, headers, pattern, condition = (
            self.key,
            self.until_ms,
            self.since_ms,
            self.headers,
            self.pattern,
            self.condition,
        )
        tests: list[Matches] = []
        if key is not None:
            tests.append(lambda record: record.key == key)
        if until_ms is not None:
            tests.append(lambda record: record.timestamp_ms < until_ms)
        if since_ms is not None:
            tests.append(lambda record: record.timestamp_ms >= since_ms)
        if headers:
            tests.append(lambda record: all(_has(record.headers, wanted) for wanted in headers))
        if pattern is not None:
            tests.append(lambda record: _occurs(pattern, record.value) or _occurs(pattern, record.key))
        if condition is not None:
            tests.append(lambda record: condition(record.value))
        return tests


def filter_options(command: F) -> F:
    """--key, --grep, --header and --where; `make_filter` takes what they give."""
    for option in (
        click.option("--where", metavar="CONDITION", help="Only JSON values with such fields: 'order.total > 3'."),
        click.option("--header", "headers", multiple=True, metavar="NAME[=VALUE]", help="Only with this; repeat."),
        click.option("--grep", metavar="REGEX", help="Only those with this in their value or key."),
        click.option("--key", metavar="TEXT", help="Only records with this key."),
    ):
        command = option(command)
    return command


def make_filter(
    key: str | None,
    grep: str | None,
    headers: Sequence[str],
    where: str | None,
    until_ms: int | None = None,
    since_ms: int | None = None,
) -> RecordFilter:
    """Of what `filter_options` give; BadParameter says which is wrong."""
    try:
        pattern = None if grep is None else re.compile(grep)
    except re.error as error:
        raise click.BadParameter(f"{grep!r} is not a regular expression: {error}", param_hint="--grep") from None
    try:
        condition = None if where is None else parse_condition(where)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--where") from None
    return RecordFilter(
        None if key is None else os.fsencode(key),
        pattern,
        tuple(_header(text) for text in headers),
        condition,
        until_ms,
        since_ms,
    )


def _header(text: str) -> Header:
    name, equals, value = text.partition("=")
    if not name:
        raise click.BadParameter(f"{text!r} is not NAME or NAME=VALUE", param_hint="--header")
    return name, os.fsencode(value) if equals else None


def _has(headers: list[Header], wanted: Header) -> bool:
    name, value = wanted
    return any(given == name and (value is None or content == value) for given, content in headers)


def _occurs(pattern: re.Pattern[str], content: bytes | None) -> bool:
    return content is not None and pattern.search(content.decode(errors="replace")) is not None
