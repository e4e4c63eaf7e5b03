"""The image of the cluster's metadata: immutable, folded from the keys in coordination (cluster.keys). Pure.

`apply` answers a new image once per watch response and shares everything that did not change, so a reader keeps the
image that it began with and takes no lock, and `is` tells whether a topic has changed. A topic is in `topics` when its
key says "live"; before that it is in `unfinished`.

Keys can be lost, by a hand or a restore, and what they named is not deleted by that (`deleted` tells what is):
- a partition without its key keeps its place in the topic, without replicas (`PartitionState.is_missing`);
- a topic without its key, of which there are partitions, goes on as it was last seen, with revision 0; who has never
  seen it has it in `keyless`, and does not serve it: its settings are not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final
from urllib.parse import unquote

from headrace.cluster import keys
from headrace.cluster.controller_state import Controls, with_event
from headrace.errors import CoordinationError
from headrace.ports.coordination import Event, KeyValue, Listing, WatchResponse

LIVE: Final = "live"
CREATING: Final = "creating"
LEAVING: Final = "leaving"
NO_LEADER: Final = -1
NO_BROKER: Final = -1
NO_EPOCH: Final = -1


@dataclass(frozen=True, slots=True)
class Endpoint:
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Previous:
    """What a broker was before this start of it: whether it stopped in order, under which boot of its kernel, and the
    logs, by topic id and partition, that hold less than they did, however it stopped. `began` is the revision of the
    metadata that it began with, if all that its logs held was synced then.
    """

    incarnation: str
    boot: str
    clean: bool
    lost: frozenset[tuple[bytes, int]] = frozenset()
    began: int = 0


@dataclass(frozen=True, slots=True)
class Broker:
    """A registration. `incarnation` is drawn anew by every process; `revision` is what a change compares with."""

    id: int
    listeners: Mapping[str, Endpoint]
    incarnation: str
    started_ms: int
    rack: str = ""
    http: Endpoint | None = None
    replication: Endpoint | None = None
    boot: str = ""
    previous: Previous | None = None
    state: str = LIVE
    revision: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Lost:
    """What an election outside the in-sync set has cost: offsets from `start` up to the highest watermark known; up to
    -1 if replicas that were away may have held more.
    """

    epoch: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class PartitionState:
    """One partition's key. `revision` is what a change of it compares with."""

    index: int
    leader: int
    leader_epoch: int
    isr: tuple[int, ...]
    replicas: tuple[int, ...]
    revision: int = 0
    incarnations: Mapping[int, str] = field(default_factory=dict)
    """Of each member of isr: one that is registered with another is no valid member."""
    controller: int = 0
    """Epoch of the controller that wrote the key last."""
    lost: Lost | None = None
    target: tuple[int, ...] = ()
    """Where the replicas are being moved to; empty when no move is under way (placement.moves)."""
    adding: tuple[int, ...] = ()
    """Those of `replicas` that are there for the move only; cancelling it takes them away."""
    least_start: int = 0
    """No leader lets the partition begin below: the last election by reports found a replica that begins there."""

    @property
    def is_missing(self) -> bool:
        """Whether there is no key, though its topic should have this partition."""
        return not self.replicas


@dataclass(frozen=True, slots=True)
class Topic:
    name: str
    id: bytes
    partitions: tuple[PartitionState, ...]
    overrides: Mapping[str, str] = field(default_factory=dict)
    internal: bool = False
    state: str = LIVE
    revision: int = 0
    """0: its key is not there, or not yet."""
    durability_altered: bool = False
    """Whether its durability is, or was, another one than it was created with."""

    @property
    def missing(self) -> tuple[int, ...]:
        """The partitions without a key."""
        return tuple(state.index for state in self.partitions if state.is_missing)


@dataclass(frozen=True, slots=True)
class Deletion:
    """A topic that somebody has deleted: brokers delete its logs, and nothing else lets them."""

    topic: str
    brokers: tuple[int, ...]
    """Those that have yet to do it."""
    at_ms: int
    revision: int = 0


