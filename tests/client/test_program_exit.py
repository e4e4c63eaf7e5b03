"""Programs that end without closing their producers and consumers: what is sent, saved and said, however they end."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic

import pytest

from brokers import DIES_WITH_PARENT, Broker, wait_for
from client.conftest import MakeTopic
from client.reading_back import read_partition
from headrace import Consumer, Producer
from headrace.client.admin import groups
from headrace.client.admin.cluster import Cluster
from headrace.client.connection import exits
from headrace.client.connection.callbacks import CallbackThread
from proving import proves

WITHIN_S = 120


def run(source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A program of its own, to its end."""
    return _run("-c", source, *arguments)


def run_file(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return _run(str(program), *arguments)


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*DIES_WITH_PARENT, sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )


SENDING = """
import os, sys, threading
from headrace import Producer
bootstrap, topic, ending = sys.argv[1:]
def send(count):
    producer = Producer(bootstrap, interval_ms=3_600_000)
    for nth in range(count):
        producer.send_async(topic, b"%d" % nth)
if ending == "thread":
    threading.Thread(target=send, args=(500,)).start()
elif ending == "callback":
    heard = []
    producer = Producer(bootstrap, interval_ms=3_600_000)
    for nth in range(500):
        producer.send_async(topic, b"%d" % nth, callback=lambda delivery: print(delivery.result().offset))
else:
    send(500)
if ending == "exit":
    sys.exit(3)
if ending == "error":
    raise ValueError("nobody catches this")
if ending == "at once":
    os._exit(0)
"""


@proves("R6")
@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("error", 1),
        ("callback", 0),
        pytest.param("end", 0, marks=pytest.mark.long),
        pytest.param("exit", 3, marks=pytest.mark.long),
        pytest.param("thread", 0, marks=pytest.mark.long),
        pytest.param("at once", 0, marks=pytest.mark.long),
    ],
)
def test_what_a_producer_holds_is_sent_when_its_program_ends(
    ending: str, code: int, broker: Broker, cluster: Cluster, topic: MakeTopic
) -> None:
    name = topic()
    ended = run(SENDING, broker.bootstrap, name, ending)
    assert ended.returncode == code, ended.stderr
    assert "of a producer" not in ended.stderr
    values = [int(record.value or b"") for record in read_partition(cluster, name, 0)]
    assert values == ([] if ending == "at once" else list(range(500)))
    if ending == "callback":
        assert list(map(int, ended.stdout.split())) == list(range(500))


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """No thread is started, as in a Python 3.12 that ends."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with monkeypatch.context() as ending:
        ending.setattr(threading.Thread, "start", refuse)
        yield ending


def test_callbacks_are_told_where_an_interpreter_that_ends_starts_no_thread(no_threads: pytest.MonkeyPatch) -> None:
    teller, told = CallbackThread(), list[int]()
    teller.submit(lambda: told.append(1))
    assert told == []  # who submits may have the reactor's lock
    assert teller.wait(monotonic() + WITHIN_S)
    assert told == [1]
    teller.submit(lambda: told.append(2))
    no_threads.undo()
    teller.submit(lambda: told.append(3))
    assert teller.wait(monotonic() + WITHIN_S)
    assert told == [1, 2, 3]
    teller.end()
    teller.join(WITHIN_S)


def test_callbacks_left_without_a_thread_are_told_by_who_closes(no_threads: pytest.MonkeyPatch) -> None:
    teller, told = CallbackThread(), list[bool]()
    teller.submit(lambda: told.append(teller.is_here and teller.wait(0.0)))
    teller.end()
    teller.join(WITHIN_S)
    assert told == [True]
    assert not teller.is_here


def test_ctrl_c_ends_a_callback_that_runs_in_the_main_thread(no_threads: pytest.MonkeyPatch) -> None:
    teller, told = CallbackThread(), list[int]()
    teller.submit(lambda: signal.raise_signal(signal.SIGINT))
    teller.submit(lambda: told.append(1))
    with pytest.raises(KeyboardInterrupt):
        teller.wait(monotonic() + WITHIN_S)
    assert teller.wait(monotonic() + WITHIN_S)
    assert told == [1]


LOCKED = """
import atexit, sys, threading
from headrace import Producer
bootstrap, topic = sys.argv[1:]
producer = Producer(bootstrap, interval_ms=200)
producer.send(topic, b"first")
guard = threading.Lock()
def told(delivery):
    with guard:
        print(delivery.result().offset >= 0, flush=True)
