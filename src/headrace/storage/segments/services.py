"""What a log is given: the services that the logs of a store share, and what opening its folder found out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.ports.clock import Clock
from headrace.ports.disk import Disk
from headrace.settings.values import LogSettings
from headrace.storage.checked_bytes import CheckBudget
from headrace.storage.checkpoint import Done
from headrace.storage.epochs import EpochHistory
from headrace.storage.log import Tail, TopicPartition
from headrace.storage.producers import ProducerLoads
from headrace.storage.segments.segment import OpenSegments, Segment

if TYPE_CHECKING:
    from headrace.storage.segments.log import PartitionedLog


@dataclass(slots=True)
class Surroundings:
    """What the logs of one store share."""

    disk: Disk
    clock: Clock
    open_segments: OpenSegments
    check_budget: CheckBudget
    producer_loads: ProducerLoads
    staged: dict[PartitionedLog, None]
    checkpoint_soon: Callable[[Done | None], None]
    sync_soon: Callable[[PartitionedLog], None]
    segment_began: Callable[[PartitionedLog], None]
    discarded: Callable[[list[str], int], None]
    """Paths to remove after so many milliseconds."""
    archived_offset: Callable[[TopicPartition], int]
    """Below it everything is in the archive, as far as anyone can tell now; 0 if nobody can."""

    def new_segment(self, folder: str, settings: LogSettings, base_offset: int) -> Segment:
        """An empty one, whose file is created when it is first used."""
        return self._segment(folder, settings, base_offset, base_offset, fresh=True)

    def old_segment(
        self,
        folder: str,
        settings: LogSettings,
        base_offset: int,
        next_offset: int,
        size: int,
        *,
        cleaned: bool,
        sparse: bool = False,
    ) -> Segment:
        """One whose file is there and has this size."""
        segment = self._segment(folder, settings, base_offset, next_offset, cleaned=cleaned, sparse=sparse)
        segment.found_bytes(size)
        return segment

    def _segment(
        self,
        folder: str,
        settings: LogSettings,
        base_offset: int,
        next_offset: int,
        *,
        cleaned: bool = False,
        sparse: bool = False,
        fresh: bool = False,
    ) -> Segment:
        return Segment(
            self.disk,
            self.open_segments,
            folder,
            base_offset,
            next_offset,
            index_bytes=settings.segment_index_bytes,
            interval_bytes=settings.index_interval_bytes,
            cleaned=cleaned,
            sparse=sparse,
            fresh=fresh,
        )


@dataclass(slots=True)
class Found:
    """What opening a folder found out about its log."""

    segments: list[Segment]
    start_offset: int
    end_offset: int
    cleanings: list[tuple[int, int]] = field(default_factory=list)
    began_ms: int = 0
    epochs: EpochHistory | None = None
    snapshots: list[int] = field(default_factory=list)
    start_markers: list[int] = field(default_factory=list)
    recovered: bool = False
    tail: Tail = Tail.WHOLE
    durable_offset: int | None = None
    """Where what is known to be synced ends, if that is not the log's end."""
    unsynced: list[str] = field(default_factory=list)
    cuts: int = 0
    """How many truncations are told by names that were found, or by the checkpoint."""
