"""Groups follow the leadership of their partition: loaded in pieces when it begins, gone when it ends."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field, replace

import pytest

from chosen_layout import log_path, new_store
from headrace.cluster.image import Deletion, Image, PartitionState, Topic
from headrace.cluster.names import OFFSETS_TOPIC
from headrace.coordinators.record_fields import Record
from headrace.coordinators.state_log import StateLog
from headrace.coordinators.state_partitions import (
    PAUSE_MOST_SECONDS,
    PIECE_BYTES,
    UNABLE_AFTER_SECONDS,
    Loss,
    StatePartitions,
)
from headrace.errors import ErrorCode
from headrace.groups.coordinator import GroupCoordinator
from headrace.groups.limits import CoordinatorLimits, GroupLimits
from headrace.groups.messages import CommitRequest, JoinReply, JoinRequest, OffsetToCommit, PartitionResult
from headrace.groups.offsets import OFFSETS as OFFSETS_STATE
from headrace.groups.offsets import records_of
from headrace.groups.records import OffsetAndMetadata
from headrace.partitions.partition import Partition
from headrace.partitions.partitions import Partitions
from headrace.ports.disk import read_whole
from headrace.records import kernel
from headrace.settings.values import log_settings
from headrace.storage.layouts import Store
from headrace.storage.log import Log, ReadResult, TopicPartition
from headrace.virtual.clock import VirtualClock
from headrace.virtual.disk import VirtualDisk, VirtualFile
from proving import proves

BROKER, OTHER = 1, 2
ALONE = {BROKER: "a"}
OFFSETS = TopicPartition(OFFSETS_TOPIC, 0)
SETTINGS = log_settings({}, {"max.message.bytes": "33554432"})
LIMITS = CoordinatorLimits(GroupLimits(1000, 60_000, max_size=50, initial_rebalance_delay_ms=0))


def topic_id(image: Image, name: str) -> bytes | None:
    found = image.topics.get(name)
    return None if found is None else found.id


def image_of(*topics: str) -> Image:
    state = PartitionState(0, BROKER, 0, (BROKER,), (BROKER,))
    known = {name: Topic(name, name.encode().ljust(16), (state,)) for name in topics}
    return Image("/headrace/c/", topics=known)


@dataclass(slots=True)
class Scene:
    """A broker that leads the one partition of the offsets topic, or does not; of the layout of the run, unless it is
    given."""

    layout: str = ""
    clock: VirtualClock = field(default_factory=VirtualClock)
    image: Image = field(default_factory=lambda: image_of(OFFSETS_TOPIC, "t"))
    epoch: int = 0
    accepted: frozenset[Loss] = frozenset()
    disk: VirtualDisk = field(init=False)
    partitions: Partitions = field(init=False)
    groups: GroupCoordinator = field(init=False)
    followed: StatePartitions = field(init=False)

    def __post_init__(self) -> None:
        self.disk = VirtualDisk(self.clock)
        self.disk.make_folder("/data")
        store = new_store(self.disk, self.clock, "/data", self.layout)
        store.open({})
        store.create(OFFSETS, bytes(16), SETTINGS)
        self._serve(store, "a", {})

    def _serve(self, store: Store, incarnation: str, watermarks: dict[tuple[bytes, int], int]) -> None:
        self.partitions = Partitions(store, self.clock, BROKER, incarnation, watermarks)
        log = StateLog(self.partitions, OFFSETS_TOPIC)
        self.groups = GroupCoordinator(
            self.clock,
            log.append,
            1,
            lambda: "id",
            LIMITS,
            lambda name: topic_id(self.image, name),
            log.append_in_transaction,
        )
        self.followed = StatePartitions(
            OFFSETS_STATE, self.partitions, self.groups, self.disk, lambda: self.image, lambda: self.accepted
        )

    def stop(self) -> None:
        self.groups.close()
        self.partitions.store.close()

    def start(self) -> None:
        """The broker after a stop in order, which leads nothing yet."""
        ended = self.log.end_offset
        store = new_store(self.disk, self.clock, "/data", self.layout)
        store.open({OFFSETS: (bytes(16), SETTINGS)})
        self._serve(store, "a", {(bytes(16), 0): ended})

    @property
    def log(self) -> Log:
        log = self.partitions.store.get(OFFSETS)
        assert log is not None
        return log

    @property
    def path(self) -> str:
        return log_path("/data", OFFSETS, self.layout)

    def flip(self, value: bytes) -> None:
        """A wrong byte in the record that holds this."""
        self.disk.flip(self.path, read_whole(self.disk, self.path).index(value))

    def lead(self, members: dict[int, str] | None = None, replicas: tuple[int, ...] = (BROKER,)) -> Partition:
        partition = self.elected(members, replicas)
        self.followed.follow()
        return partition

    def elected(self, members: dict[int, str] | None = None, replicas: tuple[int, ...] = (BROKER,)) -> Partition:
        """As `lead`, but the groups do not know it yet."""
        self.epoch += 1
        return self.partitions.lead(self.log, self.epoch, members or ALONE, replicas, revision=self.epoch)

    def follow(self) -> None:
        self.epoch += 1
        self.partitions.follow(self.log, self.epoch, OTHER)
        self.followed.follow()

    def commit(self, offset: int, metadata: str = "", topic: str = "t") -> list[int]:
        codes: list[int] = []

        def reply(results: tuple[PartitionResult, ...]) -> None:
            codes.extend(result.error_code for result in results)

        request = CommitRequest((OffsetToCommit(topic, 0, offset, 0, metadata, topic_id(self.image, topic)),))
        self.groups.commit("g", request, reply)
        self.clock.run_soon()
        return codes

    def committed(self) -> tuple[int, list[int]]:
        reply = self.groups.fetch_offsets("g", None)
        return reply.error_code, [one.committed_offset for one in reply.offsets]


def commit_records(offset: int) -> list[Record]:
    return records_of("g", {("t", 0): OffsetAndMetadata(offset, 0, "", 0, topic_id=image_of("t").topics["t"].id)})


class FailingReads:
    """Reads of log files fail with this number while it is one."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.number = 0
        self.count = 0
        real = VirtualFile.pread

        def pread(file: VirtualFile, count: int, position: int) -> bytes:
            if self.number and file.path.endswith(".log"):
                self.count += 1
                raise OSError(self.number, os.strerror(self.number), file.path)
            return real(file, count, position)

        patched.setattr(VirtualFile, "pread", pread)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> FailingReads:
    return FailingReads(monkeypatch)


