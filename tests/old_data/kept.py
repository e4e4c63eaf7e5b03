"""Old data taken out of its archive, and what is asked of the brokers that open it.

They serve everything as it was; a batch of an idempotent producer that is sent again is known, though its records are
deleted; records and commits go on where they were.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any, Final

from confluent_kafka import Consumer, Producer, TopicPartition

from old_data.content import DEADLINE_S, QUIET, Content, content, produce_raw

ARCHIVES: Final = Path(__file__).parent / "data"
COMMAND_DEADLINE_S: Final = 120
NEW_KEY: Final = b"written by later code"


def unpack(name: str, target: Path) -> dict[str, Any]:
    """Put its folders below the target; answers what was told of them."""
    with tarfile.open(ARCHIVES / f"{name}.tar.xz") as archive:
        archive.extractall(target, filter="data")
    told: dict[str, Any] = json.loads((ARCHIVES / f"{name}.json").read_text())
    return told


def log_bytes(data: Path) -> dict[str, bytes]:
    """What the logs of a data folder hold, by file; room that was given in advance is left away."""
    return {str(path.relative_to(data)): path.read_bytes().rstrip(b"\0") for path in sorted(data.rglob("*.log"))}


def check_log_bytes(data: Path, before: dict[str, bytes]) -> None:
    """Everything is where it was; there may be more behind it."""
    now = log_bytes(data)
    assert [name for name, held in before.items() if not now.get(name, b"").startswith(held)] == []


def headrace(*arguments: str) -> str:
    """Run a command of Headrace; what it printed."""
    command = [str(Path(sys.executable).parent / "headrace"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_DEADLINE_S, check=False)
    assert done.returncode == 0, f"{arguments}: {done.stdout}\n{done.stderr}"
    return done.stdout


def check_whole(data: Path) -> None:
    found = json.loads(headrace("log", "verify", str(data), "--json"))
    assert (found["whole"], found["problems"], found["set_aside"]) == (True, [], [])


def check_served(bootstrap: str, told: dict[str, Any]) -> None:
    """All is there, and goes on."""
    old = comparable(told["content"])
    check_same(comparable(content(bootstrap, old["groups"])), old)
    for sent in told["repeated"]:
        batch = base64.b64decode(sent["batch"])
        assert produce_raw(bootstrap, sent["topic"], batch) == (0, sent["offset"]), "known, and not written again"
    _append(bootstrap, old)
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "alone", "enable.auto.commit": False, **QUIET})
    consumer.commit(offsets=[TopicPartition("codecs", 1, 77, metadata="later")], asynchronous=False)
    consumer.close()
    new = comparable(content(bootstrap, old["groups"]))
    for name, index, partition in partitions(old):
        now = new["topics"][name]["partitions"][index]
        assert now["records"][:-1] == partition["records"], f"{name}-{index}"
        assert (now["start"], now["end"]) == (partition["start"], partition["end"] + 1)
        offset, epoch, *_, key, _, _ = now["records"][-1]
        assert (offset, key) == (partition["end"], NEW_KEY.decode())
        assert epoch >= max((record[1] for record in partition["records"]), default=0)
    old["groups"]["alone"]["offsets"]["codecs"]["1"] = [77, "later"]
    assert new["groups"] == old["groups"]


def comparable(found: Content) -> Content:
    """Replicas compact on their own, so of a cluster's compacted topics only the last records of keys are compared."""
    for name, _, partition in partitions(found):
        if len(found["brokers"]) > 1 and "compact" in found["topics"][name]["settings"].get("cleanup.policy", ""):
            last = {record[4]: record[0] for record in partition["records"]}
            partition["records"] = [record for record in partition["records"] if last[record[4]] == record[0]]
    return found


def check_same(new: Content, old: Content) -> None:
    """Part by part, because the whole is too much to be shown."""
    assert new["topics"].keys() == old["topics"].keys()
    for name, topic in old["topics"].items():
        assert new["topics"][name]["settings"] == topic["settings"], name
        assert new["topics"][name]["partitions"].keys() == topic["partitions"].keys(), name
    for name, index, partition in partitions(old):
        now = new["topics"][name]["partitions"][index]
        assert (now["start"], now["end"]) == (partition["start"], partition["end"]), f"{name}-{index}"
        assert now["records"] == partition["records"], f"{name}-{index}"
    for part in ("cluster_id", "groups", "brokers"):
        assert new[part] == old[part]
    assert new == old


def partitions(found: Content) -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (name, index, partition)
        for name, topic in found["topics"].items()
        for index, partition in topic["partitions"].items()
    ]


def _append(bootstrap: str, old: Content) -> None:
    """One record to each partition."""
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, **QUIET})
    answers: list[tuple[Any, Any]] = []
    for name, index, _ in partitions(old):
        producer.produce(
            name, b"new", NEW_KEY, int(index), on_delivery=lambda error, message: answers.append((error, message))
        )
    assert producer.flush(DEADLINE_S) == 0
    assert [error for error, _ in answers if error] == []
