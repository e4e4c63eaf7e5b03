"""When a consumer saves how far it has read, and that the next one goes on there: with a group, and by itself."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from brokers import DIES_WITH_PARENT, Broker, wait_for
from client.connection_peer import Peer
from clients.records import Record
from clients.with_confluent import ConfluentKafka
from headrace import Consumer
from headrace.client.admin import groups, operations
from headrace.client.admin.cluster import Cluster
from headrace.client.connection.broker_connection import OnAnswer
from headrace.client.connection.connections import shared
from headrace.client.connection.thread_reactor import ThreadReactor
from headrace.client.consumer.coordinator import Coordinator, Identity
from headrace.client.consumer.options import ConsumerConfig
from headrace.client.consumer.progress import GroupProgress, Offsets, ProgressUnusable
from headrace.errors import ErrorCode, HeadraceError, ProtocolError
from headrace.wire import api as apis
from headrace.wire.message import Message
from proving import proves

MakeTopic = Callable[..., str]

READER = """
import sys
from headrace import Consumer

bootstrap, topic, folder = sys.argv[1:]
with Consumer(topic, bootstrap=bootstrap, group="all", mode="broadcast", client_id="killed", progress_dir=folder,
              commit_interval_ms=50) as consumer:
    for _ in sys.stdin:
        records = []
        while not records:
            records = consumer.poll(1000, max_records=7)
        print(*(record.offset for record in records), flush=True)
"""
"""Reads a few records for every line on its standard input, and says which."""


@pytest.fixture
def group() -> str:
    return f"group-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def start_reader(broker: Broker, tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(topic: str) -> subprocess.Popen[str]:
        command = [*DIES_WITH_PARENT, sys.executable, "-c", READER, broker.bootstrap, topic, str(tmp_path)]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def write(broker: Broker, topic: str, count: int, partitions: int = 1) -> None:
    records = [Record(b"%d" % n, partition=n % partitions) for n in range(count)]
    ConfluentKafka().produce(broker.bootstrap, topic, records)


def read(consumer: Consumer, count: int) -> list[int]:
    """So many records at least, as their offsets."""
    found: list[int] = []

    def enough() -> bool:
        found.extend(record.offset for record in consumer.poll(200))
        return len(found) >= count

    wait_for(f"{count} records", enough)
    return found


@proves("R8")
def test_progress_is_saved_by_the_clock_of_what_earlier_polls_gave(
    broker: Broker, cluster: Cluster, topic: MakeTopic, group: str
) -> None:
    assert ConsumerConfig(topics=("t",)).commit_interval_ms == 5000
    target = topic()
    write(broker, target, 10)
    with Consumer(target, bootstrap=broker.bootstrap, group=group, commit_interval_ms=50) as consumer:
        wait_for("records", lambda: consumer.poll(200, max_records=4))
        consumer.poll(0, max_records=4)
        wait_for("the first four to be saved", lambda: groups.fetch_offsets(cluster, group) == {(target, 0): 4})
        # The caller still works on what the last poll gave: a crash now must not skip it.
        assert groups.fetch_offsets(cluster, group) == {(target, 0): 4}


@proves("R8")
def test_progress_of_all_that_was_handed_out_is_saved_on_close(
    broker: Broker, cluster: Cluster, topic: MakeTopic, group: str
) -> None:
    target = topic(partitions=2)
    write(broker, target, 10, partitions=2)
    with Consumer(target, bootstrap=broker.bootstrap, group=group) as consumer:
        read(consumer, 10)
    assert groups.fetch_offsets(cluster, group) == {(target, 0): 5, (target, 1): 5}
    assert groups.describe_group(cluster, group).members == ()
    write(broker, target, 2, partitions=2)
    with Consumer(target, bootstrap=broker.bootstrap, group=group) as consumer:
        assert read(consumer, 2) == [5, 5]


def test_a_caller_that_fails_has_its_last_records_again(
    broker: Broker, cluster: Cluster, topic: MakeTopic, group: str
) -> None:
    target = topic()
    write(broker, target, 10)

    def work() -> None:
        with Consumer(target, bootstrap=broker.bootstrap, group=group) as consumer:
            wait_for("records", lambda: consumer.poll(200, max_records=4))
            consumer.poll(200, max_records=4)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert groups.fetch_offsets(cluster, group) == {(target, 0): 4}


@proves("R8")
def test_the_clock_does_not_undo_a_commit(broker: Broker, cluster: Cluster, topic: MakeTopic, group: str) -> None:
    """Of the last call's records the clock by itself saves nothing, but the caller may have said that they are done."""
    target, elsewhere = topic(), topic()
    write(broker, target, 10)
    with Consumer([target, elsewhere], bootstrap=broker.bootstrap, group=group) as consumer:
        wait_for("records", lambda: consumer.poll(200, max_records=4))
        consumer.commit()
        with consumer._driver.reactor.lock:
            consumer._core._save_by_clock()
        # Behind what the clock has sent, if it has: what is told then counts.
        consumer.commit({(elsewhere, 0): 1})
        assert groups.fetch_offsets(cluster, group) == {(target, 0): 4, (elsewhere, 0): 1}
        consumer.poll(200, max_records=4)
        consumer.commit({(target, 0): 6})
        with consumer._driver.reactor.lock:
            assert (target, 0) not in consumer._core.done_with()


