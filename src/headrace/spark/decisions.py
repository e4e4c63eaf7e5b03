"""What the sink has decided, as values and a table without I/O.

A *query* is what writes batches one after the other: a stream, by the id in its checkpoint, or a batch write. A *run*
is one driver of it. Every attempt at a task of a batch writes in a two-phase transaction of its own, whose
transactional id says of what:

    spark.QUERY.BATCH.RUN.PARTITION.ATTEMPT          and spark.QUERY is the driver's own

in the characters that topics have, as brokers know only these in patterns; others as `_` and their bytes.

A *decision* is the list of the transactions that make up a batch. Once it is written they are committed, by whoever
comes; until then they are aborted. A query has one decision at a time, that of its last batch, and the next is written
when all of it is committed. Spark runs no batch again but the last one: who comes with an earlier one has an older
checkpoint, in which that number stands for other rows, or is a driver that the query has left behind. A checkpoint that
was copied just before the last batch gives the number of that to other rows: the *plan* of the batch, the ends of its
sources in Spark's log of offsets, tells it from one that is run again.
"""

from __future__ import annotations

import json
import re
import string
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

from headrace.client.producer.transaction_requests import PreparedTransaction
from headrace.errors import CorruptBatch

PREFIX: Final = "spark"
EVERY_ATTEMPT: Final = rf"^{PREFIX}\..*"
WRITE: Final = "write-"
"""How the queries of batch writes begin: under names that no stream has."""
NO_RUN: Final = ""
NO_BATCH: Final = -1
EVERY_BATCH: Final = sys.maxsize
"""Of whoever ends what a query has left, and writes nothing."""
BEFORE_MAX: Final = 20
"""Runs that are remembered as superseded. A driver is not alone for longer than that many others take over."""
_VERSION: Final = 1
_PARTS: Final = 6
_PLAIN: Final = frozenset(string.ascii_letters + string.digits + "-")


@dataclass(frozen=True, slots=True)
class Batch:
    """Of which batch, and for which driver, a task writes."""

    query: str
    run: str
    number: int

    @property
    def prefix(self) -> str:
        """Of the transactional ids of its attempts."""
        return f"{query_prefix(self.query)}{self.number}.{_quoted(self.run)}."

    def transactional_id(self, partition: int, attempt: int) -> str:
        return f"{self.prefix}{partition}.{attempt}"


def driver_id(query: str) -> str:
    """The transactional id in which the decisions of a query are written."""
    return f"{PREFIX}.{_quoted(query)}"


def query_prefix(query: str) -> str:
    return f"{driver_id(query)}."


def _quoted(text: str) -> str:
    return "".join(chr(byte) if chr(byte) in _PLAIN else f"_{byte:02x}" for byte in text.encode())


def attempts_pattern(query: str, batch: int | None = None) -> str:
    """A regular expression for the transactional ids of all attempts of a query, or of one batch of it."""
    of_batch = "" if batch is None else f"{batch}\\."
    return f"^{re.escape(query_prefix(query))}{of_batch}.*"


def query_of(transactional_id: str) -> str | None:
    """The query that an attempt is of; None if it is none."""
    return _part_of(transactional_id, 1)


def run_of(transactional_id: str) -> str | None:
    """The run that an attempt is of; None if it is none."""
    return _part_of(transactional_id, 3)


def _part_of(transactional_id: str, place: int) -> str | None:
    parts = transactional_id.split(".")
    if len(parts) != _PARTS or parts[0] != PREFIX:
        return None
    first, *quoted = parts[place].split("_")
    try:
        known = [bytes([int(part[:2], 16)]) + part[2:].encode() for part in quoted]
        return b"".join([first.encode(), *known]).decode()
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class Decision:
    """That these transactions are the batch."""

    batch: Batch
    prepared: tuple[PreparedTransaction, ...]
    before: tuple[str, ...] = ()
    """Runs that others have taken over from, or that were given up, the last first."""
    plan: str = ""
    """A digest of what Spark had planned for the batch; empty where that could not be read."""

    @property
    def names(self) -> frozenset[str]:
        return frozenset(each.transactional_id for each in self.prepared)

    def encode(self) -> bytes:
        """Names without what they have in common: a batch may have thousands."""
        start = len(self.batch.prefix)
        assert all(each.transactional_id.startswith(self.batch.prefix) for each in self.prepared)
        rows = [[each.transactional_id[start:], each.producer_id, each.producer_epoch] for each in self.prepared]
        told = {"version": _VERSION, "batch": self.batch.number, "run": self.batch.run, "before": self.before}
        told |= {"plan": self.plan} if self.plan else {}
        return json.dumps({**told, "prepared": rows}, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, query: str, value: bytes) -> Decision:
        try:
            told: dict[str, Any] = json.loads(value)
            if told["version"] != _VERSION:
                raise CorruptBatch(f"decision of {query!r}: version {told['version']}; {_VERSION} is known")
            batch = Batch(query, told["run"], int(told["batch"]))
            prepared = tuple(
                PreparedTransaction(batch.prefix + name, producer_id, epoch)
                for name, producer_id, epoch in told["prepared"]
            )
            return cls(batch, prepared, tuple(told["before"]), str(told.get("plan", "")))
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptBatch(f"decision of {query!r} cannot be read: {error!r}") from None


class Ended(Enum):
    """Of a query that will have no batch any more."""

    ENDED = "all is committed, and forgotten"


Known = Decision | Ended | None
"""What is decided of a query; None where nothing is."""


class Verdict(Enum):
    """What becomes of a batch."""

    OPEN = "nothing is decided: its driver may decide"
    DECIDED = "what was decided is committed, whatever else was written is aborted"
    PASSED = "the query is over, and all of it committed: whatever was written for it is aborted"
    SUPERSEDED = "the run is over, or the query went on without it: it may end its own attempts, no more"


def judge(known: Known, batch: Batch) -> Verdict:
    if known is None:
        return Verdict.OPEN
    if isinstance(known, Ended):
        return Verdict.PASSED
    if batch.run in known.before or batch.number < known.batch.number:
        return Verdict.SUPERSEDED
    return Verdict.DECIDED if known.batch.number == batch.number else Verdict.OPEN


def is_another(known: Known, batch: Batch, plan: str) -> bool:
    """Whether what was decided under the number of a batch were other rows, as far as both plans are known."""
    if not isinstance(known, Decision) or known.batch.number != batch.number:
        return False
    return bool(plan and known.plan) and plan != known.plan


def decide(known: Known, batch: Batch, prepared: Iterable[PreparedTransaction], plan: str = "") -> Decision:
    """The decision on an open batch; runs of earlier decisions are superseded by it."""
    assert judge(known, batch) is Verdict.OPEN
    before: tuple[str, ...] = ()
    if isinstance(known, Decision):
        runs = dict.fromkeys((known.batch.run, *known.before))
        runs.pop(batch.run, None)
        runs.pop(NO_RUN, None)
        before = tuple(runs)[:BEFORE_MAX]
    return Decision(batch, tuple(prepared), before, plan)


def retire(known: Decision | None, query: str, runs: Iterable[str]) -> Decision:
    """What was decided stays so, and nothing more is written for these runs: they were given up."""
    if known is None:
        known = Decision(Batch(query, NO_RUN, NO_BATCH), ())
    return replace(known, before=tuple(dict.fromkeys((*runs, *known.before)))[:BEFORE_MAX])
