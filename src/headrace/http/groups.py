"""Consumer groups: which there are, how far they are, and commits without being a member.

    GET    /groups                   the groups that this broker coordinates
    GET    /groups/{group}           its state and its members; 404 if there is none
    DELETE /groups/{group}           with its offsets; refused while it has members
    GET    /groups/{group}/offsets   what it has committed, and how far that is behind; ?topic=T of one topic
    POST   /groups/{group}/offsets   {"offsets": [{"topic": "orders", "partition": 0, "offset": 5, "metadata": "m"}]}
    DELETE /groups/{group}/offsets   ?topic=T, and &partition=N for one: as if nothing had been committed there

They are the groups and offsets of Kafka's clients. A commit makes the group if it is new, and is answered when it is
where commits of members are when they are answered. Who reads over HTTP is no member, so nobody shares the partitions
out: while a group has live members only they commit (409). One broker coordinates a group; another one names it (503).
"""

from __future__ import annotations

from typing import Any, Final

from headrace.cluster.image import NO_LEADER
from headrace.cluster.names import OFFSETS_TOPIC, group_name_fault
from headrace.coordination.waits import pause
from headrace.coordinators.state_log import partition_of
from headrace.errors import (
    BatchTooLarge,
    CoordinatorLoading,
    ErrorCode,
    GroupHasMembers,
    HeadraceError,
    InvalidGroupName,
    InvalidRequest,
    NotCoordinator,
    PolicyViolation,
    UnknownGroup,
    UnknownPartition,
)
from headrace.groups.group import State
from headrace.groups.messages import (
    NO_OFFSET,
    CommitRequest,
    DescribedGroup,
    FetchedOffset,
    OffsetDeleteReply,
    OffsetToCommit,
    PartitionResult,
)
from headrace.groups.offsets import INVALID_COMMIT_OFFSET_SIZE, METADATA_BYTES_MAX
from headrace.http import documents
from headrace.http.description import (
    BROKER,
    COUNT,
    DONE,
    OFFSET,
    PARTITION,
    TEXT,
    Answer,
    Body,
    Operation,
    Parameter,
    closed,
    list_of,
    nullable,
)
from headrace.http.exchange import Exchange
from headrace.http.message import OFFSET_MAX, PARTITION_MAX, Response, json_response
from headrace.http.services import HttpServices
from headrace.http.topics import http_of, known_topic

COMMIT_FIELDS: Final = ("topic", "partition", "offset", "metadata")
COMMITS_MAX: Final = 10_000
"""Offsets in one request."""
LOAD_SECONDS: Final = 5.0
"""How long a commit waits for a coordinator that has just been made."""
LOOK_SECONDS: Final = 0.01

