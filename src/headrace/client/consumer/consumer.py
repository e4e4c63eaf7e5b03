"""The consumer for threads: `poll`, `records`, `batches`, with the next fetches always under way.

    with Consumer("orders", group="billing") as consumer:
        for record in consumer.records():
            print(record.offset, record.value)

Use one consumer from one thread at a time; only `close` may come from another. Groups are kept up in the background
while the caller works.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, Unpack

from headrace.client.connection import exits
from headrace.client.consumer.core import ConsumerCore
from headrace.client.consumer.group_protocol import TopicPartition
from headrace.client.consumer.offset_lookup import OffsetLookup
from headrace.client.consumer.options import ConsumerConfig, ConsumerOptions, Topics, config_of
from headrace.client.consumer.progress import Offsets, Saved
from headrace.client.consumer.retries import DELAYS_MS
from headrace.client.consumer.threads import Listener, connect, end_with_program
from headrace.client.errors import EngineClosed
from headrace.client.fetch_requests import EARLIEST, LATEST
from headrace.client.keywords import takes_options
from headrace.client.producer.transaction_requests import GroupMember
from headrace.errors import HeadraceError, InvalidRequest, RequestTimedOut
from headrace.records.consumer_records import ReceivedRecord

if TYPE_CHECKING:
    import pyarrow as pa

    from headrace.client.consumer.listener import Listening

log = logging.getLogger(__name__)

CHUNK_RECORDS: Final = 500
BATCH_ROWS: Final = 10_000
COLUMNS: Final = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType")


@takes_options(ConsumerConfig)
class Consumer:
    """Reads topics, alone or as a member of a group.

    Errors that pass are waited out: a broker that is restarted, a leader that moves, a topic that grows. What a call
    raises needs somebody to do something, and says what. A partition that cannot be read on (a damaged batch, a decoder
    that fails) does not hold up the others: the error is raised when there is nothing else to give, until a `seek`.
    """

    def __init__(self, topics: Topics = None, **options: Unpack[ConsumerOptions]) -> None:
        self._options = config_of(topics, options)
        self._closed = False
        self._listening: Listening | None = None
        self._pool, self._driver = connect(self._options)
        try:
            with self._driver.lock:
                self._core = ConsumerCore(self._pool, self._options, self._driver.changed)
                self._core.start()
        except BaseException:
            self._pool.release()
            raise
        self._collector = self._core.collector
        if self._options.group:
            exits.consumer_opened(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        try:
            self._close(handed_out=False)
        except Exception as failure:
            log.warning(
                "after %s the consumer could not be closed as it should: %s", kind.__name__, failure,
                exc_info=not isinstance(failure, HeadraceError),
            )  # fmt: skip

    def __iter__(self) -> Iterator[ReceivedRecord]:
        return self.records()

    def poll(self, timeout_ms: int = 1000, max_records: int = CHUNK_RECORDS) -> list[ReceivedRecord]:
        """Records that are there, up to `max_records` and some 2 MiB, else the first that come within the timeout, else
        none."""
        check_most(max_records)
        found: list[ReceivedRecord] = []

        def take() -> bool:
            self._collector.take(found, max_records)
            return bool(found)

        self._wait_to(take, timeout_ms)
        return found

    def records(self, timeout_ms: int | None = None) -> Iterator[ReceivedRecord]:
        """Record after record; ends when none came for `timeout_ms`, else never."""
        while self._wait_to(lambda: self._collector.take_chunk(CHUNK_RECORDS), timeout_ms):
            yield from self._collector.unread

    def batches(
        self,
        columns: Iterable[str] = COLUMNS,
        *,
        batch_rows: int = BATCH_ROWS,
        timeout_ms: int | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Arrow batches of at most `batch_rows` rows of one partition each; ends when none came for `timeout_ms`.

        Columns are those of `headrace.records.arrow.TYPES`. Values are not decoded and priorities not heeded: what was
        handed out ahead of others by its priority comes again in its place.
        """
        wanted = tuple(columns)
        with self._driver.lock:
            self._collector.forget_decoders()
        while (rows := self._next_rows(wanted, batch_rows, timeout_ms)) is not None:
            yield rows

    def listen(
        self,
        listener: Listener,
        *,
        threads: int = 8,
        ordered: bool = False,
        max_tries: int | None = None,
        delays_ms: Sequence[int] = DELAYS_MS,
        pause_ms: int = 1000,
    ) -> Listening:
        """Call a function for every record, from several threads, until the `Listening` or the consumer is closed.

        Concurrent: in any order. A record whose listener raises, or returns LATER, goes to the topic `<group>.retry`
        and is tried again after growing delays, `max_tries` times (16), then to `<group>.dead`.
        `ordered`: of each partition one at a time; one that fails is tried again in place, every `pause_ms`, until it
        is done, or `max_tries` times and then goes to `<group>.dead`.
        In broadcast mode, and without a group, a failure is only logged.
        """
        from headrace.client.consumer.listener import Listening

        with self._driver.lock:
            self._check_open()
        self._listening = Listening(
            self._driver,
            self._core,
            self.close,
            listener,
            threads=threads,
            ordered=ordered,
            max_tries=max_tries,
            delays_ms=delays_ms,
            pause_ms=pause_ms,
        )
        return self._listening

    # Positions

    @property
    def assignment(self) -> list[TopicPartition]:
        """Topic and partition of all that is read now."""
        with self._driver.lock:
            return self._core.assignment

    def position(self, topic: str, partition: int) -> int:
        """The offset of the next record that will be handed out."""
        place = self._assigned(topic, partition)
        self._wait_until(lambda: self._core.is_placed([place]), f"the first offset of {topic}-{partition}")
        with self._driver.lock:
            return self._core.position(place)

    def seek(self, topic: str, partition: int, offset: int) -> None:
        """Go on at an offset."""
        place = self._assigned(topic, partition)
        with self._driver.lock:
            self._core.seek(place, offset)
        self._driver.drive()

    def seek_to_time(self, timestamp_ms: int, places: Iterable[TopicPartition] | None = None) -> None:
        """Go on at the first record that is not before a time; at the end, as it is now, where there is none."""
        self._seek_moment(timestamp_ms, places)

    def seek_to_start(self, places: Iterable[TopicPartition] | None = None) -> None:
        """Go on at the first record of these partitions, or of all."""
        self._seek_moment(EARLIEST, places)

    def seek_to_end(self, places: Iterable[TopicPartition] | None = None) -> None:
        """Go on at the end of these partitions, or of all, as it is now."""
        self._seek_moment(LATEST, places)

    def pause(self, places: Iterable[TopicPartition] | None = None) -> None:
        """Hand out nothing of these partitions, or of all, until `resume`; they stay assigned."""
        wanted = self._chosen(places)
        with self._driver.lock:
            self._core.pause(wanted)

    def resume(self, places: Iterable[TopicPartition] | None = None) -> None:
        """Hand out records of these partitions, or of all, again."""
        wanted = self._chosen(places)
        with self._driver.lock:
            self._core.resume(wanted)
        self._driver.drive()

    def lag(self) -> dict[TopicPartition, int]:
        """How many offsets there are between what was handed out and the end of each partition now.

        With isolation `committed` that is the first record of an undecided transaction. Markers count as offsets.
        """
        ends: dict[TopicPartition, int | HeadraceError] = {}
        wanted = self._chosen(None)

        def found(place: TopicPartition, end: int | HeadraceError) -> None:
            ends[place] = end
            self._driver.changed()

        with self._driver.lock:
            lookup = OffsetLookup(
                self._pool,
                dict.fromkeys(wanted, LATEST),
                found,
                found,
                isolation=self._options.limits.isolation,
            )
        try:
            self._wait_until(lambda: len(ends) == len(wanted), "the ends of the partitions")
        finally:
            with self._driver.lock:
                lookup.cancel()
        lags: dict[TopicPartition, int] = {}
        for place in wanted:
            end = ends[place]
            if isinstance(end, HeadraceError):
                raise end
            lags[place] = max(0, end - self.position(*place))
        return lags

    # Progress

    def commit(self, offsets: Mapping[TopicPartition, int] | None = None) -> None:
        """Save what was handed out, or the offsets given (of the next records to read); returns when it is safe.

        What is committed here is not taken back by the interval: until a `seek` it saves nothing less. Raises NotHeld
        where a partition has gone to another member, also one whose records were handed out before that: they come
        again there.
        """

        def save(done: Saved) -> None:
            self._check_open()
            self._core.commit(None if offsets is None else dict(offsets), done)

        self._settle(save, "the progress to be saved")

    def transactional_progress(self) -> tuple[Offsets, GroupMember]:
        """What was handed out and is not saved, and this member of the group: what `Transaction.send_offsets` sends.

        Raises NotHeld where partitions have gone to others with what was handed out of them.
        """
        with self._driver.lock:
            self._check_open()
            return self._core.transactional_progress()

    def saved_elsewhere(self, offsets: Mapping[TopicPartition, int]) -> None:
        """A transaction that is committed has saved these offsets."""
        with self._driver.lock:
            self._core.saved_elsewhere(offsets)

    def close(self) -> None:
        """Save what was handed out, leave the group, and let the connections go."""
        self._close(handed_out=True)

    def at_exit(self, since: float) -> Iterator[None]:
        """The program ends, and nobody has closed it."""
        exits.closed(self)
        if not self._closed:
            leave = partial(self._begin_to_leave, handed_out=False)
            yield from end_with_program(self._core, self._driver, self._listening, leave, since)

    def _close(self, *, handed_out: bool) -> None:
        exits.closed(self)
        if self._closed:
            return
        if self._listening is not None:
            self._listening.halt()
        with self._driver.lock:
            self._core.begin_to_close(handed_out=handed_out)
        try:
            self._driver.tell(self._core, closing=True)
        finally:
            self._leave(handed_out=handed_out)

    def _leave(self, *, handed_out: bool) -> None:
        try:
            self._settle(
                lambda done: self._begin_to_leave([self._core], done, handed_out=handed_out),
                "the progress to be saved and the group to be left",
            )
        finally:
            with self._driver.lock:
                self._core.drop()
            self._pool.release()

    def _begin_to_leave(self, cores: Iterable[ConsumerCore], on_done: Saved, *, handed_out: bool) -> None:
        with self._driver.lock:
            self._closed = True
            # Whoever waits for records hears of it.
            self._driver.wake()
            for core in cores:
                core.close(handed_out=handed_out, on_done=on_done)

    # Waiting

    def _next_rows(self, columns: tuple[str, ...], batch_rows: int, timeout_ms: int | None) -> pa.RecordBatch | None:
        found: list[pa.RecordBatch] = []

        def take() -> bool:
            rows = self._collector.take_rows(columns, batch_rows)
            if rows is not None:
                found.append(rows)
            return bool(found)

        return found[0] if self._wait_to(take, timeout_ms) else None

    def _settle(self, begin: Callable[[Saved], None], what: str) -> None:
        """Begin it, and wait until it is done; raises what it ended with."""
        results: list[HeadraceError | None] = []

        def done(error: HeadraceError | None) -> None:
            results.append(error)
            self._driver.changed()

        with self._driver.lock:
            begin(done)
        self._wait_until(lambda: bool(results), what)
        if results[0] is not None:
            raise results[0]

    def _wait_to(self, take: Callable[[], bool], timeout_ms: int | None) -> bool:
        """One call: True if something was taken, False if nothing came in time. Raises what keeps it from coming."""
        driver, core = self._driver, self._core
        driver.cede()
        with driver.lock:
            self._check_open()
            core.begin()
            taken = not core.must_tell and take()
            if taken:
                core.end()
        if taken:
            driver.drive()
            return True
        try:
            return self._wait_for(take, timeout_ms)
        finally:
            with driver.lock:
                core.end()

    def _wait_for(self, take: Callable[[], bool], timeout_ms: int | None) -> bool:
        driver, core = self._driver, self._core
        deadline = None if timeout_ms is None else driver.now() + timeout_ms / 1000
        if timeout_ms is not None and timeout_ms <= 0:
            driver.turn()
        while True:
            came = driver.wait(lambda: core.ready or self._closed, deadline)
            with driver.lock:
                self._check_open()
                tells = core.must_tell
                if not tells:
                    if take():
                        return True
                    core.raise_failure()
                else:
                    core.end()
            if tells:
                driver.tell(core)
                with driver.lock:
                    core.begin()
                continue
            if deadline is not None and (not came or driver.now() >= deadline):
                return False
            # What was ready may be gone: whatever brings more has its turn.
            driver.turn()

    def _wait_until(self, done: Callable[[], bool], what: str) -> None:
        timeout_ms = self._options.timeout_ms
        if not self._driver.wait(done, self._driver.now() + timeout_ms / 1000):
            timed_out = RequestTimedOut(f"waited {timeout_ms} ms for {what}; are the brokers reachable?")
            raise self._pool.first_contact.error() or timed_out

    def _assigned(self, topic: str, partition: int) -> TopicPartition:
        """A place that is assigned, or will be within the timeout."""
        place = topic, partition
        with self._driver.lock:
            self._check_open()
            here = place in self._core.assigned
        if not here:
            ready = lambda: place in self._core.assigned or self._core.error is not None  # noqa: E731
            self._wait_until(ready, f"{topic}-{partition} to be assigned to this consumer")
            with self._driver.lock:
                self._core.raise_error()
        return place

    def _chosen(self, places: Iterable[TopicPartition] | None) -> list[TopicPartition]:
        if places is not None:
            return [self._assigned(*place) for place in places]
        with self._driver.lock:
            self._check_open()
        self._wait_until(lambda: bool(self._core.assigned) or self._core.error is not None, "an assignment")
        with self._driver.lock:
            self._core.raise_error()
            return self._core.assignment

    def _seek_moment(self, moment: int, places: Iterable[TopicPartition] | None) -> None:
        wanted = self._chosen(places)
        with self._driver.lock:
            self._core.seek_moment(wanted, moment)
        self._wait_until(lambda: self._core.is_placed(wanted), "the offsets of that moment")

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("this consumer is closed; make a new one")
        if self._listening is not None:
            raise InvalidRequest("this consumer's records go to its listener; make another one to poll")


def check_most(max_records: int) -> None:
    if max_records < 1:
        raise InvalidRequest(f"max_records is {max_records}; ask for 1 or more")
