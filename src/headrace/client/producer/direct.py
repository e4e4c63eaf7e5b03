"""The way of a record that is waited for, where nothing else is going on: written, and its answer read, by its sender.

The caller has the lock when it writes the request, gives it up while it sleeps, and has it again when it reads the
answer. If nobody else took it meanwhile, and the answer says that the record is written, then nobody can know that the
batch was ever in flight: the lane counts it, and that is all. No parcel is made, no timer, nobody else is woken.

In every other case the batch becomes one like any other, in the state that it is in:

    something is in the way before it is written       ->  it waits in its lane
    anybody else takes the lock before the answer      ->  who does so first makes it a parcel in flight (`_show`)
    a signal, DOZE_S without an answer, another answer ->  the same, by the caller itself

So the rules for order, repeats and fates are the lane's alone, and an interrupt leaves the batch to it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from headrace.client.connection.broker_connection import Link
from headrace.client.connection.frames import Written
from headrace.client.connection.metadata import Image
from headrace.client.connection.thread_reactor import ThreadReactor
from headrace.client.errors import BrokerUnreachable
from headrace.client.producer.form import Acknowledged, Form
from headrace.client.producer.requests import Request, Sending, form_of
from headrace.client.producer.sender import Sender
from headrace.client.producer.track import Load, Track
from headrace.ports.disk import Buffer
from headrace.records.builder import Delivery, Report
from headrace.wire import api as apis

COPIED_BYTES: Final = 64 << 10
"""Larger batches are not joined with the rest of their request."""

SPARE_BYTES: Final = 4096


class Way(NamedTuple):
    """How a track's batches get to its leader, as long as routes and connection are the same."""

    image: Image
    leader: int
    link: Link
    opened_count: int
    form: Form
    frame: Callable[[int, Buffer], bytes]


class Direct:
    def __init__(self, sender: Sender, reactor: ThreadReactor) -> None:
        self._sender = sender
        self._reactor = reactor
        self._network = sender.network
        self._routes = sender.network.routes
        self._timeout_ms = int(sender.options.request_timeout_ms)

    def deliver(self, load: Load) -> Report:
        """Send what `Router.send_lone` gave, and wait for it."""
        batch, reactor = load.batch, self._reactor
        reactor.check_outside()
        reactor.lock.__enter__()
        try:
            if self._sender.refusal is not None:
                raise self._sender.refusal.with_traceback(None)
            if not self._left(load):
                reactor.running = False
                if load.track.load is not None:
                    self._sender.seal(load.track)
                self._enter(load)
                self._sender.make_ready(load.track)
        finally:
            reactor.running = False
            reactor.leave()
        report = Delivery(batch.sent, 0, batch.first_ms).result()
        if load.parcel is None and batch.size <= SPARE_BYTES and not load.track.spares:
            batch.reuse()
            load.track.spares.append(load)
        return report

    def _left(self, load: Load) -> bool:
        """Whether the batch has left, and is in flight or done; if not, nothing was changed."""
        reactor, track, sent = self._reactor, load.track, load.batch.sent
        way = track.way
        if way is None or way.image is not self._routes.image or way.opened_count != way.link.opened_count:
            way = track.way = self._way(track)
        if way is None or track.batch is not None or not reactor.is_quiet or self._network.failing():
            return False
        # From here on nothing may be given the same stamp, not even by code that interrupts this.
        reactor.running = True
        stamp = track.lane.stamp_alone(way.leader)
        if stamp is None:
            return False
        try:
            data = load.batch.seal(*stamp)
        except Exception:  # noqa: BLE001 - met again, and told, where batches are packed
            return False
        if len(data) > COPIED_BYTES:
            return False
        asked_at = reactor.now()
        link, form = way.link, way.form
        written = link.send_alone(form.version, way.frame, data)
        if written is None:
            return False
        # While the broker is at work.
        track.desk.move_on(track)
        show = partial(self._show, load, way, written, asked_at)
        if not written.whole:
            show()
        elif reactor.doze(written.fd, lambda: sent.done, show):
            answer = link.read_alone(written, form.read)
            if answer is not None:
                self._count(load, way, answer, asked_at)
            else:
                show()
                link.catch_up()
        return True

    def _way(self, track: Track) -> Way | None:
        routes = self._routes
        leader, topic = routes.leader(track.topic, track.partition), routes.topic(track.topic)
        if leader is None or topic is None:
            return None
        try:
            link = self._network.broker(leader)
        except BrokerUnreachable:
            return None
        if not link.is_open:
            return None
        form = form_of(track, link.version(apis.PRODUCE), topic.topic_id, self._timeout_ms)
        frame = partial(form.frame, link.framer.head_end(apis.PRODUCE, form.version))
        return Way(routes.image, leader, link, link.opened_count, form, frame)

    def _enter(self, load: Load) -> None:
        """Put the batch into its lane."""
        sender, track = self._sender, load.track
        sender.quota.take(load.batch)
        sender.open(track, load)
        sender.seal(track)

    def _show(self, load: Load, way: Way, written: Written, asked_at: float) -> None:
        """Make the batch one that is in flight, for everyone to see."""
        track = load.track
        # One that was opened meanwhile, by code that interrupts this, comes after it.
        opened, batch, due = track.load, track.batch, track.due
        self._enter(load)
        track.load, track.batch, track.due = opened, batch, due
        parcel = track.lane.next(asked_at, way.leader)
        assert parcel is not None
        assert parcel is load.parcel
        request = Request()
        request.add(Sending(track, parcel, parcel.attempt, load.sign(parcel)))
        self._sender.ask(way.leader, track.desk.acks, request, written)

    def _count(self, load: Load, way: Way, answer: Acknowledged, asked_at: float) -> None:
        sender, count, now = self._sender, self._sender.count, self._reactor.now()
        load.track.lane.went_alone(1, now)
        load.batch.sent.finish(answer.base_offset, answer.append_ms)
        count.requests += 1
        count.direct += 1
        count.batches += 1
        count.delivered += 1
        count.bytes += load.batch.record_bytes
        if sender.options.avoid_slow:
            sender.faults.took(way.leader, (now - asked_at) * 1000, now)
