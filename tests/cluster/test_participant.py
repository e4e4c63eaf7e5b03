from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from cluster.participants import Cluster, Machine, run
from headrace.cluster import keys
from headrace.cluster.changes import Plan
from headrace.cluster.config import ConfigChange, Operation
from headrace.cluster.controller_state import PREFERRED, UNCLEAN
from headrace.cluster.image import NO_LEADER, Image, Lost
from headrace.cluster.orders import plan_elections
from headrace.records import kernel
from proving import proves


async def started(cluster: Cluster, **settings: object) -> None:
    for machine in cluster.machines.values():
        await machine.start(**settings)


def all_hold(cluster: Cluster, values: Sequence[bytes | None]) -> bool:
    return all(machine.held() == list(values) for machine in cluster.machines.values())


def is_whole(cluster: Cluster, topic: str = "t") -> bool:
    state = cluster.state(topic)
    return state.leader != NO_LEADER and set(state.isr) == set(state.replicas)


@proves("G1", "G16")
def test_a_cluster_of_one_elects_itself_and_leads_again_after_a_restart() -> None:
    async def body(cluster: Cluster) -> None:
        machine = cluster[1]
        await machine.start()
        await cluster.create(replicas=1)
        assert await cluster.produce(b"a") == 0
        began = cluster.loop.time()
        await machine.stop()
        await machine.start()
        assert cluster.loop.time() - began < 0.2, "nothing waits for a lease"
        assert (cluster.state().leader, cluster.state().leader_epoch) == (1, 1)
        assert machine.held() == [b"a"]
        machine.kill()
        await machine.start()
        assert cluster.state().leader_epoch == 2
        assert await cluster.produce(b"b") == 1
        machine.lose_power()
        await machine.start()
        await cluster.until(lambda: cluster.leader() is machine)
        assert await cluster.produce(b"c") == len(machine.held()) - 1

    run(1, body)


def test_a_cluster_of_one_that_was_paused_beyond_its_lease_goes_on_as_it_was() -> None:
    async def body(cluster: Cluster) -> None:
        machine = cluster[1]
        await machine.start()
        await cluster.create(replicas=1)
        await cluster.produce(b"a")
        before = cluster.state()
        machine.process.pause()
        await asyncio.sleep(60)
        machine.process.resume()
        assert await cluster.produce(b"b", tries=1) == 1
        await cluster.until(lambda: machine.participant.standing)
        await asyncio.sleep(10)
        assert cluster.state() == before
        assert await cluster.produce(b"c", tries=1) == 2

    run(1, body)


@proves("G1", "G2", "G16")
def test_replicas_are_equal() -> None:
    async def body(cluster: Cluster) -> None:
        await started(cluster)
        await cluster.create()
        values = [b"%d" % n for n in range(50)]
        for n, value in enumerate(values):
            assert await cluster.produce(value) == n
        await cluster.until(lambda: all_hold(cluster, values))
        await cluster.until(lambda: all(each.replica().high_watermark == 50 for each in cluster.machines.values()))

    run(3, body)


@proves("G14", "F5")
def test_a_leader_crashes_another_takes_over_and_it_returns_and_truncates() -> None:
    async def body(cluster: Cluster) -> None:
        await started(cluster)
        await cluster.create()
        await cluster.produce(b"a")
        first = cluster.leader()
        assert first is not None
        cluster.isolate(first, and_lose=True)
        await first.process.run(_append(first, b"nobody else has it"))
        assert first.held() == [b"a", b"nobody else has it"]
        first.kill()
        cluster.rejoin(first)
        await cluster.until(lambda: cluster.leader() not in (None, first))
        assert await cluster.produce(b"b") == 1
        assert cluster.state().leader_epoch == 1
        await first.start()
        await cluster.until(lambda: is_whole(cluster))
        await cluster.until(lambda: all_hold(cluster, [b"a", b"b"]))

    run(3, body)


async def _append(machine: Machine, value: bytes) -> None:
    partitions = machine.participant.partitions
    partition = partitions.get("t", 0)
    partition.append(memoryview(kernel.build([(machine.process.wall_ms(), None, value, [])])), 1)
    partitions.touch(partition)
    partitions.end_turn()