@dataclass(frozen=True, slots=True)
class StoredValue:
    """A cluster-wide setting of the users' own. `revision` is what a change of it compares with."""

    text: str
    revision: int


@dataclass(frozen=True, slots=True)
class _TopicKey:
    """A topic's own key; its partitions are put beside it by `_assemble`."""

    id: bytes
    count: int
    overrides: Mapping[str, str]
    internal: bool
    state: str
    revision: int
    durability_altered: bool = False


_Partitions = Mapping[int, tuple[bytes, PartitionState]]


@dataclass(frozen=True, slots=True)
class Image:
    prefix: str
    revision: int = 0
    version: int = 0
    brokers: Mapping[int, Broker] = field(default_factory=dict)
    topics: Mapping[str, Topic] = field(default_factory=dict)
    topics_by_id: Mapping[bytes, Topic] = field(default_factory=dict)
    unfinished: Mapping[str, Topic] = field(default_factory=dict)
    keyless: Mapping[str, Topic] = field(default_factory=dict)
    """Of which only partitions have keys, and which this process has never seen otherwise."""
    deleted: Mapping[bytes, Deletion] = field(default_factory=dict)
    """By topic id."""
    cluster_config: Mapping[str, str] = field(default_factory=dict)
    broker_configs: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    group_configs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    config_revisions: Mapping[str, int] = field(default_factory=dict)
    """Revision of each config key that is there, for compares."""
    values: Mapping[str, StoredValue] = field(default_factory=dict)
    controls: Controls = field(default_factory=Controls)
    _topic_keys: Mapping[str, _TopicKey] = field(default_factory=dict)
    _partition_keys: Mapping[str, _Partitions] = field(default_factory=dict)

    def partition(self, topic: str, index: int) -> PartitionState | None:
        """None also for one whose key is missing."""
        found = self.topics.get(topic)
        if found is None or not 0 <= index < len(found.partitions):
            return None
        state = found.partitions[index]
        return None if state.is_missing else state

    def controller_id(self) -> int:
        """The live broker that is controller, -1 while none is."""
        found = self.controls.controller
        return found.broker if found is not None and found.broker in self.brokers else NO_BROKER

    def partition_count(self) -> int:
        return sum(len(topic.partitions) for topic in self.topics.values())


def from_listing(prefix: str, listing: Listing, before: Image | None = None) -> Image:
    """`before` is the image that was held until now."""
    events = tuple(Event("put", entry.key, entry.value, entry.mod_revision) for entry in listing.entries)
    if before is None:
        return apply(Image(prefix), WatchResponse(listing.revision, events))
    gone = tuple(Event("delete", keys.topic_key(prefix, name), b"", 0) for name in before._topic_keys)
    known = Image(prefix, version=before.version, _topic_keys=before._topic_keys)
    return apply(known, WatchResponse(listing.revision, (*gone, *events)))


def apply(image: Image, response: WatchResponse) -> Image:
    """The image after all changes of one response."""
    change = _Change(image)
    for event in response.events:
        if event.key.startswith(image.prefix):
            change.take(event, event.key[len(image.prefix) :].split("/"))
    return change.image(response.revision)


