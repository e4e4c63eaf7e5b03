"""A producer over brokers that are killed and paused: no error inside the delivery timeout, nothing lost or doubled."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import pytest

from brokers import Broker, wait_for
from client.producer_account import NumberedLoad, check, told
from client.reading_back import read_partition, read_topic
from clusters import BrokerCluster
from headrace import Delivery, Producer
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.placement import moves_under_way, order_moves
from headrace.client.consumer.consumer import Consumer
from headrace.records.record import Record
from proving import proves

SETTINGS: dict[str, object] = {"broker.lease.ms": 1500, "replica.lag.time.max.ms": 3000}
SENT_BETWEEN_KILLS = 200


@pytest.fixture(scope="module")
def brokers_of_three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerCluster]:
    with BrokerCluster(tmp_path_factory.mktemp("producer-cluster"), etcd=1, settings=SETTINGS) as cluster:
        yield cluster


def leaders(cluster: BrokerCluster, topic: str) -> list[int]:
    with Cluster(cluster.bootstrap) as client:
        return [partition.leader_id for partition in client.topology([topic]).topics[topic].partitions]


class Follower:
    """A consumer that reads a topic from its start while it is written."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self.seen: dict[int, list[Record]] = {}
        self.count = 0
        self.failure: BaseException | None = None
        self._consumer = Consumer(topic, bootstrap=bootstrap, client_id="follower")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._consumer as consumer:
                while not self._over.is_set():
                    for got in consumer.poll(timeout_ms=100):
                        record = Record(got.offset, got.timestamp_ms, got.key, got.value, list(got.headers))
                        self.seen.setdefault(got.partition, []).append(record)
                        self.count += 1
        except BaseException as failure:
            self.failure = failure
            raise

    def finish(self, count: int) -> None:
        wait_for(f"the consumer to see {count} records", lambda: self.count >= count or self.failure)
        self._over.set()
        self._thread.join()
        assert self.failure is None


def run_kills(cluster: BrokerCluster, topic: str, kills: int, seed: int) -> dict[str, object]:
    rng = random.Random(seed)
    cluster.create_topic(topic, partitions=4, replicas=3)
    cluster.wait_in_sync({topic: 4})
    producer = Producer(cluster.bootstrap, client_id="survivor", batch_bytes=4_000, interval_ms=2, queue_records=5_000)
    follower = Follower(cluster.bootstrap, topic)
    load = NumberedLoad(producer, topic, seed)
    for _ in range(kills):
        before = load.acknowledged
        wait_for("records before the kill", lambda: load.acknowledged > before + SENT_BETWEEN_KILLS)  # noqa: B023
        victim = rng.choice(cluster.brokers)
        victim.kill()
        before = load.acknowledged
        wait_for("records after the kill", lambda: load.acknowledged > before + SENT_BETWEEN_KILLS)  # noqa: B023
        victim.start()
        cluster.wait_in_sync({topic: 4})
    load.finish(60.0)
    errors = [delivery.exception() for _, _, delivery in load.deliveries if delivery.exception() is not None]
    metrics = producer.metrics()
    producer.close()
    assert not errors, f"{len(errors)} records failed, the first with: {errors[0]}"
    with Cluster(cluster.bootstrap) as client:
        log = read_topic(client, topic)
    acknowledged = told(load.deliveries)
    check(acknowledged, log)
    follower.finish(sum(map(len, log.values())))
    check(acknowledged, follower.seen)
    assert sum(map(len, log.values())) == len(acknowledged)
    return {"kills": kills, "acknowledged": len(acknowledged), "lost": 0, "twice": 0, "out_of_order": 0, **metrics}


@proves("J10", "R6", "R16", "G17")
def test_three_kills_lose_nothing_double_nothing_and_raise_nothing(brokers_of_three: BrokerCluster, seed: int) -> None:
    figures = run_kills(brokers_of_three, "three-kills", 3, seed)
    print(figures)


@proves("J10", "R6", "R16", "G17")
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_thirty_kills_lose_nothing_double_nothing_and_raise_nothing(
    brokers_of_three: BrokerCluster, seed: int, proof_report: Callable[..., None]
) -> None:
    proof_report(**run_kills(brokers_of_three, "thirty-kills", 30, seed))


def _log() -> dict[int, list[Record]]:
    return {
        0: [Record(offset, 0, None, b"1-%d" % offset, []) for offset in range(5)],
        1: [Record(offset, 0, None, b"2-%d" % offset, []) for offset in range(5)],
    }


