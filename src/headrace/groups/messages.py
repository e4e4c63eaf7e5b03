"""Requests to groups and their replies: plain values, with the wire's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from headrace.errors import ErrorCode

NO_GENERATION: Final = -1
NO_OFFSET: Final = -1
NO_EPOCH: Final = -1

Protocols = tuple[tuple[str, bytes], ...]
"""(name, metadata) in the member's order of preference."""


@dataclass(frozen=True, slots=True)
class JoinRequest:
    member_id: str
    group_instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocol_type: str
    protocols: Protocols
    require_known_member_id: bool = False
    """KIP-394, versions 4 and up: a dynamic member first gets its id and joins again with it."""
    supports_skipping_assignment: bool = False
    """KIP-814, versions 9 and up: a static leader may be told to keep the assignment."""


@dataclass(frozen=True, slots=True)
class JoinedMember:
    member_id: str
    group_instance_id: str | None
    metadata: bytes


@dataclass(frozen=True, slots=True)
class JoinReply:
    error_code: int
    member_id: str
    generation_id: int = NO_GENERATION
    protocol_type: str | None = None
    protocol_name: str | None = None
    leader: str = ""
    skip_assignment: bool = False
    members: tuple[JoinedMember, ...] = ()


@dataclass(frozen=True, slots=True)
class SyncRequest:
    member_id: str
    generation_id: int
    group_instance_id: str | None = None
    protocol_type: str | None = None
    protocol_name: str | None = None
    assignments: tuple[tuple[str, bytes], ...] = ()
    """(member_id, assignment), from the leader alone."""


@dataclass(frozen=True, slots=True)
class SyncReply:
    error_code: int
    protocol_type: str | None = None
    protocol_name: str | None = None
    assignment: bytes = b""


@dataclass(frozen=True, slots=True)
class Leaver:
    """A member that leaves, by its id, by its instance id, or by both."""

    member_id: str
    group_instance_id: str | None = None


@dataclass(frozen=True, slots=True)
class LeftMember:
    member_id: str
    group_instance_id: str | None
    error_code: int


@dataclass(frozen=True, slots=True)
class LeaveReply:
    error_code: int
    members: tuple[LeftMember, ...] = ()


@dataclass(frozen=True, slots=True)
class OffsetToCommit:
    topic: str
    partition_index: int
    committed_offset: int
    committed_leader_epoch: int = NO_EPOCH
    committed_metadata: str = ""
    topic_id: bytes | None = None
    """Of the topic that has this name now."""


@dataclass(frozen=True, slots=True)
class CommitRequest:
    offsets: tuple[OffsetToCommit, ...]
    member_id: str = ""
    generation_id: int = NO_GENERATION
    group_instance_id: str | None = None
    retention_time_ms: int = -1
    """Versions 2 to 4: how long the offsets are kept instead of offsets.retention.ms; -1 for that setting."""
    has_member_epoch: bool = True
    """Versions 9 and up: the generation may be a member's epoch (KIP-848)."""


@dataclass(frozen=True, slots=True)
class TransactionalCommit:
    """Offsets that are to count when the producer's transaction is committed."""

    producer_id: int
    producer_epoch: int
    commit: CommitRequest


@dataclass(frozen=True, slots=True)
class PartitionResult:
    topic: str
    partition_index: int
    error_code: int


@dataclass(frozen=True, slots=True)
class FetchedOffset:
    topic: str
    partition_index: int
    committed_offset: int = NO_OFFSET
    committed_leader_epoch: int = NO_EPOCH
    metadata: str = ""
    error_code: int = ErrorCode.NONE


@dataclass(frozen=True, slots=True)
class OffsetFetchReply:
    error_code: int
    offsets: tuple[FetchedOffset, ...] = ()


@dataclass(frozen=True, slots=True)
class OffsetDeleteReply:
    error_code: int
    partitions: tuple[PartitionResult, ...] = ()


@dataclass(frozen=True, slots=True)
class DescribedMember:
    member_id: str
    group_instance_id: str | None
    client_id: str
    client_host: str
    member_metadata: bytes
    member_assignment: bytes


@dataclass(frozen=True, slots=True)
class DescribedGroup:
    error_code: int
    group_id: str
    group_state: str = ""
    protocol_type: str = ""
    protocol_data: str = ""
    members: tuple[DescribedMember, ...] = ()
    group_type: str = "classic"


@dataclass(frozen=True, slots=True)
class ListedGroup:
    group_id: str
    protocol_type: str
    group_state: str
    group_type: str = "classic"


@dataclass(frozen=True, slots=True)
class ListReply:
    error_code: int
    groups: tuple[ListedGroup, ...] = ()
