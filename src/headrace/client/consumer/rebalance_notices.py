"""What the application is to hear of its partitions: which came, which go, which were taken.

A core notes what happens, in whatever thread that is; the application is called back by the thread or task that polls,
outside of the lock (`Driver.tell`). Nothing is handed out of partitions that it has not heard of. What is to go goes
only after it has heard (`going`), so that it can still save progress; what is lost has gone already.

A partition is `known` from when the application is told that it came until it is told that it goes or is lost: of one
that came and went between two calls it hears nothing, of one that was lost and came back it hears both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from headrace.client.consumer.group_protocol import TopicPartition
from headrace.errors import InvalidRequest

RebalanceCallback = Callable[[list[TopicPartition]], object]
"""Hears of partitions; on asyncio it may be a coroutine function."""

_NONE: frozenset[TopicPartition] = frozenset()


@dataclass(frozen=True, slots=True)
class Notice:
    """One call of the application's code."""

    callback: RebalanceCallback
    places: list[TopicPartition]
    going: frozenset[TopicPartition] = _NONE
    """What the group waits for, when the call is about what goes."""

    def tell(self) -> object:
        """On asyncio what it returns may have to be awaited."""
        return self.callback(self.places)


class Told(Protocol):
    """What an application is called back with, once."""

    def tell(self) -> object: ...


T = TypeVar("T", bound=Told)


class Notifier(Protocol[T]):
    """A core that has something to tell the application; `told` follows each."""

    def next_notice(self, *, closing: bool = False) -> T | None: ...
    def told(self, notice: T) -> None: ...


class RebalanceNotices:
    """Called with the reactor's lock held."""

    def __init__(
        self,
        on_assigned: RebalanceCallback | None,
        on_revoked: RebalanceCallback | None,
        on_lost: RebalanceCallback | None,
    ) -> None:
        self._on_assigned = on_assigned
        self._on_revoked = on_revoked
        self._on_lost = on_lost
        self._known: set[TopicPartition] = set()
        self._new: set[TopicPartition] = set()
        self._lost: set[TopicPartition] = set()
        self._telling = False

    @property
    def waiting(self) -> bool:
        """Whether a call has to tell something before it gives anything; one within a callback is refused so."""
        return self._telling or bool(self._new or self._lost)

    def came(self, places: Iterable[TopicPartition]) -> None:
        self._new.update(places)

    def lost(self, places: Iterable[TopicPartition]) -> None:
        self._lost |= self._known.intersection(places)
        self.went(places)

    def went(self, places: Iterable[TopicPartition]) -> None:
        """Given up; whom it concerns has heard of it."""
        self._known.difference_update(places)
        self._new.difference_update(places)

    def next(self, going: frozenset[TopicPartition], *, closing: bool = False) -> Notice | None:
        """What is to be told now, if anything; `done` ends it. When closing, all that is known goes."""
        if self._telling and not closing:
            raise InvalidRequest("this callback was called by a poll, and cannot poll itself; it may commit and seek")
        notice = self._next(going, closing)
        self._telling = notice is not None and not closing
        return notice

    def _next(self, going: frozenset[TopicPartition], closing: bool) -> Notice | None:
        lost, self._lost = self._lost, set()
        if lost and self._on_lost is not None:
            return Notice(self._on_lost, sorted(lost))
        leaving = set(self._known) if closing else self._known & going
        self.went(leaving | going)
        if (leaving or going) and self._on_revoked is not None:
            return Notice(self._on_revoked if leaving else _hear_nothing, sorted(leaving), going)
        new, self._new = self._new, set()
        self._known |= new
        if new and self._on_assigned is not None and not closing:
            return Notice(self._on_assigned, sorted(new))
        return None

    def done(self) -> None:
        self._telling = False


def _hear_nothing(_: list[TopicPartition]) -> None:
    """Of what goes before the application has heard that it came."""