_PLACE: Final = {"topic": TEXT, "partition": PARTITION}
PLACE: Final = closed({**_PLACE, "offset": OFFSET}, title="Place")
_MEMBER: Final = closed({"member": TEXT, "instance": nullable(TEXT), "client": TEXT, "host": TEXT}, title="Member")
_COMMITTED: Final = closed(
    {**_PLACE, "offset": OFFSET, "metadata": TEXT, "lag": nullable(COUNT)}, title="CommittedOffset"
)
LIST: Final = Operation(
    "The groups that this broker coordinates",
    {
        200: Answer.json(
            "By name; elsewhere counts the partitions of the offsets topic that other brokers lead.",
            closed(
                {
                    "groups": list_of(closed({"group": TEXT, "state": TEXT, "type": TEXT, "protocol_type": TEXT})),
                    "elsewhere": COUNT,
                }
            ),
        )
    },
    errors=(503,),
)
DESCRIBE: Final = Operation(
    "One group: its state and its members",
    {
        200: Answer.json(
            "The group.",
            closed(
                {
                    "group": TEXT,
                    "state": TEXT,
                    "type": TEXT,
                    "protocol_type": TEXT,
                    "protocol": TEXT,
                    "coordinator": BROKER,
                    "members": list_of(_MEMBER),
                },
                title="Group",
            ),
        )
    },
    errors=(404, 503),
)
DELETE: Final = Operation(
    "Delete a group without members, with its offsets",
    {200: Answer.json("It is deleted.", closed({"group": TEXT, "deleted": DONE}))},
    errors=(404, 409, 503),
)
OFFSETS: Final = Operation(
    "What a group has committed, and how far that is behind",
    {200: Answer.json("By topic and partition.", closed({"group": TEXT, "offsets": list_of(_COMMITTED)}))},
    (Parameter("topic", "Only of this one.", TEXT),),
    errors=(404, 503),
)
COMMIT: Final = Operation(
    "Commit offsets for a group that has no live members",
    {200: Answer.json("They are committed.", closed({"group": TEXT, "offsets": list_of(PLACE)}))},
    body=Body.json(
        closed(
            {
                "offsets": list_of(
                    closed({**_PLACE, "offset": OFFSET}, {"metadata": nullable(TEXT)}, title="OffsetToCommit"),
                    minItems=1,
                    maxItems=COMMITS_MAX,
                )
            },
            title="Commit",
        )
    ),
    errors=(403, 404, 409, 415, 503, 504),
)
DELETE_OFFSETS: Final = Operation(
    "Forget what a group has committed to a topic",
    {200: Answer.json("What was forgotten.", closed({"group": TEXT, "deleted": list_of(closed(_PLACE))}))},
    (
        Parameter("topic", "Whose offsets.", TEXT, required=True),
        Parameter("partition", "Only this one.", PARTITION),
    ),
    errors=(404, 409, 503),
)


def list_groups(exchange: Exchange) -> Response:
    services = exchange.services
    reply = services.groups.list_groups()
    if reply.error_code:
        raise CoordinatorLoading("this broker has not read all of its groups yet; try again")
    offsets_topic = services.image().topics.get(OFFSETS_TOPIC)
    states = () if offsets_topic is None else offsets_topic.partitions
    groups = [
        {
            "group": one.group_id,
            "state": one.group_state,
            "type": one.group_type,
            "protocol_type": one.protocol_type,
        }
        for one in sorted(reply.groups, key=lambda one: one.group_id)
    ]
    elsewhere = sum(state.leader != services.broker_id for state in states)
    return json_response({"groups": groups, "elsewhere": elsewhere})


def describe_group(exchange: Exchange) -> Response:
    return json_response(_shown_group(exchange.services, _known(exchange)))


def _shown_group(services: HttpServices, group: DescribedGroup) -> dict[str, Any]:
    return {
        "group": group.group_id,
        "state": group.group_state,
        "type": group.group_type,
        "protocol_type": group.protocol_type,
        "protocol": group.protocol_data,
        "coordinator": services.broker_id,
        "members": [
            {
                "member": member.member_id,
                "instance": member.group_instance_id,
                "client": member.client_id,
                "host": member.client_host,
            }
            for member in group.members
        ],
    }


def _known(exchange: Exchange) -> DescribedGroup:
    """The group of the path, which is there and coordinated here."""
    group = _name(exchange)
    found = exchange.services.groups.describe(group)
    if found.error_code:
        raise fault(exchange.services, group, found.error_code)
    if found.group_state == State.DEAD.value:
        raise UnknownGroup(f"there is no group {group!r}; GET /groups lists those there are")
    return found


def _name(exchange: Exchange) -> str:
    return checked_name(exchange.request.parameters["group"])


def checked_name(group: str) -> str:
    wrong = group_name_fault(group)
    if wrong is not None:
        raise InvalidGroupName(wrong)
    return group


def delete_group(exchange: Exchange) -> None:
    group = _known(exchange).group_id

    def deleted(code: int) -> Response:
        if code:
            raise fault(exchange.services, group, code)
        return json_response({"group": group, "deleted": True})

    exchange.services.groups.delete(group, lambda code: exchange.run(lambda _: deleted(code)))


# Offsets.


