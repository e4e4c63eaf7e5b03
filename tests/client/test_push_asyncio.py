"""Listeners on asyncio: as those on threads, with tasks of the running loop."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine

import pytest
import uvloop

from brokers import Broker
from clients.records import Record
from clients.with_confluent import ConfluentKafka
from headrace.aio import LATER, Consumer
from headrace.client.admin import groups, operations
from headrace.client.admin.cluster import Cluster
from headrace.client.errors import Refusal, UnknownTopic
from headrace.errors import ErrorCode, InvalidRequest
from headrace.records.consumer_records import ReceivedRecord
from proving import proves

MakeTopic = Callable[..., str]
Run = Callable[[Coroutine[None, None, None]], None]
PARTITIONS = 4
DEADLINE_S = 120.0


async def first_letter(broker: Broker, group: str) -> ReceivedRecord:
    """Of the dead letters, which may have no topic yet."""
    async with Consumer(f"{group}.dead", bootstrap=broker.bootstrap) as dead, asyncio.timeout(DEADLINE_S):
        while True:
            try:
                return await anext(dead.records())
            except UnknownTopic:
                continue


@pytest.fixture
def group() -> str:
    return f"push-{uuid.uuid4().hex[:8]}"


@pytest.fixture(params=["asyncio", pytest.param("uvloop", marks=pytest.mark.long)])
def run(request: pytest.FixtureRequest) -> Run:
    def until_done(main: Coroutine[None, None, None]) -> None:
        factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(main)

    return until_done


def write(broker: Broker, topic: str, count: int, partitions: int = PARTITIONS) -> list[bytes]:
    values = [b"%d" % n for n in range(count)]
    records = [Record(value, key=b"k", partition=n % partitions) for n, value in enumerate(values)]
    ConfluentKafka().produce(broker.bootstrap, topic, records)
    return values


class Watched:
    """Calls of a listener, and waiting for them to be enough."""

    def __init__(self, work: Callable[[ReceivedRecord], Awaitable[object]]) -> None:
        self.records: list[ReceivedRecord] = []
        self._work = work
        self._called = asyncio.Event()

    async def __call__(self, record: ReceivedRecord) -> object:
        self.records.append(record)
        self._called.set()
        return await self._work(record)

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not done():
                self._called.clear()
                await self._called.wait()

    def values(self) -> Counter[bytes]:
        return Counter(record.value for record in self.records)


async def nothing(record: ReceivedRecord) -> None:
    """A listener that is done at once."""


def saved(cluster: Cluster, group: str, topic: str) -> int:
    return sum(offset for (name, _), offset in groups.fetch_offsets(cluster, group).items() if name == topic)


@proves("R8", "G6")
def test_tasks_call_the_listener_side_by_side(
    broker: Broker, cluster: Cluster, topic: MakeTopic, group: str, run: Run
) -> None:
    target = topic(partitions=PARTITIONS)
    values = write(broker, target, 80)

    async def main() -> None:
        together = asyncio.Barrier(4)

        async def meet(_: ReceivedRecord) -> None:
            await together.wait()

        seen = Watched(meet)
        consumer = Consumer(target, bootstrap=broker.bootstrap, group=group)
        async with consumer.listen(seen, tasks=4):
            await seen.until(lambda: len(seen.records) == 80)
            with pytest.raises(InvalidRequest, match="go to its listener"):
                await consumer.poll(0)
        assert seen.values() == Counter(values)

    run(main())
    assert saved(cluster, group, target) == 80


@proves("R8", "G6")
def test_in_order_one_at_a_time_and_a_record_that_fails_is_tried_in_place(
    broker: Broker, cluster: Cluster, topic: MakeTopic, group: str, run: Run
) -> None:
    target = topic(partitions=PARTITIONS)
    write(broker, target, 40)

    async def main() -> None:
        failing, running = Counter({b"5": 2}), Counter[int]()

        async def work(record: ReceivedRecord) -> None:
            running[record.partition] += 1
            assert running[record.partition] == 1
            await asyncio.sleep(0)
            running[record.partition] -= 1
            if failing[record.value] > 0:
                failing[record.value] -= 1
                raise ValueError("not yet")

        seen = Watched(work)
        consumer = Consumer(target, bootstrap=broker.bootstrap, group=group)
        async with consumer.listen(seen, ordered=True, pause_ms=10):
            await seen.until(lambda: len(seen.records) == 42)
        for partition in range(PARTITIONS):
            offsets = [record.offset for record in seen.records if record.partition == partition]
            assert offsets == sorted(offsets)

    run(main())
    assert saved(cluster, group, target) == 40


def test_a_listener_whose_work_was_cancelled_has_failed(broker: Broker, topic: MakeTopic, group: str, run: Run) -> None:
    target = topic()
    write(broker, target, 10, partitions=1)

    async def main() -> None:
        async def work(record: ReceivedRecord) -> None:
            if record.offset < 4 and seen.values()[record.value] == 1:
                raise asyncio.CancelledError

        seen = Watched(work)
        consumer = Consumer(target, bootstrap=broker.bootstrap, group=group)
        async with consumer.listen(seen, tasks=2, delays_ms=(20,)):
            await seen.until(lambda: sorted(seen.values().values()) == [1] * 6 + [2] * 4)

    run(main())


@proves("R10")
def test_a_record_that_fails_is_tried_again_later_and_then_put_aside(
    broker: Broker, cluster: Cluster, topic: MakeTopic, group: str, run: Run
) -> None:
    target = topic(partitions=PARTITIONS)
    write(broker, target, 12)

    async def main() -> None:
        asked = Counter[bytes]()

        async def work(record: ReceivedRecord) -> object:
            asked[record.value] += 1
            if record.value == b"3":
                raise ValueError("never")
            return LATER if record.value == b"8" and asked[b"8"] == 1 else None

        seen = Watched(work)
        consumer = Consumer(target, bootstrap=broker.bootstrap, group=group)
        async with consumer.listen(seen, max_tries=2, delays_ms=(20, 40)):
            await seen.until(lambda: (seen.values()[b"3"], seen.values()[b"8"]) == (3, 2))
            letter = await first_letter(broker, group)
        assert (letter.value, dict(letter.headers)["headrace-tries"]) == (b"3", b"3")
        assert {(r.topic, r.partition, r.offset) for r in seen.records if r.value == b"3"} == {(target, 3, 0)}

    run(main())
    assert saved(cluster, group, target) == 12
    assert saved(cluster, group, f"{group}.retry") == 3


@proves("R8")
def test_a_rebalance_waits_for_what_is_running_so_nothing_is_done_twice(
    broker: Broker, cluster: Cluster, topic: MakeTopic, group: str, run: Run
) -> None:
    target = topic(partitions=PARTITIONS)
    values = write(broker, target, 60)

    async def main() -> None:
        gate = asyncio.Semaphore(0)

        async def work(_: ReceivedRecord) -> None:
            await gate.acquire()

        def open_gate(count: int) -> None:
            for _ in range(count):
                gate.release()

        seen = Watched(work)

        def start() -> Consumer:
            return Consumer(target, bootstrap=broker.bootstrap, group=group, session_timeout_ms=1500)

        async with start().listen(seen, tasks=2, ordered=True):
            open_gate(10)
            await seen.until(lambda: len(seen.records) >= 10)
            second = start()
            async with second.listen(seen, tasks=2, ordered=True), asyncio.timeout(DEADLINE_S):
                # Both wait at the gate, so it is opened until the second one has its share.
                while not second.assignment:
                    open_gate(1)
                    await asyncio.sleep(0.02)
                open_gate(100)
                await seen.until(lambda: len(seen.records) >= 60)
        assert seen.values() == Counter(values)

    run(main())
    assert saved(cluster, group, target) == 60


def test_a_rebalance_that_waits_is_heard_of_at_once(
    broker: Broker, topic: MakeTopic, group: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when the consumer has waited for records as long as it does."""
    target = topic(partitions=PARTITIONS)
    write(broker, target, PARTITIONS)
    monkeypatch.setattr("headrace.aio.listener.POLL_WAIT_S", 10 * DEADLINE_S)

    async def main() -> None:
        may_end = asyncio.Event()
        seen = Watched(lambda _: may_end.wait())
        first = Consumer(target, bootstrap=broker.bootstrap, group=group)
        async with first.listen(seen, tasks=1, ordered=True) as running:
            await seen.until(lambda: bool(seen.records))
            # Until the other one joins it waits for more.
            await asyncio.sleep(0.1)
            async with Consumer(target, bootstrap=broker.bootstrap, group=group) as second:
                async with asyncio.timeout(DEADLINE_S):
                    while not running._load.holds:
                        await second.poll(20)
                may_end.set()

    run(main())


