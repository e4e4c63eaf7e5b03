"""Courses (see `courses`) around the moments at which records are delivered to share groups and acknowledged.

Three brokers may have a part in that: who leads the data and decides, who coordinates the share partition and keeps
what was decided, and who coordinates the group. `ShareSight` tells of the moment at which an answer leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from headrace.cluster.names import SHARE_STATE_TOPIC
from headrace.coordinators.state_log import partition_of
from headrace.queues.messages import SharePartitionKey
from headrace.queues.state_records import coordinator_key
from headrace.simulator.broker import WORKERS
from headrace.simulator.courses import Course
from headrace.simulator.harm import ANY, Harm
from headrace.simulator.machine import Machine
from headrace.simulator.share_history import ShareHistory
from headrace.storage.log import TopicPartition


class ShareSight:
    """What was told last, and who has a part in it."""

    def __init__(self, judge: ShareHistory, state_partitions: int) -> None:
        self.judge = judge
        self._state_partitions = state_partitions

    def keeper(self, harm: Harm, where: TopicPartition) -> Machine | None:
        """Who coordinates the share partition."""
        topic = harm.image().topics.get(where.topic)
        if topic is None:
            return None
        key = SharePartitionKey(WORKERS, topic.id, where.partition)
        number = partition_of(coordinator_key(key), self._state_partitions)
        return harm.leader_of(TopicPartition(SHARE_STATE_TOPIC, number))

    def next_accepted(self, found: list[TopicPartition]) -> Callable[[], bool]:
        """Wait until something more is accepted, and have its partition in the list."""
        known = self.judge.last_accepted

        def has_come() -> bool:
            if self.judge.last_accepted is not known and self.judge.last_accepted is not None:
                found.append(self.judge.last_accepted[0])
            return bool(found)

        return has_come

    def next_delivered(self, found: list[TopicPartition]) -> Callable[[], bool]:
        known = self.judge.last_delivered

        def has_come() -> bool:
            if self.judge.last_delivered is not known and self.judge.last_delivered is not None:
                found.append(self.judge.last_delivered[0])
            return bool(found)

        return has_come


ShareScript = Callable[[Harm, ShareSight], Course]


def _soon(harm: Harm) -> float:
    return harm.random.choice((0.0, 0.0, harm.random.uniform(0, 0.02)))


def _moment(harm: Harm, sight: ShareSight, found: list[TopicPartition]) -> Callable[[], bool]:
    return harm.random.choice((sight.next_accepted, sight.next_delivered))(found)


def kill_keeper_when_accepted(harm: Harm, sight: ShareSight) -> Course:
    """What it has answered has to be known to who coordinates next."""
    found: list[TopicPartition] = []
    yield sight.next_accepted(found)
    yield _soon(harm)
    keeper = sight.keeper(harm, found[0])
    if keeper is not None:
        harm.kill(keeper, harm.random.uniform(0.3, 3.0))


def kill_data_leader_when_told(harm: Harm, sight: ShareSight) -> Course:
    """Who leads next goes on with what was delivered and acknowledged."""
    found: list[TopicPartition] = []
    yield _moment(harm, sight, found)
    yield _soon(harm)
    leader = harm.leader_of(found[0])
    if leader is not None:
        harm.kill(leader, harm.random.uniform(0.3, 3.0))


def kill_keeper_and_data_leader(harm: Harm, sight: ShareSight) -> Course:
    """Both at once."""
    found: list[TopicPartition] = []
    yield _moment(harm, sight, found)
    yield _soon(harm)
    for machine in {sight.keeper(harm, found[0]): None, harm.leader_of(found[0]): None}:
        if machine is not None:
            harm.kill(machine, harm.random.uniform(0.2, 1.5))


def pause_data_leader(harm: Harm, sight: ShareSight) -> Course:
    """Another leads meanwhile; the first goes on as if nothing had happened."""
    found: list[TopicPartition] = []
    yield _moment(harm, sight, found)
    leader = harm.leader_of(found[0])
    if leader is not None:
        harm.pause(leader, harm.random.uniform(1.2, 3.0) * harm.lease_seconds)
    yield 3 * harm.lease_seconds


def outlive_data_leader(harm: Harm, sight: ShareSight) -> Course:
    """It does not hear that another leads, nor does it lead any more; clients and who keeps the state reach it."""
    found: list[TopicPartition] = []
    yield _moment(harm, sight, found)
    leader = harm.leader_of(found[0])
    if leader is not None:
        harm.cut_off(leader, harm.random.uniform(1.5, 3.0) * harm.lease_seconds)
    yield 3 * harm.lease_seconds


def hold_what_is_kept(harm: Harm, sight: ShareSight) -> Course:
    """What is to be kept, or that it is, is long on its way; meanwhile another leads, perhaps."""
    found: list[TopicPartition] = []
    yield _moment(harm, sight, found)
    leader, keeper = harm.leader_of(found[0]), sight.keeper(harm, found[0])
    if leader is None or keeper is None or leader is keeper:
        return
    one, other = harm.random.choice(((leader, keeper), (keeper, leader)))
    harm.cut_one_way(one, other, 2 * harm.lease_seconds + harm.random.uniform(0.0, 1.0))
    yield harm.random.uniform(0.05, 0.4)
    if harm.random.random() < 0.6:
        harm.cut_off(leader, 2 * harm.lease_seconds)
    yield 3 * harm.lease_seconds


def lose_power_when_accepted(harm: Harm, sight: ShareSight) -> Course:
    """All of them where that may be, or else who keeps the state loses what it may."""
    found: list[TopicPartition] = []
    yield sight.next_accepted(found)
    yield _soon(harm)
    keeper = sight.keeper(harm, found[0])
    if harm.regime == ANY:
        for machine in harm.machines:
            harm.cut_power(machine, harm.random.uniform(0.05, 1.0))
        yield 2 * harm.lease_seconds
    elif keeper is not None:
        harm.lose_what_may_be(keeper, harm.random.uniform(0.1, 1.0))


SHARE_COURSES: Final[dict[str, ShareScript]] = {
    "kill keeper when accepted": kill_keeper_when_accepted,
    "kill data leader when told": kill_data_leader_when_told,
    "kill keeper and data leader": kill_keeper_and_data_leader,
    "pause data leader": pause_data_leader,
    "outlive data leader": outlive_data_leader,
    "hold what is kept": hold_what_is_kept,
    "lose power when accepted": lose_power_when_accepted,
}
