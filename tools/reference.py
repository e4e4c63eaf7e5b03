"""Writes the references in docs/, all or those named; with --check only says whether they are current.

    reference.py [--check] [API.md CLI.md METRICS.md PROTOCOL.md SETTINGS.md]

The Python API comes from its docstrings, the command line from its help, metrics, APIs of Kafka and settings from their
tables.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import api_reference
import cli_reference
import metrics_reference
import protocol_reference
import settings_reference

DOCS = Path(__file__).resolve().parent.parent / "docs"
REFERENCES = {
    "API.md": api_reference.reference,
    "CLI.md": cli_reference.reference,
    "METRICS.md": metrics_reference.reference,
    "PROTOCOL.md": protocol_reference.reference,
    "SETTINGS.md": settings_reference.reference,
}


def stale(names: Iterable[str]) -> dict[Path, str]:
    """What should be in those files that are not current."""
    made = {DOCS / name: REFERENCES[name]() for name in names}
    return {file: text for file, text in made.items() if not file.exists() or file.read_text() != text}


if __name__ == "__main__":
    is_check = "--check" in sys.argv
    found = stale([name for name in sys.argv[1:] if name != "--check"] or REFERENCES)
    if found and is_check:
        sys.exit(f"not current: {', '.join(f'docs/{file.name}' for file in found)}; run make reference")
    for file, text in found.items():
        file.write_text(text)
