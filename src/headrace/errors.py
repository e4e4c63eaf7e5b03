"""One tree of errors and the one table that maps it to Kafka codes, HTTP status and retriable or not.

Raise these for peers, disks and operators. A message says what happened, where, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self


@dataclass(frozen=True, slots=True)
class Mapping:
    """How one kind of error is told to each front end."""

    kafka_code: int
    http_status: int
    retriable: bool


class HeadraceError(Exception):
    """Root of everything that Headrace raises on purpose."""

    mapping: Mapping = Mapping(-1, 500, False)

    @property
    def kafka_code(self) -> int:
        return self.mapping.kafka_code

    def again(self) -> Self:
        """The same error for one more request. One that is kept and raised itself would hold the frames of its last
        raising, and with them the receive buffer of the request that it refused.
        """
        made = type(self).__new__(type(self), *self.args)
        made.__dict__.update(self.__dict__)
        return made


class ProtocolError(HeadraceError):
    """Bytes from a peer that are not a valid frame, request or response."""


class OperatorError(HeadraceError):
    """Something only a person at the command line or the config file can mend."""


class SettingError(OperatorError):
    """A setting that is unknown, malformed or out of its range."""


class DataFolderError(OperatorError):
    """A data folder that is in use, unreadable or not ours."""


class CoordinationError(HeadraceError):
    """The coordination store did not take or answer a request."""


class MetadataInDoubt(CoordinationError):
    """The cluster's metadata was restored from an older copy, and nobody has said yet whether that holds."""


class Unsupported(HeadraceError):
    """A valid request for something that is not served."""


class CorruptBatch(HeadraceError):
    """A record batch whose length, CRC or header is wrong."""


class UnreadableBatch(CorruptBatch):
    """Bytes of a log that the disk does not give back."""


class BatchTooLarge(HeadraceError):
    """A record batch above the topic's limit."""


class InvalidRecord(HeadraceError):
    """A record batch that is whole but breaks a rule of its topic. `record_errors` has the place in the batch of each
    record that does, rising, and what is wrong with it (KIP-467); empty where it is the batch itself."""

    def __init__(self, message: str, record_errors: Sequence[tuple[int, str | None]] = ()) -> None:
        super().__init__(message)
        self.record_errors = record_errors


class InvalidTimestamp(InvalidRecord):
    """Records with a time that their topic does not take."""


class OffsetOutOfRange(HeadraceError):
    """An offset before the log's start or after its end."""


class OffsetNotAvailable(HeadraceError):
    """A new leader cannot say yet whether the offset is in the log."""


class StorageFull(HeadraceError):
    """The disk has no room: nothing was written, try again when there is."""


class StorageFailed(HeadraceError):
    """A write, read or sync failed: the log concerned is offline."""


class UnknownPartition(HeadraceError):
    """A topic or partition that this cluster does not have."""


class UnknownTopicId(HeadraceError):
    """A topic UUID that this cluster does not have."""


class InvalidTopicName(HeadraceError):
    """A topic name against the rules; the message gives the rule."""


class TopicExists(HeadraceError):
    """A topic of that name is there already."""


class InvalidPartitions(HeadraceError):
    """A partition count that cannot be had."""


class InvalidReplication(HeadraceError):
    """More replicas asked for than there are brokers."""


class InvalidAssignment(HeadraceError):
    """A replica assignment that names brokers or partitions that do not fit."""


class NoMoveUnderWay(HeadraceError):
    """A move of replicas that is to be ended is not there."""


class InvalidConfig(HeadraceError):
    """A topic or broker setting that is unknown or out of range."""


class InvalidRequest(HeadraceError):
    """A well-formed request that makes no sense."""


class KeyIndexMissing(HeadraceError):
    """A query by key of a topic that keeps no index of keys."""


class NotLeader(HeadraceError):
    """This broker does not lead the partition."""


class FencedEpoch(HeadraceError):
    """The request carries an older leader epoch than ours."""


class UnknownEpoch(HeadraceError):
    """The request carries a newer leader epoch than ours."""


class NotEnoughReplicas(HeadraceError):
    """The in-sync set is smaller than the topic's minimum."""


class NotEnoughReplicasAfterAppend(HeadraceError):
    """The in-sync set became smaller than the topic's minimum while a record waited for it."""


class RequestTimedOut(HeadraceError):
    """The wait ended before the request's condition was met."""


class DuplicateSequence(HeadraceError):
    """A producer sequence that was seen, but too long ago to answer with its offset."""


class OutOfOrderSequence(HeadraceError):
    """A gap in a producer's sequence numbers."""


class InvalidProducerEpoch(HeadraceError):
    """A producer epoch older than the newest one seen."""


class UnknownProducer(HeadraceError):
    """A producer id of which the log holds nothing."""


class UnknownValue(HeadraceError):
    """A cluster-wide setting that nobody has set."""