class _Change:
    """The parts of an image under change; a part is copied when it is first written."""

    def __init__(self, image: Image) -> None:
        self._old = image
        self._brokers: dict[int, Broker] | None = None
        self._topic_keys: dict[str, _TopicKey] | None = None
        self._partition_keys: dict[str, _Partitions] | None = None
        self._touched: dict[str, dict[int, tuple[bytes, PartitionState]]] = {}
        self._topics: dict[str, None] = {}
        self._configs: dict[str, Any] = {}
        self._values: dict[str, StoredValue] | None = None
        self._deleted: dict[bytes, Deletion] | None = None
        self._controls = image.controls

    def take(self, event: Event, path: list[str]) -> None:
        match path:
            case ["brokers", broker]:
                self._take_broker(event, int(broker))
            case ["topics", name]:
                self._take_topic(event, name)
            case ["partitions", name, index]:
                self._take_partition(event, name, int(index))
            case ["config", "cluster"] | ["config", "brokers" | "groups", _]:
                self._take_config(event, path)
            case ["values", name]:
                self._take_value(event, name)
            case ["deleted", topic_id]:
                self._take_deletion(event, bytes.fromhex(topic_id))
            case _:
                self._controls = _sound(event, lambda: with_event(self._controls, event, path))

    def _take_broker(self, event: Event, broker: int) -> None:
        if self._brokers is None:
            self._brokers = dict(self._old.brokers)
        if event.kind == "delete":
            self._brokers.pop(broker, None)
        else:
            self._brokers[broker] = _read(event, lambda value: decode_broker(broker, value, event.mod_revision))

    def _take_topic(self, event: Event, name: str) -> None:
        if self._topic_keys is None:
            self._topic_keys = dict(self._old._topic_keys)
        self._topics[name] = None
        if event.kind == "put":
            self._topic_keys[name] = _read(event, lambda value: _decode_topic(value, event.mod_revision))
        elif name in self._topic_keys:
            self._topic_keys[name] = replace(self._topic_keys[name], revision=0)

    def _take_partition(self, event: Event, name: str, index: int) -> None:
        partitions = self._touched.get(name)
        if partitions is None:
            partitions = self._touched[name] = dict(self._old._partition_keys.get(name, {}))
            self._topics[name] = None
        if event.kind == "delete":
            partitions.pop(index, None)
        else:
            partitions[index] = decode_partition(index, event)

    def _take_config(self, event: Event, path: list[str]) -> None:
        configs = self._configs
        if not configs:
            configs["cluster"] = self._old.cluster_config
            configs["brokers"] = dict(self._old.broker_configs)
            configs["groups"] = dict(self._old.group_configs)
            configs["revisions"] = dict(self._old.config_revisions)
        value = {} if event.kind == "delete" else _read(event, lambda value: dict(value))
        if event.kind == "delete":
            configs["revisions"].pop(event.key, None)
        else:
            configs["revisions"][event.key] = event.mod_revision
        if path[1] == "cluster":
            configs["cluster"] = value
            return
        name: int | str = int(path[2]) if path[1] == "brokers" else unquote(path[2])
        if value:
            configs[path[1]][name] = value
        else:
            configs[path[1]].pop(name, None)

    def _take_value(self, event: Event, name: str) -> None:
        if self._values is None:
            self._values = dict(self._old.values)
        if event.kind == "delete":
            self._values.pop(name, None)
        else:
            self._values[name] = _read(event, lambda value: StoredValue(str(value["value"]), event.mod_revision))

    def _take_deletion(self, event: Event, topic_id: bytes) -> None:
        if self._deleted is None:
            self._deleted = dict(self._old.deleted)
        if event.kind == "delete":
            self._deleted.pop(topic_id, None)
        else:
            self._deleted[topic_id] = _read(event, lambda value: _decode_deletion(value, event.mod_revision))

    def image(self, revision: int) -> Image:
        old = self._old
        changes: dict[str, Any] = {"revision": revision, "version": old.version + 1, "controls": self._controls}
        if self._brokers is not None:
            changes["brokers"] = self._brokers
        if self._values is not None:
            changes["values"] = self._values
        if self._deleted is not None:
            changes["deleted"] = self._deleted
        if self._configs:
            changes["cluster_config"] = self._configs["cluster"]
            changes["broker_configs"] = self._configs["brokers"]
            changes["group_configs"] = self._configs["groups"]
            changes["config_revisions"] = self._configs["revisions"]
        if self._topics:
            changes.update(self._topic_changes())
        return replace(old, **changes)

    def _topic_changes(self) -> dict[str, Any]:
        old = self._old
        topic_keys = dict(old._topic_keys) if self._topic_keys is None else self._topic_keys
        partition_keys = {**old._partition_keys, **self._touched}
        topics, by_id, unfinished = dict(old.topics), dict(old.topics_by_id), dict(old.unfinished)
        keyless = dict(old.keyless)
        for name in self._topics:
            partitions = partition_keys.get(name, {})
            if not partitions:
                partition_keys.pop(name, None)
            gone = topics.pop(name, None)
            if gone is not None:
                by_id.pop(gone.id, None)
            unfinished.pop(name, None)
            keyless.pop(name, None)
            key = topic_keys.get(name)
            if key is not None and _is_over(key, partitions):
                del topic_keys[name]
                key = None
            if key is None:
                if partitions:
                    keyless[name] = _without_key(name, partitions)
                continue
            topic = _assemble(name, key, partitions)
            if topic.state == LIVE:
                topics[name] = by_id[topic.id] = topic
            else:
                unfinished[name] = topic
        return {
            "topics": topics,
            "topics_by_id": by_id,
            "unfinished": unfinished,
            "keyless": keyless,
            "_topic_keys": topic_keys,
            "_partition_keys": partition_keys,
        }


