"""`headrace context`: named clusters, and what holds for commands that connect."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from headrace.cli import context_file
from headrace.cli.completers import context_names
from headrace.cli.output import show_json, show_rows, show_table
from headrace.client import contexts
from headrace.client.contexts import CONTEXTS, CURRENT, KEY_BY_NAME, KEYS, NO_CONTEXT

F = TypeVar("F", bound=Callable[..., Any])


@click.group()
def context() -> None:
    """Name clusters, and choose which one commands talk to.

    \b
    headrace context set staging --bootstrap broker1:9093 --tls-ca ca.pem --use
    headrace topic list                      at staging from now on
    headrace topic list --context none       at HEADRACE_BOOTSTRAP or 127.0.0.1:9092

    A flag goes before the environment, that before the context, and that before
    the default; docs/CONTEXTS.md says more.
    """


@context.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_contexts(as_json: bool) -> None:
    """List all contexts of the config file."""
    file = contexts.read(contexts.config_path())
    chosen = os.environ.get(contexts.CONTEXT_VARIABLE) or file.current
    rows = [{"context": name, "current": name == chosen, **said} for name, said in sorted(file.contexts.items())]
    if not rows and not as_json:
        click.echo(f"no contexts in {file.path}; `headrace context set NAME --bootstrap HOST:PORT` makes one", err=True)
    show_rows(rows, ("context", "current", "bootstrap", "tls-ca", "tls-cert"), as_json)


@context.command()
@click.argument("name", required=False, shell_complete=context_names)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(name: str | None, as_json: bool) -> None:
    """Show what holds for commands now, or with --context NAME, and where each value comes from."""
    path = contexts.config_path()
    found = contexts.resolve({}, name)
    rows = [{"key": key.name, "value": found[key.name], "source": found.source(key.name)} for key in KEYS]
    if found.password is not None:
        source = f"environment {contexts.PASSWORD_VARIABLE}"
        rows.append({"key": "tls-key-password", "value": "(hidden)", "source": source})
    if as_json:
        show_json({"context": found.context, "file": str(path), "values": rows})
        return
    click.echo(f"context {found.context or NO_CONTEXT}, of {path}{'' if path.exists() else ', which is not there'}")
    show_table(rows, ("key", "value", "source"))


@context.command()
@click.argument("name", shell_complete=context_names)
def use(name: str) -> None:
    """Let commands talk to the cluster of context NAME; `none` for no context."""
    with context_file.alone(contexts.config_path()):
        file, text = _read()
        if name == NO_CONTEXT:
            _write(file, text, context_file.with_current(text, None), {CURRENT: None})
            click.echo("commands use no context now")
            return
        file.named(name)
        _write(file, text, context_file.with_current(text, name), {CURRENT: name})
    click.echo(f"commands use context {name} now")
    if os.environ.get(contexts.CONTEXT_VARIABLE, name) != name:
        click.echo(f"but here {contexts.CONTEXT_VARIABLE} says {os.environ[contexts.CONTEXT_VARIABLE]}", err=True)


def _key_options(command: F) -> F:
    for key in reversed(KEYS):
        metavar = {"tls": "true|false", "timeout": "DURATION"}.get(key.name, "FILE" if key.is_file else "HOST:PORT,...")
        said = key.meaning[0].upper() + key.meaning[1:] + "."
        command = click.option(f"--{key.name}", metavar=metavar, help=said)(command)
    return command


@context.command("set")
@click.argument("name", shell_complete=context_names)
@_key_options
@click.option(
    "--unset", multiple=True, type=click.Choice(list(KEY_BY_NAME)), metavar="KEY", help="Remove a key; repeat."
)
@click.option("--use", "is_chosen", is_flag=True, help="Use it from now on.")
def set_context(name: str, unset: tuple[str, ...], is_chosen: bool, **given: str | None) -> None:
    """Make context NAME, or change the keys of it that are given.

    A key's password is not kept here: name a file that has it, or put it into
    HEADRACE_TLS_KEY_PASSWORD.
    """
    if not context_file.NAME.fullmatch(name) or name == NO_CONTEXT:
        raise click.BadParameter(f"{name!r} cannot be a context's name: letters, digits and . _ -, and not `none`")
    values = {key.replace("_", "-"): text for key, text in given.items() if text is not None}
    for key, text in values.items():
        contexts.check_value(key, text, f"--{key}")
        if not text.isprintable():
            raise click.BadParameter(f"{text!r} cannot be written to a TOML file", param_hint=f"--{key}")
        if KEY_BY_NAME[key].is_file:
            values[key] = str(Path(text).expanduser().absolute())
    if both := sorted(values.keys() & set(unset)):
        raise click.UsageError(f"--{both[0]} is given, and by --unset taken away")
    changes = {**values, **dict.fromkeys(unset)}
    with context_file.alone(contexts.config_path()):
        file, text = _read()
        new = context_file.changed_context(text, name, changes)
        meant: dict[str, Any] = {CONTEXTS: {**_tables(text), name: _after(_tables(text).get(name, {}), changes)}}
        if is_chosen:
            new, meant[CURRENT] = context_file.with_current(new, name), name
        _write(file, text, new, meant)
    made = "changed" if name in file.contexts else "made"
    click.echo(f"{made} context {name}{', and use it now' if is_chosen else ''}")
    for key, value in values.items():
        if KEY_BY_NAME[key].is_file and not Path(value).exists():
            click.echo(f"headrace: {key} {value} is not there yet", err=True)


@context.command()
@click.argument("name", shell_complete=context_names)
def delete(name: str) -> None:
    """Delete context NAME."""
    with context_file.alone(contexts.config_path()):
        file, text = _read()
        file.named(name)
        new = context_file.without_context(text, name)
        meant: dict[str, Any] = {CONTEXTS: {key: said for key, said in _tables(text).items() if key != name}}
        if file.current == name:
            new, meant[CURRENT] = context_file.with_current(new, None), None
        _write(file, text, new, meant)
    click.echo(f"deleted context {name}{'; commands use no context now' if file.current == name else ''}")


def _read() -> tuple[contexts.ContextFile, str]:
    path = contexts.config_path()
    file = contexts.read(path)
    return file, path.read_text(encoding="utf-8") if path.exists() else ""


def _tables(text: str) -> dict[str, Any]:
    tables: dict[str, Any] = tomllib.loads(text).get(CONTEXTS, {})
    return tables


def _after(table: Mapping[str, Any], changes: Mapping[str, str | None]) -> dict[str, Any]:
    typed = {key: text == "true" if key == "tls" and text is not None else text for key, text in changes.items()}
    return {key: value for key, value in {**table, **typed}.items() if value is not None}


def _write(file: contexts.ContextFile, old: str, new: str, meant: Mapping[str, Any]) -> None:
    context_file.write(file.path, old, new, {**tomllib.loads(old), **meant})
