"""Options of `format("headrace")`, under the names that Spark's Kafka source gives them.

Spark hands options over with keys in lower case. What is unknown is refused by name; what is wrong is told with what to
write instead. Settings of Kafka's own consumer that change nothing here are accepted by name, others refused.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from headrace.client import DEFAULT_BOOTSTRAP
from headrace.client.connection.connections import parse_bootstrap
from headrace.client.fetch_requests import EARLIEST, LATEST
from headrace.errors import SettingError
from headrace.records.arrow import DEFAULT_COLUMNS, TYPES
from headrace.records.isolation import Isolation, isolation_of
from headrace.settings.quantities import parse_duration_ms

T = TypeVar("T")

Offsets = dict[str, dict[int, int]]
"""Topic to partition to offset; in options -2 stands for the earliest and -1 for the latest."""

DEFAULT_TIMEOUT_MS: Final = 30_000
DEFAULT_TRIGGER_DELAY_MS: Final = 15 * 60_000


@dataclass(frozen=True, slots=True)
class Topics:
    """What is read: topics by name, by a pattern that the whole name has to match, or partitions one by one."""

    names: tuple[str, ...] = ()
    pattern: str = ""
    assigned: tuple[tuple[str, int], ...] = ()

    def describe(self) -> str:
        if self.pattern:
            return f"pattern {self.pattern}"
        return ",".join(self.names) or ",".join(f"{topic}-{partition}" for topic, partition in self.assigned)


@dataclass(frozen=True, slots=True)
class Bound:
    """One end of what is read: the same for all partitions (`offset` or `time_ms`), or one by one."""

    offset: int | None = None
    offsets: Offsets | None = None
    time_ms: int | None = None
    times_ms: Offsets | None = None


@dataclass(frozen=True, slots=True)
class SourceOptions:
    bootstrap: str
    topics: Topics
    start: Bound
    end: Bound
    columns: tuple[str, ...]
    """All that is read: Spark 4.3 tells a Python source nothing of the columns that a query uses."""
    fail_on_data_loss: bool
    late_start: Literal["error", "latest"]
    max_offsets: int | None
    min_offsets: int | None
    trigger_delay_ms: int
    min_partitions: int | None
    max_records: int | None
    group_id: str
    group_prefix: str
    push_filters: bool
    timeout_ms: int
    isolation: Isolation = Isolation.COMMITTED
    history: str = ""
    """The folder of an archive, of which is read what it has."""


EVERY: Final = (
    "kafka.bootstrap.servers",
    "bootstrap",
    "subscribe",
    "subscribePattern",
    "assign",
    "startingOffsets",
    "endingOffsets",
    "startingTimestamp",
    "endingTimestamp",
    "startingOffsetsByTimestamp",
    "endingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy",
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "minPartitions",
    "maxRecordsPerPartition",
    "includeHeaders",
    "failOnDataLoss",
    "kafka.group.id",
    "groupIdPrefix",
    "columns",
    "pushFilters",
    "timeout",
    "isolation",
    "kafka.isolation.level",
    "history",
)

IGNORED: Final = frozenset(
    name.lower()
    for name in (
        "kafkaConsumer.pollTimeoutMs",
        "fetchOffset.numRetries",
        "fetchOffset.retryIntervalMs",
        "kafka.client.id",
        "kafka.request.timeout.ms",
        "kafka.session.timeout.ms",
        "kafka.heartbeat.interval.ms",
        "kafka.max.poll.records",
        "kafka.max.poll.interval.ms",
        "kafka.max.partition.fetch.bytes",
        "kafka.fetch.max.bytes",
        "kafka.fetch.min.bytes",
        "kafka.fetch.max.wait.ms",
        "kafka.receive.buffer.bytes",
        "kafka.send.buffer.bytes",
        "kafka.reconnect.backoff.ms",
        "kafka.retry.backoff.ms",
        "kafka.metadata.max.age.ms",
        "kafka.connections.max.idle.ms",
        "kafka.allow.auto.create.topics",
    )
)
"""They tune Kafka's consumer; this reader has no use for them, and what is read does not depend on them."""

OF_SINK: Final = (
    "kafka.bootstrap.servers",
    "bootstrap",
    "topic",
    "delivery",
    "writeId",
    "batchId",
    "kafka.compression.type",
    "kafka.acks",
    "includeHeaders",
    "timeout",
    "checkpointLocation",
    "queryName",
)

IGNORED_BY_SINK: Final = frozenset(
    (
        "kafka.client.id",
        "kafka.linger.ms",
        "kafka.batch.size",
        "kafka.buffer.memory",
        "kafka.max.request.size",
        "kafka.max.block.ms",
        "kafka.max.in.flight.requests.per.connection",
        "kafka.enable.idempotence",
        "kafka.retries",
        "kafka.retry.backoff.ms",
        "kafka.request.timeout.ms",
        "kafka.delivery.timeout.ms",
    )
)
"""They tune Kafka's producer; what is written does not depend on them."""

_PLAIN: Final = {"kafka.security.protocol": "PLAINTEXT"}
"""Accepted only with this value."""


