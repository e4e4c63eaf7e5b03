"""The part of the image that elections run on: who controls, who would, what replicas report, what operators ask for.

Values and their JSON are those of `cluster.keys`. Immutable; `with_event` answers a new one and shares what did not
change. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from headrace.cluster import keys
from headrace.ports.coordination import Event

PREFERRED: Final = "preferred"
UNCLEAN: Final = "unclean"
RESIGN: Final = "resign"
OWN: Final = frozenset(("controller", "election", "ends", "orders", "draining", "lineage", "doubts"))

Where = tuple[str, int]
"""Topic and partition."""
K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class ElectedController:
    broker: int
    epoch: int
    revision: int


@dataclass(frozen=True, slots=True)
class ReplicaEnd:
    """What one replica of a partition without a leader holds."""

    topic_id: bytes
    incarnation: str
    last_epoch: int
    start: int
    end: int
    watermark: int
    """The highest watermark that it has heard of."""


@dataclass(frozen=True, slots=True)
class Order:
    """An election that somebody asks for: an operator, or a leader that cannot go on."""

    kind: str
    revision: int
    broker: int = -1
    """Who resigns."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What a broker holds that the metadata does not speak of, or speaks of as something older."""

    kind: str
    topic: str
    partition: int
    topic_id: bytes
    detail: str


@dataclass(frozen=True, slots=True)
class Doubt:
    """A broker has seen a later history of the metadata than the one that is there (cluster.lineage)."""

    broker: int
    lineage: int
    """The number of the lineage that it knew."""
    seen: int
    """The highest revision that it knew."""
    found: int
    """The revision that it found."""
    at_ms: int
    count: int = 0
    """Of all differences."""
    differences: tuple[Difference, ...] = ()
    """The first of them."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """Which history of the metadata this is: an operator who accepts one that was restored gives it the next number."""

    number: int = 0
    id: str = ""


@dataclass(frozen=True, slots=True)
class Controls:
    controller: ElectedController | None = None
    candidates: Mapping[int, int] = field(default_factory=dict)
    """Lease of each candidate, and the revision at which it stood up."""
    ends: Mapping[Where, Mapping[int, ReplicaEnd]] = field(default_factory=dict)
    orders: Mapping[Where, Order] = field(default_factory=dict)
    draining: frozenset[int] = frozenset()
    lineage: Lineage = field(default_factory=Lineage)
    told_doubts: Mapping[int, Doubt] = field(default_factory=dict)

    @property
    def doubts(self) -> Mapping[int, Doubt]:
        """While there is one, nothing is changed. One about a lineage before this arrived late: it was answered."""
        told = self.told_doubts
        return (
            {broker: doubt for broker, doubt in told.items() if doubt.lineage >= self.lineage.number} if told else told
        )


def with_event(controls: Controls, event: Event, path: list[str]) -> Controls:
    """The controls after one change; keys of others leave them as they are."""
    if path[0] not in OWN:
        return controls
    value: Any = None if event.kind == "delete" else keys.decode(event.key, event.value)
    match path:
        case ["controller"]:
            found = None if value is None else ElectedController(value["broker"], value["epoch"], event.mod_revision)
            return replace(controls, controller=found)
        case ["election", lease]:
            revision = None if value is None else event.mod_revision
            return replace(controls, candidates=_changed(controls.candidates, int(lease), revision))
        case ["ends", topic, index, broker]:
            where = topic, int(index)
            end = None if value is None else decode_end(value)
            known = _changed(controls.ends.get(where, {}), int(broker), end)
            return replace(controls, ends=_changed(controls.ends, where, known or None))
        case ["orders", topic, index]:
            order = None if value is None else Order(str(value["kind"]), event.mod_revision, value.get("broker", -1))
            return replace(controls, orders=_changed(controls.orders, (topic, int(index)), order))
        case ["draining", broker]:
            draining = controls.draining - {int(broker)}
            return replace(controls, draining=draining if value is None else draining | {int(broker)})
        case ["lineage"]:
            known_as = Lineage() if value is None else Lineage(int(value["number"]), str(value["id"]))
            return replace(controls, lineage=known_as)
        case ["doubts", broker]:
            doubt = None if value is None else decode_doubt(int(broker), value)
            return replace(controls, told_doubts=_changed(controls.told_doubts, int(broker), doubt))
        case _:
            return controls


def _changed(old: Mapping[K, V], key: K, value: V | None) -> dict[K, V]:
    changed = dict(old)
    if value is None:
        changed.pop(key, None)
    else:
        changed[key] = value
    return changed


def encode_end(end: ReplicaEnd) -> bytes:
    return keys.encode(
        {
            "id": end.topic_id.hex(),
            "incarnation": end.incarnation,
            "last_epoch": end.last_epoch,
            "start": end.start,
            "end": end.end,
            "watermark": end.watermark,
        }
    )


def decode_end(value: Mapping[str, Any]) -> ReplicaEnd:
    return ReplicaEnd(
        bytes.fromhex(value["id"]),
        str(value["incarnation"]),
        int(value["last_epoch"]),
        int(value["start"]),
        int(value["end"]),
        int(value["watermark"]),
    )


def encode_doubt(doubt: Doubt) -> bytes:
    rows = [[row.kind, row.topic, row.partition, row.topic_id.hex(), row.detail] for row in doubt.differences]
    return keys.encode(
        {
            "lineage": doubt.lineage,
            "seen": doubt.seen,
            "found": doubt.found,
            "at_ms": doubt.at_ms,
            "count": doubt.count,
            "differences": rows,
        }
    )


def decode_doubt(broker: int, value: Mapping[str, Any]) -> Doubt:
    rows = tuple(
        Difference(str(kind), str(topic), int(partition), bytes.fromhex(topic_id), str(detail))
        for kind, topic, partition, topic_id, detail in value["differences"]
    )
    return Doubt(broker, value["lineage"], value["seen"], value["found"], value["at_ms"], value["count"], rows)
