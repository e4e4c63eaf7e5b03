"""The dead letters of one share partition, on their way from its log to their topic.

A record that is given up is ARCHIVING, which is kept, until its letter is acknowledged by all replicas in sync; then it
is ARCHIVED. Whoever leads the partition next goes on with what is ARCHIVING: no letter is lost. One batch of letters is
under way at a time. It has the identity of a producer and a sequence, which are kept before it is sent: sent again, by
this broker or the next, it is known as the same batch and not written twice. Only when its topic has forgotten the
producer, another topic or another number of partitions was chosen meanwhile, or retention has taken some of its records
from the source, can a letter whose acknowledgement was not heard come twice.

What concerns all letters (there is no such topic, its leader is away) makes them wait, for longer each time. A letter
that its topic does not take, too large perhaps, is set aside and tried again now and then, and others go on.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Final, Protocol

from headrace.errors import ErrorCode, HeadraceError
from headrace.partitions.partition import Partition
from headrace.ports.clock import Clock
from headrace.ports.disk import Disk
from headrace.queues.dead_letter_topics import DeadLetterTopics
from headrace.queues.dead_letters import LetterOrder, build
from headrace.queues.log_read import LogRead, read_log
from headrace.queues.messages import (
    NO_PRODUCER,
    AcquiredRecords,
    CodeHeard,
    Letter,
    ShareGroupConfig,
    SharePartitionKey,
    StateBatch,
)
from headrace.queues.share_partition import DeliveryCounts, SharePartition
from headrace.records.batch import read_header
from headrace.records.isolation import Isolation
from headrace.storage.page_cache import are_warm

log = logging.getLogger(__name__)

LETTERS_PER_BATCH: Final = 100
READ_BYTES: Final = 1 << 20
"""Of the log, for one batch of letters; and the rest of the batch that it ends in."""
PAUSE_LEAST_SECONDS: Final = 0.1
PAUSE_MOST_SECONDS: Final = 30.0
ASIDE_SECONDS: Final = 60.0
"""Until a letter that was not taken is tried again."""
SEQUENCES_MAX: Final = 1 << 30
"""Of one identity."""

NOT_TAKEN: Final = frozenset(
    {
        ErrorCode.MESSAGE_TOO_LARGE,
        ErrorCode.RECORD_LIST_TOO_LARGE,
        ErrorCode.INVALID_RECORD,
        ErrorCode.INVALID_TIMESTAMP,
        ErrorCode.CORRUPT_MESSAGE,
    }
)
"""By what is in the batch."""
NOT_KNOWN: Final = frozenset(
    {
        ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
        ErrorCode.UNKNOWN_PRODUCER_ID,
        ErrorCode.INVALID_PRODUCER_EPOCH,
    }
)
"""The topic has lost what came before, under this identity: it was not written, and another one is needed."""
WRITTEN: Final = frozenset({ErrorCode.NONE, ErrorCode.DUPLICATE_SEQUENCE_NUMBER})


class Source(Protocol):
    """The share partition where it is led: see `led_share_partition`."""

    key: SharePartitionKey
    partition: Partition
    core: SharePartition | None

    @property
    def config(self) -> ShareGroupConfig: ...
    def when_kept(self, heard: CodeHeard) -> None: ...
    def changed(self, *, wakes: bool) -> None: ...


@dataclass(slots=True)
class _Identity:
    producer_id: int = NO_PRODUCER
    sequence: int = 0


class LetterDelivery:
    def __init__(
        self, source: Source, topics: DeadLetterTopics, disk: Disk, clock: Clock, counts: DeliveryCounts
    ) -> None:
        self.source = source
        self.topics = topics
        self.disk = disk
        self.clock = clock
        self.identity = _Identity()
        self._counts = counts
        self._core: SharePartition | None = None
        """Of which the identity is, and what is set aside."""
        self._busy = self._pausing = False
        self._pause_seconds = PAUSE_LEAST_SECONDS
        self._most = LETTERS_PER_BATCH
        self._aside: set[int] = set()
        """Offsets of letters that were not taken, each tried again in its time."""
        self._told = ""
        """What was logged last."""

    @property
    def is_busy(self) -> bool:
        return self._busy or self._pausing

    def look(self) -> None:
        """There may be letters to write."""
        core = self.source.core
        if core is not None and core.archiving and not self._busy and not self._pausing:
            self._busy = True
            self.topics.when_free(self._begin)

    def _begin(self) -> None:
        core = self.source.core
        if core is None:
            self.ended()
            return
        if core is not self._core:
            self._core, self.identity, self._aside = core, _Identity(), set()
        if core.log_start(self.source.partition.log.start_offset):
            self.source.changed(wakes=True)
        config = self.source.config
        if not config.dead_letter_topic:
            self._archive_all(core)
            return
        batch = self._next(core)
        if batch is None:
            self.ended()
        else:
            _Attempt(self, core, batch, config).begin()

    def _archive_all(self, core: SharePartition) -> None:
        """The group has no topic for dead letters any more."""
        archived = core.archive(core.start_offset, core.next_offset)
        log.warning("%s: archived %d records without dead letters: there is no topic for them now", self.name, archived)
        self.ended()
        self.source.changed(wakes=True)

    def _next(self, core: SharePartition) -> StateBatch | None:
        """The letters to write next: those that may have been sent before all others."""
        fresh: StateBatch | None = None
        for batch in core.letters():
            if batch.letter is not None and batch.letter.is_addressed:
                return batch
            if fresh is None:
                fresh = self._part(batch)
        return fresh

    def _part(self, batch: StateBatch) -> StateBatch | None:
        """What of it is not set aside, as far as it makes one batch."""
        first, last = batch.first_offset, batch.last_offset
        while first in self._aside and first <= last:
            first += 1
        if first > last:
            return None
        last = min(last, first + self._most - 1)
        last = min([at - 1 for at in self._aside if first < at <= last], default=last)
        return replace(batch, first_offset=first, last_offset=last)

    # How an attempt ends.

    def ended(self) -> None:
        self._busy = False
        self.topics.ended()

    def go_on(self) -> None:
        """At once, if there is more."""
        self.ended()
        self.look()

    def written(self, batch: StateBatch, core: SharePartition) -> None:
        self._counts.dead_letters += core.archive(batch.first_offset, batch.last_offset)
        self._pause_seconds, self._most, self._told = PAUSE_LEAST_SECONDS, LETTERS_PER_BATCH, ""
        self.ended()
        self.source.changed(wakes=True)  # which looks for more

    def pause(self, reason: str) -> None:
        """No letter can be written now."""
        self._failed(reason)
        self.ended()
        self._pausing = True
        self.clock.call_later(self._pause_seconds, self._resume)
        self._pause_seconds = min(2 * self._pause_seconds, PAUSE_MOST_SECONDS)

    def _resume(self) -> None:
        self._pausing = False
        self.look()

    def refused(self, batch: StateBatch, reason: str) -> None:
        """These letters are not taken. Several of them go on in smaller batches, one is set aside."""
        self.identity = _Identity()
        if batch.record_count > 1:
            self._most = max(1, batch.record_count // 2)
        else:
            self._failed(reason)
            self._most = LETTERS_PER_BATCH
            self._aside.add(batch.first_offset)
            self.clock.call_later(ASIDE_SECONDS, lambda: self._try_again(batch.first_offset))
        self.go_on()

    def _try_again(self, offset: int) -> None:
        self._aside.discard(offset)
        self.look()

    def _failed(self, reason: str) -> None:
        self._counts.dead_letter_failures += 1
        if reason != self._told:
            self._told = reason
            log.warning("%s: dead letters cannot be written now, and wait: %s", self.name, reason)

    @property
    def name(self) -> str:
        return f"share group {self.source.key.group!r} of {self.source.partition.topic_partition}"


class _Attempt:
    """One batch of letters, from its records to its acknowledgement."""

    def __init__(
        self, owner: LetterDelivery, core: SharePartition, batch: StateBatch, config: ShareGroupConfig
    ) -> None:
        self._owner = owner
        self._core = core
        self._batch = batch
        self._config = config
        self._read: list[bytes] = []
        self._read_bytes = 0
        self._next_offset = batch.first_offset
        assert batch.letter is not None
        self._letter: Letter = batch.letter
        self._sent_before = batch.letter.is_addressed

    def begin(self) -> None:
        self._owner.topics.prepare(self._config.dead_letter_topic, self._prepared)

    def _is_over(self) -> bool:
        """The share partition was loaded again, or is led elsewhere: what is kept says how it goes on."""
        over = self._owner.source.core is not self._core or self._batch.first_offset < self._core.start_offset
        if over:
            self._owner.go_on()
        return over

    def _prepared(self, reason: str) -> None:
        if self._is_over():
            return
        identity = self._owner.identity
        if reason:
            self._owner.pause(reason)
        elif self._sent_before:
            self._read_on()
        elif identity.producer_id == NO_PRODUCER or identity.sequence >= SEQUENCES_MAX:
            self._owner.topics.draw_producer_id(self._drawn)
        else:
            self._identify()

    def _drawn(self, producer_id: int | None) -> None:
        if self._is_over():
            return
        if producer_id is None:
            self._owner.pause("no producer id can be had from coordination")
            return
        self._owner.identity = _Identity(producer_id)
        self._identify()

    def _identify(self) -> None:
        identity = self._owner.identity
        self._letter = Letter(self._letter.reason, identity.producer_id, identity.sequence)
        self._read_on()

    # Reading.

    def _read_on(self, *, warm: bool = False) -> None:
        if self._is_over():
            return
        try:
            while self._wants_more():
                if not self._read_some(warm=warm):
                    return
                warm = False
        except HeadraceError as error:
            self._owner.pause(f"their records cannot be read: {error}")
            return
        except OSError as error:
            self._owner.pause(f"their records cannot be read: {error}")
            return
        self._build()

    def _wants_more(self) -> bool:
        if self._next_offset > self._batch.last_offset:
            return False
        return self._sent_before or self._read_bytes < READ_BYTES

    def _read_some(self, *, warm: bool) -> bool:
        """False: it goes on when what it needs is in the page cache."""
        owner, first, last = self._owner, self._next_offset, self._batch.last_offset
        partition, wanted = owner.source.partition, last - first + 1
        found = read_log(partition, owner.disk, first, READ_BYTES, Isolation.UNCOMMITTED, first, wanted, warm=warm)
        if not isinstance(found, LogRead):
            if are_warm(owner.disk, found, self._warmed):
                owner.clock.call_soon(self._warmed)
            return False
        for piece in found.slices_of([AcquiredRecords(first, last, 0)]):
            self._read.append(bytes(piece.read()))
            self._read_bytes += len(self._read[-1])
        self._next_offset = found.batches[-1].last_offset + 1 if found.batches else last + 1
        return True

    def _warmed(self) -> None:
        self._read_on(warm=True)

    # Writing.

    def _build(self) -> None:
        owner, batch = self._owner, self._batch
        key, where = owner.source.key, owner.source.partition.topic_partition
        order = LetterOrder(
            key.group,
            where.topic,
            where.partition,
            batch.first_offset,
            min(batch.last_offset, self._next_offset - 1),
            batch.delivery_count,
            self._letter,
            self._config.copies_dead_letters,
            owner.clock.wall_ms(),
            0 if self._sent_before else owner.topics.batch_bytes(self._config.dead_letter_topic),
        )
        source = b"".join(self._read)
        owner.topics.compute(lambda: build(source, order), self._built)

    def _built(self, built: bytearray | HeadraceError) -> None:
        if self._is_over():
            return
        if isinstance(built, HeadraceError):
            self._answered(built.kafka_code, str(built))
            return
        if self._sent_before:
            self._send(built)
            return
        first = self._batch.first_offset
        self._batch = replace(self._batch, last_offset=first + read_header(built).record_count - 1)
        self._core.address_letters(first, self._batch.last_offset, self._letter.producer_id, self._letter.sequence)
        self._owner.identity.sequence += self._batch.record_count
        self._owner.source.when_kept(lambda code: self._kept(code, built))

    def _kept(self, code: int, built: bytearray) -> None:
        if code != ErrorCode.NONE:
            self._owner.go_on()  # it is loaded again
        elif not self._is_over():
            self._send(built)

    def _send(self, built: bytearray) -> None:
        partition = self._owner.source.key.partition
        self._owner.topics.send(self._config.dead_letter_topic, partition, built, self._answered)

    def _answered(self, code: int, reason: str) -> None:
        owner, batch = self._owner, self._batch
        if owner.source.core is not self._core:
            owner.go_on()
        elif code in WRITTEN:
            owner.written(batch, self._core)
        elif code in NOT_TAKEN or code in NOT_KNOWN:
            self._unaddress()
            if code in NOT_TAKEN:
                owner.refused(batch, f"offset {batch.first_offset}: code {code} {reason}")
            else:
                owner.identity = _Identity()
                owner.pause(f"code {code} {reason}")
        else:
            owner.pause(f"code {code} {reason}")

    def _unaddress(self) -> None:
        first = max(self._batch.first_offset, self._core.start_offset)
        if first <= self._batch.last_offset:
            self._core.address_letters(first, self._batch.last_offset, NO_PRODUCER)
            self._owner.source.changed(wakes=False)
