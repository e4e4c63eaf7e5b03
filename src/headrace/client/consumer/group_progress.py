"""Progress kept with the group's coordinator: OffsetFetch and OffsetCommit as a member of a generation.

A commit of a generation that is over is refused, so a member that was thought dead cannot undo what its successor has
saved. What was answered is as durable as the group's own log. Several may be under way, and each is tried again by
itself: a later try carries what was asked to be saved last, so that none undoes another, in whatever order they arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from headrace.client.consumer.coordinator import Coordinator
from headrace.client.consumer.group_protocol import Place, by_topic
from headrace.client.consumer.group_requests import Identity
from headrace.client.consumer.progress import Loaded, Offsets, Saved
from headrace.errors import Code, HeadraceError
from headrace.wire import api as apis
from headrace.wire.message import Message

WITHIN_S: Final = 30.0


class NotHeld(HeadraceError):
    """Progress of partitions that the group has not given to this member, or not any more."""

    def __init__(self, places: Iterable[Place]) -> None:
        names = ", ".join(f"{topic}-{partition}" for topic, partition in sorted(places))
        super().__init__(
            f"progress of {names} was not saved: the group has not given it to this member, or to another since; "
            "whoever has it goes on from what was last saved"
        )


class GroupProgress:
    def __init__(self, coordinator: Coordinator, identity: Callable[[], Identity]) -> None:
        self._coordinator = coordinator
        self._identity = identity
        self._newest: dict[Place, tuple[Identity, int]] = {}
        """What was asked to be saved last of each partition, and as whom."""

    def load(self, places: Iterable[Place], on_loaded: Loaded) -> None:
        group = self._coordinator.group
        topics = [Message(name=topic, partition_indexes=list(numbers)) for topic, numbers in by_topic(places).items()]
        if not topics:
            on_loaded({})
            return
        request = Message(groups=[Message(group_id=group, topics=topics)], require_stable=True)

        def loaded(answer: Message | HeadraceError) -> None:
            on_loaded(answer if isinstance(answer, HeadraceError) else _offsets(answer))

        self._coordinator.persist(apis.OFFSET_FETCH, lambda: request, _fetch_code, loaded, within_s=WITHIN_S)

    def save(self, offsets: Mapping[Place, int], on_done: Saved, *, within_s: float = WITHIN_S) -> None:
        if not offsets:
            on_done(None)
            return
        # Signed once: a later try of a generation that is over must not pass for one of the next.
        who = self._identity()
        self._newest.update({place: (who, offset) for place, offset in offsets.items()})

        def request() -> Message:
            newest = {place: self._newest[place] for place in offsets}
            return self._commit(
                who, {place: offset if by == who else offsets[place] for place, (by, offset) in newest.items()}
            )

        def done(answer: Message | HeadraceError) -> None:
            on_done(answer if isinstance(answer, HeadraceError) else None)

        self._coordinator.persist(apis.OFFSET_COMMIT, request, _commit_code, done, within_s=within_s)

    def _commit(self, who: Identity, offsets: Mapping[Place, int]) -> Message:
        topics = [
            Message(
                name=topic,
                partitions=[
                    Message(partition_index=number, committed_offset=offsets[topic, number], committed_metadata="")
                    for number in numbers
                ],
            )
            for topic, numbers in by_topic(offsets).items()
        ]
        return Message(
            group_id=self._coordinator.group,
            generation_id_or_member_epoch=who.generation,
            member_id=who.member_id,
            group_instance_id=who.instance_id,
            topics=topics,
        )


def _fetch_code(answer: Message) -> int:
    (group,) = answer.groups
    codes = [group.error_code, *(part.error_code for topic in group.topics for part in topic.partitions)]
    return next((int(code) for code in codes if code), Code.NONE)


def _commit_code(answer: Message) -> int:
    codes = (part.error_code for topic in answer.topics for part in topic.partitions)
    return next((int(code) for code in codes if code), Code.NONE)


def _offsets(answer: Message) -> Offsets:
    (group,) = answer.groups
    return {
        (topic.name, part.partition_index): part.committed_offset
        for topic in group.topics
        for part in topic.partitions
        if part.committed_offset >= 0
    }