def test_values_are_decoded_once_when_listening_follows_reading(
    broker: Broker, topic: MakeTopic, group: str, run: Run
) -> None:
    target = topic()
    write(broker, target, 5, partitions=1)

    async def main() -> None:
        seen = Watched(nothing)
        consumer = Consumer(
            target, bootstrap=broker.bootstrap, group=group, decoder=lambda value: (value or b"") + b"!"
        )
        assert (await anext(consumer.records(30_000))).value == b"0!"
        async with consumer.listen(seen):
            await seen.until(lambda: len(seen.records) == 4)
        assert seen.values() == Counter([b"1!", b"2!", b"3!", b"4!"])

    run(main())


def test_listening_that_ends_by_an_error_leaves_the_group_and_a_failed_partition_ends_nothing(
    broker: Broker, cluster: Cluster, topic: MakeTopic, group: str, run: Run
) -> None:
    target = topic(partitions=2)
    write(broker, target, 20, partitions=2)
    operations.delete_records(cluster, target, {0: 5})
    groups.commit_offsets(cluster, group, {(target, 0): 0, (target, 1): 0})

    async def main() -> None:
        def start(name: str, instance_id: str) -> Consumer:
            return Consumer(
                name, bootstrap=broker.bootstrap, group=group, instance_id=instance_id, session_timeout_ms=1500,
                start="none",
            )  # fmt: skip

        seen = Watched(nothing)
        first = start(target, "only").listen(seen)
        await seen.until(lambda: len(seen.records) == 10)
        assert {record.partition for record in seen.records} == {1}
        assert list(first.failures) == [(target, 0)]
        async with start(f"{group}.retry", "only.retry") as second, asyncio.timeout(DEADLINE_S):
            with pytest.raises(Refusal):
                await first.wait()
            while len((await asyncio.to_thread(groups.describe_group, cluster, group)).members) > 1:
                await second.poll(20)
        await first.close()

    run(main())


