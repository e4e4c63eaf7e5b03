"""The broker for users' tests: a project of theirs runs with it, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from brokers import wait_for
from headrace import Consumer, Producer
from headrace.errors import OperatorError
from headrace.testing import TemporaryBroker
from proving import proves

DEADLINE_S = 120
PROJECT = """
import json
import urllib.request

import confluent_kafka
import pytest

import headrace
from headrace import aio

bootstraps = set()

def test_with_our_client(headrace_broker, headrace_topic):
    bootstraps.add(headrace_broker.bootstrap)
    with headrace.Producer(headrace_broker.bootstrap) as producer:
        assert producer.send(headrace_topic, "two shirts", key="anna").offset == 0
    with headrace.Consumer(headrace_topic, bootstrap=headrace_broker.bootstrap, group="g") as consumer:
        assert [record.value for record in consumer.poll(60_000)] == [b"two shirts"]

def test_with_confluent_kafka(headrace_broker, headrace_topic):
    bootstraps.add(headrace_broker.bootstrap)
    producer = confluent_kafka.Producer({"bootstrap.servers": headrace_broker.bootstrap})
    producer.produce(headrace_topic, b"two shirts")
    assert producer.flush(60) == 0
    settings = {"bootstrap.servers": headrace_broker.bootstrap, "group.id": "g", "auto.offset.reset": "earliest"}
    consumer = confluent_kafka.Consumer(settings)
    consumer.subscribe([headrace_topic])
    (found,) = consumer.consume(1, 60)
    assert found.value() == b"two shirts"
    consumer.close()

def test_settings_of_the_run(headrace_broker):
    with headrace.Admin(headrace_broker.bootstrap) as admin, headrace.Producer(headrace_broker.bootstrap) as producer:
        name = headrace_broker.new_topic("wide")
        producer.send(name, "x")
        assert len(admin.describe_topic(name).partitions) == 3
    assert urllib.request.urlopen(headrace_broker.http + "/health").status == 200

def test_one_for_itself(headrace_broker, headrace_broker_factory):
    other = headrace_broker_factory(settings={"auto.create.topics.enable": False})
    assert other.bootstrap != headrace_broker.bootstrap
    with headrace.Producer(other.bootstrap, delivery_timeout_ms=60_000) as producer:
        with pytest.raises(headrace.UnknownTopic):
            producer.send("nowhere", "x")

def test_the_broker_was_the_same_for_all():
    assert len(bootstraps) == 1
"""


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    kept["HEADRACE_NUM_PARTITIONS"] = "7"  # for the broker that the program is run against, not for tests
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *arguments]
    return subprocess.run(
        command, cwd=folder, env=kept, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


@proves("U2")
def test_a_users_project_has_a_broker_for_the_asking(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nheadrace_settings =\n    num.partitions=3\n")
    (tmp_path / "test_orders.py").write_text(PROJECT)
    done = run_pytest(tmp_path, "-W", "error")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout


@proves("U2")
def test_the_plugin_loads_nothing_until_a_test_asks(tmp_path: Path) -> None:
    (tmp_path / "test_nothing.py").write_text(
        "import sys\n\ndef test_nothing():\n"
        "    assert 'headrace.testing.pytest_plugin' in sys.modules\n"
        "    rooms = {name.split('.')[1] for name in sys.modules if name.startswith('headrace.')}\n"
        "    assert rooms == {'testing', 'errors'}\n"
    )
    done = run_pytest(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


HOLDER = """
import sys, time
from headrace.testing import TemporaryBroker
with TemporaryBroker() as broker:
    print(broker.addresses["pid"], flush=True)
    time.sleep(600)
"""


@proves("U2")
def test_the_broker_dies_with_the_process_that_started_it() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        broker = int(holder.stdout.readline())
        os.kill(broker, 0)
        holder.send_signal(signal.SIGKILL)

    def is_gone() -> bool:
        try:
            # An orphan that nobody has waited for yet is dead too.
            return Path(f"/proc/{broker}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    wait_for("the broker to be gone", is_gone)


@proves("U2")
def test_a_temporary_broker_serves_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with TemporaryBroker() as broker:
        (folder,) = tmp_path.iterdir()
        assert (folder / "data").is_dir()
        with Producer(broker.bootstrap) as producer:
            producer.send("t", "v")
        with Consumer("t", bootstrap=broker.bootstrap) as consumer:
            assert next(consumer.records(60_000)).value == b"v"
        with urllib.request.urlopen(f"{broker.http}/health", timeout=60) as answer:
            assert answer.status == 200
        assert broker.new_topic("a") != broker.new_topic("a")
        pid = int(broker.addresses["pid"])
    assert list(tmp_path.iterdir()) == []
    assert not Path(f"/proc/{pid}").exists()
    broker.stop()


@proves("U2")
def test_a_broker_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(OperatorError, match=r"did not start: .*num\.partition"):
        TemporaryBroker({"num.partition": 3}).start()
    assert list(tmp_path.iterdir()) == []
