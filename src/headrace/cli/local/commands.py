"""The commands that run a cluster on this machine: `headrace cluster up|status|start|kill|down`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click

from headrace.cli import health
from headrace.cli.cluster_reach import reach
from headrace.cli.health import Health
from headrace.cli.local import cluster_file, control, plan
from headrace.cli.local.cluster_file import LocalCluster
from headrace.cli.local.processes import State
from headrace.cli.options import json_option, pairs, with_connect
from headrace.cli.output import show_json, show_table
from headrace.cli.watch import watch_option
from headrace.errors import HeadraceError, OperatorError

DEFAULT_BASE_PORT: Final = 9092
SIGNALS: Final = {
    "KILL": signal.SIGKILL,
    "TERM": signal.SIGTERM,
    "STOP": signal.SIGSTOP,
    "CONT": signal.SIGCONT,
}

folder_option = click.option(
    "--dir",
    "folder",
    required=True,
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path, resolve_path=True),
    help="The cluster's folder.",
)


@click.command()
@click.option("--brokers", type=click.IntRange(1, plan.BROKERS_MAX), help="How many; 3 in a new cluster.")
@click.option("--etcd", type=click.Choice(["0", "1", "3"]), help="etcd nodes; 1 in a new cluster.")
@click.option("--registries", type=click.IntRange(0, plan.BLOCK), help="How many; none in a new cluster.")
@folder_option
@click.option(
    "--base-port",
    type=click.IntRange(0, 65_000),
    help=f"First of the ports, all on loopback: {DEFAULT_BASE_PORT} in a new cluster; 0 finds free ones.",
)
@click.option("--set", "assignments", multiple=True, metavar="NAME=VALUE", help="A setting of all brokers; repeat.")
@click.option("--foreground", is_flag=True, help="Stay, and stop the cluster with ctrl-C.")
@json_option
def up(
    brokers: int | None,
    etcd: str | None,
    registries: int | None,
    folder: Path,
    base_port: int | None,
    assignments: tuple[str, ...],
    foreground: bool,
    as_json: bool,
) -> int:
    """Start a cluster on this machine, or what is down of one.

    Every process has its folder, config file and log below DIR. All of them
    listen on 127.0.0.1 only, and go on running when this command has ended.
    """
    found = cluster_file.find(folder)
    control.make(
        folder,
        (0 if found else DEFAULT_BASE_PORT) if base_port is None else base_port,
        brokers or (len(found.brokers) if found else 3),
        int(etcd) if etcd else (len(found.etcd) if found else 1),
        pairs(assignments, "--set"),
        registries or 0,
    )
    if not foreground:
        _start(folder, as_json, is_new=found is None)
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _start(folder, as_json, is_new=found is None)
        click.echo("ctrl-C stops the cluster", err=True)
        signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        control.stop(folder, _progress)
    return 0


def _start(folder: Path, as_json: bool, is_new: bool) -> None:
    started = control.start(folder)
    cluster = cluster_file.load(folder)
    control.wait_until_ready(cluster, _progress)
    _show_started(cluster, folder, [node.name for node in started], as_json, is_new)


def _show_started(cluster: LocalCluster, folder: Path, started: list[str], as_json: bool, is_new: bool) -> None:
    rows = _process_rows(cluster)
    registries = ",".join(node.address for node in cluster.registries)
    if as_json:
        show_json({"bootstrap": cluster.bootstrap, "registries": registries, "started": started, "processes": rows})
        return
    show_table(rows, ("name", "state", "pid", "address", "log"))
    click.echo(f"\nstarted: {', '.join(started) or 'nothing, all of it was up'}")
    click.echo(f"bootstrap servers: {cluster.bootstrap}")
    if cluster.registries:
        click.echo(f"registries, which can be bootstrap servers too: {registries}")
    click.echo("\nnext:")
    several = len(cluster.brokers) > 1
    create = "headrace topic create orders --partitions 3" + (" --replicas 3" if len(cluster.brokers) > 2 else "")
    for line in (
        f"export HEADRACE_BOOTSTRAP={cluster.bootstrap}",
        *([create] if is_new else []),
        f"headrace cluster status --dir {folder}",
        f"headrace cluster kill --dir {folder} {2 if several else 1}",
        f"headrace cluster up --dir {folder}",
        f"headrace cluster demo-loss --dir {folder}",
        f"headrace cluster down --dir {folder}",
    ):
        click.echo(f"  {line}")


def _process_rows(cluster: LocalCluster) -> list[dict[str, Any]]:
    rows = []
    for node in cluster.nodes:
        state = node.state()
        pid = node.process.pid if node.process is not None and state is not State.DOWN else None
        rows.append({"name": node.name, "state": str(state), "pid": pid, "address": node.address, "log": node.log})
    return rows


@click.command()
@click.option(
    "--dir",
    "folder",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path, resolve_path=True),
    help="The folder of a cluster on this machine: its processes are shown too. Without it, --bootstrap is asked.",
)
@json_option
@watch_option
@with_connect
def status(folder: Path | None, as_json: bool, connect: Callable[..., Any]) -> int:
    """Show which brokers are down, who is controller, who leads, what is not in sync,
    and which processes run.

    The exit code is 0 only if every process is up, or every broker answers, and
    every partition has a leader and all its replicas in sync.
    """
    rows: list[dict[str, Any]] | None = None
    found: Health | None
    if folder is None:
        found, all_up = _health_at(connect)
    else:
        cluster = cluster_file.load(folder)
        rows, found = _process_rows(cluster), _health_of(cluster)
        all_up = all(row["state"] == "up" for row in rows)
    healthy = all_up and found is not None and found.is_whole
    if as_json:
        show_json({"processes": rows, "cluster": None if found is None else asdict(found), "healthy": healthy})
        return 0 if healthy else 1
    if rows is not None:
        show_table(rows, ("name", "state", "pid", "address", "log"))
        click.echo()
    if found is None:
        click.echo("no broker answers")
        return 1
    click.echo(f"cluster {found.cluster_id}, controller {found.controller or 'none'}")
    show_table(found.brokers, ("broker", "state", "leads", "replicas", "behind"))
    health.show(found)
    return 0 if healthy else 1


def _health_at(connect: Callable[..., Any]) -> tuple[Health, bool]:
    """What the brokers say, and whether each of them answers."""
    with reach(connect) as cluster:
        return health.ask(cluster, cluster.silent), not cluster.silent


def _health_of(cluster: LocalCluster) -> Health | None:
    """The answer of the first broker that gives one; None if none does."""
    for node in cluster.brokers:
        if node.state() is State.UP:
            try:
                with control.connect(node.address) as client:
                    return health.ask(client)
            except HeadraceError:
                continue
    return None


@click.command()
@folder_option
@click.argument("name", metavar="BROKER|etcdN|registryN")
@click.option(
    "--signal",
    "signal_name",
    type=click.Choice(list(SIGNALS)),
    default="KILL",
    show_default=True,
    help="KILL as a crash, TERM as a clean stop, STOP and CONT to pause and go on.",
)
def kill(folder: Path, name: str, signal_name: str) -> None:
    """Send a signal to one broker, by its number, or to one other process."""
    node = control.send(folder, name, SIGNALS[signal_name])
    assert node.process is not None
    click.echo(f"SIG{signal_name} to {node.name}, process {node.process.pid}")


@click.command()
@folder_option
@click.argument("names", nargs=-1, required=True, metavar="BROKER|etcdN|registryN...")
def start(folder: Path, names: tuple[str, ...]) -> None:
    """Start processes that are down, and wait until they are ready."""
    started = control.start(folder, names)
    cluster = cluster_file.load(folder)
    paused = [name for name in names if cluster.node(name).state() is State.PAUSED]
    if paused:
        raise OperatorError(f"{paused[0]} is paused; `headrace cluster kill --signal CONT` lets it go on")
    control.wait_until_ready(cluster, _progress)
    click.echo(f"started: {', '.join(node.name for node in started) or 'nothing, all of it was up'}")


@click.command()
@folder_option
def down(folder: Path) -> None:
    """Stop registries and brokers cleanly, then etcd. What they have stored stays in DIR."""
    stopped = control.stop(folder, _progress)
    click.echo(f"stopped: {', '.join(node.name for node in stopped) or 'nothing, all of it was down'}")


def _progress(text: str) -> None:
    """One line on a terminal, written over by the next; an empty one removes it."""
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{text}", nl=False, err=True)
