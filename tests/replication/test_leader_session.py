"""A leader's end of a link, with its follower in the test's hand: whom it counts, and what it looks at first."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from headrace.errors import CorruptBatch
from headrace.ports.disk import FileSlice
from headrace.ports.network import Part
from headrace.replication import frames, leader_session, streams
from headrace.replication.frames import Frame, Kind, Reason, Stop, Subscribe
from headrace.replication.leader_session import LeaderSession
from headrace.replication.link import Link
from headrace.replication.streams import Stream
from headrace.storage.log import Log, ReadResult
from headrace.storage.scan import WALK_WINDOW_BYTES
from headrace.virtual.disk import VirtualDisk, VirtualFile
from replication.peer import Peer, subscription, with_peer
from replication.scene import Scene
from replication.test_epoch_starts import COMPACTED, LAYOUTS, put, records


def led(count: int = 4, layout: str = "") -> tuple[Scene, Peer]:
    """A leader of so many records, of which a follower holds none."""
    scene, peer = with_peer(layout)
    for nth in range(count):
        scene.produce(b"%d" % nth, acks=1)
    return scene, peer


def end_of(scene: Scene) -> LeaderSession:
    (found,) = [end for end in scene.alive[1].replication._accepted if end.broker == 9]
    return found


def mending(number: int, end: int, held: int) -> bytes:
    return frames.subscribe(Subscribe(number, bytes(16), 0, 0, 0 if end else -1, end, held))


def stops(peer: Peer) -> list[Stop]:
    return [
        frames.read_stop(memoryview(body), Frame(kind, 0, len(body))) for kind, body in peer.frames if kind == Kind.STOP
    ]


def copied(peer: Peer) -> None:
    """The follower tells that it has all."""
    peer.send(subscription(1, 0, -1))
    peer.send(frames.positions([(1, 0, 4, 4, 4, 0)]))


def test_a_link_that_ends_takes_its_streams_with_it() -> None:
    scene, peer = led()
    peer.send(subscription(1, 0, -1))
    end = end_of(scene)
    assert end.under_way_bytes > 0
    peer.channel.abort()
    scene.run(0.1)
    assert end.under_way_bytes == 0
    assert not end._streams
    assert not scene.alive[1].replication._accepted
    assert scene.produce(b"more", acks=1).offset == 4


def test_a_stream_that_ends_has_nothing_more_to_send() -> None:
    scene, peer = led()
    copied(peer)
    end = end_of(scene)
    stream = end._streams[1]
    end._slow[stream] = end._live[stream] = None
    end._end_stream(stream)
    assert not end._slow
    assert not end._live


def test_a_stream_that_waits_for_pages_is_not_sent_from() -> None:
    scene, peer = led()
    copied(peer)
    end = end_of(scene)
    stream = end._streams[1]
    stream.waits_for_pages = True
    end.mark(stream)
    assert not end._live
    stream.waits_for_pages = False
    end.mark(stream)
    assert list(end._live) == [stream]


def test_what_is_being_sent_is_not_sent_from_within() -> None:
    scene, peer = led()
    end = end_of(scene)
    answer = frames.answer(Stop(7, 0, Reason.NOT_LEADER, "not here"))
    end._answers.append(answer)
    end._pumping = True
    end.pump()
    assert end._answers == [answer]
    end._pumping = False
    end.pump()
    scene.run(0.01)
    assert [stop.subscription for stop in stops(peer)] == [7]


def test_no_more_is_under_way_than_the_window_takes() -> None:
    scene, peer = led()
    peer.send(subscription(1, 0, -1))
    end = end_of(scene)
    end._shared.window_bytes = end.under_way_bytes
    peer.frames.clear()
    scene.produce(b"more", acks=1)
    scene.run(0.3)
    assert Kind.APPEND not in peer.kinds()
    peer.send(frames.positions([(1, 0, 4, 4, 4, 0)]))
    assert Kind.APPEND in peer.kinds()


def test_a_subscription_takes_the_place_of_the_one_before() -> None:
    scene, peer = led()
    copied(peer)
    peer.send(subscription(2, 4))
    assert list(end_of(scene)._streams) == [2]
    peer.frames.clear()
    scene.produce(b"more", acks=1)
    scene.run(0.1)
    assert peer.kinds().count(Kind.APPEND) == 1


def test_a_member_that_mends_below_what_is_committed_is_told_to_leave_and_the_set_is_inspected() -> None:
    scene, peer = led()
    copied(peer)
    assert scene.alive[1].partition().high_watermark == 4
    peer.send(mending(2, 1, 4))
    assert [stop.reason for stop in stops(peer)] == [Reason.IN_SYNC]
    scene.run(0.1)
    assert 9 not in scene.keys[0].isr
    assert list(end_of(scene)._streams) == []
    peer.send(mending(3, 1, 4))
    assert peer.kinds()[-1] != Kind.STOP
    assert list(end_of(scene)._streams) == [3]
    peer.channel.send([frames.positions([(3, 0, 4, 4, 4, 0)])])
    scene.run(0.01)
    assert scene.changes[-1].added == (9,), "it is looked at when it has told that it has all"


def test_who_copies_no_more_and_is_no_member_is_forgotten() -> None:
    """What it told last would let it join the set, though nobody knows what it holds by now."""
    scene, peer = led()
    core = scene.alive[1].partition().core
    assert core is not None
    scene.held = []
    copied(peer)
    core.confirmed({1: core.isr[1]}, core.revision + 1)
    peer.channel.send([frames.unsubscribe(1, 0)])
    scene.run(0.01)
    assert 9 not in core.followers


@pytest.mark.parametrize(("end", "held", "looked_at"), [(1, 4, True), (4, 4, False), (2, 9, True)])
def test_what_a_follower_is_about_to_drop_is_read_first(
    end: int, held: int, looked_at: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, peer = led()
    log = scene.alive[1].log()
    read, limits, doubted = type(log).read, [], []

    def noted(each: Log, offset: int, most: int, limit: int, *, warm: bool = False) -> ReadResult:
        if limit <= 4 and most > 1:
            limits.append((offset, limit))
        return read(each, offset, most, limit, warm=warm)

    monkeypatch.setattr(type(log), "read", noted)
    monkeypatch.setattr(type(log), "doubt", lambda _: doubted.append(1))
    peer.send(mending(1, end, held))
    assert limits[:1] == ([(end, 4)] if looked_at else [])
    assert len(doubted) == looked_at


@LAYOUTS
def test_what_compaction_has_taken_of_what_a_follower_drops_needs_no_reading(layout: str) -> None:
    scene = Scene(brokers=(1, 9), layout=layout, topic=COMPACTED | {"min_insync_replicas": 1})
    scene.kill(9)
    scene.elect(1, (1,))
    scene.until_answered(*(put(scene, b"hot", b"%d" % nth * 20) for nth in range(60)))
    scene.run(900)
    left = sorted(records(scene.alive[1]))
    assert left[0] > 20, "little was compacted"
    peer = Peer(scene, 1)
    peer.send(mending(1, 10, 20))
    assert stops(peer) == []
    assert list(end_of(scene)._streams) == [1]


LOGS = {"partitioned": f"/data/orders/orders-0/{0:020d}.log", "shared": f"/data/@commitlog/{0:020d}.log"}


@pytest.mark.parametrize("layout", LOGS)
def test_what_a_follower_is_about_to_drop_is_brought_into_the_page_cache_before_it_is_read(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, peer = with_peer(layout)
    for nth in range(4):
        scene.produce(b"%d" % nth * 200_000, acks=1)
    pread, read_bytes, cold_bytes = VirtualFile.pread, 0, 0

    def noted(file: VirtualFile, count: int, position: int) -> bytes:
        nonlocal read_bytes, cold_bytes
        read_bytes += count
        cold_bytes += 0 if file.in_cache(position, count) else count
        return pread(file, count, position)

    monkeypatch.setattr(VirtualFile, "pread", noted)
    scene.alive[1].disk.evict(LOGS[layout])
    peer.send(mending(1, 1, 4))
    assert read_bytes > 600_000
    assert cold_bytes <= 2 * WALK_WINDOW_BYTES, "no more than it takes to find the place"
    assert peer.kinds()[1] == Kind.START, "it need not ask again"


@pytest.mark.parametrize("asks", ["no more", "anew", "on another link"])
def test_a_follower_that_asks_no_more_is_not_answered_when_the_pages_have_come(
    asks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, peer = led(layout="partitioned")
    disk, waiting = scene.alive[1].disk, []
    monkeypatch.setattr(disk, "read_ahead", lambda _file, _ranges, done: waiting.append(done))
    disk.evict(LOGS["partitioned"])
    peer.send(mending(1, 1, 4))
    match asks:
        case "no more":
            peer.send(frames.unsubscribe(1, 0))
        case "anew":
            peer.send(mending(2, 1, 4))
        case _:
            peer.channel.abort()
            scene.run(0.1)
    assert peer.kinds() == [Kind.HELLO]
    waiting[0]()
    scene.run(0.1)
    assert peer.kinds() == [Kind.HELLO]
    waiting[-1]()
    scene.run(0.1)
    assert (Kind.START in peer.kinds()) == (asks == "anew")


def test_a_follower_drops_nothing_that_its_leader_cannot_read(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, peer = led()
    log = scene.alive[1].log()

    def broken(*_: object, **__: object) -> ReadResult:
        raise CorruptBatch("damaged here")

    monkeypatch.setattr(type(log), "read", broken)
    peer.send(mending(1, 1, 4))
    assert [(stop.subscription, stop.reason) for stop in stops(peer)] == [(1, Reason.UNREADABLE)]
    peer.send(subscription(2, 1))
    assert stops(peer)[-1][:3] == (2, 0, Reason.UNREADABLE)
    assert Kind.START not in peer.kinds(), "a follower that mends would cut its log then"
    assert not end_of(scene)._streams


def test_what_a_follower_is_about_to_drop_is_read_a_piece_each_time_that_it_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leader_session, "INSPECTION_BYTES", 1)
    scene, peer = led()
    for first in (1, 4):
        peer.frames.clear()
        for number in range(first, first + 3):
            peer.send(mending(number, 1, 4))
        assert [(stop.subscription, stop.reason) for stop in stops(peer)] == [
            (first, Reason.INSPECTING),
            (first + 1, Reason.INSPECTING),
        ]
        assert peer.kinds().count(Kind.START) == 1
        assert list(end_of(scene)._streams) == [first + 2]


def inspected(scene: Scene, end: int, held: int, *, warm: bool = True) -> str:
    """How far the leader has read for a follower that would drop what is from there on, in its words."""
    seen = end_of(scene)._inspect(Subscribe(1, bytes(16), 0, 0, 0, end, held), scene.alive[1].partition(), warm=warm)
    return f"{Reason(seen.reason).name} {seen.text.removeprefix('orders-0: ')}" if isinstance(seen, Stop) else seen.name


def test_a_look_goes_on_where_it_stood_and_begins_anew_for_who_asks_from_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_session, "INSPECTION_BYTES", 1)
    scene, _ = led()
    assert inspected(scene, 1, 4) == "INSPECTING read up to offset 2 of 4"
    assert inspected(scene, 2, 4) == "INSPECTING read up to offset 3 of 4"
    assert inspected(scene, 1, 4) == "WHOLE"
    assert inspected(scene, 3, 4) == "WHOLE"
    assert inspected(scene, 0, 4) == "INSPECTING read up to offset 1 of 4"
    assert inspected(scene, 1, 3) == "INSPECTING read up to offset 2 of 3"
    assert inspected(scene, 1, 3) == "WHOLE"
    assert inspected(scene, 1, 9) == "WHOLE", "there is no more here"


def test_a_look_begins_where_the_log_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_session, "INSPECTION_BYTES", 1)
    scene, peer = led()
    copied(peer)
    scene.alive[1].log().delete_before(2)
    assert inspected(scene, 0, 4) == "INSPECTING read up to offset 3 of 4"


def test_a_look_that_the_disk_refuses_for_now_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, _ = led()
    log = scene.alive[1].log()

    def fail(error: Exception) -> None:
        def read(*_: object, **__: object) -> ReadResult:
            raise error

        monkeypatch.setattr(type(log), "read", read)

    fail(OSError(errno.EMFILE, "too many"))
    assert inspected(scene, 1, 4).startswith("INSPECTING ")
    fail(CorruptBatch("damaged"))
    assert inspected(scene, 1, 4) == "UNREADABLE damaged"
    monkeypatch.undo()

    read = FileSlice.read

    def bad_sector(piece: FileSlice) -> bytes:
        if piece.count > streams.HEADS_BYTES:
            raise OSError(errno.EIO, "bad sector")
        return read(piece)

    monkeypatch.setattr(FileSlice, "read", bad_sector)
    monkeypatch.setattr(streams, "READ_WHOLE_BYTES", 0)
    assert inspected(scene, 1, 4).startswith("INSPECTING "), "what was checked before is read too"
    monkeypatch.undo()
    assert inspected(scene, 1, 4) == "WHOLE"


def test_who_asks_for_the_same_again_makes_the_leader_doubt_its_log_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, peer = led()
    doubted: list[int] = []
    monkeypatch.setattr(type(scene.alive[1].log()), "doubt", lambda _: doubted.append(1))
    counts = []
    for number, offset in ((1, 0), (2, 1), (3, 1), (4, 1), (5, 4), (6, 4)):
        peer.send(subscription(number, offset, 0 if offset else -1))
        counts.append(len(doubted))
    assert counts == [0, 0, 1, 1, 1, 1]


def test_positions_count_to_what_was_sent_and_not_beyond_it() -> None:
    scene, peer = led()
    peer.send(subscription(1, 0, -1))
    end = end_of(scene)
    peer.send(frames.positions([(1, 0, 2, 2, 2, 0)]))
    assert scene.alive[1].partition().high_watermark == 2
    peer.send(frames.positions([(1, 0, 4, 4, 4, 0)]))
    assert scene.alive[1].partition().high_watermark == 4
    assert end.under_way_bytes == 0
    peer.send(frames.positions([(1, 0, 5, 5, 5, 0)]))
    assert peer.reason


def test_a_partition_that_is_led_no_more_ends_its_stream() -> None:
    scene, peer = led()
    copied(peer)
    broker = scene.alive[1]
    broker.partitions.follow(broker.log(), 1, 9)
    scene.run(0.1)
    assert [(stop.subscription, stop.reason) for stop in stops(peer)] == [(1, Reason.OLD_EPOCH)]
    assert not end_of(scene)._streams
    assert not peer.reason


def test_a_partition_that_is_led_no_more_ends_a_link_with_bytes_of_it_that_have_not_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They lie in a log that may change from now on."""
    scene, peer = led()
    copied(peer)
    monkeypatch.setattr(Link, "queued_bytes", 1)
    scene.alive[1].partitions.follow(scene.alive[1].log(), 1, 9)
    scene.run(0.1)
    assert peer.reason


