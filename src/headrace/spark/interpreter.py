"""The Python that Spark starts its workers with, without the archive of PySpark on its path.

Spark puts `python/lib/pyspark.zip` before all else on the path of its workers. The archive has no bytecode: every
worker compiles PySpark anew, more than a second of processor time, and two such processes plan each query. The package
that PySpark was imported from has the same modules, with bytecode. So where that package is also the Spark that runs, a
small program takes the archives off the path and then becomes Python. It lies in a folder that goes when the session's
process ends.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Final

_PROGRAM: Final = """\
#!/bin/sh
# headrace.spark.interpreter says why.
set -f
kept=
IFS=:
for entry in $PYTHONPATH; do
    case $entry in
        {archives}/*.zip) ;;
        *) kept=$kept${{kept:+:}}$entry ;;
    esac
done
unset IFS
export PYTHONPATH="$kept"
exec {python} "$@"
"""


def worker_python(folder: Path) -> str:
    """This Python, by way of a program in that folder where that is faster."""
    import pyspark

    package = Path(pyspark.__file__).parent
    archives = package / "python" / "lib"
    spark_home = os.environ.get("SPARK_HOME")
    if not (archives / "pyspark.zip").is_file() or (spark_home and Path(spark_home).resolve() != package.resolve()):
        return sys.executable
    program = folder / "python"
    program.write_text(_PROGRAM.format(archives=shlex.quote(str(archives)), python=shlex.quote(sys.executable)))
    program.chmod(0o700)
    # Not so where temporary files may not be run.
    return str(program) if os.access(program, os.X_OK) else sys.executable