def _is_over(key: _TopicKey, partitions: _Partitions) -> bool:
    """Whether a topic's key has gone with all its partitions, or before it was live."""
    return key.revision == 0 and (key.state != LIVE or all(owner != key.id for owner, _ in partitions.values()))


def _assemble(name: str, key: _TopicKey, partitions: _Partitions) -> Topic:
    """The topic with its partitions up to the count that its key names; keys of an earlier topic of that name do not
    count. Of a topic that is not live yet, those that are there.
    """
    known = [partitions.get(index) for index in range(key.count)]
    own = [None if found is None or found[0] != key.id else found[1] for found in known]
    if key.state == LIVE:
        states = tuple(state or _missing(index) for index, state in enumerate(own))
    else:
        states = tuple(state for state in own if state is not None)
    return Topic(name, key.id, states, key.overrides, key.internal, key.state, key.revision, key.durability_altered)


def _without_key(name: str, partitions: _Partitions) -> Topic:
    topic_id, _ = next(iter(partitions.values()))
    return Topic(name, topic_id, tuple(state for owner, state in partitions.values() if owner == topic_id))


def _missing(index: int) -> PartitionState:
    return PartitionState(index, NO_LEADER, NO_EPOCH, (), ())


def _read(event: Event | KeyValue, decode: Any) -> Any:
    return _sound(event, lambda: decode(keys.decode(event.key, event.value)))


def _sound(event: Event | KeyValue, read: Any) -> Any:
    """What `read` answers, or an error that names the key."""
    try:
        return read()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CoordinationError(
            f"key {event.key} does not hold what it should ({error!r}): restore it, or delete it and what it names"
        ) from None


def encode_broker(broker: Broker) -> bytes:
    previous = broker.previous
    return keys.encode(
        {
            "listeners": {name: [end.host, end.port] for name, end in broker.listeners.items()},
            "http": _encode_endpoint(broker.http),
            "replication": _encode_endpoint(broker.replication),
            "rack": broker.rack,
            "incarnation": broker.incarnation,
            "previous": None if previous is None else encode_previous(previous),
            "boot": broker.boot,
            "state": broker.state,
            "started_ms": broker.started_ms,
        }
    )


def decode_broker(broker: int, value: Mapping[str, Any], revision: int = 0) -> Broker:
    previous = value.get("previous")
    return Broker(
        id=broker,
        listeners={name: Endpoint(host, port) for name, (host, port) in value["listeners"].items()},
        incarnation=value["incarnation"],
        started_ms=value["started_ms"],
        rack=value["rack"],
        http=_decode_endpoint(value["http"]),
        replication=_decode_endpoint(value.get("replication")),
        boot=value.get("boot", ""),
        previous=None if previous is None else decode_previous(previous),
        state=value.get("state", LIVE),
        revision=revision,
    )


