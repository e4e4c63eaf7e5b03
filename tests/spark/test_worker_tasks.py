"""What a worker of Spark has imported is looked through once, not after every task."""

from __future__ import annotations

import subprocess
import sys

from proving import proves

TASKS = """
import gc
from headrace.spark.connections import begin_task

seen = []
for _ in range(4):
    begin_task()
    seen.append(gc.get_freeze_count())
    gc.collect()
assert seen[0] == 0, seen
assert seen[1] > 10_000, seen
assert seen[1] == seen[2] == seen[3], seen
"""


@proves("S2")
def test_what_is_imported_is_put_aside_when_a_second_task_begins() -> None:
    subprocess.run([sys.executable, "-c", TASKS], check=True)
