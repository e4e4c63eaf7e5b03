"""Share groups seen from outside: how far they are in each partition, what is in flight there, which records come next,
and where they begin. Consumer groups, and who is in a group of either kind: see `groups`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from headrace.client.admin.cluster import Cluster
from headrace.client.admin.fetch import offsets_at, read_batches
from headrace.client.admin.groups import fetch_share_starts
from headrace.client.connection.broker_connection import BrokerConnection
from headrace.client.consumer.group_protocol import TopicPartition, by_topic
from headrace.client.errors import check
from headrace.client.fetch_requests import EARLIEST, LATEST
from headrace.errors import ErrorCode, InvalidRequest
from headrace.queues.messages import DeliveryState, SharePartitionKey, StateBatch
from headrace.queues.persister import READS_PER_REQUEST, read_batch
from headrace.queues.state_records import NO_EPOCH, NO_LOAD, coordinator_key
from headrace.records import kernel
from headrace.records.record import Record
from headrace.wire import api as apis
from headrace.wire.message import Message

READ_AHEAD_RECORDS: Final = 100


@dataclass(frozen=True, slots=True)
class ShareProgress:
    """How far a share group is in one partition."""

    topic: str
    partition: int
    start: int | None
    """All below is done with. None: not decided yet."""
    end: int | None
    """Of the log; None if the topic is gone."""
    depth: int | None
    """Records that are not done with; as many offsets, where the broker does not count."""
    batches: tuple[StateBatch, ...] = ()
    """What is kept of offsets from the start on; behind them nothing was delivered."""

    @property
    def next_offset(self) -> int:
        """Behind all that were ever delivered."""
        return self.batches[-1].last_offset + 1 if self.batches else self.start or 0

    def in_state(self, state: DeliveryState) -> int:
        return sum(batch.record_count for batch in self.batches if batch.state is state)

    @property
    def deliveries_max(self) -> int:
        """How often a record was delivered that is not done with."""
        live = (DeliveryState.AVAILABLE, DeliveryState.ACQUIRED)
        return max([batch.delivery_count for batch in self.batches if batch.state in live], default=0)


@dataclass(frozen=True, slots=True)
class NextRecord:
    """One that a member may get now."""

    topic: str
    partition: int
    delivery_count: int
    """How often it was delivered before."""
    record: Record


@dataclass(frozen=True, slots=True)
class StartChange:
    topic: str
    partition: int
    start: int | None
    """As it is."""
    offset: int
    """As it is to be."""


def share_progress(cluster: Cluster, group_id: str, topics: Sequence[str] = ()) -> list[ShareProgress]:
    """Of all partitions that the group has a state of, or those of some topics."""
    starts = fetch_share_starts(cluster, group_id)
    wanted = {place: found for place, found in starts.items() if not topics or place[0] in topics}
    known = cluster.retry(lambda: cluster.topology(sorted({topic for topic, _ in wanted}))).topics
    there = [place for place in sorted(wanted) if place[0] in known and place[1] < len(known[place[0]].partitions)]
    states = _states(cluster, group_id, {place: known[place[0]].topic_id for place in there})
    ends: dict[TopicPartition, int] = {}
    for topic, numbers in by_topic(there).items():
        ends.update(((topic, number), end) for number, end in offsets_at(cluster, topic, numbers, LATEST).items())
    rows = []
    for place, (start, lag) in sorted(wanted.items()):
        end = ends.get(place)
        depth = lag
        if depth is None and end is not None and start is not None:
            depth = max(0, end - start)
        rows.append(ShareProgress(*place, start, end, depth, states.get(place, ())))
    return rows


def _states(
    cluster: Cluster, group_id: str, places: Mapping[TopicPartition, bytes]
) -> dict[TopicPartition, tuple[StateBatch, ...]]:
    """What share coordinators keep, by a look that fences nobody."""

    def ask() -> dict[TopicPartition, tuple[StateBatch, ...]]:
        by_broker: dict[BrokerConnection, list[TopicPartition]] = {}
        for place, topic_id in places.items():
            key = coordinator_key(SharePartitionKey(group_id, topic_id, place[1]))
            by_broker.setdefault(cluster.share_coordinator(key), []).append(place)
        found: dict[TopicPartition, tuple[StateBatch, ...]] = {}
        for broker, asked in by_broker.items():
            for at in range(0, len(asked), READS_PER_REQUEST):
                found |= _read(cluster, broker, group_id, places, asked[at : at + READS_PER_REQUEST])
        return found

    return cluster.retry(ask)


def _read(
    cluster: Cluster,
    broker: BrokerConnection,
    group_id: str,
    ids: Mapping[TopicPartition, bytes],
    places: Sequence[TopicPartition],
) -> dict[TopicPartition, tuple[StateBatch, ...]]:
    names = {ids[place]: place[0] for place in places}
    topics = [
        Message(
            topic_id=ids[topic, numbers[0]],
            partitions=[Message(partition=number, leader_epoch=NO_EPOCH, load_id=NO_LOAD) for number in numbers],
        )
        for topic, numbers in by_topic(places).items()
    ]
    answer = cluster.call(broker, apis.READ_SHARE_GROUP_STATE, Message(group_id=group_id, topics=topics))
    found: dict[TopicPartition, tuple[StateBatch, ...]] = {}
    for topic in answer.results:
        for row in topic.partitions:
            place = names[topic.topic_id], row.partition
            if row.error_code != ErrorCode.INVALID_REQUEST:  # else nothing is kept
                check(row.error_code, f"state of group {group_id!r} in {place[0]}-{place[1]}")
                batches = [read_batch(each) for each in row.state_batches]
                found[place] = tuple(sorted(batches, key=lambda batch: batch.first_offset))
    return found


def next_records(cluster: Cluster, progress: ShareProgress, now_ms: int) -> Iterator[NextRecord]:
    """What members of the group get next of a partition, in their order, without what waits for its time; nothing is
    acquired by that."""
    if progress.start is None or progress.end is None:
        return
    following = progress.start
    spans: list[tuple[int, int, int]] = []
    for batch in progress.batches:
        if batch.first_offset > following:
            spans.append((following, batch.first_offset, 0))
        if batch.state is DeliveryState.AVAILABLE and batch.until_ms <= now_ms:
            spans.append((batch.first_offset, batch.last_offset + 1, batch.delivery_count))
        following = batch.last_offset + 1
    spans.append((following, progress.end, 0))
    for first, end, count in spans:
        at = first
        while at < end:
            found = read_batches(cluster, progress.topic, progress.partition, at, min(READ_AHEAD_RECORDS, end - at))
            for _, view in found.batches:
                for record in kernel.records(view):
                    if at <= record.offset < found.next_offset:
                        yield NextRecord(progress.topic, progress.partition, count, record)
            if found.next_offset <= at:
                break
            at = found.next_offset


def plan_starts(
    cluster: Cluster,
    group_id: str,
    *,
    moment: int | None = None,
    offset: int | None = None,
    topics: Sequence[str] = (),
    partitions: Sequence[int] = (),
) -> list[StartChange]:
    """What `alter_starts` is to be given, so that a share group begins at a moment (EARLIEST, LATEST or a time in ms),
    or at an offset, or as near to it as the log reaches: in these topics, else in all that it has read."""
    starts = {place: start for place, (start, _) in fetch_share_starts(cluster, group_id).items()}
    wanted = topics or tuple(sorted({topic for topic, _ in starts}))
    if not wanted:
        raise InvalidRequest(f"share group {group_id!r} has read nothing; say which topics it shall read (--topic)")
    changes: list[StartChange] = []
    for topic in wanted:
        numbers = [cluster.partition(topic, number).index for number in partitions] or [
            partition.index for partition in cluster.topic(topic).partitions
        ]
        if moment is not None:
            goals = offsets_at(cluster, topic, numbers, moment)
        else:
            assert offset is not None
            first, last = (offsets_at(cluster, topic, numbers, at) for at in (EARLIEST, LATEST))
            goals = {number: min(max(offset, first[number]), last[number]) for number in numbers}
        changes += [StartChange(topic, number, starts.get((topic, number)), goals[number]) for number in numbers]
    return changes


def alter_starts(cluster: Cluster, group_id: str, changes: Sequence[StartChange]) -> None:
    """Let a share group without members begin there: what it has done with records behind that counts no more."""
    offsets = {(change.topic, change.partition): change.offset for change in changes}
    topics = [
        Message(
            topic_name=topic,
            partitions=[Message(partition_index=n, start_offset=offsets[topic, n]) for n in numbers],
        )
        for topic, numbers in by_topic(offsets).items()
    ]
    request = Message(group_id=group_id, topics=topics)

    def ask() -> None:
        answer = cluster.call(cluster.coordinator(group_id), apis.ALTER_SHARE_GROUP_OFFSETS, request)
        check(answer.error_code, f"starts of share group {group_id!r}")
        for topic in answer.responses:
            for row in topic.partitions:
                where = f"{topic.topic_name}-{row.partition_index}"
                check(row.error_code, f"start of share group {group_id!r} in {where}")

    cluster.retry(ask)