def keep_sending():
    while True:
        with guard:
            producer.send(topic, b"of a daemon")
def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")
atexit.register(lambda: setattr(threading.Thread, "start", refuse))
producer.send_async(topic, b"last", callback=told)
threading.Thread(target=keep_sending, daemon=True).start()
"""


@proves("R6")
def test_a_callback_at_the_end_may_take_a_lock_that_is_held_while_sending(broker: Broker, topic: MakeTopic) -> None:
    ended = run(LOCKED, broker.bootstrap, topic())
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr


STRANDED = """
import os, sys
from headrace import Producer
producer = Producer(sys.argv[1], interval_ms=3_600_000, exit_timeout_ms=float(sys.argv[2]))
producer.send("stranded", b"there")
for nth in range(70):
    producer.send_async("stranded", b"%d" % nth)
print("ready", flush=True)
sys.stdin.readline()
"""


@proves("R6")
@pytest.mark.parametrize("timeout_ms", [pytest.param(0, marks=pytest.mark.long), 300])
def test_what_cannot_be_sent_in_time_is_counted(fresh_broker: Callable[..., Broker], timeout_ms: int) -> None:
    broker = fresh_broker()
    with subprocess.Popen(
        [*DIES_WITH_PARENT, sys.executable, "-c", STRANDED, broker.bootstrap, str(timeout_ms)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        broker.kill()
        _, said = program.communicate("end\n", timeout=WITHIN_S)
    assert "70 records of a producer (headrace) are not known to be delivered" in said
    assert "exit_timeout_ms" in said


SLOW_CALLBACK = """
import sys, threading
from headrace import Producer
producer = Producer(sys.argv[1], interval_ms=1, exit_timeout_ms=300)
producer.send(sys.argv[2], b"first")
called = threading.Event()
def callback(delivery):
    called.set()
    threading.Event().wait()
producer.send_async(sys.argv[2], b"acknowledged", callback=callback)
called.wait()
"""


def test_what_is_acknowledged_is_not_counted_as_lost_while_its_callback_runs(broker: Broker, topic: MakeTopic) -> None:
    ended = run(SLOW_CALLBACK, broker.bootstrap, topic())
    assert ended.returncode == 0
    assert "known to be delivered" not in ended.stderr
    assert "callbacks of up to 1 records of a producer (headrace) have not ended" in ended.stderr


FORKED = """
import os, sys
from headrace import Producer
producer = Producer(sys.argv[1], interval_ms=3_600_000)
for nth in range(50):
    producer.send_async(sys.argv[2], b"%d" % nth)
child = os.fork()
if child:
    os.waitpid(child, 0)
sys.exit(0)
"""


@pytest.mark.long
def test_a_forked_child_leaves_what_its_parent_holds(broker: Broker, cluster: Cluster, topic: MakeTopic) -> None:
    name = topic()
    ended = run(FORKED, broker.bootstrap, name)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert len(read_partition(cluster, name, 0)) == 50


CHILDREN = """
import multiprocessing, sys
from concurrent.futures import ProcessPoolExecutor
def send(bootstrap, topic):
    from headrace import Producer
    producer = Producer(bootstrap, interval_ms=3_600_000)
    for nth in range(100):
        producer.send_async(topic, b"%d" % nth)
if __name__ == "__main__":
    bootstrap, topic, way = sys.argv[1:]
    if way == "pool":
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
            pool.submit(send, bootstrap, topic).result()
    else:
        child = multiprocessing.get_context(way).Process(target=send, args=(bootstrap, topic))
        child.start()
        child.join()
        sys.exit(child.exitcode)
