"""What goes into a group beside requests, and what comes out of it beside immediate answers."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.groups.messages import JoinReply, SyncReply
from headrace.groups.snapshot import GroupSnapshot


@dataclass(frozen=True, slots=True)
class Moment:
    """Monotonic seconds for deadlines, milliseconds since 1970 for what is stored."""

    seconds: float
    wall_ms: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Hand the reply to the waiter that came with the request."""

    ticket: object
    reply: JoinReply | SyncReply


@dataclass(frozen=True, slots=True)
class Store:
    """Make the snapshot durable, then call `stored` with this. `joined` and its ticket wait for that alone."""

    snapshot: GroupSnapshot
    joined: JoinReply | None = None
    ticket: object | None = None


Action = Answer | Store
