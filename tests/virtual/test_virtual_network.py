"""What the network in memory does to processes that pause and die, and to what is under way; its contract is in
tests/system."""

from __future__ import annotations

import asyncio

import pytest

from headrace.ports.network import Address
from headrace.virtual.loop import VirtualLoop
from headrace.virtual.network import VirtualHost, VirtualNetwork
from headrace.virtual.process import Process
from system.joined import Recorder

PORT = 9000


class Wired:
    """Hosts with a process each; every process listens, and notes who called."""

    def __init__(self, *names: str, seed: int = 1) -> None:
        self.loop = VirtualLoop()
        self.network = VirtualNetwork(self.loop.clock, seed)
        self.processes: dict[str, Process] = {}
        self.hosts: dict[str, VirtualHost] = {}
        self.called: dict[str, list[Recorder]] = {}
        for name in names:
            self.start(name)

    def start(self, name: str) -> None:
        self.processes[name] = process = Process(self.loop, name)
        self.hosts[name] = host = self.network.host(name, process)
        called = self.called[name] = []

        def accept() -> Recorder:
            called.append(Recorder())
            return called[-1]

        host.listen(Address(name, PORT), accept)

    def connect(self, source: str, target: str) -> tuple[Recorder, Recorder]:
        """Both ends of a new connection."""
        caller = Recorder()
        self.hosts[source].connect(Address(target, PORT), caller)
        self.pass_time(1)
        return caller, self.called[target][-1]

    def pass_time(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))


def test_a_one_way_cut_lets_the_other_way_pass() -> None:
    wired = Wired("north", "south")
    near, far = wired.connect("north", "south")
    wired.network.cut_one_way("north", "south")
    near.end.send([b"held"])
    far.end.send([b"passes"])
    wired.pass_time(5)
    assert far.data == b""
    assert near.data == b"passes"
    wired.network.heal("north", "south")
    wired.pass_time(1)
    assert far.data == b"held"


def test_a_call_whose_answer_is_cut_opens_one_end_only() -> None:
    wired = Wired("north", "south")
    wired.network.cut_one_way("south", "north")
    near, far = wired.connect("north", "south")
    assert (near.channel, near.reasons) == (None, [])
    assert far.channel is not None
    far.end.send([b"first"])
    wired.network.heal("north", "south")
    wired.pass_time(1)
    assert near.channel is not None
    assert near.data == b"first"


def test_a_paused_process_hears_nothing_until_it_goes_on() -> None:
    wired = Wired("north", "south")
    near, far = wired.connect("north", "south")
    wired.processes["south"].pause()
    near.end.send([b"one"])
    wired.pass_time(60)
    near.end.send([b"two"])
    wired.pass_time(1)
    assert far.data == b""
    assert near.reasons == []
    wired.processes["south"].resume()
    wired.pass_time(1)
    assert far.data == b"onetwo"


def test_what_a_cut_held_back_does_not_overtake_what_waits_for_a_process_that_goes_on() -> None:
    wired = Wired("north", "south")
    near, far = wired.connect("north", "south")
    wired.processes["south"].pause()
    near.end.send([b"one"])
    wired.pass_time(1)
    wired.network.cut("north", "south")
    near.end.send([b"two"])
    wired.pass_time(1)
    wired.processes["south"].resume()
    wired.network.heal("north", "south")
    wired.pass_time(1)
    assert far.data == b"onetwo"


def test_a_process_that_goes_on_for_no_time_keeps_the_order_of_what_it_hears() -> None:
    wired = Wired("north", "south")
    near, far = wired.connect("north", "south")
    south = wired.processes["south"]
    south.pause()
    near.end.send([b"one"])
    wired.pass_time(1)
    wired.network.cut("north", "south")
    near.end.send([b"two"])
    wired.pass_time(1)
    south.resume()
    south.pause()
    wired.network.heal("north", "south")
    wired.pass_time(1)
    assert far.data == b""
    south.resume()
    wired.pass_time(1)
    assert far.data == b"onetwo"


def test_peers_of_a_killed_process_hear_the_end() -> None:
    wired = Wired("north", "south")
    near, far = wired.connect("north", "south")
    wired.processes["south"].die()
    wired.network.vanish(wired.hosts["south"], silent=False)
    wired.pass_time(1)
    assert near.reasons == ["closed by the peer"]
    assert far.reasons == []
    late = Recorder()
    wired.hosts["north"].connect(Address("south", PORT), late)
    wired.pass_time(1)
    assert late.reasons == [f"cannot connect to south:{PORT}: Connection refused"]


def test_after_a_power_cut_peers_hear_nothing_until_the_host_is_back() -> None:
    wired = Wired("north", "south")
    near, _ = wired.connect("north", "south")
    wired.processes["south"].die()
    wired.network.vanish(wired.hosts["south"], silent=True)
    near.end.send([b"into the void"])
    wired.pass_time(60)
    assert near.reasons == []
    wired.start("south")
    wired.pass_time(60)
    assert near.reasons == []
    near.end.send([b"again"])
    wired.pass_time(1)
    assert near.reasons == ["connection reset by peer"]
    assert wired.called["south"] == []


def test_connections_of_two_hosts_overtake_each_other_and_keep_their_own_order() -> None:
    wired = Wired("north", "south")
    wired.network.slow("north", "south", (0.0, 0.5))
    order: list[str] = []

    class Noting(Recorder):
        def take(self, data: memoryview) -> int:
            order.append(bytes(data).decode())
            return len(data)

    ends = []
    for _ in range(2):
        near, far = wired.connect("north", "south")
        far.take = Noting.take.__get__(far)  # type: ignore[method-assign]
        ends.append(near)
    for n in range(10):
        ends[0].end.send([b"a%d" % n])
        ends[1].end.send([b"b%d" % n])
        wired.pass_time(0.02)
    wired.pass_time(5)
    text = "".join(order)
    letters = [character for character in text if character in "ab"]
    assert letters != ["a", "b"] * 10
    for name in "ab":
        digits = [text[at + 1] for at in range(len(text)) if text[at] == name]
        assert digits == [str(n) for n in range(10)]


@pytest.mark.parametrize("seed", [1, 2])
def test_a_slow_link_is_slow_between_its_two_hosts_only(seed: int) -> None:
    wired = Wired("north", "south", "east", seed=seed)
    slow, _ = wired.connect("north", "south")
    quick, _ = wired.connect("north", "east")
    wired.network.slow("north", "south", (2.0, 3.0))
    slow.end.send([b"x"])
    quick.end.send([b"x"])
    wired.pass_time(1)
    assert wired.called["south"][0].data == b""
    assert wired.called["east"][0].data == b"x"
    wired.pass_time(3)
    assert wired.called["south"][0].data == b"x"
    wired.network.slow("north", "south", None)
    slow.end.send([b"y"])
    wired.pass_time(1)
    assert wired.called["south"][0].data == b"xy"
