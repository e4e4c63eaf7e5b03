"""How far an errand goes through the code, as `tools/way.py` says, on brokers of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINE = re.compile(r"^(.*?) +(\d+) files +(\d+) changes of file", re.MULTILINE)


def ways(*errands: str) -> list[tuple[int, int]]:
    """Files and changes of file of each."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "tools" / "way.py"), *errands]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    found = [(int(files), int(changes)) for _, files, changes in LINE.findall(run.stdout)]
    assert run.returncode == 0, run.stderr
    assert len(found) == len(errands), run.stdout
    return found
