"""Random histories of three brokers: cuts, resets, kills, power cuts, elections told to some and not to others.

The test is a careful controller: it elects members of the in-sync set only, and carries a restarted one over because
its disk kept what counted. Then no acknowledged record may be missing, and all replicas must be equal in the end.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from headrace.replication.replication import ReplicationSettings
from partitions.led import Outcome
from proving import proves
from replication.scene import Scene

PAIRS = (("b1", "b2"), ("b1", "b3"), ("b2", "b3"))
STEPS = 60
PAUSES = (0.0, 0.001, 0.01, 0.3, 1.0, 3.0)


class History:
    def __init__(self, seed: int) -> None:
        chance = self.chance = random.Random(seed)
        self.durability = chance.choice(("os", "disk"))
        self.sent: list[tuple[bytes, Outcome]] = []
        self.watermarks: dict[tuple[int, str, int], int] = {}
        self.scene = Scene(
            seed=seed,
            layout=chance.choice(("partitioned", "shared")),
            topic={
                "durability": self.durability,
                "min_insync_replicas": 2,
                "segment_bytes": chance.choice((2000, 1 << 20)),
            },
            sync_seconds=lambda: chance.choice((0.0, 0.005, 0.2)),
            replication=ReplicationSettings(
                window_bytes=chance.choice((1 << 12, 1 << 20)), lag_time_max_ms=2000, link_timeout_ms=1000
            ),
        )
        self.scene.elect(1, (1, 2, 3))

    def run(self) -> int:
        """How many records were acknowledged; all of them are there."""
        scene, chance = self.scene, self.chance
        network = scene.network
        faults: list[tuple[float, Callable[[], None]]] = [
            (0.12, lambda: network.cut(*chance.choice(PAIRS))),
            (0.18, lambda: network.heal(*chance.choice(PAIRS))),
            (0.06, lambda: network.reset(*chance.choice(PAIRS))),
            (0.06, self.kill),
            (0.08, self.restart),
            (0.10, self.elect),
            (0.40, self.produce),
        ]
        for _ in range(STEPS):
            chance.choices([act for _, act in faults], [weight for weight, _ in faults])[0]()
            scene.run(chance.choice(PAUSES))
            if chance.random() < 0.5:
                self.tell_all()
            self.check_watermarks()
        return self.finish()

    def kill(self) -> None:
        scene, chance = self.scene, self.chance
        if len(scene.alive) == 3:
            loses_power = self.durability == "disk" and chance.random() < 0.5
            power = chance.randrange(1000) if loses_power else None
            scene.kill(chance.choice((1, 2, 3)), power=power, silent=chance.random() < 0.5)

    def restart(self) -> None:
        scene = self.scene
        for number in [number for number in scene.brokers if number not in scene.alive]:
            broker, key = scene.start(number), scene.keys[0]
            if number in key.isr:
                key.isr[number], key.revision = broker.incarnation, key.revision + 1
                key.epoch += key.leader == number
            self.tell_all()

    def elect(self) -> None:
        """Not everybody hears of it at once."""
        scene, key = self.scene, self.scene.keys[0]
        valid = [n for n, run in key.isr.items() if n in scene.alive and scene.alive[n].incarnation == run]
        if valid:
            key.leader, key.epoch, key.revision = self.chance.choice(valid), key.epoch + 1, key.revision + 1
            for number in list(scene.alive):
                if self.chance.random() < 0.8:
                    scene.tell(number)

    def tell_all(self) -> None:
        for number in list(self.scene.alive):
            self.scene.tell(number)

    def produce(self) -> None:
        """To whoever thinks that it leads."""
        for _ in range(self.chance.randint(1, 5)):
            number = self.chance.choice(list(self.scene.alive))
            partition = self.scene.alive[number].partitions.find("orders", 0)
            if partition is not None:
                value = b"%d." % len(self.sent) * self.chance.choice((1, 50))
                self.sent.append((value, self.scene.produce(value, to=number, timeout_ms=60_000)))

    def check_watermarks(self) -> None:
        for number, broker in self.scene.alive.items():
            partition = broker.partitions.find_replica("orders", 0)
            if partition is not None:
                known = number, broker.incarnation, partition.epoch
                assert partition.high_watermark >= self.watermarks.get(known, 0), "the watermark went back"
                self.watermarks[known] = partition.high_watermark

    def finish(self) -> int:
        scene = self.scene
        for pair in PAIRS:
            scene.network.heal(*pair)
        self.restart()
        self.elect()
        self.tell_all()
        scene.until("all in sync", lambda: len(scene.keys[0].isr) == 3, 60)
        last = scene.produce(b"last")
        scene.until_answered(last)
        assert last.offset >= 0
        scene.settle()
        held = scene.alive[1].values()
        acknowledged = [(value, out.calls[0][1]) for value, out in self.sent if out.calls and out.calls[0][0] is None]
        for value, offset in acknowledged:
            assert held[offset] == value, f"acknowledged at {offset} and not there"
        return len(acknowledged)


@proves("G2", "F5")
@pytest.mark.parametrize("seed", range(12))
def test_nothing_acknowledged_is_lost_and_all_replicas_are_equal(seed: int) -> None:
    History(seed).run()


@proves("G2", "F5")
@pytest.mark.long
def test_many_histories(proof_report: Callable[..., None]) -> None:
    acknowledged = sum(History(seed).run() for seed in range(100, 400))
    proof_report(histories=300, acknowledged=acknowledged, lost=0)
