"""Every setting of Headrace in its type, read from wherever it is given; `headrace.settings.declared` has the tables.

A broker setting comes, weakest first, from its default, the config file (TOML), the environment
(`HEADRACE_` + the name in capitals, dots as underscores) and the command line (`--set name=value`), by the same name.
A registry's settings come the same way.
A topic setting has the broker-wide default `log.<name>`. Unknown names are refused with the nearest known one.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, overload

from headrace.errors import InvalidConfig, SettingError
from headrace.settings.broker import BROKER_SETTINGS
from headrace.settings.declared import (
    FOREVER_MS,
    GROUP_SETTINGS,
    LEVELS,
    TOPIC_SETTINGS,
    Secret,
    Setting,
    Value,
    text_of,
)
from headrace.settings.registry import REGISTRY_SETTINGS, USED_BY_REGISTRY

if TYPE_CHECKING:
    from headrace.settings.names import Flag, Fraction, Hidden, Number, Text, TextList

__all__ = [
    "BROKER_BY_NAME",
    "BROKER_SETTINGS",
    "CLIENT_VARIABLES",
    "DEFAULTS_FOR_TOPICS",
    "FOREVER_MS",
    "GROUP_BY_NAME",
    "REGISTRY_BY_NAME",
    "REGISTRY_SETTINGS",
    "TOPIC_BY_NAME",
    "TOPIC_SETTINGS",
    "BrokerSettings",
    "LogSettings",
    "Secret",
    "Setting",
    "Value",
    "check_topic_overrides",
    "load",
    "log_settings",
    "plain_texts",
    "read_topic_overrides",
    "text_of",
]  # fmt: skip

DEFAULTS_FOR_TOPICS: Final = tuple(
    replace(s, name="log." + s.name, meaning="topic default: " + s.meaning) for s in TOPIC_SETTINGS
)
TOPIC_BY_NAME: Final = {setting.name: setting for setting in TOPIC_SETTINGS}
GROUP_BY_NAME: Final = {setting.name: setting for setting in GROUP_SETTINGS}
CLIENT_VARIABLES: Final = frozenset(
    "HEADRACE_" + name
    for name in (
        *("BOOTSTRAP", "REGISTRY", "TIMEOUT", "CONTEXT", "CONFIG", "SPARK_CLASSES"),
        *("TLS", "TLS_CA", "TLS_CERT", "TLS_KEY_PASSWORD", "TLS_KEY_PASSWORD_FILE"),
    )
)
"""Read by the command line when it talks to a server or starts Spark; a server that finds them passes over them."""
BROKER_BY_NAME: Final = {setting.name: setting for setting in (*BROKER_SETTINGS, *DEFAULTS_FOR_TOPICS)}
REGISTRY_BY_NAME: Final = {setting.name: setting for setting in REGISTRY_SETTINGS} | {
    name: BROKER_BY_NAME[name] for name in USED_BY_REGISTRY
}
ENVIRONMENT: Final = "environment"
_KNOWN: Final = BROKER_BY_NAME | REGISTRY_BY_NAME
"""A file may hold both kinds: each server reads its own."""


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """The effective settings of a broker or registry, with where each came from."""

    values: Mapping[str, Value]
    sources: Mapping[str, str]
    """`default`, `file PATH`, `environment VARIABLE`, `flag`; in a cluster also `cluster` and `broker`."""

    @overload
    def __getitem__(self, name: Number) -> int: ...
    @overload
    def __getitem__(self, name: Fraction) -> float: ...
    @overload
    def __getitem__(self, name: Flag) -> bool: ...
    @overload
    def __getitem__(self, name: Text) -> str: ...
    @overload
    def __getitem__(self, name: TextList) -> tuple[str, ...]: ...
    @overload
    def __getitem__(self, name: Hidden) -> Secret: ...
    def __getitem__(self, name: str) -> Value:
        return self.values[name]

    def topic_defaults(self) -> dict[str, Value]:
        return {setting.name: self.values["log." + setting.name] for setting in TOPIC_SETTINGS}


AS_PRODUCED: Final = -1
_CODECS: Final = {"producer": AS_PRODUCED, "uncompressed": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}


@dataclass(frozen=True, slots=True)
class LogSettings:
    """A topic's settings in the types that storage and partitions use on every append."""

    durability: str
    compact: bool
    delete: bool
    retention_ms: int
    retention_bytes: int
    retention_archived: bool
    segment_bytes: int
    segment_ms: int
    segment_jitter_ms: int
    preallocate: bool
    segment_index_bytes: int
    index_interval_bytes: int
    max_message_bytes: int
    append_time: bool
    timestamp_before_max_ms: int
    timestamp_after_max_ms: int
    checks_records: bool
    """Whether a batch's records are looked at one by one before it is taken."""
    flush_messages: int
    flush_ms: int
    delete_retention_ms: int
    min_compaction_lag_ms: int
    max_compaction_lag_ms: int
    min_cleanable_dirty_ratio: float
    min_insync_replicas: int
    replication_point: str
    replication_policy: str
    file_delete_delay_ms: int
    codec: int
    """Number of the codec that batches are stored in; AS_PRODUCED: in that of their producer."""
    codec_level: int | None
    key_index: bool
    delays: bool
    """Whether records can be delayed."""
    delay_max_ms: int


