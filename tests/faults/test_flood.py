"""Peers that send faster than the disk, never read, or announce more than they send: memory stays bounded."""

from __future__ import annotations

import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator

import pytest

from brokers import Broker, wait_for
from clients.topics import create_topic
from faults import raw
from faults.load import Load
from proving import proves

MIB = 1 << 20
RECEIVE_TOTAL_BYTES = 32 * MIB
QUEUED_BYTES = 1 * MIB
CONNECTIONS = 24
# What the interpreter's allocator may hold on top of the named buffers, whatever the number of connections.
ALLOCATOR_BYTES = 48 * MIB
PER_CONNECTION_BYTES = 256 << 10
SETTINGS = {
    "receive.buffer.total.bytes": RECEIVE_TOTAL_BYTES,
    "connection.queued.bytes": QUEUED_BYTES,
    "log.durability": "disk",
}
STALLED_AFTER_S = 2.0
DEADLINE_S = 120.0


@pytest.fixture
def flooded(fresh_broker: Callable[..., Broker]) -> Broker:
    broker = fresh_broker(settings=SETTINGS)
    create_topic(broker, "flood", 4, max_message_bytes=8 * MIB)
    create_topic(broker, "quiet")
    return broker


@pytest.fixture
def quiet(flooded: Broker) -> Iterator[Load]:
    """A well-behaved producer on the same broker, which has to get on all the while."""
    with Load(flooded, "quiet", 1) as load:
        load.wait_acknowledged(100)
        yield load
        load.wait_acknowledged(100)


def bound_bytes(idle_bytes: int, connections: int) -> int:
    per_connection = QUEUED_BYTES + PER_CONNECTION_BYTES
    return idle_bytes + RECEIVE_TOTAL_BYTES + connections * per_connection + ALLOCATOR_BYTES


def push(broker: Broker, frame: bytes, connections: int, total_bytes: int) -> tuple[int, int]:
    """Send a frame again and again on every connection, never reading; bytes taken and peak memory.

    Ends when all is sent, or when the broker takes nothing more for a while: it holds them back.
    """
    sockets = [socket.create_connection(broker.host_port) for _ in range(connections)]
    position = dict.fromkeys(sockets, 0)
    view = memoryview(frame)
    taken, peak, last_taken = 0, broker.memory_bytes(), time.monotonic()
    with selectors.DefaultSelector() as selector:
        for connection in sockets:
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_WRITE)
        while taken < total_bytes and time.monotonic() - last_taken < STALLED_AFTER_S:
            for key, _ in selector.select(0.1):
                peer = key.fileobj
                assert isinstance(peer, socket.socket)
                try:
                    count = peer.send(view[position[peer] :])
                except BlockingIOError:
                    continue
                position[peer] = (position[peer] + count) % len(frame)
                taken, last_taken = taken + count, time.monotonic()
            peak = max(peak, broker.memory_bytes())
    assert raw.answers(broker.host_port, DEADLINE_S)
    for connection in sockets:
        connection.close()
    return taken, peak


@proves("L7")
def test_producers_that_never_read_their_answers(
    flooded: Broker, quiet: Load, proof_report: Callable[..., None]
) -> None:
    idle = flooded.memory_bytes()
    frame = raw.produce("flood", 0, raw.record_batch(b"x" * MIB))
    taken, peak = push(flooded, frame, CONNECTIONS, 300 * MIB)
    proof_report(pushed_bytes=taken, idle_bytes=idle, peak_bytes=peak, bound_bytes=bound_bytes(idle, CONNECTIONS))
    assert taken > RECEIVE_TOTAL_BYTES
    assert peak < bound_bytes(idle, CONNECTIONS)
    flooded.check_alive()


@proves("L7")
def test_small_requests_without_end(flooded: Broker, quiet: Load) -> None:
    """Requests in flight are bounded by number as well as by size."""
    idle = flooded.memory_bytes()
    frame = raw.produce("flood", 1, raw.record_batch(b"small"))
    _, peak = push(flooded, frame * 100, CONNECTIONS, 20 * MIB)
    assert peak < bound_bytes(idle, CONNECTIONS)


@proves("L7")
def test_consumers_that_never_read(flooded: Broker, quiet: Load, proof_report: Callable[..., None]) -> None:
    with socket.create_connection(flooded.host_port, DEADLINE_S) as writer:
        for _ in range(16):
            writer.sendall(raw.produce("flood", 2, raw.record_batch(b"x" * (2 * MIB))))
            assert raw.read_frame(writer)
        frame = raw.fetch("flood", 2, 0, 8 * MIB)
        writer.sendall(frame)
        assert len(raw.read_frame(writer)) > 4 * MIB, "one answer is worth holding back"
    idle = flooded.memory_bytes()
    _, peak = push(flooded, frame * 50, CONNECTIONS, 8 * MIB)
    proof_report(idle_bytes=idle, peak_bytes=peak, bound_bytes=bound_bytes(idle, CONNECTIONS))
    assert peak < bound_bytes(idle, CONNECTIONS)


@proves("L7")
def test_frames_that_are_announced_and_never_come(flooded: Broker, quiet: Load) -> None:
    """Memory is given for what has come, not for what a peer says will come."""
    idle = flooded.memory_bytes()
    connections = [socket.create_connection(flooded.host_port) for _ in range(100)]
    start = raw.produce("flood", 3, raw.record_batch(b"x" * 4096))
    announced = struct.pack(">i", 64 * MIB) + start[4:]
    peak = idle
    for connection in connections:
        connection.sendall(announced)
        peak = max(peak, flooded.memory_bytes())
    assert raw.answers(flooded.host_port, DEADLINE_S)
    quiet.wait_acknowledged(1000)
    peak = max(peak, flooded.memory_bytes())
    for connection in connections:
        connection.close()
    assert peak < bound_bytes(idle, len(connections))


@proves("L7")
def test_a_frame_above_the_limit_closes_its_connection_alone(fresh_broker: Callable[..., Broker]) -> None:
    broker = fresh_broker(settings={"frame.max.bytes": MIB})
    with socket.create_connection(broker.host_port, DEADLINE_S) as connection:
        connection.sendall(struct.pack(">i", MIB + 1) + b"\0\0\0\3")
        assert raw.read_frame(connection) == b""
    assert raw.answers(broker.host_port)


@proves("L7")
def test_connections_above_the_limit_are_closed(fresh_broker: Callable[..., Broker]) -> None:
    broker = fresh_broker(settings={"connections.max": 5})
    held = [socket.create_connection(broker.host_port, DEADLINE_S) for _ in range(5)]
    for correlation, connection in enumerate(held):
        connection.sendall(raw.frame(raw.API_VERSIONS, 0, correlation, b""))
        assert raw.read_frame(connection)
    with socket.create_connection(broker.host_port, DEADLINE_S) as one_more:
        assert raw.read_frame(one_more) == b""
    held.pop().close()

    def served() -> bool:
        try:
            return raw.answers(broker.host_port)
        except ConnectionError:
            return False

    wait_for("a place for a new connection", served)
    for connection in held:
        connection.close()
