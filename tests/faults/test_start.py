"""Starts that cannot be, and starts on damaged folders: one clear line and an exit status, never a traceback."""

from __future__ import annotations

import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Producer

from brokers import Broker, wait_for
from clients.topics import create_topic
from faults.load import values_of
from proving import proves

HEADRACE = str(Path(sys.executable).parent / "headrace")
DEADLINE_S = 120


def refused(*arguments: str) -> str:
    """Run `headrace serve`, which has to fail with one line on standard error; that line."""
    done = subprocess.run(
        [HEADRACE, "serve", "--http", "off", *arguments],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    said = [line for line in done.stderr.splitlines() if " info " not in line]
    assert done.returncode in (1, 2), done
    assert "Traceback" not in done.stderr
    assert len(said) == 1, done.stderr
    assert "ready" not in done.stdout
    return said[0]


@proves("U1", "U6")
@pytest.mark.parametrize(
    ("flag", "option"),
    [
        ("--listen {}", "--listen"),
        ("--listen 127.0.0.1:0 --http {}", "--http"),
        ("--listen 127.0.0.1:0 --set replication.listen={}", "--set replication.listen=HOST:PORT"),
    ],
)
def test_a_port_in_use_is_named_with_the_flag_that_chooses_another(tmp_path: Path, flag: str, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        line = refused("--data", str(tmp_path / "data"), *flag.format(address).split())
    advice = f"stop what uses it or choose another with {option}"
    assert line == f"headrace: cannot listen on {address}: the port is in use; {advice}"


def test_a_data_folder_in_use(fresh_broker: Callable[..., Broker]) -> None:
    broker = fresh_broker()
    line = refused("--data", str(broker.data), "--listen", "127.0.0.1:0")
    assert str(broker.data) in line
    assert str(broker.pid) in line


@proves("R2")
def test_a_folder_keeps_the_layout_it_was_given(fresh_broker: Callable[..., Broker]) -> None:
    broker = fresh_broker(settings={"log.layout": "shared"})
    broker.stop()
    assert (broker.data / "@commitlog").is_dir()
    line = refused("--data", str(broker.data), "--listen", "127.0.0.1:0", "--set", "log.layout=partitioned")
    assert str(broker.data) in line
    assert "headrace log convert --to partitioned" in line
    broker.settings["log.layout"] = "auto"
    broker.start()
    with urllib.request.urlopen(broker.http, timeout=30) as page:
        assert "<th>Layout</th><td>shared</td>" in page.read().decode()


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    assert str(tmp_path / "file") in refused("--data", str(tmp_path / "file"), "--listen", "127.0.0.1:0")


@proves("R15")
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--listen", "0.0.0.0:0"), "--advertise"),
        (("--listen", "nonsense"), "nonsense"),
        (("--set", "no.such.setting=1"), "no.such.setting"),
        (("--set", "num.partitions=many"), "num.partitions"),
        (("--config", "/nonexistent.toml"), "/nonexistent.toml"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, arguments: tuple[str, ...], told: str) -> None:
    assert told in refused("--data", str(tmp_path / "data"), *arguments)


@pytest.fixture
def stopped(fresh_broker: Callable[..., Broker]) -> Broker:
    """A broker that was killed with a few hundred records in small segments."""
    broker = fresh_broker(settings={"commitlog.file.bytes": 1 << 16})
    create_topic(broker, "t", 1, segment_bytes=4096)
    producer = Producer({"bootstrap.servers": broker.bootstrap, "batch.num.messages": 5})
    for n in range(300):
        producer.produce("t", b"%d" % n + b"." * 100, partition=0)
    assert producer.flush(DEADLINE_S) == 0
    broker.kill()
    return broker


def files(broker: Broker) -> list[Path]:
    """Where the topic's batches are: its segments, or the commit log of all."""
    commit_log = sorted((broker.data / "@commitlog").glob("*.log"))
    return commit_log or sorted((broker.data / "t" / "t-0").glob("*.log"))


def test_a_torn_tail_is_cut(stopped: Broker) -> None:
    last = files(stopped)[-1]
    whole = last.read_bytes()
    begun = max(0, whole.rfind(b"HRFA"))  # a batch, or a frame of the commit log that appends some
    last.write_bytes(whole + whole[begun : begun + 57])
    stopped.start()
    assert values_of(stopped, "t", 0, 300) == [b"%d" % n + b"." * 100 for n in range(300)]


def test_lost_indexes_are_built_again(stopped: Broker) -> None:
    lost = [file for kind in ("*index", "*.queue") for file in (stopped.data / "t" / "t-0").glob(kind)]
    assert lost
    for file in lost:
        file.unlink()
    stopped.start()
    assert values_of(stopped, "t", 0, 300) == [b"%d" % n + b"." * 100 for n in range(300)]


def test_garbage_for_the_cluster_data_is_named(stopped: Broker) -> None:
    for file in stopped.data.glob("coordination.sqlite*"):
        file.write_bytes(b"garbage" * 1000)
    line = refused("--data", str(stopped.data), "--listen", "127.0.0.1:0")
    assert "coordination.sqlite" in line


@proves("J1")
def test_a_flipped_byte_in_the_middle_is_named_and_not_served(stopped: Broker) -> None:
    from confluent_kafka import Consumer, TopicPartition

    damaged = files(stopped)[len(files(stopped)) // 3]
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 0x10
    damaged.write_bytes(content)
    verify = subprocess.run(
        [HEADRACE, "log", "verify", str(stopped.data)], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )  # fmt: skip
    assert verify.returncode != 0
    assert damaged.name in verify.stdout + verify.stderr
    stopped.start()
    consumer = Consumer({"bootstrap.servers": stopped.bootstrap, "group.id": "g", "check.crcs": True, "log_level": 0})
    consumer.assign([TopicPartition("t", 0, 0)])
    values: list[bytes | None] = []
    while (message := consumer.poll(3.0)) is not None and message.error() is None:
        values.append(message.value())
    consumer.close()
    assert values == [b"%d" % n + b"." * 100 for n in range(len(values))], "only good records, up to the damage"
    wait_for("the damage in the broker's own log", lambda: damaged.name in stopped.stderr())
