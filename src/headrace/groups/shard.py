"""The groups and offsets in one partition of `__consumer_offsets`, and how they are read back from its records."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from headrace.coordinators.record_fields import Record
from headrace.coordinators.state_log import ProducerEpoch
from headrace.groups.consumer_group import ConsumerGroup
from headrace.groups.consumer_records import ConsumerGroupKey, GroupPieces, RecordKind
from headrace.groups.consumer_records import decode_key as decode_consumer_key
from headrace.groups.group import Group, Moment
from headrace.groups.limits import GroupLimits
from headrace.groups.offsets import OffsetCache, TopicId
from headrace.groups.records import (
    GroupKey,
    GroupSnapshot,
    OffsetKey,
    decode_group,
    decode_key,
    decode_offset,
    encode_offset,
    encode_offset_key,
)
from headrace.groups.share_group import ShareGroup
from headrace.groups.share_records import SharePieces

AnyGroup = Group | ConsumerGroup | ShareGroup
Restored = Callable[[str, GroupPieces], ConsumerGroup | ShareGroup]


class Shard:
    """`loading` until all records were replayed; `gone` once this broker does not lead the partition in this epoch any
    more."""

    def __init__(self, partition: int, epoch: int) -> None:
        self.partition = partition
        self.epoch = epoch
        self.groups: dict[str, AnyGroup] = {}
        self.offsets = OffsetCache()
        self.loading = True
        self.gone = False
        self._snapshots: dict[str, GroupSnapshot] = {}
        self._pieces: dict[str, GroupPieces] = {}
        self._shared: dict[str, SharePieces] = {}

    def replay(self, records: Iterable[Record], producer: ProducerEpoch | None = None) -> None:
        """Take records in the order of the log, perhaps of a producer's transaction; those of a kind that is not ours
        to know say nothing to us. Taking the same ones again changes nothing. CorruptBatch for one that cannot be read.
        """
        for key, value in records:
            if producer is None:
                self._replay_one(key, value)
            elif value is not None and isinstance(offset_key := decode_key(key), OffsetKey):
                self.offsets.transactional.put(producer, offset_key, decode_offset(value))

    def _replay_one(self, key: bytes, value: bytes | None) -> None:
        match decode_key(key):
            case OffsetKey() as offset_key:
                if value is None:
                    self.offsets.drop(offset_key)
                else:
                    self.offsets.put(offset_key.group, offset_key.topic, offset_key.partition, decode_offset(value))
            case GroupKey(group):
                if value is None:
                    self._snapshots.pop(group, None)
                else:
                    self._snapshots[group] = decode_group(group, value)
                    self._pieces.pop(group, None)
            case None:
                found = decode_consumer_key(key)
                if found is not None and found.kind.is_of_share_group:
                    self._shared.setdefault(found.group, SharePieces()).take(found, value)
                elif found is not None:
                    self._replay_consumer(found, value)

    def _replay_consumer(self, found: ConsumerGroupKey, value: bytes | None) -> None:
        """A group has records of both kinds where a change from one to the other was cut short: that kind counts whose
        own record came last."""
        pieces = self._pieces.setdefault(found.group, GroupPieces())
        pieces.take(found, value)
        if found.kind is RecordKind.GROUP and value is not None:
            self._snapshots.pop(found.group, None)

    def open(
        self,
        limits: GroupLimits,
        draw_id: Callable[[], str],
        now: Moment,
        restored: Restored,
    ) -> None:
        """The end of the log is reached: the groups are as their last records say."""
        for name, snapshot in self._snapshots.items():
            self.groups[name] = Group.restored(snapshot, limits, draw_id, now)
        for name in (*self.offsets.groups(), *self.offsets.transactional.places):
            if name not in self.groups:
                self.groups[name] = Group(name, limits, draw_id, now)
        for name, pieces in (*self._pieces.items(), *self._shared.items()):
            if not pieces.is_over:
                self.groups[name] = restored(name, pieces)
        self._snapshots.clear()
        self._pieces.clear()
        self._shared.clear()
        self.loading = False

    def give_ids(self, topic_id: TopicId) -> list[Record]:
        """Offsets that were committed before ids were written belong to the topics that have their names now; answers
        the records that say so from now on. Where there is no such topic, its key may only be missing: they stay."""
        records: list[Record] = []
        for key, committed in self.offsets.without_id():
            found = topic_id(key.topic)
            if found is not None:
                known = replace(committed, topic_id=found)
                self.offsets.put(key.group, key.topic, key.partition, known)
                records.append((encode_offset_key(key), encode_offset(known)))
        return records

    def forget(self, group: AnyGroup, keys: Iterable[OffsetKey]) -> None:
        """The group is gone from the log. What was committed to it meanwhile stays, with a fresh group of that name."""
        if self.groups.get(group.group_id) is group:
            del self.groups[group.group_id]
        for key in keys:
            self.offsets.drop(key)


class ShardLoad:
    """A partition on its way into memory. Of no effect once the partition was resigned."""

    def __init__(self, shard: Shard, opened: Callable[[Shard], None]) -> None:
        self._shard = shard
        self._opened = opened

    @property
    def wanted(self) -> bool:
        return self._shard.loading and not self._shard.gone

    def replay(self, records: Iterable[Record], producer: ProducerEpoch | None = None) -> None:
        """The next records of the partition, in order; as many calls as it takes. CorruptBatch: one of them cannot be
        read, and the groups must not be opened without it."""
        if self.wanted:
            self._shard.replay(records, producer)

    def replay_marker(self, producer: ProducerEpoch, *, committed: bool) -> None:
        """The end of a transaction: the offsets in it count from here on, or never did."""
        if self.wanted:
            self._shard.offsets.end_transaction(producer.producer_id, committed=committed)

    def lost(self) -> None:
        """What is left of groups and their offsets counts."""

    def ready(self) -> None:
        """Everything below the high watermark was replayed: answer requests."""
        if self.wanted:
            self._opened(self._shard)
