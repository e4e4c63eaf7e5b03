"""What reading a data folder offline tells: its partitions, its files, and what is not as it should be."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.records.batch import BatchHeader
from headrace.storage.log import TopicPartition
from headrace.storage.offline.transactions import TransactionSurvey


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is not as it should be: where, at which offset if that is known, and what."""

    path: str
    position: int | None
    offset: int | None
    what: str
    torn: bool = False
    """It was not known to be synced: the next start cuts the log there, unless the kernel has run on and something
    whole follows."""

    def __str__(self) -> str:
        place = f" at byte {self.position}" if self.position is not None else ""
        offset = f", offset {self.offset}" if self.offset is not None else ""
        return f"{self.path}{place}{offset}: {self.what}"


@dataclass(frozen=True, slots=True)
class SegmentReport:
    """A file of a partition; in the layout `shared`, what a commit file holds of it without another one between."""

    path: str
    base_offset: int
    next_offset: int
    batches: int
    records: int
    size_bytes: int
    compacted: bool


@dataclass(frozen=True, slots=True)
class PartitionReport:
    topic_partition: TopicPartition
    path: str
    topic_id: bytes | None
    start_offset: int
    end_offset: int
    segments: tuple[SegmentReport, ...]
    problems: tuple[Problem, ...]
    transactions: TransactionSurvey = field(default_factory=TransactionSurvey)

    @property
    def batches(self) -> int:
        return sum(segment.batches for segment in self.segments)

    @property
    def records(self) -> int:
        return sum(segment.records for segment in self.segments)

    @property
    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self.segments)


@dataclass(frozen=True, slots=True)
class CommitFileReport:
    """A file of a commit log; in the layout `partitioned` there is none."""

    path: str
    frames: int
    size_bytes: int
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class FolderReport:
    """What is not a partition's: the layout, who uses the folder, what was set aside, whether the checkpoint is
    whole."""

    layout: str
    holder: str | None
    strays: tuple[str, ...]
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class DumpedBatch:
    topic_partition: TopicPartition
    path: str
    position: int
    header: BatchHeader
