"""What the member that leads a group does: look at the topics, share out their partitions, notice when they change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Final

from headrace.client.connection.connections import Network
from headrace.client.connection.topology import Topology, read_topology
from headrace.client.consumer.assignors import ROOM_FIRST, Assign
from headrace.client.consumer.assignors.participants import Participant, Rooms
from headrace.client.consumer.group_protocol import by_topic, encode_assignment, read_subscription
from headrace.errors import HeadraceError, ProtocolError
from headrace.wire import api as apis
from headrace.wire.message import Message

LOOK_TIMEOUT_S: Final = 10.0
MISSING_LOOK_S: Final = 1.0

log = logging.getLogger(__name__)


def participants(members: Iterable[Message]) -> list[Participant]:
    """The members of a JoinGroup answer; one that cannot be understood takes part and gets nothing."""
    found = []
    for member in members:
        try:
            said = read_subscription(member.metadata)
        except ProtocolError as error:
            log.warning("%s; member %s gets no partitions", error, member.member_id)
            found.append(Participant(member.member_id, frozenset()))
            continue
        found.append(
            Participant(
                member.member_id,
                frozenset(said.topics),
                said.owned,
                said.generation,
                said.rack,
                member.group_instance_id,
            )
        )
    return found


def assignments(assign: Assign, members: list[Participant], rooms: Rooms) -> list[Message]:
    """For a SyncGroup request."""
    return [
        Message(member_id=member_id, assignment=encode_assignment(by_topic(places)))
        for member_id, places in assign(members, rooms).items()
    ]


def look(
    network: Network, topics: Iterable[str], on_seen: Callable[[dict[str, list[str]] | HeadraceError], None]
) -> None:
    """The topics that there are, with the rack of each partition's leader."""
    request = Message(topics=[Message(name=name) for name in sorted(topics)], allow_auto_topic_creation=False)

    def seen(answer: Message | HeadraceError) -> None:
        on_seen(answer if isinstance(answer, HeadraceError) else rooms_of(read_topology(answer)))

    network.ask_any(apis.METADATA, request, seen, timeout_s=LOOK_TIMEOUT_S)


def rooms_of(topology: Topology) -> dict[str, list[str]]:
    racks = {broker.broker_id: broker.rack for broker in topology.brokers.values()}
    return {
        name: [racks.get(partition.leader_id, "") for partition in topic.partitions]
        for name, topic in topology.topics.items()
    }


def has_grown(protocol: str, before: Rooms, now: Rooms) -> bool:
    """Whether the group should share out anew: topics or partitions have come or gone, or for those who go by rooms,
    leaders are in other rooms. A leader that is just not there moves nothing.
    """
    if protocol == ROOM_FIRST and all(all(rooms) for rooms in now.values()):
        return before != now
    return {topic: len(rooms) for topic, rooms in before.items()} != {topic: len(rooms) for topic, rooms in now.items()}


def look_again_s(topics: frozenset[str], rooms: Rooms, interval_s: float) -> float:
    """How soon: topics that are not there yet are looked for more often."""
    return interval_s if topics <= rooms.keys() else min(MISSING_LOOK_S, interval_s)
