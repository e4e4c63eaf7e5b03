"""Produce, versions 3 to 13. 9: flexible; 10: where the leader is; 11: TRANSACTION_ABORTABLE; 12: partitions are added
to transactions by the broker; 13: topics by id.

The records stay as they came: checked, stamped in place, staged, written at the end of the turn; unless their topic is
stored in another codec, then they are recompressed first (`partitions.recompression`). acks=0 is never
answered, and an error then closes the connection, as clients expect. acks=1 waits for the leader's own copy to be as
durable as the topic asks, acks=-1 for the high watermark. Versions 0 to 2 carry a format that is not stored here.

That a batch is missing before this one is told only by who leads for certain (`cluster.leadership`). The first batch of
a transaction in a partition waits until the transaction's coordinator has said that it is going on
(`kafka.first_writes`), and so does what comes behind it.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from headrace.errors import (
    ErrorCode,
    HeadraceError,
    InvalidRecord,
    InvalidTxnState,
    NotLeader,
    OutOfOrderSequence,
    RequestTimedOut,
    StorageFailed,
    TransactionAbortable,
    TransactionUnverified,
)
from headrace.kafka import leader_lookup
from headrace.kafka.connection import Connection, PendingResponse
from headrace.kafka.first_writes import Support, Transaction, support_of
from headrace.kafka.services import Services
from headrace.partitions.partition import Appended, Partition
from headrace.partitions.partitions import Failures
from headrace.records.batch import ATTRIBUTES_AT, HEADER_BYTES, TRANSACTIONAL, read_header
from headrace.storage.log import TopicPartition
from headrace.wire import produce as wire

_FLAGS_AT: Final = ATTRIBUTES_AT + 1
"""The lower byte of a batch's attributes."""
ABORTABLE_FROM: Final = 11

Row = wire.ResponsePartition
Late = dict[tuple[int, int], tuple[Partition, list[Row], int]]
"""Rows whose batches are not appended yet, by the identity of their list and their place in it."""
Gap = tuple[Partition, list[Row], int]
"""A row that says out of order, by its place."""


