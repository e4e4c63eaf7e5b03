"""Callers that drive by turns: no wake-up lost, nobody left waiting while nobody drives, the user's code in order."""

from __future__ import annotations

import math
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from brokers import Broker, wait_for
from headrace.client.connection.broker_connection import BrokerConnection
from headrace.client.connection.connections import parse_address, shared
from headrace.client.connection.thread_reactor import ThreadReactor
from headrace.client.errors import EngineClosed, ForkedEngine
from headrace.errors import HeadraceError
from headrace.records.builder import Delivery, SentBatch
from headrace.wire import api as apis
from headrace.wire.message import Message
from proving import proves

WAIT_S = 30.0


class CallersOnly(ThreadReactor):
    """Nobody comes to the rescue of a caller who was forgotten."""

    def _start(self) -> None:
        return


@pytest.fixture
def reactor() -> Iterator[ThreadReactor]:
    made = ThreadReactor()
    yield made
    made.close()


@pytest.fixture
def callers_only() -> Iterator[ThreadReactor]:
    made = CallersOnly()
    yield made
    made.close()


class Echo:
    """One socket that many callers share: a byte written comes back, and is for the oldest who waits."""

    def __init__(self, reactor: ThreadReactor) -> None:
        self.reactor = reactor
        self.near, self.far = socket.socketpair()
        self.near.setblocking(False)
        self.waiting: list[list[int]] = []
        self.unsent = 0
        reactor.watch(self.near, self.readable, None)
        self.thread = threading.Thread(target=self.answer)
        self.thread.start()

    def answer(self) -> None:
        while received := self.far.recv(4096):
            self.far.sendall(received)

    def readable(self) -> None:
        try:
            received = self.near.recv(4096)
        except BlockingIOError:
            return
        for _ in received:
            self.waiting.pop(0).append(1)

    def flush(self) -> None:
        self.near.send(bytes(self.unsent))
        self.unsent = 0

    def ask(self) -> list[int]:
        heard: list[int] = []
        with self.reactor.lock:
            self.waiting.append(heard)
            self.unsent += 1
            if self.unsent == 1:
                self.reactor.call_soon(self.flush)
        return heard

    def close(self) -> None:
        self.reactor.unwatch(self.near)
        self.near.close()
        self.thread.join()
        self.far.close()


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run in so many threads at once; the first failure is raised here, and so is one that never ends."""
    failures: list[BaseException] = []

    def run(nth: int) -> None:
        try:
            work(nth)
        except BaseException as raised:  # noqa: BLE001 - raised again by the test
            failures.append(raised)

    threads = [threading.Thread(target=run, args=(nth,), daemon=True) for nth in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not failures, failures
    assert not any(thread.is_alive() for thread in threads)


def exchange_at_random(reactor: ThreadReactor, echo: Echo, draw: random.Random, count: int) -> None:
    """As applications do: wait for the answer, give up early and come back, or go off and let others drive."""
    for _ in range(count):
        heard = echo.ask()
        while not heard:
            way = draw.randrange(6)
            if way == 0:
                reactor.turn(0)
            elif way == 1:
                reactor.wait(lambda: bool(heard), reactor.now() + 0.0005)  # noqa: B023
            elif way == 2:
                reactor.post(lambda: None)
            elif way == 3:
                with reactor.lock:
                    reactor.call_at(reactor.now() + 0.0003, lambda: None)
                    reactor.run_callback(lambda: None)
            else:
                # Without a deadline, at which it would look again by itself.
                assert reactor.wait(lambda: bool(heard), math.inf)  # noqa: B023


def test_callers_take_over_from_each_other_and_none_is_forgotten(callers_only: ThreadReactor, seed: int) -> None:
    echo = Echo(callers_only)
    in_threads(6, lambda nth: exchange_at_random(callers_only, echo, random.Random(seed + nth), 150))
    assert echo.waiting == []
    echo.close()


@pytest.mark.long
@pytest.mark.parametrize("kind", [CallersOnly, ThreadReactor])
def test_callers_take_over_from_each_other_for_long(
    kind: type[ThreadReactor], seed: int, proof_report: Callable[..., None]
) -> None:
    reactor = kind()
    echo = Echo(reactor)
    began = time.monotonic()
    in_threads(16, lambda nth: exchange_at_random(reactor, echo, random.Random(seed + nth), 1500))
    assert echo.waiting == []
    echo.close()
    reactor.close()
    proof_report(callers=16, exchanges=16 * 1500, background=kind is ThreadReactor, seconds=time.monotonic() - began)


@proves("R16")
def test_many_threads_share_one_link_to_a_broker(callers_only: ThreadReactor, broker: Broker) -> None:
    connection = BrokerConnection(callers_only, parse_address(broker.bootstrap), client_id="crowd")

    def work(nth: int) -> None:
        for _ in range(30):
            heard: list[Message | HeadraceError] = []
            connection.ask(apis.METADATA, Message(topics=[]), heard.append, timeout_s=WAIT_S)
            assert callers_only.wait(lambda: bool(heard), callers_only.now() + WAIT_S)  # noqa: B023
            assert isinstance(heard[0], Message)

    in_threads(8, work)
    assert connection.opened_count == 1
    connection.close(EngineClosed("enough"))


def test_who_leaves_hands_over_to_one_that_stands_by(callers_only: ThreadReactor) -> None:
    """The driver's own wait ends while another thread's goes on: that one drives, and its timer is served."""
    served = threading.Event()
    standing = threading.Event()

    def stand_by() -> None:
        callers_only.call_at(callers_only.now() + 0.1, served.set)
        standing.set()
        assert callers_only.wait(served.is_set, callers_only.now() + WAIT_S)

    def drive() -> None:
        assert not callers_only.wait(standing_by_forever, callers_only.now() + 0.05)

    def standing_by_forever() -> bool:
        standing.set()
        return False

    driver = threading.Thread(target=drive)
    driver.start()
    assert standing.wait(WAIT_S)
    in_threads(1, lambda nth: stand_by())
    driver.join()
    assert served.is_set()


@contextmanager
def driven(reactor: ThreadReactor, done: Callable[[], bool]) -> Iterator[None]:
    """Another thread drives meanwhile, without a deadline, and must have heard that it is done by the end."""
    asked = threading.Event()

    def noted() -> bool:
        asked.set()
        return done()

    driver = threading.Thread(target=reactor.wait, args=(noted, math.inf), daemon=True)
    driver.start()
    assert asked.wait(WAIT_S)
    wait_for("the driver to sleep", lambda: reactor._asleep_until > 0, WAIT_S, 0.001)
    yield
    driver.join(WAIT_S)
    assert not driver.is_alive()


def test_an_answer_wakes_the_one_it_is_for_while_another_drives(callers_only: ThreadReactor) -> None:
    echo, stop = Echo(callers_only), threading.Event()

    def work(_: int) -> None:
        for _ in range(100):
            heard = echo.ask()
            assert callers_only.wait(lambda: bool(heard), math.inf)  # noqa: B023

    with driven(callers_only, stop.is_set):
        in_threads(1, work)
        stop.set()
        callers_only.wake()
    echo.close()


def test_the_driver_hears_what_another_thread_brings_about(callers_only: ThreadReactor) -> None:
    brought = threading.Event()
    with driven(callers_only, brought.is_set):
        with callers_only.lock:
            callers_only.call_soon(brought.set)
        assert not callers_only.turn(0)


def test_the_driver_gets_up_for_a_timer_that_another_thread_sets(callers_only: ThreadReactor) -> None:
    rang = threading.Event()
    with driven(callers_only, rang.is_set):
        callers_only.call_at(callers_only.now() + 0.02, rang.set)


def test_wake_makes_whoever_waits_look_again(reactor: ThreadReactor) -> None:
    flags = [threading.Event() for _ in range(4)]
    results: list[bool] = []
    threads = [
        threading.Thread(target=lambda flag=flag: results.append(reactor.wait(flag.is_set, reactor.now() + WAIT_S)))
        for flag in flags
    ]
    for thread in threads:
        thread.start()
    for flag, thread in zip(flags, threads, strict=True):
        flag.set()
        reactor.wake()
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert results == [True] * 4


def test_a_wait_ends_at_its_deadline(reactor: ThreadReactor) -> None:
    assert not reactor.wait(lambda: False, reactor.now() + 0.02)
    assert reactor.wait(lambda: True, reactor.now() - 1)


def test_timers_run_in_their_order_and_not_after_they_were_cancelled(callers_only: ThreadReactor) -> None:
    ran: list[int] = []
    now = callers_only.now()
    timers = [callers_only.call_at(now + nth / 1000, lambda nth=nth: ran.append(nth)) for nth in (5, 1, 3, 2, 4)]  # type: ignore[misc]
    timers[2].cancel()
    timers[2].cancel()
    assert callers_only.wait(lambda: len(ran) == 4, now + WAIT_S)
    assert ran == [1, 2, 4, 5]


def test_cancelled_timers_do_not_pile_up(callers_only: ThreadReactor) -> None:
    for _ in range(10_000):
        callers_only.call_at(callers_only.now() + 3600, lambda: None).cancel()
    assert len(callers_only._timers) < 200


def test_what_is_left_for_soon_runs_once_and_together_at_the_end_of_a_turn(callers_only: ThreadReactor) -> None:
    ran: list[str] = []

    def timer() -> None:
        callers_only.call_soon(lambda: ran.append("soon"))
        ran.append("timer")

    for _ in range(2):
        callers_only.call_at(callers_only.now(), timer)
    assert callers_only.turn(0)
    assert ran == ["timer", "timer", "soon", "soon"]


@pytest.mark.parametrize("left", ["timer", "soon", "told", "posted"])
def test_the_background_does_what_a_caller_left_undone(reactor: ThreadReactor, left: str) -> None:
    done = threading.Event()
    reactor.turn(0)
    with reactor.lock:
        if left == "timer":
            reactor.call_at(reactor.now() + 0.01, done.set)
        elif left == "soon":
            reactor.call_soon(done.set)
        elif left == "told":
            reactor.run_callback(done.set)
    if left == "posted":
        reactor.post(done.set)
    assert done.wait(WAIT_S)


def test_the_background_answers_while_every_caller_is_away(reactor: ThreadReactor) -> None:
    echo = Echo(reactor)
    for _ in range(5):
        heard = echo.ask()
        wait_for("the background thread", lambda: bool(heard), WAIT_S, 0.001)  # noqa: B023
    echo.close()


def test_the_background_keeps_out_of_the_way_of_a_caller(reactor: ThreadReactor) -> None:
    """What a caller that drives waits for is handled in its own thread."""
    echo, handlers = Echo(reactor), set()
    handle = echo.readable

    def readable() -> None:
        handlers.add(threading.current_thread())
        handle()

    reactor.watch(echo.near, readable, None)
    first = echo.ask()
    assert reactor.wait(lambda: bool(first), reactor.now() + WAIT_S)
    handlers.clear()
    for _ in range(300):
        heard = echo.ask()
        assert reactor.wait(lambda: bool(heard), reactor.now() + WAIT_S)  # noqa: B023
    assert handlers == {threading.current_thread()}
    echo.close()


def test_the_users_code_runs_outside_the_lock_one_at_a_time_and_in_order(reactor: ThreadReactor) -> None:
    heard: list[int] = []
    inside = threading.Lock()

    def user_code(nth: int) -> None:
        assert inside.acquire(blocking=False)
        heard.append(nth)
        # Anyone else can have the lock meanwhile, and this code may wait for something itself.
        if nth % 50 == 0:
            in_threads(1, take_the_lock)
            reactor.wait(lambda: False, reactor.now() + 0.001)
        inside.release()

    def take_the_lock(_: int) -> None:
        with reactor.lock:
            return

    count = 0

    def work(_: int) -> None:
        nonlocal count
        for _ in range(100):
            with reactor.lock:
                reactor.run_callback(lambda nth=count: user_code(nth))  # type: ignore[misc]
                count += 1
            reactor.turn(0)

    in_threads(4, work)
    wait_for("all that was told", lambda: len(heard) == 400, WAIT_S)
    assert heard == list(range(400))


def test_the_users_code_may_raise(callers_only: ThreadReactor, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[int] = []
    with callers_only.lock:
        callers_only.run_callback(lambda: 1 // 0)  # type: ignore[arg-type]
        callers_only.run_callback(lambda: heard.append(1))
        callers_only.call_soon(lambda: 1 // 0)  # type: ignore[arg-type]
        callers_only.call_soon(lambda: heard.append(2))
    callers_only.turn(0)
    assert callers_only.wait_callbacks(callers_only.now() + WAIT_S)
    assert sorted(heard) == [1, 2]
    assert caplog.text.count("ZeroDivisionError") == 2


def test_no_call_into_the_client_runs_the_users_code(reactor: ThreadReactor) -> None:
    """It may need what the caller holds, or never end."""
    held, tellers = threading.Lock(), set[threading.Thread]()

    def user_code() -> None:
        with held:
            tellers.add(threading.current_thread())

    echo = Echo(reactor)
    with held:
        for _ in range(50):
            heard = echo.ask()
            with reactor.lock:
                reactor.run_callback(user_code)
            reactor.turn(0)
            assert reactor.wait(lambda: bool(heard), reactor.now() + WAIT_S)  # noqa: B023
        heard = echo.ask()
        wait_for("the background thread", lambda: bool(heard), WAIT_S, 0.001)
        assert not reactor.wait_callbacks(reactor.now() + 0.001)
    assert reactor.wait_callbacks(reactor.now() + WAIT_S)
    assert len(tellers) == 1
    assert tellers.isdisjoint({threading.current_thread(), reactor._thread})
    echo.close()


def test_the_thread_of_the_users_code_starts_when_needed_and_ends_with_the_reactor() -> None:
    reactor, here = ThreadReactor(), list[threading.Thread]()
    reactor.turn(0)
    assert reactor.wait_callbacks(math.inf)
    assert reactor._callbacks._last is None
    with reactor.lock:
        reactor.run_callback(lambda: here.append(threading.current_thread()))
    reactor.close()
    assert not here[0].is_alive()
    with reactor.lock:
        reactor.run_callback(lambda: here.append(threading.current_thread()))
    assert reactor.wait_callbacks(math.inf)
    assert len(here) == 2
    here[1].join(WAIT_S)


def test_the_users_code_may_wait_for_all_that_was_told_and_close() -> None:
    reactor, heard = ThreadReactor(), list[object]()
    with reactor.lock:
        reactor.run_callback(lambda: heard.append(reactor.wait_callbacks(math.inf)))
        reactor.run_callback(reactor.close)
        reactor.run_callback(lambda: heard.append("after"))
    assert reactor.wait_callbacks(reactor.now() + WAIT_S)
    assert heard == [True, "after"]
    assert reactor._closed


@pytest.mark.parametrize("raised", [ValueError, SystemExit, KeyboardInterrupt])
def test_a_callback_that_raises_keeps_no_other_from_being_told(
    reactor: ThreadReactor, raised: type[BaseException]
) -> None:
    heard: list[int] = []
    sent = SentBatch("t", 0, None)  # type: ignore[arg-type]

    def callback(delivery: Delivery) -> None:
        heard.append(delivery.place)
        raise raised

    for place in range(5):
        Delivery(sent, place, 0).add_callback(callback)
    sent.finish(0)
    with reactor.lock:
        reactor.run_callback(sent.run_callbacks)
        reactor.run_callback(lambda: heard.append(5))
    assert reactor.wait_callbacks(reactor.now() + WAIT_S)
    assert heard == [0, 1, 2, 3, 4, 5]


def test_a_turn_inside_a_callback_does_nothing(callers_only: ThreadReactor) -> None:
    turns: list[bool] = []
    with callers_only.lock:
        callers_only.call_soon(lambda: turns.append(callers_only.turn(0)))
    assert callers_only.turn(0)
    assert turns == [False]


@pytest.mark.parametrize("kind", [CallersOnly, ThreadReactor])
def test_closing_ends_every_wait(kind: type[ThreadReactor]) -> None:
    reactor = kind()
    reactor.turn(0)
    waiting = threading.Semaphore(0)
    outcomes: list[type[BaseException]] = []

    def work() -> None:
        waiting.release()
        try:
            reactor.wait(lambda: False, reactor.now() + WAIT_S)
        except EngineClosed as closed:
            outcomes.append(type(closed))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
        waiting.acquire()
    reactor.close()
    reactor.close()
    for thread in threads:
        thread.join(WAIT_S)
    assert outcomes == [EngineClosed] * 3
    with pytest.raises(EngineClosed, match="make a new one"):
        reactor.turn(0)
    assert reactor._epoll.closed


def test_what_is_done_already_can_be_waited_for_after_closing(reactor: ThreadReactor) -> None:
    reactor.close()
    assert reactor.wait(lambda: True, math.inf)
    with pytest.raises(EngineClosed):
        reactor.wait(lambda: False, math.inf)


def test_who_stands_by_hears_that_it_is_done_even_if_the_reactor_closes_then(callers_only: ThreadReactor) -> None:
    finished: list[bool] = []
    with driven(callers_only, lambda: bool(finished)):
        in_waiting = threading.Thread(
            target=lambda: finished.append(callers_only.wait(lambda: callers_only._closed, math.inf)), daemon=True
        )
        in_waiting.start()
        wait_for("the other to stand by", lambda: bool(callers_only._standing_by), WAIT_S, 0.001)
        finished.append(True)
        callers_only.close()
        in_waiting.join(WAIT_S)
    assert finished == [True, True]


@pytest.mark.parametrize("kind", [CallersOnly, ThreadReactor])
def test_what_was_to_be_told_is_told_by_closing(kind: type[ThreadReactor]) -> None:
    reactor, heard = kind(), list[str]()
    with reactor.lock:
        reactor.call_soon(lambda: heard.append("soon"))
        reactor.call_soon(lambda: reactor.run_callback(lambda: heard.append("told")))
    reactor.close()
    assert heard == ["soon", "told"]


def test_a_callback_may_close_the_reactor_that_runs_it() -> None:
    for leave in ("soon", "callback"):
        reactor = ThreadReactor()
        with reactor.lock:
            (reactor.call_soon if leave == "soon" else reactor.run_callback)(reactor.close)
        wait_for("the reactor to close", lambda: reactor._epoll.closed, WAIT_S)  # noqa: B023


def test_a_child_process_is_told_not_to_use_its_parents_client(broker: Broker) -> None:
    """And one of its own serves it, while the parent's goes on."""
    pool = shared(broker.bootstrap, client_id="forking")
    assert asks(pool.reactor, pool) == "MetadataResponse"
    lock = pool.reactor.lock
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = [in_child(lambda: pool.reactor.turn(0)), in_child(lambda: pool.reactor.lock.__enter__())]  # type: ignore[attr-defined]
            with lock:
                said.append(in_child(lambda: pool.ask_any(apis.METADATA, Message(), print, timeout_s=1)))
            own = shared(broker.bootstrap, client_id="forking")
            said += [str(own is pool), asks(own.reactor, own)]
            own.release()
            os.write(write, "\n".join(said).encode())
        finally:
            os._exit(0)
    os.close(write)
    assert os.waitpid(child, 0)[1] == 0
    said = os.read(read, 65536).decode().split("\n")
    os.close(read)
    told = str(ForkedEngine())
    assert "make the Producer or Consumer in the child" in told
    assert said == [told, told, told, "False", "MetadataResponse"]
    assert asks(pool.reactor, pool) == "MetadataResponse"
    pool.release()


def in_child(use: Callable[[], object]) -> str:
    try:
        return repr(use())
    except ForkedEngine as error:
        return str(error)


def asks(reactor: object, pool: object) -> str:
    heard: list[Message | HeadraceError] = []
    pool.ask_any(apis.METADATA, Message(topics=[]), heard.append, timeout_s=WAIT_S)  # type: ignore[attr-defined]
    assert isinstance(reactor, ThreadReactor)
    reactor.wait(lambda: bool(heard), reactor.now() + WAIT_S)
    return type(heard[0]).__name__
