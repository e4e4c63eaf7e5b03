"""Whether retention takes what it may: a leader's wanted start is compared with the settings of its topic.

By time only records go that are older than that by the leader's own clock, as far ahead as it has been since it was
looked at last. By size what stays is not less than that. Records that a client asked to delete may go in any case.
Judged are the starts that a leader comes to want in its epoch; what it began with others have decided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from headrace.partitions.partition import Partition
from headrace.simulator.history import History, Violation
from headrace.simulator.machine import Machine
from headrace.storage.log import TopicPartition

NEVER_MS: Final = -(1 << 62)
Led = tuple[TopicPartition, int, str]
"""A partition in one epoch, led by one process."""


@dataclass(slots=True)
class Wanted:
    start: int
    by_size: bool = False
    """Whether only its size lets it go, which is seen when the log begins there."""


class RetentionRule:
    def __init__(self, settings: dict[str, str], history: History) -> None:
        self._retention_ms = int(settings.get("retention.ms", -1))
        self._retention_bytes = int(settings.get("retention.bytes", -1))
        self._history = history
        self._wanted: dict[Led, Wanted] = {}

    def __bool__(self) -> bool:
        """Whether anything is kept for a while only."""
        return self._retention_ms >= 0 or self._retention_bytes >= 0

    def look(self, machine: Machine, where: TopicPartition, partition: Partition, wall_ms: int) -> None:
        """`wall_ms`: the highest that the machine's clock has been since the last look."""
        assert partition.core is not None
        start = partition.core.wanted_start
        wanted = self._wanted.setdefault((where, partition.epoch, machine.life), Wanted(start))
        if start > wanted.start:
            young = self._young(where, wanted.start, start, wall_ms)
            self._history.counts["retired"] += start - wanted.start
            if young is not None and self._retention_bytes < 0:
                raise Violation(
                    f"{where}: {machine.life} deletes below {start}; {young} was written less than "
                    f"{self._retention_ms} ms before {wall_ms}, and nobody asked for that"
                )
            wanted.start, wanted.by_size = start, young is not None
        if wanted.by_size and partition.log.start_offset >= wanted.start:
            kept_bytes, wanted.by_size = partition.log.size_bytes, False
            if partition.log.start_offset == wanted.start and kept_bytes < self._retention_bytes:
                raise Violation(
                    f"{where}: {machine.life} deletes below {start} and has {kept_bytes} bytes left, though "
                    f"{self._retention_bytes} are to be kept"
                )

    def _young(self, where: TopicPartition, first: int, start: int, wall_ms: int) -> int | None:
        """The first offset that neither its time nor a client lets go."""
        oldest_ms = wall_ms - self._retention_ms if self._retention_ms >= 0 else NEVER_MS
        asked, written = self._history.watched(where).asked, self._history.watched(where).written_ms
        return next((at for at in range(max(first, asked), start) if written.get(at, NEVER_MS) >= oldest_ms), None)