def parse(options: Mapping[str, str], *, streaming: bool, columns: tuple[str, ...] = ()) -> SourceOptions:
    """Options of a reader, and the columns of its schema; SettingError names the option that is wrong."""
    given = {key.lower(): value for key, value in options.items() if value is not None}
    refuse_unknown(given, EVERY, IGNORED)
    batch_only = [n for n in ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp") if n.lower() in given]
    if streaming and batch_only:
        raise SettingError(f"option {batch_only[0]} has no meaning for a stream; leave it out, or use spark.read")
    topics = _topics(given)
    max_offsets = _count(given, "maxOffsetsPerTrigger")
    min_offsets = _count(given, "minOffsetsPerTrigger")
    if max_offsets is not None and min_offsets is not None and min_offsets > max_offsets:
        raise SettingError(f"option minOffsetsPerTrigger={min_offsets} is above maxOffsetsPerTrigger={max_offsets}")
    return SourceOptions(
        bootstrap=bootstrap(given),
        topics=topics,
        start=_bound(given, "starting", LATEST if streaming else EARLIEST),
        end=_bound(given, "ending", LATEST),
        columns=columns or columns_of(given),
        fail_on_data_loss=flag(given, "failOnDataLoss", True),
        late_start=choice(given, "startingOffsetsByTimestampStrategy", ("error", "latest")),  # type: ignore[arg-type]
        max_offsets=max_offsets,
        min_offsets=min_offsets,
        trigger_delay_ms=duration_ms(given, "maxTriggerDelay", DEFAULT_TRIGGER_DELAY_MS),
        min_partitions=_count(given, "minPartitions"),
        max_records=_count(given, "maxRecordsPerPartition"),
        group_id=given.get("kafka.group.id", ""),
        group_prefix=given.get("groupidprefix", ""),
        push_filters=flag(given, "pushFilters", False),
        timeout_ms=duration_ms(given, "timeout", DEFAULT_TIMEOUT_MS),
        isolation=_isolation(given),
        history=_history(given),
    )


def _isolation(given: Mapping[str, str]) -> Isolation:
    """`committed` unless one says otherwise; under Kafka's name it is what Kafka's consumer takes."""
    names = [name for name in ("isolation", "kafka.isolation.level") if name in given]
    if len(names) > 1:
        raise SettingError("options isolation and kafka.isolation.level were given: one is enough")
    if not names:
        return Isolation.COMMITTED
    return read(given, names[0], Isolation.COMMITTED, isolation_of, "committed or uncommitted")


def _history(given: Mapping[str, str]) -> str:
    folder = given.get("history", "")
    if folder and _isolation(given) is Isolation.UNCOMMITTED:
        raise SettingError(
            "options history and isolation=uncommitted do not go together: an archive has only what is committed"
        )
    return folder


def refuse_unknown(given: Mapping[str, str], known: tuple[str, ...], ignored: frozenset[str]) -> None:
    names = {name.lower(): name for name in known}
    for key, value in given.items():
        if key in names or key in ignored or _PLAIN.get(key, "").lower() == value.lower() != "":
            continue
        if key in _PLAIN:
            raise SettingError(f"option {key}={value} is not served; only {_PLAIN[key]} is")
        near = difflib.get_close_matches(key, names, 1)
        hint = f"did you mean {names[near[0]]}?" if near else f"options are {', '.join(known)}"
        raise SettingError(f"unknown option {key!r}; {hint}")


def bootstrap(given: Mapping[str, str]) -> str:
    address = given.get("kafka.bootstrap.servers") or given.get("bootstrap") or DEFAULT_BOOTSTRAP
    parse_bootstrap(address)
    return address


def duration_ms(given: Mapping[str, str], name: str, default_ms: int) -> int:
    """`15m`, `10s`, `500ms`, or a bare number of milliseconds."""
    text = given.get(name.lower())
    if text is None:
        return default_ms
    try:
        return parse_duration_ms(text.lower())
    except ValueError:
        raise SettingError(f"option {name}={text!r} is not a time; write such as 15m, 10s or 500ms") from None


def _topics(given: Mapping[str, str]) -> Topics:
    ways = [name for name in ("subscribe", "subscribePattern", "assign") if name.lower() in given]
    if len(ways) != 1:
        told = " and ".join(ways) + " were given" if ways else "none was given"
        raise SettingError(f"one of the options subscribe, subscribePattern and assign is needed; {told}")
    text = given[ways[0].lower()].strip()
    if ways[0] == "subscribe":
        names = tuple(dict.fromkeys(names_in(text)))
        if not names:
            raise SettingError("option subscribe is empty; write topics such as orders,payments")
        return Topics(names=names)
    if ways[0] == "subscribePattern":
        if not text:
            raise SettingError("option subscribePattern is empty; write such as orders-.*")
        return Topics(pattern=pattern(text, "subscribePattern"))
    return Topics(assigned=_assigned(text))


def _assigned(text: str) -> tuple[tuple[str, int], ...]:
    wanted = 'option assign={!r} is not understood; write JSON such as {{"orders": [0, 1]}}'
    try:
        found = json.loads(text)
    except ValueError:
        raise SettingError(wanted.format(text)) from None
    if not isinstance(found, dict) or not found or not all(isinstance(numbers, list) for numbers in found.values()):
        raise SettingError(wanted.format(text))
    pairs = [(topic, number) for topic, numbers in found.items() for number in numbers]
    if not pairs or not all(_is_count(number) for _, number in pairs):
        raise SettingError(wanted.format(text))
    return tuple(dict.fromkeys(pairs))


def _bound(given: Mapping[str, str], which: str, default: int) -> Bound:
    """Spark-Kafka's precedence: one time for all, then times per partition, then offsets."""
    name = f"{which}Timestamp"
    if (text := given.get(name.lower())) is not None:
        return Bound(time_ms=_number(text, name))
    name = f"{which}OffsetsByTimestamp"
    if (text := given.get(name.lower())) is not None:
        return Bound(times_ms=_per_partition(text, name, least=0, example='{"orders": {"0": 1700000000000}}'))
    name = f"{which}Offsets"
    text = given.get(name.lower())
    if text is None:
        return Bound(offset=default)
    word = text.strip().lower()
    if word in ("earliest", "latest"):
        if which == "ending" and word == "earliest":
            raise SettingError("option endingOffsets=earliest would read nothing; write latest or offsets as JSON")
        return Bound(offset=EARLIEST if word == "earliest" else LATEST)
    return Bound(offsets=_per_partition(text, name, least=EARLIEST, example='{"orders": {"0": 42, "1": -1}}'))


def _per_partition(text: str, name: str, *, least: int, example: str) -> Offsets:
    """`{"topic": {"partition": number}}`, as JSON."""
    also = "earliest, latest or " if least < 0 else ""
    wrong = SettingError(f"option {name}={text!r} is not understood; write {also}JSON such as {example}")
    try:
        found = json.loads(text)
        offsets = {
            str(topic): {int(partition): number for partition, number in numbers.items()}
            for topic, numbers in found.items()
        }
    except (ValueError, AttributeError):
        raise wrong from None
    for topic, numbers in offsets.items():
        for partition, number in numbers.items():
            if not isinstance(number, int) or isinstance(number, bool) or partition < 0:
                raise wrong
            if number < least:
                told = "an offset is 0 or more, -1 for the latest, -2 for the earliest" if least < 0 else "0 or more"
                raise SettingError(f"option {name} gives {number} for {topic}-{partition}; {told}")
            if name == "endingOffsets" and number == EARLIEST:
                raise SettingError(f"option {name} gives -2 (earliest) for {topic}-{partition}: that reads nothing")
    if not offsets:
        raise wrong
    return offsets


def names_in(text: str) -> list[str]:
    """Names with commas between."""
    return [name.strip() for name in text.split(",") if name.strip()]


def pattern(text: str, name: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise SettingError(f"option {name}={text!r} is not a regular expression: {error}") from None
    return text


def columns_of(
    given: Mapping[str, str], every: Iterable[str] = TYPES, default: tuple[str, ...] = DEFAULT_COLUMNS
) -> tuple[str, ...]:
    """What `columns` and `includeHeaders` ask for, of every column that there is."""
    names = {name.lower(): name for name in every}
    asked = [name.lower() for name in names_in(given.get("columns", ",".join(default)))]
    unknown = [name for name in asked if name not in names]
    if unknown or not asked:
        told = f"has {unknown[0]!r}" if unknown else "is empty"
        raise SettingError(f"option columns {told}; write some of {','.join(every)}")
    columns = dict.fromkeys(names[name] for name in asked)
    return tuple(columns | {"headers": None} if flag(given, "includeHeaders", False) else columns)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(text: str, name: str) -> int:
    try:
        number = int(text.strip())
    except ValueError:
        number = -1
    if number < 0:
        raise SettingError(
            f"option {name}={text!r} is not a time; write milliseconds since 1970, such as 1700000000000"
        )
    return number


def _count(given: Mapping[str, str], name: str) -> int | None:
    return read(given, name, None, positive, "a number above 0")


def positive(text: str) -> int:
    number = int(text)
    if number <= 0:
        raise ValueError
    return number


def count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError
    return number


def flag(given: Mapping[str, str], name: str, default: bool) -> bool:
    return read(given, name, default, {"true": True, "false": False}.__getitem__, "true or false")


def choice(given: Mapping[str, str], name: str, choices: tuple[str, ...], wanted: str = "") -> str:
    """One of the words, the first if none is given."""
    return read(given, name, choices[0], {each: each for each in choices}.__getitem__, wanted or " or ".join(choices))


def read(given: Mapping[str, str], name: str, default: T, convert: Callable[[str], T], wanted: str) -> T:
    text = given.get(name.lower())
    if text is None:
        return default
    try:
        return convert(text.strip().lower())
    except (ValueError, KeyError):
        raise SettingError(f"option {name}={text!r} is not understood; write {wanted}") from None
