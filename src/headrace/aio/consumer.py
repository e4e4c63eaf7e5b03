"""The consumer for asyncio: the same heart as the one for threads, driven by the running loop.

    async with Consumer("orders", group="billing") as consumer:
        async for record in consumer:
            print(record.offset, record.value)

Make it where its loop runs, and use it from one task at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

from headrace.aio.reactor import AsyncioReactor
from headrace.client.admin.offsets import EARLIEST, LATEST
from headrace.client.connection import exits
from headrace.client.connection.connections import shared
from headrace.client.connection.errors import EngineClosed
from headrace.client.consumer.consumer import BATCH_ROWS, CHUNK_RECORDS, COLUMNS, TURN_S, check_most
from headrace.client.consumer.core import ConsumerCore
from headrace.client.consumer.group_protocol import Place
from headrace.client.consumer.offset_lookup import OffsetLookup
from headrace.client.consumer.options import ConsumerOptions, config_of
from headrace.client.consumer.redelivery import DELAYS_MS
from headrace.errors import HeadraceError, InvalidRequest, RequestTimedOut
from headrace.records.consumer_records import ReceivedRecord

if TYPE_CHECKING:
    import pyarrow as pa

    from headrace.aio.listener import Listener, Listening


log = logging.getLogger(__name__)


class Consumer:
    """As `headrace.Consumer`, with `await`."""

    def __init__(self, topics: str | Iterable[str] | None = None, **options: Unpack[ConsumerOptions]) -> None:
        self._options = config_of(topics, options)
        self._closed = False
        self._listening: Listening | None = None
        self._yielded_at = 0.0
        self._waiting: set[asyncio.Future[None]] = set()
        self._reactor = AsyncioReactor.of_running_loop()
        self._network = shared(
            self._options.bootstrap,
            client_id=self._options.client_id,
            tls=self._options.tls,
            reactor=self._reactor,
        )
        try:
            self._core = ConsumerCore(self._network, self._options, self._wake)
            self._core.start()
        except BaseException:
            self._network.release()
            raise
        self._collector = self._core.collector
        if self._options.group:
            exits.opened(self)

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
        except HeadraceError as failure:
            log.warning("after %s the consumer could not be closed as it should: %s", kind.__name__, failure)

    def __aiter__(self) -> AsyncIterator[ReceivedRecord]:
        return self.records()

    async def poll(self, timeout_ms: int = 1000, max_records: int = CHUNK_RECORDS) -> list[ReceivedRecord]:
        """Records that are there, up to `max_records` and some 2 MiB, else the first that come within the timeout, else
        none."""
        check_most(max_records)
        found: list[ReceivedRecord] = []

        def take() -> bool:
            self._collector.take(found, max_records)
            return bool(found)

        await self._wait_to(take, timeout_ms)
        return found

    async def records(self, timeout_ms: int | None = None) -> AsyncIterator[ReceivedRecord]:
        """Record after record; ends when none came for `timeout_ms`, else never."""
        while await self._wait_to(lambda: self._collector.take_chunk(CHUNK_RECORDS), timeout_ms):
            for record in self._collector.unread:
                yield record

    async def batches(
        self,
        columns: Iterable[str] = COLUMNS,
        *,
        batch_rows: int = BATCH_ROWS,
        timeout_ms: int | None = None,
    ) -> AsyncIterator[pa.RecordBatch]:
        """Arrow batches of at most `batch_rows` rows of one partition each; ends when none came for `timeout_ms`."""
        wanted = tuple(columns)
        self._collector.forget_decoders()
        found: list[pa.RecordBatch] = []

        def take() -> bool:
            rows = self._collector.take_rows(wanted, batch_rows)
            if rows is not None:
                found.append(rows)
            return bool(found)

        while await self._wait_to(take, timeout_ms):
            yield found.pop()

    def listen(
        self,
        listener: Listener,
        *,
        tasks: int = 8,
        ordered: bool = False,
        max_tries: int | None = None,
        delays_ms: Sequence[int] = DELAYS_MS,
        pause_ms: int = 1000,
    ) -> Listening:
        """Call a coroutine function for every record, from several tasks; otherwise as `headrace.Consumer.listen`."""
        from headrace.aio.listener import Listening

        self._check_open()
        self._listening = Listening(
            self._core,
            self.close,
            listener,
            tasks=tasks,
            ordered=ordered,
            max_tries=max_tries,
            delays_ms=delays_ms,
            pause_ms=pause_ms,
        )
        return self._listening

    # Positions

    @property
    def assignment(self) -> list[Place]:
        """Topic and partition of all that is read now."""
        return self._core.assignment

    async def position(self, topic: str, partition: int) -> int:
        """The offset of the next record that will be handed out."""
        place = await self._assigned(topic, partition)
        await self._wait_until(lambda: self._core.is_placed([place]), f"the first offset of {topic}-{partition}")
        return self._core.position(place)

    async def seek(self, topic: str, partition: int, offset: int) -> None:
        """Go on at an offset."""
        self._core.seek(await self._assigned(topic, partition), offset)

    async def seek_to_time(self, timestamp_ms: int, places: Iterable[Place] | None = None) -> None:
        """Go on at the first record that is not before a time; at the end, as it is now, where there is none."""
        await self._seek_moment(timestamp_ms, places)

    async def seek_to_start(self, places: Iterable[Place] | None = None) -> None:
        """Go on at the first record of these partitions, or of all."""
        await self._seek_moment(EARLIEST, places)

    async def seek_to_end(self, places: Iterable[Place] | None = None) -> None:
        """Go on at the end of these partitions, or of all, as it is now."""
        await self._seek_moment(LATEST, places)

    async def pause(self, places: Iterable[Place] | None = None) -> None:
        """Hand out nothing of these partitions, or of all, until `resume`; they stay assigned."""
        self._core.pause(await self._chosen(places))

    async def resume(self, places: Iterable[Place] | None = None) -> None:
        """Hand out records of these partitions, or of all, again."""
        self._core.resume(await self._chosen(places))

    async def lag(self) -> dict[Place, int]:
        """How many offsets there are between what was handed out and the end of each partition now."""
        ends: dict[Place, int | HeadraceError] = {}
        wanted = await self._chosen(None)

        def found(place: Place, end: int | HeadraceError) -> None:
            ends[place] = end
            self._wake()

        lookup = OffsetLookup(self._network, dict.fromkeys(wanted, LATEST), found, found)
        try:
            await self._wait_until(lambda: len(ends) == len(wanted), "the ends of the partitions")
        finally:
            lookup.cancel()
        lags: dict[Place, int] = {}
        for place in wanted:
            end = ends[place]
            if isinstance(end, HeadraceError):
                raise end
            lags[place] = max(0, end - await self.position(*place))
        return lags

    # Progress

    async def commit(self, offsets: Mapping[Place, int] | None = None) -> None:
        """Save what was handed out, or the offsets given (of the next records to read); returns when it is safe."""
        self._check_open()
        wanted = self._core.handed_out() if offsets is None else dict(offsets)
        await self._settled(lambda done: self._core.save(wanted, done), "the progress to be saved")

    async def close(self) -> None:
        """Save what was handed out, leave the group, and let the connections go."""
        await self._close(handed_out=True)

    def at_exit(self, since: float) -> Iterator[None]:
        log.warning(
            "a consumer of group %s was not closed, and its loop has ended: others get its partitions when its session "
            "is over, and what it did since it last saved progress comes again; `await consumer.close()`",
            self._options.group,
        )
        yield from ()

    async def _close(self, *, handed_out: bool) -> None:
        exits.closed(self)
        if self._closed:
            return
        if self._listening is not None:
            await self._listening.halt()
        self._closed = True
        self._wake()
        try:
            await self._settled(
                lambda done: self._core.close(handed_out=handed_out, on_done=done),
                "the progress to be saved and the group to be left",
            )
        finally:
            self._core.drop()
            self._network.release()

    # Waiting

    async def _settled(self, begin: Callable[[Callable[[HeadraceError | None], None]], None], what: str) -> None:
        results: list[HeadraceError | None] = []

        def done(error: HeadraceError | None) -> None:
            results.append(error)
            self._wake()

        begin(done)
        await self._wait_until(lambda: bool(results), what)
        if results[0] is not None:
            raise results[0]

    async def _wait_to(self, take: Callable[[], bool], timeout_ms: int | None) -> bool:
        """One call: True if something was taken, False if nothing came in time. Raises what keeps it from coming."""
        self._check_open()
        core, reactor = self._core, self._reactor
        core.begin()
        try:
            if reactor.now() - self._yielded_at >= TURN_S:
                # Others on the loop, the fetches among them, have their turn even while there is always something here.
                # Between taking and returning nothing is awaited: a task cancelled there would lose what was taken.
                await asyncio.sleep(0)
                self._yielded_at = reactor.now()
                self._check_open()
            if take():
                return True
            deadline = None if timeout_ms is None else reactor.now() + timeout_ms / 1000
            if timeout_ms is not None and timeout_ms <= 0:
                await asyncio.sleep(0)
            while True:
                came = await self._woken(lambda: core.ready or self._closed, deadline)
                self._yielded_at = reactor.now()
                self._check_open()
                if take():
                    return True
                core.raise_failure()
                if not came or (deadline is not None and self._yielded_at >= deadline):
                    return False
                # What was ready may be gone: whatever brings more has its turn.
                await asyncio.sleep(0)
        finally:
            core.end()

    async def _wait_until(self, done: Callable[[], bool], what: str) -> None:
        timeout_ms = self._options.timeout_ms
        if not await self._woken(done, self._reactor.now() + timeout_ms / 1000):
            raise RequestTimedOut(f"waited {timeout_ms} ms for {what}; are the brokers reachable?")

    async def _woken(self, done: Callable[[], bool], deadline: float | None) -> bool:
        try:
            async with asyncio.timeout_at(deadline):
                while not done():
                    woken = asyncio.get_running_loop().create_future()
                    self._waiting.add(woken)
                    try:
                        await woken
                    finally:
                        self._waiting.discard(woken)
            return True
        except TimeoutError:
            return done()

    def _wake(self) -> None:
        if self._listening is not None:
            self._listening.ring()
        for woken in self._waiting:
            if not woken.done():
                woken.set_result(None)

    async def _assigned(self, topic: str, partition: int) -> Place:
        """A place that is assigned, or will be within the timeout."""
        place = topic, partition
        self._check_open()
        if place not in self._core.assigned:
            await self._wait_until(
                lambda: place in self._core.assigned or self._core.error is not None,
                f"{topic}-{partition} to be assigned to this consumer",
            )
            self._core.raise_error()
        return place

    async def _chosen(self, places: Iterable[Place] | None) -> list[Place]:
        if places is not None:
            return [await self._assigned(*place) for place in places]
        self._check_open()
        await self._wait_until(lambda: bool(self._core.assigned) or self._core.error is not None, "an assignment")
        self._core.raise_error()
        return self._core.assignment

    async def _seek_moment(self, moment: int, places: Iterable[Place] | None) -> None:
        wanted = await self._chosen(places)
        self._core.seek_moment(wanted, moment)
        await self._wait_until(lambda: self._core.is_placed(wanted), "the offsets of that moment")

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("this consumer is closed; make a new one")
        if self._listening is not None:
            raise InvalidRequest("this consumer's records go to its listener; make another one to poll")
