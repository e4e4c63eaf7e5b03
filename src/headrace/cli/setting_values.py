"""Values of settings as listings show them: large numbers of ms and bytes also as people write them."""

from __future__ import annotations

from headrace.settings import quantities
from headrace.settings.values import BROKER_BY_NAME, GROUP_BY_NAME, REGISTRY_BY_NAME, TOPIC_BY_NAME

_UNITS = {
    setting.name: setting.unit
    for table in (REGISTRY_BY_NAME, BROKER_BY_NAME, TOPIC_BY_NAME, GROUP_BY_NAME)
    for setting in table.values()
}


def for_people(name: str, value: object) -> object:
    """`604800000 (7d)` where that says more than the number; else the value as it is."""
    text = str(value)
    if not text.isdecimal():
        return value
    said = quantities.friendly(int(text), _UNITS.get(name) or _unit_in(name))
    return f"{text} ({said})" if said else value


def _unit_in(name: str) -> str:
    """Of a name that is not in our tables, as Kafka's are not."""
    words = name.split(".")
    return "ms" if words[-1] == "ms" else "bytes" if "bytes" in words[-3:] else ""