"""


@proves("R6")
@pytest.mark.parametrize(
    "way",
    [
        "fork",
        pytest.param("pool", marks=pytest.mark.long),
        pytest.param("forkserver", marks=pytest.mark.long),
        pytest.param("spawn", marks=pytest.mark.long),
    ],
)
def test_what_a_child_of_multiprocessing_holds_is_sent_when_its_function_returns(
    way: str, broker: Broker, cluster: Cluster, topic: MakeTopic, tmp_path: Path
) -> None:
    name, program = topic(), tmp_path / "children.py"
    program.write_text(CHILDREN)
    ended = run_file(program, broker.bootstrap, name, way)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert len(read_partition(cluster, name, 0)) == 100


LOOP_ENDED = """
import asyncio, sys
from headrace.aio import Producer
async def main():
    producer = Producer(sys.argv[1], interval_ms=3_600_000)
    await producer.send(sys.argv[2], b"there")
    for nth in range(30):
        producer.send_async(sys.argv[2], b"%d" % nth)
    if len(sys.argv) > 3:
        await producer.close()
asyncio.run(main())
"""


def test_records_lost_with_their_loop_are_counted(broker: Broker, topic: MakeTopic) -> None:
    ended = run(LOOP_ENDED, broker.bootstrap, topic())
    assert ended.returncode == 0
    assert "30 records of a producer (headrace) are not known to be delivered: its loop has ended" in ended.stderr
    closed = run(LOOP_ENDED, broker.bootstrap, topic(), "close")
    assert (closed.returncode, closed.stderr) == (0, "")


READING = """
import sys
from headrace import Consumer
bootstrap, topic, group, way = sys.argv[1:]
consumer = Consumer(topic, bootstrap=bootstrap, group=group, commit_interval_ms=3_600_000)
if way == "listen":
    import threading
    done = threading.Semaphore(0)
    listening = consumer.listen(lambda record: done.release(), threads=2)
    for _ in range(100):
        done.acquire()
else:
    for count in (40, 60):
        got = []
        while len(got) < count:
            got += consumer.poll(10_000, max_records=count - len(got))
        print(len(got))
if way == "error":
    raise ValueError("nobody catches this")
"""


@proves("R9")
@pytest.mark.parametrize("way", ["end", pytest.param("error", marks=pytest.mark.long), "listen"])
def test_a_consumer_leaves_its_group_and_saves_progress_when_its_program_ends(
    way: str, broker: Broker, cluster: Cluster, topic: MakeTopic
) -> None:
    name, group = topic(), f"exit-{uuid.uuid4().hex[:8]}"
    with Producer(broker.bootstrap) as producer:
        for nth in range(100):
            producer.send_async(name, b"%d" % nth)
    ended = run(READING, broker.bootstrap, name, group, way)
    assert ended.returncode == (1 if way == "error" else 0), ended.stderr
    assert "could not be left" not in ended.stderr
    assert groups.describe_group(cluster, group).members == ()
    # What the last call gave may not be done: it comes again.
    saved = groups.fetch_offsets(cluster, group)[name, 0]
    assert saved == 100 if way == "listen" else 40 <= saved < 100


BUSY = """
import logging, sys, threading
from headrace import Consumer, Producer
bootstrap, topic, group, other, listener_ms, producer_ms = sys.argv[1:]
begun = threading.Event()
def listener(record):
    begun.set()
    threading.Event().wait()
consumer = Consumer(topic, bootstrap=bootstrap, group=group, exit_timeout_ms=int(listener_ms))
listening = consumer.listen(listener, threads=1)
begun.wait()
producer = Producer(bootstrap, client_id="waits", interval_ms=3_600_000, exit_timeout_ms=int(producer_ms))
for nth in range(100):
    producer.send_async(other, b"%d" % nth)
