"""What a query reads: topics found, bounds turned into offsets, and the whole cut into splits of about equal size.

A split is a range of offsets of one partition, read by one task. A partition is cut where its size or the options ask
for it; a batch that lies across a cut is fetched by both sides and each takes its own offsets.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import InputPartition

from headrace.client.admin.cluster import Cluster
from headrace.client.admin.fetch import list_offsets
from headrace.client.admin.operations import describe_log_folders
from headrace.client.errors import UnknownTopic
from headrace.client.fetch_requests import EARLIEST, LATEST
from headrace.errors import HeadraceError, SettingError
from headrace.records.isolation import Isolation
from headrace.spark.options import Bound, Topics

if TYPE_CHECKING:
    from headrace.spark.history import Past

Place = tuple[str, int]
"""Topic and partition."""

SPLIT_MAX_BYTES: Final = 128 << 20
SPLIT_MIN_BYTES: Final = 8 << 20
SMALL_READ_OFFSETS: Final = 500
"""Fewer are one split of each partition, whatever their size: a stream with little to read asks nobody."""
UNKNOWN_RECORD_BYTES: Final = 100


@dataclass(frozen=True)
class Split(InputPartition):
    """Offsets of one partition from `first_offset` up to but not `next_offset`."""

    topic: str
    partition: int
    first_offset: int
    next_offset: int
    topic_id: str


@dataclass(frozen=True, slots=True)
class TopicsFound:
    """Topics that are read: their ids in hex, and the partitions in order."""

    ids: dict[str, str]
    places: tuple[Place, ...]


def find(cluster: Cluster, topics: Topics, *, missing_ok: bool = False) -> TopicsFound:
    """The topics and partitions that there are now. A topic that was named and is missing is an error, or left out."""
    names = topics.names or tuple(dict.fromkeys(topic for topic, _ in topics.assigned))
    topology = cluster.retry(lambda: cluster.topology(names or None))
    for name in names:
        if name not in topology.topics and not missing_ok:
            raise UnknownTopic(name)
    if topics.pattern:
        wanted = re.compile(topics.pattern)
        chosen = {n: t for n, t in topology.topics.items() if wanted.fullmatch(n) and not t.is_internal}
    else:
        chosen = {name: topology.topics[name] for name in names if name in topology.topics}
    places = [(name, p.index) for name, topic in chosen.items() for p in topic.partitions]
    if topics.assigned:
        for name, number in topics.assigned:
            if name in chosen and (name, number) not in places:
                raise UnknownTopic(name, number, len(chosen[name].partitions))
        places = [place for place in places if place in topics.assigned]
    return TopicsFound({name: topic.topic_id.hex() for name, topic in sorted(chosen.items())}, tuple(sorted(places)))


def ends_of(
    cluster: Cluster, places: Iterable[Place], which: int, isolation: Isolation | None = None
) -> dict[Place, int]:
    """The first (EARLIEST) or next (LATEST) offset of each partition, in the isolation of the query, or this one."""
    found: dict[Place, int] = {}
    for topic, partitions in by_topic(places).items():
        asked = dict.fromkeys(partitions, which)
        for partition, timed in list_offsets(cluster, topic, asked, isolation=isolation).items():
            found[topic, partition] = timed.offset
    return found


def by_topic(places: Iterable[Place]) -> dict[str, list[int]]:
    topics: dict[str, list[int]] = {}
    for topic, partition in places:
        topics.setdefault(topic, []).append(partition)
    return topics


def resolve(
    cluster: Cluster,
    bound: Bound,
    places: Iterable[Place],
    option: str,
    *,
    late: str = "latest",
    past: Past | None = None,
) -> dict[Place, int]:
    """Offsets for a bound. Offsets given one by one have to name every partition, and no other."""
    places = tuple(places)
    if bound.offset is not None:
        floors = past.floors() if past is not None and bound.offset == EARLIEST else None
        return ends_of(cluster, places, bound.offset) if floors is None else {place: floors[place] for place in places}
    if bound.time_ms is not None:
        return _at_times(cluster, dict.fromkeys(places, bound.time_ms), f"{option}Timestamp", late, past)
    given = bound.times_ms if bound.times_ms is not None else bound.offsets
    assert given is not None
    name = f"{option}OffsetsByTimestamp" if bound.times_ms is not None else f"{option}Offsets"
    flat = {(topic, number): value for topic, numbers in given.items() for number, value in numbers.items()}
    _check_same(set(flat), set(places), name)
    if bound.times_ms is not None:
        return _at_times(cluster, flat, name, late, past)
    return _checked(cluster, flat, name, past)


def first_at(cluster: Cluster, times_ms: Mapping[Place, int], past: Past | None = None) -> dict[Place, int | None]:
    """The offset of the first record not before a time, None where there is no such record."""
    archived = {place: past.first_at(place, at_ms) for place, at_ms in times_ms.items()} if past is not None else {}
    rest = {
        place: at_ms
        for place, at_ms in times_ms.items()
        if archived.get(place) is None or (past is not None and past.began_late(place))
    }
    found = dict(archived)
    for topic, numbers in by_topic(rest).items():
        for number, timed in list_offsets(cluster, topic, {n: rest[topic, n] for n in numbers}).items():
            known = archived.get((topic, number))
            live = None if timed.offset < 0 else timed.offset
            found[topic, number] = live if known is None else known if live is None else min(known, live)
    return found


def _at_times(
    cluster: Cluster, times_ms: Mapping[Place, int], name: str, late: str, past: Past | None
) -> dict[Place, int]:
    found = first_at(cluster, times_ms, past)
    after_all = [place for place, offset in found.items() if offset is None]
    if after_all and late == "error":
        topic, number = min(after_all)
        raise SettingError(
            f"option {name}: {topic}-{number} has no record at or after {times_ms[topic, number]} ms; "
            "give an earlier time, or startingOffsetsByTimestampStrategy=latest"
        )
    ends = ends_of(cluster, after_all, LATEST)
    return {place: ends[place] if offset is None else offset for place, offset in found.items()}


def _check_same(given: set[Place], there: set[Place], name: str) -> None:
    for some, told in ((there - given, "does not name"), (given - there, "names")):
        if some:
            topic, partition = min(some)
            also = "; name every partition that is read" if told == "does not name" else ", which is not read"
            raise SettingError(f"option {name} {told} partition {partition} of topic {topic!r}{also}")


def _checked(cluster: Cluster, given: Mapping[Place, int], name: str, past: Past | None) -> dict[Place, int]:
    starts = ends_of(cluster, given, EARLIEST) if past is None else past.floors()
    ends = ends_of(cluster, given, LATEST)
    words = {EARLIEST: starts, LATEST: ends}
    found = {place: words[offset][place] if offset in words else offset for place, offset in given.items()}
    for (topic, partition), offset in found.items():
        if offset > ends[topic, partition]:
            raise SettingError(
                f"option {name} gives {offset} for {topic}-{partition}, which reaches from {starts[topic, partition]} "
                f"to {ends[topic, partition]}"
            )
    return found


def cut_all(
    cluster: Cluster,
    ids: Mapping[str, str],
    spans: Iterable[Mapping[Place, tuple[int, int]]],
    *,
    min_partitions: int | None,
    max_records: int | None,
) -> list[Split]:
    """Of several lists of spans, where a partition may be in each."""
    how = {"min_partitions": min_partitions, "max_records": max_records}
    return [split for each in spans for split in cut(cluster, ids, each, **how)]


def cut(
    cluster: Cluster,
    ids: Mapping[str, str],
    spans: Mapping[Place, tuple[int, int]],
    *,
    min_partitions: int | None,
    max_records: int | None,
) -> list[Split]:
    """Splits that together are the spans, in order; empty spans have none."""
    spans = {place: span for place, span in sorted(spans.items()) if span[1] > span[0]}
    total = sum(end - start for start, end in spans.values())
    if not total:
        return []
    counts = dict.fromkeys(spans, 1)
    if min_partitions is not None:
        if min_partitions > len(spans):
            counts = {
                place: max(1, -(-(end - start) * min_partitions // total)) for place, (start, end) in spans.items()
            }
    elif total > SMALL_READ_OFFSETS:
        sizes = _sizes(cluster, spans)
        aim = max(SPLIT_MIN_BYTES, min(SPLIT_MAX_BYTES, sum(sizes.values()) // (2 * max(4, os.cpu_count() or 1))))
        counts = {place: max(1, round(sizes[place] / aim)) for place in spans}
    splits = []
    for (topic, partition), (start, end) in spans.items():
        count = counts[topic, partition]
        if max_records is not None:
            count = max(count, -(-(end - start) // max_records))
        count = min(count, end - start)
        cuts = [start + (end - start) * nth // count for nth in range(count + 1)]
        splits += [Split(topic, partition, a, b, ids[topic]) for a, b in pairwise(cuts)]
    return splits


def record_bytes(
    cluster: Cluster, log_starts: Mapping[Place, int], log_ends: Mapping[Place, int]
) -> dict[Place, float]:
    """About how many bytes a record takes on disk, in each partition; 0 where nobody says."""
    try:
        stored = {
            (s.topic, s.partition): s.size_bytes for s in describe_log_folders(cluster, list(by_topic(log_starts)))
        }
    except HeadraceError:
        stored = {}
    return {
        place: stored.get(place, 0) / max(1, log_ends.get(place, start) - start) for place, start in log_starts.items()
    }


def _sizes(cluster: Cluster, spans: Mapping[Place, tuple[int, int]]) -> dict[Place, int]:
    """About how many bytes each span has: its share of what its partition takes on disk (if that is little, all)."""
    try:
        stored = {(s.topic, s.partition): s.size_bytes for s in describe_log_folders(cluster, list(by_topic(spans)))}
        if sum(stored.get(place, 0) for place in spans) <= SPLIT_MIN_BYTES:
            return {place: stored.get(place, 0) for place in spans}
        starts, ends = ends_of(cluster, spans, EARLIEST), ends_of(cluster, spans, LATEST)
    except HeadraceError:
        return {place: (end - start) * UNKNOWN_RECORD_BYTES for place, (start, end) in spans.items()}
    return {
        place: stored.get(place, 0) * (end - start) // max(1, ends[place] - starts[place])
        for place, (start, end) in spans.items()
    }