@proves("G16")
def test_a_large_partition_is_loaded_over_several_turns_and_says_so_meanwhile() -> None:
    scene = Scene()
    scene.lead()
    scene.clock.run_soon()
    turns_wanted = 4
    each_bytes = 4000
    for offset in range(turns_wanted * PIECE_BYTES // each_bytes):
        assert scene.commit(offset, "m" * each_bytes) == [0]
    scene.lead()
    turns = 0

    def look() -> None:
        nonlocal turns
        if scene.committed()[0] != ErrorCode.COORDINATOR_LOAD_IN_PROGRESS:
            scene.clock.halt()
        else:
            assert scene.followed.reading
            turns += 1

    scene.clock.watch = look
    assert scene.clock.run()
    assert turns >= turns_wanted
    assert scene.committed() == (0, [offset])
    assert not scene.followed.reading


@proves("G16")
def test_a_new_leader_answers_only_when_all_that_it_began_with_is_committed() -> None:
    scene, both = Scene(), {BROKER: "a", OTHER: "b"}
    scene.lead(both, (BROKER, OTHER))
    scene.clock.run_soon()
    assert scene.commit(7) == [], "the other replica was not heard from"
    scene.follow()
    partition = scene.lead(both, (BROKER, OTHER))
    scene.clock.run_soon()
    assert scene.committed()[0] == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    core = partition.core
    assert core is not None
    core.position_reported(core.subscribed(OTHER, "b", 0, 0.0), 1, 1, 1, 1, 0.0)
    scene.partitions.settle(partition)
    scene.clock.run_soon()
    assert scene.committed() == (0, [7])


@proves("G16")
def test_who_waits_for_a_group_is_told_that_its_coordinator_is_elsewhere() -> None:
    scene = Scene()
    scene.lead()
    scene.clock.run_soon()
    replies: list[JoinReply] = []
    for client in ("a", "b"):
        request = JoinRequest("", None, client, "/h", 10_000, 30_000, "consumer", (("range", b""),), False, False)
        scene.groups.join("g", request, replies.append)
    scene.follow()
    assert {reply.error_code for reply in replies[-1:]} == {ErrorCode.NOT_COORDINATOR}
    assert scene.committed()[0] == ErrorCode.NOT_COORDINATOR
    scene.lead()
    scene.clock.run_soon()
    assert scene.committed() == (0, [])


def test_offsets_of_a_topic_that_went_away_elsewhere_are_not_inherited() -> None:
    scene = Scene()
    scene.lead()
    scene.clock.run_soon()
    assert scene.commit(7) == [0]
    scene.follow()
    scene.image = image_of(OFFSETS_TOPIC)
    scene.lead()
    scene.clock.run_soon()
    assert scene.committed() == (0, []), "a list names only what there is"
    anew = replace(scene.image.topics[OFFSETS_TOPIC], name="t", id=b"another topic id")
    scene.image = replace(scene.image, topics={**scene.image.topics, "t": anew})
    assert scene.committed() == (0, [])
    assert scene.groups.fetch_offsets("g", [("t", 0)]).offsets[0].committed_offset == -1
    assert scene.commit(3) == [0]
    scene.lead()
    scene.clock.run_soon()
    assert scene.committed() == (0, [3])


def test_offsets_of_a_topic_whose_key_was_missing_for_a_while_are_kept() -> None:
    scene = Scene()
    scene.lead()
    scene.clock.run_soon()
    assert scene.commit(7) == [0]
    there, scene.image = scene.image, image_of(OFFSETS_TOPIC)
    scene.followed.follow()
    scene.lead()
    scene.clock.run_soon()
    assert scene.groups.fetch_offsets("g", [("t", 0)]).offsets[0].committed_offset == 7
    scene.image = there
    scene.followed.follow()
    assert scene.committed() == (0, [7])
    scene.lead()
    scene.clock.run_soon()
    assert scene.committed() == (0, [7])


@pytest.mark.parametrize("loaded", [True, False])
def test_offsets_of_a_topic_that_was_deleted_are_removed(loaded: bool) -> None:
    scene = Scene()
    scene.lead()
    scene.clock.run_soon()
    assert scene.commit(7) == [0]
    if not loaded:
        scene.follow()
    before, deleted = scene.image, {scene.image.topics["t"].id: Deletion("t", (1,), 0)}
    scene.image = replace(image_of(OFFSETS_TOPIC), deleted=deleted)
    scene.followed.forget_topics(before, scene.image)
    if not loaded:
        scene.lead()
    scene.clock.run_soon()
    assert scene.groups.fetch_offsets("g", [("t", 0)]).offsets[0].committed_offset == -1
    scene.image = before
    scene.lead()
    scene.clock.run_soon()
    assert scene.committed() == (0, []), "it is in the log"


def test_a_topic_without_the_offsets_partition_leaves_nothing() -> None:
    scene = Scene()
    scene.lead()
    scene.clock.run_soon()
    scene.image = image_of("t")
    scene.followed.follow()
    assert scene.committed()[0] == ErrorCode.NOT_COORDINATOR


# What cannot be read


@proves("G16")
@pytest.mark.parametrize("layout", ["partitioned", "shared"])
@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO])
def test_a_file_that_cannot_be_opened_is_tried_again(layout: str, number: int) -> None:
    scene = Scene(layout)
    scene.lead()
    scene.clock.run_soon()
    assert scene.commit(200) == [0]
    scene.stop()
    scene.start()
    scene.disk.fail_open(scene.path, number)
    scene.lead()
    scene.clock.run_soon()
    assert scene.committed() == (ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, [])
    assert [closed.is_damage for closed in scene.followed.closed()] == [number == errno.EIO]
    assert bool(scene.partitions.damaged) == (number == errno.EIO), "a bad sector is damage, a want of descriptors not"
    scene.clock.advance(1)
    assert scene.committed() == (0, [200])
    assert not scene.followed.closed()


