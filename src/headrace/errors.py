"""One tree of errors and the one table that maps it to Kafka codes, HTTP status and retriable or not.

Raise these for peers, disks and operators. A message says what happened, where, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self


class ErrorCode:
    """Kafka's error codes that are answered or named here, under Kafka's names."""

    UNKNOWN_SERVER_ERROR: Final = -1
    NONE: Final = 0
    OFFSET_OUT_OF_RANGE: Final = 1
    CORRUPT_MESSAGE: Final = 2
    UNKNOWN_TOPIC_OR_PARTITION: Final = 3
    LEADER_NOT_AVAILABLE: Final = 5
    NOT_LEADER_OR_FOLLOWER: Final = 6
    REQUEST_TIMED_OUT: Final = 7
    REPLICA_NOT_AVAILABLE: Final = 9
    MESSAGE_TOO_LARGE: Final = 10
    OFFSET_METADATA_TOO_LARGE: Final = 12
    NETWORK_EXCEPTION: Final = 13
    COORDINATOR_LOAD_IN_PROGRESS: Final = 14
    COORDINATOR_NOT_AVAILABLE: Final = 15
    NOT_COORDINATOR: Final = 16
    INVALID_TOPIC_EXCEPTION: Final = 17
    RECORD_LIST_TOO_LARGE: Final = 18
    NOT_ENOUGH_REPLICAS: Final = 19
    NOT_ENOUGH_REPLICAS_AFTER_APPEND: Final = 20
    INVALID_REQUIRED_ACKS: Final = 21
    ILLEGAL_GENERATION: Final = 22
    INCONSISTENT_GROUP_PROTOCOL: Final = 23
    INVALID_GROUP_ID: Final = 24
    UNKNOWN_MEMBER_ID: Final = 25
    INVALID_SESSION_TIMEOUT: Final = 26
    REBALANCE_IN_PROGRESS: Final = 27
    INVALID_TIMESTAMP: Final = 32
    UNSUPPORTED_VERSION: Final = 35
    TOPIC_ALREADY_EXISTS: Final = 36
    INVALID_PARTITIONS: Final = 37
    INVALID_REPLICATION_FACTOR: Final = 38
    INVALID_REPLICA_ASSIGNMENT: Final = 39
    INVALID_CONFIG: Final = 40
    NOT_CONTROLLER: Final = 41
    INVALID_REQUEST: Final = 42
    POLICY_VIOLATION: Final = 44
    OUT_OF_ORDER_SEQUENCE_NUMBER: Final = 45
    DUPLICATE_SEQUENCE_NUMBER: Final = 46
    INVALID_PRODUCER_EPOCH: Final = 47
    INVALID_TXN_STATE: Final = 48
    INVALID_PRODUCER_ID_MAPPING: Final = 49
    INVALID_TRANSACTION_TIMEOUT: Final = 50
    CONCURRENT_TRANSACTIONS: Final = 51
    TRANSACTION_COORDINATOR_FENCED: Final = 52
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED: Final = 53
    OPERATION_NOT_ATTEMPTED: Final = 55
    KAFKA_STORAGE_ERROR: Final = 56
    LOG_DIR_NOT_FOUND: Final = 57
    UNKNOWN_PRODUCER_ID: Final = 59
    NON_EMPTY_GROUP: Final = 68
    GROUP_ID_NOT_FOUND: Final = 69
    FETCH_SESSION_ID_NOT_FOUND: Final = 70
    INVALID_FETCH_SESSION_EPOCH: Final = 71
    FENCED_LEADER_EPOCH: Final = 74
    UNKNOWN_LEADER_EPOCH: Final = 75
    OFFSET_NOT_AVAILABLE: Final = 78
    MEMBER_ID_REQUIRED: Final = 79
    PREFERRED_LEADER_NOT_AVAILABLE: Final = 80
    GROUP_MAX_SIZE_REACHED: Final = 81
    FENCED_INSTANCE_ID: Final = 82
    ELIGIBLE_LEADERS_NOT_AVAILABLE: Final = 83
    ELECTION_NOT_NEEDED: Final = 84
    NO_REASSIGNMENT_IN_PROGRESS: Final = 85
    GROUP_SUBSCRIBED_TO_TOPIC: Final = 86
    INVALID_RECORD: Final = 87
    UNSTABLE_OFFSET_COMMIT: Final = 88
    PRODUCER_FENCED: Final = 90
    RESOURCE_NOT_FOUND: Final = 91
    DUPLICATE_RESOURCE: Final = 92
    UNKNOWN_TOPIC_ID: Final = 100
    INCONSISTENT_TOPIC_ID: Final = 103
    FETCH_SESSION_TOPIC_ID_ERROR: Final = 106
    TRANSACTIONAL_ID_NOT_FOUND: Final = 105
    FENCED_MEMBER_EPOCH: Final = 110
    UNRELEASED_INSTANCE_ID: Final = 111
    UNSUPPORTED_ASSIGNOR: Final = 112
    STALE_MEMBER_EPOCH: Final = 113
    MISMATCHED_ENDPOINT_TYPE: Final = 114
    TRANSACTION_ABORTABLE: Final = 120
    INVALID_RECORD_STATE: Final = 121
    SHARE_SESSION_NOT_FOUND: Final = 122
    INVALID_SHARE_SESSION_EPOCH: Final = 123
    FENCED_STATE_EPOCH: Final = 124
    INVALID_REGULAR_EXPRESSION: Final = 128
    SHARE_SESSION_LIMIT_REACHED: Final = 133


@dataclass(frozen=True, slots=True)
class ErrorMapping:
    """How one kind of error is told to each front end."""

    kafka_code: int
    http_status: int
    retriable: bool


class HeadraceError(Exception):
    """Root of everything that Headrace raises on purpose."""

    mapping: ErrorMapping = ErrorMapping(ErrorCode.UNKNOWN_SERVER_ERROR, 500, False)

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


class CannotListen(OperatorError):
    """A port that cannot be had."""


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


class InconsistentTopicId(HeadraceError):
    """A topic UUID that is not that of the topic which has its name now."""


class FetchSessionNotFound(HeadraceError):
    """A fetch session that is not there, or not on this connection: send a full fetch."""


class InvalidFetchSessionEpoch(HeadraceError):
    """A fetch that is not the next one of its session: send a full fetch."""


class FetchSessionTopicIds(HeadraceError):
    """A fetch that names topics by id in a session that names them, or the other way round: send a full fetch."""


class ShareSessionNotFound(HeadraceError):
    """A share session that is not there, or not on this connection: begin a new one."""


class InvalidShareSessionEpoch(HeadraceError):
    """A request that is not the next one of its share session: begin a new one."""


class ShareSessionLimitReached(HeadraceError):
    """There is no room for another share session: try again later."""


class InvalidRecordState(HeadraceError):
    """A record is acknowledged by who does not hold it: its lock has run out, or it was acknowledged before."""


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


class InvalidPattern(HeadraceError):
    """A regular expression that is none, or that would cost too much."""


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


class PeerUnreachable(HeadraceError):
    """Another broker did not answer. Whether it has worked on what was asked is not known."""


class DuplicateSequence(HeadraceError):
    """A producer sequence that was seen, but too long ago to answer with its offset."""


class OutOfOrderSequence(HeadraceError):
    """A gap in a producer's sequence numbers."""


