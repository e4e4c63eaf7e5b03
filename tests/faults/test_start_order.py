"""A broker that is started before etcd waits for it, says so, and is ended at once by a signal."""

from __future__ import annotations

import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from brokers import START_DEADLINE_S, Broker, free_port, wait_for
from etcd_nodes import EtcdNodes
from proving import proves


@proves("G1")
def test_a_broker_that_comes_before_etcd_waits_for_it(tmp_path: Path) -> None:
    etcd = EtcdNodes(tmp_path / "etcd")
    broker = Broker(tmp_path / "early", {"coordination": etcd.uri})
    with ThreadPoolExecutor(1) as starter:  # a process dies with the thread that started it
        starting = starter.submit(broker.start)
        try:
            wanted = f"waiting for etcd at {etcd.addresses[0]}"
            wait_for("the line that says what it waits for", lambda: wanted in broker.stderr())
            assert not starting.done()
            etcd.start_all()
            starting.result(START_DEADLINE_S)
            assert broker.stop() == 0
        finally:
            broker.kill()
            etcd.close()


def test_a_signal_ends_the_wait(tmp_path: Path) -> None:
    waiting = Broker(tmp_path / "b", {"coordination": f"etcd://127.0.0.1:{free_port()}"})
    process = subprocess.Popen(waiting.command(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        assert any("waiting for" in line for line in lines)
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=START_DEADLINE_S)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "did not answer" not in rest, "it had not even given up its first call"
    assert "Traceback" not in rest
