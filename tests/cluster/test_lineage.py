"""Coordination put back to an older copy: brokers notice, change nothing, and go on when an operator accepts."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from cluster.participants import DATA, Cluster, run
from headrace.cluster import keys
from headrace.cluster.controller_state import (
    Controls,
    Difference,
    Doubt,
    ElectedController,
    Lineage,
    decode_doubt,
    encode_doubt,
)
from headrace.cluster.image import Image
from headrace.cluster.lineage import (
    EPOCHS_ABOVE,
    FILE_NAME,
    PRODUCER_IDS_ABOVE,
    SeenMetadata,
    encode_seen,
    is_older,
    plan_accept,
    read_seen,
)
from headrace.cluster.producer_ids import allocate_producer_ids
from headrace.cluster.topics import CreateTopic
from headrace.errors import DataFolderError, InvalidRequest, MetadataInDoubt
from headrace.ports.coordination import Compare, Delete, Put, TransactionResult
from headrace.ports.disk import write_atomically
from headrace.storage.log import look_at
from headrace.virtual.clock import VirtualClock
from headrace.virtual.disk import VirtualDisk, VirtualFile
from partitions.led import Deletion
from proving import proves

layouts = pytest.mark.parametrize("layout", ["partitioned", "shared"])
A_WHILE = 90.0
EPOCH_AT = 12


async def begin(cluster: Cluster, layout: str = "partitioned") -> None:
    for machine in cluster.machines.values():
        await machine.start(**{"log.layout": layout})
    await cluster.create()
    await cluster.produce(b"old")


async def accept(cluster: Cluster) -> None:
    machine = cluster.alive()[0]
    changes = machine.participant.changes
    await machine.process.run(changes.run(lambda image: plan_accept(image, "ab", 5000), even_in_doubt=True))


def doubters(cluster: Cluster) -> set[int]:
    return set(cluster.image().controls.doubts)


def controller(cluster: Cluster) -> ElectedController:
    found = cluster.image().controls.controller
    assert found is not None
    return found


@layouts
@proves("G14", "J6")
def test_running_brokers_stop_changing_things_and_lose_nothing(layout: str, caplog: pytest.LogCaptureFixture) -> None:
    async def body(cluster: Cluster) -> None:
        await begin(cluster, layout)
        await asyncio.sleep(2)
        copy = cluster.store.snapshot()
        await cluster.create("newer", replicas=3)
        await cluster.produce(b"of newer", topic="newer")
        leader = cluster.leader()
        assert leader is not None
        await leader.stop()  # the copy knows nothing of the epoch that follows
        await cluster.until(lambda: cluster.leader() not in (None, leader))
        await cluster.produce(b"new")
        await leader.start()
        await cluster.until(lambda: len(cluster.state().isr) == 3)
        cluster.store.restore(copy)
        await cluster.until(lambda: doubters(cluster) == {1, 2, 3})
        assert "the cluster's metadata is older than what this broker has seen" in caplog.text
        keys_then = {key: found for key, found in cluster.store.snapshot().keys.items() if "/partitions/" in key}
        with pytest.raises(MetadataInDoubt, match="accept-metadata --dry-run"):
            await cluster[1].process.run(cluster[1].participant.topics.create(CreateTopic("t2")))
        await asyncio.sleep(A_WHILE)
        keys_now = {key: found for key, found in cluster.store.snapshot().keys.items() if "/partitions/" in key}
        assert keys_now == keys_then
        for machine in cluster.machines.values():
            assert machine.held() == [b"old", b"new"]
            assert machine.held("newer") == [b"of newer"]
        told = cluster.image().controls.doubts[1]
        assert {(row.kind, row.topic) for row in told.differences} == {("epoch", "t"), ("vanished", "newer")}
        await accept(cluster)
        await cluster.until(lambda: cluster.leader() is not None)
        await cluster.produce(b"after")
        await cluster.until(lambda: len(cluster.state().isr) == 3)
        assert cluster.state().leader_epoch > EPOCHS_ABOVE
        assert cluster.state().lost is None
        await asyncio.sleep(A_WHILE)
        for machine in cluster.machines.values():
            assert machine.held() == [b"old", b"new", b"after"]
            assert [str(log.topic_partition) for log in machine.participant.assignment.set_aside] == ["newer-0"]
        client = cluster.store.client("tool", cluster[1].process)
        ids = await cluster[1].process.run(allocate_producer_ids(client, cluster.image().prefix, bytes))
        assert ids.start == 5000 + PRODUCER_IDS_ABOVE

    run(3, body)


@proves("G14")
@pytest.mark.parametrize("changes", [0, 1, 2, 30])
def test_a_restore_is_noticed_though_as_much_has_been_changed_since(changes: int) -> None:
    async def body(cluster: Cluster) -> None:
        await begin(cluster)
        copy = cluster.store.snapshot()
        leader = cluster.leader()
        assert leader is not None
        await leader.stop()
        await cluster.until(lambda: cluster.leader() not in (None, leader))
        await cluster.produce(b"new")
        taken = cluster.store.revision - copy.revision
        cluster.store.restore(copy)
        for _ in range(taken + changes - 1):
            cluster.store.transact((), [Put("/headrace/another", b"cluster")])
        await cluster.until(lambda: doubters(cluster) == {machine.number for machine in cluster.alive()})
        await leader.start()
        await accept(cluster)
        await cluster.until(lambda: cluster.leader() is not None and len(cluster.state().isr) == 3)
        held = [b"old", b"new"]
        await cluster.until(lambda: all(machine.held() == held for machine in cluster.machines.values()))

    run(3, body)


@layouts
@proves("G14")
def test_brokers_that_start_on_older_metadata_take_no_roles_and_serve_all_when_it_is_accepted(layout: str) -> None:
    async def body(cluster: Cluster) -> None:
        await begin(cluster, layout)
        copy = cluster.store.snapshot()
        for number in (1, 2, 3):
            await cluster[number].stop()
            await cluster[number].start()
        await cluster.produce(b"new")
        await asyncio.sleep(3)
        for number in (1, 2, 3):
            cluster[number].kill()
        cluster.store.restore(copy)
        for number in (1, 2, 3):
            await cluster[number].start()
        await cluster.until(lambda: doubters(cluster) == {1, 2, 3})
        await asyncio.sleep(A_WHILE)
        assert cluster.leader() is None
        for machine in cluster.machines.values():
            assert [log.end_offset for log in machine.participant.store.logs()] == [2]
        await accept(cluster)
        await cluster.until(lambda: len(cluster.state().isr) == 3)
        for machine in cluster.machines.values():
            assert machine.held() == [b"old", b"new"]

    run(3, body)


@layouts
@pytest.mark.parametrize("seed", range(1, 5))
@proves("G14", "F5")
def test_what_was_synced_outlives_a_loss_of_all_power_in_doubt(layout: str, seed: int) -> None:
    """In `shared` the records of a partition are safe before the folder that names it is."""

    async def body(cluster: Cluster) -> None:
        settings = {"log.layout": layout, "checkpoint.ms": 3_600_000}
        for machine in cluster.machines.values():
            await machine.start(**settings)
        await cluster.create(durability="disk")
        await cluster.create("unknown", durability="disk")
        await asyncio.sleep(2)
        copy = cluster.store.snapshot()
        await cluster.create("newer")
        await cluster.produce(b"old")
        cluster.store.restore(copy)
        await cluster.until(lambda: all(machine.participant.metadata.is_held for machine in cluster.alive()))
        await cluster.produce(b"in doubt")
        for machine in cluster.machines.values():
            machine.lose_power()
        for machine in cluster.machines.values():
            await machine.start(**settings)
        await accept(cluster)
        await cluster.until(lambda: cluster.leader() is not None and len(cluster.state().isr) == 3)
        held = [b"old", b"in doubt"]
        await cluster.until(lambda: all(machine.held() == held for machine in cluster.machines.values()))

    run(3, body, seed)


@layouts
@pytest.mark.parametrize("seed", range(3, 6))
@proves("G14", "F5")
def test_who_is_elected_when_metadata_is_accepted_has_synced_what_it_reported(layout: str, seed: int) -> None:
    async def body(cluster: Cluster) -> None:
        await begin(cluster, layout)
        await cluster.create("synced", durability="disk", min_insync_replicas=2)
        first = cluster.leader("synced")
        assert first is not None
        copy = cluster.store.snapshot()
        first.kill()
        await cluster.until(lambda: cluster.leader("synced") not in (None, first))
        await first.start(**{"log.layout": layout})
        first.disk.serve(first.process, lambda: 20.0)
        await cluster.produce(b"of two", topic="synced")
        cluster.store.restore(copy)
        await cluster.until(lambda: all(machine.participant.metadata.is_held for machine in cluster.alive()))
        await accept(cluster)
        await cluster.until(lambda: cluster.leader("synced") is not None)
        for machine in cluster.machines.values():
            machine.lose_power()
        for machine in cluster.machines.values():
            await machine.start(**{"log.layout": layout})
        await cluster.until(lambda: cluster.leader("synced") is not None and len(cluster.state("synced").isr) == 3)
        for machine in cluster.machines.values():
            assert b"of two" in machine.held("synced")

    run(3, body, seed)


@layouts
@proves("G14", "F6")
def test_who_is_elected_when_metadata_is_accepted_brings_back_nothing_that_was_deleted(layout: str) -> None:
    """It holds most by a tail that nobody has acknowledged, and was cut off when the others deleted."""

    async def body(cluster: Cluster) -> None:
        await begin(cluster, layout)
        await cluster.produce(b"kept")
        first = cluster.leader()
        assert first is not None
        await cluster.until(lambda: all(len(machine.held()) == 2 for machine in cluster.machines.values()))
        copy = cluster.store.snapshot()
        cluster.isolate(first)
        cluster.store.cut(first.host)
        await cluster.produce(b"tail", acks=1)
        await cluster.until(lambda: cluster.leader() not in (None, first))
        second = cluster.leader()
        assert second is not None
        deletion = Deletion()
        second.process.context.run(second.participant.partitions.delete_before, second.replica(), 1, deletion)
        await cluster.until(lambda: deletion.answered)
        assert (deletion.error, second.replica().log.start_offset, first.replica().log.start_offset) == (None, 1, 0)
        cluster.store.restore(copy)
        cluster.store.heal(first.host)
        cluster.rejoin(first)
        await cluster.until(lambda: all(machine.participant.metadata.is_held for machine in cluster.alive()))
        await accept(cluster)
        await cluster.until(lambda: cluster.leader() is not None)
        assert cluster.leader() is first
        await cluster.until(lambda: len(cluster.state().isr) == 3)
        for machine in cluster.machines.values():
            assert machine.replica().log.start_offset == 1

    run(3, body)


@layouts
@proves("G14")
def test_epochs_of_logs_alone_tell_of_a_restore(layout: str) -> None:
    async def body(cluster: Cluster) -> None:
        await begin(cluster, layout)
        copy = cluster.store.snapshot()
        leader = cluster.leader()
        assert leader is not None
        await leader.stop()
        await cluster.until(lambda: cluster.leader() not in (None, leader))
        await cluster.produce(b"new")
        for machine in cluster.alive():
            machine.kill()
            machine.disk.remove(f"{DATA}/{FILE_NAME}")  # nobody remembers a revision
            others = machine.number
        cluster.store.restore(copy)
        await cluster[others].start()
        await cluster.until(lambda: doubters(cluster) == {others})
        told = cluster.image().controls.doubts[others]
        assert [(row.kind, row.topic) for row in told.differences] == [("epoch", "t")]

    run(3, body)


@layouts
@pytest.mark.parametrize("offset", [0, 2])
@pytest.mark.parametrize("power", [False, True], ids=["killed", "after a loss of power"])
@proves("G14", "J3")
def test_an_epoch_that_is_damage_tells_of_no_restore(layout: str, offset: int, power: bool) -> None:
    """The CRC of a batch does not cover its epoch."""

    async def body(cluster: Cluster) -> None:
        await begin(cluster, layout)
        await cluster.produce(b"more")
        await cluster.produce(b"last")
        await cluster.until(lambda: all(each.replica().log.durable_offset == 3 for each in cluster.alive()))
        follower = next(each for each in cluster.alive() if each is not cluster.leader())
        log = follower.replica().log
        piece = log.read(offset, 1, 3, warm=True).slices[0]
        if power:
            follower.lose_power()
        else:
            follower.kill()
        follower.disk.flip(piece.file.path, piece.position + EPOCH_AT + 1, 4)
        await follower.start()
        for each in range(follower.replica().log.end_offset):
            look_at(follower.replica().log, each)
        await cluster.until(lambda: len(cluster.state().isr) == 3 and not follower.participant.partitions.damaged)
        await cluster.produce(b"after")
        assert not doubters(cluster)
        await cluster.until(lambda: follower.replica().log.end_offset == 4)
        assert follower.held() == [b"old", b"more", b"last", b"after"]
        leader = cluster.leader()
        assert leader is not None
        assert follower.replica().log.epoch_starts() == leader.replica().log.epoch_starts()

    run(3, body)


@proves("G14")
def test_a_broker_that_was_away_finds_that_somebody_has_accepted() -> None:
    async def body(cluster: Cluster) -> None:
        await begin(cluster)
        await asyncio.sleep(2)
        copy = cluster.store.snapshot()
        await cluster.create("newer", replicas=3)
        await asyncio.sleep(2)
        await cluster[3].stop()
        cluster.store.restore(copy)
        await cluster.until(lambda: doubters(cluster) == {1, 2})
        await accept(cluster)
        await cluster.until(lambda: not doubters(cluster))
        await cluster[3].start()
        await cluster.until(lambda: len(cluster.state().isr) == 3)
        assert not doubters(cluster)
        assert cluster.image().controls.lineage == Lineage(1, "ab")
        assert read_seen(cluster[3].disk, DATA).lineage == Lineage(1, "ab")  # type: ignore[union-attr]

    run(3, body)


@proves("G14")
def test_a_new_broker_holds_too_while_another_doubts() -> None:
    async def body(cluster: Cluster) -> None:
        for number in (1, 2):
            await cluster[number].start()
        await cluster.create(replicas=2)
        await asyncio.sleep(2)
        copy = cluster.store.snapshot()
        await cluster.create("newer", replicas=2)
        cluster[1].kill()
        cluster.store.restore(copy)
        await cluster.until(lambda: doubters(cluster) == {2})
        await cluster[3].start()
        await asyncio.sleep(A_WHILE)
        assert cluster.image().controls.controller == cluster[2].participant.view.image.controls.controller
        assert cluster[3].participant.metadata.is_held
        assert cluster[3].participant.controller is not None
        assert cluster[3].participant.controller.election.term is None

    run(3, body)


@proves("G3", "G14")
def test_a_term_is_won_again_after_a_restore_that_others_made_up_for() -> None:
    async def body(cluster: Cluster) -> None:
        await begin(cluster)
        await asyncio.sleep(2)
        copy = cluster.store.snapshot()
        assert copy.revision >= controller(cluster).revision
        await cluster[1].stop()  # the controller; the copy knows nothing of the next one's term
        await cluster.until(lambda: controller(cluster).broker == 2)
        await cluster[1].start()
        await cluster.until(lambda: len(cluster.state().isr) == 3)
        await cluster.produce(b"new")
        newest = cluster.store.revision
        cluster.store.restore(copy)
        while cluster.store.revision < newest:
            cluster.store.transact((), (Put("/made-up-for", b""),))
        await cluster.until(lambda: doubters(cluster) == {1, 2, 3})
        await accept(cluster)
        await cluster.until(lambda: cluster.leader() is not None)
        await cluster.produce(b"newer")
        assert cluster[1].held() == [b"old", b"new", b"newer"]

    run(3, body)


@proves("G3", "G14")
def test_a_term_that_coordination_forgot_before_anybody_saw_it_is_won_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(cluster: Cluster) -> None:
        await begin(cluster)
        store, transact = cluster.store, cluster.store.transact

        def forgetful(compares: Sequence[Compare], actions: Sequence[Put | Delete]) -> TransactionResult:
            copy = store.snapshot()
            result = transact(compares, actions)
            if any(action.key == keys.controller_key(cluster.image().prefix) for action in actions):
                monkeypatch.undo()
                store.restore(copy)
            return result

        monkeypatch.setattr(store, "transact", forgetful)
        cluster[1].kill()
        await cluster.until(lambda: store.restores == 1)
        await cluster.until(lambda: controller(cluster).broker == 2)
        await cluster.until(lambda: cluster.leader() is not None)
        await cluster.produce(b"new")

    run(3, body)


@pytest.mark.parametrize(
    ("found", "older"),
    [
        ((0, "", 9), True),
        ((0, "", 10), True),
        ((1, "a", 9), True),
        ((1, "a", 10), False),
        ((1, "b", 99), True),
        ((2, "c", 3), False),
    ],
)
def test_a_history_is_older_by_its_lineage_and_then_by_its_revision(found: tuple[int, str, int], older: bool) -> None:
    number, known_as, revision = found
    image = Image("/headrace/c/", revision=revision, controls=Controls(lineage=Lineage(number, known_as)))
    assert is_older(image, SeenMetadata("c", Lineage(1, "a"), 10)) is older


def test_what_was_seen_and_doubted_is_kept_as_it_is() -> None:
    disk = VirtualDisk(VirtualClock())
    disk.make_folder(DATA)
    seen = SeenMetadata("c", Lineage(2, "ff"), 7)
    assert read_seen(disk, DATA) is None
    write_atomically(disk, f"{DATA}/{FILE_NAME}", encode_seen(seen))
    assert read_seen(disk, DATA) == seen
    write_atomically(disk, f"{DATA}/{FILE_NAME}", b"{")
    with pytest.raises(DataFolderError, match="is damaged"):
        read_seen(disk, DATA)
    doubt = Doubt(3, 1, 20, 10, 5, 2, (Difference("epoch", "t", 1, b"t" * 16, "more"),))
    assert decode_doubt(3, json.loads(encode_doubt(doubt))) == doubt


def test_a_doubt_that_arrives_after_it_was_answered_is_none() -> None:
    doubt = Doubt(3, 1, 20, 10, 5)
    assert Controls(lineage=Lineage(1, "a"), told_doubts={3: doubt}).doubts == {3: doubt}
    assert Controls(lineage=Lineage(2, "b"), told_doubts={3: doubt}).doubts == {}


def test_nothing_is_accepted_that_nobody_doubts() -> None:
    with pytest.raises(InvalidRequest, match="nothing to accept"):
        plan_accept(Image("/headrace/c/"), "ab", 0)


@proves("G14")
def test_a_folder_of_another_cluster_is_refused() -> None:
    async def body(cluster: Cluster) -> None:
        await cluster[1].start()
        await cluster[1].stop()
        write_atomically(cluster[1].disk, f"{DATA}/{FILE_NAME}", encode_seen(SeenMetadata("another", Lineage(), 1)))
        participant = cluster[1].make()
        with pytest.raises(DataFolderError, match="belongs to cluster 'another'"):
            await cluster[1].process.run(participant.start())
        await cluster[1].process.run(participant.close())

    run(1, body)


class Failing:
    """The nth call of the disk about `metadata.json` fails, and nothing else does."""

    def __init__(self, cluster: Cluster, nth: int) -> None:
        self.calls = 0
        self.failed = ""
        self._is_renamed = False
        self._nth = nth
        self._disk = cluster[1].disk
        self._disk.trouble = self._ask

    def _ask(self, call: str, path: str) -> int:
        ours = path.startswith(f"{DATA}/{FILE_NAME}")
        if not ours and not (self._is_renamed and call == "sync folder"):
            return 0
        self.calls += 1
        self._is_renamed = call == "rename"
        if self.calls != self._nth:
            return 0
        self.failed = call
        return errno.EIO

    def end(self) -> bool:
        """Whether there was a call that could fail."""
        self._disk.mend()
        return bool(self.failed)


def walk(body: Callable[[Cluster, int], Coroutine[Any, Any, bool]]) -> int:
    """Run it with the first call failing, the second, and so on until all have; answers how many there were."""
    for nth in itertools.count(1):
        reached: list[bool] = []

        async def one(cluster: Cluster, nth: int = nth, reached: list[bool] = reached) -> None:
            await begin_alone(cluster)
            reached.append(await body(cluster, nth))

        run(1, one)
        if not reached[0]:
            return nth - 1
    raise AssertionError


async def begin_alone(cluster: Cluster) -> None:
    await cluster[1].start()
    await cluster.create(replicas=1)
    await cluster.produce(b"old")
    await asyncio.sleep(3)


def kept(cluster: Cluster) -> SeenMetadata:
    found = read_seen(cluster[1].disk, DATA)
    assert found is not None
    return found


@proves("G14", "J6")
def test_a_start_that_cannot_read_or_keep_what_it_has_seen_fails_and_the_file_stays_whole() -> None:
    async def body(cluster: Cluster, nth: int) -> bool:
        await cluster[1].stop()
        before, failing = kept(cluster), Failing(cluster, nth)
        participant = cluster[1].make()
        try:
            await cluster[1].process.run(participant.start())
        except OSError:
            await cluster[1].process.run(participant.close())
        else:
            assert not failing.failed, "it started all the same"
            await cluster[1].stop()
        cluster[1].kill()
        reached = failing.end()
        assert kept(cluster).revision >= before.revision
        await cluster[1].start()
        await cluster.until(lambda: cluster.leader() is not None)
        assert cluster[1].held() == [b"old"]
        assert not doubters(cluster)
        return reached

    assert walk(body) >= 9  # exists, open, size, read; open, truncate, write, rename, sync of the folder


@proves("G14", "J6")
def test_a_broker_that_cannot_keep_what_it_has_seen_goes_on_and_tries_again() -> None:
    async def body(cluster: Cluster, nth: int) -> bool:
        before, failing = kept(cluster), Failing(cluster, nth)
        await cluster.create("newer", replicas=1)
        newest = cluster.image().revision
        await cluster.until(lambda: bool(failing.failed) or failing.calls >= 5, 5)
        reached = failing.end()
        assert kept(cluster).revision >= before.revision
        await asyncio.sleep(3)
        assert kept(cluster).revision >= newest
        await cluster.produce(b"new")
        return reached

    assert walk(body) == 5  # open, truncate, write, sync, rename


@proves("G14", "J6")
def test_metadata_that_was_accepted_is_kept_though_the_disk_fails_at_first() -> None:
    async def body(cluster: Cluster, nth: int) -> bool:
        copy = cluster.store.snapshot()
        await cluster.create("newer", replicas=1)
        await asyncio.sleep(3)
        cluster.store.restore(copy)
        await cluster.until(lambda: doubters(cluster) == {1})
        failing = Failing(cluster, nth)
        await accept(cluster)
        await cluster.until(lambda: cluster.leader() is not None)
        reached = failing.end()
        await asyncio.sleep(3)
        assert kept(cluster).lineage == Lineage(1, "ab")
        await cluster.produce(b"new")
        cluster[1].kill()
        await cluster[1].start()
        await cluster.until(lambda: cluster.leader() is not None)
        assert cluster[1].held() == [b"old", b"new"]
        assert not doubters(cluster)
        return reached

    assert walk(body) >= 5


def test_a_file_that_cannot_be_written_is_not_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(cluster: Cluster) -> None:
        await begin_alone(cluster)
        disk, opened = cluster[1].disk, list[VirtualFile]()
        real_open = disk.open

        def noted(path: str, *, create: bool = False, writable: bool = False) -> VirtualFile:
            opened.append(real_open(path, create=create, writable=writable))
            return opened[-1]

        monkeypatch.setattr(disk, "open", noted)
        Failing(cluster, 3)
        await cluster.create("newer", replicas=1)
        await asyncio.sleep(3)
        ours = [file for file in opened if file.path.startswith(f"{DATA}/{FILE_NAME}")]
        assert len(ours) >= 2
        for file in ours:
            with pytest.raises(OSError, match="Bad file descriptor"):
                file.size()

    run(1, body)


def test_what_is_being_kept_does_not_replace_what_was_accepted_meanwhile() -> None:
    async def body(cluster: Cluster) -> None:
        await begin_alone(cluster)
        copy = cluster.store.snapshot()
        await cluster.create("newer", replicas=1)
        await asyncio.sleep(3)
        cluster[1].disk.hold_syncs()
        await cluster.create("newest", replicas=1)
        await asyncio.sleep(2)
        cluster.store.restore(copy)
        await cluster.until(lambda: doubters(cluster) == {1})
        await accept(cluster)
        await cluster.until(lambda: not doubters(cluster))
        cluster[1].disk.release_syncs()
        await asyncio.sleep(3)
        assert kept(cluster).lineage == Lineage(1, "ab")

    run(1, body)
