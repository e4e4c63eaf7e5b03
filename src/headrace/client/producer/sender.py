"""Tracks joined to the engine: what is ready leaves at the end of a turn, one request for each leader and acks.

All of this runs under the reactor's lock. A batch is open until it is full, or its interval is over and its lane can
send; it is settled when its fate is known, at the latest when its delivery timeout is over. A record counts in the
queue from when it is in a batch until that batch is settled.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Final

from headrace.client.admin.cluster import UnknownTopic
from headrace.client.connection import exits
from headrace.client.connection.connections import Network
from headrace.client.connection.errors import NeverSent
from headrace.client.connection.frames import Written
from headrace.client.connection.reactor import Timer
from headrace.client.connection.topology import Topic
from headrace.client.errors import BrokerUnreachable, Refusal
from headrace.client.producer import exiting, ordered, outcomes
from headrace.client.producer.account import Account
from headrace.client.producer.counts import Counts
from headrace.client.producer.desk import Desk
from headrace.client.producer.driver import Driver
from headrace.client.producer.errors import failure
from headrace.client.producer.faults import FaultLatency
from headrace.client.producer.forking import stays_with_parent
from headrace.client.producer.form import Acknowledged
from headrace.client.producer.lane import Fate, Parcel, Verdict
from headrace.client.producer.options import Options
from headrace.client.producer.outcomes import Outcome
from headrace.client.producer.requests import Request, Sending, load_of, put
from headrace.client.producer.splitting import split
from headrace.client.producer.spread import move_away
from headrace.client.producer.timetable import Timetable
from headrace.client.producer.track import Load, Track
from headrace.errors import Code, HeadraceError, InvalidRecord
from headrace.records.builder import Delivery, Report, SentBatch
from headrace.records.router import Quota
from headrace.wire import api as apis
from headrace.wire.message import Message

log = logging.getLogger(__name__)
ANSWER_MARGIN_S: Final = 1.0
LEADERLESS_S: Final = 0.1
ABANDON_AFTER_S: Final = 0.5
SLOW_AFTER_S: Final = 1.0
NO_OFFSET: Final = -1


class Sender:
    def __init__(self, network: Network, options: Options, driver: Driver) -> None:
        self.network = network
        self.reactor = network.reactor
        self.options = options
        self.driver = driver
        self.quota = Quota(options.queue_bytes, options.queue_records)
        self.account = Account(self.reactor, driver, self.quota)
        self.count = Counts()
        self.faults = FaultLatency(options.latency_table)
        self._delivery_s = options.delivery_timeout_ms / 1000
        # A batch leaves while there is time for its delivery, however long its interval.
        self._interval_s = min(options.interval_ms / 1000, self._delivery_s / 2)
        self._desks: dict[tuple[int, bool], Desk] = {}
        self._numbers = 0
        self._timetable = Timetable(self.reactor, self.leave, self._time_is_up)
        self._ready: dict[Track, None] = {}
        self._pump_due = False
        self._asked: dict[int, Request] = {}
        self._watch: Timer | None = None
        self.refusal: HeadraceError | None = None
        """What every send hears from now on."""
        self._over = False
        """It is closed: nothing leaves any more, whatever is heard."""
        self.aside = 0
        """Records that wait outside of batches."""
        network.routes.listeners.append(self._routed)
        stays_with_parent(self)
        exits.opened(self)

    # For desks and producers.

    def desk(self, acks: int, ordered: bool = False) -> Desk:
        with self.reactor.lock:
            desk = self._desks.get((acks, ordered))
            if desk is None:
                desk = self._desks[acks, ordered] = Desk(self, acks, ordered)
                desk.router_here.closed = self.refusal
            return desk

    def refuse(self, error: HeadraceError) -> None:
        """Take no record any more. What is in batches goes on."""
        with self.reactor.lock:
            self.refusal = error
            for desk in self._desks.values():
                desk.router_here.closed = error

    def desks(self) -> list[Desk]:
        return list(self._desks.values())

    def avoided(self) -> frozenset[int]:
        """Brokers that records which may go anywhere stay away from."""
        failing = self.network.failing()
        return failing | self.faults.avoided(self.reactor.now()) if self.options.avoid_slow else failing

    def wait(self, delivery: Delivery, deadline: float | None) -> None:
        self.driver.wait(delivery, deadline)

    def awaited(self, delivery: Delivery) -> Awaitable[Report]:
        return self.driver.awaited(delivery)

    def open(self, track: Track, load: Load | None = None) -> None:
        """Give the track a batch to put records into."""
        now = self.reactor.now()
        self._numbers += 1
        load = load or Load(track, 0, 0.0, 0.0, track.room(now))
        load.number, load.due_at, load.deadline = self._numbers, now + self._interval_s, now + self._delivery_s
        track.load, track.batch, track.due = load, load.batch, False
        self._timetable.add(load)

    def seal(self, track: Track) -> None:
        """Close the track's open batch: it waits in its lane from now on."""
        load = track.load
        assert load is not None
        track.load, track.batch, track.due = None, None, False
        self._timetable.sealed(load)
        track.desk.move_on(track)
        if not load.batch.count:
            self.forget(load)
            return
        movable = not load.batch.pinned and not track.desk.ordered
        load.parcel = Parcel(load.batch.count, load.deadline, load, movable)
        track.lane.add(load.parcel)

    def leave(self, load: Load) -> None:
        """Let a batch leave without waiting for its interval."""
        if load.track.load is load:
            load.track.due = True
            self.make_ready(load.track)

    def leave_now(self, load: Load) -> None:
        """Let a batch leave, and all else that is ready, without waiting for the end of a turn."""
        if load.track.load is load:
            load.track.due = True
            self._ready[load.track] = None
        if self._ready:
            self.pump()

    def make_ready(self, track: Track) -> None:
        """Look at the track at the end of this turn."""
        if self._over:
            return
        self._ready[track] = None
        if not self._pump_due:
            self._pump_due = True
            self.reactor.call_soon(self.pump)

    def hurry(self) -> None:
        """Let everything that waits for its interval leave."""
        for load in self._timetable.unsettled.values():
            self.leave(load)

    def mark(self) -> int:
        """All batches that there are now have numbers up to this one."""
        return self._numbers

    def settled(self, mark: int) -> bool:
        return next(iter(self._timetable.unsettled), mark + 1) > mark

    def pump(self) -> None:
        """Send what may leave."""
        self._pump_due = False
        if not self._ready or self._over:
            return
        ready, self._ready = self._ready, {}
        requests: dict[tuple[int, int], list[Request]] = {}
        failing = self.network.failing()
        for track in ready:
            self._advance(track, failing, requests)
        for (leader, acks), rounds in requests.items():
            for request in rounds:
                self.ask(leader, acks, request)

    def close(self, error: HeadraceError) -> None:
        """Settle what is left as it is. The network may go on for others, so nothing of it stays in a lane."""
        self._over = True
        exits.closed(self)
        left = list(self._timetable.unsettled.values())
        for load in left:
            if load.track.load is load:
                self.seal(load.track)
        for lane in {load.track: load.track.lane for load in left}.values():
            for parcel, fate in lane.expire(math.inf):
                self._settle_one(load_of(parcel), fate, error)
        self._ready.clear()
        self.network.routes.listeners.remove(self._routed)
        self._timetable.close()
        if self._watch is not None:
            self._watch.cancel()

    def at_exit(self, since: float) -> Iterator[None]:
        return exiting.at_exit(self, since)

    def metrics(self) -> dict[str, int]:
        with self.reactor.lock:
            desks = self._desks.values()
            tracks = [track for desk in desks for topic in desk.router_here.topics for track in desk.tracks(topic)]
            return {
                **asdict(self.count),
                "renewals": sum(track.lane.renewals for track in tracks),
                "queue_bytes": self.quota.bytes,
                "queue_records": self.quota.records,
            }

    # Leaving.

    def _advance(self, track: Track, failing: frozenset[int], requests: dict[tuple[int, int], list[Request]]) -> None:
        now, lane = self.reactor.now(), track.lane
        leader = self.network.routes.leader(track.topic, track.partition)
        if leader is None or leader in failing:
            move_away(self, track, failing)
        if leader is None:
            self.network.routes.stale(track.topic)
            self._later(track, now + LEADERLESS_S)
            return
        rounds = requests.setdefault((leader, track.desk.acks), [])
        after = 0
        while True:
            if track.due and not lane.waiting and len(lane.flying) < lane.in_flight:
                self.seal(track)
            parcel = lane.next(now, leader)
            if parcel is None:
                if lane.wants_identity and lane.waiting and track.desk.identities.give(lane):
                    continue
                break
            try:
                after = put(rounds, after, track, parcel)
            except Exception as error:
                log.exception("a batch for %s cannot be packed", track.label)
                parcel.reason = InvalidRecord(f"the batch cannot be packed: {error!r}")
                self.settle(lane.answered(parcel, parcel.attempt, Outcome.DENIED, now))
        if lane.waiting and lane.wants_identity:
            track.desk.identities.ask()
        if lane.waiting and lane.paused_until > now:
            self._later(track, lane.paused_until)
        elif lane.idempotent and lane.flying and lane.leader != leader:
            self._abandon(track, now)
        else:
            track.moved_at = None

    def _abandon(self, track: Track, now: float) -> None:
        """Send again what went to a broker that leads no more and does not answer."""
        if track.moved_at is None:
            track.moved_at = now
        if now - track.moved_at < ABANDON_AFTER_S:
            self._later(track, track.moved_at + ABANDON_AFTER_S)
            return
        track.moved_at = None
        for parcel in track.lane.flying:
            load_of(parcel).lent = True
        self.settle(track.lane.abandon(now))
        self.make_ready(track)

    def ask(self, leader: int, acks: int, request: Request, written: Written | None = None) -> None:
        self.count.requests += 1
        self._asked[id(request)] = request
        if self._watch is None:
            self._watch = self.reactor.call_at(self.reactor.now() + SLOW_AFTER_S, self._look_for_slow)
        self.count.retries += sum(each.attempt > 1 for each in request.sendings)
        body = request.body(self.network.routes, acks, int(self.options.request_timeout_ms))
        heard = partial(self._heard, leader, acks, request, self.reactor.now())
        try:
            link = self.network.broker(leader)
        except BrokerUnreachable as error:
            heard(NeverSent(str(error)))
            return
        timeout_s = self.options.request_timeout_ms / 1000 + ANSWER_MARGIN_S
        reads, answered = request.read if len(request.sendings) == 1 else None, acks != 0
        link.ask(apis.PRODUCE, body, heard, timeout_s=timeout_s, answered=answered, reads=reads, written=written)

    # Answers.

    def _heard(
        self, leader: int, acks: int, request: Request, asked_at: float, answer: Message | Acknowledged | HeadraceError
    ) -> None:
        now = self.reactor.now()
        del self._asked[id(request)]
        if isinstance(answer, HeadraceError):
            if self.options.avoid_slow:
                self.faults.failed(leader, now)
            outcome = outcomes.of_error(answer, not isinstance(answer, NeverSent))
            if acks == 0 and outcome is Outcome.UNSURE:
                outcome = Outcome.LOST
            for each in request.sendings:
                self.network.routes.stale(each.track.topic)
                self._ended(each, outcome, answer, now)
            return
        if self.options.avoid_slow:
            self.faults.took(leader, (now - asked_at) * 1000, now)
        if isinstance(answer, Acknowledged):
            self._ended(request.sendings[0], Outcome.WRITTEN, None, now, answer.base_offset, answer.append_ms)
            return
        rows = request.rows(answer) if acks else {}
        for each in request.sendings:
            row = rows.get((each.track.topic, each.track.partition))
            if acks == 0:
                self._ended(each, Outcome.WRITTEN, None, now)
            elif row is None:
                missing = Refusal(
                    Code.UNKNOWN, f"produce to {each.track.label}", "the answer leaves this partition out"
                )
                self._ended(each, Outcome.UNSURE, missing, now)
            else:
                self._row(each, row, answer, leader, now)

    def _row(self, each: Sending, row: Message, answer: Message, leader: int, now: float) -> None:
        track, code = each.track, int(row.error_code)
        outcome = outcomes.of_code(code)
        if outcome is Outcome.WRITTEN:
            self._ended(each, outcome, None, now, row.base_offset, row.log_append_time_ms)
            return
        routes = self.network.routes
        hinted = row.current_leader
        if hinted is not None and hinted.leader_id >= 0:
            ends = answer.node_endpoints
            routes.hint(track.topic, track.partition, hinted.leader_id, hinted.leader_epoch, ends)
        if code == Code.STORAGE_ERROR:
            self.network.failed(leader)
        self._ended(each, outcome, Refusal(code, f"produce to {track.label}", row.error_message), now)
        if routes.leader(track.topic, track.partition) != leader:
            track.lane.hurry()
        elif outcome in (Outcome.UNSURE, Outcome.REFUSED):
            routes.stale(track.topic)

    def _ended(
        self,
        each: Sending,
        outcome: Outcome,
        reason: HeadraceError | None,
        now: float,
        base_offset: int = NO_OFFSET,
        append_ms: int = -1,
    ) -> None:
        """One attempt at one batch is over."""
        if reason is not None:
            each.parcel.reason = reason
        track = each.track
        if outcome is not Outcome.TOO_LARGE or not split(self, each, now):
            self.settle(track.lane.answered(each.parcel, each.attempt, outcome, now), base_offset, append_ms)
        if track.due or track.lane.waiting:
            self.make_ready(track)

    def settle(self, verdicts: list[Verdict], base_offset: int = NO_OFFSET, append_ms: int = -1) -> None:
        for parcel, fate in verdicts:
            load = load_of(parcel)
            if load.settled:
                continue
            if fate is not Fate.DELIVERED:
                self._settle_one(load, fate, parcel.reason)
                continue
            self.count.delivered += load.batch.count
            self.count.bytes += load.batch.record_bytes
            self.count.batches += 1
            self.forget(load, load.batch.sent.finish(base_offset, append_ms))

    def _settle_one(self, load: Load, fate: Fate, reason: HeadraceError | None) -> None:
        count, where = load.batch.count, load.track.label
        reason = reason or self._hindrance(load.track)
        unknown = fate is Fate.UNKNOWN
        if unknown:
            self.count.unknown += count
        else:
            self.count.failed += count
        error = failure(count, where, unknown, reason)
        self.forget(load, load.batch.sent.fail(error))
        if load.orders and not self._over:
            ordered.hold_back(self, load, error)

    def _hindrance(self, track: Track) -> HeadraceError | None:
        """What keeps a batch that was never tried from leaving, as far as it is known."""
        routes = self.network.routes
        if routes.topic(track.topic) is None:
            return UnknownTopic(track.topic)
        if routes.leader(track.topic, track.partition) is None:
            return Refusal(Code.LEADER_NOT_AVAILABLE, f"partition {track.label}")
        return track.desk.identities.failure if track.lane.wants_identity else None

    def fail(self, sent: SentBatch, error: HeadraceError) -> None:
        if sent.fail(error):
            self.reactor.tell(partial(self.account.tell, sent))

    def forget(self, load: Load, tells: bool = False) -> None:
        assert not load.settled
        self.account.settle(load.batch.sent, load.counted, tells)
        load.settled = True
        load.let_go()
        root = load.root or load
        root.ahead -= 1
        if not root.ahead:
            root.settled = True
            self._timetable.settled(root)
        self.driver.changed()

    # Time.

    def _later(self, track: Track, when: float) -> None:
        if self._over or self.reactor.now() < track.wakes_at <= when:
            return
        track.wakes_at = when
        self.reactor.call_at(when, partial(self.make_ready, track))

    def _look_for_slow(self) -> None:
        """A broker that does not answer may have ceased to lead: ask the others."""
        self._watch = None
        now = self.reactor.now()
        for request in self._asked.values():
            if request.sendings[0].parcel.sent_at > now - SLOW_AFTER_S:
                break
            for each in request.sendings:
                self.network.routes.stale(each.track.topic)
        if self._asked:
            self._watch = self.reactor.call_at(now + SLOW_AFTER_S, self._look_for_slow)

    def _time_is_up(self, load: Load) -> None:
        if load.track.load is load:
            self.seal(load.track)
        self.settle(load.track.lane.expire(self.reactor.now()))
        assert load.settled
        self.make_ready(load.track)

    def _routed(self, name: str, topic: Topic | None) -> None:
        """A topic has more partitions, other leaders, or is another one."""
        for desk in self._desks.values():
            if topic is not None and name in desk.router_here.topics:
                desk.learn(topic)
            for track in desk.tracks(name):
                leader = self.network.routes.leader(name, track.partition)
                if leader is not None and leader != track.lane.leader:
                    track.lane.hurry()
                if track.due or not track.lane.idle:
                    self.make_ready(track)
        self.driver.changed()