def test_a_log_that_cannot_be_read_on_ends_the_stream_and_is_told_as_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, peer = led()
    copied(peer)

    def broken(*_: object, **__: object) -> ReadResult:
        raise CorruptBatch("damaged here")

    monkeypatch.setattr(type(scene.alive[1].log()), "read", broken)
    scene.produce(b"more", acks=1)
    assert list(scene.alive[1].partitions.damaged.values()) == [4]
    scene.run(0.05)
    assert [(stop.subscription, stop.reason) for stop in stops(peer)] == [(1, Reason.UNREADABLE)]
    assert not end_of(scene)._streams


# A follower that catches up, and has a budget for that.


def throttled(monkeypatch: pytest.MonkeyPatch) -> tuple[Scene, Peer]:
    scene, peer = led()
    monkeypatch.setattr(Stream, "is_throttled", True)
    return scene, peer


def test_who_catches_up_gets_nothing_while_the_window_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, peer = throttled(monkeypatch)
    end = end_of(scene)
    window, end._shared.window_bytes = end._shared.window_bytes, 0
    peer.send(subscription(1, 0, -1))
    scene.run(0.3)
    assert Kind.APPEND not in peer.kinds()
    end._shared.window_bytes = window
    scene.run(0.3)
    assert Kind.APPEND in peer.kinds()