@pytest.mark.parametrize("layout", ["partitioned", "shared"])
@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EIO])
def test_a_read_that_fails_is_tried_again_with_longer_and_longer_pauses(
    layout: str, number: int, reads: FailingReads
) -> None:
    scene = Scene(layout)
    scene.lead()
    scene.clock.run_soon()
    assert scene.commit(200) == [0]
    reads.number = number
    scene.lead()
    lasts_seconds = 600
    scene.clock.advance(lasts_seconds)
    assert scene.committed() == (ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, [])
    assert reads.count < 5 * lasts_seconds / PAUSE_MOST_SECONDS
    assert not scene.followed.reading, "a start does not wait for it"
    reads.number = 0
    scene.clock.advance(PAUSE_MOST_SECONDS)
    assert scene.committed() == (0, [200])


def test_another_broker_shall_load_what_this_one_cannot_for_long(reads: FailingReads) -> None:
    scene = Scene()
    scene.lead()
    scene.clock.run_soon()
    assert scene.commit(200) == [0]
    reads.number = errno.EMFILE
    partition = scene.lead()
    scene.clock.advance(UNABLE_AFTER_SECONDS / 2)
    assert not scene.partitions.unable
    scene.clock.advance(UNABLE_AFTER_SECONDS)
    assert scene.partitions.unable == {partition}
    assert not scene.partitions.damaged
    reads.number = 0
    scene.clock.advance(PAUSE_MOST_SECONDS)
    assert not scene.partitions.unable
    reads.number = errno.EMFILE
    scene.lead()
    scene.clock.advance(2 * UNABLE_AFTER_SECONDS)
    assert scene.partitions.unable
    scene.follow()
    assert not scene.partitions.unable