def log_settings(
    defaults: Mapping[str, Value] | None = None, overrides: Mapping[str, str] | None = None
) -> LogSettings:
    """The typed settings of one topic: its overrides, as far as they are known here, over the broker's defaults."""
    v: dict[str, Any] = {setting.name: setting.default for setting in TOPIC_SETTINGS}
    v.update(defaults or {})
    own = read_topic_overrides(overrides or {})
    v.update(LEVELS.get(str(own.get("reliability", v["reliability"])), {}))
    v.update(own)
    compact, append_time = "compact" in v["cleanup.policy"], v["message.timestamp.type"] == "LogAppendTime"
    delays = v["headrace.delay.enable"] and not compact
    before_ms, after_ms = v["message.timestamp.before.max.ms"], v["message.timestamp.after.max.ms"]
    return LogSettings(
        durability=v["durability"],
        compact=compact,
        delete="delete" in v["cleanup.policy"],
        retention_ms=v["retention.ms"],
        retention_bytes=v["retention.bytes"],
        retention_archived=v["retention.archived"],
        segment_bytes=v["segment.bytes"],
        segment_ms=v["segment.ms"],
        segment_jitter_ms=v["segment.jitter.ms"],
        preallocate=v["preallocate"],
        segment_index_bytes=v["segment.index.bytes"],
        index_interval_bytes=v["index.interval.bytes"],
        max_message_bytes=v["max.message.bytes"],
        append_time=append_time,
        timestamp_before_max_ms=before_ms,
        timestamp_after_max_ms=after_ms,
        checks_records=compact or delays or (not append_time and min(before_ms, after_ms) < FOREVER_MS),
        flush_messages=v["flush.messages"],
        flush_ms=v["flush.ms"],
        delete_retention_ms=v["delete.retention.ms"],
        min_compaction_lag_ms=v["min.compaction.lag.ms"],
        max_compaction_lag_ms=v["max.compaction.lag.ms"],
        min_cleanable_dirty_ratio=v["min.cleanable.dirty.ratio"],
        min_insync_replicas=v["min.insync.replicas"],
        replication_point=v["replication.point"],
        replication_policy=v["replication.policy"],
        file_delete_delay_ms=v["file.delete.delay.ms"],
        codec=_CODECS[v["compression.type"]],
        codec_level=v.get(f"compression.{v['compression.type']}.level"),
        key_index=v["key.index"],
        delays=delays,
        delay_max_ms=v["headrace.delay.max.ms"],
    )


