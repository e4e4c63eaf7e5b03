"""Where leader epochs began travels with the copy: compaction must not undo truncation by epochs (KIP-101)."""

from __future__ import annotations

import random

import pytest

from headrace.records import kernel
from headrace.records.batch import batches
from headrace.replication import frames
from headrace.replication.frames import Epochs, Kind
from headrace.replication.streams import Stream
from partitions.led import Outcome
from proving import proves
from replication.peer import appended, at, subscription, with_leading_peer, with_peer
from replication.scene import Broker, Scene

LAYOUTS = pytest.mark.parametrize("layout", ["partitioned", "shared"])
COMPACTED: dict[str, object] = {
    "cleanup_policy": "compact",
    "segment_bytes": 1024,
    "min_cleanable_dirty_ratio": 0.0,
    "durability": "disk",
    "index_interval_bytes": 100,
    "min_insync_replicas": 2,
    "segment_ms": 1000,
}


def put(scene: Scene, key: bytes, value: bytes, to: int | None = None) -> Outcome:
    broker = scene.alive[scene.keys[0].leader if to is None else to]
    outcome = Outcome()
    built = kernel.build([(scene.clock.wall_ms(), key, value, [])])
    broker.partitions.submit(broker.partition(), bytearray(built), -1, 30_000, outcome)
    broker.partitions.end_turn()
    return outcome


def records(broker: Broker) -> dict[int, bytes | None]:
    """Keys by offsets."""
    held = memoryview(broker.content())
    return {record.offset: record.key for _, view in batches(held) for record in kernel.records(view)}


@proves("F7")
@LAYOUTS
def test_a_replica_that_copied_a_compacted_log_makes_others_cut_what_was_never_committed(layout: str) -> None:
    scene = Scene(brokers=(1, 2, 3, 4), layout=layout, topic=COMPACTED)
    scene.kill(4)
    scene.elect(1, (1, 2, 3))
    for nth in range(10):
        scene.until_answered(put(scene, b"base%d" % nth, b"v" * 20))
    scene.settle(1, 2, 3)
    for other in ("b2", "b3"):
        scene.network.cut("b1", other)
    lost = [put(scene, b"phantom%d" % nth, b"never committed", to=1) for nth in range(5)]
    scene.run(0.5)
    assert all(outcome.waiting for outcome in lost)
    scene.kill(1)
    for other in ("b2", "b3"):
        scene.network.heal("b1", other)
    scene.elect(2, (2, 3))
    for nth in range(60):
        scene.until_answered(put(scene, b"hot", b"%d" % nth * 10))
    scene.settle(2, 3)
    scene.run(900)
    assert len(records(scene.alive[2])) < 40, "compacted"
    scene.start(4)
    scene.elect(2, (2, 3))
    scene.until("the join of 4", lambda: 4 in scene.keys[0].isr, 60)
    assert scene.alive[4].log().epoch_starts() == scene.alive[2].log().epoch_starts() == [(0, 0), (1, 10)]
    scene.elect(4, (4, 2, 3))
    scene.start(1)
    scene.tell(1)
    scene.until("the join of 1", lambda: 1 in scene.keys[0].isr, 60)
    assert not [key for key in records(scene.alive[1]).values() if key is not None and key.startswith(b"phantom")]