@proves("J1")
@pytest.mark.parametrize("layout", ["partitioned", "shared"])
@pytest.mark.parametrize("restarted", [True, False])
def test_damage_is_reported_and_no_older_offset_is_answered(
    layout: str, restarted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also in what this very process wrote, which reads do not check."""
    scene = Scene(layout)
    scene.lead()
    scene.clock.run_soon()
    assert scene.commit(100, "first") == [0]
    assert scene.commit(200, "SECOND") == [0]
    assert scene.commit(300, "third", "u") == [0]
    if restarted:
        scene.stop()
    scene.flip(b"SECOND")
    if restarted:
        scene.start()
    partition = scene.lead()
    scene.clock.advance(1)
    assert scene.committed() == (ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, [])
    assert scene.partitions.damaged == {partition: 1}
    assert [(closed.partition, closed.offset) for closed in scene.followed.closed()] == [(0, 1)]
    told = [record.message for record in caplog.records if "offsets.loss.accepted=0:1" in record.message]
    assert len(told) == 1, "once, however often it is tried"
    scene.follow()
    assert not scene.followed.closed()


@pytest.mark.parametrize("layout", ["partitioned", "shared"])
@pytest.mark.parametrize("restarted", [True, False])
def test_an_operator_may_accept_a_loss_and_only_that_is_lost(layout: str, restarted: bool) -> None:
    scene = Scene(layout)
    scene.lead()
    scene.clock.run_soon()
    for offset, metadata in enumerate(("first", "SECOND", "third", "FOURTH", "fifth")):
        assert scene.commit(offset, metadata, f"t{offset % 2}") == [0]
    if restarted:
        scene.stop()
    scene.flip(b"FOURTH")
    if restarted:
        scene.start()
    scene.image = image_of(OFFSETS_TOPIC, "t0", "t1")
    scene.accepted = frozenset({(0, 1), (1, 3)})
    scene.lead()
    scene.clock.advance(1)
    assert scene.committed()[0] == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, "other places were accepted"
    scene.accepted = frozenset({(0, 3)})
    scene.clock.advance(PAUSE_MOST_SECONDS)
    assert scene.committed() == (0, [4, 1])


def test_a_record_that_this_version_cannot_read_closes_its_partition_and_is_no_damage() -> None:
    scene = Scene()
    partition = scene.lead()
    scene.clock.run_soon()
    assert scene.commit(100) == [0]
    newer = kernel.build([(0, b"\0\1\0\1g\0\1t\0\0\0\0", b"\0\x63" + bytes(30), ())])
    scene.partitions.submit(partition, bytearray(newer), -1, 1000, lambda *_: None)
    scene.partitions.end_turn()
    scene.lead()
    scene.clock.advance(1)
    assert scene.committed()[0] == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    assert [closed.is_damage for closed in scene.followed.closed()] == [False]
    assert not scene.partitions.damaged, "no other replica has it better"
    scene.accepted = frozenset({(0, 1)})
    scene.clock.advance(PAUSE_MOST_SECONDS)
    assert scene.committed() == (0, [100])


def test_a_read_without_a_batch_is_no_end_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    scene.lead()
    scene.clock.run_soon()
    assert scene.commit(100) == [0]
    with monkeypatch.context() as patched:
        patched.setattr(type(scene.log), "read", lambda *_, **__: ReadResult((), 0))
        scene.lead()
        scene.clock.advance(1)
        assert scene.committed()[0] == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    scene.clock.advance(PAUSE_MOST_SECONDS)
    assert scene.committed() == (0, [100])


def test_groups_of_an_earlier_epoch_append_nothing_to_the_next() -> None:
    """Between an election and the moment at which the groups hear of it: whoever loads the epoch reads what it began
    with, and would miss what came later."""
    scene = Scene()
    scene.lead()
    scene.clock.run_soon()
    assert scene.commit(100) == [0]
    scene.elected()
    assert scene.commit(200) == [ErrorCode.NOT_COORDINATOR]
    scene.followed.follow()
    scene.clock.run_soon()
    assert scene.committed() == (0, [100])


def test_what_the_epoch_has_by_the_time_of_the_load_is_loaded_too() -> None:
    scene = Scene()
    scene.lead()
    scene.clock.run_soon()
    assert scene.commit(100) == [0]
    key, value = next(iter(commit_records(200)))
    partition = scene.elected()
    scene.partitions.submit(partition, bytearray(kernel.build([(0, key, value, ())])), -1, 1000, lambda *_: None)
    scene.partitions.end_turn()
    scene.followed.follow()
    scene.clock.run_soon()
    assert scene.committed() == (0, [200])
