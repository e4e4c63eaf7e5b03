"""ShareFetch and ShareAcknowledge by bytes: sessions, what is acquired, what may be said of it, and bad input."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from brokers import Broker, wait_for
from headrace.queues.share_partitions import REFUSALS_MAX
from headrace.wire import api as apis
from headrace.wire.message import Message
from kafka_protocol.raw import Raw, batch_of, values
from kafka_protocol.share_client import (
    ACCEPT,
    REJECT,
    RELEASE,
    RENEW,
    Place,
    Said,
    ShareClient,
    acquired,
    configure_group,
    leave,
    rows,
    subscribe,
)

NOT_LEADER_OR_FOLLOWER, INVALID_GROUP_ID, INVALID_REQUEST, UNKNOWN_TOPIC_ID, UNKNOWN_PARTITION = 6, 24, 42, 100, 3
INVALID_RECORD_STATE, SESSION_NOT_FOUND, INVALID_EPOCH, SESSION_LIMIT = 121, 122, 123, 133
PARTITIONS = 2
Connect = Callable[[], Raw]


@pytest.fixture
def connect(broker: Broker) -> Iterator[Connect]:
    opened: list[Raw] = []

    def open_one() -> Raw:
        opened.append(Raw(broker.host_port))
        return opened[-1]

    yield open_one
    for raw in opened:
        raw.close()


@pytest.fixture
def topic(connect: Connect) -> str:
    name = f"t-{uuid.uuid4()}"
    connect().create(name, partitions=PARTITIONS)
    return name


@pytest.fixture
def place(connect: Connect, topic: str) -> Place:
    return id_of(connect(), topic), 0


@pytest.fixture
def join(connect: Connect, topic: str) -> Callable[..., ShareClient]:
    """A member of a group of this test, on a connection of its own unless told."""
    group = f"g-{uuid.uuid4()}"
    configure_group(connect(), group)
    subscribe(connect(), group, topic, PARTITIONS)

    def make(raw: Raw | None = None, **more: Any) -> ShareClient:
        return ShareClient(raw or connect(), group, **more)

    return make


Join = Callable[..., ShareClient]


def id_of(raw: Raw, topic: str) -> bytes:
    asked = [Message(topic_id=bytes(16), name=topic)]
    found = raw.call(apis.METADATA, 12, topics=asked, allow_auto_topic_creation=False)
    return bytes(found.topics[0].topic_id)


def write(raw: Raw, topic: str, *batches: int, partition: int = 0) -> None:
    """Batches of so many records."""
    for count in batches:
        made = batch_of([b"%d" % number for number in range(count)])
        assert raw.produce(topic, made, acks=-1, partition=partition).error_code == 0


@pytest.mark.parametrize("version", [1, 2])
def test_what_is_acquired_is_sent_as_whole_batches(
    connect: Connect, join: Join, topic: str, place: Place, version: int
) -> None:
    write(connect(), topic, 3, 2)
    member = join(version=version)
    answer = member.ask([place], max_wait_ms=10_000)
    assert (answer.error_code, answer.acquisition_lock_timeout_ms) == (0, 30_000)
    row = rows(answer)[place]
    assert values(row.records) == [b"0", b"1", b"2", b"0", b"1"]
    assert acquired(row) == [(0, 4, 1)]
    assert (row.current_leader.leader_id, row.current_leader.leader_epoch) == (-1, -1)
    assert not member.fetch(), "all of it is locked"
    assert member.code({place: [(0, 4, [ACCEPT])]}) == 0
    assert not join().fetch([place])


def test_a_fetch_waits_for_records(connect: Connect, join: Join, topic: str, place: Place) -> None:
    member = join()
    member.fetch([place])
    member.send(max_wait_ms=15_000)
    write(connect(), topic, 1)
    assert acquired(rows(member.receive())[place]) == [(0, 0, 1)]


def test_a_fetch_waits_no_longer_than_it_said(join: Join, place: Place) -> None:
    began = time.monotonic()
    assert not join().fetch([place], max_wait_ms=300)
    assert 0.25 < time.monotonic() - began < 10


def test_a_request_behind_a_waiting_fetch_is_not_held_up(join: Join, place: Place) -> None:
    member = join()
    member.fetch([place])
    began = time.monotonic()
    member.send(max_wait_ms=15_000)
    member.epoch += 1
    member.send(max_wait_ms=0)
    member.epoch -= 1
    assert not rows(member.receive())
    assert not rows(member.receive())
    assert time.monotonic() - began < 10


def test_a_released_record_wakes_the_member_that_waits(connect: Connect, join: Join, topic: str, place: Place) -> None:
    write(connect(), topic, 2)
    first, second = join(), join()
    first.fetch([place], max_wait_ms=10_000)
    second.fetch([place])
    second.send(max_wait_ms=15_000)
    assert first.code({place: [(0, 1, [RELEASE, REJECT])]}) == 0
    assert acquired(rows(second.receive())[place]) == [(0, 0, 2)]


def test_acknowledgements_ride_on_a_fetch(connect: Connect, join: Join, topic: str, place: Place) -> None:
    write(connect(), topic, 1, 1, 1)
    member = join()
    assert acquired(member.fetch([place], max_records=1, max_wait_ms=10_000)[place]) == [(0, 0, 1)]
    row = member.fetch([], {place: [(0, 0, [ACCEPT])]}, max_records=1)[place]
    assert (row.acknowledge_error_code, acquired(row)) == (0, [(1, 1, 1)])
    row = member.fetch([], {place: [(0, 1, [ACCEPT])]}, max_records=1)[place]
    assert row.acknowledge_error_code == 0, "what is below the start is final"
    row = member.fetch([], {place: [(7, 7, [ACCEPT])]}, max_records=0)[place]
    assert (row.acknowledge_error_code, acquired(row)) == (INVALID_RECORD_STATE, [])


def test_a_record_limit_is_kept_inside_a_batch(connect: Connect, join: Join, topic: str, place: Place) -> None:
    write(connect(), topic, 5)
    member = join()
    row = member.fetch([place], max_records=2, share_acquire_mode=1, max_wait_ms=10_000)[place]
    assert acquired(row) == [(0, 1, 1)]
    assert len(values(row.records)) == 5
    assert acquired(member.fetch(max_records=2)[place]) == [(2, 4, 1)]


def test_a_lock_is_renewed(connect: Connect, join: Join, topic: str, place: Place) -> None:
    write(connect(), topic, 1)
    member = join()
    member.fetch([place], max_wait_ms=10_000)
    nothing = {"max_wait_ms": 0, "min_bytes": 0, "max_bytes": 0, "max_records": 0}
    assert member.code({place: [(0, 0, [RENEW])]}) == INVALID_REQUEST, "the request has to say that it renews"
    assert member.code({place: [(0, 0, [RENEW])]}, is_renew_ack=True) == 0
    assert member.fetch([], {place: [(0, 0, [RENEW])]}, is_renew_ack=True, **nothing)[place].acknowledge_error_code == 0
    assert member.ask([], {place: [(0, 0, [RENEW])]}, is_renew_ack=True).error_code == INVALID_REQUEST
    assert member.code({place: [(0, 0, [ACCEPT])]}) == 0


@pytest.mark.parametrize("ending", ["fetch", "acknowledge", "connection"])
def test_the_end_of_a_session_gives_its_records_to_others(
    connect: Connect, join: Join, topic: str, place: Place, ending: str
) -> None:
    write(connect(), topic, 2)
    first, second = join(), join()
    assert acquired(first.fetch([place], max_wait_ms=10_000)[place]) == [(0, 1, 1)]
    assert not second.fetch([place])
    said = {place: [(0, 0, [ACCEPT])]}
    if ending == "fetch":
        assert first.fetch([], said, share_session_epoch=-1)[place].acknowledge_error_code == 0
        assert first.ask(share_session_epoch=-1).error_code == SESSION_NOT_FOUND
    elif ending == "acknowledge":
        assert first.code(said, share_session_epoch=-1) == 0
        assert first.acknowledge({}, share_session_epoch=-1).error_code == SESSION_NOT_FOUND
    else:
        assert first.code(said) == 0
        first.raw.close()
    assert acquired(second.fetch(max_wait_ms=10_000)[place]) == [(1, 1, 1)]


def test_who_goes_before_its_answer_leaves_no_lock_behind(
    connect: Connect, join: Join, topic: str, place: Place
) -> None:
    write(connect(), topic, 1)
    for _ in range(5):
        gone = join()
        gone.send([place], max_wait_ms=10_000)
        gone.raw.close()
    assert acquired(join().fetch([place], max_wait_ms=10_000)[place]) == [(0, 0, 1)]


def test_a_member_that_begins_anew_keeps_what_it_has_acquired(
    connect: Connect, join: Join, topic: str, place: Place
) -> None:
    write(connect(), topic, 2)
    member = join()
    member.fetch([place], max_wait_ms=10_000)
    again = join(member=member.member)
    assert not again.fetch([place])
    member.raw.close()
    assert again.code({place: [(0, 1, [ACCEPT])]}) == 0


def consumed_group(connect: Connect, topic: str, place: Place) -> str:
    """A group without members that has accepted all that there is."""
    raw, group = connect(), f"g-{uuid.uuid4()}"
    configure_group(raw, group)
    subscriber = subscribe(raw, group, topic, PARTITIONS)
    write(raw, topic, 3)
    member = ShareClient(raw, group)
    assert acquired(member.fetch([place], max_wait_ms=10_000)[place]) == [(0, 2, 1)]
    assert member.code({place: [(0, 2, [ACCEPT])]}) == 0
    leave(raw, group, subscriber)
    member.ask(share_session_epoch=-1)
    return group


def test_who_begins_hears_of_a_start_that_was_set_back(connect: Connect, topic: str, place: Place) -> None:
    raw, group = connect(), consumed_group(connect, topic, place)
    starts = [Message(topic_name=topic, partitions=[Message(partition_index=0, start_offset=1)])]
    answer = raw.call(apis.ALTER_SHARE_GROUP_OFFSETS, 0, group_id=group, topics=starts)
    assert answer.responses[0].partitions[0].error_code == 0, answer
    subscribe(raw, group, topic, PARTITIONS)
    assert acquired(ShareClient(raw, group).fetch([place], max_wait_ms=10_000)[place]) == [(1, 2, 1)]


def test_a_group_that_is_made_again_begins_again(connect: Connect, topic: str, place: Place) -> None:
    raw, group = connect(), consumed_group(connect, topic, place)
    answer = raw.call(apis.DELETE_GROUPS, 2, groups_names=[group])
    assert [each.error_code for each in answer.results] == [0]
    subscribe(raw, group, topic, PARTITIONS)
    assert acquired(ShareClient(raw, group).fetch([place], max_wait_ms=10_000)[place]) == [(0, 2, 1)]


def test_sessions_are_of_their_member_and_connection(join: Join, place: Place) -> None:
    member = join()
    assert member.acknowledge({}).error_code == INVALID_EPOCH, "a session begins with a fetch"
    assert member.ask(share_session_epoch=1).error_code == SESSION_NOT_FOUND
    member.fetch([place])
    assert member.ask(share_session_epoch=7).error_code == INVALID_EPOCH
    assert member.acknowledge({}, share_session_epoch=7).error_code == INVALID_EPOCH
    stranger = join(member=member.member)
    assert stranger.ask(share_session_epoch=1).error_code == SESSION_NOT_FOUND
    assert join(member.raw).ask(share_session_epoch=1).error_code == SESSION_NOT_FOUND
    assert not member.fetch(), "and it goes on"


def test_partitions_are_added_and_forgotten(connect: Connect, join: Join, topic: str, place: Place) -> None:
    other = place[0], 1
    raw = connect()
    write(raw, topic, 1)
    write(raw, topic, 1, partition=1)
    member = join()
    assert list(member.fetch([place], max_wait_ms=10_000)) == [place]
    assert list(member.fetch([other], forgotten=[place], max_wait_ms=10_000)) == [other]
    write(raw, topic, 1)
    assert not member.fetch()
    row = member.fetch([], {place: [(0, 0, [ACCEPT])]}, [place])[place]
    assert (row.acknowledge_error_code, acquired(row)) == (0, []), "what is forgotten can be acknowledged"


def test_codes_of_many_partitions_are_told_some_after_the_others(join: Join, place: Place) -> None:
    member = join()
    unknown = {(place[0], number) for number in range(100, 100 + REFUSALS_MAX + 200)}
    told = member.fetch(unknown)
    assert len(told) == REFUSALS_MAX
    assert {row.error_code for row in told.values()} == {UNKNOWN_PARTITION}
    assert told.keys() | member.fetch().keys() == unknown


def test_bad_requests_are_told_in_kafkas_codes(join: Join, place: Place) -> None:
    member = join()
    assert member.ask([place], group_id="").error_code == INVALID_GROUP_ID
    assert member.ask([place], member_id="").error_code == INVALID_REQUEST
    assert member.ask([place], member_id="x" * 37).error_code == INVALID_REQUEST
    assert member.ask([place], {place: [(0, 0, [ACCEPT])]}).error_code == INVALID_REQUEST
    missing, unknown = (place[0], 9), (bytes(15) + b"\x01", 0)
    found = member.fetch([missing, unknown])
    assert (found[missing].error_code, found[unknown].error_code) == (UNKNOWN_PARTITION, UNKNOWN_TOPIC_ID)
    member.fetch([], forgotten=[missing, unknown])
    assert member.code({missing: [(0, 0, [ACCEPT])]}) == UNKNOWN_PARTITION
    assert member.code({unknown: [(0, 0, [ACCEPT])]}) == UNKNOWN_TOPIC_ID


def test_only_the_member_that_has_a_record_can_say_something_of_it(
    connect: Connect, join: Join, topic: str, place: Place
) -> None:
    write(connect(), topic, 3)
    member, other = join(), join()
    member.fetch([place], max_wait_ms=10_000)
    other.fetch([place])
    for types in ([ACCEPT], [RELEASE], [REJECT]):
        assert other.code({place: [(0, 2, types)]}) == INVALID_RECORD_STATE
    assert other.code({place: [(0, 0, [RENEW])]}, is_renew_ack=True) == INVALID_RECORD_STATE
    forgeries: list[list[Said]] = [
        [(2, 0, [ACCEPT])],
        [(0, 2, [ACCEPT, ACCEPT])],
        [(0, 2, [])],
        [(0, 2, [9])],
        [(1, 2, [ACCEPT]), (0, 1, [ACCEPT])],
    ]
    for forged in forgeries:
        assert member.code({place: forged}) == INVALID_REQUEST, forged
    assert member.code({place: [(5, 9, [ACCEPT])]}) == INVALID_RECORD_STATE
    assert member.code({place: [(0, 2, [ACCEPT])]}) == 0, "and nothing of it was changed"
    assert member.code({place: [(0, 2, [RELEASE])]}) == 0, "what is below the start is final"


def test_there_are_only_so_many_sessions(fresh_broker: Callable[..., Broker]) -> None:
    address = fresh_broker(settings={"group.share.max.share.sessions": 1}).host_port
    first, second = ShareClient(Raw(address), "g"), ShareClient(Raw(address), "g")
    first.fetch()
    assert second.ask().error_code == SESSION_LIMIT
    first.raw.close()
    wait_for("room", lambda: second.ask().error_code == 0)
    second.raw.close()
