"""Fetch sessions of readers of committed records, over partitions with open, committed and aborted transactions."""

from __future__ import annotations

import pytest

from headrace.kafka.fetch_sessions import FetchSession, FetchSessions
from headrace.partitions.partition import Partition
from headrace.storage.folder import PARTITIONED, SHARED
from headrace.wire.fetch import FetchedPartition, FetchRequest
from partitions.led import Led
from partitions.test_partition_transactions import Transactional
from proving import proves

UNCOMMITTED, COMMITTED = 0, 1


@pytest.fixture(params=[PARTITIONED, SHARED])
def led(request: pytest.FixtureRequest) -> Led:
    return Led(request.param)


class Consumer:
    """A session of one partition, as the handler of Fetch drives it."""

    def __init__(self, led: Led, partition: Partition) -> None:
        self._led = led
        self._partition = partition
        self._sessions = FetchSessions(10, lambda: 0.0, lambda count: bytes(count - 1) + b"\x01")
        self._session: FetchSession | None = None
        self.offset = 0
        self.woken_by = 0

    def fetch(self, isolation: int = COMMITTED) -> FetchedPartition | None:
        """The row that the answer has, if it has one."""
        session, partition = self._session, self._partition
        if session is None:
            asked = self._request(0, 0, isolation)
            session = self._session = self._sessions.create(self, asked, by_id=False)
        else:
            asked = self._request(session.id, session.epoch, isolation)
            session = self._sessions.resume(self, asked, by_id=False)
        assert session is not None
        named = session.asked(lambda _: None)
        stable = partition.last_stable_offset if isolation == COMMITTED else partition.high_watermark
        found = None
        if named:
            if isolation == COMMITTED:
                found, _ = partition.read_committed(self.offset, 1 << 20)
            else:
                found = partition.read(self.offset, 1 << 20)
        rows = [
            FetchedPartition(
                0, 0, partition.high_watermark, stable, partition.start_offset, [], -1, found.slices, found.count
            )
            for _ in named
            if found is not None
        ]
        topics = [("orders", None, rows)] if rows else []
        session.wait(topics, [partition] * len(rows))
        told = session.news(topics, isolation)
        session.waiting, self.woken_by = self, 0
        return told[0][2][0] if told else None

    def _request(self, session_id: int, epoch: int, isolation: int) -> FetchRequest:
        moved = [] if self._session is not None else [("orders", None, [(0, -1, self.offset, -1, -1, 1 << 20)])]
        return FetchRequest(-1, 1000, 1, 1 << 20, isolation, session_id, epoch, list(moved), [], "")

    def seek(self, offset: int) -> None:
        assert self._session is not None
        self.offset = offset
        rows = [(0, -1, offset, -1, -1, 1 << 20)]
        self._session.update(FetchRequest(-1, 0, 1, 1 << 20, COMMITTED, 1, 1, [("orders", None, rows)], [], ""))

    # As a fetch that waits.

    def grew(self, count: int) -> None:
        self.woken_by += count

    def expire(self) -> None: ...


@proves("N2", "T2")
def test_a_committed_session_is_woken_by_what_is_decided_alone(led: Led) -> None:
    partition = led.lead()
    writer, consumer = Transactional(led, partition), Consumer(led, partition)
    assert consumer.fetch() is not None
    writer.write()
    writer.write(verify=False)
    led.clock.advance(0)
    assert consumer.woken_by == 0
    row = consumer.fetch()
    assert row is not None
    assert (row.high_watermark, row.last_stable_offset, row.payload_bytes) == (2, 0, 0)
    assert consumer.fetch() is None
    writer.mark(committed=True)
    led.clock.advance(0)
    assert consumer.woken_by > 0
    row = consumer.fetch()
    assert row is not None
    assert (row.high_watermark, row.last_stable_offset) == (3, 3)
    assert row.payload_bytes > 0
    consumer.seek(3)
    assert consumer.fetch() is None


@proves("N2")
def test_a_session_whose_isolation_changes_is_woken_as_its_new_reader_would_be(led: Led) -> None:
    partition = led.lead()
    writer, consumer = Transactional(led, partition), Consumer(led, partition)
    consumer.fetch()
    consumer.fetch(UNCOMMITTED)
    writer.write()
    led.clock.advance(0)
    assert consumer.woken_by > 0
    row = consumer.fetch(UNCOMMITTED)
    assert row is not None
    assert row.payload_bytes > 0
    row = consumer.fetch(COMMITTED)
    assert row is not None
    assert (row.last_stable_offset, row.payload_bytes) == (0, 0)
    writer.write(verify=False)
    led.clock.advance(0)
    assert consumer.woken_by == 0
