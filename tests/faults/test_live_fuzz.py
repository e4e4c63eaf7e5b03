"""Broken frames at a live socket: no crash, no hang, no growth of memory, and nobody else notices."""

from __future__ import annotations

import contextlib
import itertools
import re
import socket
import struct
from collections import Counter
from collections.abc import Callable

import pytest

from brokers import Broker
from clients.topics import create_topic
from faults import raw
from faults.load import Load
from proving import proves
from wire.mutate import Mutator
from wire.samples import TOPICS, valid_request_frames

DEADLINE_S = 120.0
ANSWER_S = 0.05
WARM_UP = 500
GROWTH_MAX_BYTES = 48 << 20
# Mutants of valid requests do create topics; what they may create is bounded.
SETTINGS = {"auto.create.topics.enable": False, "partitions.max": 400, "offsets.topic.partitions": 4}


def outcome_of(address: tuple[str, int], mutant: bytes) -> str:
    """Send a mutant and no more; the broker has to answer or close, and may not wait for ever."""
    received = 0
    with socket.create_connection(address, ANSWER_S) as connection:
        try:
            connection.sendall(mutant + raw.frame(raw.API_VERSIONS, 0, 1, b""))
            # Some mutants ask for a wait, or announce more than they send: those get the end of the stream.
            with contextlib.suppress(TimeoutError):
                received = len(connection.recv(65536))
            connection.settimeout(DEADLINE_S)
            connection.shutdown(socket.SHUT_WR)
            while read := connection.recv(65536):
                received += len(read)
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
        return "answered" if received else "closed"


def tracebacks(broker: Broker) -> list[str]:
    """Every error that the broker did not expect, once each."""
    said = broker.errors.read_text()
    return sorted(set(re.findall(r"Traceback .*?\n(?= *\w+(?:\.\w+)*:).*?\n", said, re.DOTALL)))


def fuzz(broker: Broker, seed: int, mutants: int) -> dict[str, object]:
    for name in TOPICS:
        create_topic(broker, name, 4)
    create_topic(broker, "load", 2)
    frames = [frame for frame in valid_request_frames(seed) if frame.api_key != raw.API_VERSIONS or frame.version]
    mutator = Mutator(seed, [frame.data for frame in frames])
    outcomes: Counter[str] = Counter()
    by_version: dict[tuple[int, int], Counter[str]] = {}
    warm_bytes = 0
    with Load(broker, "load", 2) as load:
        for number, valid in zip(range(mutants), itertools.cycle(frames), strict=False):
            mutant = mutator.frame(valid.data)
            try:
                outcome = outcome_of(broker.host_port, mutant)
            except TimeoutError:
                pytest.fail(f"API {valid.api_key} version {valid.version}: no answer and no close to {mutant.hex()}")
            outcomes[outcome] += 1
            by_version.setdefault((valid.api_key, valid.version), Counter())[outcome] += 1
            if number == WARM_UP:
                warm_bytes = broker.memory_bytes()
            if number % 100 == 0:
                broker.check_alive()
                load.wait_acknowledged(1)
        load.wait_acknowledged(1)
        load.finish()
    growth = broker.memory_bytes() - warm_bytes
    assert growth < GROWTH_MAX_BYTES, f"memory grew by {growth} bytes over {mutants} mutants"
    assert tracebacks(broker) == []
    return {
        "mutants": mutants,
        "versions": len(by_version),
        **outcomes,
        "least_mutants_of_a_version": min(count.total() for count in by_version.values()),
        "memory_growth_bytes": growth,
    }


@proves("G4", "L7")
def test_two_thousand_broken_frames(fresh_broker: Callable[..., Broker], seed: int) -> None:
    print(fuzz(fresh_broker(settings=SETTINGS), seed, 2000))


@pytest.mark.long
def test_broken_frames_for_long(
    fresh_broker: Callable[..., Broker], seed: int, proof_report: Callable[..., None]
) -> None:
    proof_report(**fuzz(fresh_broker(settings=SETTINGS), seed, 25_000))


@proves("L7")
@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64,
        struct.pack(">i", -1),
        struct.pack(">i", 0),
        struct.pack(">ihhi", 10, 9999, 0, 1) + b"\xff\xff",
    ],
    ids=["http", "tls", "negative length", "empty frame", "unknown api"],
)
def test_other_languages_are_refused(broker: Broker, sent: bytes) -> None:
    with socket.create_connection(broker.host_port, DEADLINE_S) as connection:
        connection.sendall(sent)
        with contextlib.suppress(ConnectionError):
            assert raw.read_frame(connection) == b""
    assert raw.answers(broker.host_port)
