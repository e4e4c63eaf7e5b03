"""What commands on Spark cost from their start to their end: `python bench/spark_start.py [TREE ...]`.

Short ones, for which the start is most of it, and one long statement, which must not pay for that. Each is a process of
its own, with all that it starts: the launcher, the JVM and the Python workers. Checkouts take turns, and each round
goes in the other order. A checkout that archives Spark's classes has made its archive before, in a folder of this run;
what that takes is told too. Processor time is what counts on a busy machine; it is user and system time of all
processes but those that Spark's Python daemon forks, which Linux counts nowhere.
"""

import argparse
import ctypes
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from contestants import CONTESTANTS, HOST, start
from processes import stop
from report import machine, table
from run import say

ROOT: Final = Path(__file__).resolve().parent.parent
TOPIC: Final = "orders"
RECORDS: Final = 2000
CHILD_SUBREAPER: Final = 36
MEASURE: Final = "--measure"
WITHIN_S: Final = 900.0
LONG: Final = (
    "select id % 1000 as kind, count(*) as many, sum(id * 0.5) as total, max(length(cast(id as string))) as longest "
    "from range(60000000) group by 1 order by total desc limit 3"
)
ARCHIVE: Final = "archive of 2,000 records"


def commands(bootstrap: str, folder: Path) -> Iterator[tuple[str, list[str]]]:
    sql = ["sql", "--bootstrap", bootstrap]
    yield "sql 'select 1'", [*sql, "select 1"]
    yield "sql over 2,000 records", [*sql, f"select country, count(*) from {TOPIC} group by country"]
    archive = ["pipeline", "archive", "--bootstrap", bootstrap, "--topic", TOPIC]
    name = f"archive-{time.time_ns()}"
    yield ARCHIVE, [*archive, "--to", str(folder / name), "--group", name]
    yield "sql over 60 M rows of range()", [*sql, LONG]


def cost(arguments: list[str], environment: Mapping[str, str]) -> tuple[float, float]:
    """Seconds until the Python with these arguments has ended, processor seconds until all that it started has."""
    command = [sys.executable, __file__, MEASURE, sys.executable, *arguments]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=WITHIN_S)
    if ran.returncode:
        raise SystemExit(f"{' '.join(arguments)} ended with {ran.returncode}\n{ran.stderr[-2000:]}")
    wall_s, cpu_s = map(float, ran.stdout.splitlines()[-1].split())
    return wall_s, cpu_s


def measure(command: list[str]) -> None:
    """In a process of its own: what outlives the one that started it becomes its child, and is waited for."""
    if ctypes.CDLL(None, use_errno=True).prctl(CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    began = time.monotonic()
    subprocess.run(command, check=True)
    wall_s = time.monotonic() - began
    while True:
        try:
            os.wait()
        except ChildProcessError:
            break
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"\n{wall_s} {used.ru_utime + used.ru_stime}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", type=Path, metavar="tree", help="checkouts; this one by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="commands whose name has this in it")
    given = parser.parse_args()
    trees = [tree.resolve() for tree in given.trees or [ROOT]]
    print(" | ".join(f"{key}: {value}" for key, value in machine().items()), flush=True)
    taken: dict[tuple[str, Path], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="spark-start-") as place:
        folder = Path(place)
        running = start(CONTESTANTS["headrace"], folder / "broker")
        try:
            bootstrap = f"{HOST}:{running.port}"
            environments = {tree: prepared(tree, folder / f"classes-{nth}") for nth, tree in enumerate(trees)}
            load = ["-m", "headrace.cli.main", "load", TOPIC, "--records", str(RECORDS), "--bootstrap", bootstrap]
            cost(load, environments[trees[0]])
            for nth in range(given.rounds):
                for tree in trees if nth % 2 == 0 else reversed(trees):
                    for name, arguments in commands(bootstrap, folder):
                        if given.only in name:
                            found = cost(["-m", "headrace.cli.main", *arguments], environments[tree])
                            taken.setdefault((name, tree), []).append(found)
                            say(f"round {nth + 1} {tree.name} {name}: {found[0]:.1f} s, {found[1]:.1f} CPU-s")
        finally:
            stop(running.process)
    rows = []
    for (name, tree), rounds in sorted(taken.items(), key=lambda item: item[0][0]):
        wall_s, cpu_s = (statistics.median(values) for values in zip(*rounds, strict=True))
        rows.append([name, str(tree), f"{cpu_s:.1f}", f"{wall_s:.1f}"])
    print(table(["command", "checkout", "CPU-s", "seconds"], rows))


def prepared(tree: Path, folder: Path) -> dict[str, str]:
    """The environment of a checkout's commands, with its archive of classes if it makes one."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "HEADRACE_SPARK_CLASSES": str(folder)}
    if (tree / "src" / "headrace" / "spark" / "class_archive.py").exists():
        wall_s, cpu_s = cost(["-m", "headrace.spark.class_archive"], environment)
        size_mb = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
        print(f"{tree}: an archive of {size_mb:.0f} MB made in {wall_s:.1f} s, {cpu_s:.1f} CPU-s", flush=True)
    return environment


if __name__ == "__main__":
    if sys.argv[1:2] == [MEASURE]:
        measure(sys.argv[2:])
    else:
        main()