def encode_previous(previous: Previous) -> dict[str, Any]:
    lost = [[topic_id.hex(), partition] for topic_id, partition in sorted(previous.lost)]
    plain = {"incarnation": previous.incarnation, "boot": previous.boot, "clean": previous.clean}
    return {**plain, **({"lost": lost} if lost else {}), **({"began": previous.began} if previous.began else {})}


def decode_previous(value: Mapping[str, Any]) -> Previous:
    lost = frozenset((bytes.fromhex(topic_id), int(partition)) for topic_id, partition in value.get("lost", ()))
    began = int(value.get("began", 0))
    return Previous(str(value["incarnation"]), str(value["boot"]), bool(value["clean"]), lost, began)


def _encode_endpoint(end: Endpoint | None) -> list[str | int] | None:
    return None if end is None else [end.host, end.port]


def _decode_endpoint(value: Any) -> Endpoint | None:
    return None if value is None else Endpoint(*value)


def encode_topic(topic: Topic, count: int) -> bytes:
    return keys.encode(
        {
            "id": topic.id.hex(),
            "partitions": count,
            "overrides": dict(topic.overrides),
            "internal": topic.internal,
            "state": topic.state,
            **({"durability_altered": True} if topic.durability_altered else {}),
        }
    )


def _decode_topic(value: Mapping[str, Any], revision: int) -> _TopicKey:
    return _TopicKey(
        bytes.fromhex(value["id"]),
        int(value["partitions"]),
        dict(value["overrides"]),
        bool(value["internal"]),
        str(value["state"]),
        revision,
        bool(value.get("durability_altered", False)),
    )


def encode_partition(topic_id: bytes, partition: PartitionState) -> bytes:
    lost, known = partition.lost, partition.incarnations
    return keys.encode(
        {
            "id": topic_id.hex(),
            "leader": partition.leader,
            "leader_epoch": partition.leader_epoch,
            "isr": partition.isr,
            "replicas": partition.replicas,
            "incarnations": {broker: known[broker] for broker in partition.isr if broker in known},
            "controller": partition.controller,
            "lost": None if lost is None else [lost.epoch, lost.start, lost.end],
            **({"target": partition.target} if partition.target else {}),
            **({"adding": partition.adding} if partition.adding else {}),
            **({"least_start": partition.least_start} if partition.least_start else {}),
        }
    )


def decode_partition(index: int, found: Event | KeyValue) -> tuple[bytes, PartitionState]:
    """The topic's id, and what the partition's key says. Raises CoordinationError that names the key."""
    read: tuple[bytes, PartitionState] = _read(found, lambda value: _decode_partition(index, value, found.mod_revision))
    return read


def _decode_partition(index: int, value: Mapping[str, Any], revision: int) -> tuple[bytes, PartitionState]:
    lost = value.get("lost")
    state = PartitionState(
        index=index,
        leader=value["leader"],
        leader_epoch=value["leader_epoch"],
        isr=tuple(value["isr"]),
        replicas=tuple(value["replicas"]),
        revision=revision,
        incarnations={int(broker): str(drawn) for broker, drawn in value.get("incarnations", {}).items()},
        controller=value.get("controller", 0),
        lost=None if lost is None else Lost(*lost),
        target=tuple(value.get("target", ())),
        adding=tuple(value.get("adding", ())),
        least_start=value.get("least_start", 0),
    )
    return bytes.fromhex(value["id"]), state


def encode_deletion(deletion: Deletion) -> bytes:
    return keys.encode({"topic": deletion.topic, "brokers": deletion.brokers, "at_ms": deletion.at_ms})


def _decode_deletion(value: Mapping[str, Any], revision: int) -> Deletion:
    return Deletion(str(value["topic"]), tuple(value["brokers"]), int(value["at_ms"]), revision)