@proves("G14", "F7")
def test_a_leader_that_lost_its_page_cache_returns_before_its_lease_ends_and_does_not_lead() -> None:
    async def body(cluster: Cluster) -> None:
        await started(cluster)
        await cluster.create(flush_ms=600_000)
        values = [b"%d" % n for n in range(10)]
        for value in values:
            await cluster.produce(value)
        first = cluster.leader()
        assert first is not None
        first.lose_power()
        await first.start()  # at once, well within its lease
        assert cluster.leader() is not first
        await cluster.until(lambda: is_whole(cluster))
        assert cluster.leader() is not first
        await cluster.until(lambda: all_hold(cluster, values))

    run(3, body)


@proves("G14", "F7")
def test_a_page_cache_that_was_lost_is_not_forgiven_because_the_topic_has_come_to_count_what_is_synced() -> None:
    async def body(cluster: Cluster) -> None:
        await started(cluster)
        await cluster.create(flush_ms=600_000)
        values = [b"%d" % n for n in range(10)]
        for value in values:
            await cluster.produce(value)
        first = cluster.leader()
        assert first is not None
        first.lose_power()
        other = next(each for each in cluster.machines.values() if each is not first)
        change = ConfigChange("durability", Operation.SET, "disk")
        await other.process.run(other.participant.configs.alter_topic("t", [change]))
        await first.start()
        assert first.number not in cluster.state().isr or first.held() == values
        await cluster.until(lambda: is_whole(cluster))
        await cluster.until(lambda: all_hold(cluster, values))
        # Who begins after that counts only what is synced, and a loss of power takes nothing from it.
        for machine in cluster.machines.values():
            await machine.stop()
        await started(cluster)
        await cluster.until(lambda: is_whole(cluster))
        await cluster.produce(b"synced")
        epoch = cluster.state().leader_epoch
        for machine in cluster.machines.values():
            machine.lose_power()
        await cluster[2].start()
        await cluster.until(lambda: cluster.leader() is cluster[2])
        assert cluster.state().leader_epoch > epoch
        assert cluster[2].held() == [*values, b"synced"]

    run(3, body)


@proves("G14")
def test_all_lose_power_and_the_one_that_holds_most_leads() -> None:
    async def body(cluster: Cluster) -> None:
        await started(cluster)
        await cluster.create(flush_ms=600_000)
        for n in range(10):
            await cluster.produce(b"%d" % n)
        await cluster.until(lambda: is_whole(cluster))
        for machine in cluster.machines.values():
            machine.lose_power()
        for machine in cluster.machines.values():
            await machine.start()
        await cluster.until(lambda: cluster.leader() is not None)
        longest = max(len(machine.held()) for machine in cluster.machines.values())
        leader = cluster.leader()
        assert leader is not None
        assert len(leader.held()) == longest
        await cluster.until(lambda: is_whole(cluster))
        await cluster.until(lambda: all_hold(cluster, [b"%d" % n for n in range(longest)]))

    run(3, body)


@proves("G14")
def test_the_last_member_of_the_set_is_waited_for() -> None:
    async def body(cluster: Cluster) -> None:
        await started(cluster)
        await cluster.create(min_insync_replicas=1)
        await cluster.produce(b"a")
        last = cluster.leader()
        assert last is not None
        others = [machine for machine in cluster.machines.values() if machine is not last]
        for machine in others:
            machine.kill()
        await cluster.until(lambda: cluster.state().isr == (last.number,))
        assert await cluster.produce(b"b") == 1
        last.kill()
        for machine in others:
            await machine.start()
        await cluster.until(lambda: cluster.state().leader == NO_LEADER)
        await asyncio.sleep(30)
        assert (cluster.state().leader, cluster.state().isr) == (NO_LEADER, (last.number,))
        await last.start()
        await cluster.until(lambda: is_whole(cluster))
        await cluster.until(lambda: all_hold(cluster, [b"a", b"b"]))

    run(3, body)


@proves("G14")
def test_a_broker_that_stops_in_order_hands_over_first() -> None:
    async def body(cluster: Cluster) -> None:
        await started(cluster)
        await cluster.create()
        await cluster.produce(b"a")
        first = cluster.leader()
        assert first is not None
        began = cluster.loop.time()
        await first.stop()
        await cluster.produce(b"b")
        assert cluster.loop.time() - began < 0.3
        await first.start()
        await cluster.until(lambda: is_whole(cluster))
        await cluster.until(lambda: all_hold(cluster, [b"a", b"b"]))

    run(3, body)