class PendingProduce:
    """One request until its answer: which rows still wait, and what they say."""

    __slots__ = (
        "_acks",
        "_connection",
        "_correlation_id",
        "_gaps",
        "_held",
        "_recompressing",
        "_response",
        "_staged",
        "_timeout_ms",
        "_topics",
        "_transactional_id",
        "_version",
        "_waiting",
        "answered",
    )

    def __init__(
        self,
        connection: Connection,
        response: PendingResponse,
        version: int,
        correlation_id: int,
        acks: int,
        timeout_ms: int,
        transactional_id: str | None = None,
    ) -> None:
        self.answered = False
        self._connection = connection
        self._response = response
        self._version = version
        self._correlation_id = correlation_id
        self._acks = acks
        self._timeout_ms = timeout_ms
        self._topics: list[tuple[str | None, bytes | None, list[Row]]] = []
        self._staged: list[tuple[Partition, Appended, list[Row], int]] = []
        self._transactional_id = transactional_id
        self._recompressing: Late = {}
        self._held: Late = {}
        """Those that wait for the coordinator of their transaction."""
        self._gaps: list[Gap] = []
        """Those of which it is not known yet whether this broker leads."""
        self._waiting = 0

    def add_topic(self, name: str | None, topic_id: bytes | None, parts: list[tuple[int, memoryview | None]]) -> None:
        rows: list[Row] = []
        self._topics.append((name, topic_id, rows))
        services = self._connection.services
        image = services.view.image
        topic, error = name, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        if topic_id is not None:
            known = image.topics_by_id.get(topic_id)
            topic, error = (known.name if known is not None else None), ErrorCode.UNKNOWN_TOPIC_ID
        else:
            known = image.topics.get(name or "")
        if known is not None and known.internal:
            rows.extend((index, ErrorCode.INVALID_TOPIC_EXCEPTION, -1, -1, -1, None, ()) for index, _ in parts)
            return
        partitions = services.partitions
        for index, records in parts:
            partition = partitions.find(topic, index) if topic is not None else None
            if partition is None:
                code = error if topic is None else leader_lookup.not_led_code(image, topic, index)
                asked = topic or topic_id
                if asked is not None and records is not None:
                    partitions.refuse(asked, index, records)
                rows.append((index, code, -1, -1, -1, None, ()))
                continue
            try:
                appended = self._append(partition, records, rows, index)
            except HeadraceError as refused:
                if isinstance(refused, OutOfOrderSequence) and self._acks:
                    self._gaps.append((partition, rows, len(rows)))
                rows.append(_refusal(index, partition.start_offset, refused))
                continue
            if appended is not None:
                partitions.touch(partition)
                self._staged.append((partition, appended, rows, len(rows)))
                rows.append((index, 0, appended[0], appended[2], partition.start_offset, None, ()))

    def _append(self, partition: Partition, records: memoryview | None, rows: list[Row], index: int) -> Appended | None:
        """None: its row is there, and waits."""
        if records is None:
            raise InvalidRecord(f"{partition.topic_partition}: no record batch was sent")
        in_transaction = self._transactional_id is not None
        if not in_transaction and _is_transactional(records):
            raise InvalidTxnState(f"{partition.topic_partition}: a transactional batch without a transactional id")
        if in_transaction and self._must_wait(partition, records):
            self._hold(partition, records, rows, index)
            return None
        if _recompressed(self._connection.services, partition, records):
            self._recompress(partition, records, rows, index)
            return None
        try:
            return partition.append(records, self._acks)
        except TransactionUnverified:
            if not in_transaction:
                raise
            self._hold(partition, records, rows, index)
            return None

    def _recompress(self, partition: Partition, records: memoryview, rows: list[Row], index: int) -> None:
        """Its row waits until the batch has been appended in its codec, in its turn."""
        connection = self._connection
        self._submit(partition, records, rows, len(rows))
        rows.append((index, 0, -1, -1, partition.start_offset, None, ()))
        recompression = connection.services.partitions.recompression
        if recompression is not None and recompression.is_full:
            connection.block()
            recompression.when_room(connection.unblock)

    def _submit(self, partition: Partition, records: memoryview, rows: list[Row], at: int) -> None:
        recompression = self._connection.services.partitions.recompression
        assert recompression is not None
        key = id(rows), at
        recompression.submit(partition, records, self._acks, partial(self._recompressed, key))
        self._recompressing[key] = partition, rows, at

    def _recompressed(self, key: tuple[int, int], outcome: Appended | HeadraceError) -> None:
        self._appended(*self._recompressing.pop(key), outcome)

    # The first batch of a transaction.

    def _must_wait(self, partition: Partition, records: memoryview) -> bool:
        """Whether the batch comes behind one that waits, or may be the first and has to be recompressed: then it is
        verified before. Of others the append says whether they are the first."""
        services = self._connection.services
        if not services.first_writes.waiting and not _recompressed(services, partition, records):
            return False
        header = read_header(records)
        if not header.is_transactional:
            return False
        if (partition, header.producer_id, header.producer_epoch) in services.first_writes.waiting:
            return True
        try:
            return not partition.has_open_transaction(header.producer_id, header.producer_epoch)
        except StorageFailed:
            partition.refuse(records)
            raise

    def _hold(self, partition: Partition, records: memoryview, rows: list[Row], index: int) -> None:
        """Its row waits until the batch may be appended."""
        connection, header = self._connection, read_header(records)
        first_writes = connection.services.first_writes
        assert self._transactional_id is not None
        support = support_of(self._version, ABORTABLE_FROM)
        transaction = Transaction(self._transactional_id, header.producer_id, header.producer_epoch, support)
        key = id(rows), len(rows)
        batch = bytearray(records)
        first_writes.hold(partition, transaction, len(batch), partial(self._verified, key, batch))
        self._held[key] = partition, rows, len(rows)
        rows.append((index, 0, -1, -1, partition.start_offset, None, ()))
        if first_writes.is_full:
            connection.block()
            first_writes.when_room(connection.unblock)

    def hold_lone(self, topic: wire.RequestTopic, partition: Partition) -> None:
        """The one batch of the request is the first of its transaction there: an append has looked at all of it."""
        name, topic_id, ((index, records),) = topic
        rows: list[Row] = []
        self._topics.append((name, topic_id, rows))
        assert records is not None
        try:
            self._hold(partition, records, rows, index)
        except HeadraceError as refused:
            rows.append(_refusal(index, partition.start_offset, refused))

    def _verified(self, key: tuple[int, int], batch: bytearray, error: HeadraceError | None) -> None:
        partition, rows, at = self._held.pop(key)
        services = self._connection.services
        outcome: Appended | HeadraceError
        if error is not None:
            self._appended(partition, rows, at, error)
            return
        try:
            if _recompressed(services, partition, memoryview(batch)):
                self._submit(partition, memoryview(batch), rows, at)
                return
            outcome = partition.append(memoryview(batch), self._acks)
            services.partitions.touch(partition)
        except TransactionUnverified as ended:  # meanwhile, by its marker
            known = support_of(self._version, ABORTABLE_FROM) > Support.VERIFIED
            outcome = TransactionAbortable(str(ended)) if known else ended.again()
        except HeadraceError as refused:
            # It would hold this call, and with that whatever was received, until both are collected.
            outcome = refused.again()
        self._appended(partition, rows, at, outcome)

    def _appended(self, partition: Partition, rows: list[Row], at: int, outcome: Appended | HeadraceError) -> None:
        """What became of a batch that could not be appended at once: staged in the turn that ends next, or refused."""
        if self.answered:
            return
        if isinstance(outcome, HeadraceError):
            rows[at] = _refused(rows[at], outcome)
            if isinstance(outcome, OutOfOrderSequence) and self._acks:
                gap = partition, rows, at
                self._gaps.append(gap)
                self._confirm(gap)
            else:
                self.passed()
            return
        rows[at] = (rows[at][0], 0, outcome[0], outcome[2], partition.start_offset, None, ())
        self._staged.append((partition, outcome, rows, at))
        self._connection.services.partitions.at_turn_end(partial(self._written_late, partition, outcome, rows, at))

    def _written_late(
        self, partition: Partition, appended: Appended, rows: list[Row], at: int, failures: Failures
    ) -> None:
        error = failures.get(partition.topic_partition)
        if error is not None:
            rows[at] = _refused(rows[at], error)
        elif self._acks and not partition.reached(appended[1], self._acks):
            partition.wait(appended[1], self._acks, self)
            return
        self.passed()

    def add_staged(
        self, name: str | None, topic_id: bytes | None, index: int, partition: Partition, appended: Appended
    ) -> None:
        """A row whose batch is staged already."""
        rows: list[Row] = [(index, 0, appended[0], appended[2], partition.start_offset, None, ())]
        self._topics.append((name, topic_id, rows))
        self._staged.append((partition, appended, rows, 0))

    def refuse_all(self, topics: list[wire.RequestTopic], code: int, reason: str) -> None:
        for name, topic_id, parts in topics:
            self._topics.append((name, topic_id, [(index, code, -1, -1, -1, reason, ()) for index, _ in parts]))

    def written(self, failures: Failures) -> None:
        """What was staged is in the log, or has failed."""
        acks = self._acks
        # Held until all rows are looked at: one may be answered while the next is.
        self._waiting = 1 + len(self._recompressing) + len(self._held) + len(self._gaps)
        for gap in tuple(self._gaps):
            self._confirm(gap)
        for partition, appended, rows, at in self._staged:
            error = failures.get(partition.topic_partition) if failures else None
            if error is not None:
                rows[at] = _refused(rows[at], error)
            elif acks and not partition.reached(appended[1], acks):
                self._waiting += 1
                partition.wait(appended[1], acks, self)
        self.passed()
        if self.answered:
            return
        services = self._connection.services
        timeout_ms = min(max(self._timeout_ms, 0), services.settings["request.timeout.max.ms"])
        services.partitions.deadlines.add(services.clock.now() + timeout_ms / 1000, self)

    def _confirm(self, gap: Gap) -> None:
        self._connection.services.leadership.confirm(gap[0], partial(self._confirmed, gap))

    def _confirmed(self, gap: Gap, leads: bool) -> None:
        if self.answered:
            return
        self._gaps.remove(gap)
        if not leads:
            partition, rows, at = gap
            where, epoch = partition.topic_partition, partition.epoch
            rows[at] = _refused(rows[at], NotLeader(f"{where}: whether it is led here in epoch {epoch} is not certain"))
        self.passed()

    def passed(self) -> None:
        self._waiting -= 1
        if not self._waiting and not self.answered:
            self._answer()

    def failed(self, topic_partition: TopicPartition, error: HeadraceError) -> None:
        for partition, _, rows, at in self._staged:
            if partition.topic_partition == topic_partition:
                rows[at] = _refused(rows[at], error)
        self.passed()

    def expire(self) -> None:
        """Rows that did not get there in time say so; they may get there later."""
        for partition, appended, rows, at in self._staged:
            if rows[at][1] == 0 and not partition.reached(appended[1], self._acks):
                where = partition.topic_partition
                rows[at] = _refused(rows[at], RequestTimedOut(f"{where}: not committed in {self._timeout_ms} ms"))
        for partition, rows, at in self._recompressing.values():
            where = partition.topic_partition
            rows[at] = _refused(rows[at], RequestTimedOut(f"{where}: not recompressed in {self._timeout_ms} ms"))
        for partition, rows, at in self._held.values():
            where = partition.topic_partition
            error = RequestTimedOut(f"{where}: its transaction's coordinator did not answer in {self._timeout_ms} ms")
            rows[at] = _refused(rows[at], error)
        for partition, rows, at in self._gaps:
            where = partition.topic_partition
            rows[at] = _refused(rows[at], RequestTimedOut(f"{where}: who leads is not known in {self._timeout_ms} ms"))
        self._answer()

    def _answer(self) -> None:
        self.answered = True
        connection = self._connection
        refused = [row for _, _, rows in self._topics for row in rows if row[1]]
        if self._acks:
            for row in refused:
                connection.services.metrics.error("Produce", row[1])
            connection.fill(self._response, (self._encode(refused),))
            return
        connection.skip(self._response)
        if refused:
            _, code, _, _, _, reason, _ = refused[0]
            connection.close_with(f"an acks=0 produce failed with error {code}: {reason or 'see the table of codes'}")

    def _encode(self, refused: list[Row]) -> bytes:
        version, correlation_id, topics = self._version, self._correlation_id, self._topics
        if version >= wire.WITH_LEADERS and any(row[1] == ErrorCode.NOT_LEADER_OR_FOLLOWER for row in refused):
            services = self._connection.services
            leaders = _leaders_elsewhere(services, topics)
            brokers = (leader for leader, _ in leaders.values())
            ends = leader_lookup.endpoints(services.view.image, self._connection.listener, brokers)
            return wire.encode_elsewhere(version, correlation_id, topics, leaders, ends)
        return wire.encode_response(version, correlation_id, topics)


