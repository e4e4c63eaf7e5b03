"""Who is in a group: members by id and by instance id, ids given out in advance, the leader. No I/O, no states."""

from __future__ import annotations

from collections.abc import Container, Mapping

from headrace.coordinators.alarms import NEVER
from headrace.errors import ErrorCode
from headrace.groups.limits import GroupLimits
from headrace.groups.member import Member, common_protocols
from headrace.groups.messages import JoinedMember, JoinRequest
from headrace.groups.records import MemberSnapshot


class Roster:
    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.protocol_type: str | None = None
        """Of the members, or of the last ones that were here."""
        self.leader: str | None = None
        """The first member until it goes, then the next; of those who joined, once a rebalance completes."""
        self.static: dict[str, str] = {}
        """Member id of each instance id."""
        self.pending: dict[str, float] = {}
        """Ids given out to members that have not joined with them yet, and when they lapse."""

    def __len__(self) -> int:
        return len(self.members)

    def add(self, member: Member) -> None:
        self.members[member.member_id] = member
        if member.group_instance_id is not None:
            self.static[member.group_instance_id] = member.member_id
        if self.leader is None:
            self.leader = member.member_id

    def remove(self, member: Member) -> None:
        del self.members[member.member_id]
        if member.group_instance_id is not None:
            self.static.pop(member.group_instance_id, None)
        if self.leader == member.member_id:
            self.leader = next(iter(self.members), None)

    def rename(self, member: Member, member_id: str) -> None:
        """A static member goes on under another id."""
        led = self.leader == member.member_id
        del self.members[member.member_id]
        member.member_id = member_id
        self.add(member)
        if led:
            self.leader = member_id

    def admission_fault(self, request: JoinRequest, limits: GroupLimits) -> int:
        """Why this request cannot become or stay a member, or NONE."""
        if not limits.min_session_timeout_ms <= request.session_timeout_ms <= limits.max_session_timeout_ms:
            return ErrorCode.INVALID_SESSION_TIMEOUT
        if len(self.members) + len(self.pending) >= limits.max_size and not self._holds_place(request):
            return ErrorCode.GROUP_MAX_SIZE_REACHED
        if not request.protocol_type or not request.protocols:
            return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        if not self.members:
            return ErrorCode.NONE
        shared = common_protocols(self.members.values()).intersection(name for name, _ in request.protocols)
        same_kind = request.protocol_type == self.protocol_type and shared
        return ErrorCode.NONE if same_kind else ErrorCode.INCONSISTENT_GROUP_PROTOCOL

    def _holds_place(self, request: JoinRequest) -> bool:
        known = request.member_id in self.members or request.member_id in self.pending
        return known or request.group_instance_id in self.static

    def fault(self, member_id: str, instance_id: str | None) -> int:
        """Why this is not a member, or NONE."""
        return member_fault(self.members, self.static, member_id, instance_id)

    def joined(self) -> list[Member]:
        """Members that wait for the end of the rebalance."""
        return [member for member in self.members.values() if member.join_ticket is not None]

    def all_joined(self) -> bool:
        return not self.pending and all(member.join_ticket is not None for member in self.members.values())

    def elect(self, joined: list[Member]) -> None:
        """Keep the leader if it has joined, else take the first who has."""
        leader = self.members.get(self.leader or "")
        if leader is None or leader.join_ticket is None:
            self.leader = joined[0].member_id

    def metadata(self, protocol: str | None) -> tuple[JoinedMember, ...]:
        """What the leader gets to make an assignment from."""
        return tuple(
            JoinedMember(member.member_id, member.group_instance_id, member.metadata(protocol))
            for member in self.members.values()
        )

    def earliest_deadline(self) -> float:
        """Of sessions and of ids given out; a member that is owed an answer has none."""
        sessions = (member.deadline for member in self.members.values() if not member.waiting)
        return min(min(sessions, default=NEVER), min(self.pending.values(), default=NEVER))

    def rebalance_timeout_ms(self) -> int:
        return max((member.rebalance_timeout_ms for member in self.members.values()), default=0)

    def snapshot(self, protocol: str | None, assignments: Mapping[str, bytes] | None) -> tuple[MemberSnapshot, ...]:
        """What is kept of the members, with these assignments or the ones that they have."""
        return tuple(
            MemberSnapshot(
                member.member_id,
                member.group_instance_id,
                member.client_id,
                member.client_host,
                member.rebalance_timeout_ms,
                member.session_timeout_ms,
                member.metadata(protocol),
                member.assignment if assignments is None else assignments.get(member.member_id, b""),
            )
            for member in self.members.values()
        )

    def restore(self, kept: MemberSnapshot, protocol: str | None) -> Member:
        member = Member(
            kept.member_id,
            kept.group_instance_id,
            kept.client_id,
            kept.client_host,
            kept.rebalance_timeout_ms,
            kept.session_timeout_ms,
            ((protocol or "", kept.metadata),),
            kept.assignment,
        )
        self.add(member)
        return member


def member_fault(members: Container[str], static: Mapping[str, str], member_id: str, instance_id: str | None) -> int:
    """Why this is none of the members, of which some are static; or NONE."""
    if instance_id is not None:
        current = static.get(instance_id)
        if current is None:
            return ErrorCode.UNKNOWN_MEMBER_ID
        if current != member_id:
            return ErrorCode.FENCED_INSTANCE_ID
    return ErrorCode.NONE if member_id in members else ErrorCode.UNKNOWN_MEMBER_ID
