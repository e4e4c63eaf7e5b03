"""Which members of an in-sync set still hold what they held. Pure.

A member is one incarnation of a broker. Another incarnation of it holds the same only if nothing can have been lost in
between: it stopped in order, or the topic counts only what is synced (`disk`), or the topic counts what is in the page
cache (`os`) and the kernel has not been booted since. And only if it does not say itself that this log holds less than
it did. Where the durability of a topic was altered, what a run took before it, or its leader, heard of that was counted
as the durability before has it: such a run is taken for one that counted page caches. A run that began with the altered
setting is a member only of leaders that know it too: they compare its registration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headrace.cluster.image import LIVE, Broker, PartitionState


@dataclass(frozen=True, slots=True)
class Eligibility:
    """The members, each present, awaited, gone or lost, in the order of the set; some of the present ones are returned
    or leaving."""

    present: Mapping[int, str]
    """Registered, and hold what they held: with the incarnation that they are registered with."""
    returned: frozenset[int]
    """Those of them whose incarnation is a new one."""
    awaited: tuple[int, ...]
    """Not registered, but perhaps only late."""
    gone: tuple[int, ...]
    lost: tuple[int, ...]
    """Registered, and may have lost something."""
    leaving: frozenset[int]
    """Those of the present ones that are about to stop."""

    @property
    def staying(self) -> frozenset[int]:
        return frozenset(self.present) - self.leaving

    def members(self, state: PartitionState) -> dict[int, str]:
        """The set as it should be. The last member is never dropped, whether it is gone or has lost something: only an
        election outside the set may go past it (KIP-966).
        """
        known = {broker: state.incarnations.get(broker, "") for broker in state.isr}
        if self.present:
            kept = {**self.present, **{broker: known[broker] for broker in self.awaited}}
            if self.staying:
                kept = {broker: drawn for broker, drawn in kept.items() if broker not in self.leaving}
        else:
            kept = {broker: known[broker] for broker in (*self.awaited, *self.gone)} or known
        return {broker: kept[broker] for broker in state.isr if broker in kept}


def judge(
    topic_id: bytes,
    state: PartitionState,
    brokers: Mapping[int, Broker],
    durability: str,
    is_gone: Callable[[int], bool],
    altered_at: int = 0,
) -> Eligibility:
    """`altered_at`: the revision at which the durability became what it is; 0 if it was never another."""
    present: dict[int, str] = {}
    returned: set[int] = set()
    awaited: list[int] = []
    gone: list[int] = []
    lost: list[int] = []
    for member in state.isr:
        broker = brokers.get(member)
        known = state.incarnations.get(member, "")
        if broker is None:
            (gone if is_gone(member) else awaited).append(member)
        elif broker.incarnation == known:
            present[member] = known
        elif carries_over(broker, known, durability, (topic_id, state.index), altered_at):
            present[member] = broker.incarnation
            returned.add(member)
        else:
            lost.append(member)
    leaving = frozenset(member for member in present if brokers[member].state != LIVE)
    return Eligibility(present, frozenset(returned), tuple(awaited), tuple(gone), tuple(lost), leaving)


def carries_over(broker: Broker, known: str, durability: str, key: tuple[bytes, int], altered_at: int) -> bool:
    """Whether this process of the broker holds all of a partition that its incarnation `known` held."""
    previous = broker.previous
    if previous is None or not known or previous.incarnation != known or key in previous.lost:
        return False
    same_boot = previous.boot == broker.boot != ""
    if durability == "disk" and previous.began < altered_at:
        durability = "os"
    return previous.clean or durability == "disk" or (durability == "os" and same_boot)
