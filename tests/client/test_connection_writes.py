"""What system calls carry: many requests of one turn leave together, an exchange costs no other thread a switch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from brokers import Broker
from client.conftest import MakeTopic
from proving import proves

SCRIPT = textwrap.dedent("""
    import sys, threading
    from headrace.client.connection.connections import shared
    from headrace.client.producer.request import Outgoing, encode_parts
    from headrace.records import kernel
    from headrace.wire import api as apis

    pool, name, known = shared(sys.argv[1], client_id="traced"), sys.argv[2], []
    reactor = pool.reactor
    pool.metadata.want(name, create=False, on_known=known.append)
    reactor.wait(lambda: known, reactor.now() + 30)
    connection = pool.broker(pool.metadata.leader(name, 0))
    batch = kernel.build([(1, None, b"v" * 100, [])])
    body = lambda version: encode_parts(
        version, [Outgoing(name, 0, batch)], {name: known[0].topic_id}, acks=-1, timeout_ms=9000)
    heard = []

    def send(count):
        with reactor.lock:
            for _ in range(count):
                connection.ask(apis.PRODUCE, body, heard.append, timeout_s=30)

    send(1)
    assert reactor.wait(lambda: len(heard) == 1, reactor.now() + 30)
    send(int(sys.argv[3]))
    assert reactor.wait(lambda: len(heard) == 1 + int(sys.argv[3]), reactor.now() + 30)
    assert all(answer.responses[0].partition_responses[0].error_code == 0 for answer in heard)
    pool.release()
""")


def trace(broker: Broker, name: str, count: int, folder: Path) -> str:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    output = folder / "trace"
    command = [sys.executable, "-c", SCRIPT, broker.bootstrap, name, str(count)]
    traced = subprocess.run(
        ["strace", "-f", "-qq", "-e", "trace=sendmsg", "-o", str(output), *command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    if "ptrace" in traced.stderr:
        pytest.skip(f"strace may not trace here: {traced.stderr.strip()}")
    assert traced.returncode == 0, traced.stderr
    return output.read_text()


@proves("G6", "R16")
@pytest.mark.parametrize(("count", "writes"), [(200, [800]), (300, [1024, 176])])
def test_all_requests_of_one_turn_leave_in_one_system_call(
    broker: Broker, topic: MakeTopic, tmp_path: Path, count: int, writes: list[int]
) -> None:
    """Four parts each: head, fields, batch, fields; as many at a time as the kernel takes."""
    traced = trace(broker, topic(), count, tmp_path)
    sent = re.findall(r"msg_iovlen=(\d+).* = (\d+)$", traced, re.MULTILINE)
    assert [int(parts) for parts, _ in sent] == [4, *writes]
    assert sum(int(size) for _, size in sent[1:]) > count * 100
