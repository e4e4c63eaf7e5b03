"""Listeners as an operator writes them: `[name=][tls://]host:port`, and what clients are told: `[name=]host:port`."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from headrace.errors import SettingError
from headrace.ports.network import Address
from headrace.settings import BrokerSettings

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


def parse(listen: Sequence[str], advertise: Sequence[str]) -> list[ListenerSpec]:
    """The listeners, each with the address to advertise; refuses what clients could not reach."""
    told = {name: parse_address(rest, "advertise") for name, rest in (_named(text) for text in advertise)}
    specs: list[ListenerSpec] = []
    for text in listen:
        name, rest = _named(text)
        tls = rest.startswith("tls://")
        address = parse_address(rest.removeprefix("tls://"), "listen")
        if any(spec.name == name for spec in specs):
            raise SettingError(f"setting listen: two listeners are called {name!r}; give names: --listen NAME={rest}")
        advertised = told.pop(name, None)
        if advertised is None and address.host in EVERYWHERE:
            raise SettingError(
                f"setting listen: {text!r} listens on every address, which is not one that clients can connect to; "
                f"say what they should use, as in --advertise {name}=HOST:{address.port}"
            )
        specs.append(ListenerSpec(name, address, tls, advertised))
    if told:
        raise SettingError(f"setting advertise: there is no listener called {next(iter(told))!r}")
    if not specs:
        raise SettingError("setting listen: at least one listener is needed")
    return specs


def _named(text: str) -> tuple[str, str]:
    name, equals, rest = text.partition("=")
    return (name.strip(), rest.strip()) if equals else (DEFAULT_NAME, text.strip())


def tls_context(settings: BrokerSettings) -> ssl.SSLContext:
    certificate, key = settings["tls.certificate"], settings["tls.key"]
    if not certificate:
        raise SettingError("a tls:// listener needs the settings tls.certificate and tls.key (PEM files)")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key or None)
    except (OSError, ssl.SSLError) as error:
        raise SettingError(f"setting tls.certificate: cannot use {certificate}: {error}") from None
    return context
