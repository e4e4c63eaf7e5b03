"""Producer, consumer and listeners over TLS alone, from the first connection on; both faces."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest

from brokers import Broker, wait_for
from certificates import self_signed
from headrace import Consumer, Producer, aio
from headrace.client.errors import NoBroker
from proving import proves

VALUES = [b"%d" % number for number in range(100)]


@proves("R6", "R8")
def test_records_go_and_come_over_tls(fresh_broker: Callable[..., Broker], tmp_path: Path) -> None:
    certificate = self_signed(tmp_path)
    broker = fresh_broker(
        listen=("tls://127.0.0.1:0",),
        settings={
            "tls.certificate": certificate.certificate_path,
            "tls.key": certificate.key_path,
            "group.initial.rebalance.delay.ms": 0,
        },
    )
    trusting, heard = certificate.client_context(), list[bytes]()
    with Producer(broker.bootstrap, tls=trusting) as producer:
        deliveries = [producer.send_async("sealed", value) for value in VALUES]
        assert [delivery.result(30).offset for delivery in deliveries] == list(range(100))
    with Consumer("sealed", bootstrap=broker.bootstrap, group="pull", tls=trusting) as consumer:
        found = consumer.records(30_000)
        assert [next(found).value for _ in VALUES] == VALUES
    with Consumer("sealed", bootstrap=broker.bootstrap, group="push", tls=trusting).listen(
        lambda record: heard.append(record.value)
    ):
        wait_for("the records", lambda: sorted(heard) == sorted(VALUES))
    asyncio.run(_by_asyncio(broker.bootstrap, trusting))
    with (
        Producer(broker.bootstrap, tls=ssl.create_default_context()) as stranger,
        pytest.raises(NoBroker, match=r"no TLS with .* certificate verify failed"),
    ):
        stranger.send("sealed", b"to whom?")


async def _by_asyncio(bootstrap: str, trusting: ssl.SSLContext) -> None:
    async with aio.Producer(bootstrap, tls=trusting) as producer:
        assert (await producer.send("sealed", b"more")).offset == 100
    async with aio.Consumer("sealed", bootstrap=bootstrap, group="aio", tls=trusting) as consumer:
        records = consumer.records(30_000)
        found = [(await anext(records)).value for _ in range(len(VALUES) + 1)]
    assert found == [*VALUES, b"more"]
