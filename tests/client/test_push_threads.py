"""Listeners on threads, against a real broker: side by side or in order, tried again later, and put aside for good."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from brokers import DIES_WITH_PARENT, Broker, wait_for
from clients.records import Record
from clients.with_confluent import ConfluentKafka
from headrace import LATER, Consumer, Producer
from headrace.client.admin import groups, operations
from headrace.client.admin.cluster import Cluster
from headrace.client.consumer import listener as listener_module
from headrace.client.errors import GroupNotFound, Refusal, UnknownTopic
from headrace.errors import ErrorCode, HeadraceError, InvalidRequest, RequestTimedOut, SettingError
from headrace.records.consumer_records import ReceivedRecord
from proving import proves

MakeTopic = Callable[..., str]
PARTITIONS = 4
LARGE = bytes(2 << 20)


@pytest.fixture
def group() -> str:
    return f"push-{uuid.uuid4().hex[:8]}"


def write(broker: Broker, topic: str, count: int, partitions: int = PARTITIONS, first: int = 0) -> list[bytes]:
    values = [b"%d" % n for n in range(first, first + count)]
    records = [
        Record(value, key=b"k", partition=n % partitions, headers=(("h", b"1"),)) for n, value in enumerate(values)
    ]
    ConfluentKafka().produce(broker.bootstrap, topic, records)
    return values


def letters(dead: Consumer) -> list[ReceivedRecord]:
    """What came of the dead letters, which may have no topic yet."""
    try:
        return dead.poll(500)
    except UnknownTopic:
        return []


class Seen:
    """What a listener was called with; it fails for values in `failing`, as often as that says."""

    def __init__(self, failing: dict[bytes, int] | None = None) -> None:
        self.records: list[ReceivedRecord] = []
        self.failing = Counter(failing or {})
        self.lock = threading.Lock()

    def __call__(self, record: ReceivedRecord) -> object:
        with self.lock:
            self.records.append(record)
            if self.failing[record.value] > 0:
                self.failing[record.value] -= 1
                raise ValueError(f"not {record.value!r} today")
        return None

    def values(self) -> Counter[bytes]:
        with self.lock:
            return Counter(record.value for record in self.records)


def saved(cluster: Cluster, group: str, topic: str) -> int:
    """How many records of a topic the group has behind it."""
    return sum(offset for (name, _), offset in groups.fetch_offsets(cluster, group).items() if name == topic)


@proves("R8", "G6")
def test_several_threads_call_the_listener_side_by_side(
    broker: Broker, cluster: Cluster, topic: MakeTopic, group: str
) -> None:
    target, seen, together = topic(partitions=PARTITIONS), Seen(), threading.Barrier(4)
    values = write(broker, target, 200)

    def listener(record: ReceivedRecord) -> None:
        seen(record)
        # Only four at the same time get past here; 200 is a multiple of that.
        together.wait(30)

    consumer = Consumer(target, bootstrap=broker.bootstrap, group=group, commit_interval_ms=50)
    with consumer.listen(listener, threads=4):
        wait_for("all records", lambda: len(seen.records) == 200)
        wait_for("progress by the clock", lambda: saved(cluster, group, target) == 200)
        with pytest.raises(InvalidRequest, match="go to its listener"):
            consumer.poll(0)
    assert seen.values() == Counter(values)
    assert groups.describe_group(cluster, group).members == ()


@proves("R8", "G6")
def test_in_order_one_at_a_time_and_a_record_that_fails_is_tried_in_place(
    broker: Broker, cluster: Cluster, topic: MakeTopic, group: str
) -> None:
    target, running = topic(partitions=PARTITIONS), Counter[int]()
    write(broker, target, 80)
    seen = Seen({b"4": 3, b"41": 1})

    def listener(record: ReceivedRecord) -> None:
        running[record.partition] += 1
        assert running[record.partition] == 1
        try:
            seen(record)
        finally:
            running[record.partition] -= 1

    with Consumer(target, bootstrap=broker.bootstrap, group=group).listen(listener, ordered=True, pause_ms=10):
        wait_for("all records", lambda: len(seen.records) == 84)
    for partition in range(PARTITIONS):
        offsets = [record.offset for record in seen.records if record.partition == partition]
        assert offsets == sorted(offsets)
        assert set(offsets) == set(range(20))
    assert seen.values()[b"4"] == 4
    assert saved(cluster, group, target) == 80


def test_a_partition_that_does_not_get_on_does_not_hold_up_the_others(
    broker: Broker, topic: MakeTopic, group: str
) -> None:
    """In order, with more behind the record that fails than is ever taken in at once."""
    target = topic(partitions=PARTITIONS)
    write(broker, target, 8000)
    seen = Seen({b"0": 1 << 30})
    with Consumer(target, bootstrap=broker.bootstrap, group=group).listen(seen, threads=2, ordered=True, pause_ms=10):
        wait_for("all other partitions", lambda: sum(record.partition != 0 for record in seen.records) == 6000)
    assert {record.offset for record in seen.records if record.partition == 0} == {0}


def test_a_listener_that_wants_to_end_the_process_has_failed(broker: Broker, topic: MakeTopic, group: str) -> None:
    target, seen = topic(), Seen()
    write(broker, target, 10, partitions=1)

    def listener(record: ReceivedRecord) -> None:
        seen(record)
        if record.offset < 4 and seen.values()[record.value] == 1:
            raise SystemExit

    with Consumer(target, bootstrap=broker.bootstrap, group=group).listen(listener, threads=2, delays_ms=(20,)):
        wait_for("all, and four of them again", lambda: sorted(seen.values().values()) == [1] * 6 + [2] * 4)


@proves("R10")
def test_a_record_that_fails_is_tried_again_later_and_then_put_aside(
    broker: Broker, cluster: Cluster, topic: MakeTopic, group: str
) -> None:
    target = topic(partitions=PARTITIONS)
    write(broker, target, 20)
    seen = Seen({b"3": 99, b"8": 1})
    consumer = Consumer(target, bootstrap=broker.bootstrap, group=group, session_timeout_ms=6000)
    with consumer.listen(seen, max_tries=2, delays_ms=(50, 150)):
        wait_for("three tries of one and two of another", lambda: (seen.values()[b"3"], seen.values()[b"8"]) == (3, 2))
        dead = Consumer(f"{group}.dead", bootstrap=broker.bootstrap)
        with dead:
            (letter,) = wait_for("the dead letter", lambda: letters(dead))
    assert seen.values().total() == 20 + 3
    again = [record for record in seen.records if record.value == b"3"]
    assert {(r.topic, r.partition, r.offset, r.key, tuple(r.headers)) for r in again} == {
        (target, 3, 0, b"k", (("h", b"1"),))
    }
    said = dict(letter.headers)
    assert (letter.key, letter.value, said["h"], said["headrace-tries"]) == (b"k", b"3", b"1", b"3")
    assert (said["headrace-topic"], said["headrace-partition"]) == (target.encode(), b"3")
    assert said["headrace-error"] == b"ValueError: not b'3' today"
    assert saved(cluster, group, target) == 20
    assert saved(cluster, group, f"{group}.retry") == 3


def test_a_listener_may_ask_for_a_record_later_without_an_error(broker: Broker, topic: MakeTopic, group: str) -> None:
    target, calls = topic(), list[int]()
    write(broker, target, 1, partitions=1)

    def listener(record: ReceivedRecord) -> object:
        calls.append(record.offset)
        return LATER if len(calls) == 1 else None

    # A group's name may be one that no topic can have.
    with Consumer(target, bootstrap=broker.bootstrap, group=f"{group} / 1").listen(listener, delays_ms=(20,)):
        wait_for("the second call", lambda: len(calls) == 2)


def test_in_order_with_a_limit_the_record_is_put_aside_and_the_next_one_comes(
    broker: Broker, topic: MakeTopic, group: str
) -> None:
    target = topic()
    write(broker, target, 3, partitions=1)
    seen = Seen({b"1": 99})
    with Consumer(target, bootstrap=broker.bootstrap, group=group).listen(seen, ordered=True, max_tries=1, pause_ms=10):
        wait_for("the record behind it", lambda: seen.values()[b"2"])
        with Consumer(f"{group}.dead", bootstrap=broker.bootstrap) as dead:
            assert [record.value for record in wait_for("the dead letter", lambda: letters(dead))] == [b"1"]
    assert [record.value for record in seen.records] == [b"0", b"1", b"1", b"2"]


def test_a_value_that_cannot_be_decoded_is_put_aside_as_it_came(broker: Broker, topic: MakeTopic, group: str) -> None:
    target, values = topic(), list[object]()
    ConfluentKafka().produce(broker.bootstrap, target, [Record(b'{"n": 1}'), Record(b"{broken"), Record(b'{"n": 2}')])
    consumer = Consumer(
        target, bootstrap=broker.bootstrap, group=group, decoder=lambda value: json.loads(value or b"null")
    )
    with consumer.listen(lambda record: values.append(record.value), max_tries=0):
        wait_for("those that can", lambda: len(values) == 2)
        with Consumer(f"{group}.dead", bootstrap=broker.bootstrap) as dead:
            assert [record.value for record in wait_for("the dead letter", lambda: letters(dead))] == [b"{broken"]
    assert sorted(values, key=str) == [{"n": 1}, {"n": 2}]


@proves("R10")
def test_a_large_record_that_fails_is_put_aside_as_any_other(broker: Broker, topic: MakeTopic, group: str) -> None:
    target, seen = topic(max_message_bytes=4 << 20), Seen({LARGE: 2})
    with Producer(broker.bootstrap, max_record_bytes=3 << 20) as producer:
        producer.send(target, LARGE)
    consumer = Consumer(target, bootstrap=broker.bootstrap, group=group)
    with (
        consumer.listen(seen, max_tries=1, delays_ms=(10,)),
        Consumer(f"{group}.dead", bootstrap=broker.bootstrap) as dead,
    ):
        assert [record.value for record in wait_for("the dead letter", lambda: letters(dead))] == [LARGE]
    assert len(seen.records) == 2


def test_a_record_that_cannot_be_put_aside_is_sent_until_it_can_without_calling_again(
    broker: Broker, cluster: Cluster, topic: MakeTopic, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    target, seen = topic(max_message_bytes=4 << 20), Seen({LARGE: 99})
    operations.create_topic(cluster, f"{group}.dead", partitions=1, configs={"max.message.bytes": "1000"})
    with Producer(broker.bootstrap, max_record_bytes=3 << 20) as producer:
        producer.send(target, LARGE)
    consumer = Consumer(target, bootstrap=broker.bootstrap, group=group)
    with caplog.at_level(logging.ERROR), consumer.listen(seen, ordered=True, max_tries=0, pause_ms=10):
        wait_for("the error", lambda: f"{target}-0 at offset 0 failed and cannot be put into" in caplog.text)
        operations.alter_configs(cluster, "topic", f"{group}.dead", values={"max.message.bytes": "4000000"})
        with Consumer(f"{group}.dead", bootstrap=broker.bootstrap) as dead:
            assert [record.value for record in wait_for("the dead letter", lambda: letters(dead))] == [LARGE]
    assert len(seen.records) == 1
    assert caplog.text.count("cannot be put into") == 1


def test_values_are_decoded_once_when_listening_follows_reading(broker: Broker, topic: MakeTopic, group: str) -> None:
    target, seen = topic(), Seen({b"2!": 1})
    write(broker, target, 5, partitions=1)
    consumer = Consumer(target, bootstrap=broker.bootstrap, group=group, decoder=lambda value: (value or b"") + b"!")
    assert next(consumer.records(30_000)).value == b"0!"
    with consumer.listen(seen, delays_ms=(10,)):
        wait_for("the others", lambda: len(seen.records) == 5)
    assert seen.values() == Counter([b"1!", b"2!", b"2!", b"3!", b"4!"])


def test_in_broadcast_mode_a_failure_is_only_logged(
    broker: Broker, topic: MakeTopic, group: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = topic()
    write(broker, target, 3, partitions=1)
    seen = Seen({b"1": 1})
    consumer = Consumer(target, bootstrap=broker.bootstrap, group=group, mode="broadcast", progress_dir=tmp_path)
    with caplog.at_level(logging.WARNING), consumer.listen(seen):
        wait_for("all records", lambda: len(seen.records) == 3)
    assert f"{target}-0 at offset 1 failed for the 1. time: ValueError: not b'1' today" in caplog.text
    with Consumer(target, bootstrap=broker.bootstrap, group=group, mode="broadcast", progress_dir=tmp_path) as again:
        assert again.position(target, 0) == 3


@proves("R8")
@pytest.mark.parametrize("assignor", ["average", "cooperative"])
def test_a_rebalance_waits_for_what_is_running_so_nothing_is_done_twice(
    broker: Broker, cluster: Cluster, topic: MakeTopic, group: str, assignor: str
) -> None:
    target, seen, gate = topic(partitions=PARTITIONS), Seen(), threading.Semaphore(0)
    values = write(broker, target, 100)

    def listener(record: ReceivedRecord) -> None:
        gate.acquire(timeout=30)
        seen(record)

    def start() -> Consumer:
        return Consumer(target, bootstrap=broker.bootstrap, group=group, assignor=assignor, session_timeout_ms=1500)  # type: ignore[arg-type]

    with start().listen(listener, threads=2, ordered=True, pause_ms=10) as first:
        gate.release(40)
        wait_for("some records", lambda: len(seen.records) >= 20)
        second_consumer = start()
        with second_consumer.listen(listener, threads=2, ordered=True, pause_ms=10):
            # Both wait at the gate for the rebalance, so it is opened until the second one has its share.
            def shared() -> bool:
                gate.release()
                return bool(second_consumer.assignment)

            wait_for("the second to have partitions", shared)
            gate.release(1000)
            wait_for("all records", lambda: len(seen.values()) == 100)
        assert first.error is None
    assert seen.values() == Counter(values)
    assert saved(cluster, group, target) == 100


LISTENER = """
import sys
from headrace import Consumer

