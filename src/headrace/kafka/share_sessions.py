"""Share sessions (KIP-932): which partitions a member of a share group reads at this broker, kept between its requests.

A session has no id: it is that of a member in a group. Epoch 0 begins it, each fetch and acknowledgement bears the next
one, and -1 ends it. It belongs to its connection and ends with that: what the member had acquired and not acknowledged
is then released, and others get it. A member that begins anew, on this connection or on another, keeps what it has
acquired: it may still acknowledge that.

As in Kafka, and other than fetch sessions, none is given up for another one. When all slots are taken a member is told
so, and tries again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Final, NamedTuple, Protocol

from headrace import metrics
from headrace.errors import InvalidShareSessionEpoch, ShareSessionLimitReached, ShareSessionNotFound
from headrace.queues.messages import TopicIdPartition

INITIAL_EPOCH: Final = 0
FINAL_EPOCH: Final = -1
EPOCH_MAX: Final = (1 << 31) - 1
PARTITIONS_MAX: Final = 500_000
"""Over all sessions."""
CONNECTION_SESSIONS_MAX: Final = 100
"""A client has one session on a connection."""


class MemberKey(NamedTuple):
    group: str
    member: str


class WaitingShareFetch(Protocol):
    def expire(self) -> None:
        """Answer with what there is."""
        ...


class ShareSession:
    def __init__(self, key: MemberKey, owner: Hashable, partitions: Iterable[TopicIdPartition]) -> None:
        self.key = key
        self.owner = owner
        self.epoch = INITIAL_EPOCH + 1
        """Of the next request."""
        self.partitions: dict[TopicIdPartition, None] = dict.fromkeys(partitions)
        """The one that was not served for longest comes first."""
        self.waiting: WaitingShareFetch | None = None
        self.closed = False

    def wait(self, fetch: WaitingShareFetch | None) -> None:
        """This fetch waits for records now; None: the one that did does not."""
        self.waiting = fetch

    def served(self, partition: TopicIdPartition) -> None:
        """It goes to the end, so that a full answer does not starve those behind it."""
        if partition in self.partitions:
            del self.partitions[partition]
            self.partitions[partition] = None


class ShareSessions:
    """All share sessions of a broker. `release` is told of each member whose session has ended, and `begin` of each
    group that has its first session here."""

    def __init__(
        self,
        slots: Callable[[], int],
        release: Callable[[MemberKey], None],
        partitions_max: int = PARTITIONS_MAX,
        begin: Callable[[str], None] = lambda _group: None,
    ) -> None:
        self._slots = slots
        self._release = release
        self._begin = begin
        self._partitions_max = partitions_max
        self._sessions: dict[MemberKey, ShareSession] = {}
        self._of_owner: dict[Hashable, dict[MemberKey, ShareSession]] = {}
        self._of_group: Counter[str] = Counter()
        self.partition_count = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, key: MemberKey) -> bool:
        return key in self._sessions

    def samples(self) -> Iterator[metrics.Sample]:
        yield metrics.Sample(metrics.SHARE_SESSIONS, (), len(self._sessions))
        yield metrics.Sample(metrics.SHARE_SESSION_PARTITIONS, (), self.partition_count)

    def open(self, owner: Hashable, key: MemberKey, partitions: Iterable[TopicIdPartition]) -> ShareSession:
        """A new session, in the place of the one that the member had."""
        before = self._sessions.get(key)
        if before is not None:
            self._forget(before)
        of_owner = self._of_owner.get(owner, {})
        if len(self._sessions) >= self._slots() or len(of_owner) >= CONNECTION_SESSIONS_MAX:
            if before is not None:
                self._release(key)
            raise ShareSessionLimitReached(f"there are {len(self._sessions)} share sessions on this broker")
        session = ShareSession(key, owner, ())
        self._sessions[key] = session
        self._of_owner.setdefault(owner, {})[key] = session
        self._of_group[key.group] += 1
        if self._of_group[key.group] == 1:
            self._begin(key.group)
        self.update(session, partitions, ())
        return session

    def resume(self, owner: Hashable, key: MemberKey, epoch: int) -> ShareSession:
        """The session that a request goes on with; it is the one that is awaited, or the last one. Its fetch that waits
        is answered now: answers leave in the order of the requests."""
        session = self._sessions.get(key)
        if session is None or session.owner is not owner:
            raise ShareSessionNotFound(f"member {key.member!r} of {key.group!r} has no share session here")
        if epoch != FINAL_EPOCH:
            if epoch != session.epoch:
                raise InvalidShareSessionEpoch(
                    f"share session of {key.member!r} in {key.group!r}: epoch {epoch} instead of {session.epoch}"
                )
            session.epoch = 1 if epoch == EPOCH_MAX else epoch + 1
        if session.waiting is not None:
            session.waiting.expire()
        return session

    def update(
        self, session: ShareSession, added: Iterable[TopicIdPartition], forgotten: Iterable[TopicIdPartition]
    ) -> None:
        """Take over what a request adds and forgets. ShareSessionLimitReached, and the session has ended, if that is
        too much."""
        before = len(session.partitions)
        for partition in added:
            session.partitions.setdefault(partition)
        for partition in forgotten:
            session.partitions.pop(partition, None)
        self.partition_count += len(session.partitions) - before
        if self.partition_count > self._partitions_max:
            self.close(session)
            raise ShareSessionLimitReached(f"there is no room for {len(session.partitions)} partitions")

    def close(self, session: ShareSession) -> None:
        """What its member has acquired is given to others."""
        if not session.closed:
            self._forget(session)
            self._release(session.key)

    def close_all(self, owner: Hashable) -> None:
        """A connection has ended."""
        for session in list(self._of_owner.get(owner, {}).values()):
            self.close(session)

    def _forget(self, session: ShareSession) -> None:
        """Its fetch that waits is answered now, so that no record is kept for it."""
        session.closed = True
        self.partition_count -= len(session.partitions)
        del self._sessions[session.key]
        of_owner = self._of_owner[session.owner]
        del of_owner[session.key]
        if not of_owner:
            del self._of_owner[session.owner]
        group = session.key.group
        self._of_group[group] -= 1
        if not self._of_group[group]:
            del self._of_group[group]
        if session.waiting is not None:
            session.waiting.expire()
