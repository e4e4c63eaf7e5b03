"""Which handler serves which API. Produce and Fetch read their frames themselves."""

from __future__ import annotations

from typing import Final

from headrace.kafka.api import (
    alter_configs,
    alter_partition_reassignments,
    api_versions,
    create_partitions,
    create_topics,
    delete_groups,
    delete_records,
    delete_topics,
    describe_cluster,
    describe_configs,
    describe_groups,
    describe_log_dirs,
    describe_topic_partitions,
    elect_leaders,
    fetch,
    find_coordinator,
    heartbeat,
    init_producer_id,
    join_group,
    key_query,
    leave_group,
    list_groups,
    list_offsets,
    list_partition_reassignments,
    metadata,
    offset_commit,
    offset_delete,
    offset_fetch,
    offset_for_leader_epoch,
    plan_placement,
    produce,
    replica_positions,
    sync_group,
)
from headrace.kafka.connection import Handler, RawApi, raw_api
from headrace.wire import api

RAW_HANDLERS: Final[dict[int, RawApi]] = {
    api.PRODUCE: raw_api(api.PRODUCE, produce.handle),
    api.FETCH: raw_api(api.FETCH, fetch.handle),
}

HANDLERS: Final[dict[int, Handler]] = {
    api.LIST_OFFSETS: list_offsets.handle,
    api.METADATA: metadata.handle,
    api.OFFSET_COMMIT: offset_commit.handle,
    api.OFFSET_FETCH: offset_fetch.handle,
    api.FIND_COORDINATOR: find_coordinator.handle,
    api.JOIN_GROUP: join_group.handle,
    api.HEARTBEAT: heartbeat.handle,
    api.LEAVE_GROUP: leave_group.handle,
    api.SYNC_GROUP: sync_group.handle,
    api.DESCRIBE_GROUPS: describe_groups.handle,
    api.LIST_GROUPS: list_groups.handle,
    api.API_VERSIONS: api_versions.handle,
    api.CREATE_TOPICS: create_topics.handle,
    api.DELETE_TOPICS: delete_topics.handle,
    api.DELETE_RECORDS: delete_records.handle,
    api.INIT_PRODUCER_ID: init_producer_id.handle,
    api.OFFSET_FOR_LEADER_EPOCH: offset_for_leader_epoch.handle,
    api.DESCRIBE_CONFIGS: describe_configs.handle,
    api.ALTER_CONFIGS: alter_configs.handle,
    api.DESCRIBE_LOG_DIRS: describe_log_dirs.handle,
    api.CREATE_PARTITIONS: create_partitions.handle,
    api.DELETE_GROUPS: delete_groups.handle,
    api.INCREMENTAL_ALTER_CONFIGS: alter_configs.handle_incremental,
    api.ELECT_LEADERS: elect_leaders.handle,
    api.ALTER_PARTITION_REASSIGNMENTS: alter_partition_reassignments.handle,
    api.LIST_PARTITION_REASSIGNMENTS: list_partition_reassignments.handle,
    api.OFFSET_DELETE: offset_delete.handle,
    api.DESCRIBE_CLUSTER: describe_cluster.handle,
    api.DESCRIBE_TOPIC_PARTITIONS: describe_topic_partitions.handle,
    api.KEY_QUERY: key_query.handle,
    api.REPLICA_POSITIONS: replica_positions.handle,
    api.PLAN_PLACEMENT: plan_placement.handle,
}
