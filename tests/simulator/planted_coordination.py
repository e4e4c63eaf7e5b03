"""Bugs that a client of several coordination nodes, or who relies on one, can have: see `planted`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from typing import Any

from headrace.cluster.isr_writer import IsrWriter
from headrace.errors import CoordinationError
from headrace.ports.coordination import KeyValue, Listing, WatchResponse
from headrace.virtual.coordination import DEADLINE_SECONDS, CoordinationStore
from headrace.virtual.quorum import CoordinationQuorum, Node, QuorumClient
from simulator.planted import found_by, plant, swap


@plant
def skip_what_came_while_a_watch_moved(stack: ExitStack) -> None:
    """A watch that goes on at another node begins with what comes next there, not behind what it delivered."""
    watch = QuorumClient.watch

    async def watched(self: QuorumClient, prefix: str, from_revision: int) -> AsyncIterator[WatchResponse]:
        at = self._at
        async for response in watch(self, prefix, from_revision):
            moved, at = self._at != at, self._at
            if not moved:
                yield response

    swap(stack, QuorumClient, "watch", watched)


@plant
def read_what_one_node_knows(stack: ExitStack) -> None:
    """Reads are answered by the node that is asked, without a question to the others: they may be old."""
    change = CoordinationStore.change

    def copies(store: CoordinationStore) -> dict[int, dict[str, KeyValue]]:
        found: dict[int, dict[str, KeyValue]] = store.__dict__.setdefault(
            "copies", {store.revision: dict(store.table.keys)}
        )
        return found

    def kept(self: CoordinationStore, compares: Sequence[Any], actions: Sequence[Any]) -> Any:
        known = copies(self)
        result = change(self, compares, actions)
        known[self.revision] = dict(self.table.keys)
        return result

    async def list_at(self: QuorumClient, prefix: str) -> Listing:
        def known(node: Node) -> Listing:
            keys = copies(self._store)[node.applied]
            return Listing(tuple(keys[key] for key in sorted(keys) if key.startswith(prefix)), node.applied)

        return await self._call(known, DEADLINE_SECONDS, change=False, renewal=True)

    async def get_at(self: QuorumClient, key: str) -> KeyValue | None:
        def known(node: Node) -> KeyValue | None:
            return copies(self._store)[node.applied].get(key)

        return await self._call(known, DEADLINE_SECONDS, change=False, renewal=True)

    swap(stack, CoordinationQuorum, "change", kept)
    swap(stack, QuorumClient, "list", list_at)
    swap(stack, QuorumClient, "get", get_at)


@found_by("tests/cluster/test_isr_writer.py")
@plant
def judge_a_lost_answer_by_the_view(stack: ExitStack) -> None:
    """A change of an in-sync set whose answer was lost counts as not made, because the view does not show it yet."""
    carry_out = IsrWriter._carry_out

    async def judged(self: IsrWriter, proposals: Sequence[Any]) -> None:
        try:
            await carry_out(self, proposals)
        except CoordinationError:
            for proposal in self._proposals():
                self._refused(proposal)
            raise

    swap(stack, IsrWriter, "_carry_out", judged)
