"""What docs/KAFKA.md names is there: settings, options of the client, commands."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path

import click

from headrace import Producer
from headrace.cli.main import root
from headrace.client.consumer.options import ConsumerOptions
from headrace.settings.broker import BROKER_SETTINGS
from headrace.settings.declared import TOPIC_SETTINGS
from proving import proves

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "KAFKA.md").read_text()


def column(section: str, number: int = 1) -> list[str]:
    """The names in a column of a section's table."""
    text = PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")][2:]
    assert rows, section
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row[number])]


@proves("U8")
def test_every_setting_of_the_migration_page_is_one() -> None:
    of_topics = {setting.name for setting in TOPIC_SETTINGS}
    of_brokers = {setting.name for setting in BROKER_SETTINGS} | {f"log.{name}" for name in of_topics}
    assert set(column("Settings of brokers")) - of_brokers == set()
    assert set(column("Settings of topics")) - of_topics == set()


@proves("U8")
def test_every_option_of_the_client_on_the_migration_page_is_one() -> None:
    options = {*inspect.signature(Producer.__init__).parameters, *ConsumerOptions.__annotations__}
    assert set(column("Settings of clients")) - options == set()


def refusal(command: str) -> str | None:
    """What is wrong with a command line, read and not run."""
    found: click.Command = root
    words = shlex.split(command)[1:]
    context = click.Context(root, info_name="headrace")
    while isinstance(found, click.Group):
        name = words.pop(0)
        inner = found.get_command(context, name)
        if inner is None:
            return f"{command}: no command {name}"
        found = inner
    options = {option for parameter in found.params for option in parameter.opts}
    return next((f"{command}: no option {word}" for word in words if word[:2] == "--" and word not in options), None)


@proves("U8")
def test_every_command_of_the_migration_page_is_one() -> None:
    commands = [command for command in column("Commands") if command.startswith("headrace ")]
    assert len(commands) > 15
    assert [wrong for wrong in map(refusal, commands) if wrong] == []
    assert refusal("headrace topic describe orders --upside-down") is not None
    assert refusal("headrace topic invent orders") is not None
