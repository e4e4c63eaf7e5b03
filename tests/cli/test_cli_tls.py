"""TLS on the command line: whom to trust, what to show, and what is said of files that cannot be used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from brokers import Broker, Brokers
from certificates import Certificate, self_signed
from headrace.cli.main import main
from headrace.client import contexts
from headrace.errors import SettingError
from headrace.kafka import listeners
from headrace.settings.values import CLIENT_VARIABLES, load
from proving import proves

PASSWORD = "open sesame"
Say = Callable[..., str]


@dataclass(frozen=True, slots=True)
class Guarded:
    """A broker that lets in only clients that show a certificate."""

    broker: Broker
    server: Certificate
    client: Certificate
    encrypted_key: Path

    def options(self, *more: str) -> tuple[str, ...]:
        return ("--bootstrap", self.broker.bootstrap, "--tls-ca", str(self.server.certificate_path), *more)


@pytest.fixture(scope="module")
def guarded(brokers: Brokers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    server, client = (self_signed(tmp_path_factory.mktemp(name)) for name in ("server", "client"))
    key = serialization.load_pem_private_key(client.key_path.read_bytes(), None)
    encrypted = client.key_path.with_name("encrypted.pem")
    encrypted.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(PASSWORD.encode()),
        )
    )
    broker = brokers.start(
        listen=("tls://127.0.0.1:0",),
        settings={
            "tls.certificate": server.certificate_path,
            "tls.key": server.key_path,
            "tls.client.ca": client.certificate_path,
        },
    )
    yield Guarded(broker, server, client, encrypted)
    broker.discard()


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in CLIENT_VARIABLES | {contexts.TLS_KEY_VARIABLE}:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HEADRACE_CONFIG", str(tmp_path / "config.toml"))


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    def call(*arguments: str, exit_code: int = 0) -> str:
        capsys.readouterr()
        code = main(list(arguments))
        printed = capsys.readouterr()
        assert code == exit_code, printed.err
        return printed.err if exit_code else printed.out

    return call


@proves("U7")
def test_a_client_certificate_opens_a_listener_that_asks_for_one(guarded: Guarded, say: Say) -> None:
    shown = ("--tls-cert", str(guarded.client.certificate_path), "--tls-key", str(guarded.client.key_path))
    say("topic", "create", "sealed", *guarded.options(*shown))
    assert "sealed" in say("topic", "list", *guarded.options(*shown))
    refused = say("topic", "list", *guarded.options("--timeout", "1s"), exit_code=1)
    assert "a broker may let in only who shows a certificate that it trusts: --tls-cert FILE" in refused
    stranger = guarded.server
    other = ("--tls-cert", str(stranger.certificate_path), "--tls-key", str(stranger.key_path), "--timeout", "1s")
    say("topic", "list", *guarded.options(*other), exit_code=1)


@proves("U1")
def test_a_certificate_that_nobody_known_has_signed_is_told_with_the_way_to_trust_it(
    guarded: Guarded, say: Say
) -> None:
    told = say("topic", "list", "--bootstrap", guarded.broker.bootstrap, "--tls", exit_code=1)
    assert "self-signed certificate" in told
    assert "pass --tls-ca FILE (tls=FILE in Python) to trust it" in told


@proves("U7")
def test_a_context_or_the_environment_has_the_certificate_too(
    guarded: Guarded, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = str(guarded.client.certificate_path), str(guarded.client.key_path)
    say("context", "set", "sealed", "--use", *guarded.options("--tls-cert", cert, "--tls-key", key))
    say("topic", "list")
    say("context", "use", "none")
    monkeypatch.setenv("HEADRACE_BOOTSTRAP", guarded.broker.bootstrap)
    monkeypatch.setenv("HEADRACE_TLS_CA", str(guarded.server.certificate_path))
    monkeypatch.setenv("HEADRACE_TLS_CERT", cert)
    monkeypatch.setenv("HEADRACE_TLS_KEY", key)
    say("topic", "list")


@proves("U7")
def test_an_encrypted_key_is_opened_by_a_file_or_the_environment(
    guarded: Guarded, say: Say, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    encrypted = ("--tls-cert", str(guarded.client.certificate_path), "--tls-key", str(guarded.encrypted_key))
    told = say("topic", "list", *guarded.options(*encrypted), exit_code=2)
    assert f"the key {guarded.encrypted_key} is encrypted: put its password into a file" in told
    file = tmp_path / "password"
    file.write_text(PASSWORD + "\n")
    say("topic", "list", *guarded.options(*encrypted, "--tls-key-password-file", str(file)))
    file.write_text("open barley\n")
    told = say("topic", "list", *guarded.options(*encrypted, "--tls-key-password-file", str(file)), exit_code=2)
    assert "its password is not that of tls-key-password-file" in told
    monkeypatch.setenv("HEADRACE_TLS_KEY_PASSWORD", PASSWORD)
    say("topic", "list", *guarded.options(*encrypted))
    assert PASSWORD not in say("context", "show")


@proves("U7")
def test_files_that_cannot_be_used_are_named_with_who_named_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    one, other = (self_signed(tmp_path / name) for name in ("one", "other"))
    cert, key = str(one.certificate_path), str(one.key_path)
    monkeypatch.setenv("HEADRACE_TLS_CA", str(tmp_path / "none.pem"))
    for flags, says in (
        ({}, r"tls-ca .*none\.pem \(environment HEADRACE_TLS_CA\): No such file"),
        ({"tls-ca": key}, r"tls-ca .*key\.pem \(flag\): .*certificate"),
        ({"tls-ca": cert, "tls-cert": "/none"}, r"tls-cert /none \(flag\): No such file"),
        ({"tls-ca": cert, "tls-cert": cert, "tls-key": "/none"}, r"tls-key /none \(flag\): No such file"),
        ({"tls-ca": cert, "tls-cert": cert}, r"tls-cert .* with its key in it or given as tls-key"),
        ({"tls-ca": cert, "tls-cert": cert, "tls-key": str(other.key_path)}, r"tls-key .* is not the key of tls-cert"),
        ({"tls-ca": cert, "tls-key": key}, "a key needs its certificate, tls-cert"),
    ):
        with pytest.raises(SettingError, match=says):
            contexts.resolve(flags).tls()


@proves("U7")
def test_tls_is_spoken_as_the_strongest_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cert = str(self_signed(tmp_path).certificate_path)
    assert contexts.resolve({}).tls() is None
    system = contexts.resolve({"tls": "true"}).tls()
    assert system is not None
    assert system.check_hostname
    monkeypatch.setenv("HEADRACE_TLS_CA", cert)
    assert contexts.resolve({}).speaks_tls
    assert not contexts.resolve({"tls": "false"}).speaks_tls
    monkeypatch.setenv("HEADRACE_TLS", "false")
    assert not contexts.resolve({}).speaks_tls
    assert contexts.resolve({"tls-ca": cert}).speaks_tls
    monkeypatch.delenv("HEADRACE_TLS_CA")
    monkeypatch.delenv("HEADRACE_TLS")
    monkeypatch.setenv("HEADRACE_TLS_KEY", "/a/brokers/key.pem")
    assert contexts.resolve({}).tls() is None


def test_an_authority_of_clients_that_cannot_be_read_stops_the_start(tmp_path: Path) -> None:
    made = self_signed(tmp_path)
    flags = {"tls.certificate": made.certificate_path, "tls.key": made.key_path, "tls.client.ca": "/none.pem"}
    with pytest.raises(SettingError, match=r"setting tls\.client\.ca: cannot use /none\.pem"):
        listeners.tls_context(load(None, {}, flags))
