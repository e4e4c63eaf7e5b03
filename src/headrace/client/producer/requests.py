"""Produce requests: which batches go into one, and what its answer says of each.

A request is for one broker and one acks. It holds one batch of a partition, as brokers demand, and takes batches of
others up to REQUEST_BYTES. Batches are never joined with the rest: they leave as parts of one vectored write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from headrace.client.admin.produce import Outgoing, encode_parts
from headrace.client.connection.metadata import Routes
from headrace.client.producer.form import Acknowledged, Form
from headrace.client.producer.lane import Parcel
from headrace.client.producer.options import REQUEST_BYTES
from headrace.client.producer.track import Load, Track
from headrace.ports.disk import Buffer
from headrace.wire.message import Message


class Sending(NamedTuple):
    """One attempt at a batch."""

    track: Track
    parcel: Parcel
    attempt: int
    data: Buffer


@dataclass(slots=True)
class Request:
    sendings: list[Sending] = field(default_factory=list)
    size_bytes: int = 0
    names: dict[bytes, str] = field(default_factory=dict)
    """Topics by id, for answers that give only that."""
    form: Form | None = None
    """Of a lone batch."""

    def takes(self, size_bytes: int) -> bool:
        return not self.sendings or self.size_bytes + size_bytes <= REQUEST_BYTES

    def add(self, sending: Sending) -> None:
        self.sendings.append(sending)
        self.size_bytes += len(sending.data)

    def body(self, routes: Routes, acks: int, timeout_ms: int) -> Callable[[int], Sequence[Buffer]]:
        """Makes the parts for the version that is agreed when the request leaves."""
        ids = {}
        for each in self.sendings:
            topic = routes.topic(each.track.topic)
            if topic is not None:
                ids[topic.name] = topic.topic_id
                self.names[topic.topic_id] = topic.name
        if len(self.sendings) == 1:
            return partial(self._lone_parts, ids, timeout_ms)
        outgoing = [Outgoing(each.track.topic, each.track.partition, each.data) for each in self.sendings]
        return partial(encode_parts, outgoing=outgoing, topic_ids=ids, acks=acks, timeout_ms=timeout_ms)

    def _lone_parts(self, ids: dict[str, bytes], timeout_ms: int, version: int) -> Sequence[Buffer]:
        track, data = self.sendings[0].track, self.sendings[0].data
        self.form = form = form_of(track, version, ids.get(track.topic), timeout_ms)
        return form.parts(data)

    def read(self, frame: bytes, correlation_id: int) -> Acknowledged | None:
        """What the answer says, if it can be told without decoding it."""
        return None if self.form is None else self.form.read(frame, correlation_id)

    def rows(self, answer: Message) -> dict[tuple[str, int], Message]:
        """The answer by topic and partition."""
        return {
            (topic.name or self.names.get(topic.topic_id, ""), partition.index): partition
            for topic in answer.responses
            for partition in topic.partition_responses
        }


def form_of(track: Track, version: int, topic_id: bytes | None, timeout_ms: int) -> Form:
    """The track keeps the last one."""
    if track.form is None or track.form.key != (version, topic_id):
        track.form = Form(version, track.topic, topic_id, track.partition, track.desk.acks, timeout_ms)
    return track.form


def load_of(parcel: Parcel) -> Load:
    assert isinstance(parcel.content, Load)
    return parcel.content


def put(requests: list[Request], after: int, track: Track, parcel: Parcel) -> int:
    """Put a batch into the first request from place `after` on that has room; gives the place after it."""
    sending = Sending(track, parcel, parcel.attempt, load_of(parcel).sign(parcel))
    while True:
        if after == len(requests):
            requests.append(Request())
        if requests[after].takes(len(sending.data)):
            requests[after].add(sending)
            return after + 1
        after += 1
