"""The Kafka message schemas, read as a table from the dataclasses of the package `kio`.

Only kio's metadata is used (field order, kinds, nullability, tags, defaults), never its readers and writers.
A module of kio is imported when its (API, version) is first asked for; all of them would take over a second.

Where this table departs from kio:
- durations and times are plain integers of milliseconds, and their names end in `_ms` (kio drops the unit);
- a UUID is 16 raw bytes, and kio's None for the all-zero one is ZERO_UUID;
- kio's None for "no timestamp" is -1, as on the wire;
- a field without a declared default gets the one that the protocol guide gives its type: 0, "", empty,
  all-zero UUID, and null for records;
- some structs have fields of ours behind tags that are far from Kafka's, which others skip (OWN_TAGGED).
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import sys
import types
import typing
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Final, Literal

from kio.schema.index import api_key_map, schema_name_map
from kio.static.constants import EntityType

from headrace.errors import Unsupported
from headrace.wire.api import (
    DESCRIBE_TRANSACTIONS,
    FETCH,
    FIND_COORDINATOR,
    HEADRACE_APIS,
    METADATA,
    OFFSET_FETCH,
    READ_SHARE_GROUP_STATE,
    WRITE_SHARE_GROUP_STATE,
    WRITE_TXN_MARKERS,
)

Direction = Literal["request", "response"]

ZERO_UUID: Final = bytes(16)
STRUCT: Final = "struct"

# Kinds of one fixed width, with their code in the `struct` module.
FIXED: Final[dict[str, str]] = {
    "int8": "b",
    "int16": "h",
    "int32": "i",
    "int64": "q",
    "uint8": "B",
    "uint16": "H",
    "uint32": "I",
    "uint64": "Q",
    "float64": "d",
    "bool": "?",
    "uuid": "16s",
    "error_code": "h",
    "timedelta_i32": "i",
    "timedelta_i64": "q",
    "datetime_i64": "q",
}
VARIABLE: Final = frozenset({"string", "bytes", "records"})
TIMES: Final = frozenset({"timedelta_i32", "timedelta_i64", "datetime_i64"})
NO_TIMESTAMP: Final = -1

_IMPLICIT_DEFAULTS: Final[dict[str, Any]] = {
    "bool": False,
    "float64": 0.0,
    "uuid": ZERO_UUID,
    "string": "",
    "bytes": b"",
    "records": None,
    STRUCT: None,
}

# Versions whose fields together are all the fields that an API ever had, besides those of its oldest and
# newest version; a test compares this with the union over every version.
_MIDDLE_VERSIONS: Final[dict[int, tuple[int, ...]]] = {
    FETCH: (12,),
    METADATA: (10,),
    OFFSET_FETCH: (7, 9),
    FIND_COORDINATOR: (3,),
}


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a struct in one version. `nullable` speaks of the array when `is_array`.

    The default of an array is () or None, that of a struct None: it stands for a struct of defaults
    unless `nullable`.
    """

    name: str
    kind: str
    struct: Struct | None
    is_array: bool
    nullable: bool
    tag: int | None
    default: Any
    has_default: bool


@dataclass(frozen=True, slots=True)
class Struct:
    """A struct in one version: `plain` fields in wire order, then `tagged` ones in order of tag."""

    name: str
    flexible: bool
    plain: tuple[Field, ...]
    tagged: tuple[Field, ...]

    @property
    def fields(self) -> tuple[Field, ...]:
        return self.plain + self.tagged


OWN_TAG: Final = 10_000
"""The first tag of ours."""
# Who has acquired these records and until when, by the wall clock, or until when nobody does; of those that wait for
# their dead letters why, and under which identity they are sent: Kafka keeps none of it.
_OWNER: Final = (
    Field("member", "string", None, False, False, OWN_TAG, "", True),
    Field("until_ms", "int64", None, False, False, OWN_TAG + 1, 0, True),
    Field("letter_reason", "int8", None, False, False, OWN_TAG + 2, -1, True),
    Field("letter_producer_id", "int64", None, False, False, OWN_TAG + 3, -1, True),
    Field("letter_sequence", "int32", None, False, False, OWN_TAG + 4, 0, True),
)
# The load of a share partition at the leader of its data, of which only the last may write; -1: nobody counts them.
_LOAD: Final = (Field("load_id", "int64", None, False, False, OWN_TAG, -1, True),)
OWN_TAGGED: Final[dict[tuple[int, str], tuple[Field, ...]]] = {
    # Which transaction of its transactional id a marker ends; -1: nobody has counted (records.control).
    (WRITE_TXN_MARKERS, "WritableTxnMarker"): (Field("number", "int64", None, False, False, OWN_TAG, -1, True),),
    # Who opened a transaction that is described; empty: nobody has noted it.
    (DESCRIBE_TRANSACTIONS, "TransactionState"): (
        Field("owner_client_id", "string", None, False, False, OWN_TAG, "", True),
        Field("owner_host", "string", None, False, False, OWN_TAG + 1, "", True),
    ),
    (READ_SHARE_GROUP_STATE, "PartitionData"): _LOAD,
    (READ_SHARE_GROUP_STATE, "StateBatch"): _OWNER,
    # The leader epoch in which the state was last written; -1: nobody says.
    (READ_SHARE_GROUP_STATE, "PartitionResult"): (
        Field("written_epoch", "int32", None, False, False, OWN_TAG, -1, True),
    ),
    (WRITE_SHARE_GROUP_STATE, "PartitionData"): _LOAD,
    (WRITE_SHARE_GROUP_STATE, "StateBatch"): _OWNER,
}
"""By the API and the name of the struct, in flexible versions."""


