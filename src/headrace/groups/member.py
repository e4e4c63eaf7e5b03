"""One member of a group, and the choice of a protocol that all members know. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from headrace.coordinators.alarms import NEVER
from headrace.groups.messages import JoinRequest, Protocols


@dataclass(slots=True, eq=False)
class Member:
    """`join_ticket` and `sync_ticket` are the waiters of requests that are not answered yet, or None."""

    member_id: str
    group_instance_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    session_timeout_ms: int
    protocols: Protocols
    assignment: bytes = b""
    join_ticket: object | None = None
    sync_ticket: object | None = None
    is_new: bool = False
    """Has not been told yet that it is a member: it expires even while it waits, since nobody may be there to hear."""
    deadline: float = NEVER

    @classmethod
    def joining(cls, member_id: str, request: JoinRequest, deadline: float) -> Member:
        return cls(
            member_id,
            request.group_instance_id,
            request.client_id,
            request.client_host,
            request.rebalance_timeout_ms,
            request.session_timeout_ms,
            request.protocols,
            is_new=True,
            deadline=deadline,
        )

    @property
    def waiting(self) -> bool:
        """The broker owes it an answer, so its silence says nothing."""
        return not self.is_new and (self.join_ticket is not None or self.sync_ticket is not None)

    def heard(self, now_seconds: float) -> None:
        self.deadline = now_seconds + self.session_timeout_ms / 1000

    def metadata(self, protocol: str | None) -> bytes:
        return next((metadata for name, metadata in self.protocols if name == protocol), b"")

    def update(self, request: JoinRequest) -> None:
        self.client_id = request.client_id
        self.client_host = request.client_host
        self.session_timeout_ms = request.session_timeout_ms
        self.rebalance_timeout_ms = request.rebalance_timeout_ms
        self.protocols = request.protocols


def common_protocols(members: Collection[Member]) -> set[str]:
    """Names that every member knows."""
    known = Counter(name for member in members for name in {name for name, _ in member.protocols})
    return {name for name, count in known.items() if count == len(members)}


def select_protocol(members: Collection[Member]) -> str:
    """Every member votes for the first of its protocols that all know; the most votes win, an earlier vote breaks a
    tie.
    """
    common = common_protocols(members)
    votes = Counter(next(name for name, _ in member.protocols if name in common) for member in members)
    return votes.most_common(1)[0][0]
