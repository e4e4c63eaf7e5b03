"""A cluster with the brokers of it that answer: what commands use that ask every broker.

A broker that died a moment ago is named by the others until its lease ends. So each is first asked for a sign of life,
all at once, with a bound of its own; one that gives none while another does is told on standard error and not asked
again. What it alone knows is missing then; orders that would go to it as controller go to another broker, which all
take them.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import click

from headrace.cli.options import with_connect
from headrace.client.admin.cluster import Cluster
from headrace.client.connection.broker_connection import BrokerConnection, api_versions_request
from headrace.client.connection.metadata import Broker
from headrace.client.errors import BrokerUnreachable, NoBroker
from headrace.errors import ErrorCode, ErrorMapping, HeadraceError
from headrace.wire import api as apis

ANSWER_MS: Final = 3000
ASKED_AT_ONCE_MAX: Final = 32

F = TypeVar("F", bound=Callable[..., Any])


class SilentBroker(BrokerUnreachable):
    """A broker that was found not to answer: asking it again is not worth the wait."""

    mapping = ErrorMapping(ErrorCode.NETWORK_EXCEPTION, 503, False)


class ReachedCluster(Cluster):
    """`silent` says of each broker that does not answer why."""

    silent: dict[int, str]

    @property
    def answering(self) -> list[int]:
        return sorted(self.retry(lambda: self.topology([])).brokers.keys() - self.silent.keys())

    def broker(self, broker_id: int) -> BrokerConnection:
        if broker_id in self.silent:
            raise SilentBroker(f"broker {broker_id} does not answer: {self.silent[broker_id]}")
        return super().broker(broker_id)

    def controller(self) -> BrokerConnection:
        found = self.topology([])
        answering = found.brokers.keys() - self.silent.keys()
        return self.broker(found.controller_id if found.controller_id in answering else min(answering, default=-1))


def with_reached(command: F) -> F:
    """Give the command a `cluster` of the brokers that answer, made from --bootstrap and its kin."""

    @with_connect
    @functools.wraps(command)
    def reached(*args: Any, connect: Callable[..., Any], **kwargs: Any) -> Any:
        with reach(connect) as cluster:
            return command(*args, cluster=cluster, **kwargs)

    return reached  # type: ignore[return-value]


def reach(connect: Callable[..., Any], *, tell: bool = True) -> ReachedCluster:
    brokers, silent = _signs_of_life(connect)
    answering = ",".join(str(brokers[each].address) for each in sorted(brokers.keys() - silent.keys()))
    for broker_id, why in silent.items() if tell else ():
        click.echo(f"headrace: broker {broker_id} does not answer: {why}", err=True)
    cluster: ReachedCluster = connect(answering or None, kind=ReachedCluster)
    cluster.silent = silent
    return cluster


def _signs_of_life(connect: Callable[..., Any]) -> tuple[dict[int, Broker], dict[int, str]]:
    """The brokers, and of each that is silent why. While all are, they are asked again, with more time to answer, until
    --timeout; an address that waiting does not make right is told at once.
    """
    begun = time.monotonic()
    with connect() as patient:
        deadline = begun + patient.timeout_ms / 1000
    answer_ms = ANSWER_MS
    while True:
        began = time.monotonic()
        answer_ms = max(1, min(answer_ms, int((deadline - began) * 1000)))
        failure: HeadraceError | None = None
        brokers: dict[int, Broker] = {}
        silent: dict[int, str] = {}
        try:
            with connect(answer_ms=answer_ms) as any_one:
                brokers = any_one.topology([]).brokers
        except (BrokerUnreachable, NoBroker) as error:
            failure = error
        else:
            silent = _silent(connect, brokers, answer_ms)
            if len(silent) < len(brokers):
                return brokers, silent
        if not began + answer_ms / 1000 <= time.monotonic() < deadline:
            if isinstance(failure, NoBroker):
                raise NoBroker(failure.failures, time.monotonic() - begun)
            if failure is not None:
                raise failure
            return brokers, silent
        answer_ms *= 2


def _silent(connect: Callable[..., Any], brokers: dict[int, Broker], answer_ms: int) -> dict[int, str]:
    def trouble(broker_id: int) -> str | None:
        try:
            with connect(str(brokers[broker_id].address), answer_ms, first_contact_ms=0) as alone:
                alone.ask(apis.API_VERSIONS, api_versions_request())
        except HeadraceError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(ASKED_AT_ONCE_MAX) as asking:
        found = zip(sorted(brokers), asking.map(trouble, sorted(brokers)), strict=True)
        return {broker_id: why for broker_id, why in found if why is not None}