"""


@proves("R6")
@pytest.mark.parametrize(
    ("listener_ms", "producer_ms"), [(500, 60_000), pytest.param(5000, 5000, marks=pytest.mark.long)]
)
def test_a_listener_that_does_not_end_leaves_producers_their_time(
    listener_ms: int, producer_ms: int, broker: Broker, cluster: Cluster, topic: MakeTopic
) -> None:
    """With the same time for both only where the machine has nothing else to do; that nobody waits longer than it may,
    and that all begin before any is waited for, is shown below without a clock."""
    name, other, group = topic(), topic(), f"exit-{uuid.uuid4().hex[:8]}"
    with Producer(broker.bootstrap) as producer:
        producer.send(name, b"v")
    ended = run(BUSY, broker.bootstrap, name, group, other, str(listener_ms), str(producer_ms))
    assert ended.returncode == 0
    assert "of a producer" not in ended.stderr
    assert len(read_partition(cluster, other, 0)) == 100
    if listener_ms == 5000:
        assert "could not be left" not in ended.stderr
        assert groups.describe_group(cluster, group).members == ()


def test_no_part_of_the_exit_waits_beyond_its_end(
    broker: Broker, topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, begun, release = topic(), threading.Event(), threading.Event()
    with Producer(broker.bootstrap) as producer:
        producer.send(name, b"v")

    def listener(record: object) -> None:
        begun.set()
        release.wait()

    timeout_ms, group = 300, f"exit-{uuid.uuid4().hex[:8]}"
    consumer = Consumer(name, bootstrap=broker.bootstrap, group=group, exit_timeout_ms=timeout_ms)
    consumer.listen(listener, threads=1)
    assert begun.wait(WITHIN_S)
    deadlines, wait, here = list[float](), consumer._driver.reactor.wait, threading.current_thread()

    def noting(done: Callable[[], bool], deadline: float) -> bool:
        if threading.current_thread() is here:
            deadlines.append(deadline)
        return wait(done, deadline)

    monkeypatch.setattr(consumer._driver.reactor, "wait", noting)
    since = monotonic()
    for _ in consumer.at_exit(since):
        pass
    assert deadlines
    assert max(deadlines) <= since + timeout_ms / 1000
    release.set()
    consumer._pool.release()


class Leaving:
    """Notes its steps; may fail in one of them."""

    def __init__(self, steps: list[str], name: str, failing: int | None = None, error: BaseException | None = None):
        self._steps, self._name, self._failing, self._error = steps, name, failing, error

    def at_exit(self, since: float) -> Iterator[None]:
        for step in range(3):
            if step == self._failing and self._error is not None:
                raise self._error
            self._steps.append(f"{self._name}{step}")
            yield


def test_all_begin_before_any_is_waited_for_and_none_that_fails_keeps_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = list[str]()
    errors = (RuntimeError("broken"), SystemExit(1), KeyboardInterrupt())
    leaving = [Leaving(steps, "a"), *(Leaving(steps, "f", nth, error) for nth, error in enumerate(errors))]
    monkeypatch.setattr(exits, "_others", leaving)
    monkeypatch.setattr(exits, "_consumers", [Leaving(steps, "z")])
    exits._at_exit()
    assert steps == ["a0", "f0", "f0", "z0", "a1", "f1", "z1", "a2", "z2"]


@pytest.mark.long
def test_a_program_ends_when_its_group_cannot_be_left(fresh_broker: Callable[..., Broker]) -> None:
    broker = fresh_broker()
    with Producer(broker.bootstrap) as producer:
        producer.send("gone", b"v")
    source = """
import sys
from headrace import Consumer
consumer = Consumer("gone", bootstrap=sys.argv[1], group="g", exit_timeout_ms=300)
print(len(consumer.poll(20_000)), flush=True)
sys.stdin.readline()
"""
    with subprocess.Popen(
        [*DIES_WITH_PARENT, sys.executable, "-c", source, broker.bootstrap],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout is not None
        wait_for("a record", lambda: program.stdout is not None and program.stdout.readline() == "1\n")
        broker.kill()
        _, said = program.communicate("end\n", timeout=WITHIN_S)
    assert "group g could not be left" in said
    assert "not within 300 ms (exit_timeout_ms)" in said


LOOP_READING = """
import asyncio, sys
from headrace.aio import Consumer
async def main():
    consumer = Consumer(sys.argv[2], bootstrap=sys.argv[1], group=sys.argv[3])
    await consumer.poll(20_000)
    if len(sys.argv) > 4:
        await consumer.close()
asyncio.run(main())
"""


def test_a_consumer_whose_loop_has_ended_says_that_it_did_not_leave(broker: Broker, topic: MakeTopic) -> None:
    name = topic()
    with Producer(broker.bootstrap) as producer:
        producer.send(name, b"v")
    left, closed = (f"exit-{uuid.uuid4().hex[:8]}" for _ in range(2))
    ended = run(LOOP_READING, broker.bootstrap, name, left)
    assert ended.returncode == 0
    assert f"a consumer of group {left} was not closed, and its loop has ended" in ended.stderr
    ended = run(LOOP_READING, broker.bootstrap, name, closed, "close")
    assert (ended.returncode, ended.stderr) == (0, "")
