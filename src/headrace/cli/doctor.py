"""`headrace doctor`: what a broker with these settings would meet here, or meets already. It changes nothing."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import click

from headrace.cli import EXIT_FAILED, server_settings
from headrace.cli.checkup import certificates, coordination, data_folder, machine, ports, risks
from headrace.cli.checkup.finding import Finding, Level, fail
from headrace.cli.options import json_option
from headrace.cli.output import show_json
from headrace.errors import HeadraceError
from headrace.settings.values import BrokerSettings

COLOURS: Final = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}


@click.command()
@server_settings.broker_options
@click.option("--strict", is_flag=True, help="Exit with 1 for warnings too.")
@json_option
def doctor(effective: BrokerSettings, strict: bool, as_json: bool) -> int:
    """Look for what keeps a broker from running well, with the settings of `headrace serve`.

    Ports, limits, disk, clock, versions, certificates, coordination, and what is
    unsafe in the settings. Nothing is changed, and a broker may run: then it is
    asked how it is. Exits with 1 if something fails.

    \b
    headrace doctor --config /etc/headrace/headrace.toml
    headrace doctor --data ./data --json
    """
    found = list(examined(effective))
    counts = Counter(each.level for each in found)
    if as_json:
        show_json([dataclasses.asdict(each) for each in found])
    else:
        for each in found:
            _show(each)
        click.echo(f"{counts[Level.OK]} ok, {counts[Level.WARN]} to be warned of, {counts[Level.FAIL]} failed")
    return EXIT_FAILED if counts[Level.FAIL] or (strict and counts[Level.WARN]) else 0


def examined(settings: BrokerSettings) -> Iterator[Finding]:
    broker = data_folder.holder(settings["data"])
    parts: list[tuple[str, Callable[[], Iterable[Finding]]]] = [
        ("machine", lambda: machine.look(settings, broker)),
        ("data folder", lambda: data_folder.look(settings["data"], broker)),
        ("ports", lambda: ports.look(settings, broker)),
        ("certificates", lambda: certificates.look(settings)),
        ("coordination", lambda: coordination.look(settings)),
        ("cluster", lambda: ports.look_at_cluster(settings) if broker is not None else ()),
        ("settings", lambda: risks.look(settings)),
    ]
    for name, look in parts:
        try:
            yield from look()
        except (HeadraceError, OSError) as error:
            yield fail(name, str(error), "a broker with these settings meets this too: mend it, and look again")


def _show(finding: Finding) -> None:
    level = click.style(f"{finding.level:<4}", fg=COLOURS[finding.level])
    click.echo(f"{level}  {finding.what}: {finding.says}")
    if finding.advice:
        click.echo(f"      -> {finding.advice}")
