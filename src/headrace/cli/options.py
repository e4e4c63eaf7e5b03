"""Options that many commands share, and the values they give."""

from __future__ import annotations

import functools
import ssl
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from headrace.cli.times import parse_time_ms
from headrace.client import DEFAULT_BOOTSTRAP
from headrace.errors import SettingError

if TYPE_CHECKING:
    from headrace.client.admin.cluster import Cluster

F = TypeVar("F", bound=Callable[..., Any])

BOOTSTRAP_VARIABLE = "HEADRACE_BOOTSTRAP"


def with_cluster(command: F) -> F:
    """Give the command a `cluster`, made from --bootstrap and its kin, and close it afterwards."""

    @with_connect
    @functools.wraps(command)
    def connected(*args: Any, connect: Callable[[], Cluster], **kwargs: Any) -> Any:
        with connect() as cluster:
            return command(*args, cluster=cluster, **kwargs)

    return connected  # type: ignore[return-value]


def with_connect(command: F) -> F:
    """Give the command `connect`, which makes clusters from --bootstrap and its kin: one for each thread."""

    @bootstrap_option
    @click.option("--timeout", default=30.0, show_default=True, metavar="SECONDS", help="How long to wait and retry.")
    @click.option("--tls-ca", metavar="FILE", help="Speak TLS, and trust the certificates in this PEM file.")
    @functools.wraps(command)
    def connecting(*args: Any, bootstrap: str, timeout: float, tls_ca: str | None, **kwargs: Any) -> Any:
        from headrace.client.admin.cluster import Cluster, Retry

        timeout_ms = max(1, int(timeout * 1000))
        tls = _tls(tls_ca) if tls_ca else None

        def connect(at: str | None = None, answer_ms: int = timeout_ms, kind: type[Cluster] = Cluster) -> Cluster:
            wait_ms = min(answer_ms, timeout_ms)
            return kind(at or bootstrap, timeout_ms=wait_ms, retry=Retry(within_ms=wait_ms), tls=tls)

        return command(*args, connect=connect, **kwargs)

    return connecting  # type: ignore[return-value]


def bootstrap_option(command: F) -> F:
    """--bootstrap, as `bootstrap`."""
    return click.option(
        "--bootstrap",
        envvar=BOOTSTRAP_VARIABLE,
        default=DEFAULT_BOOTSTRAP,
        show_default=True,
        metavar="HOST:PORT,...",
        help="Any broker of the cluster.",
    )(command)


def compression_option(command: F) -> F:
    """--compression, as `compression`, the name of a codec in small letters."""
    from headrace.records.codecs import Codec

    return click.option(
        "--compression",
        type=click.Choice([codec.name.lower() for codec in Codec]),
        default="none",
        show_default=True,
        help="How batches are packed.",
    )(command)


def json_option(command: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def time_ms(text: str, option: str, more: str = "") -> int:
    """The time that an option gives, in ms since 1970; `more` says what else it might have been."""
    try:
        return parse_time_ms(text, int(time.time() * 1000))
    except ValueError as error:
        raise click.BadParameter(f"{error}{more}", param_hint=option) from None


def pairs(given: Iterable[str], option: str) -> dict[str, str]:
    """`name=value` items as a dictionary."""
    found: dict[str, str] = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{item!r} is not name=value", param_hint=option)
        found[name] = value
    return found


def _tls(ca_file: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise SettingError(f"--tls-ca {ca_file}: {error}") from None
