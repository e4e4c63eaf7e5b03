"""Members of a group over brokers that are killed, the coordinator among them: nothing is missed, every key in order.

A record may come twice, as after a rebalance; it then comes with those that follow it, so no number of a key is ever
seen before the one below it.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import pytest

from brokers import Broker, wait_for
from client.producer_account import KEYS, NumberedLoad
from clusters import BrokerCluster
from headrace import Consumer, Producer
from headrace.client.admin import groups
from headrace.client.admin.cluster import Cluster
from proving import proves

SETTINGS: dict[str, object] = {
    "broker.lease.ms": 1500,
    "replica.lag.time.max.ms": 3000,
    "offsets.topic.partitions": 1,
    "default.replication.factor": 3,
    "group.initial.rebalance.delay.ms": 50,
}
PARTITIONS = 4
SENT_BETWEEN_KILLS = 200


@pytest.fixture(scope="module")
def brokers_of_three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerCluster]:
    with BrokerCluster(tmp_path_factory.mktemp("group-kills"), etcd=1, settings=SETTINGS) as cluster:
        yield cluster


class Account:
    """What members saw: the highest number of each key, and what was wrong."""

    def __init__(self) -> None:
        self.last = [-1] * KEYS
        self.repeated = 0
        self.skipped: list[str] = []

    def see(self, value: bytes) -> None:
        key, number = map(int, value.split(b"-"))
        if number > self.last[key] + 1:
            self.skipped.append(f"{key}-{number} came after {key}-{self.last[key]}")
        self.repeated += number <= self.last[key]
        self.last[key] = max(self.last[key], number)


class Member:
    """Reads and commits in a thread; no call may raise."""

    def __init__(self, bootstrap: str, topic: str, account: Account) -> None:
        self.failure: BaseException | None = None
        self.account = account
        self._consumer = Consumer(topic, bootstrap=bootstrap, group=topic, client_id="member", commit_interval_ms=300)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._consumer as consumer:
                while not self._over.is_set():
                    for record in consumer.poll(timeout_ms=100):
                        self.account.see(record.value)
        except BaseException as failure:
            self.failure = failure
            raise

    def finish(self) -> None:
        self._over.set()
        self._thread.join()
        assert self.failure is None


def coordinator(cluster: BrokerCluster, group: str) -> Broker:
    with Cluster(cluster.bootstrap) as client:
        address = str(client.coordinator(group).address)
    return next(broker for broker in cluster.brokers if broker.listen[0] == address)


def run_kills(cluster: BrokerCluster, topic: str, kills: int, seed: int) -> dict[str, object]:
    rng = random.Random(seed)
    cluster.create_topic(topic, partitions=PARTITIONS, replicas=3)
    cluster.wait_in_sync({topic: PARTITIONS})
    account = Account()
    member = Member(cluster.bootstrap, topic, account)
    producer = Producer(cluster.bootstrap, client_id="group-kills", batch_bytes=4_000, interval_ms=2)
    load = NumberedLoad(producer, topic, seed)
    coordinators = 0

    def seen() -> int:
        return sum(account.last)

    def seen_more(what: str) -> None:
        before = seen()
        wait_for(what, lambda: seen() > before + SENT_BETWEEN_KILLS or member.failure)
        assert member.failure is None

    for nth in range(kills):
        seen_more("records before the kill")
        leading = coordinator(cluster, topic)
        victim = rng.choice(cluster.brokers) if nth else leading
        coordinators += victim is leading
        victim.kill()
        seen_more("records after the kill")
        victim.start()
        cluster.wait_in_sync({topic: PARTITIONS, "__consumer_offsets": 1})
        if nth % 5 == 1:
            # The next one begins where this one's progress was saved.
            member.finish()
            member = Member(cluster.bootstrap, topic, account)
    load.finish(60.0)
    sent = [-1] * KEYS
    for key, number, delivery in load.deliveries:
        assert delivery.exception() is None
        sent[key] = max(sent[key], number)
    producer.close()
    wait_for("all to be seen", lambda: account.last == sent or member.failure)
    member.finish()
    assert account.skipped == []
    with Cluster(cluster.bootstrap) as client:
        saved = groups.fetch_offsets(client, topic)
    assert sum(saved.values()) == len(load.deliveries)
    return {
        "kills": kills, "of_the_coordinator": coordinators, "acknowledged": len(load.deliveries),
        "missed": 0, "out_of_order": 0, "seen_again": account.repeated,
    }  # fmt: skip


@proves("R8", "G6")
def test_two_kills_and_a_member_misses_nothing(brokers_of_three: BrokerCluster, seed: int) -> None:
    print(run_kills(brokers_of_three, "two-kills", 2, seed))


@proves("R8", "G6")
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_thirty_kills_and_a_member_misses_nothing(
    brokers_of_three: BrokerCluster, seed: int, proof_report: Callable[..., None]
) -> None:
    proof_report(**run_kills(brokers_of_three, "thirty-kills", 30, seed))


def test_the_account_finds_what_was_skipped() -> None:
    account = Account()
    for value in (b"1-0", b"1-1", b"1-0", b"1-1", b"1-2"):
        account.see(value)
    assert (account.skipped, account.repeated) == ([], 2)
    account.see(b"1-4")
    assert account.skipped == ["1-4 came after 1-2"]
