"""Brokers that come back with less than they held, at the same time as all others, so that only they can tell."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable

import pytest

from cluster.participants import Cluster, Machine, run
from headrace.cluster.controller_core import UNKNOWN_END
from headrace.cluster.image import NO_LEADER, Lost
from headrace.cluster.incarnation import read_incarnation
from headrace.cluster.participant import ClosedLogs
from headrace.records.batch import batches
from headrace.storage.commitlog.frames import APPEND
from proving import proves

LOG = f"/data/t/t-0/{0:020d}.log"
COMMIT_LOG = f"/data/@commitlog/{0:020d}.log"
LOGS = {"partitioned": LOG, "shared": COMMIT_LOG}
VALUES = [b"%d" % n for n in range(40)]


def cut_in_half(machine: Machine, log: str = LOG) -> None:
    file = machine.disk.open(log, writable=True)
    file.truncate(machine.disk.size(log) // 2)
    file.close()


def damage_tail(machine: Machine, log: str = LOG) -> None:
    machine.disk.flip(log, machine.disk.size(log) // 2)
    cut_in_half(machine, log)


def lose_segments(machine: Machine, log: str = LOG) -> None:
    machine.disk.remove(log)


def lose_folder(machine: Machine, log: str = LOG) -> None:
    machine.disk.remove_folder(log.rpartition("/")[0])


def lose_checkpoint_too(machine: Machine, log: str = LOG) -> None:
    machine.disk.remove("/data/@checkpoint")
    lose_folder(machine, log)


def lose_checkpoint(machine: Machine) -> None:
    machine.disk.remove("/data/@checkpoint")


def damage_checkpoint(machine: Machine) -> None:
    machine.disk.flip("/data/@checkpoint", 20)


def lose_watermarks_too(machine: Machine, log: str = LOG) -> None:
    machine.disk.remove("/data/@watermarks")
    lose_folder(machine, log)


async def filled(cluster: Cluster, layout: str = "partitioned", **overrides: object) -> Machine:
    for machine in cluster.machines.values():
        await machine.start(**{"log.layout": layout})
    await cluster.create("t", 1, 3, **overrides)
    for value in VALUES:
        await cluster.produce(value)
    await cluster.until(lambda: all(machine.held() == VALUES for machine in cluster.machines.values()))
    leader = cluster.leader()
    assert leader is not None
    return leader


async def all_again(cluster: Cluster, first: Machine) -> None:
    """All come back at a time when nobody is registered any more, `first` before the others."""
    await asyncio.sleep(10)
    for machine in sorted(cluster.machines.values(), key=lambda machine: machine is not first):
        await machine.start()


async def whole_again(cluster: Cluster) -> None:
    def is_whole() -> bool:
        state = cluster.state()
        return state.leader != NO_LEADER and set(state.isr) == set(state.replicas)

    await cluster.until(is_whole)
    await cluster.until(lambda: not any(each.participant.partitions.damaged for each in cluster.machines.values()))
    await cluster.until(lambda: all(machine.held() == VALUES for machine in cluster.machines.values()))


@proves("G14", "F7")
@pytest.mark.parametrize(
    "lose", [cut_in_half, damage_tail, lose_segments, lose_folder, lose_checkpoint_too, lose_watermarks_too]
)
@pytest.mark.parametrize("durability", ["os", "disk"])
@pytest.mark.parametrize("layout", LOGS)
def test_a_leader_that_lost_part_of_its_log_while_it_was_down_leads_nobody_into_cutting_theirs(
    lose: Callable[[Machine, str], None], durability: str, layout: str
) -> None:
    async def body(cluster: Cluster) -> None:
        leader = await filled(cluster, layout, durability=durability)
        await asyncio.sleep(70)  # a checkpoint is written
        for machine in cluster.machines.values():
            machine.kill()
        lose(leader, LOGS[layout])
        await all_again(cluster, leader)
        await whole_again(cluster)

    run(3, body)


@proves("G14")
@pytest.mark.parametrize("layout", LOGS)
def test_a_leader_that_lost_part_of_its_log_after_a_clean_stop_does_not_count_either(layout: str) -> None:
    async def body(cluster: Cluster) -> None:
        await filled(cluster, layout)
        for machine in cluster.machines.values():
            await machine.stop()
        last = max(cluster.machines.values(), key=lambda machine: machine.number)
        cut_in_half(last, LOGS[layout])
        await last.start()
        await asyncio.sleep(10)
        assert cluster.state().leader == NO_LEADER
        for machine in cluster.machines.values():
            if machine is not last:
                await machine.start()
        await whole_again(cluster)

    run(3, body)


def flip_last(machine: Machine, log: str) -> None:
    machine.disk.flip(log, machine.disk.size(log) - 1)


def flip_inside(machine: Machine, log: str) -> None:
    machine.disk.flip(log, machine.disk.size(log) // 2)


@proves("G14", "F7", "J1")
@pytest.mark.parametrize("log", [LOG, COMMIT_LOG])
@pytest.mark.parametrize(
    ("die", "flip"),
    [(Machine.kill, flip_last), (Machine.kill, flip_inside), (Machine.lose_power, flip_inside)],
)
def test_what_was_synced_after_the_checkpoint_and_damaged_since_is_not_taken_for_a_torn_write(
    die: Callable[[Machine], None], flip: Callable[[Machine, str], None], log: str
) -> None:
    async def body(cluster: Cluster) -> None:
        leader = await filled(cluster, "shared" if log != LOG else "partitioned", durability="disk")
        for machine in cluster.machines.values():
            die(machine)
        flip(leader, log)
        await all_again(cluster, leader)
        await whole_again(cluster)

    run(3, body)


def flip_at(machine: Machine, log: str, value: bytes) -> None:
    file = machine.disk.open(log)
    machine.disk.flip(log, file.pread(file.size(), 0).index(value))


@proves("G14", "F7", "J1")
@pytest.mark.parametrize("log", [LOG, COMMIT_LOG])
def test_two_that_are_damaged_above_their_checkpoints_and_killed_have_lost_nothing(log: str) -> None:
    """Each has what the other lacks, and both have what comes behind; the third has missed the last records."""
    layout = "shared" if log != LOG else "partitioned"
    values = [b"value %d." % n for n in range(40)]

    async def body(cluster: Cluster) -> None:
        for machine in cluster.machines.values():
            await machine.start(**{"log.layout": layout})
        await cluster.create("t", 1, 3, durability="disk")
        for value in values[:20]:
            await cluster.produce(value)
        leader = cluster.leader()
        assert leader is not None
        other, third = (machine for machine in cluster.machines.values() if machine is not leader)
        third.kill()
        await cluster.until(lambda: set(cluster.state().isr) == {leader.number, other.number})
        for value in values[20:]:
            await cluster.produce(value)
        leader.kill()
        other.kill()
        flip_at(leader, log, values[4])
        flip_at(other, log, values[7])
        await all_again(cluster, third)
        machines = cluster.machines.values()
        await cluster.until(lambda: set(cluster.state().isr) == {1, 2, 3})
        await cluster.until(lambda: not any(each.participant.partitions.damaged for each in machines))
        await cluster.until(lambda: all(machine.held() == values for machine in machines))
        assert cluster.state().lost is None

    run(3, body)


@proves("G14")
def test_members_that_have_all_cut_what_they_may_have_acknowledged_tell_of_it() -> None:
    """No watermark does after a kill."""

    async def body(cluster: Cluster) -> None:
        await filled(cluster, durability="disk")
        for machine in cluster.machines.values():
            machine.kill()
            flip_last(machine, LOG)
        await asyncio.sleep(10)
        for machine in cluster.machines.values():
            await machine.start()
        await cluster.until(lambda: set(cluster.state().isr) == {1, 2, 3})
        assert all(machine.held() == VALUES[:-1] for machine in cluster.machines.values())
        assert cluster.state().lost == Lost(cluster.state().leader_epoch, len(VALUES) - 1, UNKNOWN_END)

    run(3, body)


def begin_a_write(machine: Machine, log: str) -> None:
    """What a process that is killed in the middle of a write leaves: the next batch, or frame, but for its end."""
    file = machine.disk.open(log, writable=True)
    size = file.size()
    content = file.pread(size, 0)
    if log == LOG:
        at = [each.tobytes() for _, each in batches(memoryview(content))][-1]
        begun = len(VALUES).to_bytes(8, "big") + at[8:]
    else:
        begun = content[content.rindex(APPEND) :]
    file.pwritev([begun[:-7]], size)
    file.close()


@proves("G14", "F5")
@pytest.mark.parametrize("log", [LOG, COMMIT_LOG])
def test_the_last_in_sync_replica_leads_again_after_it_was_killed_inside_a_write(log: str) -> None:
    async def body(cluster: Cluster) -> None:
        layout = "shared" if log != LOG else "partitioned"
        leader = await filled(cluster, layout, durability="disk", **{"min.insync.replicas": 1})
        for machine in cluster.machines.values():
            if machine is not leader:
                machine.kill()
        await cluster.until(lambda: set(cluster.state().isr) == {leader.number})
        leader.kill()
        begin_a_write(leader, log)
        await asyncio.sleep(10)
        await leader.start()
        await cluster.until(lambda: cluster.leader() is leader)
        assert leader.held() == VALUES

    run(3, body)


@proves("G14")
def test_what_was_found_lost_is_remembered_by_a_start_that_got_no_further() -> None:
    async def body(cluster: Cluster) -> None:
        leader = await filled(cluster)
        await asyncio.sleep(70)
        for machine in cluster.machines.values():
            machine.kill()
        cut_in_half(leader)
        await asyncio.sleep(10)
        await leader.make().open()
        await asyncio.sleep(10)  # watermarks are written anew
        leader.kill()
        await all_again(cluster, leader)
        await whole_again(cluster)

    run(3, body)


RUN_FILE = "/data/incarnation.json.tmp"
FIRST_CHECKPOINT = "/data/@checkpoint.tmp"


@proves("G14", "F7")
@pytest.mark.parametrize("failing", [RUN_FILE, FIRST_CHECKPOINT])
@pytest.mark.parametrize("layout", ["partitioned", "shared"])
@pytest.mark.parametrize("lose", [cut_in_half, flip_inside, lose_segments])
def test_what_was_found_lost_is_found_again_after_a_start_that_could_not_keep_it(
    lose: Callable[..., None], layout: str, failing: str
) -> None:
    log = LOG if layout == "partitioned" else f"/data/@commitlog/{0:020d}.log"

    async def body(cluster: Cluster) -> None:
        leader = await filled(cluster, layout, durability="disk")
        if lose is not flip_inside:
            await asyncio.sleep(70)  # a checkpoint is written; else what is behind it is in doubt
        for machine in cluster.machines.values():
            if lose is flip_inside:  # or it is no torn write
                machine.lose_power()
            else:
                machine.kill()
        lose(leader, log)
        leader.disk.fail_write(failing, errno.EIO)
        with pytest.raises(OSError, match="Input/output error"):
            await leader.start()
        await leader.process.run(leader.participant.close())
        leader.kill()
        await all_again(cluster, leader)
        await whole_again(cluster)

    run(3, body)


@proves("G14")
def test_a_leader_whose_log_went_offline_is_not_carried_over() -> None:
    """The failed sync has dropped what was in the page cache, within one boot."""

    async def body(cluster: Cluster) -> None:
        leader = await filled(cluster, flush_ms=1000)
        leader.disk.fail_sync(LOG)
        await cluster.until(lambda: leader.replica().log.offline is not None)
        for machine in cluster.machines.values():
            machine.kill()
        record = read_incarnation(leader.disk, "/data")
        assert record is not None
        assert len(record.lost) == 1
        await all_again(cluster, leader)
        await whole_again(cluster)

    run(3, body)


@proves("U6")
def test_a_stop_with_a_log_offline_is_not_called_clean() -> None:
    async def body(cluster: Cluster) -> None:
        leader = await filled(cluster, flush_ms=1000)
        leader.disk.fail_sync(LOG)
        await cluster.until(lambda: leader.replica().log.offline is not None)
        for machine in cluster.machines.values():
            participant = machine.participant
            await machine.stop()
            assert participant.closed_logs == ClosedLogs(1, clean=machine is not leader)

    run(3, body)


@proves("G14")
def test_after_an_ordinary_kill_of_all_the_leader_leads_again() -> None:
    async def body(cluster: Cluster) -> None:
        leader = await filled(cluster)
        await asyncio.sleep(70)
        await cluster.produce(b"last")
        for machine in cluster.machines.values():
            machine.kill()
        await all_again(cluster, leader)
        await cluster.until(lambda: cluster.leader() is leader)
        assert set(cluster.state().isr) == {1, 2, 3}
        assert all(not broker.previous.lost for broker in cluster.image().brokers.values() if broker.previous)

    run(3, body)


@proves("F7")
@pytest.mark.parametrize("harm", [damage_checkpoint, lose_checkpoint])
@pytest.mark.parametrize("layout", ["partitioned", "shared"])
def test_deleted_records_do_not_come_back_with_a_leader_that_lost_its_checkpoint(
    layout: str, harm: Callable[[Machine], None]
) -> None:
    """Where a log begins only the checkpoint knows, and whether all is there that it had: others lead."""

    async def body(cluster: Cluster) -> None:
        leader = await filled(cluster, layout, durability="disk")
        partitions = leader.participant.partitions
        partitions.delete_before(partitions.get("t", 0), 20)
        await cluster.until(lambda: leader.replica().start_offset == 20)
        for machine in cluster.machines.values():
            machine.kill()
        harm(leader)
        await all_again(cluster, leader)
        await cluster.until(lambda: cluster.state().leader not in (NO_LEADER, leader.number))
        await cluster.until(lambda: len(cluster.state().isr) == 3)
        await cluster.until(lambda: all(m.replica().start_offset == 20 for m in cluster.machines.values()))

    run(3, body)


@proves("G14")
def test_a_leader_that_returns_at_once_follows_one_that_was_there_all_the_time() -> None:
    async def body(cluster: Cluster) -> None:
        leader = await filled(cluster)
        leader.kill()
        cut_in_half(leader)
        await leader.start()
        assert cluster.leader() is not leader
        await whole_again(cluster)

    run(3, body)


@proves("G14")
def test_a_leader_that_is_damaged_in_the_middle_hands_over_and_is_mended() -> None:
    async def body(cluster: Cluster) -> None:
        leader = await filled(cluster)
        await asyncio.sleep(70)
        for machine in cluster.machines.values():
            machine.kill()
        leader.disk.flip(LOG, leader.disk.size(LOG) // 2)
        await all_again(cluster, leader)
        await cluster.until(lambda: cluster.leader() not in (None, leader))
        await cluster.until(lambda: not leader.participant.partitions.damaged)
        await whole_again(cluster)

    run(3, body)


def test_a_leader_that_cannot_serve_its_sound_log_hands_over_and_keeps_it() -> None:
    async def body(cluster: Cluster) -> None:
        leader = await filled(cluster)
        partition = leader.participant.partitions.find("t", 0)
        assert partition is not None
        leader.participant.partitions.unable.add(partition)
        await cluster.until(lambda: cluster.leader() not in (None, leader))
        assert not leader.participant.partitions.unable
        assert not leader.participant.partitions.damaged
        await whole_again(cluster)

    run(3, body)


@proves("G14")
def test_leaders_that_are_all_damaged_do_not_hand_over_for_ever() -> None:
    async def body(cluster: Cluster) -> None:
        await filled(cluster)
        await asyncio.sleep(70)
        for machine in cluster.machines.values():
            machine.kill()
            machine.disk.flip(LOG, machine.disk.size(LOG) // 2)
        await all_again(cluster, cluster[1])
        epochs = []
        for _ in range(3):
            epochs.append(cluster.state().leader_epoch)
            await asyncio.sleep(400)
        assert epochs[2] - epochs[1] <= 3, "each asks again after ever longer pauses"
        assert cluster.state().leader_epoch - epochs[2] <= 3
        assert cluster.leader() is not None

    run(3, body)


@proves("F1")
def test_a_topic_that_asks_for_the_disk_from_now_on_is_synced_without_a_further_write() -> None:
    async def body(cluster: Cluster) -> None:
        await filled(cluster, durability="memory")
        assert all(machine.replica().log.durable_offset == 0 for machine in cluster.machines.values())
        one = cluster[1]
        await one.process.run(one.participant.configs.alter_topic("t", {"durability": "disk"}))
        logs = [machine.replica().log for machine in cluster.machines.values()]
        await cluster.until(lambda: all(each.durable_offset == 40 for each in logs))

    run(3, body)