def list_offsets(exchange: Exchange) -> Response:
    services, group, topic = exchange.services, _name(exchange), exchange.request.query.get("topic")
    if topic is not None:
        known_topic(services, topic)
    if OFFSETS_TOPIC not in services.image().topics:
        return json_response({"group": group, "offsets": []})
    reply = services.groups.fetch_offsets(group, None)
    if reply.error_code:
        raise fault(services, group, reply.error_code)
    wanted = [one for one in reply.offsets if topic in (None, one.topic)]
    wanted.sort(key=lambda one: (one.topic, one.partition_index))
    return json_response({"group": group, "offsets": [_shown_offset(services, one) for one in wanted]})


def _shown_offset(services: HttpServices, one: FetchedOffset) -> dict[str, Any]:
    """How far it is behind is known where a replica is."""
    partition = services.partitions.find_replica(one.topic, one.partition_index)
    return {
        "topic": one.topic,
        "partition": one.partition_index,
        "offset": one.committed_offset,
        "metadata": one.metadata,
        "lag": None if partition is None else max(0, partition.high_watermark - one.committed_offset),
    }


def committed_offset(services: HttpServices, group: str, topic: str, index: int) -> int | None:
    """Where the group goes on in this partition; None if it has committed nothing there."""
    checked_name(group)
    if OFFSETS_TOPIC not in services.image().topics:
        return None
    reply = services.groups.fetch_offsets(group, [(topic, index)])
    if reply.error_code:
        raise fault(services, group, reply.error_code)
    offset = reply.offsets[0].committed_offset
    return None if offset == NO_OFFSET else offset


def commit_offsets(exchange: Exchange) -> None:
    exchange.answer_later(_commit(exchange, _name(exchange), _to_commit(exchange)))


async def _commit(exchange: Exchange, group: str, offsets: tuple[OffsetToCommit, ...]) -> None:
    await _found_coordinator(exchange.services, group)

    def committed(results: tuple[PartitionResult, ...]) -> Response:
        for result in results:
            if result.error_code:
                raise fault(exchange.services, group, result.error_code)
        places = [
            {"topic": one.topic, "partition": one.partition_index, "offset": one.committed_offset} for one in offsets
        ]
        return json_response({"group": group, "offsets": places})

    exchange.services.groups.commit(
        group, CommitRequest(offsets), lambda results: exchange.run(lambda _: committed(results))
    )


async def _found_coordinator(services: HttpServices, group: str) -> None:
    """The first commit of all makes the topic for them, and its partitions have to be read before they are served."""
    if OFFSETS_TOPIC not in services.image().topics:
        await services.ensure_topic(OFFSETS_TOPIC)
    give_up = services.clock.now() + LOAD_SECONDS
    while services.clock.now() < give_up:
        code = services.groups.describe(group).error_code
        on_the_way = code == ErrorCode.NOT_COORDINATOR and coordinator(services, group) == services.broker_id
        if code != ErrorCode.COORDINATOR_LOAD_IN_PROGRESS and not on_the_way:
            return
        await pause(services.clock, LOOK_SECONDS)


def _to_commit(exchange: Exchange) -> tuple[OffsetToCommit, ...]:
    given = documents.required(documents.read_object(exchange.request, ("offsets",)), "offsets")
    if not isinstance(given, list) or not given:
        raise InvalidRequest('offsets is not a list such as [{"topic": "orders", "partition": 0, "offset": 5}]')
    if len(given) > COMMITS_MAX:
        raise InvalidRequest(f"one request takes {COMMITS_MAX} offsets; send more in further requests")
    offsets = tuple(_one_to_commit(exchange.services, f"offset {place}", item) for place, item in enumerate(given))
    if len({(one.topic, one.partition_index) for one in offsets}) != len(offsets):
        raise InvalidRequest("a partition is named twice in one request")
    return offsets


