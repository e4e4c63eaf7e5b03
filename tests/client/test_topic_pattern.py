"""Topics by a pattern: found when they appear, dropped when they are gone, and no record of them is missed.

On threads and on asyncio: of the latter every call is run to its end, and the loop stands still in between.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from brokers import Broker, wait_for
from client.blocking_consumer import Blocking
from headrace import Admin, Consumer, Producer
from headrace import read as read_span
from headrace.client.errors import UnknownTopic
from headrace.errors import InvalidTopicName, SettingError
from proving import proves

WAYS = {"group": {"group": "g"}, "cooperative": {"group": "g", "assignor": "cooperative"}, "alone": {}}


@pytest.fixture
def admin(broker: Broker) -> Iterator[Admin]:
    with Admin(broker.bootstrap) as connected:
        yield connected


@pytest.fixture
def prefix() -> str:
    return f"pattern-{uuid.uuid4().hex[:10]}"


Join = Callable[..., Blocking]


@pytest.fixture(params=["threads", "asyncio"])
def join(request: pytest.FixtureRequest, broker: Broker, prefix: str) -> Iterator[Join]:
    """Consumers of all topics that begin with the prefix and a dot; a group is named after it too."""
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner()) if request.param == "asyncio" else None

        def make(**options: object) -> Blocking:
            if "group" in options:
                options["group"] = prefix
            pattern = re.compile(rf"{prefix}\..*")
            made = Blocking(runner, pattern, bootstrap=broker.bootstrap, metadata_max_age_ms=100, **options)
            stack.callback(made.close)
            return made

        yield make


def send(broker: Broker, topic: str, *values: bytes) -> None:
    with Producer(broker.bootstrap, client_id="another") as producer:
        for value in values:
            producer.send(topic, value)


def read(consumers: list[Blocking], count: int) -> list[bytes]:
    found: list[bytes] = []

    def came() -> bool:
        for consumer in consumers:
            found.extend(record.value for record in consumer.poll(500))
        return len(found) >= count

    wait_for(f"{count} records", came, pause_s=0.0)
    return sorted(found)


def poll_until(consumer: Blocking, done: Callable[[], bool]) -> None:
    def turn() -> bool:
        consumer.poll(500)
        return done()

    wait_for("the topics", turn, pause_s=0.0)


def topics_of(consumer: Blocking) -> set[str]:
    return {topic for topic, _ in consumer.consumer.assignment}


@proves("U2")
@pytest.mark.parametrize(("way", "start"), [("group", "earliest"), *((way, "latest") for way in WAYS)])
def test_a_topic_that_appears_later_is_read_from_its_first_record(
    broker: Broker, admin: Admin, prefix: str, join: Join, way: str, start: str
) -> None:
    admin.create_topic(f"{prefix}.old")
    send(broker, f"{prefix}.old", b"before")
    consumer = join(start=start, **WAYS[way])
    poll_until(consumer, lambda: topics_of(consumer) == {f"{prefix}.old"})

    def appear() -> None:
        admin.create_topic(f"{prefix}.new", partitions=2)
        admin.create_topic(f"{prefix}-other")
        send(broker, f"{prefix}-other", b"no")
        send(broker, f"{prefix}.new", b"1", b"2")

    # The consumer cannot look before all of it is there.
    consumer.under_lock(appear)
    poll = read([consumer], 2)
    poll_until(consumer, lambda: topics_of(consumer) == {f"{prefix}.old", f"{prefix}.new"})
    send(broker, f"{prefix}.new", b"3")
    assert [value for value in poll + read([consumer], 1) if value != b"before"] == [b"1", b"2", b"3"]


@proves("U2")
def test_two_members_share_what_appears(broker: Broker, admin: Admin, prefix: str, join: Join) -> None:
    """There is nothing to begin with, and progress goes on where the group was."""
    first, second = join(group="g"), join(group="g")
    for number in range(3):
        admin.create_topic(f"{prefix}.{number}", partitions=2)
        send(broker, f"{prefix}.{number}", *(b"%d-%d" % (number, n) for n in range(4)))
    expected = [b"%d-%d" % (number, n) for number in range(3) for n in range(4)]
    assert sorted(set(read([first, second], 12))) == expected


@proves("U2")
@pytest.mark.parametrize("way", ["group", "alone"])
def test_a_topic_that_is_deleted_is_dropped_and_the_others_are_read_on(
    broker: Broker, admin: Admin, prefix: str, join: Join, way: str
) -> None:
    for name in ("kept", "gone"):
        admin.create_topic(f"{prefix}.{name}")
        send(broker, f"{prefix}.{name}", name.encode())
    consumer = join(**WAYS[way])
    assert read([consumer], 2) == [b"gone", b"kept"]
    admin.delete_topic(f"{prefix}.gone")
    poll_until(consumer, lambda: topics_of(consumer) == {f"{prefix}.kept"})
    send(broker, f"{prefix}.kept", b"more")
    assert b"more" in read([consumer], 1)
    admin.create_topic(f"{prefix}.gone")
    send(broker, f"{prefix}.gone", b"a", b"b")
    assert [value for value in read([consumer], 2) if value in (b"a", b"b")] == [b"a", b"b"]
    if "group" in WAYS[way]:
        consumer.commit()
        assert admin.group_offsets(prefix) == {(f"{prefix}.kept", 0): 2, (f"{prefix}.gone", 0): 2}


@proves("U2")
def test_progress_of_a_deleted_topic_is_not_that_of_its_successor(
    broker: Broker, admin: Admin, prefix: str, tmp_path: Path, join: Join
) -> None:
    admin.create_topic(f"{prefix}.t")
    send(broker, f"{prefix}.t", b"1", b"2")
    consumer = join(group="g", mode="broadcast", progress_dir=tmp_path)
    assert read([consumer], 2) == [b"1", b"2"]
    consumer.commit()
    admin.delete_topic(f"{prefix}.t")
    metadata = consumer.core.pool.metadata
    poll_until(consumer, lambda: topics_of(consumer) == set() and metadata.topic(f"{prefix}.t") is None)

    def appear() -> None:
        admin.create_topic(f"{prefix}.t")
        send(broker, f"{prefix}.t", b"3", b"4", b"5")

    consumer.under_lock(appear)
    assert read([consumer], 3) == [b"3", b"4", b"5"]


@proves("U2")
def test_internal_topics_and_those_of_what_failed_are_left_out(broker: Broker, admin: Admin, prefix: str) -> None:
    for name in (f"{prefix}.retry", f"{prefix}.dead", f"{prefix}.orders"):
        admin.create_topic(name)
    assert any(topic.is_internal for topic in admin.list_topics(internal=True))
    pattern = re.compile(rf"{prefix}\..*|__.*")
    with Consumer(pattern, bootstrap=broker.bootstrap, group=prefix, metadata_max_age_ms=100) as consumer:
        wait_for("an assignment", lambda: consumer.poll(100) or consumer.assignment)
        assert consumer.assignment == [(f"{prefix}.orders", 0)]


@proves("U2")
def test_the_whole_name_has_to_match(broker: Broker, admin: Admin, prefix: str) -> None:
    for name in (prefix, f"{prefix}s", f"a{prefix}"):
        admin.create_topic(name)
    with Consumer(re.compile(prefix), bootstrap=broker.bootstrap) as consumer:
        wait_for("an assignment", lambda: consumer.poll(100) or consumer.assignment)
        assert consumer.assignment == [(prefix, 0)]


@proves("U2")
def test_a_pattern_is_given_alone(broker: Broker) -> None:
    with pytest.raises(SettingError, match="alone"):
        Consumer(["orders", re.compile("parcels")], bootstrap=broker.bootstrap)  # type: ignore[list-item]
    with pytest.raises(SettingError, match="give either"):
        Consumer(re.compile("parcels"), bootstrap=broker.bootstrap, partitions=[("orders", 0)])


@proves("U2")
@pytest.mark.parametrize("group", [None, "closed-at-once"])
def test_a_consumer_that_is_closed_before_the_first_look_says_nothing(broker: Broker, group: str | None) -> None:
    Consumer(re.compile("x"), bootstrap=broker.bootstrap, group=group).close()


@proves("U2")
@pytest.mark.parametrize("options", [{}, {"group": "g"}])
def test_a_name_that_no_topic_can_have_is_told_at_once(options: dict[str, Any]) -> None:
    """With the way to a pattern, which such a name often is."""
    told = r"topic name '\^app\.\*' has characters .* a-z A-Z 0-9 \. _ - .* give re\.compile\('\^app\.\*'\)"
    with pytest.raises(InvalidTopicName, match=told):
        Consumer("^app.*", **options)
    with pytest.raises(InvalidTopicName, match=told):
        Consumer(["fine", "^app.*"], **options)
    with pytest.raises(InvalidTopicName, match=r"the topic name is empty; [^;]*$"):
        Consumer("", **options)
    with pytest.raises(TypeError, match="a topic's name is a str, not int: 5"):
        Consumer([5], **options)  # type: ignore[list-item]


@proves("U2")
def test_partitions_of_a_topic_that_cannot_be_are_told_at_once() -> None:
    with pytest.raises(InvalidTopicName, match="topic name 'a topic' has characters"):
        Consumer(partitions=[("a topic", 0)])


@proves("U1")
def test_a_topic_that_cannot_be_is_not_offered_to_be_created(broker: Broker) -> None:
    with pytest.raises(
        UnknownTopic, match=r"no topic '\^app\.\*'; topic name .* not allowed; a topic name is 1 to 249"
    ) as told:
        read_span(broker.bootstrap, "^app.*", 0, 0, 1)
    assert "topic create" not in str(told.value)
