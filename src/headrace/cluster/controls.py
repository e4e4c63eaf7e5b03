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
OWN: Final = frozenset(("controller", "election", "ends", "orders", "draining"))

Where = tuple[str, int]
"""Topic and partition."""
K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Controller:
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
class Controls:
    controller: Controller | None = None
    candidates: Mapping[int, int] = field(default_factory=dict)
    """Lease of each candidate, and the revision at which it stood up."""
    ends: Mapping[Where, Mapping[int, ReplicaEnd]] = field(default_factory=dict)
    orders: Mapping[Where, Order] = field(default_factory=dict)
    draining: frozenset[int] = frozenset()


def with_event(controls: Controls, event: Event, path: list[str]) -> Controls:
    """The controls after one change; keys of others leave them as they are."""
    if path[0] not in OWN:
        return controls
    value: Any = None if event.kind == "delete" else keys.decode(event.key, event.value)
    match path:
        case ["controller"]:
            found = None if value is None else Controller(value["broker"], value["epoch"], event.mod_revision)
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
