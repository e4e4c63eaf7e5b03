"""docs/SETTINGS.md: every setting, from the tables that declare it."""

from __future__ import annotations

from headrace.cluster.config import DYNAMIC
from headrace.kafka.broker_names import ALIASES
from headrace.settings.declared import GROUP_SETTINGS
from headrace.settings.values import (
    BROKER_SETTINGS,
    REGISTRY_BY_NAME,
    REGISTRY_SETTINGS,
    TOPIC_SETTINGS,
    Setting,
    Value,
)

HEAD = """# Settings

Generated from the tables in `src/headrace/settings/` by `make reference`; do not edit.

A broker setting comes, weakest first, from its default, the config file (`headrace serve --config FILE`, TOML), the
environment (`HEADRACE_` and the name in capitals, dots as underscores) and the command line (`--set name=value`).
`headrace serve --print-config` shows what is in effect, and why.

What has the unit ms takes durations too: `7d`, `1h30m`, `10s`, `500ms` (w, d, h, m or min, s, ms; larger units first).
What has the unit bytes takes sizes: KiB, MiB, GiB and TiB are powers of 1024, kB, MB, GB and TB powers of 1000, and a
letter alone a power of 1024 (`512k` is 512 KiB), as of `dd` and `ls -h`; `mb` and `gb` are refused, because they are
read in both ways. A number alone is in the unit of the table. That holds in files, in the environment, on the command
line, and for topics, brokers and groups by any client. Kafka's brokers take numbers alone; those are what is stored,
and what every client is answered.
"""


def shown(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(value) if isinstance(value, tuple) else str(value)


def table(settings: tuple[Setting, ...]) -> str:
    rows = ["| name | default | unit | allowed | meaning |", "|---|---|---|---|---|"]
    for setting in settings:
        allowed = ", ".join(setting.choices)
        if setting.least is not None or setting.most is not None:
            least = "" if setting.least is None else f"{setting.least:.15g}"
            most = "" if setting.most is None else f"{setting.most:.15g}"
            allowed = f"{least} to {most}".strip() if most else f"from {least}"
        default = f"`{shown(setting.default)}`" if shown(setting.default) else ""
        rows.append(f"| `{setting.name}` | {default} | {setting.unit} | {allowed} | {setting.meaning} |")
    return "\n".join(rows) + "\n"


def kafka_names() -> str:
    rows = ["| Kafka's name | here |", "|---|---|"]
    rows += [f"| `{name}` | `{known}` |" for name, known in sorted(ALIASES.items())]
    return "\n".join(rows) + "\n"


def reference() -> str:
    own = {setting.name for setting in REGISTRY_SETTINGS}
    shared = [name for name in REGISTRY_BY_NAME if name not in own]
    defaults = {f"log.{setting.name}" for setting in TOPIC_SETTINGS}
    altered = sorted(
        DYNAMIC - defaults - {setting.name for setting in BROKER_SETTINGS if "without effect" in setting.meaning}
    )
    return (
        f"{HEAD}\n## Broker\n\n{table(BROKER_SETTINGS)}"
        "\nWhile a broker runs, `headrace config set broker ID NAME=VALUE`, or any of Kafka's tools, alters "
        f"{', '.join(f'`{name}`' for name in altered)}, and the defaults of topics.\n\n"
        "Kafka's tools can use Kafka's names for these; in files and flags they are called as here.\n\n"
        f"{kafka_names()}\n## Topic\n\n"
        f"Each has a broker-wide default called `log.` and the name.\n\n{table(TOPIC_SETTINGS)}"
        f"\n## Group\n\nOf a consumer group, by its name, with Kafka's admin tools.\n\n{table(GROUP_SETTINGS)}"
        f"\n## Registry\n\n`headrace registry` reads them in the same ways.\n\n{table(REGISTRY_SETTINGS)}\n"
        f"Of a broker's settings it uses {', '.join(f'`{name}`' for name in shared)}.\n"
    )
