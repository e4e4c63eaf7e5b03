"""The load of share groups on a simulated cluster: members that share the records of `jobs` among more of them than it
has partitions, beside its producers, and how that ends.

A member lives for a while and is gone: without a word, or as a client that is closed. Another one takes its place. A
stranger acknowledges what members have. In some runs records of `jobs` are deleted, by who has read them or by
retention, whether the group is done with them or not; or compacted; or an operator has all members leave and sets the
group's start anew.

At the end (`stop`) nobody dies any more, everything is accepted at once, and then the group's start is the end of every
partition.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Coroutine
from typing import Any, Final

from headrace.cluster.names import SHARE_STATE_TOPIC
from headrace.simulator.broker import JOBS, WORKERS
from headrace.simulator.connection import VERSIONS, Client, Clients
from headrace.simulator.consumer import Consumer
from headrace.simulator.scenario import AT_THE_END, IN_BETWEEN, SharePlan
from headrace.simulator.share_courses import ShareSight
from headrace.simulator.share_history import ShareHistory
from headrace.simulator.share_member import ShareMember, Stranger
from headrace.simulator.transaction_members import Asking
from headrace.simulator.transaction_session import look_at
from headrace.storage.log import TopicPartition
from headrace.wire import api
from headrace.wire.message import Message

PAUSE_SECONDS: Final = 0.05
LOOK_SECONDS: Final = 0.2
LIFE_SECONDS: Final = 1.5
AWAY_SECONDS: Final = 0.2
CLOSED_SHARE: Final = 0.5
"""Of members that are gone, those that have said so."""
FORGERY_SECONDS: Final = 0.25
RESET_SECONDS: Final = (0.5, 2.0)
VERSIONS_OF_OPERATORS: Final = VERSIONS | {api.DESCRIBE_SHARE_GROUP_OFFSETS: 1, api.ALTER_SHARE_GROUP_OFFSETS: 0}


class ShareLoad:
    def __init__(self, clients: Clients, plan: SharePlan, seed: int) -> None:
        history = clients.history
        self.plan = plan
        self.clients = clients
        self.judge = ShareHistory(
            history.note,
            clients.clock.now,
            plan.lock_ms / 1000,
            plan.delivery_limit,
            self._was_stopped,
            self._clocks_differ,
        )
        self.judge.counts = history.counts
        self.judge.is_doubted = self._state_is_doubted
        self.jobs = [TopicPartition(JOBS, index) for index in range(plan.partitions)]
        self.consumers: dict[TopicPartition, Consumer] = {}
        """Who have read what may be deleted."""
        self.starts: dict[TopicPartition, int] = {}
        """As the coordinator of the group tells them in the end."""
        self._seed = seed
        self._random = random.Random(f"{seed} shares")
        self._members: dict[int, ShareMember] = {}
        self._lives = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = False
        self._is_reset = True
        """Whether the start was set anew, if it is to be."""
        self._may_live = asyncio.Event()
        """Unless an operator wants the group to have no members."""

    def start(self) -> None:
        self._may_live.set()
        if self.plan.deletions:
            for where in self.jobs:
                self.consumers[where] = Consumer(self.clients, where, f"consumer of {where}", PAUSE_SECONDS, 0.0)
        for nth in range(self.plan.members):
            self._begin(self._live(nth))
        self._begin(self._forge())
        if self.plan.reset == IN_BETWEEN:
            self._begin(self._reset(self._random.uniform(*RESET_SECONDS)))

    def stop(self) -> None:
        self._stopped = True
        for member in self._members.values():
            member.is_diligent = True
        self._begin(self._watch_starts())
        if self.plan.reset == AT_THE_END:
            self._is_reset = False
            self._begin(self._reset_when_done())

    def _begin(self, what: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(look_at)

    # Members.

    async def _live(self, nth: int) -> None:
        """One life after the other."""
        while True:
            await self._may_live.wait()
            self._lives += 1
            chance = random.Random(f"{self._seed} member {nth} {self._lives}")
            name = f"m{nth}-{self._lives}"
            member = ShareMember(self.clients, self.judge, self.plan, WORKERS, JOBS, name, chance)
            member.is_diligent = self._stopped
            self._members[nth] = member
            await self._some_time(chance.expovariate(1 / LIFE_SECONDS))
            await self._until(lambda: not (self._stopped and self._may_live.is_set()))
            del self._members[nth]
            if chance.random() < CLOSED_SHARE:
                await member.close()
            else:
                member.die()
            await asyncio.sleep(chance.uniform(0, AWAY_SECONDS))

    async def _some_time(self, seconds: float) -> None:
        """Or until the group is to have no members, or the load has ended."""
        clock, end = self.clients.clock, self.clients.clock.now() + seconds
        await self._until(lambda: clock.now() >= end or not self._may_live.is_set() or self._stopped)

    async def _until(self, has_come: Callable[[], bool]) -> None:
        while True:
            if has_come():
                return
            await asyncio.sleep(PAUSE_SECONDS)

    async def _forge(self) -> None:
        """Somebody acknowledges what it does not have, time and again."""
        stranger = Stranger(self.clients, self.judge, WORKERS, JOBS, random.Random(f"{self._seed} stranger"))
        while not self._stopped:
            await asyncio.sleep(self._random.expovariate(1 / FORGERY_SECONDS))
            topic_id = next((each.topic_id for each in self._members.values() if each.topic_id), b"")
            if topic_id:
                await stranger.forge(self._random.choice(self.jobs), topic_id)

    # Operators.

    async def _reset_when_done(self) -> None:
        await self._until(lambda: not self._behind())
        await self._reset(0.0)
        self._is_reset = True

    async def _reset(self, after_seconds: float) -> None:
        """Set the group's start anew."""
        await asyncio.sleep(after_seconds)
        self._may_live.clear()
        await self._until(lambda: not self._members)
        operator = _Operator(self.clients, WORKERS, "operator of shares", JOBS, self._random)
        starts = {where: self._random.randint(0, self._end(where)) for where in self.jobs}
        is_set = False
        while not is_set:
            await asyncio.sleep(PAUSE_SECONDS)
            is_set = await operator.set_starts(starts)
        self.judge.begin_anew(starts)
        self.starts.clear()
        self._may_live.set()

    async def _watch_starts(self) -> None:
        operator = _Operator(self.clients, WORKERS, "describer of shares", JOBS, self._random)
        while True:
            era, starts = self.judge.era, await operator.starts()
            if era == self.judge.era:
                self.starts |= starts
            await asyncio.sleep(LOOK_SECONDS)

    # What can be seen of it.

    def all_partitions(self) -> list[TopicPartition]:
        """With those in which the state of share partitions is kept."""
        state = [TopicPartition(SHARE_STATE_TOPIC, index) for index in range(self.plan.state_partitions)]
        return [*self.jobs, *state]

    def sight(self) -> ShareSight:
        return ShareSight(self.judge, self.plan.state_partitions)

    def _end(self, where: TopicPartition) -> int:
        """Where the partition ends, for all that any broker knows."""
        replicas = [machine.replica(where) for machine in self.clients.machines]
        return max((each.high_watermark for each in replicas if each is not None), default=0)

    def _was_stopped(self, life: str) -> bool:
        return any(life in machine.stopped_lives for machine in self.clients.machines)

    def _clocks_differ(self) -> bool:
        return any(machine.clock_was_set for machine in self.clients.machines)

    def _state_is_doubted(self) -> bool:
        images = (machine.participant.view.image for machine in self.clients.machines if machine.participant)
        topics = (image.topics.get(SHARE_STATE_TOPIC) for image in images)
        return any(state.lost is not None for topic in topics if topic is not None for state in topic.partitions)

    def unsettled(self) -> str:
        if not (self._may_live.is_set() and self._is_reset):
            return f"the start of the share group is not set yet; {self._behind()}"
        return self._behind()

    def _behind(self) -> str:
        """The first partition that the group is not done with."""
        for where in self.jobs:
            start, end = self.starts.get(where, -1), self._end(where)
            if start != end and (start, end) != (-1, 0):
                return f"the share group begins at {start} of {end} in {where}"
        return ""

    def compare(self, logs: dict[TopicPartition, tuple[int, int, Collection[int]]]) -> None:
        """With the final logs: where they begin and end, and the offsets that they have."""
        for where, (start, end, there) in logs.items():
            self.judge.judge(where, start, end, there)


