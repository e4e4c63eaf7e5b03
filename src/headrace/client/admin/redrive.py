"""Dead letters sent again to where they came from.

A redrive reads the topic of dead letters as a group of its own, whose offsets are committed in the same transactions as
what it sends: broken off and begun again it goes on where it was, and sends nothing twice. Another selection of letters
is another group, and begins at the first letter: what both select is sent by both.

A letter that has no copy of its record is a note of where that is: it is read from there, if it is still there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from headrace.client.admin.cluster import Cluster
from headrace.client.admin.fetch import Span, offsets_at, read_batches, span_records
from headrace.client.admin.groups import fetch_offsets
from headrace.client.errors import Refusal
from headrace.client.fetch_requests import EARLIEST, LATEST
from headrace.client.producer.producer import Producer
from headrace.errors import ErrorCode
from headrace.queues import dead_letters
from headrace.queues.messages import Reason
from headrace.records import kernel
from headrace.records.record import Header, Record

PREFIX: Final = "headrace.redrive."
PER_TRANSACTION: Final = 500
REASONS: Final = {"rejected": Reason.REJECTED, "deliveries": Reason.DELIVERIES}


@dataclass(frozen=True, slots=True)
class DeadLetter:
    partition: int
    offset: int
    written_ms: int
    topic: str
    """Where its record came from."""
    source_partition: int
    source_offset: int
    group: str
    delivery_count: int | None
    message: str
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...]
    """Without those of the letter."""
    has_copy: bool

    @property
    def reason(self) -> str:
        known = {text: name for name, reason in REASONS.items() for text in [dead_letters.MESSAGES[reason]]}
        return known.get(self.message, self.message)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which dead letters of a topic: all that is given has to hold. Times are those of their writing; `until_ms` itself
    is outside."""

    group: str
    reason: str | None = None
    from_ms: int | None = None
    until_ms: int | None = None
    key: bytes | None = None

    def matches(self, letter: DeadLetter) -> bool:
        return (
            letter.group == self.group
            and (self.reason is None or letter.reason == self.reason)
            and (self.from_ms is None or letter.written_ms >= self.from_ms)
            and (self.until_ms is None or letter.written_ms < self.until_ms)
            and (self.key is None or letter.key == self.key)
        )

    def name(self, topic: str) -> str:
        """Of the group that a redrive of it reads the topic as, and of its transactions."""
        chosen = repr((topic, self.reason, self.from_ms, self.until_ms, self.key))
        return f"{PREFIX}{self.group}.{hashlib.blake2b(chosen.encode(), digest_size=6).hexdigest()}"


@dataclass(slots=True)
class Redriven:
    """What a redrive has done."""

    sent: int = 0
    passed_over: int = 0
    """Letters that were not selected, or were none."""
    gone: int = 0
    """Letters without a copy, whose records are not in their logs any more."""


def read_letter(partition: int, record: Record) -> DeadLetter | None:
    """None for a record that is no dead letter."""
    said = {name: (value or b"").decode(errors="replace") for name, value in record.headers}
    try:
        topic, group = said[dead_letters.TOPIC], said[dead_letters.GROUP]
        source_partition, source_offset = int(said[dead_letters.PARTITION]), int(said[dead_letters.OFFSET])
    except (KeyError, ValueError):
        return None
    count = said.get(dead_letters.DELIVERY_COUNT, "")
    own = tuple([header for header in record.headers if header[0] not in dead_letters.NAMES])
    return DeadLetter(
        partition,
        record.offset,
        record.timestamp_ms,
        topic,
        source_partition,
        source_offset,
        group,
        int(count) if count.isdigit() else None,
        said.get(dead_letters.MESSAGE, ""),
        record.key,
        record.value,
        own,
        bool(own) or record.key is not None or record.value is not None,
    )


def count_letters(cluster: Cluster, topic: str) -> int | None:
    """Records of a topic of dead letters, of whatever group; None if there is no such topic."""
    found = cluster.retry(lambda: cluster.topology([topic])).topics.get(topic)
    if found is None:
        return None
    numbers = [partition.index for partition in found.partitions]
    starts, ends = (offsets_at(cluster, topic, numbers, moment) for moment in (EARLIEST, LATEST))
    return sum(ends[n] - starts[n] for n in numbers)


