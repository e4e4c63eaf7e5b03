"""The table of what a broker serves over HTTP."""

from __future__ import annotations

from typing import Final

from headrace.http import (
    acknowledge,
    fetch,
    groups,
    health,
    metrics,
    produce,
    query,
    receive,
    status,
    topic_changes,
    topic_fetch,
    topics,
)
from headrace.http.openapi import with_document
from headrace.http.routes import Route

ROUTES: Final = with_document(
    "Headrace broker",
    (
        Route("GET", "/", "http.status", status.page, status.PAGE),
        Route("GET", "/health", "http.health", health.health, health.HEALTH),
        Route("GET", "/ready", "http.ready", health.ready, health.READY),
        Route("GET", "/metrics", "http.metrics", metrics.exposition, metrics.EXPOSITION),
        Route("GET", "/topics", "http.topics", topics.list_topics, topics.LIST),
        Route("POST", "/topics", "http.topic.create", topic_changes.create_topic, topic_changes.CREATE),
        Route("GET", "/topics/{topic}", "http.topic", topics.describe_topic, topics.DESCRIBE),
        Route("PATCH", "/topics/{topic}", "http.topic.alter", topic_changes.alter_topic, topic_changes.ALTER),
        Route("DELETE", "/topics/{topic}", "http.topic.delete", topic_changes.delete_topic, topic_changes.DELETE),
        Route("GET", "/topics/{topic}/query", "http.query", query.handle, query.QUERY),
        Route("GET", "/topics/{topic}/records", "http.topic.fetch", topic_fetch.handle, topic_fetch.FETCH),
        Route("POST", "/topics/{topic}/records", "http.produce", produce.handle, produce.PRODUCE),
        Route("GET", "/topics/{topic}/partitions/{partition}/records", "http.fetch", fetch.handle, fetch.FETCH),
        Route("GET", "/groups", "http.groups", groups.list_groups, groups.LIST),
        Route("GET", "/groups/{group}", "http.group", groups.describe_group, groups.DESCRIBE),
        Route("DELETE", "/groups/{group}", "http.group.delete", groups.delete_group, groups.DELETE),
        Route("GET", "/groups/{group}/offsets", "http.offsets", groups.list_offsets, groups.OFFSETS),
        Route("POST", "/groups/{group}/offsets", "http.offsets.commit", groups.commit_offsets, groups.COMMIT),
        Route("DELETE", "/groups/{group}/offsets", "http.offsets.delete", groups.delete_offsets, groups.DELETE_OFFSETS),
        Route("POST", "/groups/{group}/receive", "http.receive", receive.handle, receive.RECEIVE),
        Route("POST", "/groups/{group}/acknowledge", "http.acknowledge", acknowledge.handle, acknowledge.ACKNOWLEDGE),
    ),
)