def _one_to_commit(services: HttpServices, what: str, item: Any) -> OffsetToCommit:
    fields = documents.checked_object(what, item, COMMIT_FIELDS)
    topic = known_topic(services, documents.text(f"{what}: topic", documents.required(fields, "topic", what)))
    index = documents.number(f"{what}: partition", documents.required(fields, "partition", what), 0, PARTITION_MAX)
    if index >= len(topic.partitions):
        raise UnknownPartition(f"topic {topic.name!r} has partitions 0 to {len(topic.partitions) - 1}, not {index}")
    metadata = documents.text(f"{what}: metadata", fields.get("metadata", ""))
    most = min(services.groups.limits.metadata_max_bytes, METADATA_BYTES_MAX)
    if len(metadata.encode()) > most:
        raise InvalidRequest(f"{what}: metadata may have {most} bytes (offsets.metadata.max.bytes)")
    offset = documents.number(f"{what}: offset", documents.required(fields, "offset", what), 0, OFFSET_MAX)
    return OffsetToCommit(topic.name, index, offset, committed_metadata=metadata, topic_id=topic.id)


def delete_offsets(exchange: Exchange) -> None:
    services, query = exchange.services, exchange.request.query
    if "topic" not in query:
        raise InvalidRequest("give the topic whose offsets the group shall forget: ?topic=")
    topic, index = query["topic"], exchange.request.integer("partition", -1, 0, PARTITION_MAX)
    group = _known(exchange).group_id
    reply = services.groups.fetch_offsets(group, None)
    wanted = [
        (one.topic, one.partition_index)
        for one in reply.offsets
        if one.topic == topic and index in (-1, one.partition_index)
    ]

    def deleted(reply: OffsetDeleteReply) -> Response:
        for code in (reply.error_code, *(result.error_code for result in reply.partitions)):
            if code:
                raise fault(services, group, code)
        places = [{"topic": one.topic, "partition": one.partition_index} for one in reply.partitions]
        return json_response({"group": group, "deleted": places})

    services.groups.delete_offsets(group, wanted, lambda reply: exchange.run(lambda _: deleted(reply)))


# Refusals.


def fault(services: HttpServices, group: str, code: int) -> HeadraceError:
    """What a code of the coordinator means to somebody who is no member."""
    if code == ErrorCode.NOT_COORDINATOR:
        return _elsewhere(services, group)
    if code in _OF_MEMBERS:
        members = len(services.groups.describe(group).members)
        return GroupHasMembers(
            f"group {group!r} has {members} live members, and only they commit for it: stop them, or use another group"
        )
    if code == ErrorCode.GROUP_ID_NOT_FOUND:
        return UnknownGroup(f"there is no group {group!r}")
    if code == ErrorCode.GROUP_MAX_SIZE_REACHED:
        return PolicyViolation(f"there are {services.groups.limits.groups_max} groups already (setting groups.max)")
    if code == INVALID_COMMIT_OFFSET_SIZE:
        return BatchTooLarge("these offsets are too many for one commit; send them in parts")
    return CoordinatorLoading(f"the coordinator of group {group!r} cannot answer now (code {code}); try again")


_OF_MEMBERS: Final = (
    ErrorCode.UNKNOWN_MEMBER_ID,
    ErrorCode.ILLEGAL_GENERATION,
    ErrorCode.REBALANCE_IN_PROGRESS,
    ErrorCode.NON_EMPTY_GROUP,
    ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC,
)


def _elsewhere(services: HttpServices, group: str) -> HeadraceError:
    leader = coordinator(services, group)
    if leader is None:
        return UnknownGroup(f"there is no group {group!r}; nobody has committed an offset yet")
    if leader in (NO_LEADER, services.broker_id):
        return NotCoordinator(f"group {group!r} has no coordinator now; try again")
    return NotCoordinator(f"group {group!r} is coordinated by broker {leader}; ask {http_of(services, leader)}")


def coordinator(services: HttpServices, group: str) -> int | None:
    """The broker that leads the group's partition of the offsets topic, if that is there."""
    topic = services.image().topics.get(OFFSETS_TOPIC)
    return None if topic is None else topic.partitions[partition_of(group, len(topic.partitions))].leader
