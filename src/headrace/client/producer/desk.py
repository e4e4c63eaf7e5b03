"""Where records are taken in: one desk, with its router and its tracks, for each acks, and for ordered records.

The router (`records.router`) puts a record into the open batch of its partition and comes here only when it cannot:
an unknown topic, a batch that is full, a queue that is full.
"""

from __future__ import annotations

import math
import random
import time
from functools import partial
from typing import TYPE_CHECKING, Final

from headrace.client.admin.cluster import UnknownTopic
from headrace.client.connection.topology import Topic
from headrace.client.producer.driver import Need
from headrace.client.producer.errors import QueueFull
from headrace.client.producer.identity import Identities
from headrace.client.producer.options import check_acks
from headrace.client.producer.spread import next_partition
from headrace.client.producer.track import Load, Track
from headrace.errors import HeadraceError, RequestTimedOut
from headrace.records.batch import HEADER_BYTES
from headrace.records.builder import Delivery, OpenBatch, SentBatch
from headrace.records.router import Lane, Lanes, Router

if TYPE_CHECKING:
    from headrace.client.producer.sender import Sender

FIND_WITHIN_S: Final = 60.0
ENLARGED_WITHIN_S: Final = 1.0


def not_heard_of(topic: str, within_s: float) -> RequestTimedOut:
    return RequestTimedOut(f"nothing was heard of topic {topic!r} within {within_s:g} s: are the brokers running?")


class NoRoom(Exception):
    """The queue is full, and this is no place to wait."""

    def __init__(self, needed_bytes: int) -> None:
        super().__init__()
        self.needed_bytes = needed_bytes


class _Inquiry:
    """What is heard of a topic; several may wait for it."""

    def __init__(self, sender: Sender) -> None:
        self.since = sender.reactor.now()
        self.heard: Topic | HeadraceError | None = None
        self._sender = sender

    def hear(self, heard: Topic | HeadraceError) -> None:
        self.heard = heard
        self._sender.driver.changed()


