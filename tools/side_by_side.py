"""Runs the tests in two processes side by side: those that start Spark; and all others, then some of the broker's once
more on the other layout of its data folder.

Spark's tests wait for its processes most of the time and so do the others for theirs, so two cores do both in little
more time than one takes. What the second process says is shown as it comes, what Spark's says when it has ended. Other
arguments go to all; if they name a file, that alone is run. What all have proven is put together in one file.

    side_by_side.py --proven FILE [arguments of pytest]
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / ".work"
SPARK_TESTS = "tests/spark"
BROKER_TESTS = (
    "tests/clients/test_matrix.py",
    *(f"tests/faults/test_{name}.py" for name in ("kill", "full_disk", "live_fuzz", "start", "compacted_restart")),
    *(f"tests/frontend/test_{name}.py" for name in ("produce_and_fetch", "cold_reads", "retention_archived")),
)
"""Clients, crashes, fuzz, full disk; `make prove` has the broker's other tests on that layout."""
OUTCOMES = ("passed", "skipped", "failed")
NOTHING_COLLECTED = 5


def run(proven: Path, arguments: list[str]) -> int:
    began = time.monotonic()
    parts = {
        "spark": [SPARK_TESTS],
        "others": ["tests", f"--ignore={SPARK_TESTS}"],
        "shared": [*BROKER_TESTS, "--layout", "shared"],
    }
    files = {name: WORK / f"proven-{name}.json" for name in parts}
    pytest = [sys.executable, "-m", "pytest", *arguments]
    if any((ROOT / argument.partition("::")[0]).exists() for argument in arguments):
        return subprocess.run([*pytest, "--proven", str(proven)], cwd=ROOT, check=False).returncode
    commands = {name: [*pytest, "--proven", str(files[name]), *chosen] for name, chosen in parts.items()}
    for file in files.values():  # a part that does not come to its end would be spoken for by the last run's
        file.unlink(missing_ok=True)
    shown = WORK / "spark-tests.log"
    with shown.open("w") as output:
        spark = subprocess.Popen(commands["spark"], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    try:
        others = subprocess.run(commands["others"], cwd=ROOT, check=False).returncode
        print("the broker's tests on the layout `shared`:", flush=True)
        shared = subprocess.run(commands["shared"], cwd=ROOT, check=False).returncode
        print(f"tests that start Spark, run beside the others (also in {shown.relative_to(ROOT)}):", flush=True)
        spark.wait()
    finally:
        if spark.poll() is None:
            spark.terminate()
            spark.wait()
    sys.stdout.write(shown.read_text())
    print(f"all together: {time.monotonic() - began:.0f} s")
    proven.write_text(json.dumps(together([json.loads(file.read_text()) for file in files.values() if file.exists()])))
    codes = [others, shared, spark.returncode]
    return next((code for code in codes if code not in (0, NOTHING_COLLECTED)), min(codes))


def together(found: list[dict[str, dict[str, str]]]) -> dict[str, dict[str, str]]:
    merged: dict[str, dict[str, str]] = {}
    for part in found:
        for id, outcomes in part.items():
            known = merged.setdefault(id, {})
            for test, outcome in outcomes.items():
                known[test] = max(outcome, known.get(test, outcome), key=OUTCOMES.index)
    return merged


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] != "--proven":
        sys.exit(__doc__)
    sys.exit(run(ROOT / sys.argv[2], sys.argv[3:]))