def check_topic_overrides(overrides: Mapping[str, str]) -> dict[str, Value]:
    """The overrides in their types; InvalidConfig names the first that is wrong."""
    checked: dict[str, Value] = {}
    for name, given in overrides.items():
        setting = TOPIC_BY_NAME.get(name)
        if setting is None:
            raise InvalidConfig(f"unknown topic setting {name!r}{nearest(name, TOPIC_BY_NAME)}")
        try:
            checked[name] = setting.parse(given)
        except SettingError as error:
            raise InvalidConfig(str(error)) from None
    policy = checked.get("cleanup.policy")
    if checked.get("headrace.delay.enable") and isinstance(policy, tuple) and "compact" in policy:
        raise InvalidConfig("headrace.delay.enable: records of a compacted topic (cleanup.policy) cannot be delayed")
    return checked


def plain_texts(given: Mapping[str, str], known: Mapping[str, Setting]) -> dict[str, str]:
    """What was checked, as it is stored: durations and sizes as plain numbers. Unknown names are kept as they are."""
    return {name: known[name].plain(text) if name in known else text for name, text in given.items()}


def read_topic_overrides(overrides: Mapping[str, str]) -> dict[str, Value]:
    """The overrides that a topic has, in their types. Names that this version does not know are passed over: a newer
    broker of the cluster has checked them, and they are for those that know them."""
    return check_topic_overrides({name: text for name, text in overrides.items() if name in TOPIC_BY_NAME})


def load(
    file: str | None = None, environment: Mapping[str, str] | None = None, flags: Mapping[str, object] | None = None
) -> BrokerSettings:
    """Effective settings from all sources; SettingError names source and setting."""
    values: dict[str, Value] = {name: setting.default for name, setting in _KNOWN.items()}
    sources = dict.fromkeys(values, "default")
    for place, given in (
        (f"file {file}", _from_file(file) if file else {}),
        (ENVIRONMENT, _from_environment(os.environ if environment is None else environment)),
        ("flag", dict(flags or {})),
    ):
        for name, raw in given.items():
            source = f"{place} {variable_of(name)}" if place == ENVIRONMENT else place
            setting = _KNOWN.get(name)
            if setting is None:
                raise SettingError(f"{source}: unknown setting {name!r}{nearest(name, _KNOWN)}")
            try:
                values[name] = setting.parse(raw)
            except SettingError as error:
                raise SettingError(f"{source}: {error}") from None
            sources[name] = source
    return BrokerSettings(values, sources)


def nearest(name: str, known: Iterable[str]) -> str:
    """What to say behind an unknown name."""
    listed = "`headrace serve --print-config` lists all"
    for kind, settings in (("topic", TOPIC_BY_NAME), ("group", GROUP_BY_NAME)):
        if known is settings:
            listed = f"docs/SETTINGS.md and `headrace config describe {kind} NAME` list all"
    close = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else f"; {listed}"


def _from_file(path: str) -> dict[str, object]:
    try:
        with open(path, "rb") as file:
            return dict(_flatten("", tomllib.load(file)))
    except OSError as error:
        raise SettingError(f"config file {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise SettingError(f"config file {path}: not valid TOML: {error}") from None


def _flatten(prefix: str, table: Mapping[str, object]) -> Iterable[tuple[str, object]]:
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _flatten(name + ".", value)
        else:
            yield name, value


def variable_of(name: str) -> str:
    """The environment's variable for a setting."""
    return "HEADRACE_" + name.upper().replace(".", "_")


def _from_environment(environment: Mapping[str, str]) -> dict[str, object]:
    by_variable = {variable_of(name): name for name in _KNOWN}
    given: dict[str, object] = {}
    for variable, value in environment.items():
        if not variable.startswith("HEADRACE_") or variable in CLIENT_VARIABLES:
            continue
        if variable not in by_variable:
            raise SettingError(f"environment: unknown variable {variable}{nearest(variable, by_variable)}")
        given[by_variable[variable]] = value
    return given
