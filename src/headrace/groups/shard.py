"""The groups and offsets in one partition of `__consumer_offsets`, and how they are read back from its records."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from headrace.errors import CorruptBatch
from headrace.groups.actions import Moment
from headrace.groups.group import Group
from headrace.groups.limits import GroupLimits
from headrace.groups.offsets import GroupKey, OffsetCache, OffsetKey, Record, decode_key, decode_offset
from headrace.groups.snapshot import GroupSnapshot, decode_group

log = logging.getLogger(__name__)


class Shard:
    """`loading` until all records were replayed; `gone` once this broker does not lead the partition any more."""

    def __init__(self, partition: int) -> None:
        self.partition = partition
        self.groups: dict[str, Group] = {}
        self.offsets = OffsetCache()
        self.loading = True
        self.gone = False
        self._snapshots: dict[str, GroupSnapshot] = {}

    def replay(self, records: Iterable[Record]) -> None:
        """Take records in the order of the log. What cannot be read is passed over and named in the log."""
        for key, value in records:
            try:
                self._replay_one(key, value)
            except CorruptBatch as error:
                log.warning("partition %d of the offsets topic: record passed over: %s", self.partition, error)

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
            case None:
                pass

    def open(self, limits: GroupLimits, draw_id: Callable[[], str], now: Moment) -> None:
        """The end of the log is reached: the groups are as their last records say."""
        for name, snapshot in self._snapshots.items():
            self.groups[name] = Group.restored(snapshot, limits, draw_id, now)
        for name in self.offsets.groups():
            if name not in self.groups:
                self.groups[name] = Group(name, limits, draw_id, now)
        self._snapshots.clear()
        self.loading = False

    def forget(self, group: Group, keys: Iterable[OffsetKey]) -> None:
        """The group is gone from the log. What was committed to it meanwhile stays, with a fresh group of that name."""
        if self.groups.get(group.group_id) is group:
            del self.groups[group.group_id]
        for key in keys:
            self.offsets.drop(key)
