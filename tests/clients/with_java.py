"""Java programs against a broker: jars from Maven Central, into `.work`, and sources of `java/`, compiled there.

What cannot be had is skipped, and says why.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from brokers import DIES_WITH_PARENT

KAFKA: Final = "4.3.1"
WORK: Final = Path(__file__).resolve().parents[2] / ".work"
SOURCES: Final = Path(__file__).parent / "java"
MAVEN_DEADLINE_S: Final = 300.0
RUN_DEADLINE_S: Final = 600.0


def maven_jars(folder: str, *artifacts: str) -> Path:
    """The folder with these artifacts of Apache Kafka and all that they need."""
    for command in ("mvn", "java"):
        if shutil.which(command) is None:
            pytest.skip(f"no {command}: Apache Kafka's {artifacts[0]} cannot be had")
    jars = WORK / folder
    if all(any(jars.glob(f"{artifact}-{KAFKA}.jar")) for artifact in artifacts):
        return jars
    dependencies = "".join(
        "<dependency><groupId>org.apache.kafka</groupId>"
        f"<artifactId>{artifact}</artifactId><version>{KAFKA}</version></dependency>"
        for artifact in artifacts
    )
    jars.mkdir(parents=True, exist_ok=True)
    (jars / "pom.xml").write_text(
        "<project><modelVersion>4.0.0</modelVersion>"
        f"<groupId>headrace</groupId><artifactId>{folder}</artifactId><version>1</version>"
        f"<dependencies>{dependencies}</dependencies></project>"
    )
    command_line = ["mvn", "-q", "-f", str(jars / "pom.xml"), "dependency:copy-dependencies"]
    try:
        brought = subprocess.run(
            [*command_line, f"-DoutputDirectory={jars}"],
            capture_output=True,
            text=True,
            check=False,
            timeout=MAVEN_DEADLINE_S,
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"Maven did not bring {artifacts[0]} within {MAVEN_DEADLINE_S:g} s")
    if brought.returncode:
        pytest.skip(f"Maven did not bring {artifacts[0]}: {brought.stdout[-200:]}")
    return jars


def compiled(program: str, jars: Path) -> Path:
    """The folder of its classes; compiled anew when the source is newer."""
    if shutil.which("javac") is None:
        pytest.skip(f"no javac: {program} cannot be compiled")
    classes, source = WORK / "java-classes", SOURCES / f"{program}.java"
    made = classes / f"{program}.class"
    if not made.exists() or made.stat().st_mtime < source.stat().st_mtime:
        classes.mkdir(parents=True, exist_ok=True)
        command = ["javac", "-nowarn", "-d", str(classes), "-cp", f"{jars}/*", str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return classes


def run(program: str, *arguments: str) -> dict[str, str]:
    """What a program of `java/` prints as `what=value`, when it has ended well."""
    jars = maven_jars("java-clients", "kafka-clients", "kafka-streams")
    classpath = f"{compiled(program, jars)}:{jars}/*"
    command = [*DIES_WITH_PARENT, "java", "-Xmx256m", "-XX:TieredStopAtLevel=1", "-cp", classpath, program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=RUN_DEADLINE_S)
    assert done.returncode == 0, f"{program}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