def _acknowledged() -> list[tuple[int, int, int, int]]:
    return [(key, number, key - 1, number) for key in (1, 2) for number in range(5)]


def test_the_account_finds_a_loss() -> None:
    check(_acknowledged(), _log())
    log = _log()
    del log[1][4]
    with pytest.raises(AssertionError, match="2-4 was acknowledged and is lost"):
        check(_acknowledged(), log)


def test_the_account_finds_what_is_there_twice() -> None:
    log = _log()
    log[0].append(log[0][2])
    with pytest.raises(AssertionError, match="1-2 is there twice"):
        check(_acknowledged(), log)


def test_the_account_finds_what_was_overtaken() -> None:
    log = _log()
    log[0][1], log[0][2] = log[0][2], log[0][1]
    with pytest.raises(AssertionError, match="1-1 was overtaken"):
        check(_acknowledged(), log)


def test_the_account_finds_a_wrong_report() -> None:
    with pytest.raises(AssertionError, match="not where it was said"):
        check([(1, 0, 0, 3)], _log())


@proves("G17")
def test_partitions_that_move_to_other_brokers_while_they_are_written(
    brokers_of_three: BrokerCluster, seed: int
) -> None:
    cluster = brokers_of_three
    cluster.create_topic("moving", partitions=2, replicas=1)
    cluster.wait_in_sync({"moving": 2})
    with Producer(cluster.bootstrap, client_id="moving", batch_bytes=2_000, interval_ms=1) as producer:
        load = NumberedLoad(producer, "moving", seed)
        for _ in range(3):
            before = load.acknowledged
            wait_for("records before the move", lambda: load.acknowledged > before + 100)  # noqa: B023
            targets = {("moving", index): [led_by % 3 + 1] for index, led_by in enumerate(leaders(cluster, "moving"))}
            with Cluster(cluster.bootstrap) as client:
                order_moves(client, targets)
                wait_for("the moves to end", lambda: not moves_under_way(client))
        load.finish(60.0)
        assert all(delivery.exception() is None for _, _, delivery in load.deliveries)
    with Cluster(cluster.bootstrap) as client:
        log = read_topic(client, "moving")
    check(told(load.deliveries), log)
    assert sum(map(len, log.values())) == len(load.deliveries)


@proves("R6")
def test_a_paused_leader_is_given_up_when_another_leads(brokers_of_three: BrokerCluster) -> None:
    cluster = brokers_of_three
    cluster.create_topic("paused", partitions=1, replicas=3)
    cluster.wait_in_sync({"paused": 1})
    with Producer(
        cluster.bootstrap, client_id="impatient", request_timeout_ms=100_000, delivery_timeout_ms=60_000
    ) as producer:
        producer.send("paused", b"0", key=b"k")
        place = leaders(cluster, "paused")[0] - 1
        cluster.pause(place)
        try:
            deliveries = [producer.send_async("paused", b"%d" % nth, key=b"k") for nth in range(1, 200)]
            producer.flush(50.0)
            assert all(delivery.exception() is None for delivery in deliveries)
        finally:
            cluster.resume(place)
        cluster.wait_in_sync({"paused": 1})
        producer.send("paused", b"200", key=b"k")
    with Cluster(cluster.bootstrap) as client:
        values = [int(record.value or b"") for record in read_topic(client, "paused")[0]]
    assert values == list(range(201))


@proves("R6")
@pytest.mark.parametrize("idempotent", [True, pytest.param(False, marks=pytest.mark.long)])
def test_records_without_a_key_go_where_brokers_answer(brokers_of_three: BrokerCluster, idempotent: bool) -> None:
    cluster, name = brokers_of_three, f"away-{idempotent}".lower()
    cluster.create_topic(name, partitions=3, replicas=1)
    cluster.wait_in_sync({name: 3})
    led_by = leaders(cluster, name)
    with Producer(cluster.bootstrap, client_id=name, idempotent=idempotent, interval_ms=60_000) as producer:
        for partition in range(3):
            producer.send(name, b"v", partition=partition)
        victim = led_by[producer._appender.router.topics[name].sticky.partition]
        waiting = [producer.send_async(name, b"w") for _ in range(5)]
        connection = producer._pool.broker(victim)
        cluster.brokers[victim - 1].kill()
        try:
            wait_for("the lost connection to be noticed", lambda: not connection.is_open)
            producer.send_async(name, b"one that makes the batch leave" * 3_000)
            reports = [delivery.result(15.0) for delivery in waiting]
            reports += [producer.send(name, b"x") for _ in range(30)]
            bound = producer.send_async(name, b"bound", partition=led_by.index(victim))
            assert victim not in {led_by[report.partition] for report in reports}
            assert producer.metrics()["moved"] >= 1
            assert not bound.done
        finally:
            cluster.brokers[victim - 1].start()
        producer.flush(60.0)
        assert led_by[bound.result().partition] == victim
        cluster.wait_in_sync({name: 3})