@proves("R8")
def test_a_caller_that_fails_keeps_what_it_has_committed(
    broker: Broker, cluster: Cluster, topic: MakeTopic, group: str
) -> None:
    target = topic()
    write(broker, target, 10)

    def work() -> None:
        with Consumer(target, bootstrap=broker.bootstrap, group=group) as consumer:
            wait_for("records", lambda: consumer.poll(200, max_records=4))
            consumer.commit()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert groups.fetch_offsets(cluster, group) == {(target, 0): 4}


@proves("R8")
def test_a_commit_that_is_tried_again_does_not_undo_a_later_one() -> None:
    """A coordinator that loads its groups refuses the first until the second has come, which is taken at once."""
    place, taken = ("t", 0), list[int]()

    def reply(api_key: int, request: Message) -> Message:
        if api_key == apis.METADATA:
            broker = Message(node_id=1, host=peer.address.host, port=peer.address.port, rack=None)
            return Message(brokers=[broker], cluster_id="c", controller_id=1, topics=[])
        if api_key == apis.FIND_COORDINATOR:
            found = Message(key="g", node_id=1, host=peer.address.host, port=peer.address.port, error_code=0)
            return Message(coordinators=[found])
        ((part,),) = ([*topic.partitions] for topic in request.topics)
        code = ErrorCode.NONE if taken or part.committed_offset == 20 else ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
        if code == ErrorCode.NONE:
            taken.append(part.committed_offset)
        return Message(topics=[Message(name="t", partitions=[Message(partition_index=0, error_code=code)])])

    with Peer(reply) as peer:
        pool = shared(str(peer.address), client_id="progress")
        reactor = pool.reactor
        assert isinstance(reactor, ThreadReactor)
        answers: list[HeadraceError | None] = []
        try:
            with reactor.lock:
                progress = GroupProgress(Coordinator(pool, "g"), lambda: Identity("m", 1))
                progress.save({place: 10}, answers.append)
            wait_for("the first to be refused", lambda: peer.asked.count(apis.OFFSET_COMMIT) >= 3, pause_s=0.01)
            with reactor.lock:
                progress.save({place: 20}, answers.append)
            assert reactor.wait(lambda: len(answers) == 2, reactor.now() + 60)
        finally:
            pool.release()
    assert answers == [None, None]
    assert taken == [20, 20]


def test_what_an_answer_leaves_out_is_neither_saved_nor_without_progress() -> None:
    class Forgetful:
        """A coordinator that answers for partition 0 alone."""

        group = "g"

        def persist(
            self, api_key: int, body: object, judge: Callable[[Message], int], on_done: OnAnswer, *, within_s: float
        ) -> None:
            part = Message(partition_index=0, error_code=0, committed_offset=7)
            topics = [Message(name="t", partitions=[part])]
            answer = Message(topics=topics, groups=[Message(error_code=0, topics=topics)])
            assert judge(answer) == ErrorCode.NONE
            on_done(answer)

    progress = GroupProgress(Forgetful(), lambda: Identity("m", 1))  # type: ignore[arg-type]
    saved: list[HeadraceError | None] = []
    loaded: list[Offsets | HeadraceError] = []
    for partitions in (1, 2):
        progress.save({("t", partition): 5 for partition in range(partitions)}, saved.append)
        progress.load([("t", partition) for partition in range(partitions)], loaded.append)
    assert saved[0] is None
    assert loaded[0] == {("t", 0): 7}
    for answer in (saved[1], loaded[1]):
        assert isinstance(answer, ProtocolError)
        assert str(answer) == "group 'g': the answer leaves out t-1"


