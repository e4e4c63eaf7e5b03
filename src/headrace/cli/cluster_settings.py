"""`headrace config cluster`: cluster-wide settings that users keep in etcd, through a registry."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

import click

from headrace.cli.options import context_option, json_option
from headrace.cli.output import show_json, show_rows
from headrace.client import DEFAULT_REGISTRIES, contexts

if TYPE_CHECKING:
    from headrace.cli.registries import Registries

F = TypeVar("F", bound=Callable[..., Any])


def with_registries(command: F) -> F:
    """Give the command `registries`, made from --registry."""

    @context_option
    @click.option(
        "--registry",
        metavar="HOST:PORT,...",
        help="HTTP ports of registries, of which the first that answers is asked; else HEADRACE_REGISTRY, the "
        f"context's, or {DEFAULT_REGISTRIES}.",
    )
    @functools.wraps(command)
    def connecting(*args: Any, context: str | None, registry: str | None, **kwargs: Any) -> Any:
        from headrace.cli.registries import Registries

        found = contexts.resolve({"registry": registry}, context)
        return command(*args, registries=Registries(found["registry"], found.timeout_ms / 1000), **kwargs)

    return connecting  # type: ignore[return-value]


def revision_option(command: F) -> F:
    return click.option(
        "--revision",
        type=click.IntRange(0),
        metavar="N",
        help="Only if the setting has this revision now; 0: only if it is not there.",
    )(command)


@click.group()
def cluster() -> None:
    """Names and values of your own, kept for the whole cluster.

    They are told by every registry; brokers do not heed them. Those of brokers
    are set by `headrace config set broker`.
    """


@cluster.command("list")
@json_option
@with_registries
def list_settings(registries: Registries, as_json: bool) -> None:
    """List all of them."""
    rows = [asdict(found) for found in registries.settings()]
    show_rows(rows, ("name", "value", "revision"), as_json)


@cluster.command()
@click.argument("name")
@json_option
@with_registries
def get(registries: Registries, name: str, as_json: bool) -> None:
    """Print the value of one; with --json its revision too."""
    found = registries.setting(name)
    if as_json:
        show_json(asdict(found))
    else:
        click.echo(found.value)


@cluster.command("set")
@click.argument("name")
@click.argument("value")
@revision_option
@with_registries
def set_setting(registries: Registries, name: str, value: str, revision: int | None) -> None:
    """Set one, new or not."""
    click.echo(f"set {name}, revision {registries.set(name, value, revision).revision}")


@cluster.command()
@click.argument("name")
@revision_option
@with_registries
def delete(registries: Registries, name: str, revision: int | None) -> None:
    """Delete one."""
    registries.delete(name, revision)
    click.echo(f"deleted {name}")
