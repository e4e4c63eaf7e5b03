"""How far a streaming query is: as Spark's checkpoint keeps it, and as a consumer group for people to see.

An offset in the checkpoint is that of Spark's Kafka source, with more beside it under names that no topic can bear:

    {"orders": {"0": 42, "1": 17}, "topic ids": {"orders": "6f1c..."}, "lost offsets": {"orders": {"1": 3}}}

Topic ids tell a topic that was deleted and created again. Lost offsets count what was deleted before it was read, since
the query began; they are there only if there are any. A checkpoint of Spark's Kafka source, which has neither, is taken
as it is. Nothing is read back from the consumer group: if a commit is lost, the next one makes up for it.

Spark (4.3) asks a source in Python for no metrics: those in its progress reports are empty. What it does ask for, and
shows as `latestOffset`, is where the topics end. So that has more than the ends, under names as above; it is in no
checkpoint. `headrace.spark.query_metrics` reads it:

    {"orders": {"0": 45, "1": 17}, "topic ids": {...}, "consumer group": {"id": "...", "bootstrap": "..."},
     "offsets behind": {"orders": {"0": 3, "1": 0}}, "batch offsets": {"orders": {"0": 42, "1": 0}},
     "batch bytes": {"orders": {"0": 4200, "1": 0}}}
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from headrace.client.admin.cluster import Cluster
from headrace.client.admin.groups import SPARK_QUERY, commit_offsets, fetch_commits
from headrace.errors import HeadraceError
from headrace.spark.connections import cluster_at
from headrace.spark.options import DEFAULT_TIMEOUT_MS, Topics
from headrace.spark.plan import Place, TopicsFound

log = logging.getLogger(__name__)

TOPIC_IDS: Final = "topic ids"
LOST: Final = "lost offsets"
GROUP: Final = "consumer group"
BEHIND: Final = "offsets behind"
BATCH_OFFSETS: Final = "batch offsets"
BATCH_BYTES: Final = "batch bytes"

StreamOffset = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Position:
    """The next offset of every partition, the ids of their topics, and what was lost so far."""

    offsets: dict[Place, int]
    ids: dict[str, str] = field(default_factory=dict)
    lost: dict[Place, int] = field(default_factory=dict)

    def to_json(self) -> StreamOffset:
        """Sorted, since Spark compares offsets as text."""
        found: StreamOffset = dict(nested(self.offsets))
        found[TOPIC_IDS] = {topic: self.ids[topic] for topic in sorted(found) if topic in self.ids}
        if self.lost:
            found[LOST] = nested(self.lost)
        return found

    @classmethod
    def from_json(cls, offset: StreamOffset | str) -> Position:
        """From what Spark hands to a reader, or the text in a query's progress."""
        parsed: StreamOffset = dict(json.loads(offset) if isinstance(offset, str) else offset)
        offsets = {topic: numbers for topic, numbers in parsed.items() if " " not in topic}
        return cls(flat(offsets), parsed.get(TOPIC_IDS, {}), flat(parsed.get(LOST, {})))

    def still_there(self, found: TopicsFound) -> dict[Place, int]:
        """Its offsets, without those of topics that were deleted or made anew."""
        return {
            place: at
            for place, at in self.offsets.items()
            if place in found.places and self.ids.get(place[0], "") in ("", found.ids[place[0]])
        }


def ends_report(
    ends: Position,
    begin: Position,
    reached: Position,
    record_bytes: Mapping[Place, float],
    group_id: str,
    bootstrap: str,
) -> StreamOffset:
    """Where topics end, and what else is told of a batch from `begin` up to `reached`."""
    taken = {place: max(0, at - begin.offsets.get(place, at)) for place, at in reached.offsets.items()}
    sizes = {place: round(count * record_bytes.get(place, 0)) for place, count in taken.items()}
    behind = {place: max(0, end - reached.offsets.get(place, 0)) for place, end in ends.offsets.items()}
    told: StreamOffset = {GROUP: {"id": group_id, "bootstrap": bootstrap}}
    return ends.to_json() | told | {BEHIND: nested(behind), BATCH_OFFSETS: nested(taken), BATCH_BYTES: nested(sizes)}


def nested(numbers: Mapping[Place, int]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for (topic, partition), number in sorted(numbers.items()):
        found.setdefault(topic, {})[str(partition)] = number
    return found


def flat(nested: Mapping[str, Mapping[str, int]]) -> dict[Place, int]:
    return {(topic, int(number)): at for topic, numbers in nested.items() for number, at in numbers.items()}


def default_group_id(topics: Topics, prefix: str = "") -> str:
    """The same after every restart of a query. Queries of the same topics share it unless they set `kafka.group.id`."""
    digest = hashlib.blake2b(topics.describe().encode(), digest_size=6).hexdigest()
    return f"{prefix or 'spark-headrace'}-{digest}"


def commit(cluster: Cluster, group_id: str, offsets: Mapping[Place, int], query: str = "") -> bool:
    """Tell the broker how far a query is. No query fails for want of it: what went wrong is said in the log.

    Who does not know which query it is keeps what is written of that, and what is told already.
    """
    try:
        if not offsets:
            return True
        if not query:
            there = fetch_commits(cluster, group_id, offsets)
            if all(place in there and there[place].offset == at for place, at in offsets.items()):
                return True
            authors = {known.metadata for known in there.values()}
            query = authors.pop() if len(authors) == 1 else ""
        commit_offsets(cluster, group_id, offsets, metadata=query if query.startswith(SPARK_QUERY) else "")
    except HeadraceError as error:
        log.warning("headrace: progress of group %s was not committed: %s", group_id, error)
        return False
    return True


def commit_last(query: Any, bootstrap: str, group_id: str, *, timeout_ms: int = DEFAULT_TIMEOUT_MS) -> bool:
    """Commit what a query that has ended had read and written by its last complete batch; False if it could not be.

    `query` is a StreamingQuery or one progress of it. Sessions of `headrace.spark.start` do this after every batch; in
    others a query does it itself, one batch behind.
    """
    progress = getattr(query, "lastProgress", query)
    if progress is None:
        return False
    offsets: dict[Place, int] = {}
    for source in progress["sources"]:
        end = source["endOffset"]
        text = end if isinstance(end, str | dict) else json.dumps(end)
        offsets |= Position.from_json(text).offsets if text else {}
    try:
        with cluster_at(bootstrap, timeout_ms) as cluster:
            return commit(cluster, group_id, offsets)
    except HeadraceError:
        return False
