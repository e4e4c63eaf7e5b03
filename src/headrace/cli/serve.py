"""`headrace serve`: settings from file, environment and flags, then the broker until it is stopped."""

from __future__ import annotations

import gc

import click

from headrace.cli import server_settings
from headrace.settings import values


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
    named = {"data": data, "listen": listen, "advertise": advertise, "http.listen": http}
    effective = server_settings.load(config_file, assignments, named)
    if print_config:
        server_settings.print_config(effective, values.BROKER_BY_NAME.values(), as_json)
        return 0
    gc.disable()  # until the broker stands: what a start makes stays, and looking through it takes a tenth of the time
    from headrace.server.node import run

    return run(effective)
