"""Dead letters of a share group on a cluster whose brokers are killed: none is lost, and none comes twice."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pytest
from confluent_kafka import AcknowledgeType

from brokers import wait_for
from clients.sharing import DEADLINE_S, member, poll, share_group, values
from clients.test_share_dead_letters import read_all
from clusters import BrokerCluster
from faults.test_share_groups_killed import LOCK_MS, PARTITIONS, SETTINGS, TOPIC, Writer, leader_of
from headrace.cluster.names import OFFSETS_TOPIC, SHARE_STATE_TOPIC
from proving import proves

LETTERS = "dlq.orders"
MEMBERS = 2


class Rejecting:
    """Members that reject even numbers and accept odd ones."""

    def __init__(self, bootstrap: str, group: str) -> None:
        self.rejected: set[str] = set()
        self.accepted: set[str] = set()
        self.unsure: set[str] = set()
        """Of those nobody knows whether it was kept; what was not comes again."""
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._consume, args=(bootstrap, group)) for _ in range(MEMBERS)]
        for thread in self._threads:
            thread.start()

    def _consume(self, bootstrap: str, group: str) -> None:
        consumer = member(bootstrap, group, TOPIC, max_poll_records=20)
        while not self._stopped.is_set():
            found = poll(consumer, 0.5)
            for message in found:
                is_even = int(*values([message])) % 2 == 0
                consumer.acknowledge(message, AcknowledgeType.REJECT if is_even else AcknowledgeType.ACCEPT)
            if not found:
                continue
            failed = {place.partition for place, error in consumer.commit_sync(30).items() if error is not None}
            with self._lock:
                for message in found:
                    (value,) = values([message])
                    if message.partition() in failed:
                        self.unsure.add(value)
                    else:
                        (self.accepted if int(value) % 2 else self.rejected).add(value)
        consumer.close()

    @property
    def told(self) -> set[str]:
        return self.rejected | self.accepted | self.unsure

    def wait_for_more(self, count: int) -> None:
        enough = len(self.rejected) + count
        wait_for(f"{count} more are rejected", lambda: len(self.rejected) >= enough, 2 * DEADLINE_S)

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()


@proves("R10", "Q1")
@pytest.mark.parametrize("killed", [TOPIC, LETTERS, SHARE_STATE_TOPIC], ids=["data", "letters", "state"])
def test_no_dead_letter_is_lost_or_comes_twice_when_a_broker_dies(tmp_path: Path, killed: str) -> None:
    settings = {**SETTINGS, "group.share.delivery.count.limit": 1000}
    with BrokerCluster(tmp_path, settings=settings) as cluster:
        cluster.create_topic(TOPIC, PARTITIONS, replicas=3)
        cluster.create_topic(LETTERS, 2, replicas=3, errors_deadletterqueue_group_enable="true")
        group = share_group(
            cluster.bootstrap,
            share_record_lock_duration_ms=LOCK_MS,
            errors_deadletterqueue_topic_name=LETTERS,
            errors_deadletterqueue_copy_record_enable="true",
        )
        members = Rejecting(cluster.bootstrap, group)
        writer = Writer(cluster.bootstrap)
        members.wait_for_more(200)
        cluster.wait_in_sync({TOPIC: PARTITIONS, LETTERS: 2, OFFSETS_TOPIC: 2, SHARE_STATE_TOPIC: 3})
        leader_of(cluster, killed).kill()
        members.wait_for_more(300)
        written = writer.stop()
        even = {value for value in written if int(value) % 2 == 0}
        wait_for("everything", lambda: written <= members.told, 2 * DEADLINE_S)
        letters = read_all(cluster.bootstrap, LETTERS, len(even))
        members.stop()
        found = Counter(values(letters))
        assert set(found) == even, cluster.said()
        assert set(found.values()) == {1}
