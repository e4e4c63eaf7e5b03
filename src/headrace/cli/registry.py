"""`headrace registry`: settings from file, environment and flags, then the registry until it is stopped."""

from __future__ import annotations

import gc

import click

from headrace.cli import server_settings
from headrace.cli.completers import server_setting_assignments
from headrace.coordination.choice import ETCD_SCHEME
from headrace.server import first_process
from headrace.settings import values


@click.command()
@click.option("--config", "config_file", metavar="FILE", help="Settings as TOML.")
@click.option("--etcd", metavar="HOST:PORT,...", help="The cluster's etcd nodes.  [coordination]")
@click.option(
    "--listen", multiple=True, metavar="[NAME=][tls://]HOST:PORT", help="Kafka listener; repeat.  [registry.listen]"
)
@click.option("--http", metavar="HOST:PORT|off", help="HTTP port.  [registry.http.listen]")
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="NAME=VALUE",
    shell_complete=server_setting_assignments,
    help="Any other setting; repeat.",
)
@server_settings.print_config_options
def registry(
    config_file: str | None,
    etcd: str | None,
    listen: tuple[str, ...],
    http: str | None,
    assignments: tuple[str, ...],
    print_config: str | None,
) -> int:
    """Run a registry: it tells clients where brokers, topics and groups are.

    It is no schema registry: RocketMQ calls such a server a name server.

    It keeps nothing; run as many as you like and name them all as bootstrap
    servers. Settings come as those of `headrace serve` do, and may stand in the
    same file; docs/REGISTRY.md says more.

    \b
    headrace registry --etcd 127.0.0.1:2379
    headrace consume orders --bootstrap 127.0.0.1:9080
    curl 127.0.0.1:8083/brokers
    """
    named = {
        "coordination": None if etcd is None else ETCD_SCHEME + etcd.removeprefix(ETCD_SCHEME),
        "registry.listen": listen,
        "registry.http.listen": http,
    }
    effective = server_settings.load(config_file, assignments, named)
    if print_config:
        server_settings.print_config(effective, values.REGISTRY_BY_NAME.values(), print_config)
        return 0
    first_process.take_signals()
    gc.disable()  # until the registry stands: what a start makes stays
    from headrace.server.registry import run

    return run(effective)
