"""The core of a consumer, on threads and on asyncio: what is read, from where, and what of it is saved.

Nothing here waits, and everything is called with the reactor's lock held. Progress saved by the clock or on a revoke is
what is done with, that on a close what was handed out. A crash or a rebalance in the middle of the work so leads to
records that are seen twice, never to records that are missed.

What the application commits counts more than what it was handed: until it seeks, nothing saves less than that by
itself. A commit that is answered is in the group's log. What was handed out of partitions that have gone since, and
was not saved, the next commit of all that was handed out says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, KeysView, Mapping
from pathlib import Path
from typing import Protocol

from headrace.client.connection.connections import ConnectionPool
from headrace.client.connection.reactor import Timer
from headrace.client.consumer.collector import Collector
from headrace.client.consumer.coordinator import passes
from headrace.client.consumer.cursor import Cursor
from headrace.client.consumer.fetcher import Fetcher, Reset
from headrace.client.consumer.group_protocol import TopicPartition
from headrace.client.consumer.manual_assignment import ManualAssignment
from headrace.client.consumer.membership import LOOK_INTERVAL_MS, Membership
from headrace.client.consumer.options import ConsumerConfig
from headrace.client.consumer.progress import LocalProgress, NotHeld, Offsets, Saved, default_folder
from headrace.client.consumer.rebalance_notices import Notice, RebalanceNotices
from headrace.client.consumer.retries import own_topics
from headrace.client.consumer.topic_pattern import TopicPattern
from headrace.client.errors import NoBroker
from headrace.client.fetch_requests import EARLIEST
from headrace.client.producer.transaction_requests import GroupMember
from headrace.errors import HeadraceError, InvalidRequest

log = logging.getLogger(__name__)


class AssignmentSource(Protocol):
    """Who says which partitions are read, and keeps the progress."""

    @property
    def rebalance_waits(self) -> bool: ...
    @property
    def going(self) -> frozenset[TopicPartition]: ...
    def subscribe(self, topics: Iterable[str]) -> None: ...
    def tell(self) -> None: ...
    def let_go(self, going: frozenset[TopicPartition]) -> None: ...
    def start(self) -> None: ...
    def on_poll(self) -> None: ...
    def on_poll_end(self) -> None: ...
    def commit(self, offsets: Mapping[TopicPartition, int], on_done: Saved) -> None: ...
    def leave(self, on_done: Saved) -> None: ...


class ProgressTracker(Protocol):
    """Whoever works on what was handed out for longer than a call, and knows what of it is done."""

    def positions(self) -> Offsets:
        """The first offset of each partition that is not done."""
        ...

    def drop(self, places: Iterable[TopicPartition]) -> None:
        """These are given up or lost."""
        ...

    def when_idle(self, fn: Callable[[], None]) -> None:
        """Call it if nothing is being worked on."""
        ...


class ConsumerCore:
    """`on_ready` is called whenever `ready`, `rebalance_waits`, the assignment or a position may have changed."""

    def __init__(self, pool: ConnectionPool, options: ConsumerConfig, on_ready: Callable[[], None]) -> None:
        self.options = options
        self.pool = pool
        self.error: HeadraceError | None = None
        self._may_pass = False
        self._on_ready = on_ready
        self._reactor = pool.reactor
        self._progress: LocalProgress | None = None
        self._notices = notices_of(options)
        # First, as this is what may be refused.
        self._source = self._make_source()
        self._pattern = self._make_pattern()
        self._subscribed: frozenset[str] | None = None
        self._late: frozenset[str] = frozenset()
        """Topics that match the pattern and were not there when it was first looked for them."""
        self._fetcher = Fetcher(
            pool,
            options.limits,
            start=options.start_moment,
            buffer_bytes=options.buffer_bytes if options.priority_header else max(1, options.buffer_bytes // 4),
            rack=options.rack,
            on_ready=on_ready,
            on_reset=self._on_reset,
        )
        self.collector = Collector(self._fetcher, options)
        self._counts: dict[str, int] = {}
        self._unsaved: Offsets = {}
        """Of partitions that have gone: how far they were handed out, where that was not saved and nobody has heard."""
        self._all_done = self._closing = False
        self._tracker: ProgressTracker | None = None
        self._timer: Timer | None = None
        self._contact_timer: Timer | None = None

    def _make_source(self) -> AssignmentSource:
        options, pool = self.options, self.pool
        if options.group and options.mode == "cluster":
            return Membership(
                pool,
                options.group,
                options.names,
                options.assignor,
                session_timeout_ms=options.session_timeout_ms,
                rebalance_timeout_ms=options.rebalance_timeout_ms,
                instance_id=options.instance_id,
                rack=options.rack,
                look_interval_ms=min(LOOK_INTERVAL_MS, options.metadata_max_age_ms),
                on_assigned=self._on_assigned,
                on_revoked=self._on_revoked,
                on_lost=self._on_lost,
                on_unsaved=self._on_unsaved,
                on_rebalance_waits=self._on_ready,
                on_error=self._on_error,
                tells_first=options.on_revoked is not None,
            )
        if options.group:
            from headrace.system.disk import SystemDisk

            folder = default_folder() if options.progress_dir is None else Path(options.progress_dir)
            self._progress = LocalProgress(pool.reactor, SystemDisk(), folder, options.group, options.client_id)
        return ManualAssignment(
            pool,
            options.names,
            options.partitions,
            self._progress,
            on_assigned=self._on_assigned,
            on_revoked=self._on_vanished,
            on_missing=self._on_missing,
        )

    def _make_pattern(self) -> TopicPattern | None:
        options = self.options
        if options.pattern is None:
            return None
        return TopicPattern(
            self.pool,
            options.pattern,
            max_age_ms=options.metadata_max_age_ms,
            left_out=own_topics(options.group),
            on_topics=self._on_topics,
            on_error=self._on_error,
        )

    def start(self) -> None:
        if self._pattern is None:
            self._source.start()
        else:
            self._pattern.start()
        self._save_later()
        self._await_first_contact()

    @property
    def ready(self) -> bool:
        """Whether a call would give something now, or raise, or tell."""
        return self.collector.ready or self.error is not None or self._fetcher.failure() is not None or self.must_tell

    @property
    def must_tell(self) -> bool:
        """Whether the application is to be called back before anything is handed out."""
        notices = self._notices
        return notices is not None and (notices.waiting or bool(self._source.going))

    def next_notice(self, *, closing: bool = False) -> Notice | None:
        """What to call back with; `told` has to follow."""
        if self._notices is None:
            return None
        # Who closes gives up everything anyway.
        notice = self._notices.next(frozenset() if closing else self._source.going, closing=closing)
        if notice is not None and notice.going:
            self._source.tell()
        return notice

    def told(self, notice: Notice) -> None:
        """The callback has returned, or failed: either way what was told holds."""
        if self._notices is not None:
            self._notices.done()
        if notice.going:
            self._source.let_go(notice.going)

    def begin_to_close(self, *, handed_out: bool) -> None:
        """What callbacks commit from now on without saying what is what `close` would save."""
        self._closing, self._all_done = True, handed_out

    def begin(self) -> None:
        """A call begins: what earlier ones gave is done with."""
        self.collector.finish_last()
        if self._tracker is None:
            self._source.on_poll()
        else:
            self._tracker.when_idle(self._source.on_poll)

    def end(self) -> None:
        """The call is over, and the caller works on what it gave."""
        self._source.on_poll_end()

    def track_by(self, tracker: ProgressTracker) -> None:
        """From now on what is done with is what the tracker says. It gets values as they are on the wire: those that
        `records` has decoded and not given out are read again.
        """
        for place in self.collector.first_unread():
            self._fetcher.read_again(place, self.position(place))
            self.collector.drop([place])
        self._tracker = tracker
        self.collector.leave_values()

    @property
    def rebalance_waits(self) -> bool:
        """Whether a rebalance waits for the caller to be done with what it has."""
        return self._source.rebalance_waits

    def hold(self, is_held: Callable[[TopicPartition], bool]) -> frozenset[TopicPartition]:
        """Pause those partitions, and no others; which they are."""
        cursors = self._fetcher.cursors
        held = frozenset(place for place in cursors if is_held(place))
        self.pause([place for place in held if not cursors[place].paused])
        self.resume([place for place, cursor in cursors.items() if cursor.paused and place not in held])
        return held

    def step_aside(self) -> None:
        """Let the rebalance have its way, whatever the tracker works on."""
        self._source.on_poll()
        self._source.on_poll_end()

    def raise_failure(self) -> None:
        """What keeps records from coming, if anything does: for a call that has none to give."""
        self.raise_error()
        failure = self._fetcher.failure()
        if failure is not None:
            raise failure

    def raise_error(self) -> None:
        """What keeps partitions from being assigned."""
        error = self.error
        if self._may_pass:
            self.error, self._may_pass = None, False
        if error is not None:
            raise error

    def raise_final_error(self) -> None:
        """What keeps partitions from being assigned for ever; what may pass is only logged."""
        may_pass = self._may_pass
        try:
            self.raise_error()
        except HeadraceError as error:
            if not may_pass:
                raise
            log.warning("listening goes on and waits: %s", error)

    def failures(self, logged: Mapping[TopicPartition, HeadraceError]) -> dict[TopicPartition, HeadraceError]:
        """The partitions that cannot be read on, and why; those that were not `logged` yet are now."""
        cursors = self._fetcher.cursors.items()
        failing = {place: cursor.failure for place, cursor in cursors if cursor.failure is not None}
        for place, failure in failing.items():
            if logged.get(place) is not failure:
                log.error("%s-%d is read no further, others are: %s", *place, failure)
        return failing

    # What is read

    @property
    def assigned(self) -> KeysView[TopicPartition]:
        return self._fetcher.cursors.keys()

    @property
    def assignment(self) -> list[TopicPartition]:
        return sorted(self._fetcher.cursors)

    def cursor(self, place: TopicPartition) -> Cursor:
        cursor = self._fetcher.cursors.get(place)
        if cursor is None:
            raise InvalidRequest(f"{place[0]}-{place[1]} is not assigned to this consumer now")
        return cursor

    def position(self, place: TopicPartition) -> int:
        """The next record to be handed out; -1 while it is being found."""
        return self._position(self.cursor(place), self.collector.first_unread())

    def is_placed(self, places: Iterable[TopicPartition]) -> bool:
        """Whether the positions of these are known; of those that were revoked meanwhile nobody waits for one."""
        cursors = [cursor for place in places if (cursor := self._fetcher.cursors.get(place)) is not None]
        return all(cursor.position >= 0 or cursor.failure is not None for cursor in cursors)

    def _position(self, cursor: Cursor, first_unread: Offsets) -> int:
        return min(cursor.position, first_unread.get(cursor.place, cursor.position))

    def seek(self, place: TopicPartition, offset: int) -> None:
        check_offset(place, offset)
        self.cursor(place)
        self._fetcher.seek(place, offset)
        self.collector.drop([place])

    def seek_moment(self, places: Iterable[TopicPartition], moment: int) -> None:
        wanted = list(places)
        for place in wanted:
            self.cursor(place)
        self._fetcher.seek_moments(dict.fromkeys(wanted, moment))
        self.collector.drop(wanted)

    def pause(self, places: Iterable[TopicPartition]) -> None:
        wanted = list(places)
        for place in wanted:
            self.cursor(place)
        self._fetcher.pause(wanted)
        self.collector.pause()
        self._fetcher.make_room()

    def resume(self, places: Iterable[TopicPartition]) -> None:
        wanted = list(places)
        for place in wanted:
            self.cursor(place)
        self._fetcher.resume(wanted)
        self.collector.resume()

    # Progress

    def handed_out(self) -> Offsets:
        """The position of every partition that anything was handed out of and not saved."""
        if self._tracker is not None:
            return self.done_with()
        first = self.collector.first_unread()
        return self._not_saved(
            {place: self._position(cursor, first) for place, cursor in self._fetcher.cursors.items()}
        )

    def done_with(self) -> Offsets:
        """What earlier calls than the last handed out and was not saved."""
        cursors = self._fetcher.cursors
        if self._tracker is not None:
            # Out of order by priority, what is handed out may be done while earlier records still wait in memory.
            kept = self._tracker.positions().items()
            done = {place: min(offset, cursors[place].position) for place, offset in kept if place in cursors}
        else:
            done = {place: cursor.done for place, cursor in cursors.items()}
        return self._not_saved(done)

    def _not_saved(self, offsets: Offsets) -> Offsets:
        """These, but never less than the caller has committed, without those that the log has."""
        cursors = self._fetcher.cursors
        wanted = {place: max(offset, cursors[place].committed) for place, offset in offsets.items()}
        return {place: offset for place, offset in wanted.items() if offset >= 0 and cursors[place].saved != offset}

    def commit(self, offsets: Offsets | None, on_done: Saved) -> None:
        """The caller is done with these, or with all that was handed out. Of partitions that went meanwhile with what
        was handed out of them the answer is NotHeld, once.
        """
        gone: Offsets = {}
        if offsets is None:
            offsets = self.done_with() if self._closing and not self._all_done else self.handed_out()
            gone = {place: end for place, end in self._unsaved.items() if self._reached(place, offsets) < end}
            self._unsaved.clear()
        for place, offset in offsets.items():
            check_offset(place, offset)
        for place, offset in offsets.items():
            if (cursor := self._fetcher.cursors.get(place)) is not None:
                cursor.done = cursor.committed = offset
        final = None if self._may_pass else self.error
        refusal = (final or NotHeld(gone)) if gone else None
        self._save(offsets, lambda error: on_done(error or refusal))

    def transactional_progress(self) -> tuple[Offsets, GroupMember]:
        """What was handed out and is not saved, to be saved by a transaction, and as whom. NotHeld, once, if partitions
        have gone meanwhile with what was handed out of them: their next owner begins before it.
        """
        if not isinstance(self._source, Membership):
            raise InvalidRequest("this consumer is in no group that shares partitions: it has no progress to send")
        if self.options.commit_interval_ms:
            raise InvalidRequest(
                "this consumer saves its progress by itself, outside of the transaction: give it commit_interval_ms=0"
            )
        gone, self._unsaved = self._unsaved, {}
        if gone:
            raise NotHeld(gone)
        return self.handed_out(), GroupMember(self._source.group, *self._source.identity)

    def saved_elsewhere(self, offsets: Mapping[TopicPartition, int]) -> None:
        """A transaction that is committed has saved these."""
        for place, offset in offsets.items():
            if (cursor := self._fetcher.cursors.get(place)) is not None and cursor.position >= offset:
                cursor.saved = cursor.asked = offset
        self._unsaved = {place: end for place, end in self._unsaved.items() if offsets.get(place, -1) < end}

    def _reached(self, place: TopicPartition, offsets: Offsets) -> int:
        """How far the log has a partition once `offsets` are saved, as far as this consumer knows."""
        cursor = self._fetcher.cursors.get(place)
        return -1 if cursor is None else offsets.get(place, cursor.saved)

    def _save(self, offsets: Offsets, on_done: Saved) -> None:
        if not offsets:
            on_done(None)
            return
        cursors = {place: cursor for place in offsets if (cursor := self._fetcher.cursors.get(place)) is not None}
        for place, cursor in cursors.items():
            # Whether it gets there may never be heard.
            cursor.asked, cursor.saved = offsets[place], -1

        def saved(error: HeadraceError | None) -> None:
            if error is None:
                for place, cursor in cursors.items():
                    # What was asked for later is what the log has in the end, in whatever order answers come.
                    if cursor.asked == offsets[place]:
                        cursor.saved = offsets[place]
                # Of those that went while it was under way.
                self._unsaved = {place: end for place, end in self._unsaved.items() if offsets.get(place, -1) < end}
            on_done(error)

        self._source.commit(offsets, saved)

    def close(self, *, handed_out: bool, on_done: Saved) -> None:
        """Save what was handed out, or only what is done with; give the partitions up."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._pattern is not None:
            self._pattern.close()
        self._all_done = handed_out
        self._source.leave(lambda error: self._end(error, on_done))

    def _end(self, error: HeadraceError | None, on_done: Saved) -> None:
        self.drop()
        on_done(error)

    def drop(self) -> None:
        """End it without a word, or after all was said."""
        if self._pattern is not None:
            self._pattern.close()
        if self._contact_timer is not None:
            self._contact_timer.cancel()
        self._fetcher.close()
        self.collector.close()
        if self._progress is not None:
            self._progress.close()

    def _save_later(self) -> None:
        interval_ms = self.options.commit_interval_ms
        if interval_ms and self.options.group:
            self._timer = self._reactor.call_at(self._reactor.now() + interval_ms / 1000, self._save_by_clock)

    def _save_by_clock(self) -> None:
        self._save(self.done_with(), self._on_saved_by_clock)
        self._save_later()

    def _on_saved_by_clock(self, error: HeadraceError | None) -> None:
        if error is not None:
            log.warning("progress of group %s was not saved, and is tried again: %s", self.options.group, error)

    # Notifications

    def _on_topics(self, topics: frozenset[str]) -> None:
        """What matches the pattern now."""
        if self._subscribed is None:
            self._source.subscribe(topics)
            self._source.start()
        else:
            self._late |= topics - self._subscribed
            self._source.subscribe(topics)
        self._subscribed = topics

    def _on_assigned(self, places: Iterable[TopicPartition], positions: Mapping[TopicPartition, int]) -> None:
        wanted = list(places)
        metadata = self.pool.metadata
        for topic in {topic for topic, _ in wanted} - self._counts.keys():
            found = metadata.topic(topic)
            if found is not None:
                self._counts[topic] = len(found.partitions)
        known = {place: positions.get(place) for place in wanted}
        # A partition that a topic gained while it was read has nothing that is not new, nor has a new topic.
        gained = {
            place for place in wanted if place[1] >= self._counts.get(place[0], 1 << 31) or place[0] in self._late
        }
        late = {place: offset for place, offset in known.items() if place in gained}
        self._fetcher.assign({place: offset for place, offset in known.items() if place not in gained})
        self._fetcher.assign(late, EARLIEST)
        if self._notices is not None:
            self._notices.came(wanted)
        self._on_ready()

    def _on_revoked(self, places: Iterable[TopicPartition]) -> Offsets:
        wanted = list(places)
        offsets: Offsets = {}
        if self.options.commit_interval_ms and self.options.group:
            done = self.handed_out() if self._all_done else self.done_with()
            offsets = {place: done[place] for place in wanted if place in done}
        if self._notices is not None:
            self._notices.went(wanted)
        self._release(wanted, offsets)
        return offsets

    def _on_vanished(self, places: Iterable[TopicPartition]) -> Offsets:
        """Read without sharing, partitions go only with their topic."""
        wanted = list(places)
        if self._notices is not None:
            self._notices.lost(wanted)
        return self._on_revoked(wanted)

    def _on_lost(self, places: Iterable[TopicPartition]) -> None:
        wanted = list(places)
        if self._notices is not None:
            self._notices.lost(wanted)
        self._release(wanted, {})

    def _on_unsaved(self, offsets: Offsets) -> None:
        """What was to be saved when these were given up was not."""
        for place, offset in offsets.items():
            self._unsaved[place] = max(offset, self._unsaved.get(place, -1))

    def _release(self, wanted: list[TopicPartition], saving: Offsets) -> None:
        if self._tracker is None and isinstance(self._source, Membership):
            cursors, handed_out = self._fetcher.cursors, self.handed_out()
            self._on_unsaved(
                {
                    place: handed_out[place]
                    for place in wanted
                    if place in handed_out and saving.get(place) != handed_out[place] > cursors[place].begun
                }
            )
        self._fetcher.release(wanted)
        self.collector.drop(wanted)
        if self._tracker is not None:
            self._tracker.drop(wanted)
        self._on_ready()

    def _on_error(self, error: HeadraceError) -> None:
        if passes(error):
            self._on_missing(error)
            return
        self.error, self._may_pass = error, False
        self._on_ready()

    def _on_missing(self, error: HeadraceError) -> None:
        """Raised once: it is looked for again, and may come."""
        if isinstance(error, NoBroker) and error.mapping.retriable:
            return  # until the first contact has had its time
        self._raise_once(error)

    def _raise_once(self, error: HeadraceError) -> None:
        if self.error is None:
            self.error, self._may_pass = error, True
        self._on_ready()

    def _await_first_contact(self) -> None:
        self._contact_timer = self._reactor.call_at(
            self._reactor.now() + self.options.timeout_ms / 1000, self._on_no_contact
        )

    def _on_no_contact(self) -> None:
        """No broker has answered for as long as it may take; if none does, it is told again after as long."""
        error = self.pool.first_contact.error()
        if error is not None:
            self._raise_once(error)
            self._await_first_contact()

    def _on_reset(self, reset: Reset) -> None:
        log.warning("%s", reset)
        if (on_reset := self.options.on_reset) is not None:
            self._reactor.run_callback(lambda: on_reset(reset))


def notices_of(options: ConsumerConfig) -> RebalanceNotices | None:
    callbacks = (options.on_assigned, options.on_revoked, options.on_lost)
    return RebalanceNotices(*callbacks) if any(callbacks) else None


def check_offset(place: TopicPartition, offset: int) -> None:
    if offset < 0:
        raise InvalidRequest(f"offset {offset} of {place[0]}-{place[1]} is below 0")