bootstrap, topic, group = sys.argv[1:]

def listener(record):
    print("call", record.value.decode(), flush=True)
    if sys.stdin.readline() != "ok\\n":
        raise ValueError("not now")

consumer = Consumer(topic, bootstrap=bootstrap, group=group, instance_id="one", commit_interval_ms=20)
consumer.listen(listener, threads=1, delays_ms=(10,)).wait()
"""


@proves("R10")
def test_a_record_that_failed_is_not_lost_when_the_process_is_killed(
    broker: Broker, cluster: Cluster, topic: MakeTopic, group: str
) -> None:
    """The first process fails every record and is killed in the middle of a call; the next one has them all. It takes
    the place of the first by its name, so that a session may be long: no machine is too busy for its heartbeats."""
    target = topic()
    values = write(broker, target, 10, partitions=1)
    command = [*DIES_WITH_PARENT, sys.executable, "-c", LISTENER, broker.bootstrap, target, group]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        for _ in range(7):
            assert process.stdout.readline().startswith("call")
            process.stdin.write("fail\n")
            process.stdin.flush()
        assert process.stdout.readline().startswith("call")
        wait_for("progress of what failed", lambda: saved(cluster, group, target) > 0)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    seen = Seen()
    with Consumer(target, bootstrap=broker.bootstrap, group=group, instance_id="one").listen(seen):
        wait_for("every record", lambda: set(seen.values()) == set(values))
    assert saved(cluster, group, target) == 10


def test_listening_ends_with_the_error_that_the_group_gives(broker: Broker, topic: MakeTopic, group: str) -> None:
    target = topic()
    options = {"bootstrap": broker.bootstrap, "group": group, "instance_id": "only", "session_timeout_ms": 1500}
    write(broker, target, 1, partitions=1)
    seen = Seen()
    first = Consumer(target, **options).listen(seen, ordered=True)  # type: ignore[arg-type]
    wait_for("its record", lambda: seen.records)
    second = Consumer(target, **options)  # type: ignore[arg-type]
    wait_for("the second to have it", lambda: second.poll(100) or second.assignment)
    with pytest.raises(Refusal) as ended:
        first.wait(60)
    assert ended.value.kafka_code == ErrorCode.FENCED_INSTANCE_ID
    first.close()
    second.close()


def test_listening_that_ends_by_an_error_leaves_the_group(
    broker: Broker, cluster: Cluster, topic: MakeTopic, group: str
) -> None:
    """Its member of the retry topic is fenced; the other one has to go too."""
    options = {"bootstrap": broker.bootstrap, "group": group, "session_timeout_ms": 1500}
    first = Consumer(topic(), instance_id="only", **options).listen(Seen())  # type: ignore[arg-type]

    def members() -> int:
        try:
            return len(groups.describe_group(cluster, group).members)
        except GroupNotFound:
            return 0

    wait_for("both members", lambda: members() == 2)
    with Consumer(f"{group}.retry", instance_id="only.retry", **options) as second:  # type: ignore[arg-type]
        with pytest.raises(Refusal) as ended:
            first.wait(60)
        assert ended.value.kafka_code == ErrorCode.FENCED_INSTANCE_ID
        wait_for("it to be gone", lambda: second.poll(20) or members() == 1)
    first.close()


def test_progress_that_is_not_saved_when_listening_ends_is_told(
    broker: Broker, topic: MakeTopic, group: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = Consumer(topic(), bootstrap=broker.bootstrap, group=group)
    with consumer.listen(Seen()) as running:
        assert running.retries is not None
        close = running.retries.close

        def fail(*, handed_out: bool, on_done: Callable[[HeadraceError | None], None]) -> None:
            close(handed_out=handed_out, on_done=lambda _: on_done(RequestTimedOut("no answer")))

        monkeypatch.setattr(running.retries, "close", fail)
    assert "progress was not saved when the group was left, and comes again: no answer" in caplog.text


def test_a_partition_that_cannot_be_read_is_told_and_the_others_go_on(
    broker: Broker, cluster: Cluster, topic: MakeTopic, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    target, seen = topic(partitions=2), Seen()
    write(broker, target, 20, partitions=2)
    operations.delete_records(cluster, target, {0: 5})
    groups.commit_offsets(cluster, group, {(target, 0): 0, (target, 1): 0})
    consumer = Consumer(target, bootstrap=broker.bootstrap, group=group, start="none")
    with caplog.at_level(logging.ERROR), consumer.listen(seen) as running:
        wait_for("the failure", lambda: running.failures)
        write(broker, target, 20, partitions=2)
        wait_for("the other partition", lambda: len(seen.records) >= 20)
        assert {record.partition for record in seen.records} == {1}
        assert list(running.failures) == [(target, 0)]
    assert caplog.text.count(f"{target}-0 is read no further") == 1


def test_listeners_that_do_not_return_are_waited_for_together(
    broker: Broker, topic: MakeTopic, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other they would take a minute."""
    monkeypatch.setattr(listener_module, "JOIN_S", 2.0)
    target, seen, gate = topic(), Seen(), threading.Event()
    write(broker, target, 30, partitions=1)

    def listener(record: ReceivedRecord) -> None:
        seen(record)
        gate.wait()

    running = Consumer(target, bootstrap=broker.bootstrap, group=group).listen(listener, threads=30)
    try:
        wait_for("all to be called", lambda: len(seen.records) == 30)
        closing = threading.Thread(target=running.close)
        closing.start()
        wait_for("the end", lambda: not closing.is_alive())
    finally:
        gate.set()
    closing.join()


