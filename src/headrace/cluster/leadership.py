"""New leader epochs: raised at every change of leader, and at every return of one that may have lost its tail.

A leader that comes back after a crash may have lost what only its page cache held. The next epoch lets a consumer that
had read further see it (KIP-320), and lets replicas find where they part.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from headrace.cluster import keys
from headrace.cluster.image import Image, encode_partition
from headrace.cluster.tasks import Plan, Step, unchanged
from headrace.ports.coordination import Compare, Put

PARTITIONS_A_STEP: Final = 60


def plan_new_epochs(image: Image, broker: int) -> Plan:
    """Raise the epoch of every partition that this broker leads."""
    changes: list[tuple[Compare, Put]] = []
    for topic in image.topics.values():
        for state in topic.partitions:
            if state.leader == broker:
                key = keys.partition_key(image.prefix, topic.name, state.index)
                raised = replace(state, leader_epoch=state.leader_epoch + 1)
                changes.append((unchanged(key, state.revision), Put(key, encode_partition(topic.id, raised))))
    parts = [changes[first : first + PARTITIONS_A_STEP] for first in range(0, len(changes), PARTITIONS_A_STEP)]
    return Plan(tuple(Step(tuple(c for c, _ in part), tuple(p for _, p in part)) for part in parts))
