"""Push on threads: a function is called for every record, by several threads, and progress follows what is done.

One thread feeds: it reads ahead and takes part in the group. The others call the listener. A second consumer of the
same group reads the retry topic, where there is one, with a thread of its own; what is due there is done by the same
threads. A record is done when its listener has returned, or when the retry or dead-letter topic has acknowledged it.

When the group rebalances, nothing new is begun, what is running is finished (for a while at most), and then partitions
are given up with their exact progress.

Locks: the reactor's first, then the workload's (`_changed`); nobody calls a listener or the network with the latter.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Final, Self

from headrace.client.connection.thread_reactor import ThreadReactor
from headrace.client.consumer.core import ConsumerCore, ProgressTracker
from headrace.client.consumer.failure_policy import (
    LARGEST_BYTES,
    LATER,
    failure_policy,
    make_topics,
    retry_options,
)
from headrace.client.consumer.group_protocol import Place
from headrace.client.consumer.progress import Offsets
from headrace.client.consumer.redelivery import OutgoingRecord
from headrace.client.consumer.workload import Job, Share, Workload, share_of
from headrace.client.producer.producer import Producer
from headrace.errors import HeadraceError, SettingError
from headrace.records.consumer_records import ReceivedRecord

CHUNK: Final = 500
FEED_WAIT_S: Final = 1.0
JOIN_S: Final = 30.0
GRACE_S: Final = 30.0
"""How long a rebalance waits for what is being worked on, at most."""

Listener = Callable[[ReceivedRecord], object]

log = logging.getLogger(__name__)


class Source:
    """Where records come from: the reading of a consumer, asked by one feeding thread."""

    def __init__(self, reactor: ThreadReactor, core: ConsumerCore, tracker: ProgressTracker) -> None:
        self.core = core
        self.held: frozenset[Place] = frozenset()
        """Partitions of which nothing is taken now."""
        self.share = Share(1, 1)
        """What of each is taken in before it is held."""
        self.failures: dict[Place, HeadraceError] = {}
        self._reactor = reactor
        with reactor.lock:
            core.track_by(tracker)

    def take(
        self, most: int, wait_s: float, put: Callable[[list[ReceivedRecord]], None], enough: Callable[[], bool]
    ) -> None:
        """Put up to `most` records, those that are there or the first that come, unless `enough` comes first."""
        core = self.core

        def taken() -> bool:
            # In one go with putting, so that no partition can go in between.
            records: list[ReceivedRecord] = []
            core.collector.take(records, most, self.share.size_bytes)
            if records:
                put(records)
                core.end()
            return bool(records)

        with self._reactor.lock:
            core.begin()
            at_once = taken()
        if at_once:
            self._reactor.turn()
            return
        # A partition that failed is no reason to wake up: it stays so.
        self._reactor.wait(lambda: core.collector.ready or core.error is not None or enough(), monotonic() + wait_s)
        with self._reactor.lock:
            if not taken():
                core.end()
                core.raise_final_error()

    def step_aside(self) -> None:
        with self._reactor.lock:
            self.core.step_aside()
        self._reactor.turn()

    def hold(self, is_held: Callable[[Place], bool]) -> None:
        """Pause those partitions, and no others."""
        with self._reactor.lock:
            self.held = self.core.hold(is_held)
            self.failures = self.core.failures(self.failures)


class Listening:
    """Made by `Consumer.listen`. Ends with `close`, or by itself when the group refuses this consumer for good: it has
    left the group then. A partition that cannot be read on holds up no other; see `failures`.
    """

    def __init__(
        self,
        reactor: ThreadReactor,
        core: ConsumerCore,
        close: Callable[[], None],
        listener: Listener,
        *,
        threads: int,
        ordered: bool,
        max_tries: int | None,
        delays_ms: Sequence[int],
        pause_ms: int,
    ) -> None:
        if threads < 1:
            raise SettingError(f"threads is {threads}, and has to be 1 or more")
        options = core.options
        self._reactor = reactor
        self._close_consumer = close
        self._listener = listener
        self._policy = failure_policy(
            options, ordered=ordered, max_tries=max_tries, delays_ms=delays_ms, pause_ms=pause_ms
        )
        self._load = Workload(ordered=ordered)
        self._changed = threading.Condition()
        self._workers = threads
        self._stopping = False
        self._ended = threading.Event()
        self.error: Exception | None = None
        """What ended it, other than `close`."""
        self._producer: Producer | None = None
        self.retries: ConsumerCore | None = None
        """Of the retry topic."""
        rules = self._policy.rules
        if rules is not None:
            make_topics(options, rules, retry=self._policy.retries_elsewhere)
            self._producer = Producer(
                options.bootstrap, client_id=options.client_id, tls=options.tls, max_record_bytes=LARGEST_BYTES
            )
        self._sources = [Source(reactor, core, self)]
        if rules is not None and self._policy.retries_elsewhere:
            with reactor.lock:
                self.retries = ConsumerCore(core.network, retry_options(options, rules), lambda: None)
                self.retries.start()
            self._sources.append(Source(reactor, self.retries, self))
        work = [*(partial(self._feed, source) for source in self._sources), *(self._work for _ in range(threads))]
        self._threads = [threading.Thread(target=self._run, args=(part,), daemon=True) for part in work]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until it has ended; False if it still goes on. Raises what ended it."""
        ended = self._ended.wait(timeout_s)
        if self.error is not None:
            raise self.error
        return ended

    @property
    def failures(self) -> dict[Place, HeadraceError]:
        """Partitions that are assigned and cannot be read on, with the reason, which the log has too."""
        return {place: failure for source in self._sources for place, failure in source.failures.items()}

    def close(self) -> None:
        """Finish what is running, save progress, leave the group: closes the consumer. What was only read ahead comes
        again elsewhere.
        """
        self._close_consumer()

    def halt(self) -> None:
        """All but the consumer itself, which is closed next."""
        self.stop()
        self.join(monotonic() + JOIN_S)
        if self.retries is not None:
            self._leave(self.retries, JOIN_S)
        if self._producer is not None:
            self._producer.close()
        self._ended.set()

    def stop(self) -> None:
        """Begin nothing new."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._reactor.wake()

    def join(self, deadline: float) -> None:
        """After `stop`: until what is running has ended."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - monotonic()))

    # What the consumers ask, under the reactor's lock.

    def positions(self) -> Offsets:
        with self._changed:
            return self._load.positions()

    def drop(self, places: Iterable[Place]) -> None:
        with self._changed:
            self._load.drop(places)
            self._changed.notify_all()

    def when_idle(self, fn: Callable[[], None]) -> None:
        with self._changed:
            if not self._load.pending and not self._load.running:
                fn()

    # Feeding.

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            log.error("listening has ended: %s", error, exc_info=not isinstance(error, HeadraceError))
            self.error = self.error or error
            self.stop()
            for source in self._sources:
                # A member that reads nothing would keep its partitions from the others.
                if source.core.options.mode == "cluster" and source.core.options.group:
                    self._leave(source.core, JOIN_S)
            self._ended.set()

    def _leave(self, core: ConsumerCore, within_s: float) -> None:
        """Save what is done, and leave the group; again is harmless."""
        results: list[HeadraceError | None] = []
        with self._reactor.lock:
            core.close(handed_out=False, on_done=results.append)
        self._reactor.wait(lambda: bool(results), monotonic() + within_s)

    def _feed(self, source: Source) -> None:
        while not self._stopping:
            if source.core.wants_touch:
                self._step_aside(source)
            else:
                core = source.core
                source.share = share_of(
                    self._workers, len(core.assigned), core.options.buffer_bytes, retried=core is self.retries
                )
                source.hold(partial(self._is_held, source))
                self._take(source)

    def _is_held(self, source: Source, place: Place) -> bool:
        if place in source.held:
            return not self._load.has_room(place, source.share)
        return self._load.is_full(place, source.share)

    def _take(self, source: Source) -> None:
        def put(records: list[ReceivedRecord]) -> None:
            retried = source.core is self.retries
            with self._changed:
                if retried:
                    self._load.put_retries(records, monotonic())
                else:
                    self._load.put_records(records)
                self._changed.notify_all()

        def enough() -> bool:
            has_room = any(self._load.has_room(place, source.share) for place in source.held)
            return self._stopping or source.core.wants_touch or has_room

        source.take(CHUNK, FEED_WAIT_S, put, enough)

    def _step_aside(self, source: Source) -> None:
        """A rebalance waits: let what is running finish, then give up what is asked for."""
        with self._changed:
            self._load.holds += 1
            self._changed.wait_for(lambda: not self._load.running or self._stopping, GRACE_S)
        try:
            source.step_aside()
        finally:
            with self._changed:
                self._load.holds -= 1
                self._changed.notify_all()

    # Working.

    def _work(self) -> None:
        while (job := self._next()) is not None:
            self._settle(job, self._call(job) if job.outgoing is None else None)

    def _next(self) -> Job | None:
        with self._changed:
            while not self._stopping:
                job = self._load.next(monotonic())
                if job is not None:
                    return job
                next_at = self._load.next_at()
                self._changed.wait(None if next_at is None or self._load.holds else max(0.0, next_at - monotonic()))
        return None

    def _call(self, job: Job) -> str | None:
        """None if it is done, else what is wrong."""
        try:
            result = self._listener(self._policy.shown(job))
        except BaseException as error:  # noqa: BLE001 - a listener may raise anything; SystemExit ends no process here
            return f"{type(error).__name__}: {error}"
        return "the listener asked for it later" if result is LATER else None

    def _settle(self, job: Job, error: str | None) -> None:
        after = None
        if error is not None and self._load.is_current(job):
            after = self._policy.after_failure(job, error)
        if job.outgoing is not None:
            after = self._send(job, job.outgoing)
        with self._changed:
            if after is None:
                self._load.done(job)
            else:
                self._load.again(job, monotonic() + after)
            self._changed.notify_all()
        for source in self._sources:
            if job.place in source.held and self._load.has_room(job.place, source.share):
                self._reactor.wake()

    def _send(self, job: Job, outgoing: OutgoingRecord) -> float | None:
        """None once it is acknowledged; else how long to wait before it is sent again."""
        assert self._producer is not None
        try:
            self._producer.send(
                outgoing.topic, outgoing.value, key=outgoing.key, headers=outgoing.headers, partition=outgoing.partition
            )
        except HeadraceError as error:
            return self._policy.after_refusal(job, outgoing, error)
        return None