def api_name(api_key: int) -> str:
    """The name of an API as in `offset_fetch`, or `api 99` for one that kio does not know."""
    return api_key_map.get(api_key, f"api {api_key}")


@cache
def api_versions_known(api_key: int) -> tuple[int, int]:
    """The lowest and highest version with a schema; no schema module is imported."""
    if api_key in HEADRACE_APIS:
        return HEADRACE_APIS[api_key].min_version, HEADRACE_APIS[api_key].max_version
    if api_key not in api_key_map:
        raise Unsupported(f"API key {api_key} has no schema")
    versions = schema_name_map[api_key_map[api_key]]
    return min(versions), max(versions)


@cache
def load(api_key: int, version: int, direction: Direction) -> Struct:
    """The struct of a request or response body."""
    lowest, highest = api_versions_known(api_key)
    if not lowest <= version <= highest:
        raise Unsupported(
            f"{api_name(api_key)} version {version} has no schema: versions {lowest} to {highest} are known"
        )
    if api_key in HEADRACE_APIS:
        return import_module("headrace.wire.own_schema").STRUCTS[api_key, version, direction]  # type: ignore[no-any-return]
    entity: Any = EntityType[direction]
    path = schema_name_map[api_key_map[api_key]][version][entity]
    module, _, name = path.partition(":")
    _import_primitives()
    return _read_struct(getattr(import_module(module), name))


@cache
def _import_primitives() -> None:
    """Import kio's types without `hypothesis`, which they load when it is installed: 0.3 s of a broker's start."""
    hidden = "hypothesis" not in sys.modules
    if hidden:
        sys.modules["hypothesis"] = None  # type: ignore[assignment]
    try:
        import_module("kio.static.primitive")
    finally:
        if hidden:
            del sys.modules["hypothesis"]


@cache
def error_codes() -> dict[int, tuple[str, bool]]:
    """Every error code of the protocol: its name in words, and whether a second try makes sense."""
    _import_primitives()
    codes: Any = import_module("kio.schema.errors").ErrorCode
    return {int(code): (code.name.removesuffix("_exception").replace("_", " "), code.retriable) for code in codes}


def versions_with_all_fields(api_key: int) -> tuple[int, ...]:
    """Versions, oldest first, whose fields together are all the fields the API ever had."""
    lowest, highest = api_versions_known(api_key)
    return tuple(sorted({lowest, *_MIDDLE_VERSIONS.get(api_key, ()), highest}))


def _read_struct(entity: Any) -> Struct:
    fields = [_read_field(field) for field in dataclasses.fields(entity)]
    if entity.__flexible__:
        fields += OWN_TAGGED.get((entity.__api_key__, entity.__name__), ())
    tagged = [field for field in fields if field.tag is not None]
    return Struct(
        name=entity.__name__,
        flexible=entity.__flexible__,
        plain=tuple(field for field in fields if field.tag is None),
        tagged=tuple(sorted(tagged, key=lambda field: field.tag or 0)),
    )


def _read_field(field: dataclasses.Field[Any]) -> Field:
    value_type, nullable = _without_none(field.type)
    is_array = typing.get_origin(value_type) is tuple
    if is_array:
        value_type, _ = _without_none(typing.get_args(value_type)[0])
    struct = _read_struct(value_type) if dataclasses.is_dataclass(value_type) else None
    kind = STRUCT if struct is not None else field.metadata["kafka_type"]
    if kind not in FIXED and kind not in VARIABLE and kind != STRUCT:
        raise NotImplementedError(f"field {field.name} is of the unknown kind {kind}")
    has_default = field.default is not dataclasses.MISSING
    return Field(
        name=f"{field.name}_ms" if kind in TIMES else field.name,
        kind=kind,
        struct=struct,
        is_array=is_array,
        # None of a fixed-width kind is a value of that width (zero UUID, timestamp -1), not a null.
        nullable=nullable and (is_array or kind not in FIXED),
        tag=field.metadata.get("tag"),
        default=_plain_default(field.default, kind, value_type) if has_default else _implicit_default(kind, is_array),
        has_default=has_default,
    )


def _without_none(annotation: Any) -> tuple[Any, bool]:
    if typing.get_origin(annotation) not in (types.UnionType, typing.Union):
        return annotation, False
    (value_type,) = (member for member in typing.get_args(annotation) if member is not types.NoneType)
    return value_type, True


def _implicit_default(kind: str, is_array: bool) -> Any:
    return () if is_array else _IMPLICIT_DEFAULTS.get(kind, 0)


def _plain_default(default: Any, kind: str, value_type: Any) -> Any:
    """A default of kio in the terms of this table."""
    if isinstance(default, datetime.timedelta):
        return default // datetime.timedelta(milliseconds=1)
    if isinstance(default, enum.Enum):
        return default.value
    if default is None and kind == "uuid":
        return ZERO_UUID
    if default is None and kind == "datetime_i64":
        return NO_TIMESTAMP
    if dataclasses.is_dataclass(default):
        if default != value_type():
            raise NotImplementedError(f"the default {default} is not the struct of its own defaults")
        return None
    if default is None or default == () or isinstance(default, bool):
        return default
    for plain in (int, float, str):
        if isinstance(default, plain):
            return plain(default)
    raise NotImplementedError(f"the default {default!r} of a {kind} field")
