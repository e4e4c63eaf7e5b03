"""What befalls single nodes of coordination, where it has several (`virtual.quorum`)."""

from __future__ import annotations

from functools import partial
from typing import Final

from headrace.simulator.harm import Harm
from headrace.virtual.quorum import CoordinationQuorum

SLOW_NODE: Final = "slow node"
CUT_OFF_NODE: Final = "cut off node"
PART_FROM_NODE: Final = "part from node"
ELECT_NODE: Final = "elect node"
NODE_FAULTS: Final = (SLOW_NODE, CUT_OFF_NODE, PART_FROM_NODE, ELECT_NODE)
LAGS_SECONDS: Final = (0.05, 0.5, 3.0)


def strike(kind: str, harm: Harm, seconds: float) -> str | None:
    """Answers whom it struck, None if nobody."""
    store, chance = harm.store, harm.random
    assert isinstance(store, CoordinationQuorum)
    node = chance.choice(store.nodes)
    name = f"node {node.number}"
    match kind:
        case "slow node":
            if node.lag_seconds:
                return None
            store.slow(node, chance.choice(LAGS_SECONDS))
            harm.until(seconds, partial(store.hasten, node))
            return f"{name} by {node.lag_seconds:g} s"
        case "cut off node":
            if node.is_cut_off:
                return None
            store.cut_off(node)
            harm.until(seconds, partial(store.heal_node, node))
            return name
        case "part from node":
            machine = harm.some_machine()
            asked = store.asked[machine.name]
            store.part(machine.name, asked)
            harm.until(seconds, partial(store.join, machine.name, asked))
            return f"{machine.name} from {asked.number}"
        case _:
            if store.leader is None:
                return None
            store.elect()
            return ""
