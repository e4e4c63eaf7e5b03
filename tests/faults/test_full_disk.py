"""A full disk: writes are refused so that clients try again, reads go on, and nothing needs a restart."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, Producer

from brokers import Broker
from clients.topics import create_topic
from faults import raw
from faults.load import values_of
from proving import proves

SIZE_BYTES = 64 << 20
FILL_BYTES = 1 << 16
DEADLINE_S = 120.0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    options = f"size={SIZE_BYTES}"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"tmpfs cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def fill(file: Path) -> None:
    with file.open("ab", buffering=0) as target:
        for chunk in (FILL_BYTES, 512, 1):
            try:
                while True:
                    target.write(b"\0" * chunk)
            except OSError:
                continue


@proves("G8", "L7")
@pytest.mark.parametrize("durability", ["os", "disk"])
def test_a_full_disk_refuses_writes_and_serves_reads(
    fresh_broker: Callable[..., Broker], small_disk: Path, durability: str
) -> None:
    broker = fresh_broker(data=small_disk / "data", settings={"offsets.topic.partitions": 1})
    create_topic(broker, "t", durability=durability, segment_index_bytes=4096)
    written = [b"before %d " % n + b"." * 1000 for n in range(20)]
    filler = small_disk / "filler"
    with socket.create_connection(broker.host_port, DEADLINE_S) as connection:
        for value in written:
            assert raw.produced(connection, "t", 0, value) == 0
        fill(filler)
        refusals = 0
        for n in range(200):
            value = b"during %d " % n + b"." * 8000
            code = raw.produced(connection, "t", 0, value)
            if code == 0:
                # The last page of the log had room for it.
                written.append(value)
                continue
            assert code == KafkaError.KAFKA_STORAGE_ERROR
            refusals += 1
            if refusals == 5:
                break
    assert refusals == 5
    assert values_of(broker, "t", 0, len(written)) == written
    broker.check_alive()

    # A client that keeps trying gets through when there is room again.
    written.append(b"after " + b"." * 8000)
    producer = Producer({"bootstrap.servers": broker.bootstrap, "retry.backoff.ms": 50, "log_level": 0})
    reported: list[KafkaError | None] = []
    producer.produce("t", written[-1], partition=0, on_delivery=lambda error, _message: reported.append(error))
    producer.poll(0.5)
    assert reported == []
    filler.unlink()
    assert producer.flush(DEADLINE_S) == 0
    assert reported == [None]
    assert values_of(broker, "t", 0, len(written)) == written
    broker.restart()
    assert values_of(broker, "t", 0, len(written)) == written
