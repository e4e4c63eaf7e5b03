"""Our share consumer, for threads and for asyncio, with real brokers of both layouts."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import urllib.request
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from brokers import DIES_WITH_PARENT, Broker, Brokers, wait_for
from clients.sharing import DEADLINE_S, QUICK, share_group
from headrace import Acknowledged, Consumer, HeadraceError, Producer, Record, ShareConsumer, aio
from headrace.client.admin import operations
from headrace.client.admin.cluster import Cluster
from headrace.errors import ErrorCode, InvalidRecord, InvalidRequest, SettingError
from headrace.storage.folder import PARTITIONED, SHARED
from headrace.wire import api as apis
from kafka_protocol.raw import Raw
from proving import proves

PROGRAM = Path(__file__).parent / "sharing_program.py"
DEADLINE_MS = int(DEADLINE_S * 1000)


@pytest.fixture(scope="module", params=[PARTITIONED, SHARED])
def share_broker(brokers: Brokers, request: pytest.FixtureRequest) -> Iterator[Broker]:
    broker = brokers.start(settings={**QUICK, "log.layout": request.param})
    yield broker
    broker.discard()


@pytest.fixture
def bootstrap(share_broker: Broker) -> str:
    return share_broker.bootstrap


@pytest.fixture
def topic(bootstrap: str) -> str:
    return new_topic(bootstrap)


def new_topic(bootstrap: str, partitions: int = 1, **configs: str) -> str:
    name = f"t-{uuid.uuid4()}"
    with Cluster(bootstrap) as cluster:
        settings = {key.replace("_", "."): value for key, value in configs.items()}
        operations.create_topic(cluster, name, partitions=partitions, configs=settings)
    return name


def write(bootstrap: str, topic: str, count: int, partitions: int = 1) -> list[bytes]:
    values = [b"%d" % number for number in range(count)]
    with Producer(bootstrap) as producer:
        sent = [producer.send_async(topic, value, partition=nth % partitions) for nth, value in enumerate(values)]
        producer.flush()
        assert all(each.exception() is None for each in sent)
    return values


def explicit(bootstrap: str, group: str, topic: str, **options: object) -> ShareConsumer:
    return ShareConsumer(topic, bootstrap=bootstrap, group=group, acknowledgement="explicit", **options)  # type: ignore[arg-type]


def values(records: list[Record]) -> list[bytes]:
    return [record.value for record in records]


def codes(results: dict[tuple[str, int], HeadraceError | None]) -> set[int]:
    return {ErrorCode.NONE if error is None else error.kafka_code for error in results.values()}


@proves("Q1")
def test_the_next_poll_accepts_what_the_last_one_gave(bootstrap: str, topic: str) -> None:
    sent = write(bootstrap, topic, 10)
    group = share_group(bootstrap)
    with ShareConsumer(
        topic, bootstrap=bootstrap, group=group, max_poll_records=4, acquire_mode="record_limit"
    ) as consumer:
        seen = [consumer.poll(DEADLINE_MS) for _ in range(3)]
        assert [values(each) for each in seen] == [sent[:4], sent[4:8], sent[8:]]
        assert {record.delivery_count for each in seen for record in each} == {1}
        assert consumer.poll(500) == []
        assert consumer.assignment == [(topic, 0)]
    with explicit(bootstrap, group, topic) as successor:
        assert successor.poll(2000) == []


@proves("Q1")
def test_close_accepts_what_was_handed_out_unless_the_block_raised(bootstrap: str, topic: str) -> None:
    sent = write(bootstrap, topic, 6)
    group = share_group(bootstrap)
    options = {"bootstrap": bootstrap, "group": group, "max_poll_records": 3, "acquire_mode": "record_limit"}

    def fail() -> None:
        with ShareConsumer(topic, **options) as consumer:  # type: ignore[arg-type]
            assert values(consumer.poll(DEADLINE_MS)) == sent[:3]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with ShareConsumer(topic, **options) as consumer:  # type: ignore[arg-type]
        again = consumer.poll(DEADLINE_MS)
        assert [(record.value, record.delivery_count) for record in again] == [(value, 2) for value in sent[:3]]
    with ShareConsumer(topic, **options) as consumer:  # type: ignore[arg-type]
        assert values(consumer.poll(DEADLINE_MS)) == sent[3:]


@proves("Q1")
def test_of_an_iteration_that_raised_only_the_record_at_hand_comes_again(bootstrap: str, topic: str) -> None:
    sent = write(bootstrap, topic, 6)
    group = share_group(bootstrap)

    def fail() -> None:
        with ShareConsumer(topic, bootstrap=bootstrap, group=group) as consumer:
            for record in consumer:
                if record.value == sent[2]:
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with ShareConsumer(topic, bootstrap=bootstrap, group=group) as successor:
        seen = {record.value: record.delivery_count for record in successor.records(timeout_ms=2000)}
    assert seen == {sent[2]: 2, sent[3]: 1, sent[4]: 1, sent[5]: 1}


@proves("Q1")
def test_a_released_record_comes_again_and_a_rejected_one_does_not(bootstrap: str, topic: str) -> None:
    sent = write(bootstrap, topic, 8)
    with explicit(bootstrap, share_group(bootstrap), topic) as consumer:
        records = consumer.poll(DEADLINE_MS)
        assert values(records) == sent
        consumer.acknowledge(records[0])
        consumer.acknowledge(records[1], "release")
        consumer.acknowledge(records[2], "reject")
        with pytest.raises(InvalidRequest, match="5 records of the last poll are not acknowledged"):
            consumer.poll(0)
        consumer.acknowledge_range(topic, 0, 3, 5)
        consumer.acknowledge(records[6:], "release")
        with pytest.raises(InvalidRequest, match="offset 0"):
            consumer.acknowledge(records[0], "release")
        with pytest.raises(InvalidRequest, match="'forget' is no acknowledgement"):
            consumer.acknowledge(records[0], "forget")
        assert consumer.commit() == {(topic, 0): None}
        assert consumer.commit() == {}
        again = consumer.poll(DEADLINE_MS)
        while len(again) < 3:
            consumer.acknowledge(again, "renew")
            again += consumer.poll(DEADLINE_MS)
        assert {(record.value, record.delivery_count) for record in again} == {
            (sent[1], 2),
            (sent[6], 2),
            (sent[7], 2),
        }
        consumer.acknowledge(again)
        assert codes(consumer.commit()) == {ErrorCode.NONE}
        assert consumer.poll(1000) == []


@proves("Q1")
def test_what_is_said_after_the_lock_ran_out_is_refused_and_told(bootstrap: str, topic: str) -> None:
    write(bootstrap, topic, 3)
    group = share_group(bootstrap, share_record_lock_duration_ms=1000)
    heard: list[Acknowledged] = []
    with (
        explicit(bootstrap, group, topic, on_acknowledged=heard.append) as late,
        explicit(bootstrap, group, topic) as other,
    ):
        records = late.poll(DEADLINE_MS)
        again = other.poll(DEADLINE_MS)
        assert [record.delivery_count for record in again] == [2, 2, 2]
        late.acknowledge(records)
        assert codes(late.commit()) == {ErrorCode.INVALID_RECORD_STATE}
        other.acknowledge(again)
        assert codes(other.commit()) == {ErrorCode.NONE}
    (told,) = heard
    assert (told.topic, told.partition, told.ranges) == (topic, 0, ((0, 2),))
    assert "lock" in str(told.error)


@proves("Q1")
def test_a_renewed_record_goes_to_nobody_else(bootstrap: str, topic: str) -> None:
    """Longer than its lock: until that of another one, which is not renewed any more, has run out."""
    write(bootstrap, topic, 2)
    group = share_group(bootstrap, share_record_lock_duration_ms=1500)
    with explicit(bootstrap, group, topic) as holder:
        held, timer = holder.poll(DEADLINE_MS)
        holder.acknowledge(timer, "renew")
        holder.acknowledge(held, "renew")
        assert codes(holder.commit()) == {ErrorCode.NONE}
        with explicit(bootstrap, group, topic) as other:
            seen: list[Record] = []
            while not seen:
                holder.acknowledge(held, "renew")
                assert codes(holder.commit()) == {ErrorCode.NONE}
                seen = other.poll(200)
            assert [(record.offset, record.delivery_count) for record in seen] == [(1, 2)]
            other.acknowledge(seen)
            assert codes(other.commit()) == {ErrorCode.NONE}
        holder.acknowledge(held)
        assert codes(holder.commit()) == {ErrorCode.NONE}


@proves("Q1")
def test_results_are_told_by_partition_within_the_next_call(bootstrap: str) -> None:
    topic = new_topic(bootstrap, 2)
    write(bootstrap, topic, 10, partitions=2)
    heard: list[Acknowledged] = []
    seen: list[Record] = []
    with explicit(bootstrap, share_group(bootstrap), topic, on_acknowledged=heard.append) as consumer:
        while len(seen) < 10:
            found = consumer.poll(DEADLINE_MS)
            consumer.acknowledge(found)
            seen += found
        consumer.commit_async()
    kept = {
        (told.partition, offset) for told in heard for first, last in told.ranges for offset in range(first, last + 1)
    }
    assert kept == {(partition, offset) for partition in (0, 1) for offset in range(5)}
    assert {told.error for told in heard} == {None}


@proves("Q1")
def test_members_share_partitions_that_are_fewer_than_they_are(bootstrap: str) -> None:
    topic, group = new_topic(bootstrap, 2), share_group(bootstrap)
    seen: Counter[bytes] = Counter()
    by_member: Counter[int] = Counter()
    done = threading.Event()

    def consume(number: int) -> None:
        with ShareConsumer(
            topic, bootstrap=bootstrap, group=group, max_poll_records=5, acquire_mode="record_limit"
        ) as consumer:
            while not done.is_set():
                found = consumer.poll(200)
                seen.update(values(found))
                by_member[number] += len(found)
                if len(seen) == 300:
                    done.set()

    threads = [threading.Thread(target=consume, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    sent = write(bootstrap, topic, 300, partitions=2)
    assert done.wait(DEADLINE_S)
    for thread in threads:
        thread.join()
    assert seen == Counter(sent)
    assert sum(count > 0 for count in by_member.values()) > 2, by_member


@proves("Q1")
def test_others_get_the_records_of_a_killed_member(bootstrap: str, topic: str) -> None:
    sent = write(bootstrap, topic, 5)
    group = share_group(bootstrap, share_record_lock_duration_ms=60_000)
    program = [*DIES_WITH_PARENT, sys.executable, str(PROGRAM), bootstrap, group, topic]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert [process.stdout.readline().strip() for _ in sent] == sent
        process.kill()
    with ShareConsumer(topic, bootstrap=bootstrap, group=group) as consumer:
        assert values(consumer.poll(30_000)) == sent, "before its locks have run out"


@proves("Q1")
def test_a_program_that_ends_gives_its_records_back(bootstrap: str, topic: str) -> None:
    sent = write(bootstrap, topic, 5)
    group = share_group(bootstrap, share_record_lock_duration_ms=60_000)
    program = [*DIES_WITH_PARENT, sys.executable, str(PROGRAM), bootstrap, group, topic]
    ended = subprocess.run(program, input=b"", capture_output=True, check=True)
    assert ended.stdout.split() == sent
    with ShareConsumer(topic, bootstrap=bootstrap, group=group) as consumer:
        assert values(consumer.poll(30_000)) == sent


@proves("Q1")
def test_a_member_that_the_group_has_forgotten_joins_again(share_broker: Broker, topic: str) -> None:
    bootstrap, group = share_broker.bootstrap, share_group(share_broker.bootstrap)
    sent = write(bootstrap, topic, 2)
    with explicit(bootstrap, group, topic, max_poll_records=1, acquire_mode="record_limit") as consumer:
        first = consumer.poll(DEADLINE_MS)
        assert values(first) == sent[:1]
        raw = Raw(share_broker.host_port)
        left = raw.call(
            apis.SHARE_GROUP_HEARTBEAT,
            1,
            group_id=group,
            member_id=consumer.member_id,
            member_epoch=-1,
            rack_id=None,
            subscribed_topic_names=None,
        )
        raw.close()
        assert left.error_code == 0
        wait_for("the member to hear of it", lambda: not consumer.assignment)
        consumer.acknowledge(first)
        assert codes(consumer.commit()) == {ErrorCode.NONE}, "what it holds is still its own"
        second = consumer.poll(DEADLINE_MS)
        assert values(second) == sent[1:]
        consumer.acknowledge(second)


@proves("Q1")
@pytest.mark.parametrize("layout", [PARTITIONED, SHARED])
def test_what_is_held_can_be_acknowledged_after_the_broker_was_killed(brokers: Brokers, layout: str) -> None:
    broker = brokers.start(settings={**QUICK, "log.layout": layout})
    topic, group = new_topic(broker.bootstrap), share_group(broker.bootstrap)
    sent = write(broker.bootstrap, topic, 3)
    with explicit(broker.bootstrap, group, topic) as consumer:
        records = consumer.poll(DEADLINE_MS)
        assert values(records) == sent
        broker.restart(clean=False)
        consumer.acknowledge(records[:2])
        consumer.acknowledge(records[2], "release")
        assert consumer.commit() == {(topic, 0): None}
        again = consumer.poll(DEADLINE_MS)
        assert [(record.value, record.delivery_count) for record in again] == [(sent[2], 2)]
        consumer.acknowledge(again)
    broker.discard()


def test_offsets_that_compaction_took_are_not_waited_for(brokers: Brokers) -> None:
    broker = brokers.start(settings={**QUICK, "log.layout": PARTITIONED})
    bootstrap = broker.bootstrap
    topic = new_topic(bootstrap, cleanup_policy="compact", segment_ms="100", min_cleanable_dirty_ratio="0.01")
    group = share_group(bootstrap, share_record_lock_duration_ms=60_000)
    with Producer(bootstrap, interval_ms=200) as producer:  # one batch, in which compaction leaves holes
        for value in range(5):
            producer.send_async(topic, b"%d" % value, key=b"%d" % (value % 2))
        producer.flush()
        producer.send(topic, b"last", key=b"other")

    def is_compacted() -> bool:
        with Consumer(topic, bootstrap=bootstrap) as plain:
            return len(plain.poll(DEADLINE_MS)) < 6

    wait_for("compaction", is_compacted, DEADLINE_S)
    with explicit(bootstrap, group, topic) as consumer:
        seen: list[Record] = []
        while not seen or seen[-1].value != b"last":
            seen += consumer.poll(DEADLINE_MS)
            consumer.acknowledge(seen, "renew")
        assert values(seen) == [b"3", b"4", b"last"]
        consumer.acknowledge(seen)
        assert codes(consumer.commit()) == {ErrorCode.NONE}
        with urllib.request.urlopen(f"{broker.http}/metrics") as answer:
            told = answer.read().decode()
        assert f'headrace_share_records_held{{group="{group}",state="acquired"}} 0' in told, "no lock is left"
    broker.discard()


def test_arrow_batches_are_accepted_as_records_are(bootstrap: str, topic: str) -> None:
    pytest.importorskip("pyarrow")
    sent = write(bootstrap, topic, 100)
    group = share_group(bootstrap)
    seen: list[bytes] = []
    with ShareConsumer(topic, bootstrap=bootstrap, group=group) as consumer:
        for rows in consumer.batches(["value"], batch_rows=30, timeout_ms=DEADLINE_MS):
            assert rows.schema.names == ["value"]
            seen += rows["value"].to_pylist()
            if len(seen) == 100:
                break
    assert seen == sent
    with explicit(bootstrap, group, topic) as successor:
        assert successor.poll(2000) == []


def number(value: bytes | None) -> int:
    return int(value or b"")


def test_a_record_that_the_decoder_fails_at_is_released_and_told(bootstrap: str, topic: str) -> None:
    with Producer(bootstrap) as producer:
        for value in (b"1", b"x", b"3"):
            producer.send_async(topic, value)
    group = share_group(bootstrap)
    with ShareConsumer(topic, bootstrap=bootstrap, group=group, decoder=number) as consumer:
        assert [record.value for record in consumer.poll(DEADLINE_MS)] == [1, 3]
        for _ in range(5):  # as often as a record is delivered
            with pytest.raises(InvalidRecord, match="at offset 1: the decoder failed with ValueError"):
                consumer.poll(DEADLINE_MS)
        assert consumer.poll(1000) == []


def test_topics_can_be_changed(bootstrap: str) -> None:
    one, two = new_topic(bootstrap), new_topic(bootstrap)
    write(bootstrap, one, 1)
    write(bootstrap, two, 2)
    with ShareConsumer(bootstrap=bootstrap, group=share_group(bootstrap)) as consumer:
        with pytest.raises(InvalidRequest, match="subscribe"):
            consumer.poll(0)
        consumer.subscribe(one)
        assert [record.topic for record in consumer.poll(DEADLINE_MS)] == [one]
        consumer.subscribe([two])
        assert {record.topic for record in consumer.poll(DEADLINE_MS)} == {two}
        assert consumer.subscription == {two}


def test_a_group_of_another_kind_is_told(bootstrap: str, topic: str) -> None:
    write(bootstrap, topic, 1)
    group = f"classic-{uuid.uuid4()}"
    with Consumer(topic, bootstrap=bootstrap, group=group) as plain:
        assert plain.poll(DEADLINE_MS)
        with (
            pytest.raises(HeadraceError, match=group),
            ShareConsumer(topic, bootstrap=bootstrap, group=group) as consumer,
        ):
            consumer.poll(DEADLINE_MS)


def test_wrong_options_are_told_at_once() -> None:
    with pytest.raises(SettingError, match="member of a share group"):
        ShareConsumer("orders")
    with pytest.raises(SettingError, match="'implicit' or 'explicit'"):
        ShareConsumer("orders", group="g", acknowledgement="perhaps")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="did you mean 'acknowledgement'"):
        ShareConsumer("orders", group="g", share_acknowledgement_mode="explicit")  # type: ignore[call-arg]


@proves("Q1")
def test_the_same_on_asyncio(bootstrap: str, topic: str) -> None:
    sent = write(bootstrap, topic, 6)
    group = share_group(bootstrap)
    heard: list[Acknowledged] = []

    async def hear(told: Acknowledged) -> None:
        await asyncio.sleep(0)
        heard.append(told)

    async def consume() -> None:
        async with aio.ShareConsumer(
            topic, bootstrap=bootstrap, group=group, acknowledgement="explicit", on_acknowledged=hear
        ) as consumer:
            records = await consumer.poll(DEADLINE_MS)
            assert values(records) == sent
            consumer.acknowledge(records[:3])
            consumer.acknowledge(records[3:], "release")
            assert await consumer.commit() == {(topic, 0): None}
        seen = []
        async with aio.ShareConsumer(topic, bootstrap=bootstrap, group=group) as consumer:
            async for record in consumer:
                seen.append((record.value, record.delivery_count))
                if len(seen) == 3:
                    break
        assert seen == [(value, 2) for value in sent[3:]]
        async with aio.ShareConsumer(topic, bootstrap=bootstrap, group=group) as consumer:
            assert await consumer.poll(1000) == []

    asyncio.run(consume())
    assert [(told.ranges, told.error) for told in heard] == [(((0, 2), (3, 5)), None)]