class _Operator(Asking):
    """Asks the coordinator of the group."""

    def __init__(self, clients: Clients, group: str, name: str, topic: str, chance: random.Random) -> None:
        super().__init__(clients, group, name, topic, chance)
        self._client = Client(clients, name, VERSIONS_OF_OPERATORS)

    async def starts(self) -> dict[TopicPartition, int]:
        """Those that are known."""
        answer = await self._ask_of_group(
            api.DESCRIBE_SHARE_GROUP_OFFSETS, Message(groups=[Message(group_id=self._group, topics=None)])
        )
        if answer is None or answer.groups[0].error_code:
            self._coordinator = -1
            return {}
        return {
            TopicPartition(topic.topic_name, row.partition_index): row.start_offset
            for topic in answer.groups[0].topics
            for row in topic.partitions
            if not row.error_code
        }

    async def set_starts(self, starts: dict[TopicPartition, int]) -> bool:
        rows = [Message(partition_index=where.partition, start_offset=start) for where, start in starts.items()]
        message = Message(group_id=self._group, topics=[Message(topic_name=self._topic, partitions=rows)])
        answer = await self._ask_of_group(api.ALTER_SHARE_GROUP_OFFSETS, message)
        if answer is None or answer.error_code:
            self._clients.history.note(f"the start is not set: {answer and answer.error_code}")
            self._coordinator = -1
            return False
        return not any(row.error_code for topic in answer.responses for row in topic.partitions)

    async def _ask_of_group(self, api_key: int, message: Message) -> Any:
        while self._coordinator < 0:
            broker = self._clients.some_broker(self._random)
            found = await self._call(broker, api.FIND_COORDINATOR, Message(key=self._group, key_type=0))
            if found is not None and not found.error_code:
                self._coordinator = found.node_id
            else:
                await self._pause()
        return await self._call(self._coordinator, api_key, message)