def test_who_catches_up_gets_nothing_while_much_is_queued_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, peer = throttled(monkeypatch)
    monkeypatch.setattr(Link, "queued_bytes", leader_session.SLOW_QUEUED_BYTES)
    peer.send(subscription(1, 0, -1))
    scene.run(0.3)
    assert Kind.APPEND not in peer.kinds()
    monkeypatch.setattr(Link, "queued_bytes", leader_session.SLOW_QUEUED_BYTES - 1)
    scene.run(0.3)
    assert Kind.APPEND in peer.kinds()


def test_who_catches_up_hears_of_the_watermark_too(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, peer = throttled(monkeypatch)
    copied(peer)
    scene.run(0.3)
    told = [
        each
        for kind, body in peer.frames
        if kind == Kind.WATERMARKS
        for each in frames.read_watermarks(memoryview(body), Frame(kind, 0, len(body)))
    ]
    assert told == [(1, 0, 4, 0)]


def test_a_stream_that_ends_while_it_catches_up_is_not_sent_from_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, peer = throttled(monkeypatch)
    end = end_of(scene)
    window, end._shared.window_bytes = end._shared.window_bytes, 0
    peer.send(subscription(1, 0, -1))

    def broken(*_: object, **__: object) -> ReadResult:
        raise CorruptBatch("damaged here")

    monkeypatch.setattr(type(scene.alive[1].log()), "read", broken)
    end._shared.window_bytes = window
    scene.run(0.3)
    assert [stop.reason for stop in stops(peer)] == [Reason.UNREADABLE]
    assert not end._slow
    assert not end._live


def test_a_read_that_brings_no_whole_batch_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, peer = led()
    copied(peer)
    monkeypatch.setattr(streams, "whole_batches", lambda _: ([], 0, 4))
    peer.frames.clear()
    scene.produce(b"more", acks=1)
    scene.run(0.05)
    assert Kind.APPEND not in peer.kinds()


def test_small_frames_leave_as_one_and_files_and_large_ones_as_they_are() -> None:
    scene, _ = led()
    most = leader_session.JOINED_MAX_BYTES
    half = bytes(most // 2)
    assert leader_session._joined([half, half]) == [half + half]
    larger: list[Part] = [half, half + b"."]
    assert leader_session._joined(larger) is larger
    alone: list[Part] = [b"small"]
    assert leader_session._joined(alone) is alone
    (piece,) = scene.alive[1].log().read(0, 1000, 4).slices
    mixed: list[Part] = [b"head", piece]
    assert leader_session._joined(mixed) is mixed


# Pages that are not in memory.


def cold(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """No page is in memory, and the test answers when the disk is asked for some."""
    asked: list[Callable[[], None]] = []
    monkeypatch.setattr(VirtualFile, "in_cache", lambda *_: False)
    monkeypatch.setattr(VirtualDisk, "read_ahead", lambda _disk, _file, _ranges, done: asked.append(done))
    return asked


def test_who_catches_up_waits_for_the_disk_once_and_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, peer = led()
    asked = cold(scene, monkeypatch)
    peer.send(subscription(1, 0, -1))
    scene.run(0.3)
    assert (len(asked), peer.kinds().count(Kind.APPEND)) == (1, 0)
    asked[0]()
    scene.run(0.005)
    assert (len(asked), peer.kinds().count(Kind.APPEND)) == (1, 1)


def test_what_the_disk_brings_for_a_stream_that_has_ended_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, peer = led()
    asked = cold(scene, monkeypatch)
    peer.send(subscription(1, 0, -1))
    peer.send(frames.unsubscribe(1, 0))
    asked[0]()
    scene.run(0.3)
    assert Kind.APPEND not in peer.kinds()


def test_what_was_just_written_is_sent_without_asking_whether_it_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, peer = led()
    copied(peer)
    asked = cold(scene, monkeypatch)
    peer.frames.clear()
    scene.produce(b"more", acks=1)
    scene.run(0.005)
    assert (len(asked), peer.kinds().count(Kind.APPEND)) == (0, 1)


@pytest.mark.parametrize("is_cold", [True, False])
def test_what_has_to_be_checked_first_is_sent_when_it_was(is_cold: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    scene, peer = led()
    copied(peer)
    log = scene.alive[1].log()
    read = type(log).read

    def doubtful(each: Log, offset: int, most: int, limit: int, *, warm: bool = False) -> ReadResult:
        found = read(each, offset, most, limit, warm=warm)
        return found if warm else ReadResult((), 0, found.slices[0])

    monkeypatch.setattr(type(log), "read", doubtful)
    asked = cold(scene, monkeypatch) if is_cold else []
    peer.frames.clear()
    scene.produce(b"more", acks=1)
    scene.run(0.005)
    assert peer.kinds().count(Kind.APPEND) == (0 if is_cold else 1)
    for done in asked:
        done()
    scene.run(0.005)
    assert peer.kinds().count(Kind.APPEND) == 1


def test_what_the_disk_brings_for_a_look_that_nobody_waits_for_begins_no_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene, peer = led()
    asked = cold(scene, monkeypatch)
    peer.send(mending(1, 1, 4))
    peer.send(subscription(2, 4))
    end = end_of(scene)
    assert (len(asked), list(end._streams)) == (1, [2])
    asked[0]()
    assert list(end._streams) == [2]
    peer.send(mending(3, 1, 4))
    assert (len(asked), list(end._streams)) == (2, [])
    peer.channel.abort()
    scene.run(0.1)
    asked[1]()
    assert not end._streams


@pytest.mark.parametrize("is_cold", [True, False])
def test_a_log_is_doubted_once_however_often_its_follower_asks(is_cold: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_session, "INSPECTION_BYTES", 1)
    scene, peer = led()
    doubted: list[int] = []
    monkeypatch.setattr(type(scene.alive[1].log()), "doubt", lambda _: doubted.append(1))
    asked = cold(scene, monkeypatch) if is_cold else []
    for number in (1, 2):
        peer.send(mending(number, 1, 4))
        while asked:
            asked.pop()()
        scene.run(0.01)
    assert [stop.reason for stop in stops(peer)] == [Reason.INSPECTING] * 2
    assert len(doubted) == 1


def test_what_has_to_be_checked_is_looked_at_when_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, peer = led()
    log = scene.alive[1].log()
    read, unchecked = type(log).read, log.read(1, 1000, 4).slices[0]
    is_checked = True

    def doubtful(each: Log, offset: int, most: int, limit: int, *, warm: bool = False) -> ReadResult:
        return read(each, offset, most, limit, warm=warm) if warm and is_checked else ReadResult((), 0, unchecked)

    monkeypatch.setattr(type(log), "read", doubtful)
    assert inspected(scene, 1, 4) == "WHOLE"
    end_of(scene)._inspected.clear()
    is_checked = False
    assert inspected(scene, 1, 4) == "INSPECTING read up to offset 1 of 4", "nothing was read"
    end_of(scene)._inspected.clear()
    is_checked = True
    peer.send(mending(1, 1, 4))
    assert stops(peer) == []
    assert list(end_of(scene)._streams) == [1]
