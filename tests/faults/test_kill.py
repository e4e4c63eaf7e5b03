"""kill -9 under load: what was acknowledged is there after the restart, once, in order, without a gap."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition

from brokers import Broker
from clients.topics import create_topic
from faults.load import Load, values_of
from proving import proves

PARTITIONS = 4
RECORDS_BEFORE_KILL = (1, 4000)
# Small segments, so that kills also meet a roll.
SEGMENT_BYTES = 64 << 10


def kill_under_load(broker: Broker, durability: str, kills: int, seed: int) -> dict[str, object]:
    rng = random.Random(seed)
    settings: dict[str, object] = {"segment_bytes": SEGMENT_BYTES, "segment_index_bytes": 4096}
    create_topic(broker, "load", PARTITIONS, durability=durability, **settings)
    starts_s = []
    with Load(broker, "load", PARTITIONS) as load:
        for _ in range(kills):
            load.wait_acknowledged(rng.randint(*RECORDS_BEFORE_KILL))
            broker.kill()
            acknowledged = list(load.acknowledged)
            broker.start()
            starts_s.append(broker.start_s)
            for partition, count in enumerate(acknowledged):
                assert end_of(broker, partition) >= count, "an acknowledged record is gone"
        load.wait_acknowledged(1)
        sent = load.finish()
    for restart in (None, False, True):
        if restart is not None:
            broker.restart(clean=restart)
        for partition, count in enumerate(sent):
            assert values_of(broker, "load", partition, count) == [b"%d-%d" % (partition, n) for n in range(count)]
    return {"kills": kills, "records_acknowledged": sum(sent), "slowest_start_s": round(max(starts_s), 2)}


def end_of(broker: Broker, partition: int) -> int:
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "end"})
    _, end = consumer.get_watermark_offsets(TopicPartition("load", partition), timeout=30)
    consumer.close()
    return int(end)


def verify_offline(data: Path) -> None:
    command = [str(Path(sys.executable).parent / "headrace"), "log", "verify", str(data)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@proves("G8", "J6", "J10", "L4")
@pytest.mark.parametrize("durability", ["os", "disk"])
def test_acknowledged_records_survive_kills(fresh_broker: Callable[..., Broker], seed: int, durability: str) -> None:
    broker = fresh_broker()
    kill_under_load(broker, durability, 3, seed)
    broker.stop()
    verify_offline(broker.data)


@pytest.mark.long
@pytest.mark.parametrize("durability", ["os", "disk"])
def test_acknowledged_records_survive_many_kills(
    fresh_broker: Callable[..., Broker], seed: int, durability: str, proof_report: Callable[..., None]
) -> None:
    broker = fresh_broker()
    proof_report(**kill_under_load(broker, durability, 25, seed))
    broker.stop()
    verify_offline(broker.data)