class ChangedMeanwhile(HeadraceError):
    """A change that was to be made only if nothing had changed before it, and something has."""


class PolicyViolation(HeadraceError):
    """A request that the operator's limits do not allow."""


_TABLE: Final[dict[type[HeadraceError], Mapping]] = {
    ProtocolError: Mapping(42, 400, False),
    Unsupported: Mapping(35, 501, False),
    CorruptBatch: Mapping(2, 400, True),
    BatchTooLarge: Mapping(10, 413, False),
    InvalidRecord: Mapping(87, 422, False),
    InvalidTimestamp: Mapping(32, 422, False),
    OffsetOutOfRange: Mapping(1, 416, False),
    OffsetNotAvailable: Mapping(78, 503, True),
    StorageFull: Mapping(56, 507, True),
    StorageFailed: Mapping(56, 503, True),
    UnknownPartition: Mapping(3, 404, True),
    UnknownTopicId: Mapping(100, 404, True),
    InvalidTopicName: Mapping(17, 400, False),
    TopicExists: Mapping(36, 409, False),
    InvalidPartitions: Mapping(37, 400, False),
    InvalidReplication: Mapping(38, 400, False),
    InvalidAssignment: Mapping(39, 400, False),
    NoMoveUnderWay: Mapping(85, 409, False),
    InvalidConfig: Mapping(40, 400, False),
    InvalidRequest: Mapping(42, 400, False),
    KeyIndexMissing: Mapping(40, 409, False),
    NotLeader: Mapping(6, 503, True),
    FencedEpoch: Mapping(74, 409, True),
    UnknownEpoch: Mapping(76, 409, True),
    NotEnoughReplicas: Mapping(19, 503, True),
    NotEnoughReplicasAfterAppend: Mapping(20, 503, True),
    RequestTimedOut: Mapping(7, 504, True),
    DuplicateSequence: Mapping(46, 409, False),
    OutOfOrderSequence: Mapping(45, 409, False),
    InvalidProducerEpoch: Mapping(47, 409, False),
    UnknownProducer: Mapping(59, 409, False),
    UnknownValue: Mapping(42, 404, False),
    ChangedMeanwhile: Mapping(42, 409, False),
    PolicyViolation: Mapping(44, 403, False),
    CoordinationError: Mapping(15, 503, True),
}
for _kind, _mapping in _TABLE.items():
    _kind.mapping = _mapping


class Code:
    """Kafka error codes that handlers answer without an exception."""

    NONE: Final = 0
    UNKNOWN: Final = -1
    OFFSET_OUT_OF_RANGE: Final = 1
    UNKNOWN_TOPIC_OR_PARTITION: Final = 3
    LEADER_NOT_AVAILABLE: Final = 5
    NOT_LEADER_OR_FOLLOWER: Final = 6
    REQUEST_TIMED_OUT: Final = 7
    OFFSET_METADATA_TOO_LARGE: Final = 12
    COORDINATOR_LOAD_IN_PROGRESS: Final = 14
    COORDINATOR_NOT_AVAILABLE: Final = 15
    NOT_COORDINATOR: Final = 16
    INVALID_TOPIC: Final = 17
    NOT_ENOUGH_REPLICAS: Final = 19
    NOT_ENOUGH_REPLICAS_AFTER_APPEND: Final = 20
    INVALID_REQUIRED_ACKS: Final = 21
    ILLEGAL_GENERATION: Final = 22
    INCONSISTENT_GROUP_PROTOCOL: Final = 23
    INVALID_GROUP_ID: Final = 24
    UNKNOWN_MEMBER_ID: Final = 25
    INVALID_SESSION_TIMEOUT: Final = 26
    REBALANCE_IN_PROGRESS: Final = 27
    UNSUPPORTED_VERSION: Final = 35
    INVALID_REQUEST: Final = 42
    UNSUPPORTED_FOR_MESSAGE_FORMAT: Final = 43
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED: Final = 53
    STORAGE_ERROR: Final = 56
    NON_EMPTY_GROUP: Final = 68
    GROUP_ID_NOT_FOUND: Final = 69
    FETCH_SESSION_ID_NOT_FOUND: Final = 70
    INVALID_FETCH_SESSION_EPOCH: Final = 71
    FENCED_LEADER_EPOCH: Final = 74
    UNKNOWN_LEADER_EPOCH: Final = 76
    MEMBER_ID_REQUIRED: Final = 79
    OFFSET_NOT_AVAILABLE: Final = 78
    PREFERRED_LEADER_NOT_AVAILABLE: Final = 80
    GROUP_MAX_SIZE_REACHED: Final = 81
    FENCED_INSTANCE_ID: Final = 82
    ELIGIBLE_LEADERS_NOT_AVAILABLE: Final = 83
    ELECTION_NOT_NEEDED: Final = 84
    GROUP_SUBSCRIBED_TO_TOPIC: Final = 86
    UNKNOWN_TOPIC_ID: Final = 100
