"""Apache Kafka (KRaft, one node) in the place of Headrace, to see that a test expects what Kafka does.

Only for `pytest --apache-kafka DIR`, where DIR holds the jars that the benchmark downloads.
"""

from __future__ import annotations

import base64
import os
import re
import subprocess
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path

from brokers import DIES_WITH_PARENT, Broker, BrokerFailed, free_port, wait_for

OURS_ALONE = re.compile(r"log\.durability|durability|http\.|sync\.|retention\.check|frame\.|connection")
NAMES = {"frame.max.bytes": "socket.request.max.bytes", "log.max.message.bytes": "message.max.bytes"}


class ApacheKafka(Broker):
    """The same interface, with Kafka's settings for those of ours that Kafka has."""

    def __init__(
        self,
        data: Path,
        settings: Mapping[str, object],
        listen: Iterable[str] = ("127.0.0.1:0",),
        advertise: Iterable[str] = (),
        jars: Path = Path(),
    ) -> None:
        super().__init__(data, settings, listen, advertise)
        self.jars = jars
        self.controller_port = free_port()
        self.logs = data.parent / f"{data.name}.logs"

    def start(self) -> Broker:
        began = time.monotonic()
        listeners = {f"L{index}": given.rpartition("=") for index, given in enumerate(self.listen)}
        addresses = {name: given[2].replace(":0", f":{free_port()}") for name, given in listeners.items()}
        told = dict(addresses)
        for given in self.advertise:
            name, _, address = given.rpartition("=")
            told[next(key for key, listener in listeners.items() if listener[0] == name)] = address
        properties = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@127.0.0.1:{self.controller_port}",
            "controller.listener.names": "CONTROLLER",
            "listeners": ",".join(
                [*(f"{n}://{a}" for n, a in addresses.items()), f"CONTROLLER://127.0.0.1:{self.controller_port}"]
            ),
            "advertised.listeners": ",".join(f"{n}://{a}" for n, a in told.items()),
            "listener.security.protocol.map": ",".join(f"{n}:PLAINTEXT" for n in [*addresses, "CONTROLLER"]),
            "inter.broker.listener.name": next(iter(addresses)),
            "log.dirs": str(self.data),
            "offsets.topic.replication.factor": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "share.coordinator.state.topic.replication.factor": "1",
            "share.coordinator.state.topic.min.isr": "1",
            "offsets.topic.num.partitions": "4",
            "group.min.session.timeout.ms": "1000",
        }
        for name, value in self.settings.items():
            if not OURS_ALONE.match(name) or name in NAMES:
                properties[NAMES.get(name, name)] = str(value).lower() if isinstance(value, bool) else str(value)
        file = self.data.parent / f"{self.data.name}.properties"
        file.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
        self.logs.mkdir(exist_ok=True)
        java = ["java", "-Xmx512m", "-cp", f"{self.jars}/*"]
        if not (self.data / "meta.properties").exists():
            cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
            storage_tool = ["kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(file)]
            subprocess.run([*java, *storage_tool], check=True, capture_output=True)
        with self.errors.open("ab") as errors:
            self.process = subprocess.Popen(
                [*DIES_WITH_PARENT, *java, "kafka.Kafka", str(file)],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                env={**os.environ, "LOG_DIR": str(self.logs)},
            )
        names = ["kafka" + (f".{given[0]}" if given[0] else "") for given in listeners.values()]
        self._keep_ports(dict(zip(names, addresses.values(), strict=True)))
        wait_for("Apache Kafka", self._answers, 60.0, 0.1)
        self.start_s = time.monotonic() - began
        return self

    def _answers(self) -> bool:
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        if self.process is None or self.process.poll() is not None:
            raise BrokerFailed(self.stderr())
        try:
            client = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
            return bool(client.list_topics(timeout=1.0).brokers)
        except KafkaException:
            return False
