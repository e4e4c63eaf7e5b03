"""The core of a share consumer, on threads and on asyncio: what is handed out, and what is said of it.

Nothing here waits, and everything is called with the reactor's lock held. A record is handed out once for each time it
was acquired; whoever is killed with it, or does not acknowledge it before its lock runs out, makes it come again
elsewhere. What `commit` says is kept was written by the group's brokers, and is delivered to nobody again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from headrace.client.connection.connections import ConnectionPool
from headrace.client.connection.reactor import Timer
from headrace.client.consumer.coordinator import passes
from headrace.client.consumer.group_protocol import TopicPartition
from headrace.client.errors import NoBroker
from headrace.client.share.deliveries import TYPES, Deliveries
from headrace.client.share.offset_runs import Run
from headrace.client.share.options import Acknowledged, OnAcknowledged, ShareConsumerConfig
from headrace.client.share.share_collector import ShareCollector
from headrace.client.share.share_fetcher import Acknowledgement, ShareFetcher
from headrace.client.share.share_membership import ShareMembership
from headrace.client.share.share_session import TopicIdPartition
from headrace.errors import HeadraceError, InvalidRequest
from headrace.queues.messages import AcknowledgeType

RESULTS_MAX: Final = 10_000
"""Results of acknowledgements that wait for the application to be told."""

Results = dict[TopicPartition, HeadraceError | None]
Committed = Callable[[Results], None]

log = logging.getLogger(__name__)


class AcknowledgedNotice:
    """What the application is to be told of one partition."""

    __slots__ = ("_callback", "_result")

    def __init__(self, callback: OnAcknowledged, result: Acknowledged) -> None:
        self._callback = callback
        self._result = result

    def tell(self) -> object:
        return self._callback(self._result)


class ShareCore:
    """`on_ready` is called whenever `ready` or the assignment may have changed."""

    def __init__(self, pool: ConnectionPool, options: ShareConsumerConfig, on_ready: Callable[[], None]) -> None:
        self.options = options
        self.pool = pool
        self._on_ready = on_ready
        self._reactor = pool.reactor
        self._error: HeadraceError | None = None
        self._may_pass = False
        self._topics: frozenset[str] = frozenset()
        self._results: deque[Acknowledged] = deque(maxlen=RESULTS_MAX)
        self._membership = ShareMembership(
            pool,
            options.group,
            rack=options.rack,
            max_poll_interval_ms=options.max_poll_interval_ms,
            on_assigned=self._on_assigned,
            on_error=self._on_error,
        )
        self._fetcher = ShareFetcher(
            pool, options, self._membership.member_id, on_ready=on_ready, on_settled=self._on_settled
        )
        self._deliveries = Deliveries()
        self.collector = ShareCollector(self._fetcher, self._deliveries, options)
        self._committing: set[Acknowledgement] = set()
        """What a commit waits for, and tells."""
        self._renewed: Results = {}
        """Of renewals, which leave by themselves: what the next commit tells."""
        self._contact_timer: Timer | None = None

    def start(self) -> None:
        self._await_first_contact()

    def subscribe(self, topics: frozenset[str]) -> None:
        self._topics = topics
        for name in topics:
            self.pool.metadata.stale(name)
        self._membership.subscribe(topics)

    @property
    def subscription(self) -> frozenset[str]:
        return self._topics

    @property
    def assignment(self) -> list[TopicPartition]:
        return self._fetcher.assigned

    @property
    def member_id(self) -> str:
        return self._membership.member_id

    # Calls

    @property
    def ready(self) -> bool:
        """Whether a call would give something now, or raise, or tell."""
        return self.collector.ready or self.must_tell or any(self._failures())

    @property
    def must_tell(self) -> bool:
        return bool(self._results)

    def begin(self) -> None:
        """A call for records begins: what earlier ones gave is accepted, or has to be acknowledged."""
        if not self._topics:
            raise InvalidRequest("this consumer reads no topic: subscribe(['orders'])")
        unseen = self.collector.unyielded(last_too=False)
        if not self.options.is_explicit:
            self._deliveries.say_of_all(AcknowledgeType.ACCEPT, unseen)
        elif left := self._deliveries.unacknowledged - sum(map(len, unseen.values())):
            raise InvalidRequest(
                f"{left} records of the last poll are not acknowledged: accept, release, reject or renew each of them"
            )
        self._membership.on_poll()
        self._pass_on()

    def want(self, records: int) -> None:
        """There is nothing to give, and the caller waits."""
        self._fetcher.want(records)

    def end(self) -> None:
        """The call is over, and the caller works on what it gave."""
        self._fetcher.want(0)
        self._membership.on_poll_end()

    def raise_failure(self) -> None:
        """What keeps records from coming, if anything does: for a call that has none to give."""
        failure = next((each for each in self._failures() if each is not None), None)
        if failure is self._error:
            if self._may_pass:
                self._error = None
        elif failure is self.collector.failure:
            self.collector.failure = None
        else:
            self._fetcher.failure = None
        if failure is not None:
            raise failure

    def _failures(self) -> tuple[HeadraceError | None, ...]:
        return self._error, self.collector.failure, self._fetcher.failure

    # Acknowledgements

    def acknowledge(self, place: TopicPartition, runs: Iterable[Run], how: str) -> None:
        type = TYPES.get(how)
        if type is None:
            raise InvalidRequest(f"{how!r} is no acknowledgement; it may be {', '.join(map(repr, TYPES))}")
        if not self.options.is_explicit:
            raise InvalidRequest(
                "records of this consumer are accepted by the next poll; to acknowledge each, make it with "
                "acknowledgement='explicit'"
            )
        for run in runs:
            self._deliveries.acknowledge(place, run, type)
        if type is AcknowledgeType.RENEW:
            self._pass_on()
            self._fetcher.send()  # the lock may not last until the next poll

    def commit(self, on_done: Committed | None) -> None:
        """Say now what is to be said; `on_done` hears what became of each partition."""
        if not self.options.is_explicit:
            self._deliveries.say_of_all(AcknowledgeType.ACCEPT, self.collector.unyielded(last_too=False))
        self._pass_on()
        self._when_settled(on_done)
        self._fetcher.send()

    def _when_settled(self, on_done: Committed | None) -> None:
        if on_done is None:
            return
        waits = self._fetcher.unsettled
        results, self._renewed = self._renewed, {}
        if not waits:
            self._reactor.call_soon(lambda: on_done(results))

        def heard(told: Acknowledgement, error: HeadraceError | None) -> None:
            place = told.place.topic, told.place.partition
            results[place] = results.get(place) or error
            waits.discard(told)
            if not waits:
                on_done(results)

        self._committing |= waits
        for told in waits:
            told.heard.append(heard)

    def _pass_on(self) -> None:
        """What was said goes to the fetcher, to leave with the next request."""
        for place, said in self._deliveries.take_said().items():
            self._fetcher.acknowledge(self.collector.places[place], said)

    def _on_settled(self, told: Acknowledgement, error: HeadraceError | None) -> None:
        was_asked = told in self._committing
        self._committing.discard(told)
        if told.renews and not was_asked:
            place = told.place.topic, told.place.partition
            self._renewed[place] = self._renewed.get(place) or error
        ranges = tuple(Run(each.first, each.last) for each in told.said if each.type is not AcknowledgeType.GAP)
        if self.options.on_acknowledged is not None and ranges:
            self._results.append(Acknowledged(told.place.topic, told.place.partition, ranges, error))
            self._on_ready()
        elif error is not None and not was_asked:
            log.warning("share group %r: %d ranges of records: %s", self.options.group, len(ranges), error)

    def next_notice(self, *, closing: bool = False) -> AcknowledgedNotice | None:
        """What to call back with."""
        callback = self.options.on_acknowledged
        if callback is None or not self._results:
            return None
        return AcknowledgedNotice(callback, self._results.popleft())

    def told(self, notice: AcknowledgedNotice) -> None:
        """The callback has returned, or failed."""

    # The end

    def close(self, *, handed_out: bool, on_done: Committed) -> None:
        """Say what is still to be said, give the rest back, and leave. `handed_out`: the application is done with what
        it was given, so where it does not say so itself that is accepted."""
        if self.options.is_explicit:
            self._deliveries.say_of_all(AcknowledgeType.RELEASE, self.collector.unyielded(last_too=False))
        else:
            if handed_out or self.collector.is_iterated:  # who iterates is done with all but what it was given last
                not_done = self.collector.unyielded(last_too=not handed_out)
                self._deliveries.say_of_all(AcknowledgeType.ACCEPT, not_done)
            self._deliveries.say_of_all(AcknowledgeType.RELEASE, self.collector.unyielded(last_too=False))
        self._fetcher.want(0)
        self._pass_on()

        def settled(results: Results) -> None:
            self._fetcher.end_sessions(lambda: self._membership.leave(lambda: on_done(results)))

        self._when_settled(settled)
        self._fetcher.send()

    def drop(self) -> None:
        """End it without a word, or after all was said."""
        if self._contact_timer is not None:
            self._contact_timer.cancel()
        self._membership.close()
        self._fetcher.close()
        self.collector.close()

    # Notifications

    def _on_assigned(self, places: frozenset[TopicIdPartition]) -> None:
        self._fetcher.assign(places, self._topics)

    def _on_error(self, error: HeadraceError) -> None:
        if not passes(error):
            self._error, self._may_pass = error, False
        elif not (isinstance(error, NoBroker) and error.mapping.retriable) and self._error is None:
            self._error, self._may_pass = error, True
        self._on_ready()

    def _await_first_contact(self) -> None:
        at = self._reactor.now() + self.options.timeout_ms / 1000
        self._contact_timer = self._reactor.call_at(at, self._on_no_contact)

    def _on_no_contact(self) -> None:
        """No broker has answered for as long as it may take; if none does, it is told again after as long."""
        error = self.pool.first_contact.error()
        if error is not None:
            self._error, self._may_pass = self._error or error, True
            self._on_ready()
            self._await_first_contact()