class Redrive:
    """From one topic of dead letters. `pace` is called before letters are sent, with how many, and may wait."""

    def __init__(
        self,
        cluster: Cluster,
        topic: str,
        selection: Selection,
        *,
        again: bool = False,
        per_transaction: int = PER_TRANSACTION,
        pace: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.done = Redriven()
        self.name = selection.name(topic)
        self._cluster = cluster
        self._topic = topic
        self._selection = selection
        self._again = again
        self._per_transaction = per_transaction
        self._pace = pace

    def spans(self) -> list[Span]:
        """What is there to read: from where the last redrive of this selection has ended, or `again` all of it, to the
        end as it is now."""
        found = self._cluster.topic(self._topic)
        numbers = [partition.index for partition in found.partitions]
        starts, ends = (offsets_at(self._cluster, self._topic, numbers, at) for at in (EARLIEST, LATEST))
        places = {} if self._again else fetch_offsets(self._cluster, self.name)
        firsts = {n: max(starts[n], places.get((self._topic, n), 0)) for n in numbers}
        return [Span(self._topic, n, firsts[n], ends[n], found.topic_id) for n in numbers if firsts[n] < ends[n]]

    def letters(self, span: Span) -> Iterator[tuple[list[DeadLetter], int]]:
        """Those that are selected, and how many offsets each step went over."""
        for records, passed in span_records(self._cluster, span):
            found = [letter for record in records if (letter := read_letter(span.partition, record)) is not None]
            yield [letter for letter in found if self._selection.matches(letter)], passed

    def run(self, span: Span, advanced: Callable[[int], None]) -> None:
        """Send the letters of a span again, in transactions with its place."""
        with Producer(
            self._cluster.bootstrap,
            transactional_id=f"{self.name}.{span.partition}",
            delivery_timeout_ms=self._cluster.timeout_ms,
            tls=self._cluster.tls,
        ) as producer:
            with producer.transaction():
                pass  # from here on no other redrive of this selection sends anything
            if not self._again:
                place = fetch_offsets(self._cluster, self.name).get((self._topic, span.partition), 0)
                span = replace(span, first_offset=max(span.first_offset, place))
            at = span.first_offset
            for letters, passed in self.letters(span) if at < span.next_offset else ():
                self.done.passed_over += passed - len(letters)
                while len(letters) > self._per_transaction:
                    part, letters = letters[: self._per_transaction], letters[self._per_transaction :]
                    self._send(producer, part, span.partition, part[-1].offset + 1)
                at += passed
                self._send(producer, letters, span.partition, at)
                advanced(passed)

    def _send(self, producer: Producer, letters: list[DeadLetter], partition: int, place: int) -> None:
        found = [(letter, self._content(letter)) for letter in letters]
        self._pace(len(letters))
        with producer.transaction() as transaction:
            for letter, content in found:
                if content is not None:
                    key, value, headers = content
                    transaction.send(letter.topic, value, key=key, headers=headers, partition=letter.source_partition)
            transaction.send_offsets({(self._topic, partition): place}, self.name)
        sent = sum(content is not None for _, content in found)
        self.done.sent += sent
        self.done.gone += len(found) - sent

    def _content(self, letter: DeadLetter) -> tuple[bytes | None, bytes | None, tuple[Header, ...]] | None:
        """Key, value and headers; None if nobody has them any more."""
        if letter.has_copy:
            return letter.key, letter.value, letter.headers
        try:
            found = read_batches(self._cluster, letter.topic, letter.source_partition, letter.source_offset, 1)
        except Refusal as refusal:
            if refusal.kafka_code in (ErrorCode.OFFSET_OUT_OF_RANGE, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION):
                return None
            raise
        for _, view in found.batches:
            for record in kernel.records(view):
                if record.offset == letter.source_offset:
                    return record.key, record.value, tuple(record.headers)
        return None
