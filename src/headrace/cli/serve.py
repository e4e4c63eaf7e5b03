"""`headrace serve`: settings from file, environment and flags, then the broker until it is stopped."""

from __future__ import annotations

import gc
from typing import Any

import click

from headrace import settings
from headrace.cli.options import pairs
from headrace.cli.output import show_json, show_table


@click.command()
@click.option("--config", "config_file", metavar="FILE", help="Settings as TOML.")
@click.option("--data", metavar="DIR", help="Folder of everything the broker keeps.  [data]")
@click.option("--listen", multiple=True, metavar="[NAME=][tls://]HOST:PORT", help="Kafka listener; repeat.  [listen]")
@click.option("--advertise", multiple=True, metavar="[NAME=]HOST:PORT", help="What clients are told.  [advertise]")
@click.option("--http", metavar="HOST:PORT|off", help="HTTP port.  [http.listen]")
@click.option("--set", "assignments", multiple=True, metavar="NAME=VALUE", help="Any other setting; repeat.")
@click.option("--print-config", is_flag=True, help="Print all settings with their source, and exit.")
@click.option("--json", "as_json", is_flag=True, help="With --print-config: print JSON.")
def serve(
    config_file: str | None,
    data: str | None,
    listen: tuple[str, ...],
    advertise: tuple[str, ...],
    http: str | None,
    assignments: tuple[str, ...],
    print_config: bool,
    as_json: bool,
) -> int:
    """Run a broker until it is stopped by SIGTERM or ctrl-C.

    Settings come, weakest first, from their defaults, the --config file, the
    environment (HEADRACE_NUM_PARTITIONS=3 is num.partitions) and the flags here;
    --print-config shows them all.
    """
    flags: dict[str, object] = dict(pairs(assignments, "--set"))
    named = {"data": data, "listen": listen, "advertise": advertise, "http.listen": http}
    flags.update((name, value) for name, value in named.items() if value)
    effective = settings.load(config_file, flags=flags)
    if print_config:
        _print_config(effective, as_json)
        return 0
    gc.disable()  # until the broker stands: what a start makes stays, and looking through it takes a tenth of the time
    from headrace.node import run

    return run(effective)


def _print_config(effective: settings.BrokerSettings, as_json: bool) -> None:
    rows: list[dict[str, Any]] = [
        {
            "setting": name,
            "value": _plain(effective.values[name]),
            "unit": setting.unit,
            "source": effective.sources[name],
            "meaning": setting.meaning,
        }
        for name, setting in settings.BROKER_BY_NAME.items()
    ]
    if as_json:
        show_json(rows)
    else:
        shown = [
            {**row, "value": str(row["value"]).lower() if isinstance(row["value"], bool) else row["value"]}
            for row in rows
        ]
        show_table(shown, ("setting", "value", "unit", "source", "meaning"))


def _plain(value: settings.Value) -> object:
    if isinstance(value, settings.Secret):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