@pytest.mark.parametrize("wrong", [{"threads": 0}, {"pause_ms": 0}, {"max_tries": -1}, {"delays_ms": ()}])
def test_settings_that_make_no_sense_are_refused(
    broker: Broker, topic: MakeTopic, group: str, wrong: dict[str, int]
) -> None:
    with Consumer(topic(), bootstrap=broker.bootstrap, group=group) as consumer, pytest.raises(SettingError):
        consumer.listen(Seen(), **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["cluster", "broadcast"])
def test_listeners_need_progress_to_be_saved_by_the_clock(
    broker: Broker, topic: MakeTopic, group: str, tmp_path: Path, mode: Literal["cluster", "broadcast"]
) -> None:
    with (
        Consumer(
            topic(),
            bootstrap=broker.bootstrap,
            group=group,
            mode=mode,
            commit_interval_ms=0,
            progress_dir=tmp_path,
        ) as consumer,
        pytest.raises(SettingError, match="commit_interval_ms"),
    ):
        consumer.listen(Seen())


@proves("U2")
def test_topics_for_what_failed_are_made_when_the_first_record_needs_them(
    broker: Broker, cluster: Cluster, topic: MakeTopic, group: str
) -> None:
    target, seen = topic(), Seen({b"2": 1, b"3": 99})
    write(broker, target, 2, partitions=1)

    def made() -> set[str]:
        return {name.removeprefix(group) for name in cluster.topology().topics if name.startswith(group)}

    consumer = Consumer(target, bootstrap=broker.bootstrap, group=group)
    with consumer.listen(seen, max_tries=1, delays_ms=(10, 20, 30)):
        wait_for("the progress of what was done", lambda: len(seen.records) == 2)
        assert made() == set()
        write(broker, target, 1, partitions=1, first=2)
        wait_for("the second try", lambda: seen.values()[b"2"] == 2)
        assert made() == {".retry"}
        assert len(cluster.topic(f"{group}.retry").partitions) == 3
        write(broker, target, 1, partitions=1, first=3)
        with Consumer(f"{group}.dead", bootstrap=broker.bootstrap) as dead:
            (letter,) = wait_for("the dead letter", lambda: letters(dead))
        assert (letter.value, seen.values()[b"3"]) == (b"3", 2)
        assert made() == {".retry", ".dead"}


