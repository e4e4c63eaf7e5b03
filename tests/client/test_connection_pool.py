"""The shared set of connections: one per client id, opened when first needed, its metadata kept fresh."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from brokers import Broker
from client.conftest import MakeTopic
from headrace.client.connection.connections import ConnectionPool, shared
from headrace.client.connection.metadata import Topic
from headrace.client.connection.thread_reactor import ThreadReactor
from headrace.errors import HeadraceError
from headrace.wire import api as apis
from headrace.wire.message import Message
from proving import proves

WAIT_S = 20.0


def until(pool: ConnectionPool, done: Callable[[], object]) -> None:
    reactor = pool.reactor
    assert isinstance(reactor, ThreadReactor)
    assert reactor.wait(lambda: bool(done()), reactor.now() + WAIT_S)


def known(pool: ConnectionPool, topic: str, create: bool = False) -> Topic | HeadraceError:
    found: list[Topic | HeadraceError] = []
    pool.metadata.want(topic, create=create, on_known=found.append)
    until(pool, lambda: found)
    return found[0]


@pytest.fixture
def pool(broker: Broker) -> Iterator[ConnectionPool]:
    made = shared(broker.bootstrap, client_id="engine")
    yield made
    made.release()


@proves("R16")
def test_one_set_of_connections_per_client_id_opened_when_needed(
    broker: Broker, pool: ConnectionPool, topic: MakeTopic
) -> None:
    again, other = shared(broker.bootstrap, client_id="engine"), shared(broker.bootstrap, client_id="other")
    assert again is pool
    assert other is not pool
    other.release()
    assert list(pool.connections) == []
    name = topic()
    assert isinstance(known(pool, name), Topic)
    assert [connection.is_open for connection in pool.connections] == [True]
    leader = pool.metadata.leader(name, 0)
    assert leader is not None
    connection = pool.broker(leader)
    assert connection is again.broker(leader)
    assert not connection.is_open
    answers: list[Message | HeadraceError] = []
    connection.ask(apis.METADATA, Message(topics=[]), answers.append, timeout_s=WAIT_S)
    until(pool, lambda: answers)
    assert connection.is_open
    assert connection.version(apis.PRODUCE) <= apis.KAFKA_APIS[apis.PRODUCE].max_version
    again.release()
    assert connection.is_open
