"""Batches on their way into the codec that their topic is stored in (`compression.type`), compressed off the loop.

A batch that is in another codec is copied and given to a thread, a few at a time. Until it is back, whatever else is
produced to its partition waits behind it, so that batches are appended in the order in which they came, each producer's
too. A batch already in the right codec, with nothing before it, does not come here: it is stored as it is.

A batch counts for nothing until it is appended: if it cannot be recompressed, or its partition is not led here any more
by then, it is refused. Where it can be sent again that is remembered, as of any refused batch, so that its producer's
next ones do not come before it. The bytes that wait are bounded: a front end stops reading from who sends more than
QUEUED_BYTES, and beyond QUEUED_MOST_BYTES batches are refused.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from headrace.errors import HeadraceError, RequestTimedOut, StorageFailed
from headrace.partitions.partition import Appended, Partition
from headrace.partitions.partitions import Partitions
from headrace.records.transcoder import codec_of, recode

log = logging.getLogger(__name__)

QUEUED_BYTES: Final = 32 << 20
QUEUED_MOST_BYTES: Final = 128 << 20
AT_A_TIME: Final = max(1, min(4, (os.cpu_count() or 1) - 1))

Compute = Callable[[Callable[[], bytearray]], Awaitable[bytearray]]
Spawn = Callable[[Coroutine[Any, Any, None]], None]
Done = Callable[[Appended | HeadraceError], None]
"""Hears what became of a batch: staged in the turn that ends next, or refused."""


class QueuedBatch:
    """One batch in its partition's queue; `ready` when it can be appended or has failed."""

    __slots__ = ("acks", "batch", "codec", "done", "error", "level", "partition", "queued_bytes", "ready")

    def __init__(self, partition: Partition, batch: bytearray, acks: int, done: Done) -> None:
        settings = partition.log.settings
        self.partition = partition
        self.batch = batch
        self.queued_bytes = len(batch)
        self.acks = acks
        self.done = done
        self.codec = settings.codec
        self.level = settings.codec_level
        self.error: HeadraceError | None = None
        self.ready = self.codec < 0 or codec_of(memoryview(batch)) == self.codec


class Recompression:
    """All partitions' queues of a broker. `compute` runs work in a thread, `spawn` a task that somebody owns."""

    def __init__(
        self,
        partitions: Partitions,
        compute: Compute,
        spawn: Spawn,
        queued_bytes: int = QUEUED_BYTES,
        queued_most_bytes: int = QUEUED_MOST_BYTES,
    ) -> None:
        self._partitions = partitions
        self._compute = compute
        self._spawn = spawn
        self._full_bytes = queued_bytes
        self._most_bytes = queued_most_bytes
        self._waiting: deque[QueuedBatch] = deque()
        self._running = 0
        self._held: list[Callable[[], None]] = []
        self.queued_bytes = 0

    @property
    def is_full(self) -> bool:
        return self.queued_bytes > self._full_bytes

    def when_room(self, call: Callable[[], None]) -> None:
        """Run once when the queues are half empty again."""
        self._held.append(call)

    def submit(self, partition: Partition, records: memoryview, acks: int, done: Done) -> None:
        """Have a batch appended in its turn, under the codec of its topic; the records are copied. Raises what refuses
        it at once."""
        if self.queued_bytes + len(records) > self._most_bytes:
            partition.refuse(records)
            raise RequestTimedOut(
                f"{partition.topic_partition}: {self.queued_bytes} bytes wait to be recompressed (compression.type); "
                "send it again"
            )
        queued = QueuedBatch(partition, bytearray(records), acks, done)
        self.queued_bytes += queued.queued_bytes
        partition.recompressing.append(queued)
        if not queued.ready:
            self._waiting.append(queued)
            self._start()

    def _start(self) -> None:
        while self._waiting and self._running < AT_A_TIME:
            self._running += 1
            self._spawn(self._work(self._waiting.popleft()))

    async def _work(self, queued: QueuedBatch) -> None:
        try:
            queued.batch = await self._compute(lambda: recode(memoryview(queued.batch), queued.codec, queued.level))
        except HeadraceError as error:
            queued.error = error
        except Exception:  # the request boundary: one batch may not take the broker down
            where = queued.partition.topic_partition
            log.exception("%s: a batch could not be recompressed", where)
            queued.error = StorageFailed(f"{where}: a batch could not be recompressed (compression.type)")
        finally:
            self._running -= 1
        queued.ready = True
        self._start()
        self._append_ready(queued.partition)

    def _append_ready(self, partition: Partition) -> None:
        """Stage what has come to the head of the queue, and end the turn."""
        queue = partition.recompressing
        while queue and queue[0].ready:
            queued = queue.popleft()
            self.queued_bytes -= queued.queued_bytes
            queued.done(self._append(queued))
        self._partitions.end_turn()
        if self._held and self.queued_bytes <= self._full_bytes // 2:
            held, self._held = self._held, []
            for call in held:
                call()

    def _append(self, queued: QueuedBatch) -> Appended | HeadraceError:
        partition, view = queued.partition, memoryview(queued.batch)
        if partition.closed is not None:  # which has remembered what it refused
            return partition.closed.again()
        if queued.error is not None:
            if queued.error.mapping.retriable:
                partition.refuse(view)
            return queued.error
        try:
            appended = partition.append(view, queued.acks)
        except HeadraceError as error:
            return error
        self._partitions.touch(partition)
        return appended
