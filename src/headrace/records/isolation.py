"""Which batches of a fetched record set a reader of committed records passes over.

With isolation `committed` a broker answers no further than its last stable offset, so every transaction in an answer is
decided; which were aborted it says in a list of (producer id, first offset). The records of one are the transactional
batches of its producer from there on, up to that producer's next marker. Markers themselves are control batches, which
no reader is given in any isolation.

A list belongs to the answer that it came with, and says all of that record set: nothing is carried over from one set to
the next. Batches are looked at by their headers, and only where the list names any.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

from headrace.errors import SettingError

if TYPE_CHECKING:
    from headrace.records.batch import BatchHeader, View

Aborted = tuple[int, int]
"""Producer id and first offset of a transaction that was aborted."""

NOTHING_HIDDEN: Final[frozenset[int]] = frozenset()


class Isolation(IntEnum):
    """Which records a reader is given; the numbers are those of Fetch and ListOffsets."""

    UNCOMMITTED = 0
    """All up to the high watermark, also those of transactions that are open or were aborted."""
    COMMITTED = 1
    """Those of no transaction and of committed ones, up to the first that is undecided."""


def isolation_of(given: str) -> Isolation:
    """`committed` or `uncommitted`, or Kafka's `read_committed` and `read_uncommitted`."""
    try:
        return Isolation[given.removeprefix("read_").upper()]
    except (AttributeError, KeyError):
        raise SettingError(f"isolation={given!r} cannot be: give 'committed' or 'uncommitted'") from None


class AbortedFilter:
    """Tells for one batch after the other, in the order of the log, whether an aborted transaction wrote it."""

    def __init__(self, aborted: Iterable[Aborted]) -> None:
        self._to_come = sorted(((first_offset, producer_id) for producer_id, first_offset in aborted), reverse=True)
        self._open: set[int] = set()

    def hides(self, header: BatchHeader) -> bool:
        """Whether the batch is of an aborted transaction. Its marker ends that, and is not."""
        while self._to_come and self._to_come[-1][0] <= header.last_offset:
            self._open.add(self._to_come.pop()[1])
        if not header.is_transactional or header.producer_id not in self._open:
            return False
        if header.is_control:
            self._open.discard(header.producer_id)
            return False
        return True


def hidden_batches(records: View, aborted: Iterable[Aborted]) -> frozenset[int]:
    """Base offsets of the whole batches of a record set that aborted transactions wrote, as decoders take them."""
    listed = tuple(aborted)
    if not listed:
        return NOTHING_HIDDEN
    # Who only names an isolation, as a command that reads no record does, loads no checksums.
    from headrace.records.batch import batches

    found = AbortedFilter(listed)
    return frozenset([header.base_offset for header, _ in batches(memoryview(records)) if found.hides(header)])


def aborted_of(partition: Any) -> tuple[Aborted, ...]:
    """What a Fetch answer says of one partition."""
    return tuple([(each.producer_id, each.first_offset) for each in partition.aborted_transactions or ()])