@proves("G3")
def test_coordination_is_gone_for_a_minute_and_nobody_minds() -> None:
    async def body(cluster: Cluster) -> None:
        await started(cluster)
        await cluster.create()
        await cluster.produce(b"0")
        before = cluster.state()
        cluster.store.stop()
        for n in range(1, 61):
            assert await cluster.produce(b"%d" % n, tries=1) == n
            await asyncio.sleep(1)
        cluster.store.start()
        await asyncio.sleep(10)
        assert cluster.state() == before
        await cluster.until(lambda: all_hold(cluster, [b"%d" % n for n in range(61)]))

    run(3, body)


@proves("G2")
def test_a_leader_that_is_cut_off_alone_acknowledges_nothing_any_more() -> None:
    async def body(cluster: Cluster) -> None:
        await started(cluster)
        await cluster.create()
        await cluster.produce(b"a")
        first = cluster.leader()
        assert first is not None
        cluster.store.cut(first.host)
        cluster.isolate(first)
        old = first.participant.partitions.get("t", 0)
        await first.process.run(_append(first, b"cut off"))
        await cluster.until(lambda: cluster.leader() not in (None, first))
        await cluster.produce(b"b")
        assert old.high_watermark == 1
        cluster.store.heal(first.host)
        cluster.rejoin(first)
        await cluster.until(lambda: is_whole(cluster))
        await cluster.until(lambda: all_hold(cluster, [b"a", b"b"]))

    run(3, body)


@proves("J7")
def test_a_topic_deleted_and_made_anew_while_a_broker_was_down_begins_empty_there() -> None:
    async def body(cluster: Cluster) -> None:
        await started(cluster)
        await cluster.create()
        await cluster.produce(b"old", b"old")
        await cluster.until(lambda: all_hold(cluster, [b"old", b"old"]))
        cluster[3].kill()
        one = cluster[1]
        await one.process.run(one.participant.topics.delete("t"))
        await cluster.until(lambda: 3 not in cluster.image().brokers)
        await cluster.create(replicas=2)
        await cluster.produce(b"new")
        await cluster[3].start()
        assert cluster[3].participant.partitions.find_replica("t", 0) is None
        assert cluster.state().replicas != (1, 2, 3)

    run(3, body)


@proves("G16")
def test_in_sync_changes_whose_answers_are_lost_are_found_out() -> None:
    async def body(cluster: Cluster) -> None:
        await started(cluster)
        await cluster.create()
        await cluster.produce(b"first")
        leader = cluster.leader()
        assert leader is not None
        gone = next(machine for machine in cluster.machines.values() if machine is not leader)
        cluster.store.answers_lost, cluster.store.late = 0.5, 0.2
        for _ in range(3):
            cluster.isolate(gone)
            await asyncio.sleep(5)
            cluster.rejoin(gone)
            await asyncio.sleep(5)
        cluster.store.answers_lost = cluster.store.late = 0.0
        await cluster.until(lambda: is_whole(cluster))
        await cluster.produce(b"last")
        await cluster.until(lambda: no_proposal_is_open(cluster))
        await cluster.until(lambda: all_hold(cluster, cluster[1].held()))
        assert set(cluster[1].held()) == {b"first", b"last"}

    run(3, body)


def no_proposal_is_open(cluster: Cluster) -> bool:
    leader = cluster.leader()
    core = leader.replica().core if leader is not None else None
    return core is not None and core.proposed_isr is None and set(core.isr) == {1, 2, 3}


async def carried(machine: Machine, plan: Callable[[Image], Plan]) -> None:
    await machine.process.run(machine.participant.changes.run(plan))


def test_a_registration_whose_answers_are_lost_is_made_in_the_end() -> None:
    async def body(cluster: Cluster) -> None:
        machine = cluster[1]
        participant = machine.make()
        await machine.process.run(participant.open())
        cluster.store.answers_lost = 1.0
        cluster.loop.call_later(3, setattr, cluster.store, "answers_lost", 0.0)
        await machine.process.run(participant.join({}))
        assert participant.standing
        assert cluster.image().brokers[1].incarnation == participant.incarnation

    run(1, body)


def test_a_broker_that_has_not_joined_copies_nothing() -> None:
    """What the incarnation file says of the process before must stay true until it tells of this one."""

    async def body(cluster: Cluster) -> None:
        await started(cluster)
        await cluster.create()
        await cluster.produce(b"a")
        await cluster.until(lambda: all_hold(cluster, [b"a"]))
        late = next(machine for machine in cluster.machines.values() if machine is not cluster.leader())
        await late.stop()
        await cluster.produce(b"b")
        participant = late.make()
        await late.process.run(participant.open())
        await asyncio.sleep(5)
        assert late.held() == [b"a"]
        await late.process.run(participant.join({}))
        await cluster.until(lambda: is_whole(cluster))
        await cluster.until(lambda: all_hold(cluster, [b"a", b"b"]))

    run(3, body)


