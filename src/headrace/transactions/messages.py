"""Requests to the coordinator of transactions and their replies: plain values, with the wire's names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

NO_PRODUCER_ID: Final = -1
NO_EPOCH: Final = -1
EPOCHS_BUMPED: Final = 2
"""The version of transactions in which each has an epoch of its own (KIP-890). Clients of version 1 or 0 keep theirs.
"""

Place = tuple[str, int]
"""A topic's name and a partition of it."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Who opened a transactional id last."""

    client_id: str = ""
    host: str = ""


@dataclass(frozen=True, slots=True)
class InitRequest:
    """A producer asks for its id and epoch. With the id and epoch that it has it goes on after an error (KIP-360);
    without, it takes over from whoever had the transactional id before."""

    timeout_ms: int
    producer_id: int = NO_PRODUCER_ID
    epoch: int = NO_EPOCH
    two_phase: bool = False
    """No timeout ends its transactions (KIP-939)."""
    keep_prepared: bool = False
    """The transaction that is open stays open, for this producer to end."""
    owner: Owner = field(default_factory=Owner)


@dataclass(frozen=True, slots=True)
class InitReply:
    error_code: int
    producer_id: int = NO_PRODUCER_ID
    epoch: int = NO_EPOCH
    ongoing_producer_id: int = NO_PRODUCER_ID
    """Of the open transaction that was kept."""
    ongoing_epoch: int = NO_EPOCH


@dataclass(frozen=True, slots=True)
class AddRequest:
    """Partitions that a producer is about to write to in its transaction; with the first of them it begins."""

    producer_id: int
    epoch: int
    partitions: frozenset[Place]
    transaction_version: int = 1


@dataclass(frozen=True, slots=True)
class EndRequest:
    producer_id: int
    epoch: int
    committed: bool
    transaction_version: int = 1


@dataclass(frozen=True, slots=True)
class EndReply:
    """With the id and epoch of the producer's next transaction, where each has its own."""

    error_code: int
    producer_id: int = NO_PRODUCER_ID
    epoch: int = NO_EPOCH


@dataclass(frozen=True, slots=True)
class MarkerRequest:
    """Write the end of a transaction into every one of these partitions."""

    transactional_id: str
    producer_id: int
    epoch: int
    coordinator_epoch: int
    committed: bool
    number: int
    transaction_version: int
    partitions: tuple[Place, ...]


SendMarkers = Callable[[MarkerRequest, Callable[[], bool], Callable[[], None]], None]
"""(markers, wanted, done): `done` hears once, when in every partition the marker is below the watermark, or the topic
is deleted. Sent again, with pauses, until then, or until `wanted` is false: another broker then does it."""

DrawProducerId = Callable[[Callable[[int | None], None]], None]
"""Hand an id that no other producer has had to the callback, now or later; None when there is none to be had."""


@dataclass(frozen=True, slots=True)
class ListedTransaction:
    transactional_id: str
    producer_id: int
    state: str


@dataclass(frozen=True, slots=True)
class DescribedTransaction:
    error_code: int
    transactional_id: str
    state: str = ""
    timeout_ms: int = 0
    start_ms: int = -1
    """-1 while none is open."""
    producer_id: int = NO_PRODUCER_ID
    epoch: int = NO_EPOCH
    """By these it can be ended."""
    partitions: tuple[Place, ...] = ()
    two_phase: bool = False
    owner: Owner = field(default_factory=Owner)
