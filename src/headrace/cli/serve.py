"""`headrace serve`: settings from file, environment and flags, then the broker until it is stopped."""

from __future__ import annotations

import gc

import click

from headrace.cli import server_settings
from headrace.server import first_process
from headrace.settings import values
from headrace.settings.values import BrokerSettings


@click.command()
@server_settings.broker_options
@server_settings.print_config_options
def serve(effective: BrokerSettings, print_config: str | None) -> int:
    """Run a broker until it is stopped by SIGTERM or ctrl-C.

    Settings come, weakest first, from their defaults, the --config file, the
    environment (HEADRACE_NUM_PARTITIONS=3 is num.partitions) and the flags here;
    --print-config shows them all, and with --toml writes a file to begin with:

    \b
    headrace serve --print-config --toml >headrace.toml
    """
    if print_config:
        server_settings.print_config(effective, values.BROKER_BY_NAME.values(), print_config)
        return 0
    first_process.take_signals()
    gc.disable()  # until the broker stands: what a start makes stays, and looking through it takes a tenth of the time
    from headrace.server.node import run

    return run(effective)