@proves("F7")
@LAYOUTS
@pytest.mark.parametrize("seed", range(6))
def test_all_replicas_know_where_epochs_began_over_any_history(layout: str, seed: int) -> None:
    """Compaction, elections, truncations of what nobody committed, copies from the beginning, stops."""
    chance = random.Random(seed)
    scene = Scene(layout=layout, seed=seed, topic=COMPACTED | {"min_insync_replicas": 1})
    scene.elect(1, (1, 2, 3))
    began: dict[int, int] = {}

    def produce(count: int, to: int | None = None) -> list[Outcome]:
        leading = scene.alive[scene.keys[0].leader if to is None else to]
        began.setdefault(leading.partition().epoch, leading.log().end_offset)
        outcomes = [put(scene, b"%d" % chance.randrange(3), bytes(chance.randrange(90)), to) for _ in range(count)]
        scene.run(0.1)
        return outcomes

    def replace_disk(number: int) -> None:
        """It copies everything anew, of which little is left."""
        scene.kill(number)
        scene.elect(leader, [other for other in (1, 2, 3) if other != number])
        scene.disks[number].remove_folder("/data")
        scene.disks[number].make_folder("/data")
        scene.disks[number].sync_folder("/")
        scene.start(number)
        scene.tell(number)
        scene.until("the join", lambda: len(scene.keys[0].isr) == 3, 60)

    for _ in range(8):
        scene.until("all in sync", lambda: len(scene.keys[0].isr) == 3, 60)
        leader = scene.keys[0].leader
        scene.until_answered(*produce(chance.randrange(1, 30)))
        match chance.choice(("compact", "elect", "truncate", "copy", "restart")):
            case "compact":
                scene.run(chance.choice((20, 700)))
            case "elect":
                scene.elect(chance.choice((1, 2, 3)), (1, 2, 3))
            case "truncate":
                others = [number for number in (1, 2, 3) if number != leader]
                for other in others:
                    scene.network.cut(f"b{leader}", f"b{other}")
                epoch = scene.keys[0].epoch
                produce(chance.randrange(1, 5), leader)
                for other in others:
                    scene.network.heal(f"b{leader}", f"b{other}")
                if scene.alive[others[0]].log().end_offset <= began[epoch]:
                    del began[epoch]
                scene.elect(others[0], (1, 2, 3))
            case "copy":
                replace_disk(chance.choice([number for number in (1, 2, 3) if number != leader]))
            case _:
                number = chance.choice((1, 2, 3))
                scene.kill(number)
                scene.elect(next(iter(scene.alive)), tuple(scene.alive))
                scene.run(1)
                scene.start(number)
                scene.tell(number)
    scene.until("all in sync", lambda: len(scene.keys[0].isr) == 3, 60)
    scene.until_answered(*produce(1))
    scene.run(10)
    for broker in scene.alive.values():
        assert list(broker.log().epoch_starts()) == sorted(began.items()), f"on broker {broker.number}"


def told_epochs(peer_frames: list[tuple[int, bytes]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for kind, body in peer_frames:
        if kind == Kind.EPOCHS:
            found += frames.read_epochs(memoryview(body), frames.Frame(kind, 0, len(body))).starts
    return found


def test_a_follower_is_told_the_epochs_that_it_does_not_have_once_and_before_their_records() -> None:
    scene, peer = with_peer()
    scene.produce(b"a", acks=1)
    peer.send(subscription(1, 0, -1))
    assert peer.kinds() == [Kind.HELLO, Kind.START, Kind.EPOCHS, Kind.APPEND]
    assert told_epochs(peer.frames) == [(0, 0)]
    scene.produce(b"b", acks=1)
    peer.send(subscription(2, 1, 0))
    assert told_epochs(peer.frames) == [(0, 0)]


def test_of_many_epochs_the_newest_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(brokers=(1,))
    leader = scene.elect(1, (1,))
    held = [(nth, nth) for nth in range(frames.EPOCHS_MAX + 5)]
    monkeypatch.setattr(type(leader.log), "epoch_starts", lambda _: held)
    monkeypatch.setattr(type(leader.log), "last_epoch", lambda _: held[-1][0])
    assert leader.core is not None
    follower = leader.core.subscribed(2, "run-2", 0, 0.0)
    stream = Stream(frames.Start(1, 0, 0, 0, 0), 2, leader, leader.core, follower, -1)
    assert stream.epochs_before(len(held)) == held[5:]
    assert not stream.epochs_before(len(held) + 1)


@LAYOUTS
def test_epochs_of_another_subscription_are_not_taken(layout: str) -> None:
    scene, peer, number = with_leading_peer(layout)
    peer.send(frames.epochs(Epochs(number + 1, 3, [(0, 0), (3, 2)])))
    peer.send(frames.epochs(Epochs(number, 2, [(0, 0), (3, 2)])))
    peer.send(appended(number, 0, at(5)))
    assert scene.alive[1].log().epoch_starts() == [(3, 0)]
    peer.send(frames.epochs(Epochs(number, 3, [(4, 7)])))
    peer.send(appended(number, 6, at(9, 4)))
    assert scene.alive[1].log().epoch_starts() == [(3, 0), (4, 7)]
    assert not peer.reason
