"""The table of settings: what each is called, its type, default, unit, bounds, and one line of meaning.

Topic settings first, then those of a broker; every topic setting also has the broker-wide default `log.<name>`, made
from its row here. `headrace.settings` reads them from files, environment and flags.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from headrace.errors import SettingError

HIDDEN: Final = "(hidden)"


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

    def parse(self, given: object) -> Value:
        """The value in its own type, or SettingError that says what would be right."""
        try:
            value = _convert(self, given)
        except (ValueError, TypeError, KeyError):
            raise SettingError(f"setting {self.name}: {given!r} is not {_expected(self)}") from None
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if self.least is not None and value < self.least:
                raise SettingError(f"setting {self.name}: {value} is below the least allowed, {self.least:g}")
            if self.most is not None and value > self.most:
                raise SettingError(f"setting {self.name}: {value} is above the most allowed, {self.most:g}")
        chosen = value if isinstance(value, tuple) else (value,)
        if self.choices and any(item not in self.choices for item in chosen):
            raise SettingError(f"setting {self.name}: {given!r} is not one of {', '.join(self.choices)}")
        return value


def _convert(setting: Setting, given: object) -> Value:
    match setting.kind:
        case "int":
            if isinstance(given, bool):
                raise ValueError
            return int(given) if isinstance(given, int) else int(str(given).replace("_", ""))
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


def _expected(setting: Setting) -> str:
    words = {"int": "a whole number", "float": "a number", "bool": "true or false", "list": "a list"}
    return words.get(setting.kind, "text") + (f" of {setting.unit}" if setting.unit else "")


FOREVER_MS: Final = 2**63 - 1

LEVELS: Final[dict[str, dict[str, str]]] = {
    "page-cache": {"durability": "os", "replication.point": "none", "replication.policy": "none"},
    "local-disk": {"durability": "disk", "replication.point": "none", "replication.policy": "none"},
    "one-replica": {"durability": "disk", "replication.point": "flushed", "replication.policy": "one"},
    "all-replicas": {"durability": "disk", "replication.point": "flushed", "replication.policy": "all"},
}
"""What each named level of reliability stands for; partitions.levels says what each can lose."""

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
        "batches are stored as the producer compressed them",
        choices=("producer",),
    ),
    Setting(
        "file.delete.delay.ms", "int", 60_000, "how long a deleted segment's files stay for reads under way", "ms", 0
    ),
    Setting("key.index", "bool", False, "keep an index of keys, so that records can be found by key"),
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
)

BROKER_SETTINGS: Final[tuple[Setting, ...]] = (
    Setting("node.id", "int", 1, "number of this broker in the cluster", "", 0, (1 << 31) - 1),
    Setting("cluster.id", "str", "", "name of the cluster; empty draws one at first start and keeps it"),
    Setting("rack", "str", "", "where this broker stands; replicas avoid sharing one"),
    Setting("data", "str", "./data", "folder of everything this broker keeps"),
    Setting(
        "coordination",
        "str",
        "embedded",
        "where the cluster's metadata is: embedded (a file of this broker, which is then alone) or "
        "etcd://host:port,host:port",
    ),
    Setting("etcd.tls.ca", "str", "", "PEM file with the CA of etcd's certificates; set, etcd is spoken to by TLS"),
    Setting("etcd.tls.cert", "str", "", "PEM file with the certificate that this broker shows to etcd"),
    Setting("etcd.tls.key", "str", "", "PEM file with the private key of that certificate"),
    Setting("etcd.user", "str", "", "user of etcd; it needs readwrite on the keys below /headrace/"),
    Setting("etcd.password", "secret", Secret(), "password of that user; never shown"),
    Setting("listen", "list", ("127.0.0.1:9092",), "Kafka listeners: [name=][tls://]host:port"),
    Setting("advertise", "list", (), "address that clients are told, per listener: [name=]host:port"),
    Setting("http.listen", "str", "127.0.0.1:8082", "HTTP port: host:port, or off"),
    Setting(
        "replication.listen",
        "str",
        "auto",
        "port for the other brokers: host:port, off, or auto: 127.0.0.1 in a cluster, off without one",
    ),
    Setting("replication.advertise", "str", "", "address of that port as the other brokers reach it: host:port"),
    Setting(
        "replication.tls.ca",
        "str",
        "",
        "PEM file of the authority of all brokers' certificates; links between brokers then use TLS and check both",
    ),
    Setting(
        "broker.lease.ms",
        "int",
        10_000,
        "how long a silent broker counts as alive; a killed leader is replaced after so long",
        "ms",
        500,
        600_000,
    ),
    Setting(
        "leader.rebalance.ms",
        "int",
        300_000,
        "interval at which leaderships go back to preferred leaders that are in sync; 0 for only by command",
        "ms",
        0,
    ),
    Setting(
        "replica.lag.time.max.ms",
        "int",
        10_000,
        "a follower that is silent or behind for so long leaves the in-sync set",
        "ms",
        100,
    ),
    Setting(
        "replica.window.bytes",
        "int",
        16 << 20,
        "bytes on their way to one follower broker before the leader waits for it",
        "bytes",
        1 << 16,
    ),
    Setting(
        "replica.catchup.bytes.per.second",
        "int",
        50 << 20,
        "rate at which a leader sends old data to followers that catch up; 0 for no limit",
        "bytes",
        0,
    ),
    Setting("replica.link.timeout.ms", "int", 3000, "silence after which a link between brokers is closed", "ms", 100),
    Setting("tls.certificate", "str", "", "PEM file with the certificate chain for tls:// listeners"),
    Setting("tls.key", "str", "", "PEM file with the private key for tls:// listeners"),
    Setting("log.format", "choice", "text", "how the broker's own log lines look", choices=("text", "json")),
    Setting("log.level", "choice", "info", "how much the broker says", choices=("debug", "info", "warning", "error")),
    Setting("auto.create.topics.enable", "bool", True, "a producer or consumer naming an unknown topic creates it"),
    Setting("num.partitions", "int", 1, "partitions of a topic created without a count", "partitions", 1, 10_000),
    Setting(
        "default.replication.factor",
        "int",
        1,
        "replicas of a partition of a topic created without a number of them",
        "replicas",
        1,
        1000,
    ),
    Setting("partitions.max", "int", 10_000, "most partitions that this broker takes", "partitions", 1),
    Setting(
        "frame.max.bytes",
        "int",
        100 << 20,
        "largest request taken; a larger one closes the connection",
        "bytes",
        1 << 10,
        (1 << 31) - 1,
    ),
    Setting(
        "connections.max", "int", 10_000, "most open connections; further ones are closed at once", "connections", 1
    ),
    Setting(
        "connection.requests.max",
        "int",
        1000,
        "requests in flight per connection before it is not read any more",
        "requests",
        1,
    ),
    Setting(
        "connection.queued.bytes",
        "int",
        4 << 20,
        "unsent response bytes per connection before it is not read any more",
        "bytes",
        1 << 10,
    ),
    Setting("connection.idle.ms", "int", 600_000, "silence after which a connection is closed", "ms", 1000),
    Setting(
        "fetch.max.bytes", "int", 55 << 20, "most bytes in one fetch response, whatever the client asks", "bytes", 1024
    ),
    Setting("request.timeout.max.ms", "int", 300_000, "longest wait a request may ask for", "ms", 1),
    Setting(
        "receive.buffer.total.bytes",
        "int",
        256 << 20,
        "memory of all receive buffers together before large frames have to wait",
        "bytes",
        1 << 20,
    ),
    Setting("sync.helper", "bool", True, "sync files in a helper process, so that the loop never waits for the disk"),
    Setting(
        "log.layout",
        "choice",
        "auto",
        "how the data folder keeps logs; auto is what the folder has, partitioned in a new one (docs/LAYOUTS.md)",
        choices=("auto", "partitioned", "shared"),
    ),
    Setting(
        "commitlog.file.bytes",
        "int",
        1 << 30,
        "layout shared: size at which the next file of the commit log begins",
        "bytes",
        1 << 16,
        1 << 31,
    ),
    Setting(
        "commitlog.rewrite.share",
        "float",
        0.25,
        "layout shared: a file of which less than this share is still wanted is emptied into the newest one",
        "",
        0,
        0.5,
    ),
    Setting("retention.check.ms", "int", 300_000, "interval at which retention and compaction look for work", "ms", 10),
    Setting(
        "archive.group",
        "str",
        "headrace-archive",
        "group whose committed offsets say what is archived, for topics with retention.archived; they never expire",
    ),
    Setting("key.index.entries", "int", 20_000_000, "most entries of a key index file", "entries", 64, 1 << 30),
    Setting("key.index.slots", "int", 5_000_000, "most hash slots of a key index file", "slots", 1, 1 << 30),
    Setting("checkpoint.ms", "int", 60_000, "interval at which recovery points are written", "ms", 10),
    Setting(
        "producer.expire.ms", "int", 86_400_000, "how long the state of a silent idempotent producer is kept", "ms", 1
    ),
    Setting(
        "offsets.topic.partitions",
        "int",
        50,
        "partitions of __consumer_offsets, fixed when it is created",
        "partitions",
        1,
        1000,
    ),
    Setting(
        "offsets.topic.replication.factor",
        "int",
        0,
        "replicas of __consumer_offsets, fixed when it is created; 0: three, or as many as there are brokers alive",
        "replicas",
        0,
        1000,
    ),
    Setting("offsets.retention.ms", "int", 604_800_000, "how long an empty group's offsets are kept", "ms", 1),
    Setting("offsets.metadata.max.bytes", "int", 4096, "largest metadata text with a committed offset", "bytes", 0),
    Setting(
        "group.initial.rebalance.delay.ms",
        "int",
        100,
        "how long an empty group waits for more members before its first rebalance",
        "ms",
        0,
    ),
    Setting("group.min.session.timeout.ms", "int", 1000, "shortest session timeout that a member may ask for", "ms", 1),
    Setting(
        "group.max.session.timeout.ms", "int", 1_800_000, "longest session timeout that a member may ask for", "ms", 1
    ),
    Setting("group.max.size", "int", 1000, "most members of one group", "members", 1),
    Setting("groups.max", "int", 100_000, "most groups that one broker keeps", "groups", 1),
    Setting("http.body.max.bytes", "int", 16 << 20, "largest HTTP request body", "bytes", 1024),
)
