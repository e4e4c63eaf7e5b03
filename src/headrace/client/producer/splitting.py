"""A batch that its topic refuses for its size goes on in parts, in its place, down to single records.

Each part holds about half of the bytes, or what its partition is known to take. Batches opened for that partition in
the next minute are kept as small, so that a topic whose max.message.bytes was lowered does not refuse each of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace.client.producer.lane import Parcel
from headrace.client.producer.requests import Sending, load_of
from headrace.client.producer.track import Load
from headrace.records import kernel
from headrace.records.batch import HEADER_BYTES

if TYPE_CHECKING:
    from headrace.client.producer.sender import Sender

NARROW_FOR_S: Final = 60.0
UNPACKED_BYTES: Final = 1 << 31
"""Of a batch that was packed here: no bound but the format's."""


def split(sender: Sender, refused: Sending, now: float) -> bool:
    """Put parts in the place of a batch that was refused for its size; False if there is nothing to divide."""
    track, parcel = refused.track, refused.parcel
    if not track.lane.splits(parcel, refused.attempt):
        return False
    whole = load_of(parcel)
    half = (HEADER_BYTES + whole.batch.record_bytes) // 2
    track.room_bytes, track.narrow_until = min(half, track.room(now)), now + NARROW_FOR_S
    parts = _divide(whole, bytes(refused.data), track.room_bytes)
    for part in parts:
        sender.quota.take(part.batch)
        part.parcel = Parcel(part.batch.count, part.deadline, part)
    sender.quota.give_back(whole.counted)
    _hand_over(whole, parts)
    track.lane.split(parcel, [part.parcel for part in parts if part.parcel is not None])
    sender.count.splits += 1
    return True


def _divide(whole: Load, data: bytes, room_bytes: int) -> list[Load]:
    parts: list[Load] = []
    for _, timestamp_ms, key, value, headers in kernel.records(data, UNPACKED_BYTES):
        if not parts or parts[-1].batch.append(timestamp_ms, key, value, headers) < 0:
            parts.append(Load(whole.track, whole.number, whole.due_at, whole.deadline, room_bytes))
            parts[-1].batch.append(timestamp_ms, key, value, headers)
    return parts


def _hand_over(whole: Load, parts: list[Load]) -> None:
    """Who waits for a record of the batch waits for the part that it is in."""
    root = whole.root or whole
    root.ahead += len(parts) - 1
    firsts = []
    first = 0
    for part in parts:
        part.root = root
        part.batch.pinned = whole.batch.pinned
        firsts.append((first, part.batch.sent))
        first += part.batch.count
    sent = whole.batch.sent
    sent.split(firsts)
    orders, whole.orders = whole.orders, []
    at = {part.batch.sent: part for part in parts}
    for order_key, delivery in orders:
        now_in, place = sent.part(delivery.place)
        delivery.move(now_in, place)
        at[now_in].orders.append((order_key, delivery))
    whole.settled = whole is not root
    whole.let_go()