class InvalidProducerEpoch(HeadraceError):
    """A producer epoch older than the newest one seen."""


class UnknownProducer(HeadraceError):
    """A producer id of which the log holds nothing."""


class ProducerFenced(HeadraceError):
    """Another producer has taken over the transactional id: this one can write and commit nothing more."""


class InvalidTxnState(HeadraceError):
    """The transaction is not in a state in which this can be done."""


class TransactionUnverified(InvalidTxnState):
    """Whether a transaction is open for this write has not been asked of its coordinator. Whoever takes the write asks,
    and tries again; if nobody does, there is no such transaction."""


class InvalidProducerIdMapping(HeadraceError):
    """The transactional id has another producer id, or none."""


class InvalidTransactionTimeout(HeadraceError):
    """A transaction timeout above what the broker allows, or none at all."""


class ConcurrentTransactions(HeadraceError):
    """The transaction before this one is still being ended: try again."""


class TransactionCoordinatorFenced(HeadraceError):
    """A newer coordinator of the transaction has been heard of."""


class TransactionAbortable(HeadraceError):
    """Something of the transaction failed: it cannot be committed, but the producer can abort it and go on."""


class UnknownTransactionalId(HeadraceError):
    """A transactional id of which nothing is known."""


class UnstableOffsetCommit(HeadraceError):
    """Offsets of the group are in a transaction that is not decided: try again."""


