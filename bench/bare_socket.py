"""The least that receiving can cost: the same Fetch requests, their answers read into one buffer and not looked at.

The requests and the sizes of their answers are learnt in a first pass over the topic; the clock sees a second one, with
two requests unanswered at any time, as a client with room to read ahead has. Records, checksums and Python objects are
what a client adds to this.
"""

import socket
from typing import TYPE_CHECKING

from headrace.client.admin.cluster import Cluster
from headrace.client.admin.fetch import Position, read_answer, request_for
from headrace.client.fetch_requests import FetchLimits
from headrace.ports.network import Address
from headrace.system import pacing
from headrace.wire import api as apis
from headrace.wire.codec import decode_response, encode_request, read_response_header, write_request
from headrace.wire.message import Message

if TYPE_CHECKING:
    from client_turns import Clock, Turn

FETCH_VERSION = 13
UNANSWERED = 2
BUFFER_BYTES = 1 << 20


class BareSocket:
    def __init__(self, address: Address) -> None:
        self._socket = socket.create_connection((address.host, address.port), 30)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pacing.unpace_loopback(self._socket)
        self._buffer = memoryview(bytearray(BUFFER_BYTES))

    def send(self, frame: bytes) -> None:
        self._socket.sendall(frame)

    def whole_answer(self) -> memoryview:
        return memoryview(self._exactly(int.from_bytes(self._exactly(4), "big")))

    def pass_over(self, size: int) -> None:
        while size:
            size -= self._socket.recv_into(self._buffer, min(size, BUFFER_BYTES))

    def _exactly(self, size: int) -> bytearray:
        data, filled = bytearray(size), 0
        while filled < size:
            filled += self._socket.recv_into(memoryview(data)[filled:])
        return data


def receive(turn: "Turn", clock: "Clock", fetch_bytes: int) -> None:
    limits = FetchLimits(partition_max_bytes=fetch_bytes)
    with Cluster(turn.bootstrap) as cluster:
        peer = BareSocket(cluster.leader(turn.topic, 0).address)
        frames, sizes, records = _learn(cluster, peer, turn, limits)
    if records != turn.count:
        raise SystemExit(f"{records} records came, {turn.count} were there")
    clock.start()
    for nth in range(len(frames) + UNANSWERED):
        if nth < len(frames):
            peer.send(frames[nth])
        if nth >= UNANSWERED:
            peer.pass_over(sizes[nth - UNANSWERED])
    clock.stop()


def _learn(cluster: Cluster, peer: BareSocket, turn: "Turn", limits: FetchLimits) -> tuple[list[bytes], list[int], int]:
    at, ended, frames, sizes = dict.fromkeys(range(turn.partitions), 0), set[int](), list[bytes](), list[int]()
    while len(ended) < turn.partitions:
        wanted = [Position(turn.topic, partition, offset) for partition, offset in at.items() if partition not in ended]
        asked = request_for(cluster, wanted, limits).body
        assert isinstance(asked, Message)
        frame = write_request(
            apis.FETCH, FETCH_VERSION, len(frames), "bare", encode_request(apis.FETCH, FETCH_VERSION, asked)
        )
        peer.send(frame)
        answer = peer.whole_answer()
        _, body = read_response_header(apis.FETCH, FETCH_VERSION, answer)
        for found in read_answer(cluster, wanted, decode_response(apis.FETCH, FETCH_VERSION, answer, body)):
            for header, _ in found.whole_batches():
                at[found.position.partition] = header.next_offset
            if at[found.position.partition] >= found.high_watermark:
                ended.add(found.position.partition)
        frames.append(frame)
        sizes.append(4 + len(answer))
    return frames, sizes, sum(at.values())