@proves("G15")
def test_a_preferred_leader_is_elected_again_by_order() -> None:
    async def body(cluster: Cluster) -> None:
        await started(cluster)
        await cluster.create()
        preferred = cluster.state().replicas[0]
        await cluster[preferred].stop()
        await cluster.until(lambda: cluster.state().leader not in (preferred, NO_LEADER))
        await cluster[preferred].start()
        await cluster.until(lambda: is_whole(cluster))
        assert cluster.state().leader != preferred
        await carried(cluster[preferred], lambda image: plan_elections(image, [("t", 0)], PREFERRED))
        await cluster.until(lambda: cluster.state().leader == preferred)
        await cluster.until(lambda: not cluster.image().controls.orders)
        await cluster.produce(b"a")

    run(3, body)


@proves("G14")
def test_a_leader_whose_disk_failed_has_another_lead() -> None:
    async def body(cluster: Cluster) -> None:
        await started(cluster)
        await cluster.create(durability="disk")
        await cluster.produce(b"a")
        first = cluster.leader()
        assert first is not None
        first.disk.fail_sync(f"/data/t/t-0/{0:020d}.log")
        await cluster.produce(b"b")
        assert cluster.leader() is not first
        assert first.number not in cluster.state().isr
        await asyncio.sleep(30)
        assert first.number not in cluster.state().isr
        first.kill()
        await first.start()
        await cluster.until(lambda: is_whole(cluster))
        await cluster.until(lambda: all_hold(cluster, cluster[1].held()))
        assert set(cluster[1].held()) == {b"a", b"b"}

    run(3, body)


@proves("G15")
def test_leaderships_go_back_to_preferred_leaders_from_time_to_time() -> None:
    async def body(cluster: Cluster) -> None:
        interval = {"leader.rebalance.ms": 20_000}
        await started(cluster, **interval)
        await cluster.create()
        preferred = cluster.state().replicas[0]
        await cluster[preferred].stop()
        await cluster.until(lambda: cluster.state().leader not in (preferred, NO_LEADER))
        await cluster[preferred].start(**interval)
        await cluster.until(lambda: is_whole(cluster))
        assert cluster.state().leader != preferred
        await cluster.until(lambda: cluster.state().leader == preferred)
        await cluster.produce(b"a")

    run(3, body)


@proves("G14")
def test_an_operator_gives_up_the_last_member_and_is_told_what_that_cost() -> None:
    async def body(cluster: Cluster) -> None:
        await started(cluster)
        await cluster.create(min_insync_replicas=1)
        await cluster.produce(b"a")
        last = cluster.leader()
        assert last is not None
        others = [machine for machine in cluster.machines.values() if machine is not last]
        cluster.isolate(last, and_lose=True)
        await cluster.until(lambda: cluster.state().isr == (last.number,))
        await cluster.produce(b"b")
        last.kill()
        cluster.rejoin(last)
        await cluster.until(lambda: cluster.state().leader == NO_LEADER)
        await carried(others[0], lambda image: plan_elections(image, [("t", 0)], UNCLEAN))
        await cluster.until(lambda: cluster.leader() in others)
        assert cluster.state().lost == Lost(cluster.state().leader_epoch, 1, -1)
        assert await cluster.produce(b"c") == 1
        await last.start()
        await cluster.until(lambda: is_whole(cluster))
        await cluster.until(lambda: all_hold(cluster, [b"a", b"c"]))

    run(3, body)


@proves("G14")
def test_a_topic_may_allow_the_best_of_those_alive_to_lead() -> None:
    async def body(cluster: Cluster) -> None:
        await started(cluster)
        await cluster.create(min_insync_replicas=1, unclean_leader_election_enable="true")
        await cluster.produce(b"a")
        last = cluster.leader()
        assert last is not None
        cluster.isolate(last, and_lose=True)
        await cluster.until(lambda: cluster.state().isr == (last.number,))
        last.kill()
        cluster.rejoin(last)
        await cluster.until(lambda: cluster.leader() not in (None, last))
        assert await cluster.produce(b"b") == 1

    run(3, body)