class Desk:
    """`may_wait` is False while its owner holds the lock: what would wait raises NoRoom then."""

    def __init__(self, sender: Sender, acks: int, ordered: bool) -> None:
        self.sender = sender
        self.options = sender.options
        self.acks = acks
        self.ordered = ordered
        self.numbered = self.options.numbered(acks)
        self.codec_id = self.options.codec_id
        self.batch_bytes = self.options.batch_bytes
        options = self.options
        self.router_here = Router(
            self, sender.reactor.lock, sender.quota, acks, options.max_record_bytes, options.encoder
        )
        self.may_wait = True
        self.identities = Identities(sender.network, options.request_timeout_ms / 1000, self._named)
        self._topic_ids: dict[str, bytes] = {}
        self._inquiries: dict[str, _Inquiry] = {}
        self._partition_wanted: dict[tuple[str, int], float] = {}

    def _named(self) -> None:
        """A producer id has come, or it is time to ask again."""
        for topic in self.router_here.topics:
            for track in self.tracks(topic):
                if track.lane.wants_identity and track.lane.waiting:
                    self.sender.make_ready(track)

    def tracks(self, topic: str) -> list[Track]:
        lanes = self.router_here.topics.get(topic)
        return [] if lanes is None else lanes.lanes

    def router(self, acks: int) -> Router:
        check_acks(acks)
        return self.sender.desk(acks, self.ordered).router_here

    def find(self, topic: str, partition: int) -> None:
        """Wait until the topic is known, and has the partition."""
        if self.sender.refusal is not None:
            raise self.sender.refusal.with_traceback(None)
        sender, routes = self.sender, self.sender.network.routes
        if topic not in self.router_here.topics:
            self._learn_of(topic)
        if partition < len(self.tracks(topic)):
            return
        with sender.reactor.lock:
            asked_at = self._partition_wanted.setdefault((topic, partition), sender.reactor.now())
            routes.stale(topic)
        there = sender.driver.until(
            Need.TOPIC, lambda: partition < len(self.tracks(topic)), asked_at + ENLARGED_WITHIN_S
        )
        self._partition_wanted.pop((topic, partition), None)
        if not there:
            raise UnknownTopic(topic, partition, len(self.tracks(topic)))

    def _learn_of(self, topic: str) -> None:
        sender = self.sender
        with sender.reactor.lock:
            inquiry = self._inquiries.get(topic)
            if inquiry is None:
                inquiry = self._inquiries[topic] = _Inquiry(sender)
                sender.network.routes.want(topic, create=True, on_known=inquiry.hear)
        within_s = min(FIND_WITHIN_S, self.options.delivery_timeout_ms / 1000)
        known = sender.driver.until(Need.TOPIC, lambda: inquiry.heard is not None, inquiry.since + within_s)
        with sender.reactor.lock:
            self._inquiries.pop(topic, None)
            if not known or inquiry.heard is None:
                raise not_heard_of(topic, within_s)
            if isinstance(inquiry.heard, HeadraceError):
                raise inquiry.heard
            self.learn(inquiry.heard)

    def learn(self, topic: Topic) -> None:
        """The topic as it is now: tracks for partitions that are new, none for those that are gone."""
        count = len(topic.partitions)
        lanes = self.router_here.topics.get(topic.name)
        if lanes is None:
            lanes = Lanes(topic.name, [Track(self, topic.name, index) for index in range(count)])
            self._topic_ids[topic.name] = topic.topic_id
            self.spread(lanes, random.randrange(count))
            self.router_here.topics[topic.name] = lanes
            return
        for index in range(len(lanes.lanes), count):
            lanes.lanes.append(Track(self, topic.name, index))
        if self._topic_ids[topic.name] != topic.topic_id:
            self._topic_ids[topic.name] = topic.topic_id
            for track in lanes.lanes:
                track.lane.doubt()
            del lanes.lanes[count:]
            self.spread(lanes, 0)

    def spread(self, lanes: Lanes, current: int) -> None:
        """Let records without a key go to the next good partition."""
        count = len(lanes.lanes)
        if count > 1:
            routes, avoided = self.sender.network.routes, self.sender.avoided()
            following = (current + 1) % count
            if avoided or routes.leader(lanes.topic, following) is None:
                following = next_partition(current, count, partial(routes.leader, lanes.topic), avoided)
            lanes.sticky = lanes.lanes[following]
        elif count:
            lanes.sticky = lanes.lanes[0]

    def move_on(self, track: Track) -> None:
        """A batch of the track leaves: records without a key go to another partition now."""
        lanes = self.router_here.topics.get(track.topic)
        if lanes is not None and lanes.sticky is track:
            self.spread(lanes, track.partition)

    def next_batch(self, lane: Lane, batch: OpenBatch | None) -> None:
        assert isinstance(lane, Track)
        sender = self.sender
        with sender.reactor.lock:
            if lane.batch is not batch or sender.refusal is not None:
                return
            if batch is None:
                sender.open(lane)
                return
            sender.seal(lane)
            sender.make_ready(lane)
        sender.driver.turn()

    def lone(self, lane: Track, needed_bytes: int) -> Load:
        try:
            return lane.spares.pop()
        except IndexError:
            return Load(lane, 0, 0.0, 0.0, self.batch_bytes, HEADER_BYTES + needed_bytes)

    def when_full(self, topic: str, needed_bytes: int) -> Delivery | None:
        """None when there is room again; otherwise the delivery of a record that was dropped."""
        sender, policy_ms = self.sender, self.options.when_full
        if sender.account.spare():
            return None
        if not self.may_wait:
            raise NoRoom(needed_bytes)
        if policy_ms != 0:
            with sender.reactor.lock:
                sender.hurry()
            deadline = math.inf if policy_ms < 0 else sender.reactor.now() + policy_ms / 1000
            with sender.account.waiting():
                if sender.driver.until(Need.ROOM, lambda: sender.account.has_room(needed_bytes), deadline):
                    return None
        return self.drop(topic)

    def drop(self, topic: str) -> Delivery:
        """The delivery of a record for which there is no room."""
        sender, policy_ms = self.sender, self.options.when_full
        quota = sender.quota
        sender.count.dropped += 1
        waited = f" for {policy_ms:g} ms" if policy_ms > 0 else ""
        sent = SentBatch(topic, -1, sender)
        sent.fail(
            QueueFull(
                f"a record for {topic} was dropped: {quota.records} records, {quota.bytes} bytes wait for their "
                f"acknowledgement{waited}; raise queue_bytes or queue_records, send slower, or set when_full=-1"
            )
        )
        return Delivery(sent, 0, time.time_ns() // 1_000_000)
