"""The share partitions in one partition of `__share_group_state`, and how they are read back from its records.

An entry knows which record says what is next to be kept: an update in the next slot, or a snapshot. After an append
that has failed it is a snapshot, always: what failed may still come into the log, and the snapshot behind it says again
how things are. So memory never has what the log may not have, nor the other way round.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Final

from headrace.coordinators.record_fields import Record
from headrace.coordinators.state_log import AppendDone
from headrace.queues.messages import SharePartitionKey
from headrace.queues.state_changes import Change, Step, updated
from headrace.queues.state_records import (
    SLOTS_MAX,
    SNAPSHOT_SLOT,
    Kept,
    decode_key,
    decode_snapshot,
    decode_update,
    encode_key,
    encode_snapshot,
    encode_update,
    next_number,
)

log = logging.getLogger(__name__)

UPDATES_LEAST_BYTES: Final = 1000
"""Updates are never too large for a snapshot when they are smaller than this."""
LOST_LOAD: Final = -2
"""Nobody's: after a loss of records the leader of the data has to read again."""

StepOf = Callable[[Kept | None], Step]
Answer = Callable[[int, Kept | None], None]
"""Hears the code and what is kept then."""


class Entry:
    """A share partition: what is kept of it, as the log has it below the watermark, and who waits for it."""

    __slots__ = (
        "anew",
        "busy",
        "doubted",
        "kept",
        "key",
        "number",
        "slot",
        "slots_seen",
        "snapshot_bytes",
        "update_bytes",
        "waiting",
    )

    def __init__(self, key: SharePartitionKey) -> None:
        self.key = key
        self.kept: Kept | None = None
        self.number = 0
        """Of the last snapshot that was tried: none is used twice."""
        self.slot = SNAPSHOT_SLOT
        """The last one since that snapshot."""
        self.slots_seen = 0
        """The highest one that the log may have a record of."""
        self.snapshot_bytes = 0
        self.update_bytes = 0
        """Of all updates since the snapshot."""
        self.anew = True
        """The next record has to be a snapshot."""
        self.doubted = False
        """Records of it may be lost."""
        self.busy = False
        """A change is on its way to the log."""
        self.waiting: deque[tuple[StepOf, Answer]] | None = None
        """Those who come meanwhile; most share partitions never have any."""

    @property
    def is_gone(self) -> bool:
        """Whether nothing is to be known of it, here or in the log."""
        return self.kept is None and not self.busy and not self.waiting and not self.slots_seen

    def records(self, change: Change, now_ms: int) -> list[Record]:
        """What the log has to say of the change."""
        if change.kept is None:  # the snapshot first: updates without one say nothing
            slots = (SNAPSHOT_SLOT, *range(self.slots_seen, SNAPSHOT_SLOT, -1))
            self.anew = True
            return [(encode_key(self.key, slot), None) for slot in slots]
        if change.update is not None and not self.anew and self.slot < SLOTS_MAX:
            value = encode_update(self.number, change.update)
            room_bytes = max(self.snapshot_bytes, UPDATES_LEAST_BYTES)
            if self.update_bytes + len(value) <= room_bytes:
                self.slot += 1
                self.slots_seen = max(self.slots_seen, self.slot)
                self.update_bytes += len(value)
                return [(encode_key(self.key, self.slot), value)]
        self.number = next_number(self.number)
        value = encode_snapshot(self.number, change.kept, now_ms)
        self.slot, self.snapshot_bytes, self.update_bytes = SNAPSHOT_SLOT, len(value), 0
        self.anew = False
        return [(encode_key(self.key, SNAPSHOT_SLOT), value)]

    def kept_now(self, change: Change) -> None:
        """Its records are below the watermark."""
        self.kept = change.kept
        if change.kept is None:
            self.slots_seen = 0

    def may_be_logged(self) -> None:
        """It has failed, and may be in the log after all: the next record says again how things are. One that was to
        begin stays known, so that it can be deleted."""
        self.anew = True
        if self.kept is None:
            self.slots_seen = max(self.slots_seen, 1)

    def replay(self, slot: int, value: bytes | None) -> None:
        if value is None:
            if slot == SNAPSHOT_SLOT:
                self.kept, self.anew, self.doubted = None, True, False
            elif slot == self.slots_seen:
                self.slots_seen -= 1
        elif slot == SNAPSHOT_SLOT:
            self.number, self.kept = decode_snapshot(value)
            self.slot, self.snapshot_bytes, self.update_bytes = SNAPSHOT_SLOT, len(value), 0
            self.anew = self.doubted = False
        else:
            self.slots_seen = max(self.slots_seen, slot)
            number, update = decode_update(value)
            if self.kept is None or number != self.number or slot <= self.slot:
                return
            if slot != self.slot + 1:
                # Compaction has taken some, and then there is a later snapshot; or they are lost.
                self.doubted = True
            self.slot = slot
            self.update_bytes += len(value)
            self.kept = updated(self.kept, update)

    def settle_doubt(self) -> None:
        """What is left counts. Who led the data knows more than that, and must not go on from there."""
        if self.doubted and self.kept is not None:
            self.kept = replace(self.kept, load_id=LOST_LOAD)
            self.anew = True
        self.doubted = False