@proves("U2")
def test_members_that_were_there_before_the_retry_topic_read_it(broker: Broker, topic: MakeTopic, group: str) -> None:
    target, seen = topic(partitions=PARTITIONS), Seen({b"%d" % n: 1 for n in range(8)})
    members = [Consumer(target, bootstrap=broker.bootstrap, group=group, client_id=f"m{n}") for n in range(2)]
    with members[0].listen(seen, delays_ms=(10,)), members[1].listen(seen, delays_ms=(10,)):
        wait_for("both to have partitions", lambda: all(len(member.assignment) == 2 for member in members))
        write(broker, target, 8)
        wait_for("a second try of all", lambda: min(seen.values().values(), default=0) >= 2 and len(seen.values()) == 8)


@proves("U2")
def test_what_a_listener_raised_is_logged_with_where(
    broker: Broker, topic: MakeTopic, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    target = topic()
    write(broker, target, 1, partitions=1)

    prices: dict[bytes | None, int] = {}

    def look_up(value: bytes | None) -> int:
        return prices[value]

    with Consumer(target, bootstrap=broker.bootstrap, group=group).listen(lambda record: look_up(record.value)):
        wait_for("the warning", lambda: f"{target}-0 at offset 0 failed for the 1. time" in caplog.text)
    (said,) = [each for each in caplog.records if "failed for the 1. time" in each.getMessage()]
    assert said.exc_info is not None
    assert "in look_up" in caplog.text
    assert "KeyError: b'0'" in caplog.text
    assert "client/consumer/threads.py" not in caplog.text
