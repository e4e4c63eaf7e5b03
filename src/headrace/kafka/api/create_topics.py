"""CreateTopics, versions 2 to 7. 4: default counts; 5: flexible, the settings come back; 7: topic ids."""

from __future__ import annotations

from collections import Counter

from headrace.cluster.topics import CreateTopic
from headrace.errors import ErrorCode, HeadraceError, InvalidRequest, PolicyViolation
from headrace.kafka.api.describe_configs import SOURCE_DEFAULT, SOURCE_TOPIC
from headrace.kafka.connection import Request
from headrace.settings.values import TOPIC_SETTINGS, check_topic_overrides, text_of
from headrace.wire.message import ZERO_UUID, Message

TOPICS_A_REQUEST_MAX = 5000


def handle(request: Request) -> None:
    request.reply_later(_create(request))


async def _create(request: Request) -> Message:
    asked = request.body.topics
    if len(asked) > TOPICS_A_REQUEST_MAX:
        raise PolicyViolation(f"{len(asked)} topics in one request; at most {TOPICS_A_REQUEST_MAX} are taken")
    counts = Counter(topic.name for topic in asked)
    topics = [await _one(request, topic, counts[topic.name] > 1) for topic in asked]
    return Message(throttle_time_ms=0, topics=topics)


async def _one(request: Request, asked: Message, named_twice: bool) -> Message:
    try:
        if named_twice:
            raise InvalidRequest(f"topic {asked.name!r} is named twice in one request")
        overrides = {config.name: config.value for config in asked.configs if config.value is not None}
        check_topic_overrides(overrides)
        topic = await request.services.topics.create(
            CreateTopic(
                asked.name,
                asked.num_partitions,
                asked.replication_factor,
                overrides,
                {assignment.partition_index: assignment.broker_ids for assignment in asked.assignments},
            ),
            validate_only=request.body.validate_only,
        )
    except HeadraceError as error:
        return Message(
            name=asked.name, topic_id=ZERO_UUID, error_code=error.kafka_code, error_message=str(error), configs=[]
        )
    defaults = request.services.effective_settings().topic_defaults()
    configs = [
        Message(
            name=setting.name,
            value=topic.overrides.get(setting.name, text_of(defaults[setting.name])),
            read_only=False,
            config_source=SOURCE_TOPIC if setting.name in topic.overrides else SOURCE_DEFAULT,
            is_sensitive=False,
        )
        for setting in TOPIC_SETTINGS
    ]
    return Message(
        name=topic.name,
        topic_id=topic.id,
        error_code=ErrorCode.NONE,
        error_message=None,
        num_partitions=len(topic.partitions),
        replication_factor=len(topic.partitions[0].replicas),
        configs=configs,
    )
