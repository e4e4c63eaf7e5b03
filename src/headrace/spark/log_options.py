"""Options of `format("headrace-log")`. What is unknown is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from headrace.errors import SettingError
from headrace.records.arrow import DEFAULT_COLUMNS, TYPES
from headrace.spark.options import refuse_unknown

T = TypeVar("T")

DEFAULT_SPLIT_BYTES: Final = 128 << 20
FOLDER: Final = "folder"
SEGMENT: Final = "segment"
EVERY_COLUMN: Final = (*TYPES, FOLDER, SEGMENT)

EVERY: Final = (
    "path",
    "paths",
    "topic",
    "topics",
    "topicsPattern",
    "partitions",
    "columns",
    "includeHeaders",
    "table",
    "mode",
    "maxPartitionBytes",
)


@dataclass(frozen=True, slots=True)
class LogOptions:
    folders: tuple[str, ...]
    topics: tuple[str, ...]
    pattern: str
    partitions: tuple[int, ...]
    columns: tuple[str, ...]
    table: str
    fail_fast: bool
    split_bytes: int

    def chooses(self, topic: str, partition: int) -> bool:
        """Without topics all are chosen but, for records, the broker's own."""
        if self.partitions and partition not in self.partitions:
            return False
        if self.topics:
            return topic in self.topics
        if self.pattern:
            return re.fullmatch(self.pattern, topic) is not None
        return self.table == "problems" or not topic.startswith("__")


def parse(options: Mapping[str, str]) -> LogOptions:
    """SettingError names the option that is wrong."""
    given = {key.lower(): value for key, value in options.items() if value is not None}
    refuse_unknown(given, EVERY, frozenset())
    folders = _folders(given)
    ways = [name for name in ("topic", "topics", "topicsPattern") if name.lower() in given]
    if len(ways) > 1:
        raise SettingError(f"options {' and '.join(ways)} exclude each other; write one of them")
    return LogOptions(
        folders=folders,
        topics=tuple(_names(given.get("topic", "")) + _names(given.get("topics", ""))),
        pattern=_pattern(given),
        partitions=_read(given, "partitions", "", _numbers, "partitions such as 0,1"),
        columns=_columns(given, len(folders)),
        table=_read(given, "table", "records", _one_of("records", "problems"), "records or problems"),
        fail_fast=_read(given, "mode", "failfast", _one_of("failfast", "permissive"), "FAILFAST or PERMISSIVE")
        == "failfast",
        split_bytes=_read(given, "maxPartitionBytes", str(DEFAULT_SPLIT_BYTES), _positive, "a number of bytes above 0"),
    )


def _folders(given: Mapping[str, str]) -> tuple[str, ...]:
    """`load(path)` gives `path`; `load([one, other])` gives `paths` as JSON."""
    text = given.get("paths", "").strip()
    if text.startswith("["):
        try:
            found = [str(each) for each in json.loads(text)]
        except ValueError:
            raise SettingError(f"option paths={text!r} is not a list; write folders with commas between") from None
    else:
        found = _names(text)
    found += _names(given.get("path", ""))
    if not found:
        raise SettingError('no data folder was given; write .load("/var/lib/headrace"), several with commas between')
    return tuple(dict.fromkeys(_local(each) for each in found))


def _local(folder: str) -> str:
    scheme, colon, rest = folder.partition(":")
    if colon and scheme == "file":
        return "/" + rest.lstrip("/")
    if colon and rest.startswith("//"):
        raise SettingError(f"{folder} is not read: a data folder is one of this machine's, or mounted on it")
    return folder


def _columns(given: Mapping[str, str], folders: int) -> tuple[str, ...]:
    names = {name.lower(): name for name in EVERY_COLUMN}
    default = ",".join((*DEFAULT_COLUMNS, FOLDER) if folders > 1 else DEFAULT_COLUMNS)
    asked = [name.lower() for name in _names(given.get("columns", default))]
    unknown = [name for name in asked if name not in names]
    if unknown or not asked:
        told = f"has {unknown[0]!r}" if unknown else "is empty"
        raise SettingError(f"option columns {told}; write some of {','.join(EVERY_COLUMN)}")
    flag = _read(given, "includeHeaders", "false", _one_of("true", "false"), "true or false")
    columns = dict.fromkeys(names[name] for name in asked)
    return tuple(columns | {"headers": None} if flag == "true" else columns)


def _pattern(given: Mapping[str, str]) -> str:
    text = given.get("topicspattern", "")
    try:
        re.compile(text)
    except re.error as error:
        raise SettingError(f"option topicsPattern={text!r} is not a regular expression: {error}") from None
    return text


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(int(name) for name in _names(text))
    if any(number < 0 for number in numbers):
        raise ValueError
    return numbers


def _positive(text: str) -> int:
    number = int(text)
    if number <= 0:
        raise ValueError
    return number


def _one_of(*choices: str) -> Callable[[str], str]:
    return lambda text: choices[choices.index(text.lower())]


def _read(given: Mapping[str, str], name: str, default: str, convert: Callable[[str], T], wanted: str) -> T:
    text = given.get(name.lower(), default)
    try:
        return convert(text.strip())
    except ValueError:
        raise SettingError(f"option {name}={text!r} is not understood; write {wanted}") from None
