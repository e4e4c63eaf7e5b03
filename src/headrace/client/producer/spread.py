"""Where records without a key go: one partition until its batch is full or sent, then on to the next good one.

Partitions without a leader, and those led by brokers to be avoided, are passed over, as long as others are left. What
waits for a partition whose broker fails goes to another one, if its log cannot have it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING

from headrace.client.producer.requests import load_of

if TYPE_CHECKING:
    from headrace.client.producer.sender import Sender
    from headrace.client.producer.track import Track


def next_partition(current: int, count: int, leader: Callable[[int], int | None], avoided: Collection[int]) -> int:
    """The next partition after `current` of `count`; `leader` gives a partition's broker id."""
    led: int | None = None
    for step in range(1, count + 1):
        partition = (current + step) % count
        broker_id = leader(partition)
        if broker_id is None:
            continue
        if broker_id not in avoided:
            return partition
        led = partition if led is None else led
    return (current + 1) % count if led is None else led


def move_away(sender: Sender, track: Track, failing: frozenset[int]) -> None:
    """Give what may go anywhere, and is not in this log, to a partition whose broker answers."""
    tracks = track.desk.tracks(track.topic)
    leader = partial(sender.network.routes.leader, track.topic)
    if not tracks:
        return
    target = next_partition(track.partition, len(tracks), leader, sender.avoided())
    if leader(target) is None or leader(target) in failing:
        return
    if track.due and track.load is not None and not track.load.batch.pinned:
        sender.seal(track)
    for parcel in [parcel for parcel in track.lane.waiting if parcel.movable]:
        if track.lane.release(parcel):
            load = load_of(parcel)
            load.track = tracks[target]
            load.batch.sent.partition = target
            tracks[target].lane.add(parcel)
            sender.count.moved += 1
            sender.make_ready(tracks[target])
