"""The settings that `serve` and `registry` run with, and how `--print-config` shows them.

As TOML they are a file for `--config`: every setting with its meaning, those at their default commented out. A secret
is never in it.
"""

from __future__ import annotations

import functools
import json
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar

import click

from headrace import __version__
from headrace.cli.completers import server_setting_assignments
from headrace.cli.options import pairs
from headrace.cli.output import show_json, show_table
from headrace.cli.setting_values import for_people
from headrace.settings import values
from headrace.settings.values import BrokerSettings, Secret, Setting, Value

F = TypeVar("F", bound=Callable[..., Any])

COMMENT_WIDTH: Final = 100
FORMS: Final = ("table", "json", "toml")


def print_config_options(command: F) -> F:
    """--print-config and what it takes, as `print_config`: None, or the form to print in."""

    def chosen(ctx: click.Context, _parameter: click.Parameter, given: bool) -> str | None:
        forms = [form for form in FORMS if ctx.params.pop(f"as_{form}", False)]
        if forms and not given:
            raise click.UsageError(f"--{forms[0]} goes with --print-config")
        if len(forms) > 1:
            raise click.UsageError("--json and --toml are two forms of one thing: choose one")
        return (forms or ["table"])[0] if given else None

    for form, what in (("toml", "a file for --config, with comments"), ("json", "JSON")):
        said = f"With --print-config: {what}."
        command = click.option(f"--{form}", f"as_{form}", is_flag=True, is_eager=True, help=said)(command)
    described = "Print all settings with their source, and exit."
    return click.option("--print-config", is_flag=True, callback=chosen, help=described)(command)


def broker_options(command: F) -> F:
    """The flags that give a broker its settings, as `effective`."""

    @click.option("--config", "config_file", metavar="FILE", help="Settings as TOML.")
    @click.option("--data", metavar="DIR", help="Folder of everything the broker keeps.  [data]")
    @click.option(
        "--listen", multiple=True, metavar="[NAME=][tls://]HOST:PORT", help="Kafka listener; repeat.  [listen]"
    )
    @click.option("--advertise", multiple=True, metavar="[NAME=]HOST:PORT", help="What clients are told.  [advertise]")
    @click.option("--http", metavar="HOST:PORT|off", help="HTTP port.  [http.listen]")
    @click.option(
        "--set",
        "assignments",
        multiple=True,
        metavar="NAME=VALUE",
        shell_complete=server_setting_assignments,
        help="Any other setting; repeat.",
    )
    @functools.wraps(command)
    def loaded(
        config_file: str | None,
        data: str | None,
        listen: tuple[str, ...],
        advertise: tuple[str, ...],
        http: str | None,
        assignments: tuple[str, ...],
        **others: Any,
    ) -> Any:
        named = {"data": data, "listen": listen, "advertise": advertise, "http.listen": http}
        return command(effective=load(config_file, assignments, named), **others)

    return loaded  # type: ignore[return-value]


def load(config_file: str | None, assignments: Iterable[str], named: Mapping[str, object]) -> BrokerSettings:
    """From the file, the environment, --set, and the flags that name a setting, weakest first."""
    given = {name: value for name, value in named.items() if value}
    return values.load(config_file, flags={**pairs(assignments, "--set"), **given})


def print_config(effective: BrokerSettings, settings: Iterable[Setting], form: str) -> None:
    """Each setting with its value, its source and its meaning."""
    if form == "toml":
        click.echo("\n".join(sample(effective, settings)))
        return
    rows: list[dict[str, Any]] = [
        {
            "setting": setting.name,
            "value": _plain(effective.values[setting.name]),
            "unit": setting.unit,
            "source": effective.sources[setting.name],
            "meaning": setting.meaning,
        }
        for setting in settings
    ]
    if form == "json":
        show_json(rows)
        return
    for row in rows:
        row["value"] = (
            str(row["value"]).lower() if isinstance(row["value"], bool) else for_people(row["setting"], row["value"])
        )
    show_table(rows, tuple(rows[0]))


def _plain(value: Value) -> object:
    if isinstance(value, Secret):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def sample(effective: BrokerSettings, settings: Iterable[Setting]) -> Iterator[str]:
    """The lines of a config file that gives these settings again, from wherever they came."""
    yield f"# Settings of Headrace {__version__}. What is commented out is at its default."
    yield "# A name may stand in quotes as here, or below a table: [log.segment] bytes = 1073741824"
    yield '# What is in ms or bytes may be written as "7d", "1h30m", "10s" or "512MiB", "1GiB", in quotes.'
    yield "# The environment is stronger than this file, and flags are stronger than that."
    for setting in settings:
        source, value = effective.sources[setting.name], effective.values[setting.name]
        yield ""
        yield from (f"# {line}" for line in textwrap.wrap(setting.meaning, COMMENT_WIDTH))
        yield f"# {_bounds(setting)}"
        name = f'"{setting.name}"' if "." in setting.name else setting.name
        if isinstance(value, Secret):
            yield f"# {name} = {toml_of('')}"
            if source != "default":
                yield f"# given by {source}, and not shown: write it here, or go on giving it there"
        elif source == "default":
            yield f"# {name} = {toml_of(value)}"
        else:
            yield f"# from {source}"
            yield f"{name} = {toml_of(value)}"


def _bounds(setting: Setting) -> str:
    said = [f"default {toml_of('' if isinstance(setting.default, Secret) else setting.default)}"]
    if setting.unit:
        said.insert(0, f"in {setting.unit}")
    if setting.choices:
        said.append("one of " + ", ".join(setting.choices))
    if setting.least is not None:
        said.append(f"at least {setting.least:.15g}")
    if setting.most is not None:
        said.append(f"at most {setting.most:.15g}")
    return "; ".join(said)


def toml_of(value: Value) -> str:
    match value:
        case bool():
            return str(value).lower()
        case tuple():
            return f"[{', '.join(map(toml_of, value))}]"
        case int() | float():
            return repr(value)
        case _:  # strings of JSON are strings of TOML, but for one character
            return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
