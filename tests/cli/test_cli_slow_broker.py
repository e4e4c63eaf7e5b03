"""A cluster that is slow as a whole is waited for as long as --timeout says, also by commands that ask every broker."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from brokers import Broker
from headrace.cli import cluster_reach
from headrace.client.admin.cluster import Cluster, Retry
from headrace.client.errors import NoBroker

ANSWER_MS = 100
TIMEOUT_MS = 60_000


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_reach, "ANSWER_MS", ANSWER_MS)


@pytest.mark.parametrize("answers_first", [False, True], ids=["from the first question on", "when asked for itself"])
def test_the_only_broker_stands_still_for_longer_than_a_sign_of_life_may_take(
    fresh_broker: Callable[..., Broker], answers_first: bool
) -> None:
    broker = fresh_broker()
    rounds: list[int] = []

    def connect(
        at: str | None = None, answer_ms: int = TIMEOUT_MS, kind: type[Cluster] = Cluster, first_contact_ms: int = 0
    ) -> Cluster:
        if answer_ms != TIMEOUT_MS and at is None:
            rounds.append(answer_ms)
        if len(rounds) == 3:
            os.kill(broker.pid, signal.SIGCONT)
            answer_ms = TIMEOUT_MS
        elif rounds and (at is not None or not answers_first):
            os.kill(broker.pid, signal.SIGSTOP)
        return kind(at or broker.bootstrap, timeout_ms=answer_ms, retry=Retry(first_contact_ms=first_contact_ms))

    try:
        with cluster_reach.reach(connect) as cluster:
            assert cluster.silent == {}
    finally:
        os.kill(broker.pid, signal.SIGCONT)
    assert rounds == [ANSWER_MS, 2 * ANSWER_MS, 4 * ANSWER_MS]


def test_a_wrong_address_is_told_at_once() -> None:
    asked: list[int] = []

    def connect(at: str | None = None, answer_ms: int = TIMEOUT_MS) -> Cluster:
        asked.append(answer_ms)
        return Cluster("nowhere.invalid:9092", timeout_ms=answer_ms)

    with pytest.raises(NoBroker, match=r"nowhere\.invalid:9092: the name cannot be looked up"):
        cluster_reach.reach(connect)
    assert asked == [TIMEOUT_MS, ANSWER_MS]
