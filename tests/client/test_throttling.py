"""Brokers that throttle: a tap between the client and a real broker writes what brokers with quotas do."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from brokers import wait_for
from client.wire_tap import Seen, WireTap
from headrace import Consumer, Producer
from headrace.client.errors import BrokerUnreachable
from headrace.wire import api as apis
from headrace.wire.message import Message
from proving import proves

THROTTLE_MS = 300


def throttling(api_key: int, only: int, throttle_ms: int = THROTTLE_MS) -> Callable[[Seen, Message], None]:
    """Throttle by the first answers of an API, as a broker does whose quota is used up."""
    told: list[Seen] = []

    def change(seen: Seen, answer: Message) -> None:
        if seen.api_key == api_key and len(told) < only:
            told.append(seen)
            answer.throttle_time_ms = throttle_ms

    return change


def pauses_ms(tap: WireTap, api_key: int) -> list[float]:
    """From each answer that throttles to the next request on its connection."""
    found = []
    for place, seen in enumerate(tap.seen):
        if seen.api_key == api_key and seen.answer is not None and seen.answer.throttle_time_ms > 0:
            later = [
                each.came_at
                for each in tap.seen[place + 1 :]
                if each.connection == seen.connection and each.came_at > seen.answered_at
            ]
            found.append((later[0] - seen.answered_at) * 1000)
    return found


@proves("R6")
def test_a_broker_that_throttles_a_producer_is_sent_nothing_for_so_long(tap: WireTap) -> None:
    with Producer(tap.address, client_id="throttled producer") as producer:
        producer.send("throttled", b"first")
        tap.change = throttling(apis.PRODUCE, 2)
        reports = [producer.send("throttled", b"%d" % nth) for nth in range(4)]
    assert [report.offset for report in reports] == [1, 2, 3, 4]
    pauses = pauses_ms(tap, apis.PRODUCE)
    assert len(pauses) == 2
    assert min(pauses) >= THROTTLE_MS - 1


def test_a_new_connection_is_not_throttled_for_the_one_before(tap: WireTap) -> None:
    with Producer(tap.address, client_id="throttled for long", delivery_timeout_ms=5_000) as producer:
        tap.change = throttling(apis.PRODUCE, 1, throttle_ms=60_000)
        producer.send("throttled-long", b"first")
        for connection in producer._pool.connections:
            connection.close(BrokerUnreachable("lost"))
        assert producer.send("throttled-long", b"second").offset == 1


@proves("R8")
def test_a_broker_that_throttles_a_consumer_is_sent_no_fetch_for_so_long(tap: WireTap) -> None:
    with Producer(tap.address) as producer:
        for nth in range(3):
            producer.send("throttled-reads", b"%d" % nth)
        tap.change = throttling(apis.FETCH, 2)
        with Consumer("throttled-reads", bootstrap=tap.address, max_wait_ms=10) as consumer:
            values = [record.value for record in islice(consumer.records(20_000), 3)]
            wait_for("two fetches that were throttled", lambda: sum(map(throttled, tap.of(apis.FETCH))) == 2)
            last = tap.of(apis.FETCH)[-1]
            wait_for("another fetch", lambda: tap.of(apis.FETCH)[-1] is not last or not throttled(last))
    assert values == [b"0", b"1", b"2"]
    pauses = pauses_ms(tap, apis.FETCH)
    assert len(pauses) == 2
    assert min(pauses) >= THROTTLE_MS - 1


def throttled(seen: Seen) -> bool:
    return seen.answer is not None and seen.answered_at > 0 and bool(seen.answer.throttle_time_ms)
