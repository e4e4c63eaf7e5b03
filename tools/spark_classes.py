"""Classes of Spark that its JVMs map as they are, instead of reading and checking them at every start.

    spark_classes.py COMMAND...     makes `.work/spark-classes.jsa`, if there is none, and goes on as the command

A start takes half of the processor time then, and `make test` has some thirty. Java does without the file where it is
missing, or made by another Java or from another Spark. It is made by a session that does a little of everything.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

ARCHIVE: Final = Path(__file__).resolve().parent.parent / ".work" / "spark-classes.jsa"
# A JVM of the tests lives for minutes at most: its optimising compiler takes more time than it gives.
SHORT_LIVED: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
# Else Java tells on standard output of every class that it leaves out, and of a file that it cannot use.
OPTIONS: Final = f"{SHORT_LIVED} -XX:SharedArchiveFile={ARCHIVE} -Xlog:disable"
SESSION: Final = """
from headrace.spark import session
from pyspark import SparkContext
spark = session.start("classes", "local[2]", {"spark.sql.shuffle.partitions": "2"})
spark.range(10).selectExpr("id % 3 as kind").groupBy("kind").count().collect()
spark.stop()
# It writes the file when it ends.
java = SparkContext._gateway.proc
java.stdin.close()
java.wait()
"""
MADE_WITHIN_S: Final = 180


def make() -> None:
    """Nothing depends on it: what hinders is told and left."""
    unfinished = ARCHIVE.with_suffix(f".{os.getpid()}")
    options = f"{SHORT_LIVED} -XX:ArchiveClassesAtExit={unfinished} -Xlog:disable"
    try:
        ARCHIVE.parent.mkdir(exist_ok=True)
        subprocess.run(
            [sys.executable, "-c", SESSION],
            env={**os.environ, "SPARK_SUBMIT_OPTS": options},
            timeout=MADE_WITHIN_S,
            check=True,
        )
        unfinished.replace(ARCHIVE)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"without {ARCHIVE.name}: {error}", flush=True)
    finally:
        unfinished.unlink(missing_ok=True)


if __name__ == "__main__":
    if not ARCHIVE.exists():
        make()
    os.execv(sys.argv[1], sys.argv[1:])
