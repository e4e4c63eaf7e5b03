"""One batch that Headrace itself appends: a group's offsets, a message that came by HTTP.

The same road as a producer's batch: staged, written at the end of the turn, answered when it counts for its acks. What
comes from users is stored in its topic's codec; what the broker keeps for itself is stored as it is.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.errors import HeadraceError, RequestTimedOut
from headrace.partitions.partition import Appended, Partition
from headrace.partitions.partitions import Failures, Partitions
from headrace.partitions.recompression import stored_otherwise
from headrace.records.batch import BatchHeader
from headrace.storage.log import TopicPartition

Done = Callable[[HeadraceError | None, int], None]


class Submission:
    """Calls `done(error, base_offset)` exactly once, on the loop."""

    __slots__ = ("_acks", "_appended", "_done", "_partition", "_partitions", "_timeout_ms", "answered")

    def __init__(self, partitions: Partitions, partition: Partition, acks: int, timeout_ms: int, done: Done) -> None:
        self.answered = False
        self._partitions = partitions
        self._partition = partition
        self._acks = acks
        self._timeout_ms = timeout_ms
        self._done = done
        self._appended: Appended | None = None

    def start(self, batch: bytearray, *, recompress: bool, own: BatchHeader | None) -> None:
        view, recompression = memoryview(batch), self._partitions.recompression
        try:
            if recompress and recompression is not None and stored_otherwise(self._partition, view):
                recompression.submit(self._partition, view, self._acks, self._recompressed)
                return
            self._appended = self._partition.append(view, self._acks, own)
        except HeadraceError as error:
            self._answer(error)
            return
        self._partitions.touch(self._partition)
        self._partitions.at_turn_end(self._written)

    def _recompressed(self, outcome: Appended | HeadraceError) -> None:
        if isinstance(outcome, HeadraceError):
            self._answer(outcome)
        else:
            self._appended = outcome
            self._partitions.at_turn_end(self._written)

    def _written(self, failures: Failures) -> None:
        assert self._appended is not None
        error = failures.get(self._partition.topic_partition)
        if error is not None or self._acks == 0:
            self._answer(error)
        elif self._partition.reached(self._appended[1], self._acks):
            self._answer(None)
        else:
            self._partition.wait(self._appended[1], self._acks, self)
            deadlines = self._partitions.deadlines
            deadlines.add(self._partitions.clock.now() + self._timeout_ms / 1000, self)

    def passed(self) -> None:
        self._answer(None)

    def failed(self, topic_partition: TopicPartition, error: HeadraceError) -> None:
        self._answer(error)

    def expire(self) -> None:
        where = self._partition.topic_partition
        self._answer(RequestTimedOut(f"{where}: not committed within {self._timeout_ms} ms; it may be later"))

    def _answer(self, error: HeadraceError | None) -> None:
        if not self.answered:
            self.answered = True
            self._done(error, self._appended[0] if self._appended is not None else -1)


def submit(
    partitions: Partitions,
    partition: Partition,
    batch: bytearray,
    acks: int,
    timeout_ms: int,
    done: Done,
    *,
    recompress: bool = False,
    own: BatchHeader | None = None,
) -> None:
    """Append one ready-made batch; the caller ends the turn (`partitions.end_turn()`) when it has submitted all. With
    `own`, its header, it is one that is not checked again (`Partition.append`)."""
    Submission(partitions, partition, acks, timeout_ms, done).start(batch, recompress=recompress, own=own)
