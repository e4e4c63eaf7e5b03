"""Classes of Spark as Java maps them into memory, instead of reading, checking and linking them at every start.

Java calls the file a class-data archive. One lies in the user's cache for each pair of a Java and a Spark:

    ~/.cache/headrace/spark-classes/KEY.jsa       the archive, some 200 MB
    ~/.cache/headrace/spark-classes/KEY.size      how many bytes it has
    ~/.cache/headrace/spark-classes/KEY.tried     since when one is made, or could not be: nobody else tries for a while
    ~/.cache/headrace/spark-classes/KEY.PID.new   one that is being made

`HEADRACE_SPARK_CLASSES` names another folder, or is `off`; the cache is below `XDG_CACHE_HOME` if that is set. A
process that has started a JVM without one has it made in the background when it ends, by a session of its own
(`headrace.spark.class_training`), at the lowest priority. `python -m headrace.spark.class_archive` makes it now, as
for an image.

Nothing depends on it. An archive is complete and synced before it has its name. Java itself refuses one that was made
by another Java, from other jars or for another class path, and starts as without. It does not see that one was cut
short, and dies of it (Java 17): that is what the size is for. One that somebody else could have written is not used,
and one with which a JVM did not come up is removed. Those that were not used for long are removed by whoever makes one.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headrace.errors import OperatorError
from headrace.spark import java
from headrace.spark.java import SUBMIT_OPTIONS, UNOPTIMISED, Java

log = logging.getLogger(__name__)

VARIABLE: Final = "HEADRACE_SPARK_CLASSES"
OFF: Final = "off"
KEPT: Final = 3
UNUSED_MAX_S: Final = 30 * 86400.0
TRIED_AGAIN_AFTER_S: Final = 7 * 86400.0
LEFTOVER_AFTER_S: Final = 86400.0
MADE_WITHIN_S: Final = 600.0
FREE_BYTES_MIN: Final = 1 << 30
LOWEST_PRIORITY: Final = 19

# Else Java tells on standard output of every class that it leaves out, and of an archive that it does not use.
_SILENT: Final = "-Xlog:disable"
_OF_USER: Final = ("-Xshare", "SharedArchiveFile", "ArchiveClassesAtExit", "SharedClassListFile", "-XX:AOT")
# Each puts something before or behind Spark's jars, and Java archives nothing where a folder with files is among them.
_CLASS_PATHS: Final = ("SPARK_CONF_DIR", "SPARK_DIST_CLASSPATH", "HADOOP_CONF_DIR", "YARN_CONF_DIR")


@dataclass(frozen=True, slots=True)
class ClassArchive:
    """The archive of one Java and one Spark, be it made or not."""

    path: Path

    @property
    def is_there(self) -> bool:
        if not (_is_safe(self.path.parent) and _is_safe(self.path)):
            return False
        try:
            return self._size.read_text() == str(self.path.stat().st_size)
        except OSError:
            return False

    @property
    def options(self) -> str:
        """What a JVM is told to use it."""
        return f"-XX:SharedArchiveFile={_quoted(self.path)} {_SILENT}"

    def use(self) -> str:
        """The options, and a note that it was used; empty if there is none yet."""
        if not self.is_there:
            return ""
        with suppress(OSError):  # it is another's, or the disk may only be read: then it is not ours to remove either
            os.utime(self.path)
        return self.options

    def remove(self) -> None:
        """It is as if it had never been tried."""
        with suppress(OSError):  # another's: then it is for them to see to it
            for path in (self.path, self._size, self._tried):
                path.unlink(missing_ok=True)

    def make_at_exit(self) -> None:
        """Have it made in the background when this process ends, unless somebody has tried lately."""
        atexit.register(self._make_in_background)

    def make(self) -> None:
        """OperatorError or OSError says what hinders."""
        folder = self.path.parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_safe(folder):
            raise OperatorError(f"{folder} belongs to others, or they may write to it")
        if shutil.disk_usage(folder).free < FREE_BYTES_MIN:
            raise OperatorError(f"less than {FREE_BYTES_MIN >> 20} MB are free in {folder}")
        self._tried.touch()
        unfinished = self.path.with_suffix(f".{os.getpid()}.new")
        try:
            _train(unfinished)
            _sync(unfinished)
            self._size.write_text(str(unfinished.stat().st_size))
            unfinished.replace(self.path)
        finally:
            unfinished.unlink(missing_ok=True)
        remove_old(folder)

    @property
    def _tried(self) -> Path:
        return self.path.with_suffix(".tried")

    @property
    def _size(self) -> Path:
        return self.path.with_suffix(".size")

    def _make_in_background(self) -> None:
        if self.is_there:
            return
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_recent(self._tried, TRIED_AGAIN_AFTER_S):
                self._tried.unlink(missing_ok=True)
            self._tried.touch(exist_ok=False)
            subprocess.Popen(
                [sys.executable, "-P", "-m", __name__],
                env={**os.environ, VARIABLE: str(self.path.parent)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            # Another has tried, or there is no place for it. The next start is as this one was.
            log.debug("no archive of classes is made: %s", error)


def of(found: Java, folder: Path | None = None) -> ClassArchive | None:
    """The one for this Java and the Spark that it will run; None where none is wanted, or none can be."""
    place, spark = folder or _folder(), java.spark_home()
    if place is None or spark is None or not (spark / "jars").is_dir():
        return None
    if (spark / "conf").exists() or any(map(os.environ.get, _CLASS_PATHS)):
        return None
    key = hashlib.sha256("\n".join(_identity(found, spark)).encode()).hexdigest()[:16]
    return ClassArchive(place / f"{key}.jsa")


def is_of_user(options: str) -> bool:
    """Whether the user has told Java something of archives already."""
    return any(word in options for word in _OF_USER)


def remove_old(folder: Path) -> None:
    """All but the few that were used last, and what was left of attempts."""
    for path in folder.iterdir():
        if path.suffix in (".new", ".tried"):
            kept_s = LEFTOVER_AFTER_S if path.suffix == ".new" else TRIED_AGAIN_AFTER_S
            if not _is_recent(path, kept_s):
                path.unlink(missing_ok=True)
    archives = sorted(folder.glob("*.jsa"), key=lambda path: path.stat().st_mtime, reverse=True)
    for place, path in enumerate(archives):
        if place >= KEPT or not _is_recent(path, UNUSED_MAX_S):
            path.unlink(missing_ok=True)
            path.with_suffix(".size").unlink(missing_ok=True)


def _folder() -> Path | None:
    named = os.environ.get(VARIABLE)
    if named:
        return None if named.lower() == OFF else Path(named).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(cache).expanduser() / "headrace" / "spark-classes"
    except RuntimeError:  # nobody knows this user's home
        return None


def _identity(found: Java, spark: Path) -> Iterator[str]:
    """What an archive depends on. Java checks it too: by this another is made when something has changed."""
    yield os.path.realpath(found.program)
    yield found.build
    yield os.path.realpath(spark)
    with os.scandir(spark / "jars") as jars:
        for jar in sorted(jars, key=lambda jar: jar.name):
            yield f"{jar.name} {jar.stat().st_size} {jar.stat().st_mtime_ns}"


def _train(target: Path) -> None:
    """A JVM writes the archive when it ends. Its output ends with it, and not with the Python that started it."""
    options = f"{UNOPTIMISED} -XX:ArchiveClassesAtExit={_quoted(target)} {_SILENT}"
    try:
        ran = subprocess.run(
            [sys.executable, "-P", "-m", "headrace.spark.class_training"],
            env={**os.environ, VARIABLE: OFF, SUBMIT_OPTIONS: options},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=MADE_WITHIN_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise OperatorError(f"no session came to its end within {MADE_WITHIN_S:g} s") from None
    if ran.returncode or not target.exists():
        raise OperatorError(f"Java has written none: {ran.stdout.decode(errors='replace').strip()[-1000:]}")


def _sync(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _is_safe(path: Path) -> bool:
    """Whether it is there, and nobody but this user or root could have written it: Java runs what it says."""
    try:
        found = path.stat()
    except OSError:
        return False
    return found.st_uid in (os.geteuid(), 0) and not found.st_mode & 0o022


def _is_recent(path: Path, within_s: float) -> bool:
    try:
        return time.time() - path.stat().st_mtime < within_s
    except OSError:
        return False


def _quoted(path: Path) -> str:
    """As Spark's launcher takes words apart."""
    text = str(path)
    if not re.search(r"[\s'\"\\]", text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def main() -> None:
    os.nice(LOWEST_PRIORITY)
    try:
        wanted = of(java.find())
        if wanted is None:
            raise OperatorError(f"{VARIABLE} is {OFF}, or Spark's jars are not all of the class path")
        wanted.make()
    except (OperatorError, OSError) as error:
        sys.exit(f"no archive of classes: {error}")


if __name__ == "__main__":
    main()
