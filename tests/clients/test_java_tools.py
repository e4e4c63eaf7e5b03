"""Apache Kafka's own command-line tools against Headrace, and on its files. A long run: Maven brings the tools."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from brokers import Broker
from clients.with_java import KAFKA, maven_jars
from proving import proves

TOOLS = "org.apache.kafka.tools."

Run = Callable[..., str]


@pytest.fixture(scope="module")
def jars() -> Path:
    return maven_jars("kafka-tools", "kafka-tools", "kafka_2.13")


@pytest.fixture
def run(jars: Path) -> Run:
    def tool(name: str, *args: str, stdin: str = "") -> str:
        command = ["java", "-Xmx256m", "-cp", f"{jars}/*", TOOLS + name, *args]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, f"{name}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    return tool


@pytest.mark.long
@proves("G4", "G12", "J1")
def test_the_java_tools_produce_consume_describe_reset_and_read_our_segments(
    broker: Broker, run: Run, proof_report: Callable[..., None]
) -> None:
    where = ("--bootstrap-server", broker.bootstrap)
    run("TopicCommand", *where, "--create", "--topic", "java", "--partitions", "2")
    assert "PartitionCount: 2" in run("TopicCommand", *where, "--describe", "--topic", "java")
    run("ConsoleProducer", *where, "--topic", "java", stdin="".join(f"line {n}\n" for n in range(1000)))
    read = run(
        "consumer.ConsoleConsumer",
        *where,
        "--topic",
        "java",
        "--from-beginning",
        "--group",
        "java",
        "--max-messages",
        "1000",
    )
    assert sorted(read.splitlines()) == sorted(f"line {n}" for n in range(1000))
    group = "consumer.group.ConsumerGroupCommand"
    described = run(group, *where, "--describe", "--group", "java")
    assert sum(int(line.split()[3]) for line in described.splitlines() if line.startswith("java ")) == 1000
    run(group, *where, "--group", "java", "--reset-offsets", "--to-earliest", "--topic", "java", "--execute")
    ends = run("GetOffsetShell", *where, "--topic", "java").split()
    assert sum(int(line.split(":")[2]) for line in ends) == 1000
    dumped = ""
    for segment in sorted((broker.data / "java").glob("*/*.log")):
        dumped += run("DumpLogSegments", "--files", str(segment), "--deep-iteration")
    assert dumped.count("| offset: ") == 1000
    assert "isvalid: false" not in dumped
    proof_report(apache_kafka_tools=KAFKA, records=1000, tools="topics, producer, consumer, groups, offsets, dump-log")
