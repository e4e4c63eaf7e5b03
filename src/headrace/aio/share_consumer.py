# Made by tools/unasync.py of src/headrace/client/share/share_consumer.py: change that one, then run `make unasync`.
"""The share consumer for asyncio: members of a share group acquire records, and acknowledge each of them.

    async with ShareConsumer("orders", group="packing") as consumer:
        async for record in consumer.records():
            print(record.offset, record.delivery_count, record.value)

Any number of members share a partition; a record is one member's at a time, for as long as the group's lock lasts.
Make it where its loop runs, and use it from one task at a time. The group is kept up in the background
while the caller works.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, Unpack

from headrace.aio.tasks import connect, end_with_program
from headrace.client.connection import exits
from headrace.client.consumer.group_protocol import TopicPartition
from headrace.client.errors import EngineClosed
from headrace.client.keywords import takes_options
from headrace.client.share.core import Committed, Results, ShareCore
from headrace.client.share.offset_runs import Run
from headrace.client.share.options import ShareConsumerConfig, ShareConsumerOptions, Topics, config_of, names_of
from headrace.errors import HeadraceError, InvalidRequest, RequestTimedOut
from headrace.records.consumer_records import ReceivedRecord

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_ROWS: Final = 10_000
COLUMNS: Final = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType")

log = logging.getLogger(__name__)


@takes_options(ShareConsumerConfig)
class ShareConsumer:
    """Reads topics as a member of a share group (KIP-932).

    With implicit acknowledgement the next call for records accepts what the last one gave. With explicit
    acknowledgement each record is accepted, released (another delivery), rejected (no more deliveries) or renewed (its
    lock lasts longer) before that. What is not acknowledged before its lock runs out, or when its member is gone, is
    delivered again, as often as the group's settings allow.

    Errors that pass are waited out: a broker that is restarted, a leader that moves, a group that goes on without this
    member. What a call raises needs somebody to do something, and says what.
    """

    def __init__(self, topics: Topics = None, **options: Unpack[ShareConsumerOptions]) -> None:
        self._options = config_of(options)
        names = names_of(topics)
        self._closed = False
        self._pool, self._driver = connect(self._options)
        try:
            with self._driver.lock:
                self._core = ShareCore(self._pool, self._options, self._driver.changed)
                self._core.start()
                if names:
                    self._core.subscribe(names)
        except BaseException:
            self._pool.release()
            raise
        self._collector = self._core.collector
        exits.consumer_opened(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            await self.close()
            return
        try:
            await self._close(handed_out=False)
        except Exception as failure:
            log.warning(
                "after %s the share consumer could not be closed as it should: %s", kind.__name__, failure,
                exc_info=not isinstance(failure, HeadraceError),
            )  # fmt: skip

    def __aiter__(self) -> AsyncIterator[ReceivedRecord]:
        return self.records()

    # Subscription

    def subscribe(self, topics: Topics) -> None:
        """Read these topics from now on, instead of those before; none: leave the group until there are some again."""
        names = names_of(topics)
        with self._driver.lock:
            self._check_open()
            self._core.subscribe(names)
        self._driver.drive()

    @property
    def subscription(self) -> frozenset[str]:
        """The topics that are read."""
        with self._driver.lock:
            return self._core.subscription

    @property
    def assignment(self) -> list[TopicPartition]:
        """Topic and partition of all that is read now; other members may have the same ones."""
        with self._driver.lock:
            return self._core.assignment

    @property
    def member_id(self) -> str:
        """What the group calls this member."""
        return self._core.member_id

    # Records

    async def poll(self, timeout_ms: int = 1000, max_records: int | None = None) -> list[ReceivedRecord]:
        """Records that are there, up to `max_records` (`max_poll_records`), else the first that come within the
        timeout, else none."""
        most = self._most(max_records)
        found: list[ReceivedRecord] = []

        def take() -> bool:
            self._collector.take(found, most)
            return bool(found)

        await self._wait_to(take, most, timeout_ms)
        return found

    async def records(self, timeout_ms: int | None = None) -> AsyncIterator[ReceivedRecord]:
        """Record after record; ends when none came for `timeout_ms`, else never."""
        most = self._options.max_poll_records
        while await self._wait_to(lambda: self._collector.take_chunk(most), most, timeout_ms):
            for each in self._collector.unread:
                yield each

    async def batches(
        self,
        columns: Iterable[str] = COLUMNS,
        *,
        batch_rows: int = BATCH_ROWS,
        timeout_ms: int | None = None,
    ) -> AsyncIterator[pa.RecordBatch]:
        """Arrow batches of at most `batch_rows` rows of one partition each; ends when none came for `timeout_ms`.

        Columns are those of `headrace.records.arrow.TYPES`; values are not decoded.
        """
        wanted = tuple(columns)
        with self._driver.lock:
            self._collector.forget_decoders()
        while (rows := await self._next_rows(wanted, batch_rows, timeout_ms)) is not None:
            yield rows

    # Acknowledgements

    def acknowledge(self, records: ReceivedRecord | Iterable[ReceivedRecord], how: str = "accept") -> None:
        """Say of a record, or of several, that it is done (`accept`), not done (`release`: it comes again), can never
        be done (`reject`), or takes longer (`renew`: the lock lasts for its whole time again).

        What is said leaves with the next poll or commit; a renewal at once. A renewed record stays in the caller's
        hands, also over a poll, and is to be acknowledged again. InvalidRequest for a record that was not handed out by
        this consumer, or was acknowledged before.
        """
        said = [records] if isinstance(records, ReceivedRecord) else list(records)
        with self._driver.lock:
            self._check_open()
            for record in said:
                place = record.topic, record.partition
                self._core.acknowledge(place, [Run(record.offset, record.offset)], how)
        self._driver.drive()

    def acknowledge_range(
        self, topic: str, partition: int, first_offset: int, last_offset: int, how: str = "accept"
    ) -> None:
        """As `acknowledge`, of all records of a partition from an offset to another, the last included."""
        with self._driver.lock:
            self._check_open()
            self._core.acknowledge((topic, partition), [Run(first_offset, last_offset)], how)
        self._driver.drive()

    async def commit(self) -> Results:
        """Say now what is to be said, and wait until it is kept or refused. With implicit acknowledgement all that was
        handed out is accepted.

        By topic and partition: None where all is kept, else why nothing of it is: as when a lock had run out, and the
        records are delivered again. Renewals since the last commit, which leave at once, are told with it.
        """
        results = await self._settle(self._core.commit, "the acknowledgements to be kept")
        await self._driver.tell(self._core)
        return results

    def commit_async(self) -> None:
        """As `commit`, without waiting: `on_acknowledged` hears what becomes of it, or the log what is refused."""
        with self._driver.lock:
            self._check_open()
            self._core.commit(None)
        self._driver.drive()

    async def close(self) -> None:
        """Say what is still to be said, give back what is not acknowledged, leave the group, and let the connections
        go. With implicit acknowledgement what was handed out is accepted; not at the end of a `with` block that raises.
        """
        await self._close(handed_out=True)

    def at_exit(self, since: float) -> Iterator[None]:
        """The program ends, and nobody has closed it."""
        exits.closed(self)
        if not self._closed:
            yield from end_with_program(self._core, self._driver, None, self._leave_at_exit, since)

    def _leave_at_exit(self, cores: list[ShareCore], on_done: Callable[[HeadraceError | None], None]) -> None:
        with self._driver.lock:
            self._closed = True
            for core in cores:
                core.close(handed_out=False, on_done=lambda _: on_done(None))

    async def _close(self, *, handed_out: bool) -> None:
        exits.closed(self)
        if self._closed:
            return

        def leave(done: Committed) -> None:
            self._closed = True
            self._driver.wake()
            self._core.close(handed_out=handed_out, on_done=done)

        try:
            await self._settle(leave, "the acknowledgements to be kept and the group to be left")
            await self._driver.tell(self._core, closing=True)
        finally:
            with self._driver.lock:
                self._core.drop()
            self._pool.release()

    # Waiting

    async def _next_rows(
        self, columns: tuple[str, ...], batch_rows: int, timeout_ms: int | None
    ) -> pa.RecordBatch | None:
        found: list[pa.RecordBatch] = []

        def take() -> bool:
            rows = self._collector.take_rows(columns, batch_rows)
            if rows is not None:
                found.append(rows)
            return bool(found)

        return found[0] if await self._wait_to(take, self._options.max_poll_records, timeout_ms) else None

    async def _settle(self, begin: Callable[[Committed], None], what: str) -> Results:
        """Begin it, and wait until it is done."""
        heard: list[Results] = []

        def done(results: Results) -> None:
            heard.append(results)
            self._driver.changed()

        with self._driver.lock:
            self._check_open()
            begin(done)
        timeout_ms = self._options.timeout_ms
        if not await self._driver.wait(lambda: bool(heard), self._driver.now() + timeout_ms / 1000):
            timed_out = RequestTimedOut(f"waited {timeout_ms} ms for {what}; are the brokers reachable?")
            raise self._pool.first_contact.error() or timed_out
        return heard[0]

    async def _wait_to(self, take: Callable[[], bool], most: int, timeout_ms: int | None) -> bool:
        """One call: True if something was taken, False if nothing came in time. Raises what keeps it from coming."""
        driver, core = self._driver, self._core
        await driver.cede()
        await driver.tell(core)
        with driver.lock:
            self._check_open()
            core.begin()
            taken = take()
            if not taken:
                core.want(most)
        try:
            return taken or await self._wait_for(take, timeout_ms)
        finally:
            with driver.lock:
                core.end()
            driver.drive()

    async def _wait_for(self, take: Callable[[], bool], timeout_ms: int | None) -> bool:
        driver, core = self._driver, self._core
        deadline = None if timeout_ms is None else driver.now() + timeout_ms / 1000
        if timeout_ms is not None and timeout_ms <= 0:
            await driver.turn()
        while True:
            came = await driver.wait(lambda: core.ready or self._closed, deadline)
            await driver.tell(core)
            with driver.lock:
                self._check_open()
                if take():
                    return True
                core.raise_failure()
            if deadline is not None and (not came or driver.now() >= deadline):
                return False
            # What was ready may be gone: whatever brings more has its turn.
            await driver.turn()

    def _most(self, max_records: int | None) -> int:
        most = self._options.max_poll_records if max_records is None else max_records
        if most < 1:
            raise InvalidRequest(f"max_records is {most}; ask for 1 or more")
        return most

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("this share consumer is closed; make a new one")
