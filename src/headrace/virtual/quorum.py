"""Coordination on several nodes, as etcd has it: one history that a majority agrees on, and nodes that follow it.

It is no consensus protocol: the history is that of `CoordinationStore`, and a node is a view of it that may lag.
A client asks one node until that fails it, then the next. Calls are answered by a node that reaches the majority, while
that has a leader, and when the node itself has come as far as its answer: no read is old, but answers can be late.
Watches are told what their node knows. What can go wrong, beside what can with one node:

slow(node)           it hears of every change so much later
cut_off(node)        from the other nodes: its clients get no answer, and when it has noticed, a refusal; their watches
                     are silent, then end; leases run on. If it led, or too few are left, nobody can change anything
                     until the rest has elected another; then every lease begins anew and lasts a little longer
part(host, node)     the host does not reach that one; it notices by calls without an answer
elect()              the leader steps down

A node that led and does not know yet that it is cut off says of every lease that it holds: etcd's leaders did not
always ask the others before they renewed one.
A change that a client sends again, to another node, is made once: the receipts of coordination.etcd see to that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Final, TypeVar

from headrace.coordination.revisions import Watched
from headrace.errors import CoordinationError
from headrace.ports.clock import Clock
from headrace.ports.coordination import Behind, WatchResponse
from headrace.virtual.coordination import (
    DEADLINE_SECONDS,
    CoordinationStore,
    Snapshot,
    VirtualCoordination,
    settle,
    silence,
)

NODES: Final = 3
ATTEMPT_SECONDS: Final = 0.3
"""How long one node may take to answer before the next is asked."""
PAUSE_SECONDS: Final = 0.02
NOTICE_SECONDS: Final = 0.3
"""After which a node that is cut off knows that it has no leader."""
ELECTION_SECONDS: Final = (0.05, 0.6)
EXTENSION_SECONDS: Final = 0.1
"""How much longer leases last after an election."""
RENEWAL_SHARE: Final = 3
"""A renewal is given up after this part of the lease."""

T = TypeVar("T")


class NoAnswer(CoordinationError):
    """From one node; another may have it."""


class Node(Watched):
    def __init__(self, number: int, revision: int) -> None:
        super().__init__()
        self.number = number
        self.applied = revision
        """The newest revision that it knows."""
        self.lag_seconds = 0.0
        self.is_cut_off = self.is_alone = self.led = False
        """Alone: it has noticed. `led`: it was the leader when it was cut off."""
        self.cuts = 0
        self.breaks = 0
        self._answers: list[tuple[int, Callable[[], None]]] = []

    def once_applied(self, revision: int, call: Callable[[], None]) -> None:
        if self.applied >= revision:
            call()
        else:
            self._answers.append((revision, call))

    def reach(self, revision: int) -> None:
        self.applied = max(self.applied, revision)
        due = [call for needed, call in self._answers if needed <= self.applied]
        self._answers = [(needed, call) for needed, call in self._answers if needed > self.applied]
        for call in due:
            call()
        self.tell_watches()


class CoordinationQuorum(CoordinationStore):
    def __init__(
        self, clock: Clock, seed: int = 0, delay_seconds: tuple[float, float] = (0.0002, 0.002), nodes: int = NODES
    ) -> None:
        super().__init__(clock, seed, delay_seconds)
        self.nodes = [Node(number, self.revision) for number in range(nodes)]
        self.leader: Node | None = self.nodes[0]
        self.elections = 0
        self.asked: dict[str, Node] = {}
        """By host, the node that it asks now."""
        self._parted: set[tuple[str, int]] = set()

    def client(self, host: str, clock: Clock, first: int = 0) -> VirtualCoordination:
        return QuorumClient(self, host, clock, first)

    # What is done to it.

    def part(self, host: str, node: Node) -> None:
        self._parted.add((host, node.number))

    def heal(self, host: str) -> None:
        super().heal(host)
        for node in self.nodes:
            node.tell_watches()

    def join(self, host: str, node: Node) -> None:
        self._parted.discard((host, node.number))
        node.tell_watches()

    def slow(self, node: Node, lag_seconds: float) -> None:
        node.lag_seconds = lag_seconds

    def hasten(self, node: Node) -> None:
        node.lag_seconds = 0.0
        self._apply(node, self.revision)

    def cut_off(self, node: Node) -> None:
        node.is_cut_off, node.led = True, self.leader is node
        node.cuts += 1
        self.clock.call_later(NOTICE_SECONDS, partial(self._notice, node, node.cuts))
        if node.led or not self._has_majority:
            self.elect()

    def heal_node(self, node: Node) -> None:
        node.is_cut_off = node.is_alone = node.led = False
        self._apply(node, self.revision)
        if self.leader is None:
            self.elect()

    def elect(self) -> None:
        """Nobody leads until enough of them have agreed on another."""
        self.leader = None
        self.elections += 1
        self.halt_leases()
        if self._has_majority:
            self.clock.call_later(self.random.uniform(*ELECTION_SECONDS), partial(self._elected, self.elections))

    def start(self) -> None:
        self.running = True
        if self.leader is not None:
            self.renew_leases()

    def restore(self, copy: Snapshot) -> None:
        super().restore(copy)
        for node in self.nodes:
            node.applied = self.revision
        if self.leader is None:
            self.halt_leases()

    # What clients see.

    def reaches_node(self, host: str, node: Node) -> bool:
        return self.reaches(host) and (host, node.number) not in self._parted

    def serves(self, node: Node) -> bool:
        """Whether it reaches a majority that has a leader."""
        return self.leader is not None and not node.is_cut_off

    def renew_at(self, node: Node, lease: int) -> bool:
        return self.has_lease(lease) if node.is_cut_off else self.renew(lease)

    def tell_watches(self) -> None:
        """Something has changed, or a watch has to look for another reason."""
        for node in self.nodes:
            if node.lag_seconds:
                self.clock.call_later(node.lag_seconds, partial(self._apply, node, self.revision))
                node.tell_watches()
            else:
                self._apply(node, self.revision)

    def _apply(self, node: Node, revision: int) -> None:
        if not node.is_cut_off:
            node.reach(min(revision, self.revision))

    def _notice(self, node: Node, cuts: int) -> None:
        if node.is_cut_off and node.cuts == cuts:
            node.is_alone, node.led = True, False
            node.breaks += 1
            node.tell_watches()

    @property
    def _has_majority(self) -> bool:
        return sum(not node.is_cut_off for node in self.nodes) > len(self.nodes) // 2

    def _elected(self, election: int) -> None:
        if election != self.elections or not self._has_majority:
            return
        self.leader = self.random.choice([node for node in self.nodes if not node.is_cut_off])
        if self.running:
            self.renew_leases(EXTENSION_SECONDS)


class QuorumClient(VirtualCoordination):
    """Asks one node after the other."""

    def __init__(self, store: CoordinationQuorum, host: str, clock: Clock, first: int) -> None:
        super().__init__(store, host, clock)
        self._quorum = store
        self._at = first % len(store.nodes)
        store.asked[host] = self._node
        self._lease_seconds: dict[int, float] = {}

    async def grant_lease(self, ttl_seconds: float) -> int:
        lease = await super().grant_lease(ttl_seconds)
        self._lease_seconds[lease] = ttl_seconds
        return lease

    async def keep_alive(self, lease: int) -> bool:
        seconds = self._lease_seconds.get(lease, DEADLINE_SECONDS) / RENEWAL_SHARE

        def renew(node: Node) -> bool:
            return self._quorum.renew_at(node, lease)

        return await self._call(renew, seconds, change=True, renewal=True)

    async def watch(self, prefix: str, from_revision: int) -> AsyncIterator[WatchResponse]:
        """Taken up at the next node when one fails, behind what was delivered."""
        store, following = self._quorum, from_revision
        while not self._closed:
            node = self._node
            breaks = store.breaks, node.breaks
            await self._wait(store.draw_delay())
            if node.is_alone or not store.reaches_node(self._host, node):
                await self._wait(PAUSE_SECONDS if node.is_alone else ATTEMPT_SECONDS)
                self._leave(node)
                continue
            if store.serves(node) and following > node.applied + 1:
                raise Behind(f"revision {following} is asked for, and node {node.number} knows {node.applied}")
            while not self._closed and self._node is node and breaks == (store.breaks, node.breaks):
                reached = store.reaches_node(self._host, node)
                response = store.changes(prefix, following, node.applied) if reached else None
                if response is None:
                    await self._told(node)
                    continue
                following = response.revision + 1
                await self._wait(store.draw_delay())
                yield response
            self._leave(node)
            await self._wait(PAUSE_SECONDS)

    @property
    def _node(self) -> Node:
        return self._quorum.nodes[self._at]

    def _leave(self, node: Node) -> None:
        """Ask the next one from now on, and watch there."""
        if self._node is node:
            self._at = (self._at + 1) % len(self._quorum.nodes)
            self._quorum.asked[self._host] = self._node
            self._wake()

    async def _ask(self, work: Callable[[], T], *, change: bool = False) -> T:
        made: list[T] = []

        def once(_: Node) -> T:
            if not made or not change:
                made[:] = [work()]
            return made[0]

        return await self._call(once, DEADLINE_SECONDS, change=change)

    async def _call(self, work: Callable[[Node], T], seconds: float, *, change: bool, renewal: bool = False) -> T:
        give_up, failures = self._clock.now() + seconds, 0
        while (left := give_up - self._clock.now()) > 0:
            if self._closed:
                raise CoordinationError("the connection to coordination is closed: the broker is stopping")
            node = self._node
            answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
            self._send(node, work, answer, change=change, renewal=renewal)
            attempt = min(ATTEMPT_SECONDS, seconds / 2, left)
            timer = self._clock.call_later(attempt, partial(settle, answer, NoAnswer(f"node {node.number} is silent")))
            try:
                return await answer
            except NoAnswer:
                self._leave(node)
            finally:
                timer.cancel()
            failures += 1
            if failures % len(self._quorum.nodes) == 0:
                await self._wait(PAUSE_SECONDS)
        raise silence(seconds, change)

    def _send(
        self, node: Node, work: Callable[[Node], T], answer: asyncio.Future[T], *, change: bool, renewal: bool
    ) -> None:
        store = self._quorum
        reaches = partial(store.reaches_node, self._host, node)

        def arrive() -> None:
            if not reaches():
                return
            if not store.serves(node) and not (renewal and node.led):
                if node.is_alone:
                    self._back(reaches, partial(settle, answer, NoAnswer(f"node {node.number} has no leader")))
                return
            try:
                back = partial(self._back, reaches, partial(settle, answer, None, work(node)))
            except CoordinationError as error:
                back = partial(self._back, reaches, partial(settle, answer, error))
            if change and store.random.random() < store.answers_lost:
                store.losses += 1
            elif renewal:
                back()
            else:
                node.once_applied(store.revision, back)

        store.clock.call_later(self._way_there(change), arrive)
