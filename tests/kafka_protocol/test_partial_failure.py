"""A produce to several partitions is answered with what is true of each, also when a log fails in that very turn."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.kafka.connection import Connection
from headrace.kafka.dispatch import FRAME_HANDLERS, HANDLERS
from headrace.metrics import Metrics
from headrace.settings.values import load
from headrace.storage.folder import PARTITIONED
from headrace.wire import api as apis
from headrace.wire.codec import decode_response, encode_request, read_response_header, write_request
from headrace.wire.message import Message
from kafka_protocol.raw import batch_of
from kafka_protocol.test_request_boundary import Wire
from partitions.led import Led
from proving import proves

VERSION = 9
STORAGE_ERROR = 56
NONE = 0


class Front:
    """A connection to three partitions on a disk that fails when told."""

    def __init__(self, durability: str) -> None:
        self.led = Led(PARTITIONED)  # where one log can fail alone
        self.partitions = [self.led.lead(index=index, durability=durability) for index in range(3)]
        services: Any = SimpleNamespace(
            clock=self.led.clock,
            disk=self.led.disk,
            partitions=self.led.partitions,
            metrics=Metrics(),
            settings=load(environment={}),
            connections=set(),
            view=SimpleNamespace(image=SimpleNamespace(topics={}, topics_by_id={})),
        )
        self.wire = Wire()
        self._numbers = itertools.count(1)
        self._connection = Connection(services, "default", HANDLERS, FRAME_HANDLERS)
        self._connection.opened(self.wire)

    def request(self, acks: int, *indexes: int) -> bytes:
        parts = [Message(index=index, records=batch_of([b"value %d" % index])) for index in indexes]
        body = Message(
            transactional_id=None,
            acks=acks,
            timeout_ms=1000,
            topic_data=[Message(name="orders", partition_data=parts)],
        )
        return write_request(
            apis.PRODUCE, VERSION, next(self._numbers), "c", encode_request(apis.PRODUCE, VERSION, body)
        )

    def turn(self, *requests: bytes) -> list[list[tuple[int, int]]]:
        """Everything arrives in one read; (error code, base offset) of each row of each answer."""
        read = bytearray(b"".join(requests))
        assert self._connection.received(memoryview(read)) == len(read)
        self.led.clock.run_soon()
        sent, answers = memoryview(self.wire.sent), []
        self.wire.sent = b""
        while sent:
            length = int.from_bytes(sent[:4], "big")
            _, at = read_response_header(apis.PRODUCE, VERSION, sent[4 : 4 + length])
            answer = decode_response(apis.PRODUCE, VERSION, sent[4 : 4 + length], at)
            rows = answer.responses[0].partition_responses
            answers.append([(row.error_code, row.base_offset) for row in rows])
            sent = sent[4 + length :]
        return answers


@proves("G8")
@pytest.mark.parametrize("durability", ["os", "disk"])
@pytest.mark.parametrize("acks", [1, -1])
def test_a_log_that_fails_in_the_turn_fails_its_own_rows_only(durability: str, acks: int) -> None:
    front = Front(durability)
    assert front.turn(front.request(acks, 0, 1, 2)) == [[(NONE, 0), (NONE, 0), (NONE, 0)]]
    front.led.disk.fail_write(front.led.log_path(front.partitions[1].log))
    answers = front.turn(front.request(acks, 0, 1, 2), front.request(acks, 1), front.request(acks, 2, 1, 0))
    assert answers == [
        [(NONE, 1), (STORAGE_ERROR, -1), (NONE, 1)],
        [(STORAGE_ERROR, -1)],
        [(NONE, 2), (STORAGE_ERROR, -1), (NONE, 2)],
    ]
    assert [partition.log.offline is None for partition in front.partitions] == [True, False, True]
    assert [partition.log.end_offset for partition in front.partitions] == [3, 1, 3]
    assert front.turn(front.request(acks, 1, 2)) == [[(STORAGE_ERROR, -1), (NONE, 3)]]


@proves("G8")
def test_a_log_whose_sync_fails_is_told_to_whoever_waited_for_it() -> None:
    front = Front("disk")
    front.turn(front.request(1, 0, 1, 2))
    front.led.disk.fail_sync(front.led.log_path(front.partitions[1].log))
    answers = front.turn(front.request(1, 0, 1, 2), front.request(-1, 1))
    assert answers == [[(NONE, 1), (STORAGE_ERROR, -1), (NONE, 1)], [(STORAGE_ERROR, -1)]]
    assert [partition.log.offline is None for partition in front.partitions] == [True, False, True]
