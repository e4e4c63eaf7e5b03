"""The controller's driver: stands for election, decides on each new image, carries decisions out.

One task. Every write is fenced (cluster.election); before each, the lease's local deadline is looked at. A conflict
only costs time: what did not get through is decided again on the newer image, one partition at a time.

A broker whose registration was seen to go, while coordination had answered for a lease time, is gone at once, and so is
one that said that it leaves. Otherwise, after an election or a silence of coordination, a broker counts as gone after
one lease time: it may be about to register again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Final

from headrace.cluster import keys
from headrace.cluster.changes import unchanged
from headrace.cluster.controller_core import Batch, Context, Decision, Rules, decide, in_transactions
from headrace.cluster.deletions import overdue
from headrace.cluster.election import Election, Term
from headrace.cluster.image import LEAVING, NO_LEADER, Image, Topic
from headrace.cluster.membership import ClusterAccess
from headrace.cluster.topics import plan_remove_unfinished
from headrace.coordination.waits import Bell, Compute, OwnedTask, at_once, pause
from headrace.errors import CoordinationError, HeadraceError, RequestTimedOut
from headrace.placement.drains import Drains
from headrace.placement.internal_topics import plan_growth
from headrace.placement.plans import Where
from headrace.ports.clock import Clock
from headrace.ports.coordination import Delete

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 0.2
"""Pause after coordination did not answer, or others kept changing the same keys."""
UNFINISHED_SECONDS: Final = 30.0
"""How long a topic may be under creation without a step forward before its creator counts as dead."""
NAMED_MAX: Final = 10
"""Decisions of one transaction that the log names one by one."""

REGISTRATIONS_MAX: Final = 3
"""How often a broker that registers again and again is waited for."""


class ReportDeadlines:
    """How long replicas without a leader have to report what they hold: one lease time from the latest of the first
    report, the registration of a replica that is alive and silent, and the order for an election.

    Who is alive and does not report by then, because it hangs or cannot read its log, holds up no election that may
    lose something. One that merely stands still loses its lease within the same time. One that registers again and
    again without a lapse, as a process that dies of what it reads, is waited for as often as `REGISTRATIONS_MAX`.
    """

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._since: dict[Hashable, float] = {}
        """When each of what is waited from was first seen; what is no more is forgotten."""
        self._ends: dict[Where, float] = {}

    def follow(self, image: Image) -> None:
        known = self._since
        self._since, self._ends = {}, {}
        for where, said in image.controls.ends.items():
            state = image.partition(*where)
            if not said or state is None or state.leader != NO_LEADER:
                continue
            topic_id = image.topics[where[0]].id
            vacancy = where, topic_id, state.leader_epoch
            latest = self._seen(known, vacancy)
            order = image.controls.orders.get(where)
            if order is not None:
                latest = max(latest, self._seen(known, (vacancy, "order", order.revision)))
            for broker in (image.brokers[each] for each in state.replicas if each in image.brokers):
                report = said.get(broker.id)
                if report is None or (report.incarnation, report.topic_id) != (broker.incarnation, topic_id):
                    there = self._seen(known, (vacancy, broker.id))
                    registered = self._seen(known, (vacancy, broker.id, broker.incarnation))
                    latest = max(latest, min(registered, there + (REGISTRATIONS_MAX - 1) * self._seconds))
            self._ends[where] = latest + self._seconds

    def _seen(self, known: dict[Hashable, float], what: Hashable) -> float:
        return self._since.setdefault(what, known.get(what, self._clock.now()))

    def is_over(self, where: Where) -> bool:
        return self._clock.now() >= self._ends.get(where, float("inf"))

    def next_end(self) -> float:
        now = self._clock.now()
        return min((end for end in self._ends.values() if end > now), default=float("inf"))


class Controller:
    """Runs from `start` to `close`; `tick` at least every 100 ms or so looks at what comes with time."""

    def __init__(
        self,
        cluster: ClusterAccess,
        rules: Callable[[Topic], Rules],
        prefer_seconds: float = 0.0,
        compute: Compute = at_once,
        internal_replicas: Callable[[], int] = lambda: 1,
    ) -> None:
        self.election = Election(cluster.coordination, cluster.view, cluster.membership)
        self._cluster = cluster
        self._rules = rules
        self._prefer_seconds = prefer_seconds
        self._internal_replicas = internal_replicas
        self._bell = Bell()
        self._drains = Drains(cluster.clock, compute, self._bell.ring, cluster.failed)
        self._reports_due = ReportDeadlines(cluster.clock, cluster.membership.lease_seconds)
        self._term: Term | None = None
        self._elected_at = 0.0
        self._prefer_at = float("inf")
        self._look_at = float("inf")
        self._departed: set[int] = set()
        self._settled: Image | None = None
        self._unruled: dict[str, str] = {}
        self._unfinished: dict[str, tuple[int, float]] = {}
        self._task = OwnedTask(cluster.failed)

    def start(self) -> None:
        self._cluster.view.listen(self._follow)
        self._task.start(self._run())
        self._bell.ring()

    async def close(self) -> None:
        await self._drains.close()
        await self._task.close()

    def tick(self) -> None:
        now = self._cluster.clock.now()
        if now >= self._look_at or now >= self._prefer_at:
            self._look_at = float("inf")
            self._settled = None
            self._bell.ring()
        elif self._term is not self.election.term or self.election.is_due:
            self._bell.ring()

    def _follow(self, old: Image, new: Image) -> None:
        if new.revision < old.revision:  # restored: what was won and seen before counts for nothing
            self.election.forget()
            self._settled = None
        if old.brokers is not new.brokers:
            membership = self._cluster.membership
            steady = self._cluster.clock.now() >= membership.steady_since + membership.lease_seconds
            for broker, was in old.brokers.items():
                if broker not in new.brokers and (steady or was.state == LEAVING):
                    self._departed.add(broker)
            self._departed.difference_update(new.brokers)
        self._bell.ring()

    def _patience_ends(self) -> float:
        return max(self._elected_at, self._cluster.membership.steady_since) + self._cluster.membership.lease_seconds

    def _is_gone(self, broker: int) -> bool:
        return broker in self._departed or self._cluster.clock.now() >= self._patience_ends()

    async def _run(self) -> None:
        while True:
            await self._bell.rung()
            if self._cluster.is_held():
                continue
            try:
                term = await self._current_term()
                if term is not None:
                    await self._settle(term)
            except (CoordinationError, RequestTimedOut) as error:
                log.info("the controller tries again: %s", error)
                await pause(self._cluster.clock, RETRY_SECONDS)
                self._bell.ring()

    async def _current_term(self) -> Term | None:
        term = self.election.term or await self.election.claim()
        if term is not self._term:
            self._term = term
            self._settled = None
            if term is not None:
                self._elected_at = self._cluster.clock.now()
                self._prefer_at = self._elected_at + self._prefer_seconds if self._prefer_seconds else float("inf")
                log.info("broker %d is controller, epoch %d", self._cluster.membership.broker.id, term.epoch)
                await self._cluster.view.wait_for_revision(term.revision)
        return term

    async def _settle(self, term: Term) -> None:
        """Decide until there is nothing left to decide."""
        while self.election.term is term and not self._cluster.is_held():
            image, now = self._cluster.view.image, self._cluster.clock.now()
            self._reports_due.follow(image)
            context = Context(
                term.epoch,
                self._is_gone,
                self._known_rules,
                self._reports_due.is_over,
                prefer=now >= self._prefer_at,
                moves=(*self._drains.moves(image), *plan_growth(image, self._internal_replicas())),
            )
            decisions = decide(image, context, self._settled)
            if not decisions:
                break
            revision, conflict = await self._carry_out(image, decisions, term)
            await self._cluster.view.wait_for_revision(revision)
            if conflict:
                await pause(self._cluster.clock, RETRY_SECONDS)
        else:
            self._bell.ring()  # the lease may stand again before anybody looks
            return
        self._settled = image
        if now >= self._prefer_at:
            self._prefer_at = now + self._prefer_seconds
        if now < self._patience_ends() < float("inf"):
            self._look_at = self._patience_ends()
        elif self._cluster.membership.steady_since == float("inf"):
            self._look_at = now + self._cluster.membership.lease_seconds
        self._look_at = min(self._look_at, self._drains.next_look(image), self._reports_due.next_end())
        await self._remove_unfinished(image, term)
        await self._forget_deletions(image, term)

    def _known_rules(self, topic: Topic) -> Rules | None:
        """None for a topic whose settings cannot be read: it waits, and no other does."""
        try:
            rules = self._rules(topic)
        except HeadraceError as error:
            if self._unruled.get(topic.name) != str(error):
                self._unruled[topic.name] = str(error)
                log.error("nothing is decided for topic %r: its settings cannot be read: %s", topic.name, error)
            return None
        self._unruled.pop(topic.name, None)
        return rules

    async def _carry_out(self, image: Image, decisions: Sequence[Decision], term: Term) -> tuple[int, bool]:
        """The revision at which all of it is known, and whether somebody else was faster with some of it."""
        revision, conflict = image.revision, False
        for batch in in_transactions(image, decisions, term.fence):
            done, revision = await self._transact(batch, term)
            if done:
                continue
            conflict = True
            if len(batch.decisions) > 1:
                for single in in_transactions(image, batch.decisions, term.fence, most=1):
                    _, revision = await self._transact(single, term)
        return revision, conflict

    async def _transact(self, batch: Batch, term: Term) -> tuple[bool, int]:
        if self.election.term is not term:
            return False, self._cluster.view.image.revision
        result = await self._cluster.coordination.transact(batch.step.compares, batch.step.actions)
        if result.succeeded:
            _tell(batch.decisions)
        elif result.revision < term.revision:
            self.election.forget()  # put back to a copy from before the term, and no image has told it
        return result.succeeded, result.revision

    async def _remove_unfinished(self, image: Image, term: Term) -> None:
        """Topics whose creation was cut short: nobody was told that they exist."""
        now = self._cluster.clock.now()
        known = self._unfinished
        self._unfinished = {
            name: known[name] if known.get(name, (0,))[0] == topic.revision else (topic.revision, now)
            for name, topic in image.unfinished.items()
        }
        for name, (_, since) in self._unfinished.items():
            if now < since + UNFINISHED_SECONDS:
                self._look_at = min(self._look_at, since + UNFINISHED_SECONDS)
                continue
            for step in plan_remove_unfinished(image, name).steps:
                result = await self._cluster.coordination.transact((*step.compares, *term.fence), step.actions)
                log.warning("topic %r, whose creation was cut short, removed: %s", name, result.succeeded)

    async def _forget_deletions(self, image: Image, term: Term) -> None:
        """Those that wait for brokers that do not come."""
        for topic_id, deletion in overdue(image, self._cluster.clock.wall_ms()).items():
            key = keys.deleted_key(image.prefix, topic_id)
            await self._cluster.coordination.transact((unchanged(key, deletion.revision), *term.fence), (Delete(key),))
            log.warning(
                "the deletion of topic %r is not kept any longer for brokers %s: they will set its logs aside",
                deletion.topic, list(deletion.brokers),
            )  # fmt: skip


def _tell(decisions: Sequence[Decision]) -> None:
    for decision in decisions[:NAMED_MAX]:
        log.info("%s", decision)
    if len(decisions) > NAMED_MAX:
        log.info("and %d more partitions", len(decisions) - NAMED_MAX)
    for decision in decisions:
        after, where = decision.after, f"{decision.topic.name}-{decision.before.index}"
        if after.lost is not None and after.lost != decision.before.lost:
            upto = "an unknown end" if after.lost.end < 0 else f"{after.lost.end}"
            log.error(
                "%s: led by broker %d, which was not in sync: lost are offsets from %d to %s",
                where, after.leader, after.lost.start, upto,
            )  # fmt: skip
        elif after.leader == NO_LEADER != decision.before.leader:
            log.error("%s: no leader; of the in-sync set %s none is there with all it had", where, list(after.isr))
