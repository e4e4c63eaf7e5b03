"""A Spark session with the settings that sources and pipelines want, after a check of Java and Spark.

On a cluster (`spark://...`, `yarn`, ...) the executors need this package too: `pip install 'headrace[spark]'` on
every machine, or an archive of it named in the setting `spark.submit.pyFiles` (what `spark-submit --py-files` sets).
The archive has to hold `headrace`, `pyspark_headrace` and `pyspark_headrace_log`, and the machines what they import
(pyarrow, crc32c, kio, lz4, cramjam). Spark itself looks for formats only where packages are installed; `start` tells it
of those in an archive. `PYSPARK_PYTHON` names the executors' Python; else it is this one. PySpark and the JVM take it
from the environment alone (`headrace.spark.interpreter`). The JVM keeps what it was started with as long as the process
lives: one process should not have a local session first and then one on a cluster.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace.errors import OperatorError
from headrace.spark import class_archive, java
from headrace.spark.class_archive import ClassArchive
from headrace.spark.connect import SCHEME, connect, is_connected
from headrace.spark.interpreter import DEFAULT, VARIABLE, is_default, worker_python
from headrace.spark.screen import waiting, without_noise

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import DataSource

log = logging.getLogger(__name__)

SETTINGS: Final = {
    # Else writes of rows with a headers column cut batches again and again.
    "spark.sql.execution.arrow.maxBytesPerBatch": "2147483647",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Else Parquet files have times in a form that bears no statistics.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.showConsoleProgress": "false",
    "spark.ui.enabled": "false",
}

STORE_VARIABLES: Final = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_VIRTUAL_HOSTED_STYLE_REQUEST",
)
"""What says how S3-compatible storage is reached (`headrace.arrow.locations`)."""
WAREHOUSE: Final = "spark.sql.warehouse.dir"
EXTRA_CLASSES: Final = "spark.driver.extraClassPath"
GATEWAY: Final = "PYSPARK_GATEWAY_PORT"
LEAST_SPARK: Final = (4, 2)

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


def start(
    name: str = "headrace",
    master: str = "local[*]",
    settings: Mapping[str, str] | None = None,
    *,
    java_options: str = "",
) -> SparkSession:
    """The session of this process, made if there is none, with the formats of this package.

    `local[N]` becomes `local[N,3]`: tasks are retried. Workers run the Python that runs here, unless the environment
    has `PYSPARK_PYTHON`. `sc://HOST:PORT` is a Spark Connect server, and of settings it takes those of a session.
    `java_options` are for the JVM, if this starts one; those of the environment and of settings are stronger.
    OperatorError says what is missing: PySpark, a Spark that is new enough, Java.
    """
    check_spark()
    if master.startswith(SCHEME):
        return connect(name, master, settings or {})
    import pyspark
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    running = SparkSession.getActiveSession() is not None
    found = None if running else java.find()
    local = master.startswith("local")
    own = _own_folder() if local and not running else None
    builder = SparkSession.builder.appName(name).master(_retrying(master))
    chosen = {**SETTINGS, **(_LOOPBACK if local else _store_settings()), **(settings or {})}
    if own:
        # Spark makes this folder even if no table is kept, and left to itself makes it in the working folder.
        chosen.setdefault(WAREHOUSE, str(own / "warehouse"))
    for key, value in chosen.items():
        builder = builder.config(key, value)
    if found is None:
        return _with_formats(builder.getOrCreate())
    environment = {VARIABLE: os.environ.get(VARIABLE, sys.executable)}
    if own and environment[VARIABLE] == sys.executable:
        environment[VARIABLE] = worker_python(own)
    if local:
        environment["SPARK_LOCAL_IP"] = os.environ.get("SPARK_LOCAL_IP", "127.0.0.1")
    archive = _class_archive(found, chosen)
    what = f"starting Spark {pyspark.__version__} ({found}), {master}"
    with _quiet_log() as quiet, waiting(what), without_noise():
        environment |= _java_environment(quiet, java_options, archive.use() if archive else "")
        try:
            with _environment(environment):
                session = builder.getOrCreate()
        except PySparkRuntimeError:
            if archive and archive.is_there:
                archive.remove()  # it may be why
            java.ask(found.program)  # if it does not even run, that says why
            raise
    if archive and not archive.is_there:
        archive.make_at_exit()
    _check_version(session.version, "the Spark that SPARK_HOME or the master brings")
    return _with_formats(session)


def _class_archive(found: java.Java, settings: Mapping[str, str]) -> ClassArchive | None:
    """Not where another has started the JVM, and not where the user has something of the same kind in mind."""
    if GATEWAY in os.environ or EXTRA_CLASSES in settings or class_archive.is_of_user(java.user_options(settings)):
        return None
    return class_archive.of(found)


def _java_environment(*options: str) -> dict[str, str]:
    """Options of ours stand first: of two that speak of the same, Java heeds the last."""
    given = os.environ.get(java.SUBMIT_OPTIONS, "")
    home = java.spark_home()
    return {
        java.SUBMIT_OPTIONS: " ".join(filter(None, (*options, given))),
        java.LAUNCHER_OPTIONS: os.environ.get(java.LAUNCHER_OPTIONS) or java.UNOPTIMISED,
        # Else Spark's script starts a Python to look for it.
        **({java.SPARK_HOME: str(home)} if home else {}),
    }


def _store_settings() -> dict[str, str]:
    """Executors reach a store as this process does; Spark hands on its own credentials in the same way."""
    return {f"spark.executorEnv.{name}": os.environ[name] for name in STORE_VARIABLES if name in os.environ}


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """These variables are set meanwhile, and afterwards as they were."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


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
    if not Path(__file__).is_file() or _looks_elsewhere(session):
        register(session)
    else:
        _listen(session)
    return session


def _looks_elsewhere(spark: SparkSession) -> bool:
    """Whether its JVM was started without a word about Python, so that it looks for formats with another one."""
    jvm = spark.sparkContext._jvm
    assert jvm is not None, "a session has a JVM"
    named = jvm.System.getenv
    return not (named("PYSPARK_DRIVER_PYTHON") or named(VARIABLE) or is_default())


def register(spark: SparkSession) -> None:
    """Tell a session of the formats `headrace` and `headrace-log`, and listen to its streams.

    For a session that was there before `headrace.spark` was imported: Spark looks for formats with the Python that its
    JVM was started with. A local session's workers run this Python from then on if `PYSPARK_PYTHON` had named none.
    """
    from headrace.spark.log_source import LogDataSource
    from headrace.spark.source import HeadraceSource

    # A client of a Connect server may have no way to the brokers, and has none to the server's Python.
    has_driver = not is_connected(spark)
    if has_driver:
        _use_this_python(spark)
    register_source(spark, HeadraceSource)
    register_source(spark, LogDataSource)
    if has_driver:
        _listen(spark)


def _use_this_python(spark: SparkSession) -> None:
    context = spark.sparkContext
    if (context.master or "").startswith("local") and context.pythonExec == DEFAULT and not is_default():
        context.pythonExec = sys.executable


def _listen(spark: SparkSession) -> None:
    """Progress of streams is committed when a batch is complete, and counted."""
    from headrace.spark.query_listener import listen

    listen(spark)


def register_source(spark: SparkSession, source: type[DataSource]) -> None:
    """Tell the session of a format by its class: then Spark need not search the path for its name, which costs a
    process."""
    from pyspark.errors import AnalysisException

    try:
        spark.dataSource.register(source)
    except AnalysisException as error:
        # Spark has found it by itself, and then it cannot be told again.
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise


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
