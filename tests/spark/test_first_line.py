"""The first lines of a program in a virtual environment that is not activated: `venv/bin/python program.py`."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios
import venv
from contextlib import suppress
from pathlib import Path

import pytest

from brokers import PROGRAM, Broker
from headrace import Producer
from headrace.spark import interpreter
from headrace.spark.screen import CLEAR_LINE, waiting
from proving import proves
from spark.confluent_rows import create_topic
from spark.standalone import SHORT_LIVED

RECORDS = 10
SESSION = """
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.driver.host", "127.0.0.1").getOrCreate()
"""
COUNT = """
import sys
options = {"kafka.bootstrap.servers": sys.argv[1], "subscribe": sys.argv[2]}
print("records", spark.read.format("headrace").options(**options).load().count())
"""
IMPORTED_FIRST = "import headrace.spark" + SESSION + COUNT
SESSION_FIRST = f"""{SESSION}
try:
    spark.read.format("headrace").load()
except Exception as error:
    print("unregistered", "DATA_SOURCE_NOT_FOUND" in str(error))

import headrace.spark
headrace.spark.register(spark)
headrace.spark.register(spark)
{COUNT}
print("worker", spark.range(1).rdd.map(lambda _: __import__("sys").executable).first())
spark.stop()

spark = headrace.spark.start(master="local[1]")
{COUNT}
"""


@pytest.fixture(scope="module")
def other_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a `python3` that does not have this package."""
    folder = tmp_path_factory.mktemp("other-python")
    venv.create(folder, with_pip=False)
    return folder / "bin"


def run(program: str, broker: Broker, path: Path) -> list[str]:
    topic = create_topic(broker)
    with Producer(broker.bootstrap) as producer:
        for number in range(RECORDS):
            producer.send_async(topic, b"%d" % number)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK", "PYTHON"))}
    ran = subprocess.run(
        [sys.executable, "-c", program, broker.bootstrap, topic],
        env={**environment, "PATH": f"{path}:{os.environ['PATH']}", "SPARK_SUBMIT_OPTS": SHORT_LIVED},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout.splitlines()


@proves("U3")
def test_the_import_before_the_session_is_all_that_spark_needs_to_find_the_format(
    broker: Broker, other_python: Path
) -> None:
    assert run(IMPORTED_FIRST, broker, other_python) == [f"records {RECORDS}"]


@proves("U3")
def test_a_session_that_was_there_before_is_told_of_the_format(broker: Broker, other_python: Path) -> None:
    """And what cannot be helped is so still: Spark alone starts the `python3` of the PATH, where there is no format."""
    told = run(SESSION_FIRST, broker, other_python)
    assert told == ["unregistered True", f"records {RECORDS}", f"worker {sys.executable}", f"records {RECORDS}"]


@proves("U3")
def test_a_python_that_the_user_has_named_is_kept(monkeypatch: pytest.MonkeyPatch, other_python: Path) -> None:
    monkeypatch.setenv("PATH", str(other_python))
    monkeypatch.setenv(interpreter.VARIABLE, "/mine")
    interpreter.name_this_python()
    assert os.environ[interpreter.VARIABLE] == "/mine"
    monkeypatch.delenv(interpreter.VARIABLE)
    interpreter.name_this_python()
    assert os.environ[interpreter.VARIABLE] == sys.executable


@proves("U3")
def test_in_an_activated_environment_nothing_is_named(monkeypatch: pytest.MonkeyPatch, other_python: Path) -> None:
    """There `python3` is right here, and may be right on the machines of a cluster where this one's path is not."""
    monkeypatch.delenv(interpreter.VARIABLE, raising=False)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{other_python}")
    interpreter.name_this_python()
    assert interpreter.VARIABLE not in os.environ


def on_a_terminal(*command: str) -> str:
    """What a command shows there, of 80 columns, with what it takes back again."""
    ours, terminal = pty.openpty()
    os.set_inheritable(terminal, True)
    termios.tcsetwinsize(terminal, (24, 80))
    environment = {**os.environ, "SPARK_SUBMIT_OPTS": SHORT_LIVED, "TERM": "xterm"}
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment) as process:
        os.close(terminal)
        shown = b""
        with suppress(OSError):  # how Linux says that nobody has the terminal any more
            while read := os.read(ours, 65536):
                shown += read
        os.close(ours)
    assert process.returncode == 0, shown.decode()
    return shown.decode()


@proves("U3")
def test_what_a_first_statement_waits_for_is_shown_on_a_terminal(broker: Broker) -> None:
    topic = create_topic(broker)
    command = (str(PROGRAM), "sql", "--bootstrap", broker.bootstrap, f"select count(*) as records from `{topic}`")
    shown = on_a_terminal(*command)
    lines = [line.strip() for line in shown.split(CLEAR_LINE)]
    java = re.compile(r"starting Spark 4\.\d.* \(Java \d+ at /.*/java\), local\[.*\((\d+) s\)")
    assert any(map(java.fullmatch, lines)), lines
    assert f"looking at what the statement names, at {broker.bootstrap} (0 s)" in lines
    assert "running the statement (0 s)" in lines
    # The line is taken back before the answer comes.
    assert re.sub(r"\x1b\[\d+m", "", lines[-1]).split() == ["records", "───────", "0"]


def test_a_wait_is_not_shown_where_nobody_looks(capfd: pytest.CaptureFixture[str]) -> None:
    with waiting("for nothing"):
        pass
    assert capfd.readouterr().err == ""
