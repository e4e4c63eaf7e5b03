"""The APIs that are served: key, name, versions, and the first flexible one (KIP-482).

Versions are those with a schema. Older clients may ask for less than `min_version`; ApiVersions tells them.
Produce is advertised from version 0, though served from 3: with a higher minimum kcat sends uncompressed
batches, without a word, whatever compression it was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

NEVER_FLEXIBLE: Final = 1 << 15


@dataclass(frozen=True, slots=True)
class Api:
    """Served versions are `min_version` to `max_version`; ApiVersions answers `advertised_min` to `max_version`."""

    key: int
    name: str
    min_version: int
    max_version: int
    flexible_from: int
    advertised_min: int

    def serves(self, version: int) -> bool:
        return self.min_version <= version <= self.max_version


PRODUCE: Final = 0
FETCH: Final = 1
LIST_OFFSETS: Final = 2
METADATA: Final = 3
OFFSET_COMMIT: Final = 8
OFFSET_FETCH: Final = 9
FIND_COORDINATOR: Final = 10
JOIN_GROUP: Final = 11
HEARTBEAT: Final = 12
LEAVE_GROUP: Final = 13
SYNC_GROUP: Final = 14
DESCRIBE_GROUPS: Final = 15
LIST_GROUPS: Final = 16
API_VERSIONS: Final = 18
CREATE_TOPICS: Final = 19
DELETE_TOPICS: Final = 20
DELETE_RECORDS: Final = 21
INIT_PRODUCER_ID: Final = 22
OFFSET_FOR_LEADER_EPOCH: Final = 23
ADD_PARTITIONS_TO_TXN: Final = 24
ADD_OFFSETS_TO_TXN: Final = 25
END_TXN: Final = 26
WRITE_TXN_MARKERS: Final = 27
TXN_OFFSET_COMMIT: Final = 28
DESCRIBE_CONFIGS: Final = 32
ALTER_CONFIGS: Final = 33
ALTER_REPLICA_LOG_DIRS: Final = 34
DESCRIBE_LOG_DIRS: Final = 35
CREATE_PARTITIONS: Final = 37
DELETE_GROUPS: Final = 42
ELECT_LEADERS: Final = 43
INCREMENTAL_ALTER_CONFIGS: Final = 44
ALTER_PARTITION_REASSIGNMENTS: Final = 45
LIST_PARTITION_REASSIGNMENTS: Final = 46
OFFSET_DELETE: Final = 47
DESCRIBE_QUORUM: Final = 55
DESCRIBE_CLUSTER: Final = 60
DESCRIBE_PRODUCERS: Final = 61
DESCRIBE_TRANSACTIONS: Final = 65
LIST_TRANSACTIONS: Final = 66
CONSUMER_GROUP_HEARTBEAT: Final = 68
CONSUMER_GROUP_DESCRIBE: Final = 69
LIST_CONFIG_RESOURCES: Final = 74
DESCRIBE_TOPIC_PARTITIONS: Final = 75
SHARE_GROUP_HEARTBEAT: Final = 76
SHARE_GROUP_DESCRIBE: Final = 77
SHARE_FETCH: Final = 78
SHARE_ACKNOWLEDGE: Final = 79
INITIALIZE_SHARE_GROUP_STATE: Final = 83
READ_SHARE_GROUP_STATE: Final = 84
WRITE_SHARE_GROUP_STATE: Final = 85
DELETE_SHARE_GROUP_STATE: Final = 86
READ_SHARE_GROUP_STATE_SUMMARY: Final = 87
DESCRIBE_SHARE_GROUP_OFFSETS: Final = 90
ALTER_SHARE_GROUP_OFFSETS: Final = 91
DELETE_SHARE_GROUP_OFFSETS: Final = 92
KEY_QUERY: Final = 20_000
REPLICA_POSITIONS: Final = 20_001
PLAN_PLACEMENT: Final = 20_002
ACCEPT_METADATA: Final = 20_003
RECALL_RECORDS: Final = 20_004


def _row(
    key: int, name: str, *, versions: tuple[int, int], flexible_from: int, advertised_min: int | None = None
) -> Api:
    return Api(key, name, *versions, flexible_from, versions[0] if advertised_min is None else advertised_min)


_ROWS: Final = (
    _row(PRODUCE, "Produce", versions=(3, 13), flexible_from=9, advertised_min=0),
    _row(FETCH, "Fetch", versions=(4, 18), flexible_from=12),
    _row(LIST_OFFSETS, "ListOffsets", versions=(1, 11), flexible_from=6),
    _row(METADATA, "Metadata", versions=(0, 13), flexible_from=9),
    _row(OFFSET_COMMIT, "OffsetCommit", versions=(2, 10), flexible_from=8),
    _row(OFFSET_FETCH, "OffsetFetch", versions=(1, 10), flexible_from=6),
    _row(FIND_COORDINATOR, "FindCoordinator", versions=(0, 6), flexible_from=3),
    _row(JOIN_GROUP, "JoinGroup", versions=(0, 9), flexible_from=6),
    _row(HEARTBEAT, "Heartbeat", versions=(0, 4), flexible_from=4),
    _row(LEAVE_GROUP, "LeaveGroup", versions=(0, 5), flexible_from=4),
    _row(SYNC_GROUP, "SyncGroup", versions=(0, 5), flexible_from=4),
    _row(DESCRIBE_GROUPS, "DescribeGroups", versions=(0, 6), flexible_from=5),
    _row(LIST_GROUPS, "ListGroups", versions=(0, 5), flexible_from=3),
    _row(API_VERSIONS, "ApiVersions", versions=(0, 4), flexible_from=3),
    _row(CREATE_TOPICS, "CreateTopics", versions=(2, 7), flexible_from=5),
    _row(DELETE_TOPICS, "DeleteTopics", versions=(1, 6), flexible_from=4),
    _row(DELETE_RECORDS, "DeleteRecords", versions=(0, 2), flexible_from=2),
    _row(INIT_PRODUCER_ID, "InitProducerId", versions=(0, 6), flexible_from=2),
    _row(OFFSET_FOR_LEADER_EPOCH, "OffsetForLeaderEpoch", versions=(2, 4), flexible_from=4),
    _row(ADD_PARTITIONS_TO_TXN, "AddPartitionsToTxn", versions=(0, 5), flexible_from=3),
    _row(ADD_OFFSETS_TO_TXN, "AddOffsetsToTxn", versions=(0, 4), flexible_from=3),
    _row(END_TXN, "EndTxn", versions=(0, 5), flexible_from=3),
    _row(WRITE_TXN_MARKERS, "WriteTxnMarkers", versions=(1, 2), flexible_from=1),
    _row(TXN_OFFSET_COMMIT, "TxnOffsetCommit", versions=(0, 5), flexible_from=3),
    _row(DESCRIBE_CONFIGS, "DescribeConfigs", versions=(1, 4), flexible_from=4),
    _row(ALTER_CONFIGS, "AlterConfigs", versions=(0, 2), flexible_from=2),
    _row(ALTER_REPLICA_LOG_DIRS, "AlterReplicaLogDirs", versions=(1, 2), flexible_from=2),
    _row(DESCRIBE_LOG_DIRS, "DescribeLogDirs", versions=(1, 5), flexible_from=2),
    _row(CREATE_PARTITIONS, "CreatePartitions", versions=(0, 3), flexible_from=2),
    _row(DELETE_GROUPS, "DeleteGroups", versions=(0, 2), flexible_from=2),
    _row(ELECT_LEADERS, "ElectLeaders", versions=(0, 2), flexible_from=2),
    _row(INCREMENTAL_ALTER_CONFIGS, "IncrementalAlterConfigs", versions=(0, 1), flexible_from=1),
    _row(ALTER_PARTITION_REASSIGNMENTS, "AlterPartitionReassignments", versions=(0, 1), flexible_from=0),
    _row(LIST_PARTITION_REASSIGNMENTS, "ListPartitionReassignments", versions=(0, 0), flexible_from=0),
    _row(OFFSET_DELETE, "OffsetDelete", versions=(0, 0), flexible_from=NEVER_FLEXIBLE),
    _row(DESCRIBE_QUORUM, "DescribeQuorum", versions=(0, 2), flexible_from=0),
    _row(DESCRIBE_CLUSTER, "DescribeCluster", versions=(0, 2), flexible_from=0),
    _row(DESCRIBE_PRODUCERS, "DescribeProducers", versions=(0, 0), flexible_from=0),
    _row(DESCRIBE_TRANSACTIONS, "DescribeTransactions", versions=(0, 0), flexible_from=0),
    _row(LIST_TRANSACTIONS, "ListTransactions", versions=(0, 2), flexible_from=0),
    _row(CONSUMER_GROUP_HEARTBEAT, "ConsumerGroupHeartbeat", versions=(0, 1), flexible_from=0),
    _row(CONSUMER_GROUP_DESCRIBE, "ConsumerGroupDescribe", versions=(0, 1), flexible_from=0),
    _row(LIST_CONFIG_RESOURCES, "ListConfigResources", versions=(0, 1), flexible_from=0),
    _row(DESCRIBE_TOPIC_PARTITIONS, "DescribeTopicPartitions", versions=(0, 0), flexible_from=0),
    _row(SHARE_GROUP_HEARTBEAT, "ShareGroupHeartbeat", versions=(1, 1), flexible_from=0),
    _row(SHARE_GROUP_DESCRIBE, "ShareGroupDescribe", versions=(1, 1), flexible_from=0),
    _row(SHARE_FETCH, "ShareFetch", versions=(1, 2), flexible_from=0),
    _row(SHARE_ACKNOWLEDGE, "ShareAcknowledge", versions=(1, 2), flexible_from=0),
    _row(INITIALIZE_SHARE_GROUP_STATE, "InitializeShareGroupState", versions=(0, 0), flexible_from=0),
    _row(READ_SHARE_GROUP_STATE, "ReadShareGroupState", versions=(0, 0), flexible_from=0),
    _row(WRITE_SHARE_GROUP_STATE, "WriteShareGroupState", versions=(0, 1), flexible_from=0),
    _row(DELETE_SHARE_GROUP_STATE, "DeleteShareGroupState", versions=(0, 0), flexible_from=0),
    _row(READ_SHARE_GROUP_STATE_SUMMARY, "ReadShareGroupStateSummary", versions=(0, 1), flexible_from=0),
    _row(DESCRIBE_SHARE_GROUP_OFFSETS, "DescribeShareGroupOffsets", versions=(0, 1), flexible_from=0),
    _row(ALTER_SHARE_GROUP_OFFSETS, "AlterShareGroupOffsets", versions=(0, 0), flexible_from=0),
    _row(DELETE_SHARE_GROUP_OFFSETS, "DeleteShareGroupOffsets", versions=(0, 0), flexible_from=0),
)

KAFKA_APIS: Final[dict[int, Api]] = {row.key: row for row in _ROWS}
HEADRACE_APIS: Final[dict[int, Api]] = {
    KEY_QUERY: _row(KEY_QUERY, "KeyQuery", versions=(0, 1), flexible_from=0),
    REPLICA_POSITIONS: _row(REPLICA_POSITIONS, "ReplicaPositions", versions=(0, 0), flexible_from=0),
    PLAN_PLACEMENT: _row(PLAN_PLACEMENT, "PlanPlacement", versions=(0, 0), flexible_from=0),
    ACCEPT_METADATA: _row(ACCEPT_METADATA, "AcceptMetadata", versions=(0, 0), flexible_from=0),
    RECALL_RECORDS: _row(RECALL_RECORDS, "RecallRecords", versions=(0, 0), flexible_from=0),
}
"""Headrace's own, with keys far from Kafka's; only our own client is told of them (see `own_schema`)."""
ALL_APIS: Final = {**KAFKA_APIS, **HEADRACE_APIS}