def _leaders_elsewhere(
    services: Services, topics: list[wire.ResponseTopic]
) -> dict[tuple[int, int], leader_lookup.Leader]:
    """Where the partitions are led that this broker does not lead, by place of the topic and partition."""
    found: dict[tuple[int, int], leader_lookup.Leader] = {}
    for place, (name, topic_id, rows) in enumerate(topics):
        if topic_id is not None:
            known = services.view.image.topics_by_id.get(topic_id)
            name = known.name if known is not None else None
        for row in rows:
            leader = (
                leader_lookup.leader_elsewhere(services, name, row[0])
                if row[1] == ErrorCode.NOT_LEADER_OR_FOLLOWER
                else None
            )
            if leader is not None:
                found[place, row[0]] = leader
    return found


def _refused(row: Row, error: HeadraceError) -> Row:
    return _refusal(row[0], row[4], error)


def _refusal(index: int, log_start: int, error: HeadraceError) -> Row:
    record_errors = error.record_errors if isinstance(error, InvalidRecord) else ()
    return (index, error.kafka_code, -1, -1, log_start, str(error), record_errors)


def handle(
    connection: Connection,
    response: PendingResponse,
    version: int,
    correlation_id: int,
    data: memoryview,
    body: int,
    end: int,
) -> None:
    transactional_id, acks, timeout_ms, topics = wire.decode(version, data, body, end)
    services = connection.services
    # One batch for one partition is what most producers send, so it has a path without an object per request.
    alone, opens = transactional_id is None or not services.first_writes.waiting, False
    if len(topics) == 1 and len(topics[0][2]) == 1 and alone and (acks in (1, -1)):
        partition = _find_lone(services, topics[0])
        records = topics[0][2][0][1]
        if partition is not None and records is not None and not _recompressed(services, partition, records):
            try:
                # As `_is_transactional`, without a call for each plain batch.
                if transactional_id is None and len(records) > HEADER_BYTES and records[_FLAGS_AT] & TRANSACTIONAL:
                    raise InvalidTxnState
                appended = partition.append(records, acks)
            except TransactionUnverified:
                opens = transactional_id is not None
            except HeadraceError:
                pass  # the general path words the error
            else:
                partitions = services.partitions
                partitions.touch(partition)
                lone = connection.lone_produces
                if not lone:
                    partitions.at_turn_end(partial(_finish_lone, connection))
                lone.append((response, version, correlation_id, acks, timeout_ms, topics[0], partition, appended))
                return
    pending = PendingProduce(connection, response, version, correlation_id, acks, timeout_ms, transactional_id)
    if acks not in (1, -1, 0):
        pending.refuse_all(topics, ErrorCode.INVALID_REQUIRED_ACKS, f"acks={acks} is not 0, 1 or -1")
    elif opens and partition is not None:
        pending.hold_lone(topics[0], partition)
    else:
        for name, topic_id, parts in topics:
            pending.add_topic(name, topic_id, parts)
    services.partitions.at_turn_end(pending.written)


