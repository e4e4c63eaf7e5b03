"""`headrace config`: settings of topics, brokers and groups, with where each value comes from; and those of users."""

from __future__ import annotations

from typing import cast

import click

from headrace.cli import cluster_settings
from headrace.cli.completers import resource_names, resource_setting_names, resource_settings
from headrace.cli.options import json_option, pairs, with_cluster
from headrace.cli.output import show_rows
from headrace.cli.setting_values import for_people
from headrace.client.admin import operations
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.operations import ResourceKind


def _resource(command: click.decorators.FC) -> click.decorators.FC:
    command = click.argument("name", shell_complete=resource_names)(command)
    return click.argument("kind", type=click.Choice(["topic", "broker", "group"]), metavar="topic|broker|group")(
        command
    )


@click.group()
def config() -> None:
    """Show and change settings of topics, brokers and groups, and names and values of your own."""


config.add_command(cluster_settings.cluster)


@config.command()
@_resource
@click.option("--changed", is_flag=True, help="Only settings that are not at their default.")
@json_option
@with_cluster
def describe(cluster: Cluster, kind: str, name: str, changed: bool, as_json: bool) -> None:
    """Show the settings of a topic or a group (by name) or a broker (by id)."""
    rows = [
        {
            "setting": entry.name,
            "value": _shown(entry, as_json),
            "source": entry.source,
            "read_only": entry.read_only,
            "meaning": entry.meaning,
        }
        for entry in operations.describe_configs(cluster, _kind(kind, name), name)
        if not (changed and entry.source == "default")
    ]
    show_rows(rows, ("setting", "value", "source", "read_only"), as_json)


@config.command("set")
@_resource
@click.argument("assignments", nargs=-1, required=True, metavar="NAME=VALUE...", shell_complete=resource_settings)
@with_cluster
def set_values(cluster: Cluster, kind: str, name: str, assignments: tuple[str, ...]) -> None:
    """Set settings of a topic, broker or group."""
    operations.alter_configs(cluster, _kind(kind, name), name, values=pairs(assignments, "NAME=VALUE"))
    click.echo(f"changed {kind} {name}")


@config.command()
@_resource
@click.argument("settings", nargs=-1, required=True, metavar="SETTING...", shell_complete=resource_setting_names)
@with_cluster
def unset(cluster: Cluster, kind: str, name: str, settings: tuple[str, ...]) -> None:
    """Bring settings of a topic, broker or group back to their defaults."""
    operations.alter_configs(cluster, _kind(kind, name), name, unset=settings)
    click.echo(f"changed {kind} {name}")


def _shown(entry: operations.Config, as_json: bool) -> object:
    if entry.sensitive:
        return "(hidden)"
    return entry.value if as_json else for_people(entry.name, entry.value)


def _kind(kind: str, name: str) -> ResourceKind:
    if kind == "broker" and not name.isdigit():
        raise click.BadParameter(f"{name!r} is not a broker id; `headrace cluster describe` lists them")
    return cast(ResourceKind, kind)
