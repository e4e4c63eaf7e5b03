"""The shared set of connections: one per client id, opened when first needed, its metadata kept fresh."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from brokers import Broker
from client.conftest import MakeTopic
from headrace.client.connection.connections import Network, shared
from headrace.client.connection.metadata import Topic
from headrace.client.connection.thread_reactor import ThreadReactor
from headrace.errors import HeadraceError
from headrace.wire import api as apis
from headrace.wire.message import Message
from proving import proves

WAIT_S = 20.0


def until(network: Network, done: Callable[[], object]) -> None:
    reactor = network.reactor
    assert isinstance(reactor, ThreadReactor)
    assert reactor.wait(lambda: bool(done()), reactor.now() + WAIT_S)


def known(network: Network, topic: str, create: bool = False) -> Topic | HeadraceError:
    found: list[Topic | HeadraceError] = []
    network.metadata.want(topic, create=create, on_known=found.append)
    until(network, lambda: found)
    return found[0]


@pytest.fixture
def network(broker: Broker) -> Iterator[Network]:
    made = shared(broker.bootstrap, client_id="engine")
    yield made
    made.release()


@proves("R16")
def test_one_set_of_connections_per_client_id_opened_when_needed(
    broker: Broker, network: Network, topic: MakeTopic
) -> None:
    again, other = shared(broker.bootstrap, client_id="engine"), shared(broker.bootstrap, client_id="other")
    assert again is network
    assert other is not network
    other.release()
    assert list(network.links) == []
    name = topic()
    assert isinstance(known(network, name), Topic)
    assert [link.is_open for link in network.links] == [True]
    leader = network.metadata.leader(name, 0)
    assert leader is not None
    link = network.broker(leader)
    assert link is again.broker(leader)
    assert not link.is_open
    answers: list[Message | HeadraceError] = []
    link.ask(apis.METADATA, Message(topics=[]), answers.append, timeout_s=WAIT_S)
    until(network, lambda: answers)
    assert link.is_open
    assert link.version(apis.PRODUCE) <= apis.KAFKA_APIS[apis.PRODUCE].max_version
    again.release()
    assert link.is_open
