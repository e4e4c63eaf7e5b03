"""A partition as records come to it and as batches leave it, and each batch from its first record to its fate."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from headrace.client.producer.form import Form
from headrace.client.producer.lane import Lane, Parcel
from headrace.records import batch as batches
from headrace.records import router
from headrace.records.builder import Delivery, OpenBatch, SentBatch

if TYPE_CHECKING:
    from headrace.client.producer.desk import Desk
    from headrace.client.producer.direct import Way

FIRST_BYTES: Final = 4096
_IDENTITY_AT: Final = 43
_IDENTITY: Final = struct.Struct(">qhi")


class Load:
    """One batch. It is open, then a parcel in its track's lane, then settled.

    One that is split is settled when all its parts are; they have its number and its deadline.
    """

    __slots__ = (
        "_stamp",
        "ahead",
        "batch",
        "counted",
        "data",
        "deadline",
        "due_at",
        "lent",
        "number",
        "orders",
        "parcel",
        "root",
        "settled",
        "track",
    )

    def __init__(
        self, track: Track, number: int, due_at: float, deadline: float, room_bytes: int, first_bytes: int = FIRST_BYTES
    ) -> None:
        sent = Sent(track.topic, track.partition, track.desk.sender)
        sent.load = self
        self.batch: OpenBatch = OpenBatch(sent, track.desk.codec_id, room_bytes, first_bytes)
        self.counted = self.batch
        """The batch whose records count in the queue until this load is settled."""
        self.track = track
        self.number = number
        self.due_at = due_at
        self.deadline = deadline
        self.parcel: Parcel | None = None
        self.settled = False
        self.root: Load | None = None
        """The batch that this one is a part of, directly or not."""
        self.ahead = 1
        """Of a root: parts that are not settled."""
        self.lent = False
        """An attempt was given up while a connection may still be writing these bytes."""
        self.orders: list[tuple[bytes, Delivery]] = []
        self.data = bytearray()
        self._stamp: tuple[int, int, int] | None = None

    def rebuild(self, batch: OpenBatch, orders: list[tuple[bytes, Delivery]]) -> None:
        """Another batch in the place of this one, of which nothing has left."""
        assert self.parcel is not None
        assert not self.parcel.stamped
        self.batch, self.orders, self.data, self._stamp = batch, orders, bytearray(), None
        self.parcel.count = batch.count

    def let_go(self) -> None:
        """It is settled: who keeps a delivery keeps none of the bytes."""
        assert isinstance(self.batch.sent, Sent)
        self.batch.sent.load = None
        self.data = bytearray()

    def sign(self, parcel: Parcel) -> bytearray:
        """The batch under the parcel's identity and sequence."""
        assert not self.settled
        stamp = (parcel.producer_id, parcel.epoch, parcel.sequence)
        if stamp == self._stamp:
            return self.data
        self._stamp = stamp
        if not self.data:
            self.data = self.batch.seal(*stamp)
            return self.data
        if self.lent:
            self.data = bytearray(self.data)
            self.lent = False
        _IDENTITY.pack_into(self.data, _IDENTITY_AT, *stamp)
        batches.sign(self.data)
        return self.data


class Sent(SentBatch):
    """What became of a batch, and the way back to it until that is known."""

    load: Load | None


class Track(router.Lane):
    def __init__(self, desk: Desk, topic: str, partition: int) -> None:
        super().__init__(topic, partition)
        self.desk = desk
        self.load: Load | None = None
        self.due = False
        """The open batch is to leave as soon as the lane lets it."""
        self.wakes_at = 0.0
        self.form: Form | None = None
        self.way: Way | None = None
        self.spares: list[Load] = []
        """Loads of one record that were never in the lane, to be used again."""
        self.moved_at: float | None = None
        """Since when batches are in flight to a broker that is not the leader any more."""
        self.room_bytes = desk.batch_bytes
        self.narrow_until = 0.0
        """Until then batches are kept to `room_bytes`, because larger ones were refused."""
        options = desk.options
        self.lane = Lane(topic, partition, desk.acks, desk.numbered, 1 if desk.ordered else options.in_flight)

    def room(self, now: float) -> int:
        """How large a batch may become."""
        if self.narrow_until and self.narrow_until <= now:
            self.room_bytes, self.narrow_until = self.desk.batch_bytes, 0.0
        return self.room_bytes

    @property
    def label(self) -> str:
        return f"{self.topic}-{self.partition}"
