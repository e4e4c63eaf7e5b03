"""DescribeCluster, versions 0 to 2. 1: endpoint type; 2: fenced brokers."""

from __future__ import annotations

from headrace.errors import ErrorCode
from headrace.kafka import authorized
from headrace.kafka.api.metadata import brokers
from headrace.kafka.connection import Request
from headrace.wire.message import Message

BROKERS = 1


def handle(request: Request) -> Message:
    services = request.services
    if request.version >= 1 and request.body.endpoint_type != BROKERS:
        return Message(
            error_code=ErrorCode.MISMATCHED_ENDPOINT_TYPE,
            error_message="this is a broker's endpoint, not a controller's",
            endpoint_type=BROKERS,
            cluster_id=services.cluster_id,
            controller_id=-1,
            brokers=[],
        )
    return Message(
        throttle_time_ms=0,
        error_code=ErrorCode.NONE,
        endpoint_type=BROKERS,
        cluster_id=services.cluster_id,
        controller_id=services.view.image.controller_id(),
        brokers=[
            Message(broker_id=broker.node_id, host=broker.host, port=broker.port, rack=broker.rack)
            for broker in brokers(services.view.image, request.connection.listener)
        ],
        cluster_authorized_operations=authorized.operations(
            authorized.ON_CLUSTER, request.body.include_cluster_authorized_operations
        ),
    )
