"""A Spark session with the settings that sources and pipelines want, after a check of Java and Spark.

On a cluster (`spark://...`, `yarn`, ...) the executors need this package too: `pip install 'headrace[spark]'` on
every machine, or an archive of it named in the setting `spark.submit.pyFiles` (what `spark-submit --py-files` sets).
The archive has to hold `headrace`, `pyspark_headrace` and `pyspark_headrace_log`, and the machines what they import
(pyarrow, crc32c, kio, lz4, cramjam). Spark itself looks for formats only where packages are installed; `start` tells it
of those in an archive. `PYSPARK_PYTHON` names the executors' Python; else it is this one. PySpark takes it from the
environment alone, which is changed only while a session starts. The JVM keeps what it was started with, though, as long
as the process lives: one process should not have a local session first and then one on a cluster.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace.errors import OperatorError
from headrace.spark.interpreter import worker_python
from headrace.spark.screen import without_noise

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import DataSource

log = logging.getLogger(__name__)

SETTINGS: Final = {
    # Else writes of rows with a headers column cut batches again and again.
    "spark.sql.execution.arrow.maxBytesPerBatch": "2147483647",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.showConsoleProgress": "false",
    "spark.ui.enabled": "false",
}

WAREHOUSE: Final = "spark.sql.warehouse.dir"
LEAST_SPARK: Final = (4, 2)
LEAST_JAVA: Final = 17
JAVA_DEADLINE_S: Final = 30.0

_LOOPBACK: Final = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
# The gateway's own level, when it differs from the root's, is announced on the screen and becomes that of all.
_QUIET: Final = """\
rootLogger.level = error
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{yy/MM/dd HH:mm:ss} %p %c{1}: %m%n%ex
"""
_INSTALL_JAVA: Final = (
    f"install Java {LEAST_JAVA} or later (on Debian and Ubuntu: apt install openjdk-17-jre-headless), "
    "or set JAVA_HOME to where it is"
)


def start(name: str, master: str = "local[*]", settings: Mapping[str, str] | None = None) -> SparkSession:
    """The session of this process, made if there is none. `local[N]` becomes `local[N,3]`: tasks are retried.

    OperatorError says what is missing: PySpark, a Spark that is new enough, Java.
    """
    check_spark()
    from pyspark.sql import SparkSession

    running = SparkSession.getActiveSession() is not None
    if not running:
        check_java()
    local = master.startswith("local")
    own = _own_folder() if local and not running else None
    builder = SparkSession.builder.appName(name).master(_retrying(master))
    chosen = {**SETTINGS, **(_LOOPBACK if local else {}), **(settings or {})}
    if own:
        # Spark makes this folder even if no table is kept, and left to itself makes it in the working folder.
        chosen.setdefault(WAREHOUSE, str(own / "warehouse"))
    for key, value in chosen.items():
        builder = builder.config(key, value)
    if running:
        return _with_formats(builder.getOrCreate())
    environment = {"PYSPARK_PYTHON": worker_python(own) if own else sys.executable}
    if local:
        environment["SPARK_LOCAL_IP"] = "127.0.0.1"
    with _quiet_log() as options, without_noise(), _unless_set(environment):
        given = chosen.get("spark.driver.extraJavaOptions", "")
        session = builder.config("spark.driver.extraJavaOptions", f"{options} {given}".strip()).getOrCreate()
    _check_version(session.version, "the Spark that SPARK_HOME or the master brings")
    return _with_formats(session)


@contextmanager
def _unless_set(variables: Mapping[str, str]) -> Iterator[None]:
    """The environment with these variables, where it has none of that name."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _own_folder() -> Path:
    """A folder for what the session needs beside Spark's own, gone when the process ends unless tables were kept."""
    folder = Path(tempfile.mkdtemp(prefix="headrace-spark-"))
    atexit.register(_leave, folder)
    return folder


def _leave(folder: Path) -> None:
    (folder / "python").unlink(missing_ok=True)
    try:
        os.rmdir(folder / "warehouse")
    except FileNotFoundError:
        pass
    except OSError:
        log.warning("tables were left in %s; the setting %s chooses another folder", folder, WAREHOUSE)
        return
    os.rmdir(folder)


def _with_formats(session: SparkSession) -> SparkSession:
    """Spark finds formats by itself where this package is installed, and that costs a process: not before it has to."""
    if Path(__file__).is_file():
        return session
    from headrace.spark.log_source import LogDataSource
    from headrace.spark.source import HeadraceSource

    register(session, HeadraceSource)
    register(session, LogDataSource)
    return session


def register(spark: SparkSession, source: type[DataSource]) -> None:
    """Tell the session of a format by its class: then Spark need not search the path for its name, which costs a
    process."""
    from pyspark.errors import AnalysisException

    # It may have been found already, and then it cannot be told again.
    with suppress(AnalysisException):
        spark.dataSource.register(source)


def check_spark() -> None:
    try:
        import pyspark
    except ImportError:
        raise OperatorError("PySpark is not installed: pip install 'headrace[spark]'") from None
    _check_version(pyspark.__version__, f"the PySpark of {sys.executable}")


def _check_version(version: str, which: str) -> None:
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if found < LEAST_SPARK:
        least = ".".join(map(str, LEAST_SPARK))
        raise OperatorError(
            f"Spark {version} is too old ({which}): {least} or later is needed; pip install 'pyspark>={least}'"
        )


def check_java() -> None:
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if java is None:
        raise OperatorError(f"Spark needs Java, and there is no java on the PATH: {_INSTALL_JAVA}")
    if home and not os.access(java, os.X_OK):
        raise OperatorError(
            f"JAVA_HOME is {home}, but there is no program {java}: correct or unset it, or {_INSTALL_JAVA}"
        )
    try:
        ran = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=JAVA_DEADLINE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OperatorError(f"{java} does not run ({error}): {_INSTALL_JAVA}") from None
    told = ran.stderr + ran.stdout
    version = re.search(r'version "(?:1\.)?(\d+)([^"]*)"', told)
    if ran.returncode or not version:
        first = told.strip().splitlines()[0] if told.strip() else f"exit status {ran.returncode}"
        raise OperatorError(f"{java} does not tell its version ({first}): {_INSTALL_JAVA}")
    if int(version[1]) < LEAST_JAVA:
        raise OperatorError(f"{java} is Java {version[1]}, too old for Spark: {_INSTALL_JAVA}")


@contextmanager
def _quiet_log() -> Iterator[str]:
    """JVM options that keep all but errors out of the log; read once, when the JVM starts."""
    with tempfile.NamedTemporaryFile("w", prefix="headrace-log4j2-", suffix=".properties") as file:
        file.write(_QUIET)
        file.flush()
        yield f"-Dlog4j2.configurationFile=file:{file.name}"


def _retrying(master: str) -> str:
    if master.startswith("local[") and "," not in master:
        return f"{master[:-1]},3]"
    return "local[1,3]" if master == "local" else master
