"""The brokers under measurement: how each is had, started on loopback with a private folder, asked whether it answers,
and stopped.

A contestant that cannot be had raises `Missing` with the reason and the remedy; the run goes on without it. Nothing is
downloaded but Kafka's jars, into the git-ignored `.work/kafka`.
"""

import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import processes

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".work"
HOST = "127.0.0.1"
START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 2.0
POLL_S = 0.004
MAVEN_TIMEOUT_S = 600.0
KAFKA_CLUSTER_ID = "aGVhZHJhY2UtYmVuY2gtMQ"
# The heap and collector that Kafka's own start script sets.
KAFKA_JVM = (
    *("-Xms1g", "-Xmx1g", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20"),
    *("-XX:InitiatingHeapOccupancyPercent=35", "-XX:+ExplicitGCInvokesConcurrent"),
)


class Missing(Exception):
    """The contestant cannot be had on this machine; the text says why and what would help."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to start one contestant and how to load it."""

    name: str
    version: str
    settings: str
    command: tuple[str, ...]
    answers: Callable[[int], bool]
    load: str
    """Which load program speaks to it."""
    bulk_share: float = 1.0
    """Share of the messages it gets in a throughput cell: what keeps a slow contestant from filling the run."""


@dataclass(frozen=True, slots=True)
class Running:
    """A started contestant."""

    recipe: Recipe
    process: subprocess.Popen[bytes]
    port: int
    folder: Path
    start_s: float
    start_cpu_s: float
    """Processor time up to the first answer: what the start costs, however busy the machine is."""

    @property
    def pids(self) -> list[int]:
        return processes.process_tree(self.process.pid)

    def cpu_seconds(self) -> float:
        return processes.cpu_seconds(self.process.pid)

    def memory(self) -> processes.Memory:
        return processes.memory(self.process.pid)

    def stop(self) -> float:
        return processes.stop(self.process)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def start(recipe_of: Callable[[Path, int], Recipe], folder: Path, port: int | None = None) -> Running:
    """Starts a contestant in an empty folder and waits for its first successful answer in its own protocol."""
    folder.mkdir(parents=True)
    port = port or free_port()
    recipe = recipe_of(folder, port)
    log = folder / "output.log"
    with log.open("wb") as output:
        began = time.monotonic()
        process = subprocess.Popen(
            recipe.command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    while not _answers(recipe, port):
        if process.poll() is not None or time.monotonic() - began > START_TIMEOUT_S:
            processes.stop(process)
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise Missing(f"it did not come up with {' '.join(recipe.command)}\n{tail}")
        time.sleep(POLL_S)
    start_s = time.monotonic() - began
    return Running(recipe, process, port, folder, start_s, processes.cpu_seconds(process.pid))


def _answers(recipe: Recipe, port: int) -> bool:
    try:
        return recipe.answers(port)
    except (OSError, struct.error):
        return False


def _exchange(port: int, request: bytes, enough: Callable[[bytes], bool]) -> bytes:
    """Sends a request and reads until the answer is whole."""
    with socket.create_connection((HOST, port), ANSWER_TIMEOUT_S) as connection:
        connection.sendall(request)
        answer = b""
        while not enough(answer):
            chunk = connection.recv(65536)
            if not chunk:
                raise ConnectionError("closed before the answer was whole")
            answer += chunk
        return answer


def answers_kafka(port: int) -> bool:
    """A Metadata v1 request for no topics is answered, and names a broker."""
    body = struct.pack(">hhih", 3, 1, 7, 5) + b"bench" + struct.pack(">i", 0)

    def whole(answer: bytes) -> bool:
        return len(answer) >= 4 and len(answer) >= 4 + int(struct.unpack_from(">i", answer)[0])

    answer = _exchange(port, struct.pack(">i", len(body)) + body, whole)
    correlation_id, brokers = struct.unpack_from(">ii", answer, 4)
    return bool(correlation_id == 7 and brokers >= 1)


def answers_nats(port: int) -> bool:
    """JetStream answers for its account, not the bare server only."""
    request = b"CONNECT {}\r\nSUB bench.ready 1\r\nPUB $JS.API.INFO bench.ready 0\r\n\r\n"
    return b"account_info" in _exchange(port, request, lambda answer: b"account_info" in answer or b"-ERR" in answer)


def answers_redis(port: int) -> bool:
    return _exchange(port, b"PING\r\n", lambda answer: answer.endswith(b"\r\n")) == b"+PONG\r\n"


def _program(name: str, remedy: str) -> str:
    found = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
    if found is None:
        raise Missing(f"there is no program {name}: {remedy}")
    return found


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ANSWER_TIMEOUT_S * 10)
    return (done.stdout or done.stderr).strip()


def headrace_program() -> str:
    """The command of the environment that runs this script, or else of the clone's own one."""
    for folder in (Path(sys.executable).parent, ROOT / ".venv" / "bin"):
        if (folder / "headrace").exists():
            return str(folder / "headrace")
    raise Missing("Headrace is not installed: make serve, or pip install -e . in the environment of this script")


def headrace(folder: Path, port: int) -> Recipe:
    program = headrace_program()
    listeners = ("--listen", f"{HOST}:{port}", "--http", f"{HOST}:{free_port()}")
    commit = _output("git", "-C", str(ROOT), "describe", "--always", "--dirty")
    return Recipe(
        name="headrace",
        version=f"commit {commit}, Python {sys.version.split()[0]}",
        settings="defaults",
        command=(program, "serve", "--data", str(folder / "data"), *listeners),
        answers=answers_kafka,
        load="kafka",
    )


def kafka_jars() -> Path:
    """The folder of Kafka's jars, brought from Maven Central on the first call."""
    folder = CACHE / "kafka"
    jars = folder / "lib"
    if any(jars.glob("kafka_2.13-4.*.jar")):
        return jars
    maven = _program("mvn", "apt-get install maven")
    folder.mkdir(parents=True, exist_ok=True)
    coordinates = (
        ("org.apache.kafka", "kafka_2.13", "[4.0,5.0)"),
        ("org.apache.logging.log4j", "log4j-slf4j-impl", "2.25.4"),
    )
    dependencies = "".join(
        f"<dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId><version>{version}</version></dependency>"
        for group, artifact, version in coordinates
    )
    (folder / "pom.xml").write_text(
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        "<groupId>bench</groupId><artifactId>kafka</artifactId><version>1</version><packaging>pom</packaging>"
        f"<dependencies>{dependencies}</dependencies></project>\n"
    )
    command = (maven, "-q", "-B", "dependency:copy-dependencies", f"-DoutputDirectory={jars}")
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=MAVEN_TIMEOUT_S)
    except subprocess.TimeoutExpired as late:
        raise Missing(f"Maven did not bring the jars in {MAVEN_TIMEOUT_S:.0f} s") from late
    if done.returncode != 0 or not any(jars.glob("kafka_2.13-4.*.jar")):
        raise Missing(f"Maven did not bring org.apache.kafka:kafka_2.13: {done.stdout.strip()[-400:]}")
    return jars


