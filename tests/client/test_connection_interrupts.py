"""Ctrl-C, at any moment: it is heard, and nothing of the client is left half done."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from brokers import Broker, wait_for
from client.conftest import MakeTopic
from client.reading_back import read_partition
from client.test_connection_threads import WAIT_S, Echo, driven
from headrace.client.admin.cluster import Cluster
from headrace.client.connection.thread_reactor import ThreadReactor
from proving import proves

HANDLED = [signal.SIGINT, signal.SIGTERM, signal.SIGALRM]


class Stopped(BaseException):
    pass


def stop(*_: object) -> None:
    raise Stopped


@pytest.fixture
def reactor() -> Iterator[ThreadReactor]:
    made = ThreadReactor()
    yield made
    made.close()


@pytest.fixture(params=HANDLED)
def signum(request: pytest.FixtureRequest, reactor: ThreadReactor) -> Iterator[int]:
    """A signal whose handler raises, and is in its place again after a turn."""
    before = signal.signal(request.param, stop)
    yield request.param
    reactor.turn(0)
    assert signal.getsignal(request.param) is stop
    signal.signal(request.param, before)


def test_what_holds_the_lock_is_finished_first(reactor: ThreadReactor, signum: int) -> None:
    steps: list[str] = []

    def section() -> None:
        with reactor.lock:
            signal.raise_signal(signum)
            with reactor.lock:
                steps.append("first")
            steps.append("second")
        steps.append("after")

    for _ in range(3):
        with pytest.raises(Stopped):
            section()
    assert steps == ["first", "second"] * 3
    assert not reactor._owned()


@pytest.mark.parametrize("way", ["turn", "wait"])
def test_a_step_of_the_reactor_is_not_left_half_done(reactor: ThreadReactor, signum: int, way: str) -> None:
    steps: list[int] = []

    def step() -> None:
        signal.raise_signal(signum)
        steps.append(1)

    with reactor.lock:
        reactor.call_soon(step)
        reactor.call_soon(lambda: steps.append(2))
    drive: Callable[[], bool] = reactor.turn if way == "turn" else lambda: reactor.wait(lambda: False, math.inf)
    with pytest.raises(Stopped):
        drive()
    assert steps == [1, 2]


def test_a_handler_that_does_not_raise_lets_the_wait_go_on(reactor: ThreadReactor) -> None:
    handled: list[int] = []

    def handler(signum: int, _: object) -> None:
        handled.append(signum)
        # As programs do that end in order: it may use the client itself.
        reactor.turn(0)
        reactor.wait(lambda: True, math.inf)

    before = [signal.signal(each, handler) for each in HANDLED]
    try:
        done = threading.Event()
        with reactor.lock:
            for each in HANDLED:
                reactor.call_soon(lambda each=each: signal.raise_signal(each))  # type: ignore[misc]
            reactor.call_at(reactor.now() + 0.01, done.set)
        assert reactor.wait(done.is_set, reactor.now() + WAIT_S)
    finally:
        for each, earlier in zip(HANDLED, before, strict=True):
            signal.signal(each, earlier)
    assert sorted(handled) == sorted(HANDLED)


def test_a_signal_between_two_sections_is_heard_at_once(reactor: ThreadReactor, signum: int) -> None:
    with reactor.lock:
        pass
    ours = signal.getsignal(signum)
    assert ours is not stop
    with pytest.raises(Stopped):
        signal.raise_signal(signum)
    reactor.turn(0)
    assert signal.getsignal(signum) is stop
    # A program that keeps a handler and puts it back may have kept ours.
    signal.signal(signum, ours)
    with pytest.raises(Stopped):
        signal.raise_signal(signum)
    reactor.turn(0)


def test_all_that_came_meanwhile_is_heard(reactor: ThreadReactor) -> None:
    handled: list[int] = []

    def handler(signum: int, _: object) -> None:
        handled.append(signum)
        raise Stopped

    before = [signal.signal(each, handler) for each in HANDLED]
    try:
        with pytest.raises(Stopped), reactor.lock:
            list(map(signal.raise_signal, HANDLED))
    finally:
        for each, earlier in zip(HANDLED, before, strict=True):
            signal.signal(each, earlier)
    assert sorted(handled) == sorted(HANDLED)


def test_a_signal_without_a_handler_is_left_alone(reactor: ThreadReactor) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with reactor.lock:
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
            signal.raise_signal(signal.SIGTERM)
        reactor.turn(0)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


def send_when(signum: int, ready: Callable[[], bool]) -> threading.Thread:
    def send() -> None:
        wait_for("the main thread to sleep", ready, WAIT_S, 0.001)
        os.kill(os.getpid(), signum)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_a_wait_that_sleeps_is_ended(reactor: ThreadReactor, signum: int) -> None:
    echo = Echo(reactor)
    for _ in range(10):
        sender = send_when(signum, lambda: reactor._asleep_until > 0)
        with pytest.raises(Stopped):
            reactor.wait(lambda: False, reactor.now() + WAIT_S)
        sender.join()
        heard = echo.ask()
        assert reactor.wait(lambda: bool(heard), reactor.now() + WAIT_S)  # noqa: B023
    echo.close()


def test_a_wait_that_stands_by_is_ended(reactor: ThreadReactor, signum: int) -> None:
    over = threading.Event()
    with driven(reactor, over.is_set):
        for _ in range(10):
            sender = send_when(signum, lambda: bool(reactor._standing_by))
            with pytest.raises(Stopped):
                reactor.wait(lambda: False, reactor.now() + WAIT_S)
            sender.join()
            assert reactor._standing_by == []
        over.set()
        reactor.wake()


def test_a_child_process_hears_its_own_signals(reactor: ThreadReactor) -> None:
    with reactor.lock:
        child = os.fork()
        if child == 0:
            ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            os._exit(0 if ours else 1)
    assert os.waitpid(child, 0)[1] == 0


@proves("R6")
def test_a_busy_producer_survives_ctrl_c(broker: Broker, cluster: Cluster, topic: MakeTopic) -> None:
    """Ctrl-C at any moment of sends: everything is delivered, nothing twice, nothing waits for ever."""
    name = topic()
    program = Path(__file__).with_name("interrupted_producer.py")
    run = subprocess.run(
        [sys.executable, str(program), broker.bootstrap, name, "200"],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    values = [record.value for record in read_partition(cluster, name, 0)]
    assert len(values) == len(set(values)) == int(run.stdout)
