"""Starting Spark: what is checked first, what is said, and what the session has."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark
import pytest

from headrace.spark import session
from headrace.spark.interpreter import worker_python

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SRC = Path(session.__file__).parents[2]
START = "from headrace.spark import session; session.start('t', 'local[1]')"


def refusal(environment: dict[str, str], code: str = START) -> str:
    """The last line of a process that cannot start Spark in such an environment."""
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(SRC), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 1
    return ran.stderr.strip().splitlines()[-1]


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_without_java_it_says_what_to_install(tmp_path: Path) -> None:
    said = refusal({"PATH": str(tmp_path), "JAVA_HOME": ""})
    assert "OperatorError: Spark needs Java, and there is no java on the PATH: install Java 17 or later" in said


def test_a_java_home_without_java_is_named(tmp_path: Path) -> None:
    said = refusal({"JAVA_HOME": str(tmp_path)})
    assert f"JAVA_HOME is {tmp_path}, but there is no program {tmp_path}/bin/java" in said


@pytest.mark.parametrize(("version", "told"), [("11.0.2", "11"), ("1.8.0_292", "8")])
def test_an_old_java_is_refused_by_its_version(tmp_path: Path, version: str, told: str) -> None:
    java = program(tmp_path / "bin" / "java", f"echo 'openjdk version \"{version}\" 2020-01-01' >&2")
    assert f"{java} is Java {told}, too old for Spark: install Java 17" in refusal({"JAVA_HOME": str(tmp_path)})


def test_a_java_that_fails_is_told_with_what_it_says(tmp_path: Path) -> None:
    java = program(tmp_path / "java", "echo 'Error: could not open libjli.so'; exit 1")
    said = refusal({"PATH": f"{tmp_path}:{os.environ['PATH']}", "JAVA_HOME": ""})
    assert f"{java} does not tell its version (Error: could not open libjli.so)" in said


def test_a_java_that_says_its_version_and_does_not_run_is_told_with_what_it_says(tmp_path: Path) -> None:
    java = program(tmp_path / "bin" / "java", "echo 'Error: could not open libjvm.so'; exit 1")
    (tmp_path / "release").write_text('JAVA_VERSION="21.0.4"\n')
    said = refusal({"JAVA_HOME": str(tmp_path)})
    assert f"{java} does not tell its version (Error: could not open libjvm.so)" in said


def test_without_pyspark_it_says_what_to_install(tmp_path: Path) -> None:
    hidden = "import sys; sys.modules['pyspark'] = None; " + START
    assert "PySpark is not installed: pip install 'headrace[spark]'" in refusal({}, hidden)


def test_an_old_spark_is_refused_by_its_version(tmp_path: Path) -> None:
    old = tmp_path / "pyspark"
    old.mkdir()
    (old / "__init__.py").write_text('__version__ = "4.1.1"\n')
    said = refusal({"PYTHONPATH": f"{tmp_path}:{SRC}"})
    assert "Spark 4.1.1 is too old" in said
    assert "4.2 or later is needed; pip install 'pyspark>=4.2'" in said


FORMATS = """
import importlib, sys
import pyspark, pyspark.sql.datasource
from pyspark.worker_util import pickleSer
hidden, pyspark.__version__, *packages = sys.argv[1:]
sys.modules[hidden] = None
for module in map(importlib.import_module, packages):
    source = pickleSer.loads(pickleSer.dumps(module.DefaultSource))
    for use in (lambda: source({}).schema(), lambda: source({}).writer(None, False)):
        try:
            use()
        except Exception as error:
            print(source.name(), type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("hidden", "version", "formats", "told"),
    [
        ("pyspark.sql.streaming.datasource", "4.1.0", ["headrace"], "Spark 4.1.0 is too old"),
        ("pyarrow", "4.3.0", ["headrace", "headrace-log"], r"pyarrow.*; pip install 'headrace\[spark\]'"),
    ],
)
def test_formats_that_cannot_be_imported_do_not_hinder_others_and_say_why(
    hidden: str, version: str, formats: list[str], told: str
) -> None:
    packages = [f"pyspark_{form.replace('-', '_')}" for form in formats]
    ran = subprocess.run(
        [sys.executable, "-c", FORMATS, hidden, version, *packages],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    said = ran.stdout.splitlines()
    assert [line.split()[:2] for line in said] == [[form, "OperatorError"] for form in formats for _ in range(2)]
    assert all(re.search(told, line) for line in said)


def test_without_sources_in_python_nothing_is_offered_to_spark(tmp_path: Path) -> None:
    (tmp_path / "pyspark").mkdir()
    (tmp_path / "pyspark" / "__init__.py").write_text('__version__ = "3.5.1"\n')
    code = "import pyspark_headrace, pyspark_headrace_log; raise AttributeError(pyspark_headrace.DefaultSource)"
    assert "has no attribute 'DefaultSource'" in refusal({"PYTHONPATH": f"{tmp_path}:{SRC}"}, code)


def test_the_session_has_the_settings_and_stays_on_loopback(spark: SparkSession) -> None:
    for key, value in session.SETTINGS.items():
        assert spark.conf.get(key) == value
    assert spark.conf.get("spark.driver.host") == "127.0.0.1"
    assert spark.sparkContext.master == "local[2,3]"


def test_a_start_says_nothing_on_the_screen_and_leaves_no_folder(tmp_path: Path) -> None:
    here, temporary = tmp_path / "here", tmp_path / "temporary"
    here.mkdir()
    temporary.mkdir()
    code = START.replace("session.start(", "s = session.start(") + "; s.sql('show tables').show(); s.stop()"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=here,
        env={**os.environ, "PYTHONPATH": str(SRC), "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("+-")
    assert (list(here.iterdir()), list(temporary.glob("headrace-*"))) == ([], [])


def test_tables_that_a_session_kept_are_not_thrown_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = tmp_path / "warehouse" / "sales"
    table.mkdir(parents=True)
    session._leave(tmp_path)
    assert table.is_dir()
    assert f"{tmp_path}; the setting spark.sql.warehouse.dir" in caplog.text


def test_workers_import_pyspark_from_where_it_is_installed(spark: SparkSession) -> None:
    def where(_: object) -> Iterator[str]:
        import pyspark

        yield pyspark.__file__

    (found,) = spark.sparkContext.parallelize([0], 1).mapPartitions(where).collect()
    assert Path(found) == Path(pyspark.__file__)


def test_a_start_leaves_the_environment_as_it_was(spark: SparkSession) -> None:
    """A later session on a cluster, and children, are to choose their own."""
    assert Path(spark.sparkContext.pythonExec).parent.name.startswith("headrace-spark-")
    assert os.environ.get("PYSPARK_PYTHON", sys.executable) == sys.executable
    assert "SPARK_LOCAL_IP" not in os.environ


def test_the_environment_is_changed_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "/mine")
    monkeypatch.delenv("SPARK_LOCAL_IP", raising=False)
    with session._environment({"PYSPARK_PYTHON": "/other", "SPARK_LOCAL_IP": "127.0.0.1"}):
        assert (os.environ["PYSPARK_PYTHON"], os.environ["SPARK_LOCAL_IP"]) == ("/other", "127.0.0.1")
    assert os.environ["PYSPARK_PYTHON"] == "/mine"
    assert "SPARK_LOCAL_IP" not in os.environ


def test_the_program_of_workers_keeps_the_rest_of_the_path(tmp_path: Path) -> None:
    archives = Path(pyspark.__file__).parent / "python" / "lib"
    program = worker_python(tmp_path)
    path = f"{archives}/pyspark.zip:/a folder:{archives}/py4j-src.zip:/b*"
    code = "import sys; print(sys.executable, sys.argv[1], [p for p in sys.path if 'zip' in p or p[1:2] in 'ab'])"
    ran = subprocess.run(
        [program, "-c", code, "two words"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    standard = [entry for entry in sys.path if "zip" in entry]
    assert ran.stdout.strip() == f"{sys.executable} two words {['', '/a folder', '/b*', *standard]}"


def test_another_spark_keeps_its_own_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    assert worker_python(tmp_path) == sys.executable
