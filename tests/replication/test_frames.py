"""Frames: what is written is read, and what nobody would write is refused before anything is spent on it."""

from __future__ import annotations

import logging
import random

import pytest

from headrace.errors import ProtocolError
from headrace.replication import frames
from headrace.replication.frames import (
    Append,
    Epochs,
    Frame,
    Hello,
    Kind,
    Producers,
    Reason,
    Reset,
    Start,
    Stop,
    Subscribe,
    Truncate,
)
from replication.peer import Peer, at, with_leading_peer, with_peer

BIG = 1 << 62


def head(data: bytes) -> tuple[memoryview, Frame]:
    view = memoryview(data)
    frame = frames.read_head(view, 0, 1 << 20)
    assert frame is not None
    assert frame.end == len(data)
    return view, frame


def test_every_frame_comes_back_as_it_was() -> None:
    hello = Hello("clüster", 7, "run")
    assert frames.read_hello(*head(frames.hello(hello))) == hello
    asked = Subscribe((1 << 32) - 1, bytes(range(16)), 12, 5, -1, BIG, BIG)
    assert frames.read_subscribe(*head(frames.subscribe(asked))) == asked
    assert frames.read_unsubscribe(*head(frames.unsubscribe(3, 4))) == (3, 4)
    assert frames.read_start(*head(frames.answer(Start(1, 2, BIG, 4, 5)))) == Start(1, 2, BIG, 4, 5)
    assert frames.read_truncate(*head(frames.answer(Truncate(1, 2, -1, BIG)))) == Truncate(1, 2, -1, BIG)
    assert frames.read_reset(*head(frames.answer(Reset(1, 2, BIG)))) == Reset(1, 2, BIG)
    stop = Stop(1, 2, Reason.OLD_EPOCH, "because")
    assert frames.read_stop(*head(frames.answer(stop))) == stop
    append = Append(1, 2, 3, 4, 5)
    assert frames.read_append(*head(frames.append_head(append, 4) + b"data")) == append
    positions = [(nth, 1, 2, 3, 4, BIG) for nth in range(1000)]
    assert list(frames.read_positions(*head(frames.positions(positions)))) == positions
    watermarks = [(nth, 1, 2, BIG) for nth in range(1000)]
    assert list(frames.read_watermarks(*head(frames.watermarks(watermarks)))) == watermarks
    for starts in ([], [(0, 0), (3, 0), (7, BIG)], [(nth, nth) for nth in range(frames.EPOCHS_MAX)]):
        assert frames.read_epochs(*head(frames.epochs(Epochs(1, 2, starts)))) == Epochs(1, 2, starts)
    producers = Producers(1, 2, b"snapshot")
    assert frames.read_producers(*head(frames.producers(producers))) == producers
    assert head(frames.PING)[1].kind == Kind.PING


@pytest.mark.parametrize("length", [0, (4 << 20) + 1, (1 << 32) - 1])
def test_a_length_out_of_bounds_is_refused_from_its_head_alone(length: int) -> None:
    with pytest.raises(ProtocolError, match=f"a frame of kind 9 with {length} bytes"):
        frames.read_head(memoryview(frames.HEAD.pack(length, Kind.POSITIONS)), 0, 1 << 30)


@pytest.mark.parametrize(
    "starts", [[(1, 5), (1, 6)], [(2, 5), (1, 6)], [(1, 5), (2, 4)], [(-1, 0)], [(0, -1)], [(0, 0)] * 10_001]
)
def test_epochs_that_do_not_rise_or_are_too_many_are_refused(starts: list[tuple[int, int]]) -> None:
    with pytest.raises(ProtocolError):
        frames.read_epochs(*head(frames.epochs(Epochs(1, 2, starts))))


def test_the_longest_frame_is_taken_and_no_longer_one() -> None:
    most = frames.CONTROL_MAX_BYTES
    assert frames.read_head(memoryview(frames.HEAD.pack(most, Kind.POSITIONS)), 0, 1 << 30) is not None
    assert frames.read_head(memoryview(frames.HEAD.pack(1 << 30, Kind.APPEND)), 0, 1 << 30) is not None
    for length, kind in ((most + 1, Kind.POSITIONS), ((1 << 30) + 1, Kind.APPEND)):
        with pytest.raises(ProtocolError):
            frames.read_head(memoryview(frames.HEAD.pack(length, kind)), 0, 1 << 30)


