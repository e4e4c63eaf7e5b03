"""What the cores of the client need of a reactor: waits that grow, and things remembered and not kept."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from pathlib import Path

import headrace.client
from headrace.client.connection.reactor import Backoff, WeakIdentitySet


class Thing:
    pass


def test_what_is_gone_is_not_remembered_and_takes_no_room() -> None:
    remembered: WeakIdentitySet[Thing] = WeakIdentitySet()
    kept = [Thing() for _ in range(40)]
    for nth in range(4_000):
        remembered.add(kept[nth // 100] if nth % 100 == 0 else Thing())
    gc.collect()
    assert list(remembered) == kept
    assert len(remembered._refs) < 200
    remembered.discard(kept[3])
    assert list(remembered) == [*kept[:3], *kept[4:]]
    remembered.clear()
    assert list(remembered) == []


def test_nothing_runs_when_something_remembered_goes() -> None:
    remembered: WeakIdentitySet[Thing] = WeakIdentitySet()
    thing = Thing()
    remembered.add(thing)
    assert [ref.__callback__ for ref in weakref.getweakrefs(thing)] == [None]


def test_nothing_is_forgotten_when_threads_come_and_go_at_once() -> None:
    remembered: WeakIdentitySet[Thing] = WeakIdentitySet()
    kept = [Thing() for _ in range(20)]
    for thing in kept:
        remembered.add(thing)
    over = threading.Event()

    def come_and_go() -> None:
        while not over.is_set():
            thing = Thing()
            remembered.add(thing)
            remembered.discard(thing)

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    coming = threading.Thread(target=come_and_go)
    coming.start()
    try:
        for _ in range(40_000):
            kept.append(Thing())
            remembered.add(kept[-1])
            if len(kept) > 70:
                remembered.discard(kept.pop(20))
    finally:
        over.set()
        coming.join()
        sys.setswitchinterval(interval_s)
    assert set(kept) == set(remembered)


def test_no_part_of_the_client_runs_code_when_something_is_collected() -> None:
    """Ctrl-C would be lost there."""
    folder = Path(headrace.client.__file__).parent
    sources = [path for name in ("connection", "producer") for path in (folder / name).glob("*.py")]
    assert not [path.name for path in sources if "WeakSet(" in path.read_text() or "__del__" in path.read_text()]


def test_a_backoff_doubles_to_its_limit_and_begins_anew() -> None:
    backoff = Backoff(0.1, 0.5)
    assert [backoff.take() for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]
    backoff.next_s = 0.0  # at once, this time
    assert [backoff.take() for _ in range(3)] == [0.0, 0.1, 0.2]
    backoff.reset()
    assert backoff.take() == 0.1
    assert [Backoff(0.0).take() for _ in range(2)] == [0.0, 0.0]
