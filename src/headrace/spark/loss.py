"""What a query was to read and is gone: deleted before it was read, cut off, or gone with its topic.

It is never passed over in silence. With `failOnDataLoss` the query fails and says topic, partition, offsets. Without,
the same is said in the log, counted in the offsets that Spark keeps and shows, and the query goes on behind the gap;
only what goes while a task reads it is not counted, but said in the log of that task.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from headrace.errors import HeadraceError
from headrace.spark.plan import Place, TopicsFound
from headrace.spark.progress import Position

log = logging.getLogger(__name__)


class DataLoss(HeadraceError):
    """Records that a query was to read are not there any more."""


def report(told: Sequence[str], *, fail: bool) -> None:
    """Fail with what is lost, or log it: Spark passes on what its Python workers say on standard error."""
    if told and fail:
        raise DataLoss(
            f"{'; '.join(told)}. To go on without, set option failOnDataLoss to false (pipeline archive: --accept-loss)"
        )
    for line in told:
        log.warning("headrace: data loss: %s", line)


def deleted(place: Place, first: int, end: int, log_start: int) -> str:
    """What is gone of the offsets from `first` up to but not `end`, since the log begins at `log_start`."""
    return (
        f"{place[0]}-{place[1]}: offsets {first} to {min(end, log_start) - 1} were deleted before they were read; "
        f"the log begins at {log_start}"
    )


def settle(
    before: Position, found: TopicsFound, log_starts: Mapping[Place, int], ends: Mapping[Place, int], *, fail: bool
) -> Position:
    """Where the next batch begins in every partition of `log_starts`, with what is lost reported and counted.

    Partitions that the query has not seen before, and those of a topic that was made anew, begin at their log's start.
    """
    told = []
    for topic in sorted({topic for topic, _ in before.offsets}):
        was = {number: at for (name, number), at in sorted(before.offsets.items()) if name == topic}
        if topic not in found.ids:
            told.append(f"topic {topic!r} was deleted; the query was at offsets {was}")
        elif before.ids.get(topic, found.ids[topic]) != found.ids[topic]:
            told.append(
                f"topic {topic!r} was deleted and created again (id {before.ids[topic]}, now {found.ids[topic]}); "
                f"the query was at offsets {was} of the old one"
            )
    offsets: dict[Place, int] = {}
    lost = {place: count for place, count in before.lost.items() if place[0] in found.ids}
    for place, log_start in sorted(log_starts.items()):
        at = _begin(before, found.ids, place)
        if at > ends[place]:
            told.append(
                f"{place[0]}-{place[1]}: the log ends at offset {ends[place]}, before {at} where the query was; "
                "it was cut off"
            )
            at = ends[place]
        elif at < log_start:
            told.append(deleted(place, at, log_start, log_start))
            lost[place] = lost.get(place, 0) + log_start - at
            at = log_start
        offsets[place] = at
    report(told, fail=fail)
    return Position(offsets, found.ids, lost)


def moved(before: Position, after: Position) -> list[Place]:
    """Partitions of which there may be something to read. A topic made anew may by chance end where the old one did."""
    return [
        place
        for place, at in after.offsets.items()
        if at != before.offsets.get(place) or after.ids.get(place[0]) != before.ids.get(place[0])
    ]


def spans(
    before: Position, after: Position, found: TopicsFound, log_starts: Mapping[Place, int], *, fail: bool
) -> dict[Place, tuple[int, int]]:
    """What a batch reads of every partition. What was lost when it was planned is in its offsets and not told again."""
    told = []
    chosen: dict[Place, tuple[int, int]] = {}
    for place, end in sorted(after.offsets.items()):
        topic = place[0]
        at = _begin(before, after.ids, place) + after.lost.get(place, 0) - before.lost.get(place, 0)
        if end <= at:
            continue
        if place not in log_starts or after.ids.get(topic, found.ids[topic]) != found.ids[topic]:
            how = "created again" if place in log_starts else "deleted"
            told.append(f"{topic}-{place[1]}: offsets {at} to {end - 1} are gone; topic {topic!r} was {how}")
            continue
        if at < log_starts[place]:
            told.append(deleted(place, at, end, log_starts[place]))
            at = log_starts[place]
        chosen[place] = (at, end)
    report(told, fail=fail)
    return chosen


def _begin(before: Position, ids: Mapping[str, str], place: Place) -> int:
    """The next offset of a partition, 0 if the query has not read that topic of that id before."""
    topic = place[0]
    same = before.ids.get(topic, ids.get(topic)) == ids.get(topic, before.ids.get(topic))
    return before.offsets.get(place, 0) if same else 0
