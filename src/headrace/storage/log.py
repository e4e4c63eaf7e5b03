"""What a log is to everything above storage. A layout (files per partition, or one shared log) implements it.

A log is a sequence of record batches with rising offsets. `append` stages a batch: it gets its offsets and is visible
in `end_offset` at once, but it is written by `LogStore.write_staged`, one vectored write per turn for all that was
staged. Staged views are only used until then. Reads answer file slices, never bytes, and never go beyond
`written_offset`. Nothing here says that a partition has a file of its own.

Damage that a log knows of was found at its start; it is reported then, never served, and mended from another replica.
What lay at the front of a log and is gone is damage too (`Log.lost_front`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from headrace.errors import HeadraceError
from headrace.ports.disk import FileSlice
from headrace.records.batch import BatchHeader
from headrace.settings.values import LogSettings

if TYPE_CHECKING:
    from headrace.storage.producers import ProducerState

TICK_SECONDS: Final = 0.1


class TopicPartition(NamedTuple):
    """A tuple: it is the key of most tables, and hashed and compared by C then."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class Tail(IntEnum):
    """What a start found at the end of a log, above all that is known to have been synced."""

    WHOLE = 0
    CUT_SHORT = 1
    """The file ends inside a batch, and its bytes are right as far as they go. A process that is killed while it writes
    leaves that: the kernel looks for a deadly signal between the pages. Nobody was told that it had been written."""
    TORN = 2
    """Bytes that are all there and not what was written, which were cut. A loss of power leaves such, the death of a
    process does not."""
    HOLED = 3
    """The same, and something whole came behind them. That is rare after a loss of power, and what damage to bytes
    that had been synced looks like."""


@dataclass(frozen=True, slots=True)
class ReadResult:
    """Slices that begin with the batch that holds the offset asked for; `count` is their length in bytes.

    The last batch may be cut by the byte limit, as Kafka clients expect; the first one never is.
    """

    slices: tuple[FileSlice, ...]
    count: int
    unchecked: FileSlice | None = None
    """What would come next and must be checked first: in later turns, and once it is in the page cache."""
    ahead: tuple[FileSlice, ...] = ()
    """What would come behind that, if it lies elsewhere: worth reading ahead with it."""
    beyond: tuple[FileSlice, ...] = ()
    """What a reader of old data will ask for next, if it lies in many places: worth reading ahead meanwhile."""

    @property
    def wanted(self) -> tuple[FileSlice, ...]:
        """All that a later read wants in the page cache."""
        return () if self.unchecked is None else (self.unchecked, *self.ahead)


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """The largest epoch not above the one asked for, and the first offset after it."""

    epoch: int
    end_offset: int


@dataclass(frozen=True, slots=True)
class TimedOffset:
    offset: int
    timestamp_ms: int


class ProducerStates(Protocol):
    """What is known of idempotent producers in one log."""

    def check(self, header: BatchHeader) -> int | None:
        """None: take it. An offset: a duplicate, which was appended there. Raises OutOfOrderSequence and kin."""
        ...

    def load(self) -> None:
        """Read now what would be read at first use. Raises UnreadableProducers if the log is damaged there."""
        ...

    def pass_damage(self) -> None:
        """Leave out what is damaged from now on: nobody else has it."""
        ...

    def first_undecided(self, watermark: int) -> int | None:
        """Where the first transaction begins that is open, or whose marker is not below the watermark. Raises what
        `load` does."""
        ...

    def first_open(self, end_offset: int) -> int:
        """Where the first transaction begins that has no marker; the end if there is none. Raises what `load` does."""
        ...

    @property
    def loaded(self) -> bool: ...

    @property
    def states(self) -> dict[int, ProducerState]: ...

    left_out: list[int]
    """Offsets of damage that was passed over when it was loaded."""

    def refused(self, header: BatchHeader) -> None:
        """It is not taken now, for no fault of its own."""
        ...

    def drop(self, header: BatchHeader) -> None: ...


