"""Makes the data folders below tests/old_data/data, with the code that it is run on. Not to be run again for the sake
of a change: what is there was written by earlier code, and has to be opened by whatever comes. A change of a format
adds folders under new names.

    python tests/old_data/make.py TARGET [NAME ...]      partitioned, shared, cluster; all unless named

Of each layout there are two folders of one broker with embedded coordination: `<layout>-killed` was left by SIGKILL in
the middle of its life, `<layout>-stopped` is the same later, after a clean stop. `cluster` is three brokers, the third
with the layout shared, and what they had in etcd: keys with the revisions of their creation and last change. Beside
each archive a JSON tells what is in it (`content`), and batches of idempotent producers to send again (`repeated`).
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from aiokafka.record.default_records import DefaultRecordBatchBuilder
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)

ROOT: Final = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from brokers import Broker, wait_for  # noqa: E402
from clusters import BrokerCluster  # noqa: E402
from etcd_nodes import EtcdNode  # noqa: E402
from old_data.content import DAY_MS, DEADLINE_S, KEEP, QUIET, Content, content, produce_raw  # noqa: E402

START_MS: Final = 1_750_000_000_000
CODECS: Final = ("none", "gzip", "snappy", "lz4", "zstd")
SMALL: Final = {
    "offsets.topic.partitions": 2,
    "log.segment.index.bytes": 4096,
    "commitlog.file.bytes": 65_536,
    "key.index.entries": 64,
    "key.index.slots": 16,
    "checkpoint.ms": 500,
    "auto.create.topics.enable": "false",
}
EAGER: Final = {**SMALL, "retention.check.ms": 50, "log.cleaner.backoff.ms": 50}
CALM: Final = {**SMALL, **KEEP, "checkpoint.ms": DAY_MS}
SEGMENTS: Final = {"segment.bytes": "2048", "index.interval.bytes": "256", "retention.ms": "-1"}
COMPACTED: Final = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.01", "segment.bytes": "2048"}
TOPICS: Final[dict[str, tuple[int, dict[str, str]]]] = {
    "codecs": (2, {**SEGMENTS}),
    "recompressed": (1, {"compression.type": "zstd", "retention.ms": "-1"}),
    "compacted": (1, COMPACTED),
    "by-key": (1, {"key.index": "true", "retention.ms": "-1"}),
    "trimmed": (1, {**SEGMENTS, "segment.bytes": "4096"}),
    "retained": (1, {"retention.bytes": "32768", "segment.bytes": "16384", "retention.ms": "-1"}),
    "stamped": (1, {"message.timestamp.type": "LogAppendTime", "durability": "disk", "retention.ms": "-1"}),
    "preallocated": (1, {"preallocate": "true", "segment.bytes": "65536", "retention.ms": "-1"}),
    "idempotent": (1, {**SEGMENTS}),
    "empty": (3, {}),
}
REPEATED_TOPIC: Final = "idempotent"
REPEATED_PRODUCER: Final = 1 << 40
REPEATED_BATCHES: Final = 4


def settings_of(kind: ResourceType, name: str, **changed: str) -> ConfigResource:
    entries = [
        ConfigEntry(key.replace("_", "."), value, incremental_operation=AlterConfigOpType.SET)
        for key, value in changed.items()
    ]
    return ConfigResource(kind, name, incremental_configs=entries)


class Writer:
    """Puts into a broker or cluster what its data folders are to hold."""

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._repeated: list[dict[str, Any]] = []

    def connect(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self.admin = AdminClient({"bootstrap.servers": bootstrap, **QUIET})
        self._producers: dict[tuple[str, int], Producer] = {}

    def create(self) -> None:
        wanted = [
            NewTopic(name, partitions, self._replicas, config=settings)
            for name, (partitions, settings) in {**TOPICS, "gone": (1, {})}.items()
        ]
        for created in self.admin.create_topics(wanted, operation_timeout=DEADLINE_S).values():
            created.result(DEADLINE_S)
        for altered in self.admin.incremental_alter_configs(
            [
                settings_of(ResourceType.TOPIC, "empty", min_compaction_lag_ms="7000", flush_ms="300"),
                settings_of(ResourceType.BROKER, "1", num_partitions="5"),
            ]
        ).values():
            altered.result(DEADLINE_S)

    def write(self, nth: int) -> None:
        for codec in CODECS:
            self._produce("codecs", self._varied(nth, codec), codec)
        self._produce("recompressed", [(0, b"k%d" % n, b"value %d " % nth * 20, ()) for n in range(10)], "gzip")
        for n in range(20):
            self._produce("compacted", [(0, b"key %d" % k, b"%d.%d " % (nth, n) * 20, ()) for k in range(5)])
        self._produce("compacted", [(0, b"key 3", None, ()), (0, b"alone %d" % nth, b"stays", ())])
        self._produce("by-key", [(0, b"user-%d" % (n % 7), b"visit %d of %d" % (n, nth), ()) for n in range(30)])
        self._produce("trimmed", [(0, None, b"line %d.%d " % (nth, n) * 8, ()) for n in range(60)], batch=5)
        self._produce("retained", [(0, None, b"%d" % (n % 10) * 4000, ()) for n in range(24)], batch=2)
        self._produce("stamped", [(0, b"", b"stamped %d" % n, ()) for n in range(5)])
        self._produce("preallocated", [(0, b"k", b"", [("only", b"headers")]) for _ in range(3)])
        self._produce(
            REPEATED_TOPIC, [(0, None, b"of librdkafka %d.%d " % (nth, n) * 5, ()) for n in range(40)], batch=5
        )
        if nth == 0:
            self._produce("gone", [(0, b"k", b"deleted with its topic", ())])

    def _varied(self, nth: int, codec: str) -> list[tuple[int, bytes | None, bytes | None, Any]]:
        """Null and empty keys and values, headers with and without values, some of them twice."""
        text = f"{codec} {nth} ".encode()
        plain: list[tuple[int, bytes | None, bytes | None, Any]] = [
            (n % 2, b"k%d" % n, text * 6 + b"%d" % n, ()) for n in range(20)
        ]
        return [
            *plain,
            (0, None, text + b"\x00\xff\x80", [("h", b"\x00\x01"), ("h", None), ("ünï", b"")]),
            (1, b"", b"", [("trace", text)]),
            (1, b"\xfe\xff", None, ()),
        ]

    def _produce(
        self,
        topic: str,
        records: Iterable[tuple[int, bytes | None, bytes | None, Any]],
        codec: str = "none",
        batch: int = 1000,
    ) -> None:
        if (codec, batch) not in self._producers:
            self._producers[codec, batch] = Producer(
                {
                    "bootstrap.servers": self.bootstrap,
                    "compression.type": codec,
                    "enable.idempotence": True,
                    "linger.ms": 5,
                    "batch.num.messages": batch,
                    **QUIET,
                }
            )
        producer = self._producers[codec, batch]
        errors: list[object] = []
        for number, (partition, key, value, headers) in enumerate(records):
            producer.produce(
                topic,
                value,
                key,
                partition,
                on_delivery=lambda error, _: errors.append(error) if error else None,
                timestamp=START_MS + number,
                headers=list(headers),
            )
        assert (producer.flush(DEADLINE_S), errors) == (0, []), (topic, errors)

    def write_repeated(self) -> None:
        """Batches whose answers a producer may have missed."""
        for n in range(REPEATED_BATCHES):
            builder = DefaultRecordBatchBuilder(2, 0, 0, REPEATED_PRODUCER, 3, 2 * n, 4096)
            builder.append(0, START_MS, b"raw", b"first of batch %d" % n, [])
            builder.append(1, START_MS + 1, b"raw", b"second of batch %d" % n, [])
            batch = bytes(builder.build())
            error_code, offset = produce_raw(self.bootstrap, REPEATED_TOPIC, batch)
            assert error_code == 0, error_code
            encoded = base64.b64encode(batch).decode()
            self._repeated.append({"topic": REPEATED_TOPIC, "batch": encoded, "offset": offset})

    def delete(self) -> None:
        """A topic; records up to the middle of a segment; and those of a producer that may still ask for them."""
        for deleted in self.admin.delete_topics(["gone"], operation_timeout=DEADLINE_S).values():
            deleted.result(DEADLINE_S)
        beyond = self._repeated[-1]["offset"] + 20  # so that no file holds them any more
        starts = [TopicPartition("trimmed", 0, 37), TopicPartition(REPEATED_TOPIC, 0, beyond)]
        for done in self.admin.delete_records(starts).values():
            done.result(DEADLINE_S)

    def commit(self, nth: int) -> None:
        """Offsets with metadata by a consumer without a group; then by a member of one."""
        consumer = Consumer({"bootstrap.servers": self.bootstrap, "group.id": "alone", "enable.auto.commit": False})
        consumer.commit(
            offsets=[TopicPartition("codecs", p, 5 * nth + p, metadata=f"round {nth}, ünï") for p in range(2)],
            asynchronous=False,
        )
        consumer.close()
        member = Consumer(
            {
                "bootstrap.servers": self.bootstrap,
                "group.id": "members",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
            }
        )
        member.subscribe(["stamped", "recompressed"])
        message = member.poll(DEADLINE_S)
        assert message is not None
        assert message.error() is None, message.error()
        member.commit(message=message, asynchronous=False)
        member.close()

    def wait_for_upkeep(self) -> None:
        """Compaction has taken records, retention a beginning."""
        found = wait_for("upkeep", lambda: self._cleaned(), DEADLINE_S, 0.5)
        assert found["compacted"]["partitions"]["0"]["records"][0][0] > 0

    def _cleaned(self) -> dict[str, Any] | None:
        topics: dict[str, Any] = content(self.bootstrap)["topics"]
        compacted, retained = (topics[name]["partitions"]["0"] for name in ("compacted", "retained"))
        gone = compacted["end"] - compacted["start"] - len(compacted["records"])
        return topics if gone > 50 and retained["start"] > 0 else None

    def told(self) -> dict[str, Any]:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        found: Content = content(self.bootstrap)
        for name, topic in found["topics"].items():
            for each in topic["partitions"].values():
                assert name == "compacted" or len(each["records"]) == each["end"] - each["start"], name
        return {"commit": commit.stdout.strip(), "content": found, "repeated": self._repeated}


def make_folders(layout: str, work: Path, target: Path) -> None:
    data, writer = work / layout, Writer(replicas=1)
    broker = Broker(data, {**EAGER, "log.layout": layout})

    def begin(settings: Mapping[str, object]) -> None:
        broker.settings = {**broker.settings, **settings}
        writer.connect(broker.start().bootstrap)

    try:
        begin(EAGER)
        writer.create()
        writer.write_repeated()
        writer.write(0)
        writer.delete()
        writer.commit(0)
        writer.wait_for_upkeep()
        broker.stop()
        begin(EAGER)
        writer.write(1)
        writer.wait_for_upkeep()
        broker.kill()
        begin(CALM)
        writer.write(2)
        writer.commit(2)
        told = writer.told()
        broker.kill()
        keep(target / f"{layout}-killed", {"data": data}, told)
        begin(CALM)
        writer.write(3)
        writer.commit(3)
        told = writer.told()
        assert broker.stop() == 0
        keep(target / f"{layout}-stopped", {"data": data}, told)
    finally:
        broker.kill()


def make_cluster(work: Path, target: Path) -> None:
    writer, settings = Writer(replicas=3), {**EAGER, "broker.lease.ms": 3000}
    cluster = BrokerCluster(work / "cluster", 3, 1, settings)
    cluster.brokers[2].settings["log.layout"] = "shared"
    with cluster:
        first, topics = cluster.brokers[0], {name: partitions for name, (partitions, _) in TOPICS.items()}
        writer.connect(cluster.bootstrap)
        writer.create()
        cluster.wait_in_sync(topics)
        writer.write_repeated()
        writer.write(0)
        writer.delete()
        writer.commit(0)
        writer.wait_for_upkeep()
        first.kill()
        writer.write(1)
        writer.wait_for_upkeep()
        for broker in cluster.brokers[1:]:
            broker.stop()
        for broker in cluster.brokers:
            broker.settings = {**broker.settings, **CALM}
            broker.start()
        cluster.wait_in_sync(topics)
        writer.write(2)
        writer.commit(2)
        cluster.wait_in_sync({**topics, "__consumer_offsets": 2})
        told = writer.told()
        cluster.stop()
        told["etcd"] = etcd_keys(cluster.etcd.nodes[0])
        keep(target / "cluster", {broker.data.name: broker.data for broker in cluster.brokers}, told)


def etcd_keys(node: EtcdNode) -> dict[str, Any]:
    everything = base64.b64encode(b"\0").decode()
    answer = node.ask("/v3/kv/range", {"key": everything, "range_end": everything})
    assert answer is not None
    assert not [found for found in answer["kvs"] if "lease" in found], "a broker's lease has not ended"
    keys = [
        {
            "key": base64.b64decode(found["key"]).decode(),
            "value": base64.b64decode(found.get("value", "")).decode(),
            "created": int(found["create_revision"]),
            "changed": int(found["mod_revision"]),
        }
        for found in answer["kvs"]
    ]
    return {"revision": int(answer["header"]["revision"]), "keys": keys}


def keep(target: Path, folders: Mapping[str, Path], told: dict[str, Any]) -> None:
    with tarfile.open(f"{target}.tar.xz", "w:xz") as archive:
        for name, folder in folders.items():
            archive.add(folder, name)
    Path(f"{target}.json").write_text(json.dumps(told, ensure_ascii=True, sort_keys=True) + "\n")


def main(target: Path, names: list[str]) -> None:
    target.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="old-data-"))
    try:
        for name in names or ["partitioned", "shared", "cluster"]:
            if name == "cluster":
                make_cluster(work, target)
            else:
                make_folders(name, work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
