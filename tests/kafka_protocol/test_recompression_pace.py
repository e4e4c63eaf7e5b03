"""What a connection does while its batches are recompressed: it waits its turn, is held up, and hears of a timeout."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from headrace.records import kernel
from headrace.records.codecs import Codec
from headrace.wire import api as apis
from headrace.wire.codec import decode_response, encode_request, read_response_header, write_request
from headrace.wire.message import Message
from kafka_protocol.test_refused_first_batch import Front
from partitions.held_threads import Threads
from proving import proves

VERSION = 12
REQUEST_TIMED_OUT = 7


class Sender:
    """A peer that sends frames without waiting, to a topic that is stored in zstd."""

    def __init__(self, layout: str, **bounds: int) -> None:
        self.front = Front(layout)
        self.threads = Threads(self.front.led, **bounds)
        self.front.lead(self.front.log(compression_type="zstd"))
        self._numbers = itertools.count(1)
        self.connection = self.front.connection
        self.wire = self.front.wire

    def frame(self, value: bytes, codec: int = Codec.NONE, acks: int = -1, timeout_ms: int = 1000) -> bytes:
        records = bytes(kernel.build([(1_750_000_000_000, None, value, [])], codec))
        data = [Message(name="orders", partition_data=[Message(index=0, records=records)])]
        body = Message(transactional_id=None, acks=acks, timeout_ms=timeout_ms, topic_data=data)
        request = encode_request(apis.PRODUCE, VERSION, body)
        return bytes(write_request(apis.PRODUCE, VERSION, next(self._numbers), "c", request))

    def send(self, *frames: bytes) -> int:
        return self.connection.received(memoryview(bytearray(b"".join(frames))))

    def answers(self) -> list[tuple[int, int]]:
        """Error and base offset of each answer that has left since the last call."""
        self.front.led.clock.run_soon()
        data, self.wire.sent = memoryview(self.wire.sent), b""
        found = []
        while data:
            size = int.from_bytes(data[:4], "big")
            frame, data = data[4 : 4 + size], data[4 + size :]
            _, at = read_response_header(apis.PRODUCE, VERSION, frame)
            answer: Any = decode_response(apis.PRODUCE, VERSION, frame, at)
            row = answer.responses[0].partition_responses[0]
            found.append((row.error_code, row.base_offset))
        return found


@pytest.fixture(params=["partitioned", "shared"])
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@proves("F3")
def test_answers_come_in_the_order_of_the_requests(layout: str) -> None:
    sender = Sender(layout)
    sender.send(sender.frame(b"a"), sender.frame(b"b", Codec.ZSTD), sender.frame(b"c", acks=0), sender.frame(b"d"))
    assert sender.answers() == []
    sender.threads.finish_all()
    assert sender.answers() == [(0, 0), (0, 1), (0, 3)]
    assert sender.front.held() == [b"a", b"b", b"c", b"d"]
    sender.send(sender.frame(b"e", Codec.ZSTD))
    assert sender.answers() == [(0, 4)]


@proves("L7")
def test_a_peer_that_sends_more_than_is_worked_off_is_not_read(layout: str) -> None:
    sender = Sender(layout, queued_bytes=100, queued_most_bytes=10_000)
    frames = [sender.frame(b"%d" % n * 50) for n in range(4)]
    taken = sender.send(*frames)
    assert taken == len(frames[0])
    assert sender.wire.paused
    sender.threads.finish_all()
    assert not sender.wire.paused
    assert sender.answers() == [(0, 0)]
    for frame in frames[1:]:
        assert sender.send(frame) == len(frame)
        sender.threads.finish_all()
    assert sender.answers() == [(0, 1), (0, 2), (0, 3)]


def test_a_timeout_is_told_and_the_batch_may_come_later(layout: str) -> None:
    sender = Sender(layout)
    sender.send(sender.frame(b"slow", timeout_ms=500))
    sender.front.led.clock.advance(0.6)
    assert sender.answers() == [(REQUEST_TIMED_OUT, -1)]
    sender.threads.finish_all()
    assert sender.answers() == []
    assert sender.front.held() == [b"slow"]


def test_a_peer_that_has_gone_leaves_its_batches_to_be_appended(layout: str) -> None:
    sender = Sender(layout)
    sender.send(sender.frame(b"a"), sender.frame(b"b"))
    sender.connection.closed("gone")
    sender.threads.finish_all()
    assert sender.front.held() == [b"a", b"b"]


def test_a_disk_without_room_refuses_what_was_recompressed(layout: str) -> None:
    sender = Sender(layout)
    sender.send(sender.frame(b"a" * 1000))
    sender.front.led.disk.capacity_bytes = 1
    sender.threads.finish_all()
    ((code, offset),) = sender.answers()
    assert (code, offset) == (56, -1)
    assert sender.front.held() == []
