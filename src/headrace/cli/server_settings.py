"""The settings that `serve` and `registry` run with, and how `--print-config` shows them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from headrace.cli.options import pairs
from headrace.cli.output import show_json, show_table
from headrace.settings import values
from headrace.settings.values import BrokerSettings, Secret, Setting, Value


def load(config_file: str | None, assignments: Iterable[str], named: Mapping[str, object]) -> BrokerSettings:
    """From the file, the environment, --set, and the flags that name a setting, weakest first."""
    given = {name: value for name, value in named.items() if value}
    return values.load(config_file, flags={**pairs(assignments, "--set"), **given})


def print_config(effective: BrokerSettings, settings: Iterable[Setting], as_json: bool) -> None:
    """Each setting with its value, its source and its meaning."""
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
    if as_json:
        show_json(rows)
        return
    for row in rows:
        row["value"] = str(row["value"]).lower() if isinstance(row["value"], bool) else row["value"]
    show_table(rows, tuple(rows[0]))


def _plain(value: Value) -> object:
    if isinstance(value, Secret):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