@proves("R6")
@pytest.mark.long
def test_when_all_brokers_fail_one_is_picked_anyway(brokers_of_three: BrokerCluster) -> None:
    cluster = brokers_of_three
    cluster.create_topic("all-fail", partitions=3, replicas=1)
    cluster.wait_in_sync({"all-fail": 3})
    with Producer(cluster.bootstrap, client_id="all-fail") as producer:
        producer.send("all-fail", b"v")
        for broker in cluster.brokers:
            broker.kill()
        waiting = [producer.send_async("all-fail", b"w") for _ in range(10)]
        for broker in cluster.brokers:
            broker.start()
        assert all(delivery.result(60.0).offset >= 0 for delivery in waiting)
    cluster.wait_in_sync({"all-fail": 3})


@proves("R7")
@pytest.mark.parametrize("avoid_slow", [True, False])
def test_a_slow_broker_is_avoided_for_the_time_in_the_table(brokers_of_three: BrokerCluster, avoid_slow: bool) -> None:
    cluster, name = brokers_of_three, f"slow-{avoid_slow}".lower()
    cluster.create_topic(name, partitions=3, replicas=1)
    cluster.wait_in_sync({name: 3})
    led_by = leaders(cluster, name)
    with Producer(
        cluster.bootstrap,
        client_id=name,
        avoid_slow=avoid_slow,
        latency_table=[(400, 600_000)],
        interval_ms=0,
        batch_bytes=1_000,
    ) as producer:
        for partition in range(3):
            # A machine that is busy may be slow itself; the last send counts.
            while producer.send(name, b"v", partition=partition) and led_by[partition] in producer._sender.avoided():
                continue
        slow = led_by[0]
        cluster.pause(slow - 1)
        wakes = threading.Timer(0.6, cluster.resume, (slow - 1,))
        wakes.start()
        producer.send(name, b"v", partition=0)
        wakes.join()
        reports = [producer.send(name, b"x" * 100) for _ in range(30)]
    used = {led_by[report.partition] for report in reports}
    assert (slow in used) is not avoid_slow
    assert len(used) >= 1


def test_a_callback_may_send(brokers_of_three: BrokerCluster) -> None:
    cluster = brokers_of_three
    cluster.create_topic("chain", partitions=2, replicas=3)
    with Producer(cluster.bootstrap, client_id="chain") as producer:
        ended: list[Delivery] = []

        def go_on(delivery: Delivery) -> None:
            number = delivery.result().offset
            if number >= 20:
                ended.append(delivery)
            elif number % 2:
                producer.send("chain", b"v", partition=0)
                producer.send_async("chain", b"v", partition=0, callback=go_on)
            else:
                producer.send_async("chain", b"v", partition=0, callback=go_on)

        producer.send_async("chain", b"v", partition=0, callback=go_on)
        wait_for("the chain to end", lambda: bool(ended))


@proves("J10")
def test_a_crash_of_the_only_broker_leaves_no_gap_and_no_repetition(fresh_broker: Callable[..., Broker]) -> None:
    broker, total, crashes = fresh_broker(), 30_000, 3
    with Producer(broker.bootstrap) as producer:
        sent: list[Delivery] = []

        def send_all() -> None:
            sent.extend(producer.send_async("steady", b"%01000d" % n, partition=0) for n in range(total))

        sending = threading.Thread(target=send_all)
        sending.start()
        for crash in range(1, crashes + 1):
            goal = total * crash // (crashes + 2)
            wait_for(f"{goal} records acknowledged", lambda: producer.metrics()["delivered"] >= goal)  # noqa: B023
            broker.restart(clean=False)
        sending.join()
        assert [delivery.result().offset for delivery in sent] == list(range(total))
    with Cluster(broker.bootstrap) as cluster:
        assert [int(record.value or b"") for record in read_partition(cluster, "steady", 0)] == list(range(total))
