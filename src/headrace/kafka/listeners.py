"""Listeners as an operator writes them: `[name=][tls://]host:port`, and what clients are told: `[name=]host:port`."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from headrace.errors import SettingError
from headrace.kafka.peers import PeerListener
from headrace.ports.network import Address
from headrace.replication.replication import LinkTls
from headrace.settings.values import BrokerSettings

DEFAULT_NAME: Final = "default"
EVERYWHERE: Final = frozenset({"0.0.0.0", "::", ""})


@dataclass(frozen=True, slots=True)
class ListenerSpec:
    name: str
    address: Address
    tls: bool
    advertised: Address | None
    """None: the address that is listened on, with its real port."""


def parse_address(text: str, setting: str) -> Address:
    host, colon, port = text.strip().rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise SettingError(f"setting {setting}: {text!r} is not host:port")
    return Address(host.strip("[]"), int(port))


def replication(settings: BrokerSettings, *, clustered: bool) -> tuple[Address | None, Address | None]:
    """Where the other brokers are listened to, None for nowhere; and what they are told instead, if anything is."""
    text, told = settings["replication.listen"], settings["replication.advertise"]
    advertised = parse_address(told, "replication.advertise") if told else None
    if text == "auto":
        return (Address("127.0.0.1", 0) if clustered else None), advertised
    if text == "off":
        return None, None
    address = parse_address(text, "replication.listen")
    if advertised is None and address.host in EVERYWHERE:
        raise SettingError(
            f"setting replication.listen: {text!r} listens on every address, which is not one that brokers can connect "
            f"to; say what they should use, as in --set replication.advertise=HOST:{address.port}"
        )
    return address, advertised


def parse(listen: Sequence[str], advertise: Sequence[str]) -> list[ListenerSpec]:
    """A broker's listeners, each with the address to advertise; refuses what clients could not reach."""
    told = {name: parse_address(rest, "advertise") for name, rest in (_named(text) for text in advertise)}
    specs: list[ListenerSpec] = []
    for spec in parse_unadvertised(listen, "listen"):
        advertised = told.pop(spec.name, None)
        if advertised is None and spec.address.host in EVERYWHERE:
            raise SettingError(
                f"setting listen: {spec.address} listens on every address, which is not one that clients can connect "
                f"to; say what they should use, as in --advertise {spec.name}=HOST:{spec.address.port}"
            )
        specs.append(replace(spec, advertised=advertised))
    if told:
        raise SettingError(f"setting advertise: there is no listener called {next(iter(told))!r}")
    return specs


def parse_unadvertised(listen: Sequence[str], setting: str) -> list[ListenerSpec]:
    """Listeners of a server whose own address nobody is told."""
    specs: list[ListenerSpec] = []
    for text in listen:
        name, rest = _named(text)
        address = parse_address(rest.removeprefix("tls://"), setting)
        if any(spec.name == name for spec in specs):
            raise SettingError(
                f"setting {setting}: two listeners are called {name!r}; give names: --listen NAME={rest}"
            )
        specs.append(ListenerSpec(name, address, rest.startswith("tls://"), None))
    if not specs:
        raise SettingError(f"setting {setting}: at least one listener is needed")
    return specs


def _named(text: str) -> tuple[str, str]:
    name, equals, rest = text.partition("=")
    return (name.strip(), rest.strip()) if equals else (DEFAULT_NAME, text.strip())


def replication_tls(settings: BrokerSettings) -> LinkTls | None:
    """TLS of the links between brokers: each end shows its certificate, and both have to come from the same authority.
    Who else has one of its certificates is let in, so it should sign brokers only."""
    authority = settings["replication.tls.ca"]
    if not authority:
        return None
    ends = []
    for side in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(side)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        _load_authority(context, "replication.tls.ca", authority)
        _load_certificate(context, settings, "setting replication.tls.ca")
        ends.append(context)
    return LinkTls(*ends)


def peer_listeners(specs: Sequence[ListenerSpec], settings: BrokerSettings) -> list[PeerListener]:
    """How this broker speaks to the listeners of others, which it takes to be like its own: those without TLS first."""
    tls = _peer_tls(settings) if any(spec.tls for spec in specs) else None
    found = [PeerListener(spec.name, tls if spec.tls else None) for spec in specs]
    return sorted(found, key=lambda listener: listener.tls is not None)


def _peer_tls(settings: BrokerSettings) -> ssl.SSLContext:
    """This broker shows its certificate. That of the other is judged where there is an authority of brokers; where
    there is none the links of replication, which carry more, are open too."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if authority := settings["replication.tls.ca"]:
        context.verify_mode = ssl.CERT_REQUIRED
        _load_authority(context, "replication.tls.ca", authority)
    _load_certificate(context, settings, "a tls:// listener")
    return context


def tls_context(settings: BrokerSettings) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load_certificate(context, settings, "a tls:// listener")
    if authority := settings["tls.client.ca"]:
        context.verify_mode = ssl.CERT_REQUIRED
        _load_authority(context, "tls.client.ca", authority)
    return context


def _load_authority(context: ssl.SSLContext, setting: str, file: str) -> None:
    try:
        context.load_verify_locations(file)
    except (OSError, ssl.SSLError) as error:
        raise SettingError(f"setting {setting}: cannot use {file}: {error}") from None


def _load_certificate(context: ssl.SSLContext, settings: BrokerSettings, what_for: str) -> None:
    certificate, key = settings["tls.certificate"], settings["tls.key"]
    if not certificate:
        raise SettingError(f"{what_for} needs the settings tls.certificate and tls.key (PEM files)")
    try:
        context.load_cert_chain(certificate, key or None)
    except (OSError, ssl.SSLError) as error:
        raise SettingError(f"setting tls.certificate: cannot use {certificate}: {error}") from None
