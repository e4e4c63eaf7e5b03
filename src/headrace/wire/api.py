"""The APIs that are served: key, name, versions, and the first version with compact lengths and tagged fields.

Versions are those with a schema. Older clients may ask for less than `min_version`; ApiVersions tells them.
Produce is advertised from version 0, though served from 3: with a higher minimum kcat sends uncompressed
batches, without a word, whatever compression it was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

NEVER: Final = 1 << 15


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
LIST_CONFIG_RESOURCES: Final = 74
DESCRIBE_TOPIC_PARTITIONS: Final = 75
KEY_QUERY: Final = 20_000
REPLICA_POSITIONS: Final = 20_001
PLAN_PLACEMENT: Final = 20_002
ACCEPT_METADATA: Final = 20_003


def _row(key: int, name: str, lowest: int, highest: int, flexible_from: int, advertised: int | None = None) -> Api:
    return Api(key, name, lowest, highest, flexible_from, lowest if advertised is None else advertised)


_ROWS: Final = (
    _row(PRODUCE, "Produce", 3, 13, 9, 0),
    _row(FETCH, "Fetch", 4, 18, 12),
    _row(LIST_OFFSETS, "ListOffsets", 1, 11, 6),
    _row(METADATA, "Metadata", 0, 13, 9),
    _row(OFFSET_COMMIT, "OffsetCommit", 2, 10, 8),
    _row(OFFSET_FETCH, "OffsetFetch", 1, 10, 6),
    _row(FIND_COORDINATOR, "FindCoordinator", 0, 6, 3),
    _row(JOIN_GROUP, "JoinGroup", 0, 9, 6),
    _row(HEARTBEAT, "Heartbeat", 0, 4, 4),
    _row(LEAVE_GROUP, "LeaveGroup", 0, 5, 4),
    _row(SYNC_GROUP, "SyncGroup", 0, 5, 4),
    _row(DESCRIBE_GROUPS, "DescribeGroups", 0, 6, 5),
    _row(LIST_GROUPS, "ListGroups", 0, 5, 3),
    _row(API_VERSIONS, "ApiVersions", 0, 4, 3),
    _row(CREATE_TOPICS, "CreateTopics", 2, 7, 5),
    _row(DELETE_TOPICS, "DeleteTopics", 1, 6, 4),
    _row(DELETE_RECORDS, "DeleteRecords", 0, 2, 2),
    _row(INIT_PRODUCER_ID, "InitProducerId", 0, 6, 2),
    _row(OFFSET_FOR_LEADER_EPOCH, "OffsetForLeaderEpoch", 2, 4, 4),
    _row(DESCRIBE_CONFIGS, "DescribeConfigs", 1, 4, 4),
    _row(ALTER_CONFIGS, "AlterConfigs", 0, 2, 2),
    _row(ALTER_REPLICA_LOG_DIRS, "AlterReplicaLogDirs", 1, 2, 2),
    _row(DESCRIBE_LOG_DIRS, "DescribeLogDirs", 1, 5, 2),
    _row(CREATE_PARTITIONS, "CreatePartitions", 0, 3, 2),
    _row(DELETE_GROUPS, "DeleteGroups", 0, 2, 2),
    _row(ELECT_LEADERS, "ElectLeaders", 0, 2, 2),
    _row(INCREMENTAL_ALTER_CONFIGS, "IncrementalAlterConfigs", 0, 1, 1),
    _row(ALTER_PARTITION_REASSIGNMENTS, "AlterPartitionReassignments", 0, 1, 0),
    _row(LIST_PARTITION_REASSIGNMENTS, "ListPartitionReassignments", 0, 0, 0),
    _row(OFFSET_DELETE, "OffsetDelete", 0, 0, NEVER),
    _row(DESCRIBE_QUORUM, "DescribeQuorum", 0, 2, 0),
    _row(DESCRIBE_CLUSTER, "DescribeCluster", 0, 2, 0),
    _row(LIST_CONFIG_RESOURCES, "ListConfigResources", 0, 1, 0),
    _row(DESCRIBE_TOPIC_PARTITIONS, "DescribeTopicPartitions", 0, 0, 0),
)

API: Final[dict[int, Api]] = {row.key: row for row in _ROWS}
OWN: Final[dict[int, Api]] = {
    KEY_QUERY: _row(KEY_QUERY, "KeyQuery", 0, 0, 0),
    REPLICA_POSITIONS: _row(REPLICA_POSITIONS, "ReplicaPositions", 0, 0, 0),
    PLAN_PLACEMENT: _row(PLAN_PLACEMENT, "PlanPlacement", 0, 0, 0),
    ACCEPT_METADATA: _row(ACCEPT_METADATA, "AcceptMetadata", 0, 0, 0),
}
"""Headrace's own, with keys far from Kafka's; only our own client is told of them (see `own_schema`)."""
KNOWN: Final = {**API, **OWN}
