"""A broker that is only a link in the test's hand, as follower of a real leader or as leader of a real follower."""

from __future__ import annotations

import struct

from headrace.ports.network import Address, Channel
from headrace.replication import frames
from headrace.replication.frames import Frame, Hello, Kind, Start, Subscribe
from partitions.led import batch
from replication.scene import CLUSTER, Scene


class Peer:
    """A broker that is only a link, and says what the test wants."""

    def __init__(self, scene: Scene, to: int | None, broker: int = 9, cluster: str = CLUSTER) -> None:
        self.scene = scene
        self.hello = Hello(cluster, broker, f"run-{broker}")
        self.frames: list[tuple[int, bytes]] = []
        self.reason = ""
        self.channel: Channel
        host = scene.network.host(f"b{broker}")
        if to is None:
            self.address = host.listen(Address(f"b{broker}", 0), lambda: self).address
        else:
            host.connect(scene.alive[to].address, self)
        scene.run(0.1)

    def opened(self, channel: Channel) -> None:
        self.channel = channel
        channel.send([frames.hello(self.hello)])

    def received(self, data: memoryview) -> int:
        used = 0
        while (frame := frames.read_head(data, used, 1 << 30)) is not None and frame.end <= len(data):
            self.frames.append((frame.kind, bytes(data[frame.body : frame.end])))
            used = frame.end
        return used

    def drained(self) -> None:
        pass

    def closed(self, reason: str) -> None:
        self.reason = reason

    def send(self, data: bytes) -> None:
        self.channel.send([data])
        self.scene.run(0.1)

    def kinds(self) -> list[int]:
        return [kind for kind, _ in self.frames if kind != Kind.PING]


def subscription(number: int, end: int, last_epoch: int = 0, epoch: int = 0) -> bytes:
    return frames.subscribe(Subscribe(number, bytes(16), 0, epoch, last_epoch, end, end))


def with_peer(layout: str = "") -> tuple[Scene, Peer]:
    """A leader whose second replica is a peer in the test's hand."""
    scene = Scene(brokers=(1, 9), layout=layout)
    scene.kill(9)
    leader = scene.elect(1, (1,))
    scene.keys[0].isr[9] = "run-9"
    scene.keys[0].revision += 1
    scene.alive[1].partitions.confirmed(leader, scene.keys[0].isr, scene.keys[0].revision)
    return scene, Peer(scene, 1)


def with_leading_peer(layout: str = "") -> tuple[Scene, Peer, int]:
    """A follower with an empty log whose leader is a peer in the test's hand; and its subscription."""
    scene = Scene(brokers=(1,), layout=layout)
    peer = Peer(scene, None)
    broker = scene.alive[1]
    broker.replication.peers({9: (peer.address, "run-9")})
    broker.replication.follow(broker.partitions.follow(broker.log(), 3, 9), 9, 3)
    scene.run(0.1)
    kind, body = peer.frames[-1]
    asked = frames.read_subscribe(memoryview(body), Frame(kind, 0, len(body)))
    assert asked == Subscribe(asked.subscription, bytes(16), 0, 3, -1, 0, 0)
    peer.send(frames.answer(Start(asked.subscription, 3, 0, 0, 0)))
    return scene, peer, asked.subscription


def appended(subscription: int, from_offset: int, *made: bytearray, epoch: int = 3) -> bytes:
    data = b"".join(made)
    return frames.append_head(frames.Append(subscription, epoch, from_offset, 9, 0), len(data)) + data


def at(offset: int, epoch: int = 3) -> bytearray:
    made = batch(b"value")
    struct.pack_into(">q", made, 0, offset)
    struct.pack_into(">i", made, 12, epoch)
    return made