@proves("R8")
def test_two_in_broadcast_mode_each_read_all_and_go_on_after_a_restart(
    broker: Broker, topic: MakeTopic, group: str, tmp_path: Path
) -> None:
    target = topic(partitions=3)
    write(broker, target, 30, partitions=3)

    def listen(client_id: str) -> Consumer:
        return Consumer(
            target, bootstrap=broker.bootstrap, group=group, mode="broadcast", client_id=client_id,
            progress_dir=tmp_path,
        )  # fmt: skip

    with listen("a") as first, listen("b") as second:
        assert len(read(first, 30)) == len(read(second, 30)) == 30
        with pytest.raises(ProgressUnusable, match="client_id of its own"):
            listen("a")
    write(broker, target, 6, partitions=3)
    with listen("a") as first, listen("c") as newcomer:
        assert sorted(read(first, 6)) == [10, 10, 10, 11, 11, 11]
        assert len(read(newcomer, 36)) == 36


@proves("R8")
def test_in_broadcast_mode_each_reads_what_a_topic_gains_and_goes_on_there_after_a_restart(
    broker: Broker, cluster: Cluster, topic: MakeTopic, group: str, tmp_path: Path
) -> None:
    target = topic(partitions=1)
    write(broker, target, 10, partitions=1)

    def start(client_id: str) -> Consumer:
        return Consumer(
            target, bootstrap=broker.bootstrap, group=group, mode="broadcast", client_id=client_id,
            progress_dir=tmp_path, start="latest",
        )  # fmt: skip

    with start("a") as first, start("b") as second:
        assert first.position(target, 0) == second.position(target, 0) == 10
        operations.create_partitions(cluster, target, 3)
        write(broker, target, 30, partitions=3)
        for consumer in (first, second):
            # What a refresh brings every half minute, now.
            with consumer._driver.reactor.lock:
                consumer._pool.metadata.stale(target)
            assert len(read(consumer, 30)) == 30
            assert consumer.assignment == [(target, partition) for partition in range(3)]
    write(broker, target, 6, partitions=3)
    with start("a") as first:
        assert sorted(read(first, 6)) == [10, 10, 11, 11, 20, 21]


@proves("R8")
def test_progress_in_broadcast_mode_survives_kill_9(
    broker: Broker, topic: MakeTopic, tmp_path: Path, start_reader: Callable[[str], subprocess.Popen[str]]
) -> None:
    """Killed twice: the next one goes on where the clock had saved, so every record comes."""
    target, file = topic(), tmp_path / "all" / "killed.json"
    write(broker, target, 1000)

    def read_more(reader: subprocess.Popen[str], calls: int) -> list[int]:
        assert reader.stdin is not None
        assert reader.stdout is not None
        found: list[int] = []
        for _ in range(calls):
            reader.stdin.write("more\n")
            reader.stdin.flush()
            found += map(int, reader.stdout.readline().split())
        return found

    def caught_up(reached: int) -> bool:
        return file.exists() and json.loads(file.read_text())["offsets"] == [[target, 0, reached]]

    began = 0
    for _ in range(2):
        reader = start_reader(target)
        seen = read_more(reader, 10)
        last = read_more(reader, 1)
        assert [*seen, *last] == list(range(began, last[-1] + 1))
        began = last[0]
        wait_for("what earlier polls gave to be saved", partial(caught_up, began))
        reader.send_signal(signal.SIGKILL)
        reader.wait()
    with Consumer(
        target, bootstrap=broker.bootstrap, group="all", mode="broadcast", client_id="killed", progress_dir=tmp_path
    ) as consumer:
        assert read(consumer, 1000 - began) == list(range(began, 1000))