class Log(Protocol):
    """One partition's log."""

    topic_partition: TopicPartition
    topic_id: bytes
    settings: LogSettings
    start_offset: int
    end_offset: int
    written_offset: int
    durable_offset: int
    committed_offset: int
    """The high watermark, set by the partition whenever it moves. Retention, compaction and the key index leave
    everything from it on; 0 until somebody tells, so that nothing is lost if nobody does."""
    safe_start_offset: int
    """The start that is safe on disk: no crash lowers it. At most `start_offset`."""
    retire: Callable[[int], None]
    """What retention calls with the first offset that it keeps. By itself the log deletes at once what lies below;
    who serves the log puts something in its place, so that all replicas begin where their leader says."""
    delayed_from: Callable[[], int]
    """Where topics with delays are concerned: records from this offset on wait to be delivered, and retention leaves
    them. 0, which is all of the log, until somebody knows better."""
    retiring_to: int
    """Where the log is about to begin, as who serves it has decided."""
    held_bytes: int
    """What retention would have deleted at its last check, had it been archived."""
    wanted_start: int
    """Where the log would begin by its last check of retention, if nothing were in the way."""
    truncations: int
    """How often the log was cut in this run: what was true of an offset before is not after it."""
    offline: HeadraceError | None
    tail: Tail
    on_damage: Callable[[int], None]
    """Hears the offset of a batch that turned out to be wrong, or that the disk does not give back."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def producers(self) -> ProducerStates: ...

    def archived_offset(self) -> int:
        """Below it everything is in the archive; 0 when that is not known."""
        ...

    def append(self, batch: memoryview, header: BatchHeader, epoch: int) -> int:
        """Stage one checked batch as leader: stamp base offset and epoch in place; answers the base offset."""
        ...

    def append_copied(self, data: memoryview, epoch_starts: Sequence[tuple[int, int]] = ()) -> int:
        """Stage whole batches as follower, with the offsets, perhaps with gaps, and the epochs that they already have,
        which began where the leader says; answers the new end. All are checked first: CorruptBatch, OffsetOutOfRange or
        FencedEpoch, and nothing is staged. An empty log takes a batch that spans its start."""
        ...

    def read(self, offset: int, max_bytes: int, limit_offset: int, *, warm: bool = False) -> ReadResult:
        """Batches from `offset` up to, not including, `limit_offset`, which is the boundary of a batch or at the end.
        Bytes that were never checked are checked a piece at a time, but not while they are outside the page cache,
        unless the caller has read them ahead and says `warm`: then at least one batch is.
        Raises OffsetOutOfRange below the start or above the end, CorruptBatch where the log is damaged; `on_damage` has
        heard of it then."""
        ...

    def first_damaged_offset(self) -> int | None:
        """The first offset that the start found damaged. What an earlier start found in a shared log is told by its
        reads, unless it is the first of all."""
        ...

    def lost_front(self) -> bool:
        """Whether what the log began with is damaged or gone. Only deletions raise a start, and a leader's start has
        all its followers delete what lies before: so a log that has lost its first files begins where it did."""
        ...

    def doubt(self) -> None:
        """Slices of it could not be read when they were sent: check everything anew before it is served."""
        ...

    def truncate(self, offset: int) -> None:
        """Drop everything at and after the offset; a batch that spans it goes whole, and so may a gap before it.
        Nothing waits for the disk, and appends may follow at once. A loss of power leaves a prefix of what the log held
        before the cut, or of what it holds after it; from the next sync of the log on only the latter."""
        ...

    def delete_before(self, offset: int, done: Callable[[HeadraceError | None], None] | None = None) -> None:
        """Raise the start offset; what lies wholly below it may be removed from disk. `done` hears when the new start
        offset is safe on disk, or why it is not."""
        ...

    def restart_at(self, offset: int) -> None:
        """Drop everything, epochs and producers too; the next append gets this offset. As crash-safe as `truncate`."""
        ...

    def sync_soon(self) -> None:
        """Have everything that is written synced in the next group commit; `LogStore.on_durable` hears of it."""
        ...

    def offset_for_time(self, timestamp_ms: int) -> TimedOffset | None:
        """First batch whose greatest timestamp is not below the one asked for, refined to the record."""
        ...

    def greatest_timestamp(self) -> TimedOffset | None: ...

    def last_epoch(self) -> int: ...

    def epoch_end(self, epoch: int) -> EpochEnd | None:
        """The greatest epoch not above this one, and where it ends; None if that lies below the log's start, or if the
        log knows no such epoch. One that ends at the start may be forgotten when epochs are made again from the log."""
        ...

    def epoch_starts(self) -> Sequence[tuple[int, int]]:
        """Each epoch of which the log has had batches, or was told, and the first offset written in it; both rise.
        An epoch of which only later batches are left may count from the end of the batch before them."""
        ...

    def producers_before(self, offset: int) -> dict[int, ProducerState]:
        """What is known of producers from batches before the offset, which need not be there any more."""
        ...

    def learn_producers(self, states: dict[int, ProducerState]) -> None:
        """What the leader knows of producers from before the start. A log that holds something knows it by itself."""
        ...

    def aborted(self, from_offset: int, to_offset: int) -> list[tuple[int, int]]:
        """Producer id and first offset of the aborted transactions of which records may lie between the offsets, in the
        order of their markers. Once the producers are loaded."""
        ...

    def committed_limit(self, from_offset: int, limit_offset: int, most: int) -> int:
        """The limit, or the end of a batch before it behind which more transactions were aborted than one read should
        tell of."""
        ...

    def headers(self, from_offset: int) -> Iterator[tuple[BatchHeader, FileSlice]]:
        """Every batch from the one that holds the offset, in order, for maintenance work."""
        ...


class Phase(Enum):
    """How far a store has come. What it writes of itself (checkpoint, clean or not) it writes only while it is open: an
    opening that failed has not seen all that the folder holds, so nothing that it says of it would be true."""

    LOCKED = "locked"
    """The folder is ours; nothing of it was read."""
    OPENING = "opening"
    OPEN = "open"
    """Every log that was expected is there, and the first checkpoint speaks for it."""
    CLOSED = "closed"
    """Nothing is written any more. An opening that failed ends here too."""


class LogStore(Protocol):
    """All logs of one data folder, in one layout."""

    def create(self, topic_partition: TopicPartition, topic_id: bytes, settings: LogSettings) -> Log: ...

    def get(self, topic_partition: TopicPartition) -> Log | None: ...

    def logs(self) -> Iterator[Log]: ...

    def delete(self, topic_partition: TopicPartition) -> None:
        """Let go of a log, whose files go after a while; where there is none, of what a failed creation left. After an
        OSError it is there as before; so for `set_aside`."""
        ...

    def set_aside(self, topic_partition: TopicPartition) -> str:
        """Let go of a log and give its folder another name, which is answered: it goes with the deletion of its topic,
        or a person decides about it."""
        ...

    def delete_left(self, topic: str, topic_id: bytes) -> None:
        """Delete the folders of a deleted topic in which no log is open: those that are set aside, and those whose
        deletion failed. OSError: some are there still."""
        ...

    def write_staged(self) -> list[tuple[Log, HeadraceError]]:
        """Write all that was staged since the last call. A log that could not be written is rolled back to what it had
        before its staged batches and named with the reason (StorageFull, StorageFailed); the others are written.
        Starts a group commit for what needs one; `on_durable` hears of it."""
        ...

    def settings_changed(self, topic_partition: TopicPartition) -> None:
        """A log got other settings: what they ask for is looked at soon, without a write."""
        ...

    def on_durable(self, listener: Callable[[Log], None]) -> None:
        """`listener(log)` runs on the loop when a log's durable_offset has risen, or it has gone offline."""
        ...

    def tick(self) -> None:
        """Periodic work, on the loop, in short steps: flush intervals, rolling by age, retention, checkpoints,
        compaction. Call it at least every TICK_SECONDS."""
        ...

    def close(self) -> bool:
        """Sync, write the clean checkpoint and release the folder; answers whether all that was written is safe and
        the checkpoint says so. A store that never came to be open writes nothing."""
        ...


def look_at(log: Log, offset: int) -> None:
    """Somebody could not make sense of the batch at this offset: look at it again. If it is the log that is damaged,
    and not what a client once sent, `Log.on_damage` hears of it."""
    log.doubt()
    with suppress(HeadraceError):
        log.read(offset, 1, log.written_offset, warm=True)