class InvalidGroupName(HeadraceError):
    """A group name against the rules; the message gives the rule."""


class UnknownGroup(HeadraceError):
    """A group that this cluster does not have."""


class GroupHasMembers(HeadraceError):
    """The group has members that are alive: only they commit for it, and it cannot be deleted."""


class NotCoordinator(HeadraceError):
    """This broker does not coordinate the group."""


class CoordinatorLoading(HeadraceError):
    """The broker has become the group's coordinator, and has not read its offsets yet."""


class TooLate(HeadraceError):
    """A record cannot be recalled: it is delivered or about to be, or was never delayed."""


class UnknownValue(HeadraceError):
    """A cluster-wide setting that nobody has set."""


class ChangedMeanwhile(HeadraceError):
    """A change that was to be made only if nothing had changed before it, and something has."""


class PolicyViolation(HeadraceError):
    """A request that the operator's limits do not allow."""


_TABLE: Final[dict[type[HeadraceError], ErrorMapping]] = {
    ProtocolError: ErrorMapping(ErrorCode.INVALID_REQUEST, 400, False),
    Unsupported: ErrorMapping(ErrorCode.UNSUPPORTED_VERSION, 501, False),
    CorruptBatch: ErrorMapping(ErrorCode.CORRUPT_MESSAGE, 400, True),
    BatchTooLarge: ErrorMapping(ErrorCode.MESSAGE_TOO_LARGE, 413, False),
    InvalidRecord: ErrorMapping(ErrorCode.INVALID_RECORD, 422, False),
    InvalidTimestamp: ErrorMapping(ErrorCode.INVALID_TIMESTAMP, 422, False),
    OffsetOutOfRange: ErrorMapping(ErrorCode.OFFSET_OUT_OF_RANGE, 416, False),
    OffsetNotAvailable: ErrorMapping(ErrorCode.OFFSET_NOT_AVAILABLE, 503, True),
    StorageFull: ErrorMapping(ErrorCode.KAFKA_STORAGE_ERROR, 507, True),
    StorageFailed: ErrorMapping(ErrorCode.KAFKA_STORAGE_ERROR, 503, True),
    UnknownPartition: ErrorMapping(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, 404, True),
    UnknownTopicId: ErrorMapping(ErrorCode.UNKNOWN_TOPIC_ID, 404, True),
    InconsistentTopicId: ErrorMapping(ErrorCode.INCONSISTENT_TOPIC_ID, 409, True),
    FetchSessionNotFound: ErrorMapping(ErrorCode.FETCH_SESSION_ID_NOT_FOUND, 404, True),
    InvalidFetchSessionEpoch: ErrorMapping(ErrorCode.INVALID_FETCH_SESSION_EPOCH, 409, True),
    FetchSessionTopicIds: ErrorMapping(ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR, 409, True),
    ShareSessionNotFound: ErrorMapping(ErrorCode.SHARE_SESSION_NOT_FOUND, 404, True),
    InvalidShareSessionEpoch: ErrorMapping(ErrorCode.INVALID_SHARE_SESSION_EPOCH, 409, True),
    ShareSessionLimitReached: ErrorMapping(ErrorCode.SHARE_SESSION_LIMIT_REACHED, 503, True),
    InvalidRecordState: ErrorMapping(ErrorCode.INVALID_RECORD_STATE, 409, False),
    InvalidTopicName: ErrorMapping(ErrorCode.INVALID_TOPIC_EXCEPTION, 400, False),
    TopicExists: ErrorMapping(ErrorCode.TOPIC_ALREADY_EXISTS, 409, False),
    InvalidPartitions: ErrorMapping(ErrorCode.INVALID_PARTITIONS, 400, False),
    InvalidReplication: ErrorMapping(ErrorCode.INVALID_REPLICATION_FACTOR, 400, False),
    InvalidAssignment: ErrorMapping(ErrorCode.INVALID_REPLICA_ASSIGNMENT, 400, False),
    NoMoveUnderWay: ErrorMapping(ErrorCode.NO_REASSIGNMENT_IN_PROGRESS, 409, False),
    InvalidConfig: ErrorMapping(ErrorCode.INVALID_CONFIG, 400, False),
    InvalidRequest: ErrorMapping(ErrorCode.INVALID_REQUEST, 400, False),
    InvalidPattern: ErrorMapping(ErrorCode.INVALID_REGULAR_EXPRESSION, 400, False),
    KeyIndexMissing: ErrorMapping(ErrorCode.INVALID_CONFIG, 409, False),
    NotLeader: ErrorMapping(ErrorCode.NOT_LEADER_OR_FOLLOWER, 503, True),
    FencedEpoch: ErrorMapping(ErrorCode.FENCED_LEADER_EPOCH, 409, True),
    UnknownEpoch: ErrorMapping(ErrorCode.UNKNOWN_LEADER_EPOCH, 409, True),
    NotEnoughReplicas: ErrorMapping(ErrorCode.NOT_ENOUGH_REPLICAS, 503, True),
    NotEnoughReplicasAfterAppend: ErrorMapping(ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND, 503, True),
    PeerUnreachable: ErrorMapping(ErrorCode.NETWORK_EXCEPTION, 503, True),
    RequestTimedOut: ErrorMapping(ErrorCode.REQUEST_TIMED_OUT, 504, True),
    DuplicateSequence: ErrorMapping(ErrorCode.DUPLICATE_SEQUENCE_NUMBER, 409, False),
    OutOfOrderSequence: ErrorMapping(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, 409, False),
    InvalidProducerEpoch: ErrorMapping(ErrorCode.INVALID_PRODUCER_EPOCH, 409, False),
    UnknownProducer: ErrorMapping(ErrorCode.UNKNOWN_PRODUCER_ID, 409, False),
    ProducerFenced: ErrorMapping(ErrorCode.PRODUCER_FENCED, 409, False),
    InvalidTxnState: ErrorMapping(ErrorCode.INVALID_TXN_STATE, 409, False),
    InvalidProducerIdMapping: ErrorMapping(ErrorCode.INVALID_PRODUCER_ID_MAPPING, 409, False),
    InvalidTransactionTimeout: ErrorMapping(ErrorCode.INVALID_TRANSACTION_TIMEOUT, 400, False),
    ConcurrentTransactions: ErrorMapping(ErrorCode.CONCURRENT_TRANSACTIONS, 409, True),
    TransactionCoordinatorFenced: ErrorMapping(ErrorCode.TRANSACTION_COORDINATOR_FENCED, 409, False),
    TransactionAbortable: ErrorMapping(ErrorCode.TRANSACTION_ABORTABLE, 409, False),
    UnknownTransactionalId: ErrorMapping(ErrorCode.TRANSACTIONAL_ID_NOT_FOUND, 404, False),
    UnstableOffsetCommit: ErrorMapping(ErrorCode.UNSTABLE_OFFSET_COMMIT, 503, True),
    InvalidGroupName: ErrorMapping(ErrorCode.INVALID_GROUP_ID, 400, False),
    UnknownGroup: ErrorMapping(ErrorCode.GROUP_ID_NOT_FOUND, 404, False),
    GroupHasMembers: ErrorMapping(ErrorCode.NON_EMPTY_GROUP, 409, False),
    NotCoordinator: ErrorMapping(ErrorCode.NOT_COORDINATOR, 503, True),
    CoordinatorLoading: ErrorMapping(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, 503, True),
    TooLate: ErrorMapping(ErrorCode.INVALID_RECORD_STATE, 409, False),
    UnknownValue: ErrorMapping(ErrorCode.INVALID_REQUEST, 404, False),
    ChangedMeanwhile: ErrorMapping(ErrorCode.INVALID_REQUEST, 409, False),
    PolicyViolation: ErrorMapping(ErrorCode.POLICY_VIOLATION, 403, False),
    CoordinationError: ErrorMapping(ErrorCode.COORDINATOR_NOT_AVAILABLE, 503, True),
}
for _kind, _mapping in _TABLE.items():
    _kind.mapping = _mapping
