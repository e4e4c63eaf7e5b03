"""The Java that Spark runs on: where it is, whether it is new enough, and what the user tells it. Where its Spark is.

Every Java says in a file `release` in its folder which one it is. To run it for that takes longer; it is done where
there is no such file, and where Spark did not come up, to say why.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headrace.errors import OperatorError

LEAST_JAVA: Final = 17
DEADLINE_S: Final = 30.0
SPARK_HOME: Final = "SPARK_HOME"
SUBMIT_OPTIONS: Final = "SPARK_SUBMIT_OPTS"
"""The environment's options for the JVM of a driver; those of `spark.driver.extraJavaOptions` come behind them."""
UNOPTIMISED: Final = "-XX:TieredStopAtLevel=1"
"""For a JVM that lives for seconds: to it the optimising compiler gives less than it takes."""
SHORT_LIVED: Final = f"{UNOPTIMISED} -XX:+UseSerialGC"
"""Where no user has a say: Java does not start with two collectors, and one may be named in the environment."""
LATE_OPTIMISING: Final = (
    "-XX:Tier4InvocationThreshold=50000 -XX:Tier4MinInvocationThreshold=6000 -XX:Tier4CompileThreshold=150000"
)
"""Ten times the calls before a method is optimised, and loops as ever: a short statement takes a seventh less of the
processor, and one over millions of rows no more. A stream that plans a batch a second would be slow for longer."""
LAUNCHER_OPTIONS: Final = "SPARK_LAUNCHER_OPTS"
"""Those of the small JVM that only works out how the driver's is started."""

_OPTION_VARIABLES: Final = (SUBMIT_OPTIONS, "PYSPARK_SUBMIT_ARGS", "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS")
_OPTION_SETTINGS: Final = ("spark.driver.extraJavaOptions", "spark.driver.defaultJavaOptions")
_INSTALL: Final = (
    f"install Java {LEAST_JAVA} or later (on Debian and Ubuntu: apt install openjdk-17-jre-headless), "
    "or set JAVA_HOME to where it is"
)


@dataclass(frozen=True, slots=True)
class Java:
    program: str
    version: int
    build: str
    """Another for every release: what the file `release` says, or the program itself."""

    def __str__(self) -> str:
        return f"Java {self.version} at {self.program}"


def find() -> Java:
    """The Java that Spark will start; OperatorError says what is missing."""
    program = _program()
    try:
        release = Path(os.path.realpath(program)).parent.with_name("release").read_text(errors="replace")
    except OSError:
        return ask(program)
    version = re.search(r'^JAVA_VERSION="(?:1\.)?(\d+)', release, re.MULTILINE)
    return Java(program, _new_enough(program, version[1]), release) if version else ask(program)


def ask(program: str) -> Java:
    """What a Java says of itself."""
    try:
        ran = subprocess.run([program, "-version"], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OperatorError(f"{program} does not run ({error}): {_INSTALL}") from None
    told = ran.stderr + ran.stdout
    version = re.search(r'version "(?:1\.)?(\d+)([^"]*)"', told)
    if ran.returncode or not version:
        first = told.strip().splitlines()[0] if told.strip() else f"exit status {ran.returncode}"
        raise OperatorError(f"{program} does not tell its version ({first}): {_INSTALL}")
    return Java(program, _new_enough(program, version[1]), told)


def user_options(settings: Mapping[str, str]) -> str:
    """All that the user tells the driver's JVM, by the environment and by settings."""
    told = [*map(os.environ.get, _OPTION_VARIABLES), *map(settings.get, _OPTION_SETTINGS)]
    return " ".join(filter(None, told))


def spark_home() -> Path | None:
    """The Spark that will be started: that of `SPARK_HOME`, else the one that PySpark brings."""
    named = os.environ.get(SPARK_HOME)
    if named:
        return Path(named)
    package = importlib.util.find_spec("pyspark")
    found = Path(package.origin).parent if package and package.origin else None
    return found if found and (found / "jars").is_dir() else None


def _program() -> str:
    home = os.environ.get("JAVA_HOME")
    program = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if program is None:
        raise OperatorError(f"Spark needs Java, and there is no java on the PATH: {_INSTALL}")
    if home and not os.access(program, os.X_OK):
        raise OperatorError(
            f"JAVA_HOME is {home}, but there is no program {program}: correct or unset it, or {_INSTALL}"
        )
    return program


def _new_enough(program: str, version: str) -> int:
    if int(version) < LEAST_JAVA:
        raise OperatorError(f"{program} is Java {version}, too old for Spark: {_INSTALL}")
    return int(version)
