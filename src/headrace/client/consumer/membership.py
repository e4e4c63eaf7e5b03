"""A member of a consumer group: joins, is given partitions, keeps its place, gives them up, leaves.

    OUT -> JOINING -> SYNCING -> STABLE -> (giving up) -> JOINING ...  -> LEAVING -> ENDED
             \\ the leader looks at the topics and assigns      \\ a fatal refusal ends it anywhere

Eager assignors give up everything before they join again; cooperative ones keep reading, and give up what has moved
once they know. Before anything is given up its progress is saved, while the coordinator still takes it. That waits
until the application comes for more (`on_poll`), for then it is done with what it has: a clean rebalance repeats no
record. An application that wants to hear of it first (`tells_first`) finds what is to go in `going`, and says when it
may (`let_go`). Between `on_poll_end` and the next `on_poll` the member keeps its place by heartbeats, for
`rebalance_timeout_ms` at most; then it leaves the group, and joins again when the application comes back.

Partitions are `lost`, not given up, when the group has gone on without this member: others may be reading them, and
nothing can be saved. The one that leads looks at the topics every `look_interval_ms` and asks for a rebalance when
one has grown. A static member (`instance_id`) does not leave when it is closed: it has its partitions again if it is
back within the session timeout.

Every answer belongs to an attempt; the next join, or leaving, begins a new one, and what comes late is dropped.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Final

from headrace.client.connection.broker_connection import OnAnswer
from headrace.client.connection.connections import ConnectionPool
from headrace.client.connection.metadata import MetadataSnapshot, metadata_request, read_metadata
from headrace.client.connection.reactor import Backoff
from headrace.client.consumer.assignors import ROOM_FIRST, Assign, Participant, Rooms, assignor_named
from headrace.client.consumer.coordinator import (
    Coordinator,
    Identity,
    Timeouts,
    heartbeat_request,
    join_request,
    leave_request,
    passes,
    sync_request,
)
from headrace.client.consumer.group_protocol import (
    NO_GENERATION,
    TopicPartition,
    by_topic,
    decode_assignment,
    decode_subscription,
    encode_assignment,
    places_of,
)
from headrace.client.consumer.progress import GroupProgress, NotHeld, Offsets, Saved
from headrace.errors import ErrorCode, HeadraceError, ProtocolError
from headrace.wire import api as apis
from headrace.wire.message import Message

BEATS_PER_SESSION: Final = 3
JOIN_MARGIN_S: Final = 5.0
LEAVE_WITHIN_S: Final = 5.0
LOOK_TIMEOUT_S: Final = 10.0
LOOK_INTERVAL_MS: Final = 20_000
MISSING_LOOK_S: Final = 1.0

Assigned = Callable[[frozenset[TopicPartition], Offsets], None]
"""These partitions are new, with the progress of those that have any."""
Revoked = Callable[[frozenset[TopicPartition]], Mapping[TopicPartition, int]]
"""These go; answer what is to be saved of them."""
Lost = Callable[[frozenset[TopicPartition]], None]

log = logging.getLogger(__name__)


class State(Enum):
    OUT = "out"
    JOINING = "joining"
    SYNCING = "syncing"
    STABLE = "stable"
    LEAVING = "leaving"
    ENDED = "ended"


class Membership:
    """Everything is called under the reactor's lock, the callbacks too."""

    def __init__(
        self,
        pool: ConnectionPool,
        group: str,
        topics: Iterable[str],
        assignor: str = "average",
        *,
        on_assigned: Assigned,
        on_revoked: Revoked,
        on_lost: Lost,
        on_unsaved: Callable[[Offsets], None] = lambda _: None,
        on_rebalance_waits: Callable[[], None] = lambda: None,
        on_error: Callable[[HeadraceError], None],
        tells_first: bool = False,
        session_timeout_ms: int = 45_000,
        rebalance_timeout_ms: int = 300_000,
        beat_interval_ms: int = 3000,
        instance_id: str | None = None,
        rack: str = "",
        look_interval_ms: int = LOOK_INTERVAL_MS,
    ) -> None:
        self.group = group
        self.state = State.OUT
        self.member_id = ""
        self.generation = NO_GENERATION
        self.protocol = ""
        self.held: frozenset[TopicPartition] = frozenset()
        """What the application was given and did not lose."""
        self._pool = pool
        self._reactor = pool.reactor
        self._topics = self._joined_for = frozenset(topics)
        self._assignor = assignor_named(assignor)
        self._on_assigned = on_assigned
        self._on_revoked = on_revoked
        self._on_lost = on_lost
        self._on_unsaved = on_unsaved
        self._on_rebalance_waits = on_rebalance_waits
        self._on_error = on_error
        self._tells_first = tells_first
        self.going: frozenset[TopicPartition] = frozenset()
        """With `tells_first`, what is not given up before the application has heard of it (`let_go`)."""
        self._is_telling = False
        self._timeouts = Timeouts(session_timeout_ms, rebalance_timeout_ms)
        self._session_s = session_timeout_ms / 1000
        self._rebalance_s = rebalance_timeout_ms / 1000
        self._beat_s = min(self._session_s / BEATS_PER_SESSION, beat_interval_ms / 1000)
        self._instance_id = instance_id
        self._rack = rack
        self._look_interval_s = look_interval_ms / 1000
        self._coordinator = Coordinator(pool, group, on_error)
        self._progress = GroupProgress(self._coordinator, self._identity)
        self._attempt = 0
        self._rejoining = False
        self._backoff = Backoff()
        self._polling = True
        self._busy_since = 0.0
        self._at_poll: Callable[[], None] | None = None
        self._parked: list[tuple[dict[TopicPartition, int], Saved]] = []
        self._rooms: dict[str, list[str]] = {}
        self._leaver: Saved | None = None
        self._failure: HeadraceError | None = None

    def start(self) -> None:
        with self._reactor.lock:
            self._join()

    @property
    def rebalance_waits(self) -> bool:
        """Whether something waits for the application to be done."""
        return self._at_poll is not None

    def on_poll(self) -> None:
        """The application comes for more: it is done with what it was handed."""
        with self._reactor.lock:
            self._polling = True
            if self._at_poll is not None and not self.going:
                waiting, self._at_poll = self._at_poll, None
                waiting()

    def tell(self) -> None:
        """The application is being told what is `going`: until `let_go`, no rebalance begins that might leave it here
        after all."""
        self._is_telling = self._rejoining = True

    def let_go(self, going: frozenset[TopicPartition]) -> None:
        """It has heard. Unless the group has gone on without this member meanwhile, what was told goes now."""
        if self._is_telling and going is self.going and self._at_poll is not None:
            waiting, self._at_poll = self._at_poll, None
            self.going, self._is_telling = frozenset(), False
            waiting()

    def on_poll_end(self) -> None:
        """The application works on what it was handed."""
        with self._reactor.lock:
            self._polling = False
            self._busy_since = self._reactor.now()

    def subscribe(self, topics: Iterable[str]) -> None:
        """Read these topics from now on: the group shares out anew, at once or after the rebalance that goes on."""
        with self._reactor.lock:
            self._topics = frozenset(topics)
            if self.state is State.STABLE and self._topics != self._joined_for:
                self._rejoin()

    def commit(self, offsets: Mapping[TopicPartition, int], on_done: Saved) -> None:
        """Save progress of partitions that are held; of any other the answer is NotHeld. In a rebalance it waits for
        the end of that.
        """
        with self._reactor.lock:
            mine = {place: offset for place, offset in offsets.items() if place in self.held}
            gone = offsets.keys() - mine.keys()
            refusal = (self._failure or NotHeld(gone)) if gone else None
            if not mine:
                self._reactor.call_soon(lambda: on_done(refusal))
            elif self.state is not State.STABLE:
                self._parked.append((dict(offsets), on_done))
            else:
                self._commit(mine, lambda error: on_done(error or refusal))

    def leave(self, on_done: Saved) -> None:
        """Give everything up, save its progress, and let the others have it now. What is held in the middle of a
        rebalance can only be saved at its end, which is waited for a while.
        """
        with self._reactor.lock:
            if self.state in (State.LEAVING, State.ENDED):
                # What ended it was told, and there is nothing left to save.
                self._reactor.call_soon(lambda: on_done(None))
                return
            self._leaver = on_done
            if self.held and self.state in (State.JOINING, State.SYNCING):
                self._coordinator.later(LEAVE_WITHIN_S, self._leave_now)
            else:
                self._leave_now()

    def _leave_now(self) -> None:
        on_done, self._leaver = self._leaver, None
        if on_done is None:
            return
        in_rebalance = self.state in (State.JOINING, State.SYNCING)
        self._begin(State.LEAVING)
        if in_rebalance:
            # The broker answers in order: what follows would wait for the join.
            self._coordinator.hang_up()
        places, self.held = self.held, frozenset()
        offsets = self._on_revoked(places) if places else {}

        def saved(error: HeadraceError | None) -> None:
            self._say_goodbye(lambda: self._end(error, on_done))

        # Outside of any generation nobody takes it.
        self._progress.save(offsets if self.generation != NO_GENERATION else {}, saved, within_s=LEAVE_WITHIN_S)

    @property
    def identity(self) -> tuple[str, int, str | None]:
        """Member id, generation and instance id."""
        return self.member_id, self.generation, self._instance_id

    def _identity(self) -> Identity:
        return Identity(self.member_id, self.generation, self._instance_id)

    def _begin(self, state: State) -> None:
        """A new attempt: answers to what was asked before no longer count."""
        self._attempt += 1
        self.state = state
        self._rejoining = self._is_telling = False
        self._at_poll = None
        self.going = frozenset()

    def _after(self, pause_s: float, fn: Callable[[], None]) -> None:
        attempt = self._attempt
        self._coordinator.later(pause_s, lambda: fn() if attempt == self._attempt else None)

    def _ask(self, api_key: int, body: Message, on_answer: OnAnswer, timeout_s: float) -> None:
        attempt = self._attempt

        def answered(answer: Message | HeadraceError) -> None:
            if attempt == self._attempt:
                on_answer(answer)

        # What waits for others may take minutes. A first join, which has no member id, is answered at once.
        beat = heartbeat_request(self.group, self._identity()) if api_key != apis.HEARTBEAT and self.member_id else None
        self._coordinator.ask(api_key, body, self._judge, answered, timeout_s=timeout_s, beat=beat)

    def _judge(self, answer: Message) -> int:
        if answer.error_code == ErrorCode.MEMBER_ID_REQUIRED:
            self.member_id = answer.member_id
        return int(answer.error_code)

    # Joining.

    def _join(self) -> None:
        self._begin(State.JOINING)
        who, self._joined_for = self._identity(), self._topics
        request = join_request(self.group, who, self._topics, self._assignor, self.held, self._rack, self._timeouts)
        self._ask(apis.JOIN_GROUP, request, self._joined, self._rebalance_s + JOIN_MARGIN_S)

    def _joined(self, answer: Message | HeadraceError) -> None:
        if isinstance(answer, HeadraceError):
            self._refused(answer)
            return
        self.member_id, self.generation = answer.member_id, answer.generation_id
        self.protocol = answer.protocol_name or ""
        self.state = State.SYNCING
        if answer.leader != answer.member_id:
            self._sync([])
        elif self.protocol not in self._assignor.protocols:
            self._fail(ProtocolError(f"group {self.group!r} was joined by {self.protocol!r}, which nobody offered"))
        else:
            self._lead(participants(answer.members), skip=bool(answer.skip_assignment))

    def _lead(self, members: list[Participant], *, skip: bool) -> None:
        topics = frozenset().union(*(member.topics for member in members))
        attempt = self._attempt

        def seen(rooms: dict[str, list[str]] | HeadraceError) -> None:
            if attempt != self._attempt:
                return
            if isinstance(rooms, HeadraceError):
                self._refused(rooms)
                return
            self._rooms = rooms
            assign = self._assignor.protocols[self.protocol]
            self._sync([] if skip else assignments(assign, members, rooms))
            if skip:
                self._look_at_shares(topics)
            else:
                self._look_later(topics)

        look(self._pool, topics, seen)

    def _look_at_shares(self, topics: frozenset[str]) -> None:
        """What a leader before this one has shared out may lack topics and partitions that have come since."""
        attempt = self._attempt

        def described(answer: Message | HeadraceError) -> None:
            if attempt != self._attempt:
                return
            if isinstance(answer, Message):
                self._rooms = shared_out(self._rooms, answer.groups[0].members)
            self._look_later(topics)

        request = Message(groups=[self.group])
        self._coordinator.ask(apis.DESCRIBE_GROUPS, request, lambda answer: int(answer.groups[0].error_code), described)

    def _sync(self, given: list[Message]) -> None:
        request = sync_request(self.group, self._identity(), self.protocol, given)
        self._ask(apis.SYNC_GROUP, request, self._synced, self._rebalance_s + JOIN_MARGIN_S)

    def _synced(self, answer: Message | HeadraceError) -> None:
        if isinstance(answer, HeadraceError):
            self._refused(answer)
            return
        try:
            places = frozenset(places_of(decode_assignment(answer.assignment)))
        except ProtocolError as error:
            self._fail(error)
            return
        self.state = State.STABLE
        self._backoff.reset()
        if self._leaver is not None:
            self._leave_now()
            return
        self._beat_later()
        self._load(places)

    def _load(self, places: frozenset[TopicPartition]) -> None:
        """Find where to begin with what is new, hand it out, then give up what has moved."""
        added, attempt = places - self.held, self._attempt

        def loaded(offsets: Offsets | HeadraceError) -> None:
            if attempt != self._attempt:
                return
            if isinstance(offsets, HeadraceError):
                self._refused(offsets)
                return
            self.held |= added
            self._on_assigned(added, offsets)
            self._send_parked()
            gone = self.held - places
            if gone:
                self._when_polling(lambda: self._give_up(gone), gone)
            elif self._topics != self._joined_for:
                self._rejoin()

        self._progress.load(added, loaded)

    # Giving up.

    def _rejoin(self) -> None:
        if self._rejoining:
            return
        self._rejoining = True
        if self._assignor.step_by_step or not self.held:
            self._join()
        else:
            self._when_polling(lambda: self._give_up(self.held), self.held)

    def _when_polling(self, fn: Callable[[], None], going: frozenset[TopicPartition]) -> None:
        if self._polling and not self._tells_first:
            fn()
        else:
            self._at_poll = fn
            self.going = going if self._tells_first else frozenset()
            self._on_rebalance_waits()

    def _give_up(self, places: frozenset[TopicPartition]) -> None:
        self._rejoining = True
        self.held -= places
        offsets = self._on_revoked(places)
        attempt = self._attempt

        def saved(error: HeadraceError | None) -> None:
            if error is not None:
                log.warning("group %r: progress of partitions that go was not saved: %s", self.group, error)
                self._on_unsaved(dict(offsets))
            if attempt == self._attempt:
                self._join()

        self._progress.save(offsets, saved, within_s=self._session_s)

    def _lose(self) -> None:
        self.generation = NO_GENERATION
        places, self.held = self.held, frozenset()
        if places:
            log.warning("group %r: %d partitions are lost to other members", self.group, len(places))
            self._on_lost(places)
            # In what they come back as, if they do, others may have gone on from what was saved.
            self._send_parked()

    # What the coordinator says no to.

    def _refused(self, error: HeadraceError) -> None:
        """Join again, at once or after a pause, or end."""
        code = error.kafka_code
        if code == ErrorCode.UNKNOWN_MEMBER_ID:
            self.member_id = ""
        if code in (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.ILLEGAL_GENERATION):
            self._lose()
            self._join()
        elif code in (ErrorCode.REBALANCE_IN_PROGRESS, ErrorCode.MEMBER_ID_REQUIRED):
            self._join()
        elif passes(error):
            log.info("group %r: %s; joining again in %g s", self.group, error, self._backoff.next_s)
            self._after(self._backoff.take(), self._join)
        else:
            self._fail(error)

    def _fail(self, error: HeadraceError) -> None:
        self._failure = error
        self._lose()
        self._end(error, lambda _: None)
        self._on_error(error)

    def _end(self, error: HeadraceError | None, on_done: Saved) -> None:
        self._begin(State.ENDED)
        self.generation = NO_GENERATION
        self._failure = error
        self._coordinator.close()
        self._send_parked()
        leaver, self._leaver = self._leaver, None
        if leaver is not None:
            leaver(error)
        on_done(error)

    def _say_goodbye(self, then: Callable[[], None]) -> None:
        if not self.member_id or self._instance_id is not None:
            then()
            return
        request = leave_request(self.group, self.member_id, "the consumer was closed")
        self.member_id = ""
        self._coordinator.persist(
            apis.LEAVE_GROUP, lambda: request, self._judge, lambda _: then(), within_s=LEAVE_WITHIN_S
        )

    # While nothing changes.

    def _beat_later(self) -> None:
        self._after(self._beat_s, self._beat)

    def _beat(self) -> None:
        if not self._polling and self._reactor.now() - self._busy_since > self._rebalance_s:
            self._step_out()
            return
        request = heartbeat_request(self.group, self._identity())
        self._ask(apis.HEARTBEAT, request, self._beaten, self._session_s / BEATS_PER_SESSION)

    def _beaten(self, answer: Message | HeadraceError) -> None:
        if not isinstance(answer, HeadraceError):
            self._beat_later()
        elif answer.kafka_code == ErrorCode.REBALANCE_IN_PROGRESS:
            self._beat_later()
            self._rejoin()
        elif passes(answer):
            # The group is not over because its coordinator is elsewhere.
            self._after(self._backoff.take(), self._beat)
        else:
            self._refused(answer)

    def _step_out(self) -> None:
        log.warning(
            "group %r: nothing was asked for in %g s, so the partitions go to others; poll more often, or raise "
            "rebalance_timeout_ms", self.group, self._rebalance_s,
        )  # fmt: skip
        self._begin(State.OUT)
        self._lose()
        self._at_poll = self._join
        self._on_rebalance_waits()
        self._say_goodbye(lambda: None)

    def _look_later(self, topics: frozenset[str]) -> None:
        attempt = self._attempt

        def seen(rooms: dict[str, list[str]] | HeadraceError) -> None:
            if attempt != self._attempt:
                return
            if not isinstance(rooms, HeadraceError) and has_grown(self.protocol, self._rooms, rooms):
                self._rejoin()
            else:
                self._look_later(topics)

        pause_s = look_again_s(topics, self._rooms, self._look_interval_s)
        self._after(pause_s, lambda: look(self._pool, topics, seen))

    def _commit(self, offsets: dict[TopicPartition, int], on_done: Saved) -> None:
        def saved(error: HeadraceError | None) -> None:
            if error is None or error.kafka_code != ErrorCode.REBALANCE_IN_PROGRESS or self._is_telling:
                # Whoever is told what goes cannot wait for the rebalance that waits for him.
                on_done(error)
            elif self.state is State.STABLE:
                self._parked.append((offsets, on_done))
                self._rejoin()
            else:
                self.commit(offsets, on_done)

        self._progress.save(offsets, saved)

    def _send_parked(self) -> None:
        parked, self._parked = self._parked, []
        for offsets, on_done in parked:
            self.commit(offsets, on_done)


