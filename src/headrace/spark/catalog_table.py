"""A topic as a table of Spark's catalog: `CREATE TABLE orders USING headrace OPTIONS (subscribe 'orders')`.

Spark (4.1 to 4.3) stores the options of such a table, hands them over once, among its other properties, when it asks
for the table's columns, and never to the reader or writer of a query. The columns it does hand over, with their
metadata: so the options travel in the metadata of the first column.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from pyspark.sql.types import StructField, StructType

from headrace.spark import options

_METADATA_KEY: Final = "headrace.options"
_OF_READER: Final = frozenset(name.lower() for name in options.EVERY) | options.IGNORED
_OF_WRITER: Final = frozenset(name.lower() for name in options.OF_SINK) | options.IGNORED_BY_SINK


def options_of(properties: Mapping[str, str]) -> dict[str, str] | None:
    """The options that CREATE TABLE gives, if these are the properties of a table."""
    if "provider" not in properties:
        return None
    given = {key.lower(): value for key, value in properties.items()}
    return {key.removeprefix("option."): value for key, value in given.items() if key.startswith("option.")}


def with_options(columns: StructType, table: Mapping[str, str]) -> StructType:
    """The columns of a table, which remember its options."""
    first, *others = columns
    metadata = {_METADATA_KEY: json.dumps(dict(table), sort_keys=True)}
    return StructType([StructField(first.name, first.dataType, first.nullable, metadata), *others])


def reader_options(given: Mapping[str, str], table: Mapping[str, str]) -> dict[str, str]:
    """What a query says itself comes first; what a table has for its writers is left out."""
    kept = {key: value for key, value in table.items() if key in _OF_READER or key not in _OF_WRITER}
    return kept | dict(given)


def writer_options(given: Mapping[str, str], table: Mapping[str, str]) -> dict[str, str]:
    """As for a reader; a table of one topic is written where it is read."""
    names = table.get("subscribe", "").split(",")
    topic = {"topic": names[0].strip()} if names[0] and len(names) == 1 else {}
    return topic | {key: value for key, value in table.items() if key in _OF_WRITER} | dict(given)


def remembered(columns: StructType) -> dict[str, str]:
    """The options of the table that these are the columns of; none where there is no table."""
    found = [field.metadata[_METADATA_KEY] for field in columns if _METADATA_KEY in (field.metadata or {})]
    table: dict[str, str] = json.loads(found[0]) if found else {}
    return table
