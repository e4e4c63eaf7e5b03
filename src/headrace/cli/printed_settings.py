"""Settings as `--print-config` shows them: each with its value, its source and its meaning."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headrace.cli.output import show_json, show_table
from headrace.settings.values import BrokerSettings, Secret, Setting, Value


def print_config(effective: BrokerSettings, settings: Iterable[Setting], as_json: bool) -> None:
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
    else:
        shown = [
            {**row, "value": str(row["value"]).lower() if isinstance(row["value"], bool) else row["value"]}
            for row in rows
        ]
        show_table(shown, ("setting", "value", "unit", "source", "meaning"))


def _plain(value: Value) -> object:
    if isinstance(value, Secret):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
