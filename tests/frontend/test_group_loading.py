"""Groups follow the leadership of their partition: loaded in pieces when it begins, gone when it ends."""

from __future__ import annotations

from dataclasses import dataclass, field

from chosen_layout import new_store
from headrace.cluster.image import Image, PartitionState, Topic
from headrace.errors import Code
from headrace.groups.coordinator import GroupCoordinator
from headrace.groups.limits import CoordinatorLimits, GroupLimits
from headrace.groups.messages import CommitRequest, JoinReply, JoinRequest, OffsetToCommit, PartitionResult
from headrace.groups.offsets import OFFSETS_TOPIC
from headrace.kafka.group_loading import PIECE_BYTES, GroupPartitions
from headrace.kafka.group_log import GroupLog
from headrace.partitions.partition import Partition
from headrace.partitions.partitions import Partitions
from headrace.settings import log_settings
from headrace.sim.clock import VirtualClock
from headrace.sim.disk import SimDisk
from headrace.storage.log import TopicPartition
from proving import proves

BROKER, OTHER = 1, 2
ALONE = {BROKER: "a"}
LIMITS = CoordinatorLimits(GroupLimits(1000, 60_000, max_size=50, initial_rebalance_delay_ms=0))


def image_of(*topics: str) -> Image:
    state = PartitionState(0, BROKER, 0, (BROKER,), (BROKER,))
    known = {name: Topic(name, bytes(16), (state,)) for name in topics}
    return Image("/headrace/c/", topics=known)


@dataclass(slots=True)
class Scene:
    clock: VirtualClock = field(default_factory=VirtualClock)
    image: Image = field(default_factory=lambda: image_of(OFFSETS_TOPIC, "t"))
    epoch: int = 0
    disk: SimDisk = field(init=False)
    partitions: Partitions = field(init=False)
    groups: GroupCoordinator = field(init=False)
    followed: GroupPartitions = field(init=False)

    def __post_init__(self) -> None:
        self.disk = SimDisk(self.clock)
        self.disk.make_folder("/data")
        store = new_store(self.disk, self.clock, "/data")
        store.open({})
        store.create(TopicPartition(OFFSETS_TOPIC, 0), bytes(16), log_settings({}, {"max.message.bytes": "33554432"}))
        self.partitions = Partitions(store, self.clock, BROKER, "a")
        append = GroupLog(self.partitions).append
        self.groups = GroupCoordinator(self.clock, append, lambda: 1, lambda: "id", lambda: LIMITS)
        self.followed = GroupPartitions(self.partitions, self.groups, self.disk, lambda: self.image)

    def lead(self, members: dict[int, str] | None = None, replicas: tuple[int, ...] = (BROKER,)) -> Partition:
        self.epoch += 1
        log = self.partitions.store.get(TopicPartition(OFFSETS_TOPIC, 0))
        assert log is not None
        partition = self.partitions.lead(log, self.epoch, members or ALONE, replicas, revision=self.epoch)
        self.followed.follow()
        return partition

    def follow(self) -> None:
        self.epoch += 1
        log = self.partitions.store.get(TopicPartition(OFFSETS_TOPIC, 0))
        assert log is not None
        self.partitions.follow(log, self.epoch, OTHER)
        self.followed.follow()

    def commit(self, offset: int, metadata: str = "", topic: str = "t") -> list[int]:
        codes: list[int] = []

        def reply(results: tuple[PartitionResult, ...]) -> None:
            codes.extend(result.error_code for result in results)

        request = CommitRequest((OffsetToCommit(topic, 0, offset, 0, metadata),))
        self.groups.commit("g", request, reply)
        self.clock.run_soon()
        return codes

    def committed(self) -> tuple[int, list[int]]:
        reply = self.groups.fetch_offsets("g", None)
        return reply.error_code, [one.committed_offset for one in reply.offsets]


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
    while scene.committed()[0] == Code.COORDINATOR_LOAD_IN_PROGRESS:
        assert scene.followed.reading
        assert scene.clock.turn()
        turns += 1
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
    assert scene.committed()[0] == Code.COORDINATOR_LOAD_IN_PROGRESS
    core = partition.core
    assert core is not None
    core.heard(core.subscribed(OTHER, "b", 0, 0.0), 1, 1, 1, 1, 0.0)
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
    assert {reply.error_code for reply in replies[-1:]} == {Code.NOT_COORDINATOR}
    assert scene.committed()[0] == Code.NOT_COORDINATOR
    scene.lead()
    scene.clock.run_soon()
    assert scene.committed() == (0, [])


def test_offsets_of_a_topic_that_went_away_elsewhere_are_not_inherited() -> None:
    scene = Scene()
    scene.lead()
    scene.clock.run_soon()
    assert scene.commit(7) == [0]
    scene.follow()
    before, scene.image = scene.image, image_of(OFFSETS_TOPIC)
    scene.followed.forget_topics(before, scene.image)
    scene.lead()
    scene.clock.run_soon()
    assert scene.committed() == (0, [])


def test_a_topic_without_the_offsets_partition_leaves_nothing() -> None:
    scene = Scene()
    scene.lead()
    scene.clock.run_soon()
    scene.image = image_of("t")
    scene.followed.follow()
    assert scene.committed()[0] == Code.NOT_COORDINATOR