def participants(members: Iterable[Message]) -> list[Participant]:
    """The members of a JoinGroup answer; one that cannot be understood takes part and gets nothing."""
    found = []
    for member in members:
        try:
            said = decode_subscription(member.metadata)
        except ProtocolError as error:
            log.warning("%s; member %s gets no partitions", error, member.member_id)
            found.append(Participant(member.member_id, frozenset()))
            continue
        found.append(
            Participant(
                member.member_id,
                frozenset(said.topics),
                said.owned,
                said.generation,
                said.rack,
                member.group_instance_id,
            )
        )
    return found


def assignments(assign: Assign, members: list[Participant], rooms: Rooms) -> list[Message]:
    """For a SyncGroup request."""
    return [
        Message(member_id=member_id, assignment=encode_assignment(by_topic(places)))
        for member_id, places in assign(members, rooms).items()
    ]


def look(
    pool: ConnectionPool, topics: Iterable[str], on_seen: Callable[[dict[str, list[str]] | HeadraceError], None]
) -> None:
    """The topics that there are, with the rack of each partition's leader."""

    def seen(answer: Message | HeadraceError) -> None:
        on_seen(answer if isinstance(answer, HeadraceError) else rooms_of(read_metadata(answer)))

    pool.ask_any(apis.METADATA, metadata_request(sorted(topics)), seen, timeout_s=LOOK_TIMEOUT_S)


