"""Share partitions of the data partitions that this broker leads: reads logs for them, keeps what they decide, and
answers when that is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from headrace import metrics
from headrace.partitions.partitions import Partitions
from headrace.ports.disk import Disk
from headrace.queues.messages import (
    AcknowledgementBatch,
    Acquired,
    AcquireRequest,
    Persister,
    RecordsWaiter,
    ShareGroupConfig,
    TopicIdPartition,
)


class SharePartitions:
    def __init__(
        self,
        partitions: Partitions,
        disk: Disk,
        persister: Persister,
        config_of: Callable[[str], ShareGroupConfig],
    ) -> None:
        """`config_of` answers what holds for a group now; it is asked anew for each request."""
        raise NotImplementedError

    def acquire(
        self,
        request: AcquireRequest,
        places: Sequence[TopicIdPartition],
        done: Callable[[dict[TopicIdPartition, Acquired]], None],
    ) -> None:
        """Acquire from these partitions, in this order, until the request has enough. `done` hears once, when all is
        kept: of each place that had something, or an error. Nothing at all: `wait`, then ask again. Codes:
        LEADER_NOT_AVAILABLE while the state cannot be loaded or kept (try again), NOT_LEADER_OR_FOLLOWER,
        UNKNOWN_TOPIC_OR_PARTITION, and those of reading the log."""
        raise NotImplementedError

    def acknowledge(
        self,
        group: str,
        member: str,
        batches: Mapping[TopicIdPartition, Sequence[AcknowledgementBatch]],
        done: Callable[[dict[TopicIdPartition, int]], None],
    ) -> None:
        """`done` hears a code for each partition, when all is kept: all of a partition's batches were taken, or none.
        INVALID_RECORD_STATE: something is not acquired by this member; INVALID_REQUEST: offsets or types that cannot
        be; else as `acquire`. An acquire that follows in the same turn sees what it changes."""
        raise NotImplementedError

    def wait(self, group: str, places: Iterable[TopicIdPartition], waiter: RecordsWaiter) -> None:
        """`waiter.records_available()` runs, once, when one of them may have something to acquire or to tell. Who has
        waited longest is asked first, and the next one only if there is still something."""
        raise NotImplementedError

    def release(self, group: str, member: str) -> None:
        """The member's share session has ended: what it has acquired and not acknowledged goes to others."""
        raise NotImplementedError

    def follow(self) -> None:
        """Leaderships or topics have changed: let go of what is not led here any more."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def samples(self) -> Iterator[metrics.Sample]:
        raise NotImplementedError