def kafka(folder: Path, port: int) -> Recipe:
    java = _program("java", "apt-get install openjdk-17-jre-headless")
    jars = kafka_jars()
    properties = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "listeners": f"PLAINTEXT://{HOST}:{port},CONTROLLER://{HOST}:{(controller := free_port())}",
        "advertised.listeners": f"PLAINTEXT://{HOST}:{port}",
        "controller.listener.names": "CONTROLLER",
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
        "controller.quorum.bootstrap.servers": f"{HOST}:{controller}",
        "log.dirs": str(folder / "data"),
        "offsets.topic.replication.factor": "1",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "log.segment.delete.delay.ms": "1000",
    }
    config = folder / "server.properties"
    config.write_text("".join(f"{key}={value}\n" for key, value in properties.items()))
    classpath = f"{jars}/*"
    tool = (java, "-cp", classpath, "kafka.tools.StorageTool", "format", "-t", KAFKA_CLUSTER_ID, "-c", str(config))
    formatted = subprocess.run((*tool, "--standalone"), capture_output=True, text=True, check=False)
    if formatted.returncode != 0:
        raise Missing(f"Kafka's storage tool refused the folder: {formatted.stderr.strip()[-400:]}")
    jar = next(jars.glob("kafka_2.13-4.*.jar")).stem
    return Recipe(
        name="kafka",
        version=f"{jar.removeprefix('kafka_2.13-')}, Java {_output(java, '-version').split(chr(34))[1]}",
        settings="KRaft, one node, defaults, heap 1 GB; its log is formatted before the clock of the start time runs",
        command=(java, *KAFKA_JVM, "-cp", classpath, "kafka.Kafka", str(config)),
        answers=answers_kafka,
        load="kafka",
    )


def nats(folder: Path, port: int) -> Recipe:
    server = _program("nats-server", "apt-get install nats-server")
    return Recipe(
        name="nats",
        version=_output(server, "--version").removeprefix("nats-server: "),
        settings="JetStream, file storage, default sync interval (2 min); one stream, a partition is a subject",
        command=(server, "-js", "-a", HOST, "-p", str(port), "-sd", str(folder / "data")),
        answers=answers_nats,
        load="nats",
        bulk_share=0.15,
    )


def redis(folder: Path, port: int) -> Recipe:
    server = _program("redis-server", "apt-get install redis-server")
    options = {
        "--bind": HOST,
        "--port": str(port),
        "--dir": str(folder),
        "--appendonly": "yes",
        "--appendfsync": "everysec",
        "--auto-aof-rewrite-percentage": "0",
        "--save": "",
    }
    return Recipe(
        name="redis",
        version=_output(server, "--version").split("v=")[1].split()[0],
        settings="appendonly yes, appendfsync everysec, no rewrite, no snapshots; in memory, a partition is a stream",
        command=(server, *(word for option in options.items() for word in option)),
        answers=answers_redis,
        load="redis",
        bulk_share=0.3,
    )


CONTESTANTS: dict[str, Callable[[Path, int], Recipe]] = {
    "headrace": headrace,
    "kafka": kafka,
    "nats": nats,
    "redis": redis,
}
