"""Options of `format("headrace-log")`. What is unknown is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from headrace.errors import SettingError
from headrace.records.arrow import DEFAULT_COLUMNS, TYPES
from headrace.spark.options import choice, columns_of, names_in, pattern, positive, read, refuse_unknown
from headrace.storage.offline.transactions import ABORTED, COMMITTED, NONE, OPEN

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
    "isolation",
)


SHOWN: Final = {
    "committed": frozenset({NONE, COMMITTED}),
    "uncommitted": frozenset({NONE, COMMITTED, ABORTED, OPEN}),
    "aborted": frozenset({ABORTED}),
    "open": frozenset({OPEN}),
}
"""By isolation, which records are rows: those of no transaction, and of transactions with these outcomes."""


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
    isolation: str = "committed"

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
    mode = choice(given, "mode", ("failfast", "permissive"), "FAILFAST or PERMISSIVE")
    return LogOptions(
        folders=folders,
        topics=tuple(names_in(given.get("topic", "")) + names_in(given.get("topics", ""))),
        pattern=pattern(given.get("topicspattern", ""), "topicsPattern"),
        partitions=read(given, "partitions", (), _numbers, "partitions such as 0,1"),
        columns=columns_of(given, EVERY_COLUMN, (*DEFAULT_COLUMNS, FOLDER) if len(folders) > 1 else DEFAULT_COLUMNS),
        table=choice(given, "table", ("records", "problems")),
        fail_fast=mode == "failfast",
        isolation=choice(given, "isolation", tuple(SHOWN)),
        split_bytes=read(given, "maxPartitionBytes", DEFAULT_SPLIT_BYTES, positive, "a number of bytes above 0"),
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
        found = names_in(text)
    found += names_in(given.get("path", ""))
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


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(int(name) for name in names_in(text))
    if any(number < 0 for number in numbers):
        raise ValueError
    return numbers
