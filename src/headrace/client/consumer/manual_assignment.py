"""Reading whole topics, or chosen partitions, without sharing them: no group, or a group in broadcast mode.

Has the face of a `Membership`: everything is assigned once it is known, partitions that a topic gains later as they
appear, and those that it loses (when it is made anew with fewer) are given up. A pattern adds topics, and drops them
(`subscribe`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from headrace.client.connection.connections import ConnectionPool
from headrace.client.connection.metadata import Topic
from headrace.client.consumer.group_protocol import TopicPartition
from headrace.client.consumer.progress import Offsets, Progress, Saved
from headrace.client.errors import UnknownTopic
from headrace.errors import HeadraceError, SettingError

LOOK_AGAIN_S: Final = 1.0
"""For a topic that is not there."""
NO_PROGRESS: Final = "progress is kept under the name of a group: Consumer(topic, group='...')"


class ManualAssignment:
    def __init__(
        self,
        pool: ConnectionPool,
        topics: Iterable[str],
        chosen: Iterable[TopicPartition],
        progress: Progress | None,
        *,
        on_assigned: Callable[[list[TopicPartition], Offsets], None],
        on_revoked: Callable[[list[TopicPartition]], Mapping[TopicPartition, int]],
        on_missing: Callable[[HeadraceError], None],
    ) -> None:
        self._pool = pool
        self._looks_for_more = self._started = False
        self._dropped: set[str] = set()
        """Topics that were gone: what comes by such a name is another topic, and progress of the old one is not its."""
        self._chosen = set(chosen)
        self._topics = dict.fromkeys((*topics, *(topic for topic, _ in self._chosen)))
        self._progress = progress
        self._on_assigned = on_assigned
        self._on_revoked = on_revoked
        self._on_missing = on_missing
        self._held: dict[str, set[int]] = {}
        self._left = False

    def start(self) -> None:
        self._started = True
        self._pool.metadata.listeners.append(self._on_metadata)
        for topic in self._topics:
            self._look_up(topic)

    def subscribe(self, topics: Iterable[str]) -> None:
        """Read these topics from now on: those that are new as soon as they are known, others no longer."""
        self._looks_for_more = True
        wanted = dict.fromkeys(topics)
        before, self._topics = self._topics, wanted
        for topic in before.keys() - wanted.keys():
            self._drop(topic)
        for topic in sorted(wanted.keys() - before.keys()) if self._started else ():
            self._look_up(topic)

    def _drop(self, topic: str) -> None:
        self._dropped.add(topic)
        gone = [(topic, partition) for partition in sorted(self._held.pop(topic, ()))]
        if gone:
            self._on_revoked(gone)

    rebalance_waits: Final = False
    going: Final[frozenset[TopicPartition]] = frozenset()

    def on_poll(self) -> None:
        """A call of the consumer; nobody waits for one here."""

    def on_poll_end(self) -> None:
        """As `on_poll`."""

    def tell(self) -> None:
        """Nothing goes from here that the application can be asked about."""

    def let_go(self, going: frozenset[TopicPartition]) -> None:
        """As `tell`."""

    def commit(self, offsets: Mapping[TopicPartition, int], on_done: Saved) -> None:
        if self._progress is None:
            on_done(SettingError(NO_PROGRESS))
        else:
            self._progress.save(offsets, on_done)

    def leave(self, on_done: Saved) -> None:
        """Save the progress of everything."""
        self._left = True
        if self._started:
            self._pool.metadata.listeners.remove(self._on_metadata)
        self._give_up([(topic, partition) for topic, held in self._held.items() for partition in held], on_done)

    def _give_up(self, places: list[TopicPartition], on_done: Saved) -> None:
        offsets = self._on_revoked(places)
        if self._progress is None or not offsets:
            on_done(None)
        else:
            self._progress.save(offsets, on_done)

    def _look_up(self, topic: str) -> None:
        if not self._left and topic in self._topics:
            self._pool.metadata.want(topic, create=False, on_known=lambda found: self._on_known(topic, found))

    def _on_known(self, topic: str, found: Topic | HeadraceError) -> None:
        if self._left or topic not in self._topics:
            return
        if not isinstance(found, HeadraceError):
            self._hold(found)
            return
        if self._looks_for_more and isinstance(found, UnknownTopic):
            # It was there a moment ago. If it comes back, it is found again.
            del self._topics[topic]
            return
        reactor = self._pool.reactor
        reactor.call_at(reactor.now() + LOOK_AGAIN_S, lambda: self._look_up(topic))
        if not found.mapping.retriable:
            self._on_missing(found)

    def _on_metadata(self, *_: object) -> None:
        for name in self._held:
            topic = self._pool.metadata.topic(name)
            if topic is not None:
                self._hold(topic)

    def _hold(self, topic: Topic) -> None:
        count = len(topic.partitions)
        wanted = {partition for name, partition in self._chosen if name == topic.name} or set(range(count))
        first = topic.name not in self._held
        held = self._held.setdefault(topic.name, set())
        missing = [partition for partition in sorted(wanted) if partition >= count]
        if missing and first:
            self._on_missing(UnknownTopic(topic.name, missing[0], count))
        gone = [(topic.name, partition) for partition in sorted(held) if partition >= count]
        added = [(topic.name, partition) for partition in sorted(wanted - held) if partition < count]
        held -= {partition for _, partition in gone}
        held |= {partition for _, partition in added}
        if gone:
            self._give_up(gone, lambda _: None)
        if added and self._progress is not None and topic.name not in self._dropped:
            self._progress.load(added, lambda found: self._on_loaded(added, found))
        elif added:
            self._on_assigned(added, {})

    def _on_loaded(self, places: list[TopicPartition], found: Offsets | HeadraceError) -> None:
        if isinstance(found, HeadraceError):
            self._on_missing(found)
        elif not self._left:
            # A topic may have gone while its progress was loaded.
            kept = [place for place in places if place[1] in self._held.get(place[0], ())]
            self._on_assigned(kept, found)
