"""A Kafka client of the lowest kind: one socket, any API in any version, several requests before the first answer."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable
from typing import Any

from headrace.records import kernel
from headrace.records.batch import batches
from headrace.wire import api as apis
from headrace.wire.codec import decode_response, encode_request, read_response_header, write_request
from headrace.wire.message import Message

NOW_MS = 1_700_000_000_000


class Raw:
    def __init__(self, address: tuple[str, int], timeout_s: float = 20.0) -> None:
        self.socket = socket.create_connection(address, timeout_s)
        self._correlation_id = 0

    def send(self, api_key: int, version: int, **body: Any) -> int:
        self._correlation_id += 1
        encoded = encode_request(api_key, version, Message(**body))
        self.socket.sendall(write_request(api_key, version, self._correlation_id, "raw", encoded))
        return self._correlation_id

    def receive(self, api_key: int, version: int) -> tuple[int, Any]:
        """(correlation id, answer) of the next frame, read as that API and version."""
        frame = self.frame()
        correlation_id, pos = read_response_header(api_key, version, frame)
        return correlation_id, decode_response(api_key, version, frame, pos)

    def frame(self) -> memoryview:
        (size,) = struct.unpack(">i", self._exactly(4))
        return memoryview(self._exactly(size))

    def call(self, api_key: int, version: int, **body: Any) -> Any:
        sent = self.send(api_key, version, **body)
        received, answer = self.receive(api_key, version)
        assert received == sent
        return answer

    def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            read = self.socket.recv(count - len(data))
            if not read:
                raise EOFError(f"the broker closed the connection after {len(data)} of {count} bytes")
            data += read
        return bytes(data)

    def closed_by_broker(self) -> bool:
        """Whether the broker ends the connection, after whatever it still sends."""
        try:
            while self.socket.recv(1 << 16):
                pass
        except ConnectionError:
            return True
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        self.socket.close()

    # The requests that most tests need.

    def create(self, topic: str, partitions: int = 1, **configs: str) -> None:
        created = self.call(
            apis.CREATE_TOPICS,
            7,
            topics=[
                Message(
                    name=topic,
                    num_partitions=partitions,
                    replication_factor=1,
                    assignments=[],
                    configs=[Message(name=name.replace("_", "."), value=value) for name, value in configs.items()],
                )
            ],
            timeout_ms=5000,
            validate_only=False,
        )
        assert created.topics[0].error_code == 0, created.topics[0].error_message

    def send_produce(self, topic: str, batch: bytes, acks: int = 1, partition: int = 0, version: int = 9) -> int:
        return self.send(
            apis.PRODUCE,
            version,
            transactional_id=None,
            acks=acks,
            timeout_ms=10_000,
            topic_data=[Message(name=topic, partition_data=[Message(index=partition, records=batch)])],
        )

    def produce(self, topic: str, batch: bytes, acks: int = 1, partition: int = 0, version: int = 9) -> Any:
        """The answer for the one partition."""
        self.send_produce(topic, batch, acks, partition, version)
        return self.receive(apis.PRODUCE, version)[1].responses[0].partition_responses[0]

    def send_fetch(self, topic: str, offset: int = 0, wait_ms: int = 0, min_bytes: int = 1, **more: Any) -> int:
        partition = Message(
            partition=more.pop("partition", 0),
            current_leader_epoch=more.pop("epoch", -1),
            fetch_offset=offset,
            last_fetched_epoch=-1,
            log_start_offset=-1,
            partition_max_bytes=more.pop("partition_max_bytes", 1 << 20),
        )
        return self.send(
            apis.FETCH,
            12,
            replica_id=-1,
            max_wait_ms=wait_ms,
            min_bytes=min_bytes,
            max_bytes=more.pop("max_bytes", 1 << 24),
            isolation_level=0,
            session_id=more.pop("session_id", 0),
            session_epoch=more.pop("session_epoch", -1),
            topics=[Message(topic=topic, partitions=[partition])],
            forgotten_topics_data=[],
            rack_id="",
        )

    def fetch(self, topic: str, offset: int = 0, **more: Any) -> Any:
        """The answer for the one partition."""
        self.send_fetch(topic, offset, **more)
        return self.receive(apis.FETCH, 12)[1].responses[0].partitions[0]


def values(records: bytes | memoryview) -> list[bytes | None]:
    """Of all records in what a fetch has answered."""
    return [record.value for _, view in batches(memoryview(records)) for record in kernel.records(view)]


def batch_of(values: Iterable[bytes], **producer: int) -> bytes:
    return bytes(kernel.build([(NOW_MS, None, value, ()) for value in values], **producer))