def test_a_greeting_that_is_none_or_of_another_version_or_cut_anywhere_is_refused() -> None:
    data, frame = head(frames.hello(Hello("c", 7, "run")))
    assert frames.read_hello(data, frame) == Hello("c", 7, "run")
    with pytest.raises(ProtocolError, match="not with HELLO"):
        frames.read_hello(data, frame._replace(kind=Kind.PING))
    for wrong in (frame.body, frame.body + len(frames.MAGIC)):  # the magic, the version
        changed = bytearray(data)
        changed[wrong] ^= 1
        with pytest.raises(ProtocolError, match="the peer speaks"):
            frames.read_hello(memoryview(changed), frame)
    for end in range(frame.body, frame.end):
        with pytest.raises(ProtocolError, match=r"cut short|it has"):
            frames.read_hello(data[:end], frame._replace(end=end))


def test_frames_that_are_cut_anywhere_are_refused() -> None:
    data, frame = head(frames.answer(Stop(1, 2, Reason.UNREADABLE, "why")))
    for end in range(frame.body, frame.end):
        with pytest.raises(ProtocolError):
            frames.read_stop(data[:end], frame._replace(end=end))
    data, frame = head(frames.positions([(1, 2, 3, 4, 5, 6)]))
    for end in range(frame.body + 1, frame.end):
        with pytest.raises(ProtocolError):
            frames.read_positions(data, frame._replace(end=end))


def test_a_frame_has_so_many_entries_and_no_more() -> None:
    entry = (1, 2, 3, 4)
    data, frame = head(frames.watermarks([entry] * frames.ENTRIES_MAX))
    assert len(list(frames.read_watermarks(data, frame))) == frames.ENTRIES_MAX
    with pytest.raises(ProtocolError, match="no whole entries"):
        frames.read_watermarks(*head(frames.watermarks([entry] * (frames.ENTRIES_MAX + 1))))


def test_a_long_reason_is_cut() -> None:
    told = frames.read_stop(*head(frames.answer(Stop(1, 2, Reason.UNREADABLE, "x" * 10_000))))
    assert len(told.text) == frames.TEXT_MAX_BYTES


def mutated(chance: random.Random, data: bytes) -> bytes:
    found = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        match chance.randrange(3):
            case 0:
                found[chance.randrange(len(found))] = chance.randrange(256)
            case 1:
                del found[chance.randrange(len(found)) :]
            case _:
                found += chance.randbytes(chance.randint(1, 20))
        if not found:
            break
    return bytes(found)


@pytest.mark.parametrize("seed", range(40))
def test_no_frame_makes_a_leader_fail(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    chance = random.Random(seed)
    scene, peer = with_peer()
    scene.produce(b"a")
    sent = [
        frames.subscribe(Subscribe(1, bytes(16), 0, 0, -1, 0, 0)),
        frames.positions([(1, 0, 0, 0, 0, 0)]),
        frames.unsubscribe(1, 0),
        frames.PING,
    ]
    for _ in range(10):
        if peer.reason:
            peer = Peer(scene, 1)
        peer.send(mutated(chance, chance.choice(sent)))
    assert not caplog.records
    assert scene.alive[1].partition().high_watermark == 0
    assert scene.produce(b"b", acks=1).offset == 1


@pytest.mark.parametrize("seed", range(40))
def test_no_frame_makes_a_follower_fail(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    chance = random.Random(seed)
    scene, peer, number = with_leading_peer()
    held = scene.alive[1].log()
    batch = at(0)
    sent = [
        frames.answer(Start(number, 3, 0, 0, 0)),
        frames.answer(Truncate(number, 3, 0, 0)),
        frames.answer(Stop(number, 3, Reason.OLD_EPOCH, "text")),
        frames.append_head(Append(number, 3, 0, 9, 0), len(batch)) + batch,
        frames.watermarks([(number, 3, 0, 0)]),
        frames.epochs(Epochs(number, 3, [(0, 0), (2, 5)])),
    ]
    for _ in range(5):
        peer.send(mutated(chance, chance.choice(sent)))
    assert "Traceback" not in caplog.text
    assert not any(record.exc_info for record in caplog.records)
    assert held.end_offset in (0, 1)
    assert held.offline is None
