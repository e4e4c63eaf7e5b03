"""What a log of the shared layout is given: the services of its store, and what opening the folder found out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.errors import HeadraceError
from headrace.ports.clock import Clock
from headrace.ports.disk import Disk
from headrace.storage.checked_bytes import CheckBudget
from headrace.storage.checkpoint import Done
from headrace.storage.commitlog.commitlog import CommitLog
from headrace.storage.commitlog.queue import Queue
from headrace.storage.commitlog.queuefile import OpenQueues
from headrace.storage.epochs import EpochHistory
from headrace.storage.log import Tail, TopicPartition
from headrace.storage.producers import ProducerLoads

if TYPE_CHECKING:
    from headrace.storage.commitlog.log import SharedLog


@dataclass(slots=True)
class Surroundings:
    """What the logs of one store share."""

    disk: Disk
    clock: Clock
    commit_log: CommitLog
    open_queues: OpenQueues
    check_budget: CheckBudget
    producer_loads: ProducerLoads
    staged: dict[SharedLog, None]
    checkpoint_soon: Callable[[Done | None], None]
    sync_soon: Callable[[SharedLog], None]
    write_now: Callable[[SharedLog], HeadraceError | None]
    """Write what one log has staged, its bounds if they are to be told, before the turn ends."""
    failed: Callable[[OSError], None]
    """The commit log cannot be relied on any more: every log goes offline."""
    emptied: Callable[[], None]
    """A log points to less than before: commit files may have become empty."""
    archived_offset: Callable[[TopicPartition], int]
    """Below it everything is in the archive, as far as anyone can tell now; 0 if nobody can."""

    def new_queue(self, folder: str) -> Queue:
        return Queue(self.disk, self.commit_log, self.open_queues, folder)


@dataclass(slots=True)
class Found:
    """What opening a folder found out about its log."""

    queue: Queue
    start_offset: int = 0
    safe_start_offset: int = 0
    """The start that the checkpoint holds."""
    checked_from: int | None = None
    """From this offset on everything was checked just now; None: nothing was."""
    epochs: EpochHistory | None = None
    snapshots: list[int] = field(default_factory=list)
    cleanings: list[tuple[int, int]] = field(default_factory=list)
    tail: Tail = Tail.WHOLE
    damaged_from: int | None = None
    """The first offset that was found to be damaged."""