class Shard:
    """`loading` until all records were replayed; `gone` once this broker does not lead the partition in this epoch any
    more."""

    def __init__(self, partition: int, epoch: int) -> None:
        self.partition = partition
        self.epoch = epoch
        self.loading = True
        self.gone = False
        self.staged: list[tuple[list[Record], AppendDone]] = []
        """What this turn of the loop appends."""
        self.contended: set[Entry] = set()
        """Those for which somebody waits."""
        self._unsettled: set[Entry] = set()
        """While it loads: those of which something is missing, or may be."""
        self._topics: dict[bytes, dict[tuple[str, int], Entry]] = {}
        """By topic id, then by group and partition."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def entry(self, key: SharePartitionKey) -> Entry | None:
        found = self._topics.get(key.topic_id)
        return None if found is None else found.get((key.group, key.partition))

    def create(self, key: SharePartitionKey) -> Entry:
        entry = Entry(key)
        self._topics.setdefault(key.topic_id, {})[key.group, key.partition] = entry
        self._count += 1
        return entry

    def rest(self, entry: Entry) -> None:
        """Let go of one of which there is nothing to know."""
        if not entry.is_gone or self.entry(entry.key) is not entry:
            return
        group, topic_id, partition = entry.key
        found = self._topics[topic_id]
        del found[group, partition]
        self._count -= 1
        if not found:
            del self._topics[topic_id]

    def entries(self) -> Iterator[Entry]:
        return (entry for found in self._topics.values() for entry in found.values())

    def of_topics(self, ids: Iterable[bytes]) -> list[SharePartitionKey]:
        found = self._topics.keys() & set(ids)
        return [entry.key for topic_id in found for entry in self._topics[topic_id].values()]

    # Loading

    def replay(self, records: Iterable[Record]) -> None:
        """Take records in the order of the log; those of a kind that is not ours to know say nothing to us. Taking the
        same ones again changes nothing. CorruptBatch for one that cannot be read."""
        for key, value in records:
            found = decode_key(key)
            if found is None:
                continue
            share_partition, slot = found
            entry = self.entry(share_partition)
            if entry is None:
                if value is None:
                    continue
                entry = self.create(share_partition)
            entry.replay(slot, value)
            if entry.kept is None or entry.doubted:
                self._unsettled.add(entry)

    def lost(self) -> None:
        """What was replayed up to here may not be the last of it."""
        for entry in self.entries():
            entry.doubted = True
            self._unsettled.add(entry)

    def open(self) -> list[SharePartitionKey]:
        """The end of the log is reached: answers what is deleted, and has records left."""
        doubted = 0
        left: list[SharePartitionKey] = []
        unsettled, self._unsettled = self._unsettled, set()
        for entry in unsettled:
            doubted += entry.doubted
            entry.settle_doubt()
            if entry.is_gone:
                self.rest(entry)
            elif entry.kept is None:
                left.append(entry.key)
        if doubted:
            log.error(
                "partition %d: records of %d share partitions are lost; what was delivered by them may be delivered "
                "again", self.partition, doubted,
            )  # fmt: skip
        self.loading = False
        return left
