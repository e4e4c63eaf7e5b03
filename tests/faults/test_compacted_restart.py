"""A compacted topic after a restart: every offset can be asked for, also those that compaction has removed."""

from collections.abc import Callable

from brokers import Broker, wait_for
from headrace.client.admin import operations
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.fetch import Position, fetch
from headrace.client.admin.produce import Produced, produce
from headrace.client.producer.request import Outgoing
from headrace.records import kernel
from headrace.records.batch import BatchHeader
from headrace.records.record import NewRecord
from proving import proves

ROUNDS, KEYS = 30, 5


def first_batch(cluster: Cluster, offset: int) -> BatchHeader:
    (fetched,) = fetch(cluster, [Position("s", 0, offset)])
    return next(header for header, _ in fetched.whole_batches())


@proves("J6")
def test_offsets_in_the_gaps_of_a_compacted_topic_are_served_after_a_restart(
    fresh_broker: Callable[..., Broker],
) -> None:
    broker = fresh_broker(settings={"retention.check.ms": 10})
    settings = {"segment.bytes": "2048", "cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.01"}
    with Cluster(broker.bootstrap) as cluster:
        operations.create_topic(cluster, "s", partitions=1, configs=settings)
        for nth in range(ROUNDS):
            new: list[NewRecord] = [(1_790_000_000_000, b"k%d" % key, b"%d" % nth * 40, []) for key in range(KEYS)]
            (answer,) = produce(cluster, [Outgoing("s", 0, kernel.build(new))])
            assert isinstance(answer, Produced)
        wait_for("compaction", lambda: first_batch(cluster, 0).base_offset > 0)
    broker.settings |= {"retention.check.ms": 600_000, "log.cleaner.backoff.ms": 600_000}
    broker.restart()
    with Cluster(broker.bootstrap) as cluster:
        for offset in range(ROUNDS * KEYS):
            assert first_batch(cluster, offset).next_offset > offset