@proves("F9")
def test_a_replica_that_is_alive_and_says_nothing_holds_up_no_unclean_election_for_ever() -> None:
    async def body(cluster: Cluster) -> None:
        await started(cluster)
        await cluster.create(min_insync_replicas=1, unclean_leader_election_enable="true")
        await cluster.produce(b"a")
        last = cluster.leader()
        assert last is not None
        cluster.isolate(last, and_lose=True)
        await cluster.until(lambda: cluster.state().isr == (last.number,))
        await cluster.produce(b"b")
        silent, other = (machine for machine in cluster.machines.values() if machine is not last)
        await silent.process.run(silent.participant.reports.close())
        last.kill()
        cluster.rejoin(last)
        await cluster.until(lambda: cluster.leader() is other)
        assert silent.participant.standing
        assert cluster.state().lost == Lost(cluster.state().leader_epoch, 1, -1)
        assert await cluster.produce(b"c") == 1
        await last.start()
        await cluster.until(lambda: is_whole(cluster))
        await cluster.until(lambda: all_hold(cluster, [b"a", b"c"]))

    run(3, body)


@proves("L6", "L3")
def test_a_drained_broker_s_partitions_move_with_their_data() -> None:
    """The orphan case: nothing that a broker holds is left without a reader when its partitions go elsewhere."""

    async def body(cluster: Cluster) -> None:
        await started(cluster)
        await cluster.create(replicas=1)
        holder = cluster.leader()
        assert holder is not None
        values = [b"%d" % n for n in range(20)]
        for value in values:
            await cluster.produce(value)
        holder.kill()  # and it returns: its partition has waited for it
        await cluster.until(lambda: cluster.state().leader == NO_LEADER)
        assert cluster.state().replicas == (holder.number,)
        await holder.start()
        await cluster.until(lambda: cluster.leader() is holder)
        draining = keys.draining_key(holder.participant.prefix, holder.number)
        await holder.process.run(holder.participant.coordination.put(draining, b"{}"))
        await cluster.until(lambda: cluster.leader() not in (None, holder) and not cluster.state().target)
        taker = cluster.leader()
        assert taker is not None
        assert taker.held() == values
        assert cluster.state().replicas == (taker.number,)
        await cluster.until(lambda: holder.participant.partitions.find_replica("t", 0) is None)
        assert await cluster.produce(b"more") == 20

    run(3, body)


@proves("L3")
def test_a_move_to_a_broker_that_cannot_be_reached_keeps_nobody_from_writing() -> None:
    async def body(cluster: Cluster) -> None:
        await started(cluster)
        await cluster.create(replicas=1)
        holder = cluster.leader()
        assert holder is not None
        cluster.isolate(holder)
        draining = keys.draining_key(holder.participant.prefix, holder.number)
        await holder.process.run(holder.participant.coordination.put(draining, b"{}"))
        await cluster.until(lambda: bool(cluster.state().adding))
        await cluster.until(lambda: len(_core_replicas(holder)) == 2)
        assert await cluster.produce(b"a", tries=1) == 0
        cluster.rejoin(holder)
        await cluster.until(lambda: cluster.leader() not in (None, holder))
        assert await cluster.produce(b"b") == 1

    run(3, body)


def _core_replicas(machine: Machine) -> tuple[int, ...]:
    core = machine.replica().core
    return () if core is None else core.replicas


@proves("F9")
def test_the_rate_of_catching_up_is_altered_while_running_and_holds_over_a_restart() -> None:
    rate = "replica.catchup.bytes.per.second"

    async def catch_up(cluster: Cluster, topic: str) -> float:
        """Seconds that broker 2 takes for two megabytes."""
        await cluster.create(topic, replicas=2, min_insync_replicas=1, max_message_bytes=2 << 20)
        await cluster.until(lambda: len(cluster.state(topic).isr) == 2)
        await cluster[2].stop()
        for _ in range(20):
            await cluster.produce(bytes(100_000), topic=topic)
        await cluster[2].start()
        began = cluster.loop.time()
        await cluster.until(lambda: len(cluster.state(topic).isr) == 2)
        return cluster.loop.time() - began

    async def alter(cluster: Cluster, change: ConfigChange) -> None:
        await cluster[1].process.run(cluster[1].participant.configs.alter_broker(1, [change]))

    async def body(cluster: Cluster) -> None:
        await started(cluster)
        assert await catch_up(cluster, "a") < 3
        await alter(cluster, ConfigChange(rate, Operation.SET, "100000"))
        assert await catch_up(cluster, "b") > 7
        await cluster[1].stop()
        await cluster[1].start()
        assert await catch_up(cluster, "c") > 7
        await alter(cluster, ConfigChange(rate, Operation.DELETE))
        assert await catch_up(cluster, "d") < 3

    run(2, body)
