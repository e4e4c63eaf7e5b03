"""A cluster with the brokers of it that answer: what commands use that ask every broker.

A broker that died a moment ago is named by the others until its lease ends. So each is first asked for a sign of life,
all at once, with a bound of its own; one that gives none is told on standard error and not asked again. What it alone
knows is missing then; orders that would go to it as controller go to another broker, which all take them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import click

from headrace.cli.options import with_connect
from headrace.client.cluster import Cluster
from headrace.client.connection import Connection
from headrace.client.refusal import BrokerUnreachable
from headrace.client.topology import Broker
from headrace.errors import HeadraceError, Mapping

ANSWER_MS: Final = 3000
ASKED_AT_ONCE_MAX: Final = 32

F = TypeVar("F", bound=Callable[..., Any])


class SilentBroker(BrokerUnreachable):
    """A broker that was found not to answer: asking it again is not worth the wait."""

    mapping = Mapping(13, 503, False)


class ReachedCluster(Cluster):
    """`silent` says of each broker that does not answer why."""

    silent: dict[int, str]

    @property
    def answering(self) -> list[int]:
        return sorted(self.retry(lambda: self.topology([])).brokers.keys() - self.silent.keys())

    def connection(self, broker_id: int) -> Connection:
        if broker_id in self.silent:
            raise SilentBroker(f"broker {broker_id} does not answer: {self.silent[broker_id]}")
        return super().connection(broker_id)

    def controller(self) -> Connection:
        found = self.topology([])
        reachable = found.controller_id in found.brokers.keys() - self.silent.keys()
        return self.connection(found.controller_id) if reachable else self.any_connection()


def with_reached(command: F) -> F:
    """Give the command a `cluster` of the brokers that answer, made from --bootstrap and its kin."""

    @with_connect
    @functools.wraps(command)
    def reached(*args: Any, connect: Callable[..., Any], **kwargs: Any) -> Any:
        with reach(connect) as cluster:
            return command(*args, cluster=cluster, **kwargs)

    return reached  # type: ignore[return-value]


def reach(connect: Callable[..., Any]) -> ReachedCluster:
    with connect(answer_ms=ANSWER_MS) as any_one:
        brokers: dict[int, Broker] = any_one.topology([]).brokers

    def trouble(broker: Broker) -> str | None:
        try:
            with connect(str(broker.address), ANSWER_MS) as alone:
                alone.any_connection()
        except HeadraceError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(ASKED_AT_ONCE_MAX) as asking:
        found = dict(
            zip(sorted(brokers), asking.map(trouble, (brokers[each] for each in sorted(brokers))), strict=True)
        )
    silent = {broker_id: why for broker_id, why in found.items() if why is not None}
    answering = ",".join(str(brokers[each].address) for each in found if each not in silent)
    for broker_id, why in silent.items():
        click.echo(f"headrace: broker {broker_id} does not answer: {why}", err=True)
    cluster: ReachedCluster = connect(answering or None, kind=ReachedCluster)
    cluster.silent = silent
    return cluster
