"""Metadata, versions 0 to 13. 1: racks; 4: creation can be declined; 8: authorized operations,
those on the cluster up to 10; 9: flexible; 10: topic ids; 12: asked by id.

A broker is told by the address of the listener that was asked; a partition whose leader is not among those brokers has
none: LEADER_NOT_AVAILABLE. Replicas on brokers that are not alive are offline. A topic that is not there is created
first, where both the broker and the client allow it, so that the answer is complete.
"""

from __future__ import annotations

from headrace.cluster.image import NO_LEADER, Image, PartitionState, Topic
from headrace.errors import CoordinationError, ErrorCode, HeadraceError
from headrace.kafka import authorized, leader_lookup
from headrace.kafka.connection import Request
from headrace.wire.message import ZERO_UUID, Message

CREATED_A_REQUEST_MAX = 100
NULL_NAME_FROM = 12
"""From here on an answer may leave the name out."""
AUTHORIZED_VERSION = 8
CLUSTER_AUTHORIZED_VERSIONS = range(AUTHORIZED_VERSION, 11)


def handle(request: Request) -> Message | None:
    asked = request.body.topics
    image = request.services.view.image
    everything = asked is None or (request.version == 0 and not asked)
    names = () if everything else tuple(topic.name for topic in asked if not _is_by_id(topic))
    missing = [name for name in dict.fromkeys(names) if name not in image.topics]
    may_create = request.version < 4 or request.body.allow_auto_topic_creation
    if missing and may_create and request.services.effective_settings()["auto.create.topics.enable"]:
        request.reply_later(_create_then_answer(request, missing[:CREATED_A_REQUEST_MAX]))
        return None
    if not everything and len(names) != len(asked):  # some are asked by id
        return _response(request, _asked(request, {}))
    asks = (_asks_for_topics(request), _asks_for_cluster(request))
    key = (request.version, request.connection.listener, None if everything else names, asks)
    encoded = request.services.metadata_cache.get(image, key)
    if encoded is None:
        topics = [_topic(request, topic) for topic in image.topics.values()] if everything else _asked(request, {})
        encoded = request.encode(_response(request, topics))
        request.services.metadata_cache.put(image, key, encoded)
    request.reply_encoded(encoded)
    return None


def _asks_for_topics(request: Request) -> bool:
    return request.version >= AUTHORIZED_VERSION and bool(request.body.include_topic_authorized_operations)


def _asks_for_cluster(request: Request) -> bool:
    return request.version in CLUSTER_AUTHORIZED_VERSIONS and bool(request.body.include_cluster_authorized_operations)


async def _create_then_answer(request: Request, missing: list[str]) -> Message:
    errors: dict[str, int] = {}
    for name in missing:
        try:
            await request.services.auto_topic_creation.ensure(name)
        except CoordinationError:
            errors[name] = ErrorCode.LEADER_NOT_AVAILABLE
        except HeadraceError as error:
            errors[name] = error.kafka_code
    return _response(request, _asked(request, errors))


def _is_by_id(asked: Message) -> bool:
    """Java's client has an empty name beside the id, others have none."""
    return asked.name is None or (not asked.name and asked.topic_id != ZERO_UUID)


def _asked(request: Request, errors: dict[str, int]) -> list[Message]:
    image = request.services.view.image
    found = []
    for asked in request.body.topics:
        if not _is_by_id(asked):
            topic = image.topics.get(asked.name)
            code = errors.get(asked.name, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
            found.append(_topic(request, topic) if topic is not None else _unknown(asked.name, ZERO_UUID, code))
        else:
            topic = image.topics_by_id.get(asked.topic_id)
            nameless = None if request.version >= NULL_NAME_FROM else ""
            unknown = _unknown(nameless, asked.topic_id, ErrorCode.UNKNOWN_TOPIC_ID)
            found.append(_topic(request, topic) if topic is not None else unknown)
    return found


def _unknown(name: str | None, topic_id: bytes, code: int) -> Message:
    return Message(error_code=code, name=name, topic_id=topic_id, is_internal=False, partitions=[])


def _topic(request: Request, topic: Topic) -> Message:
    partitions = [partition(request, topic, state) for state in topic.partitions]
    return Message(
        error_code=ErrorCode.NONE,
        name=topic.name,
        topic_id=topic.id,
        is_internal=topic.internal,
        partitions=partitions,
        topic_authorized_operations=authorized.operations(authorized.ON_TOPIC, _asks_for_topics(request)),
    )


def partition(request: Request, topic: Topic, state: PartitionState) -> Message:
    """One partition as its clients are told of it."""
    leader = leader_lookup.advertised_leader(request.services, topic, state, request.connection.listener)
    brokers = request.services.view.image.brokers
    return Message(
        error_code=ErrorCode.NONE if leader != NO_LEADER else ErrorCode.LEADER_NOT_AVAILABLE,
        partition_index=state.index,
        leader_id=leader,
        leader_epoch=state.leader_epoch,
        replica_nodes=list(state.replicas),
        isr_nodes=list(state.isr),
        offline_replicas=[broker for broker in state.replicas if broker not in brokers],
    )


def brokers(image: Image, listener: str) -> list[Message]:
    """Every broker that has a listener of this name."""
    return [
        Message(
            node_id=broker.id,
            host=broker.listeners[listener].host,
            port=broker.listeners[listener].port,
            rack=broker.rack or None,
        )
        for broker in image.brokers.values()
        if listener in broker.listeners
    ]


def _response(request: Request, topics: list[Message]) -> Message:
    services = request.services
    return Message(
        throttle_time_ms=0,
        brokers=brokers(services.view.image, request.connection.listener),
        cluster_id=services.cluster_id,
        controller_id=services.view.image.controller_id(),
        topics=topics,
        cluster_authorized_operations=authorized.operations(authorized.ON_CLUSTER, _asks_for_cluster(request)),
    )
