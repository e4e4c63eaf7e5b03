"""Options that many commands share, and the values they give."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from headrace.cli.completers import context_names
from headrace.cli.times import parse_time_ms
from headrace.client import DEFAULT_BOOTSTRAP, contexts
from headrace.errors import OperatorError, SettingError
from headrace.settings.quantities import DURATION_FORMS, parse_duration_ms

if TYPE_CHECKING:
    import ssl

    from headrace.client.admin.cluster import Cluster

F = TypeVar("F", bound=Callable[..., Any])


class Duration(click.ParamType[int]):
    """A time that is more than none, as people write it, in ms; `bare` is the unit of a number alone."""

    name = "duration"

    def __init__(self, bare: str) -> None:
        self._bare = bare

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            found = parse_duration_ms(str(value), self._bare)
        except ValueError:
            self.fail(f"{value!r} is not a duration: write such as {DURATION_FORMS}", param, ctx)
        if found <= 0:
            self.fail(f"{value!r} is no time at all: write such as {DURATION_FORMS}", param, ctx)
        return found


class Location(click.Path):
    """The folder of an archive, or where it is in a store."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Path:
        if isinstance(value, Path):
            return value
        if "://" not in str(value):
            return Path(value)
        from headrace.arrow.locations import location

        try:
            return location(value)
        except OperatorError as error:
            self.fail(str(error), parameter, context)


LOCATION: Final = Location(path_type=Path)


def archive_option(command: F) -> F:
    """--archive, as `archive`."""
    help = "The archive: a folder, or s3://BUCKET/PREFIX."
    return click.option("--archive", required=True, type=LOCATION, metavar="DIR", help=help)(command)


def with_cluster(command: F) -> F:
    """Give the command a `cluster`, made from --bootstrap and its kin, and close it afterwards."""

    @with_connect
    @functools.wraps(command)
    def connected(*args: Any, connect: Callable[[], Cluster], **kwargs: Any) -> Any:
        with connect() as cluster:
            return command(*args, cluster=cluster, **kwargs)

    return connected  # type: ignore[return-value]


isolation_option = click.option(
    "--isolation",
    type=click.Choice(["committed", "uncommitted"]),
    default="committed",
    show_default=True,
    help="Leave out records of transactions that are open or were aborted, or not.",
)


def with_reader(command: F) -> F:
    """As `with_cluster`, for a command that reads records: --isolation says which."""

    @with_cluster
    @isolation_option
    @functools.wraps(command)
    def reading(*args: Any, cluster: Cluster, isolation: str, **kwargs: Any) -> Any:
        from headrace.records.isolation import isolation_of

        cluster.isolation = isolation_of(isolation)
        return command(*args, cluster=cluster, **kwargs)

    return reading  # type: ignore[return-value]


def with_connect(command: F) -> F:
    """Give the command `connect`, which makes clusters from --bootstrap and its kin: one for each thread."""

    @context_option
    @bootstrap_flag
    @click.option(
        *("--timeout", "timeout_ms"), type=Duration("s"), help="How long to wait and retry; else the context's, or 30s."
    )
    @_tls_options
    @functools.wraps(command)
    def connecting(*args: Any, context: str | None, **kwargs: Any) -> Any:
        from headrace.client.admin.cluster import Cluster, Retry

        flags = connection_flags(kwargs)
        for parameter in _CONNECTION_PARAMETERS:
            kwargs.pop(parameter)

        @functools.cache  # when it is first needed: not every command asks a broker
        def reach() -> tuple[contexts.ConnectionSettings, ssl.SSLContext | None, Callable[[object], None]]:
            found = contexts.resolve(flags, context)
            return found, found.tls(), _say_once(f"headrace: waiting for a broker at {found['bootstrap']} ...")

        def connect(
            at: str | None = None,
            answer_ms: int | None = None,
            kind: type[Cluster] = Cluster,
            first_contact_ms: int | None = None,
        ) -> Cluster:
            found, tls, on_waiting = reach()
            wait_ms = min(answer_ms or found.timeout_ms, found.timeout_ms)
            retry = Retry(within_ms=wait_ms, first_contact_ms=first_contact_ms)
            made = kind(at or found["bootstrap"], timeout_ms=wait_ms, retry=retry, tls=tls)
            made.pool.first_contact.on_waiting = on_waiting
            return made

        return command(*args, connect=connect, **kwargs)

    return connecting  # type: ignore[return-value]


