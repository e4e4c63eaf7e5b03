"""Producer, consumer and listeners over TLS alone, from the first connection on; both faces."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pytest

from brokers import Broker, Brokers, wait_for
from certificates import Certificate, self_signed
from headrace import Admin, Consumer, Producer, aio, arrow, read
from headrace.client.errors import NoBroker
from headrace.errors import SettingError
from proving import proves

VALUES = [b"%d" % number for number in range(100)]
AT = "127.0.0.1:1"


class Sealed(NamedTuple):
    broker: Broker
    certificate: Certificate


@pytest.fixture(scope="module")
def sealed(brokers: Brokers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sealed]:
    """A broker whose certificate no authority has signed."""
    certificate = self_signed(tmp_path_factory.mktemp("sealed"))
    files = {"tls.certificate": certificate.certificate_path, "tls.key": certificate.key_path}
    broker = brokers.start(listen=("tls://127.0.0.1:0",), settings=files)
    yield Sealed(broker, certificate)
    broker.discard()


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
        Producer(broker.bootstrap, tls=ssl.create_default_context(), delivery_timeout_ms=600_000) as stranger,
        pytest.raises(NoBroker, match=r"no TLS with .* certificate verify failed"),
    ):
        stranger.send("sealed", b"to whom?")


@proves("U2")
def test_tls_is_a_file_to_trust(sealed: Sealed) -> None:
    """For every client, by its path."""
    at, file = sealed.broker.bootstrap, sealed.certificate.certificate_path
    with Producer(at, tls=str(file)) as producer, Producer(at, tls=str(file)) as other:
        assert producer.send("trusted", b"file").offset == 0
        assert other._pool is producer._pool
    with Consumer("trusted", bootstrap=at, tls=file) as consumer:
        assert next(consumer.records(30_000)).value == b"file"
    with Admin(at, tls=file) as admin:
        assert "trusted" in [topic.name for topic in admin.list_topics()]
    assert [record.value for record in read(at, "trusted", 0, 0, 1, tls=file)] == [b"file"]
    assert arrow.read("trusted", bootstrap=at, partitions=[0], tls=file).read_all().num_rows == 1
    assert arrow.write("trusted", pa.RecordBatch.from_pydict({"value": [b"more"]}), bootstrap=at, tls=file) == 1


@proves("U2")
def test_tls_true_trusts_the_systems_authorities(sealed: Sealed, monkeypatch: pytest.MonkeyPatch) -> None:
    hint = r"certificate verify failed: self-signed .*; pass --tls-ca FILE \(tls=FILE in Python\) to trust it"
    with Producer(sealed.broker.bootstrap, tls=True) as producer, pytest.raises(NoBroker, match=hint):
        producer.send("trusted", b"to whom?")
    monkeypatch.setenv("SSL_CERT_FILE", str(sealed.certificate.certificate_path))
    with Producer(sealed.broker.bootstrap, client_id="trusting", tls=True) as producer:
        assert producer.send("by-system", b"you").offset == 0


@proves("U2")
@pytest.mark.parametrize(
    "make",
    [
        Producer,
        Admin,
        lambda **more: Consumer("x", **more),
        lambda **more: read(AT, "x", 0, 0, 1, **more),
        lambda **more: arrow.read("x", **more),
    ],
)
def test_what_cannot_be_tls_is_told_at_once(make: Callable[..., object], tmp_path: Path) -> None:
    for wrong in ({"cafile": "cert.pem"}, 1, b"cert.pem"):
        with pytest.raises(TypeError, match=r"tls is True .* PEM file .* not (dict|int|bytes)"):
            make(tls=wrong)
    with pytest.raises(SettingError, match=r"certificates in '.*none.pem': No such file"):
        make(tls=tmp_path / "none.pem")
    (empty := tmp_path / "empty.pem").touch()
    with pytest.raises(SettingError, match=r"certificates in '.*empty.pem': no certificate"):
        make(tls=empty)
    with pytest.raises(SettingError, match="empty path"):
        make(tls="")


@proves("U2")
def test_tls_false_is_none(broker: Broker) -> None:
    with Admin(broker.bootstrap, tls=False) as admin:
        assert admin.list_topics() is not None


@proves("U2")
def test_asyncio_takes_a_file_to_trust(sealed: Sealed) -> None:
    async def send() -> int:
        async with aio.Producer(sealed.broker.bootstrap, tls=sealed.certificate.certificate_path) as producer:
            with pytest.raises(TypeError, match="tls is True"):
                aio.Consumer("x", bootstrap=sealed.broker.bootstrap, tls={})  # type: ignore[arg-type]
            return (await producer.send("by-loop", b"1")).offset

    assert asyncio.run(send()) == 0


async def _by_asyncio(bootstrap: str, trusting: ssl.SSLContext) -> None:
    async with aio.Producer(bootstrap, tls=trusting) as producer:
        assert (await producer.send("sealed", b"more")).offset == 100
    async with aio.Consumer("sealed", bootstrap=bootstrap, group="aio", tls=trusting) as consumer:
        records = consumer.records(30_000)
        found = [(await anext(records)).value for _ in range(len(VALUES) + 1)]
    assert found == [*VALUES, b"more"]