def rooms_of(topology: MetadataSnapshot) -> dict[str, list[str]]:
    racks = {broker.broker_id: broker.rack for broker in topology.brokers.values()}
    return {
        name: [racks.get(partition.leader_id, "") for partition in topic.partitions]
        for name, topic in topology.topics.items()
    }


def shared_out(rooms: Rooms, members: Iterable[Message]) -> dict[str, list[str]]:
    """As much of each topic as is assigned to anybody, by a DescribeGroups answer."""
    counts: Counter[str] = Counter()
    for member in members:
        try:
            counts.update(topic for topic, _ in places_of(decode_assignment(member.member_assignment)))
        except ProtocolError:
            continue  # whatever it has is shared out anew, to one that can be understood
    return {topic: list(racks[: counts[topic]]) for topic, racks in rooms.items() if counts[topic]}


def has_grown(protocol: str, before: Rooms, now: Rooms) -> bool:
    """Whether the group should share out anew: topics or partitions have come or gone, or for those who go by rooms,
    leaders are in other rooms. A leader that is just not there moves nothing.
    """
    if protocol == ROOM_FIRST and all(all(rooms) for rooms in now.values()):
        return before != now
    return {topic: len(rooms) for topic, rooms in before.items()} != {topic: len(rooms) for topic, rooms in now.items()}


def look_again_s(topics: frozenset[str], rooms: Rooms, interval_s: float) -> float:
    """How soon: topics that are not there yet are looked for more often."""
    return interval_s if topics <= rooms.keys() else min(MISSING_LOOK_S, interval_s)
