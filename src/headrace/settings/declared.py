"""What a setting is, and the table of topic settings: name, type, default, unit, bounds, one line of meaning.

Every topic setting also has the broker-wide default `log.<name>`, made from its row here. The settings of a broker are
in `headrace.settings.broker`; `headrace.settings.values` reads both from files, environment and flags.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from headrace.errors import SettingError
from headrace.settings import quantities

HIDDEN: Final = "(hidden)"
FOREVER_MS: Final = 2**63 - 1
"""The largest number that any setting can have."""


class Secret:
    """A setting's text that no listing, log line or message shows."""

    __slots__ = ("_text",)

    def __init__(self, text: str = "") -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __str__(self) -> str:
        return HIDDEN if self._text else ""

    __repr__ = __str__


Kind = Literal["int", "float", "bool", "str", "choice", "list", "secret"]
Value = int | float | bool | str | tuple[str, ...] | Secret


def text_of(value: Value) -> str:
    """A setting's value as it is written on the wire and in coordination."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(value) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    kind: Kind
    default: Value
    meaning: str
    unit: str = ""
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    pattern: str = ""
    """What each item of a list must look like."""
    fixed: str = ""
    """Why nothing but the default is taken."""

    def plain(self, given: str) -> str:
        """The text that is stored and answered: a number is one for every client, however it was written."""
        return str(self.parse(given)) if self.kind == "int" else given

    def parse(self, given: object) -> Value:
        """The value in its own type, or SettingError that says what would be right."""
        try:
            value = _convert(self, given)
        except (ValueError, TypeError, KeyError):
            raise SettingError(f"setting {self.name}: {given!r} is not {_expected(self)}") from None
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if self.least is not None and value < self.least:
                raise SettingError(f"setting {self.name}: {value} is below the least allowed, {self.least:g}")
            most = FOREVER_MS if self.most is None else self.most
            if value > most:
                raise SettingError(f"setting {self.name}: {value} is above the most allowed, {most:g}")
        chosen = value if isinstance(value, tuple) else (value,)
        if self.choices and any(item not in self.choices for item in chosen):
            raise SettingError(f"setting {self.name}: {given!r} is not one of {', '.join(self.choices)}")
        wrong = [item for item in chosen if self.pattern and not re.fullmatch(self.pattern, str(item))]
        if wrong:
            raise SettingError(f"setting {self.name}: {wrong[0]!r} is not of the form {self.unit}")
        if self.fixed and value != self.default:
            raise SettingError(f"setting {self.name}: {given!r} is refused: {self.fixed}")
        return value


def _convert(setting: Setting, given: object) -> Value:
    match setting.kind:
        case "int":
            if isinstance(given, bool):
                raise ValueError
            return given if isinstance(given, int) else _whole_number(str(given).strip(), setting.unit)
        case "float":
            return float(str(given))
        case "bool":
            if isinstance(given, bool):
                return given
            return {"true": True, "false": False}[str(given).lower()]
        case "list":
            items = given if isinstance(given, (list, tuple)) else str(given).split(",")
            return tuple(str(item).strip() for item in items if str(item).strip())
        case "secret":
            return Secret(str(given))
        case _:
            return str(given)


def _whole_number(text: str, unit: str) -> int:
    try:
        return int(text.replace("_", ""))
    except ValueError:
        if not quantities.forms(unit):
            raise
        return quantities.parse_quantity(text, unit)


def _expected(setting: Setting) -> str:
    words = {"int": "a whole number", "float": "a number", "bool": "true or false", "list": "a list"}
    forms = quantities.forms(setting.unit)
    unit = f" of {setting.unit}" if setting.unit else ""
    return words.get(setting.kind, "text") + unit + (f", nor such as {forms}" if forms else "")


LEVELS: Final[dict[str, dict[str, str]]] = {
    "page-cache": {"durability": "os", "replication.point": "none", "replication.policy": "none"},
    "local-disk": {"durability": "disk", "replication.point": "none", "replication.policy": "none"},
    "one-replica": {"durability": "disk", "replication.point": "flushed", "replication.policy": "one"},
    "all-replicas": {"durability": "disk", "replication.point": "flushed", "replication.policy": "all"},
}
"""What each named level of reliability stands for; partitions.levels says what each can lose."""

_THROTTLED: Final = r"\*|\d+:\d+"
_OFFSET_RESET: Final = r"(?i:latest|earliest|by_duration:P(?=\d|T\d)(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+(\.\d{1,9})?S)?)?)"
_BACKOFF: Final = r"|rocketmq|\d{1,10}(\s*,\s*\d{1,10}){0,99}"
_DEAD_LETTER_TOPIC: Final = r"(?!__)[a-zA-Z0-9._-]{0,249}"

TOPIC_SETTINGS: Final[tuple[Setting, ...]] = (
    Setting(
        "durability",
        "choice",
        "os",
        "when a write counts: memory (at once, never synced by us), os (in the page cache), disk (after fsync)",
        choices=("memory", "os", "disk"),
    ),
    Setting(
        "cleanup.policy",
        "list",
        ("delete",),
        "what happens to old data: delete, compact, or both",
        choices=("delete", "compact"),
    ),
    Setting("retention.ms", "int", 604_800_000, "age after which a segment is deleted; -1 keeps it", "ms", -1),
    Setting(
        "retention.bytes",
        "int",
        -1,
        "size of a partition above which its oldest segments are deleted; -1 for no limit",
        "bytes",
        -1,
    ),
    Setting(
        "retention.archived",
        "bool",
        False,
        "retention and compaction remove only what the group in archive.group has committed as archived",
    ),
    Setting(
        "segment.bytes",
        "int",
        1 << 30,
        "size at which a segment is closed and the next begun",
        "bytes",
        1 << 10,
        (1 << 31) - 1,
    ),
    Setting("segment.ms", "int", 604_800_000, "age at which a segment is closed even when small", "ms", 1),
    Setting(
        "segment.jitter.ms",
        "int",
        0,
        "how much earlier than segment.ms a segment may close, so that not all close at once; layout partitioned only",
        "ms",
        0,
    ),
    Setting(
        "preallocate",
        "bool",
        False,
        "give a segment's file all its room when it begins; layout partitioned only, a commit log is shared",
    ),
    Setting("segment.index.bytes", "int", 1 << 21, "size that an index file is given in advance", "bytes", 64, 1 << 28),
    Setting("index.interval.bytes", "int", 4096, "bytes of log between two index entries", "bytes", 1),
    Setting("max.message.bytes", "int", 1_048_588, "largest record batch taken", "bytes", 0, (1 << 31) - 1),
    Setting(
        "message.timestamp.type",
        "choice",
        "CreateTime",
        "whose clock stamps a record: the producer's or the broker's",
        choices=("CreateTime", "LogAppendTime"),
    ),
    Setting(
        "message.timestamp.before.max.ms",
        "int",
        FOREVER_MS,
        "how far a record's own time may lie before the broker's; older ones are refused (with CreateTime only)",
        "ms",
        0,
    ),
    Setting(
        "message.timestamp.after.max.ms",
        "int",
        FOREVER_MS,
        "how far a record's own time may lie after the broker's; later ones are refused (with CreateTime only)",
        "ms",
        0,
    ),
    Setting(
        "flush.messages", "int", 2**63 - 1, "records after which a log is synced, whatever its durability", "records", 1
    ),
    Setting("flush.ms", "int", 500, "interval at which a log with durability os is synced", "ms", 1),
    Setting("delete.retention.ms", "int", 86_400_000, "how long a tombstone stays in a compacted log", "ms", 0),
    Setting("min.compaction.lag.ms", "int", 0, "age below which a record is not compacted", "ms", 0),
    Setting(
        "max.compaction.lag.ms",
        "int",
        FOREVER_MS,
        "age above which a log is compacted even when little of it is dirty",
        "ms",
        1,
    ),
    Setting(
        "min.cleanable.dirty.ratio", "float", 0.5, "share of a log that must be dirty before it is compacted", "", 0, 1
    ),
    Setting(
        "min.insync.replicas",
        "int",
        0,
        "replicas that acks=-1 needs in sync, and that the high watermark does; 0 is a majority of the replicas",
        "replicas",
        0,
    ),
    Setting(
        "reliability",
        "choice",
        "",
        "a named level: what durability, replication.point and replication.policy are unless set themselves "
        "(`headrace topic levels`)",
        choices=("", *LEVELS),
    ),
    Setting(
        "replication.point",
        "choice",
        "auto",
        "how far a record must have come at a replica to count for acks=-1; auto is written, or flushed where "
        "durability is disk; what is weaker can lose acknowledged records",
        choices=("auto", "none", "queued", "sent", "received", "written", "flushed"),
    ),
    Setting(
        "replication.policy",
        "choice",
        "all",
        "how many replicas acks=-1 waits for: all (the whole in-sync set), none, one, majority, or racks (one follower "
        "in the leader's rack and one in another); what is weaker than all can lose acknowledged records",
        choices=("all", "none", "one", "majority", "racks"),
    ),
    Setting(
        "unclean.leader.election.enable",
        "bool",
        False,
        "when no in-sync replica is left, let the best of those alive lead; what it does not hold is lost",
    ),
    Setting(
        "compression.type",
        "choice",
        "producer",
        "how batches are stored: as the producer compressed them, or all in one codec, at a cost (docs/DESIGN.md)",
        choices=("producer", "uncompressed", "gzip", "snappy", "lz4", "zstd"),
    ),
    Setting(
        "compression.gzip.level",
        "int",
        -1,
        "level of compression.type gzip; -1 for the usual one",
        "-1 or 1 to 9",
        pattern="-1|[1-9]",
    ),
    Setting(
        "compression.lz4.level",
        "int",
        9,
        "level of compression.type lz4; 9 is the fast kind, as in Kafka, others the strong one",
        "",
        1,
        17,
    ),
    Setting("compression.zstd.level", "int", 3, "level of compression.type zstd", "", -131_072, 22),
    Setting(
        "file.delete.delay.ms", "int", 60_000, "how long a deleted segment's files stay for reads under way", "ms", 0
    ),
    Setting("key.index", "bool", False, "keep an index of keys, so that records can be found by key"),
    Setting(
        "headrace.delay.enable",
        "bool",
        False,
        "records with a header headrace.deliver.at or headrace.deliver.after are delivered then; switched off, what "
        "waits goes on waiting, and retention may delete it; not with cleanup.policy compact",
    ),
    Setting(
        "headrace.delay.max.ms",
        "int",
        3_456_000_000,
        "how far ahead a record may be delayed; what asks for more is refused",
        "ms",
        0,
    ),
    Setting(
        "placement",
        "choice",
        "spread",
        "where new partitions go: spread (evenly over the brokers) or ring (by consistent hash); those that are there "
        "follow at the next rebalance",
        choices=("spread", "ring"),
    ),
    Setting(
        "follower.reads",
        "bool",
        False,
        "while a partition has no leader, followers serve its readers up to their watermark",
    ),
    Setting(
        "leader.replication.throttled.replicas",
        "list",
        (),
        "kept for Kafka's tools, without effect: replica.catchup.bytes.per.second limits every replica that catches up",
        "partition:broker or *",
        pattern=_THROTTLED,
    ),
    Setting(
        "follower.replication.throttled.replicas",
        "list",
        (),
        "kept for Kafka's tools, without effect: replica.catchup.bytes.per.second limits every replica that catches up",
        "partition:broker or *",
        pattern=_THROTTLED,
    ),
    Setting(
        "errors.deadletterqueue.group.enable",
        "bool",
        False,
        "whether share groups may write their dead letters to the topic",
    ),
    Setting(
        "remote.storage.enable",
        "bool",
        False,
        "tiered storage, which is not here; false only",
        fixed="there is no tiered storage here; archive the topic and set retention.archived",
    ),
    Setting(
        "remote.log.copy.disable",
        "bool",
        False,
        "of tiered storage; false only",
        fixed="there is no tiered storage here",
    ),
    Setting(
        "remote.log.delete.on.disable",
        "bool",
        False,
        "of tiered storage; false only",
        fixed="there is no tiered storage here",
    ),
    Setting(
        "local.retention.ms",
        "int",
        -2,
        "kept, without effect as in Kafka without tiered storage: retention.ms holds, which -2 stands for",
        "ms",
        -2,
    ),
    Setting(
        "local.retention.bytes",
        "int",
        -2,
        "kept, without effect as in Kafka without tiered storage: retention.bytes holds, which -2 stands for",
        "bytes",
        -2,
    ),
)

GROUP_SETTINGS: Final[tuple[Setting, ...]] = (
    Setting(
        "consumer.session.timeout.ms",
        "int",
        45_000,
        "consumer protocol: how long a member may be silent; members of the classic protocol say it themselves",
        "ms",
        1,
        (1 << 31) - 1,
    ),
    Setting(
        "consumer.heartbeat.interval.ms",
        "int",
        5000,
        "consumer protocol: how often members are told to be heard; those of the classic protocol choose it themselves",
        "ms",
        1,
        (1 << 31) - 1,
    ),
    Setting(
        "share.session.timeout.ms",
        "int",
        45_000,
        "share groups: how long a member may be silent",
        "ms",
        1,
        (1 << 31) - 1,
    ),
    Setting(
        "share.heartbeat.interval.ms",
        "int",
        5000,
        "share groups: how often members are told to be heard",
        "ms",
        1,
        (1 << 31) - 1,
    ),
    Setting(
        "share.record.lock.duration.ms",
        "int",
        30_000,
        "share groups: how long an acquired record is locked; then it may be delivered again",
        "ms",
        1,
        (1 << 31) - 1,
    ),
    Setting(
        "share.auto.offset.reset",
        "str",
        "latest",
        "share groups: where a group begins in a partition that it has no start in; by_duration: so long ago",
        "latest, earliest or by_duration:PnDTnHnMn.nS",
        pattern=_OFFSET_RESET,
    ),
    Setting(
        "share.isolation.level",
        "choice",
        "read_uncommitted",
        "share groups: whether records of transactions that are open or were aborted are delivered",
        choices=("read_uncommitted", "read_committed"),
    ),
    Setting(
        "share.retry.backoff.ms",
        "str",
        "",
        "share groups: how long a record waits that was released, or whose lock has expired, by how often it was "
        "delivered; the last holds for all after it; rocketmq: 10 s, 30 s, 1 min ... 2 h; empty: not at all",
        "rocketmq, or up to 100 numbers of ms with commas between",
        pattern=_BACKOFF,
    ),
    Setting(
        "errors.deadletterqueue.topic.name",
        "str",
        "",
        "share groups: topic for dead letters: records that are rejected, or were delivered too often; none if empty",
        "a topic's name, not of the brokers' own",
        pattern=_DEAD_LETTER_TOPIC,
    ),
    Setting(
        "errors.deadletterqueue.copy.record.enable",
        "bool",
        False,
        "share groups: dead letters have key, value and headers of their records, not only where those are and why",
    ),
)
"""Of a group, kept by its name whether it is there or not."""
