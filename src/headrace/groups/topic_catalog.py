"""The topics of the cluster as groups see them: ids, partitions, racks, and what regular expressions stand for. Pure.

It follows the image: a change of a topic that makes no difference to an assignment, as of an in-sync set, is none here.
A regular expression is run over all names once, and then over each name that comes, however many members have it. The
rack of a broker that is away is the one that it had: a restart moves no partition.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Final

from headrace.cluster.image import Image, Topic
from headrace.groups.assignors import AssignedTopic
from headrace.groups.topic_patterns import TopicPattern

PATTERNS_MAX: Final = 1000
"""Whose topics are kept; beyond them all are looked for anew."""


class TopicCatalog:
    def __init__(self) -> None:
        self._known: dict[str, AssignedTopic] = {}
        self.topics: Mapping[str, AssignedTopic] = self._known
        self.names: dict[bytes, str] = {}
        self.version = 0
        """Of the image that was followed last."""
        self._hidden: set[str] = set()
        """Internal topics: an expression does not stand for them."""
        self._racks: dict[int, str] = {}
        self._patterns: dict[str, tuple[TopicPattern, set[str]]] = {}

    def follow(self, old: Image, new: Image) -> frozenset[str]:
        """Take the changes from one image to the next; the names of the topics that changed."""
        self.version = new.version
        suspects: Iterable[str] = ()
        if old.topics is not new.topics:
            suspects = [name for name in old.topics.keys() | new.topics.keys() if _differ(old, new, name)]
        if old.brokers is not new.brokers and self._note_racks(new):
            suspects = old.topics.keys() | new.topics.keys()
        return frozenset([name for name in suspects if self._take(name, new.topics.get(name))])

    def _note_racks(self, image: Image) -> bool:
        racks = {number: broker.rack for number, broker in image.brokers.items()}
        changed = any(self._racks.get(number, "") != rack for number, rack in racks.items())
        self._racks.update(racks)
        return changed

    def _take(self, name: str, topic: Topic | None) -> bool:
        before = self._known.get(name)
        if topic is None:
            self._forget(name)
            return before is not None
        racks = tuple(
            frozenset([rack for number in state.replicas if (rack := self._racks.get(number))])
            for state in topic.partitions
        )
        found = AssignedTopic(topic.id, len(topic.partitions), racks if any(racks) else ())
        if found == before:
            return False
        if before is not None and before.topic_id != found.topic_id:
            self.names.pop(before.topic_id, None)
        self._known[name] = found
        self.names[found.topic_id] = name
        if topic.internal:
            self._hidden.add(name)
        elif before is None:
            for pattern, names in self._patterns.values():
                if pattern.matches(name):
                    names.add(name)
        return True

    def _forget(self, name: str) -> None:
        gone = self._known.pop(name, None)
        self._hidden.discard(name)
        if gone is not None:
            self.names.pop(gone.topic_id, None)
            for _, names in self._patterns.values():
                names.discard(name)

    def matching(self, text: str) -> frozenset[str]:
        """Names of the topics that a regular expression stands for now. InvalidPattern if it is none, or one that would
        hold up the loop."""
        found = self._patterns.get(text)
        if found is None:
            pattern = TopicPattern(text)
            if len(self._patterns) >= PATTERNS_MAX:
                self._patterns.clear()
            names = {name for name in self._known if name not in self._hidden and pattern.matches_in_time(name)}
            found = self._patterns[text] = pattern, names
        return frozenset(found[1])

    def digest(self, names: Iterable[str]) -> int:
        """A number that changes when an assignment of these topics may have to; 0 when there is none of them."""
        digest, count = blake2b(digest_size=8), 0
        for name in sorted(names):
            topic = self.topics.get(name)
            if topic is not None:
                count += 1
                digest.update(name.encode() + topic.topic_id + struct.pack(">i", topic.partitions))
                for racks in topic.racks:
                    digest.update(b"\0".join(rack.encode() for rack in sorted(racks)) + b"\1")
        return int.from_bytes(digest.digest(), "big", signed=True) if count else 0


def _differ(old: Image, new: Image, name: str) -> bool:
    return old.topics.get(name) is not new.topics.get(name)