def test_listening_ends_with_the_error_that_the_group_gives(
    broker: Broker, topic: MakeTopic, group: str, run: Run
) -> None:
    target = topic()
    write(broker, target, 1, partitions=1)

    async def main() -> None:
        def start() -> Consumer:
            return Consumer(
                target, bootstrap=broker.bootstrap, group=group, instance_id="only", session_timeout_ms=1500
            )

        seen = Watched(nothing)
        first = start().listen(seen, ordered=True)
        await seen.until(lambda: bool(seen.records))
        async with start() as second:
            async with asyncio.timeout(DEADLINE_S):
                while not second.assignment:
                    await second.poll(100)
                with pytest.raises(Refusal) as ended:
                    await first.wait()
        assert ended.value.kafka_code == ErrorCode.FENCED_INSTANCE_ID
        await first.close()

    run(main())


@proves("U2")
def test_what_an_async_listener_raised_is_logged_with_where(
    run: Run, broker: Broker, topic: MakeTopic, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    target = topic()
    write(broker, target, 1, partitions=1)

    async def look_up(value: bytes | None) -> None:
        raise KeyError(value)

    async def main() -> None:
        seen = Watched(lambda record: look_up(record.value))
        async with Consumer(target, bootstrap=broker.bootstrap, group=group).listen(seen, max_tries=0):
            await first_letter(broker, group)

    run(main())
    assert f"{target}-0 at offset 0 failed for the 1. time: KeyError: b'0'" in caplog.text
    assert "aio/tasks.py" not in caplog.text
