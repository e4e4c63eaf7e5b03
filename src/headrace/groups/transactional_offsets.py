"""Offsets that were committed in transactions which are not decided, in one partition of the offsets topic. No I/O.

They count when the marker of their producer says so, or are dropped; until then whoever asks for stable offsets only is
told to ask again (KIP-447). Of the records of one key the last in the log is the one that counts, whenever their
markers came, because compaction keeps no other: what was committed or removed outside of a transaction behind such an
offset takes its place, and so does what was committed in another one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

from headrace.coordinators.state_log import ProducerEpoch
from headrace.groups.records import OffsetAndMetadata, OffsetKey


class TransactionalOffsets:
    def __init__(self) -> None:
        self._open: dict[int, dict[OffsetKey, tuple[int, OffsetAndMetadata]]] = {}
        """By producer id; each with its place in the order of the log."""
        self._epochs: dict[int, int] = {}
        """Of producers, in the transactions that are open."""
        self._order = 0
        self._decided: dict[OffsetKey, int] = {}
        """Of keys that are in other transactions too: the place of the last record that counts."""
        self.places: dict[str, Counter[tuple[str, int]]] = {}
        """By group, in how many transactions or appends under way a partition is."""

    def of(self, group: str) -> Collection[tuple[str, int]]:
        """Partitions whose committed offset is not stable."""
        return self.places.get(group, {}).keys()

    def appending(self, keys: Iterable[OffsetKey]) -> None:
        """They are on their way into the log."""
        for key in keys:
            self._hold(key)

    def appended(self, producer: ProducerEpoch, offsets: Mapping[OffsetKey, OffsetAndMetadata]) -> None:
        """They are below the watermark, as part of the producer's transaction."""
        for key, committed in offsets.items():
            self.put(producer, key, committed)
        self.lost(offsets)

    def lost(self, keys: Iterable[OffsetKey]) -> None:
        """They are not on their way any more."""
        for key in keys:
            self._release(key)

    def put(self, producer: ProducerEpoch, key: OffsetKey, committed: OffsetAndMetadata) -> None:
        producer_id, epoch = producer
        if self._epochs.setdefault(producer_id, epoch) < epoch:
            # The partition has aborted what was open in an earlier epoch: its marker was lost.
            self.end(producer_id, committed=False)
            self._epochs[producer_id] = epoch
        of_producer = self._open.setdefault(producer_id, {})
        if key not in of_producer:
            self._hold(key)
        self._order += 1
        of_producer[key] = self._order, committed

    def drop(self, key: OffsetKey) -> None:
        """A later record of the key, outside of any transaction, takes its place."""
        if (key.topic, key.partition) not in self.of(key.group):
            return
        for producer_id, of_producer in list(self._open.items()):
            if of_producer.pop(key, None) is not None:
                self._release(key)
                if not of_producer:
                    del self._open[producer_id], self._epochs[producer_id]

    def end(self, producer_id: int, *, committed: bool) -> dict[OffsetKey, OffsetAndMetadata]:
        """The producer's transaction is decided; answers what counts from now on."""
        counting: dict[OffsetKey, OffsetAndMetadata] = {}
        self._epochs.pop(producer_id, None)
        for key, (order, offset) in self._open.pop(producer_id, {}).items():
            if committed and order > self._decided.get(key, 0):
                counting[key] = offset
                self._decided[key] = order
            self._release(key)
        return counting

    def __iter__(self) -> Iterator[tuple[OffsetKey, OffsetAndMetadata]]:
        return ((key, offset) for of_producer in self._open.values() for key, (_, offset) in of_producer.items())

    def _hold(self, key: OffsetKey) -> None:
        self.places.setdefault(key.group, Counter())[key.topic, key.partition] += 1

    def _release(self, key: OffsetKey) -> None:
        places = self.places[key.group]
        place = key.topic, key.partition
        places[place] -= 1
        if not places[place]:
            self._decided.pop(key, None)
            del places[place]
            if not places:
                del self.places[key.group]
