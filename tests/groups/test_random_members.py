"""Many members that join, sync, beat, commit, leave, restart and fall silent, on a slow or failing log.

Judged after every step: a stable group has a leader that is a member and assignments of its own generation; members
wait only in the state that will answer them; no waiter is lost. At the end the group settles, nobody waits any more,
and the next coordinator has the same group and offsets.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from groups.scene import GROUP, LIMITS, Scene, Waiter
from headrace.errors import ErrorCode
from headrace.groups.group import Group, State
from headrace.groups.limits import GroupLimits
from headrace.groups.messages import JoinReply, Leaver, SyncReply
from proving import proves

STEPS = 1500
CLIENTS = 12
STORE_FAULTS = [ErrorCode.NONE] * 8 + [ErrorCode.NOT_ENOUGH_REPLICAS, ErrorCode.REQUEST_TIMED_OUT]


@dataclass(slots=True)
class Client:
    """A consumer that behaves, as far as its fortune lets it."""

    name: str
    instance: str | None
    member_id: str = ""
    joining: Waiter[JoinReply] | None = None
    syncing: Waiter[SyncReply] | None = None
    joined: JoinReply | None = None
    assignment: bytes | None = None


class Crowd:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        delay_ms = self.random.choice([0, 500])
        self.scene = Scene(limits=replace(LIMITS, group=GroupLimits(1000, 60_000, CLIENTS - 2, delay_ms)))
        self.scene.held = True
        self.acknowledgements = self.random.choice([6, 0.3])
        self.clients = [Client(f"c{n}", f"i{n}" if n % 3 == 0 else None) for n in range(CLIENTS)]
        self.waiters: list[Waiter[JoinReply] | Waiter[SyncReply]] = []

    def step(self) -> None:
        client = self.random.choice(self.clients)
        self.hear(client)
        action = self.random.choices(
            [self.go_on, self.beat, self.commit, self.leave, self.restart, self.acknowledge, self.let_pass],
            [10, 3, 2, 0.4, 0.3, self.acknowledgements, 2],
        )[0]
        action(client)
        self.check()

    def hear(self, client: Client) -> None:
        """Take in what was answered."""
        if client.joining is not None and client.joining.answered:
            reply = client.joining.reply
            client.joining = None
            if reply.error_code == ErrorCode.NONE:
                client.member_id, client.joined, client.assignment = reply.member_id, reply, None
            elif reply.error_code == ErrorCode.MEMBER_ID_REQUIRED:
                client.member_id = reply.member_id
            else:
                self.lose(client, reply.error_code)
        if client.syncing is not None and client.syncing.answered:
            synced = client.syncing.reply
            client.syncing = None
            if synced.error_code == ErrorCode.NONE:
                client.assignment = synced.assignment
            else:
                self.lose(client, synced.error_code)

    def lose(self, client: Client, code: int) -> None:
        client.joined = client.assignment = None
        if code in (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.FENCED_INSTANCE_ID):
            client.member_id = ""

    def go_on(self, client: Client) -> None:
        if client.joining is not None or client.syncing is not None:
            return
        if client.joined is None:
            client.joining = self.scene.join(
                client.member_id,
                client.instance,
                client=client.name,
                known=True,
                protocols=(("range", b"m%d" % self.random.randrange(2)),),
                skips=self.random.random() < 0.5,
                session_ms=self.random.choice([3000, 10_000]),
                rebalance_ms=self.random.choice([5000, 20_000]),
            )
            self.waiters.append(client.joining)
        elif client.assignment is None:
            joined = client.joined
            leads = joined.leader == joined.member_id and not joined.skip_assignment
            given = {m.member_id: f"{joined.generation_id}/{m.member_id}".encode() for m in joined.members}
            client.syncing = self.scene.sync(joined, given if leads else None, client.instance)
            self.waiters.append(client.syncing)

    def beat(self, client: Client) -> None:
        if client.joined is not None:
            code = self.scene.beat(client.joined, client.instance)
            if code != ErrorCode.NONE and client.syncing is None:
                self.lose(client, code)

    def commit(self, client: Client) -> None:
        if client.joined is not None:
            self.scene.commit({("t", self.random.randrange(3)): self.random.randrange(1000)}, client.joined)

    def leave(self, client: Client) -> None:
        if client.member_id and client.joining is None and client.syncing is None:
            self.scene.coordinator.leave(GROUP, [Leaver(client.member_id, client.instance)])
            self.lose(client, ErrorCode.UNKNOWN_MEMBER_ID)

    def restart(self, client: Client) -> None:
        """The process is gone, with all it knew; its requests wait on without it."""
        client.member_id, client.joining, client.syncing = "", None, None
        client.joined = client.assignment = None

    def acknowledge(self, _client: Client) -> None:
        self.scene.acknowledge(self.random.choice(STORE_FAULTS))

    def let_pass(self, _client: Client) -> None:
        self.scene.advance(self.random.choice([0.01, 0.5, 1, 3]))

    def check(self) -> None:
        shard = self.scene.coordinator._shards[0]
        group = shard.groups.get(GROUP)
        if group is None:
            return
        assert isinstance(group, Group)
        roster = group.roster
        assert group.next_deadline >= self.scene.clock.now()
        assert len(roster) + len(roster.pending) <= CLIENTS - 2
        assert set(roster.static.values()) <= set(roster.members)
        waiting = [m for m in roster.members.values() if m.join_ticket is not None]
        assert not waiting or group.state is State.PREPARING
        syncing = [m for m in roster.members.values() if m.sync_ticket is not None]
        assert not syncing or group.state is State.COMPLETING
        if group.state in (State.COMPLETING, State.STABLE):
            assert roster.leader in roster.members
        if group.state is State.STABLE:
            of_now = f"{group.generation_id}/".encode()
            assert all(not m.assignment or m.assignment.startswith(of_now) for m in roster.members.values())
        if group.state is State.EMPTY:
            assert not roster.members
        unanswered = sum(not waiter.answered for waiter in self.waiters)
        stored = sum(1 for _, _, done in self.scene.on_the_way if "_stored" in repr(done))
        assert len(waiting) + len(syncing) <= unanswered <= len(waiting) + len(syncing) + stored
        self.waiters = [waiter for waiter in self.waiters if not waiter.answered]

    def settle(self) -> None:
        """Everyone behaves until the group is stable: it has to get there."""
        self.scene.held = False
        self.scene.acknowledge()
        for _ in range(400):
            for client in self.clients:
                self.hear(client)
                self.go_on(client)
                self.hear(client)
                self.beat(client)
            self.check()
            self.scene.advance(0.5)
            group = self.scene.coordinator._shards[0].groups.get(GROUP)
            if isinstance(group, Group) and group.state is State.STABLE and len(group.roster) == CLIENTS - 2:
                break
        else:
            raise AssertionError("the group did not become stable")


@proves("R4")
@pytest.mark.parametrize("run", range(8))
def test_a_restless_crowd_always_gets_answers_and_settles(seed: int, run: int) -> None:
    crowd = Crowd(seed)
    for _ in range(STEPS):
        crowd.step()
    crowd.settle()
    for client in crowd.clients:
        crowd.hear(client)
    group = crowd.scene.group()
    in_group = [client for client in crowd.clients if client.member_id in group.roster.members]
    for client in in_group:
        member = group.roster.members[client.member_id]
        if client.assignment is not None and client.joined is not None:
            assert client.joined.generation_id == group.generation_id
            assert client.assignment == member.assignment
    before, offsets = crowd.scene.coordinator.describe(GROUP), crowd.scene.committed()
    crowd.scene.take_over()
    assert crowd.scene.coordinator.describe(GROUP) == before
    assert crowd.scene.committed() == offsets
    assert crowd.scene.on_the_way == []
    crowd.scene.advance(100)
    assert all(waiter.answered for waiter in crowd.waiters)
