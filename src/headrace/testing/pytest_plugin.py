"""Fixtures of pytest for programs that talk to a broker; installed with the package, loaded when a test asks for one.

    def test_orders_are_counted(headrace_broker, headrace_topic):
        with headrace.Producer(headrace_broker.bootstrap) as producer:
            producer.send(headrace_topic, "two shirts")
        assert count_orders(headrace_broker.bootstrap, headrace_topic) == 1

`headrace_broker` is one for the whole run: tests keep out of each other's way by topics of their own. Its settings are
lines `name=value` of the ini option `headrace_settings`. `headrace_broker_factory` starts brokers for a test alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from headrace.testing.temporary_broker import TemporaryBroker


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("headrace_settings", "settings of the fixture headrace_broker, as lines name=value", "linelist")


@pytest.fixture(scope="session")
def headrace_broker(pytestconfig: pytest.Config) -> Iterator[TemporaryBroker]:
    """A broker for all tests of the run, with `.bootstrap` and `.http`."""
    from headrace.testing.temporary_broker import TemporaryBroker

    given = (line.partition("=") for line in pytestconfig.getini("headrace_settings"))
    with TemporaryBroker({name.strip(): value.strip() for name, _, value in given}) as broker:
        yield broker


@pytest.fixture
def headrace_topic(headrace_broker: TemporaryBroker) -> str:
    """The name of a topic that this test has for itself."""
    return headrace_broker.new_topic()


@pytest.fixture
def headrace_broker_factory() -> Iterator[Callable[..., TemporaryBroker]]:
    """`headrace_broker_factory(settings={"num.partitions": 8})` starts a broker, which ends with the test."""
    from headrace.testing.temporary_broker import TemporaryBroker

    with ExitStack() as running:
        yield lambda settings=None: running.enter_context(TemporaryBroker(settings))