def connection_flags(parameters: Mapping[str, Any]) -> dict[str, str | None]:
    """What the flags of `with_connect` say, under the names of a context's keys; None for those that are not given."""
    given = {name: parameters.get(name.replace("-", "_")) for name in ("bootstrap", *_TLS_FILES)}
    tls, timeout_ms = parameters.get("tls"), parameters.get("timeout_ms")
    given["tls"] = None if tls is None else "true" if tls else "false"
    given["timeout"] = None if timeout_ms is None else f"{timeout_ms}ms"
    return given


def context_option(command: F) -> F:
    """--context, as `context`."""
    return click.option(
        "--context",
        metavar="NAME",
        shell_complete=context_names,
        help="Talk to the cluster of this context; `none` for that of no context.",
    )(command)


def bootstrap_flag(command: F) -> F:
    """--bootstrap, as `bootstrap`: None if it is not given."""
    return click.option(
        "--bootstrap",
        metavar="HOST:PORT,...",
        help=f"Any broker of the cluster; else HEADRACE_BOOTSTRAP, the context's, or {DEFAULT_BOOTSTRAP}.",
    )(command)


def with_bootstrap(command: F) -> F:
    """--bootstrap and --context, as `bootstrap`, for commands that run on Spark: it speaks no TLS here."""

    @context_option
    @bootstrap_flag
    @functools.wraps(command)
    def connecting(*args: Any, context: str | None, bootstrap: str | None, **kwargs: Any) -> Any:
        return command(*args, bootstrap=plain_bootstrap(bootstrap, context), **kwargs)

    return connecting  # type: ignore[return-value]


def plain_bootstrap(flag: str | None, context: str | None) -> str:
    """The brokers' addresses, for what cannot speak TLS; SettingError if it is asked for."""
    found = contexts.resolve({"bootstrap": flag}, context)
    if found.speaks_tls:
        raise SettingError(
            f"{found['bootstrap']} is spoken to by TLS ({found.source('bootstrap')}), and commands on Spark do not "
            "speak it yet: name a listener without TLS, with --context none or HEADRACE_TLS=false"
        )
    return found["bootstrap"]


_TLS_FILES = {
    "tls-ca": "Speak TLS, and trust the certificates in this PEM file.",
    "tls-cert": "Speak TLS, and show the certificate in this PEM file to brokers.",
    "tls-key": "PEM file with its private key, if that stands in a file of its own.",
    "tls-key-password-file": f"File with the key's password; or {contexts.PASSWORD_VARIABLE}.",
}
_CONNECTION_PARAMETERS = ("bootstrap", "timeout_ms", "tls", *(name.replace("-", "_") for name in _TLS_FILES))


def _tls_options(command: F) -> F:
    """--tls and the files for it, under the names of a context's keys."""
    for name, meaning in reversed(_TLS_FILES.items()):
        command = click.option(f"--{name}", metavar="FILE", help=meaning)(command)
    return click.option(
        "--tls/--no-tls", default=None, help="Speak TLS, and trust the system's authorities; or speak none."
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


def _say_once(text: str) -> Callable[[object], None]:
    """What tells a person who sits before it why nothing happens; scripts hear of it by the error."""
    left = [text] if sys.stderr.isatty() else []

    def say(_: object) -> None:
        while left:
            click.echo(left.pop(), err=True)

    return say
