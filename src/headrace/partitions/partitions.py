"""All partitions of this broker, and the turn: append many, write once, answer many.

The front ends append during a turn and call `end_turn`. It writes what was staged in one go, moves watermarks and
answers. Waiting fetches are woken once, after everything that is being worked on now, however many appends there were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from headrace.errors import HeadraceError, UnknownPartition
from headrace.partitions.core import LeaderCore
from headrace.partitions.deadlines import Deadlines
from headrace.partitions.partition import Partition
from headrace.ports.clock import Clock
from headrace.storage.log import Log, LogStore, TopicPartition

Failures = dict[TopicPartition, HeadraceError]


class Partitions:
    def __init__(self, store: LogStore, clock: Clock, broker: int) -> None:
        self.store = store
        self.clock = clock
        self.broker = broker
        self.deadlines = Deadlines(clock)
        self._by_name: dict[str, dict[int, Partition]] = {}
        self._by_log: dict[Log, Partition] = {}
        self._touched: dict[Partition, None] = {}
        self._grown: dict[Partition, None] = {}
        self._waking = False
        self._after_turn: list[Callable[[Failures], None]] = []
        store.on_durable(self._durable)

    def __iter__(self) -> Iterator[Partition]:
        return iter(list(self._by_log.values()))

    def __len__(self) -> int:
        return len(self._by_log)

    def find(self, topic: str, index: int) -> Partition | None:
        of_topic = self._by_name.get(topic)
        return of_topic.get(index) if of_topic is not None else None

    def get(self, topic: str, index: int) -> Partition:
        partition = self.find(topic, index)
        if partition is None:
            raise UnknownPartition(f"there is no partition {topic}-{index} on this broker")
        return partition

    def lead(self, log: Log, epoch: int, in_sync: tuple[int, ...]) -> Partition:
        """Begin to serve a log as its leader. What the log holds at start counts as committed on one node."""
        position = log.durable_offset if log.settings.durability == "disk" else log.written_offset
        core = LeaderCore(self.broker, epoch, log.end_offset, position, in_sync, log.settings.min_insync_replicas)
        partition = Partition(log, core, self.clock.wall_ms)
        self._by_name.setdefault(log.topic_partition.topic, {})[log.topic_partition.partition] = partition
        self._by_log[log] = partition
        return partition

    def drop(self, topic_partition: TopicPartition, error: HeadraceError | None = None) -> None:
        """Stop serving a partition and answer who waits for it."""
        partition = self.find(topic_partition.topic, topic_partition.partition)
        if partition is None:
            return
        del self._by_name[topic_partition.topic][topic_partition.partition]
        if not self._by_name[topic_partition.topic]:
            del self._by_name[topic_partition.topic]
        del self._by_log[partition.log]
        self._touched.pop(partition, None)
        partition.close(error)

    # The turn.

    def touch(self, partition: Partition) -> None:
        """Something was appended to it in this turn."""
        self._touched[partition] = None

    def at_turn_end(self, call: Callable[[Failures], None]) -> None:
        """Run once when what is staged now has been written, with the logs that could not be."""
        self._after_turn.append(call)

    def end_turn(self) -> None:
        """Write all that was staged, then answer. An answer may begin and end another turn within this one, so
        what belongs to this one is taken out first: its calls must hear its own failures."""
        calls, self._after_turn = self._after_turn, []
        failures: Failures = {}
        if self._touched:
            touched, self._touched = self._touched, {}
            for log, error in self.store.write_staged():
                failures[log.topic_partition] = error
            for partition in touched:
                if partition.advance():
                    self._wake_later(partition)
        for call in calls:
            call(failures)

    def _durable(self, log: Log) -> None:
        partition = self._by_log.get(log)
        if partition is None:
            return
        if log.offline is not None:
            partition.failed(log.offline)
        elif partition.advance():
            self._wake_later(partition)

    def min_in_sync_changed(self, partition: Partition, min_in_sync: int) -> None:
        """The topic's setting was altered: what waited for more replicas may count now."""
        if partition.core.min_in_sync != min_in_sync and partition.core.min_in_sync_changed(min_in_sync):
            partition.advance()
            self._wake_later(partition)

    def _wake_later(self, partition: Partition) -> None:
        self._grown[partition] = None
        if not self._waking:
            self._waking = True
            self.clock.call_soon(self._wake)

    def _wake(self) -> None:
        self._waking = False
        grown, self._grown = self._grown, {}
        for partition in grown:
            partition.wake()
