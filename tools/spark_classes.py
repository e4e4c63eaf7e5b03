"""An archive of Spark's classes for the JVMs of the tests, as users have one in their cache
(`headrace.spark.class_archive`).

    spark_classes.py COMMAND...     makes it in `.work/spark-classes`, if it is not there, and goes on as the command

A start takes half of the processor time then, and `make test` has some thirty.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from headrace.errors import OperatorError
from headrace.spark import class_archive, java
from headrace.spark.class_archive import ClassArchive

FOLDER: Final = Path(__file__).resolve().parent.parent / ".work" / "spark-classes"


def environment() -> dict[str, str]:
    """What tells the JVMs of drivers, and of what tests start beside them, to use it: once it is there."""
    archive = find()
    options = [java.SHORT_LIVED, archive.options] if archive else [java.SHORT_LIVED]
    return {java.SUBMIT_OPTIONS: " ".join(options)}


def find() -> ClassArchive | None:
    try:
        return class_archive.of(java.find(), FOLDER)
    except OperatorError:  # there is no Java: tests that need one say so
        return None


if __name__ == "__main__":
    wanted = find()
    if wanted and not wanted.is_there:
        try:
            wanted.make()
        except (OperatorError, OSError) as error:
            print(f"without an archive of classes: {error}", flush=True)
    os.execv(sys.argv[1], sys.argv[1:])
