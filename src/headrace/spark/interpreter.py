"""The Python that Spark starts its workers with: this one, and without the archive of PySpark on its path.

Left to itself Spark takes the `python3` of the PATH: to look for formats such as ours, to plan reads and for the tasks.
In a virtual environment that is not activated that is another Python, which has neither this package nor what it needs.
The JVM has its choice from the environment it was started in, and keeps it. So an import of `headrace.spark` names this
Python in `PYSPARK_PYTHON`, unless the user has named one, or `python3` is this one already.

Spark puts `python/lib/pyspark.zip` before all else on the path of its workers. The archive has no bytecode: every
worker compiles PySpark anew, more than a second of processor time, and two such processes plan each query. The package
that PySpark was imported from has the same modules, with bytecode. So where that package is also the Spark that runs, a
small program takes the archives off the path and then becomes Python. It lies in a folder that goes when the session's
process ends.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Final

VARIABLE: Final = "PYSPARK_PYTHON"
DEFAULT: Final = "python3"
"""What PySpark and the JVM start where the environment names nothing."""

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


def name_this_python() -> None:
    """In the environment, for a JVM that is started later."""
    if VARIABLE not in os.environ and sys.executable and not is_default():
        os.environ[VARIABLE] = sys.executable


def is_default() -> bool:
    """Whether `python3` is this Python. Folders are compared: the programs of two environments are links to one."""
    found = shutil.which(DEFAULT)
    return found is not None and os.path.realpath(os.path.dirname(found)) == os.path.realpath(
        os.path.dirname(sys.executable)
    )


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