def _is_transactional(records: memoryview) -> bool:
    return len(records) > HEADER_BYTES and records[_FLAGS_AT] & TRANSACTIONAL != 0


def _recompressed(services: Services, partition: Partition, records: memoryview) -> bool:
    """Whether a batch has to take the way through another codec, or behind one that does."""
    if partition.log.settings.codec < 0 and not partition.recompressing:
        return False
    return services.partitions.recompression is not None and partition.stored_otherwise(records)


def _find_lone(services: Services, topic: wire.RequestTopic) -> Partition | None:
    name, topic_id, ((index, _),) = topic
    if topic_id is not None:
        known = services.view.image.topics_by_id.get(topic_id)
        name = known.name if known is not None else None
    if name is None or name.startswith("__"):
        return None
    return services.partitions.find(name, index)


def _finish_lone(connection: Connection, failures: Failures) -> None:
    produces, connection.lone_produces = connection.lone_produces, []
    encode = wire.encode_response
    filled_bytes = 0
    for response, version, correlation_id, acks, timeout_ms, topic, partition, appended in produces:
        name, topic_id, ((index, _),) = topic
        if failures or not partition.reached(appended[1], acks):
            pending = PendingProduce(connection, response, version, correlation_id, acks, timeout_ms)
            pending.add_staged(name, topic_id, index, partition, appended)
            pending.written(failures)
            continue
        row = (index, 0, appended[0], appended[2], partition.start_offset, None, ())
        answer = encode(version, correlation_id, [(name, topic_id, [row])])
        response.parts = (answer,)
        filled_bytes += len(answer)
    connection.fill_many(filled_bytes)
