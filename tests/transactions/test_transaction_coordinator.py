from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace.coordinators.record_fields import Record
from headrace.coordinators.state_log import AppendDone, partition_of
from headrace.errors import CorruptBatch, ErrorCode
from headrace.transactions.coordinator import (
    HELD_MAX,
    HELD_SECONDS,
    ID_BYTES_MAX,
    OPENED_PER_TURN,
    PARTITIONS_MAX,
    PAUSE_SECONDS,
)
from headrace.transactions.descriptions import LISTED_PER_TURN, ListFilter
from headrace.transactions.limits import TransactionLimits
from headrace.transactions.messages import AddRequest, EndReply, InitReply, MarkerRequest
from headrace.transactions.records import encode, encode_key
from headrace.transactions.shard import RECENT_MAX
from headrace.transactions.transaction import LAST_EPOCH, Transaction
from proving import proves
from transactions.scene import EVERYTHING, ID, PLACES, TIMEOUT_MS, Scene, Waiter

OK, NOT_COORDINATOR = ErrorCode.NONE, ErrorCode.NOT_COORDINATOR


@pytest.fixture
def scene() -> Scene:
    return Scene()


@proves("T1")
@pytest.mark.parametrize("committed", [True, False])
def test_a_transaction_from_its_beginning_to_its_end(scene: Scene, committed: bool) -> None:
    producer = scene.init().reply
    assert producer == InitReply(OK, 1000, 0)
    assert scene.state() == "Empty"
    assert scene.add(producer).reply == OK
    assert scene.state() == "Ongoing"
    scene.markers_held = True
    assert scene.end(producer, committed=committed).reply == EndReply(OK, 1000, 1)
    assert scene.state() == ("PrepareCommit" if committed else "PrepareAbort")
    scene.write_markers()
    assert scene.written == [MarkerRequest(ID, 1000, 1, 0, committed, 0, 2, (("a", 0), ("b", 1)))]
    assert scene.state() == ("CompleteCommit" if committed else "CompleteAbort")


def test_nothing_is_answered_and_no_marker_sent_before_the_log_has_it(scene: Scene) -> None:
    scene.held = True
    opening = scene.init()
    assert not opening.answered
    scene.acknowledge()
    producer = opening.reply
    adding = scene.add(producer)
    assert not adding.answered
    assert scene.state() == "Empty"
    assert set(scene.verify(producer).reply.values()) == {NOT_COORDINATOR}, "it is not known yet"
    scene.acknowledge()
    assert adding.reply == OK
    assert set(scene.verify(producer).reply.values()) == {OK}
    ending = scene.end(producer)
    assert not ending.answered
    assert scene.written == []
    scene.acknowledge()
    assert ending.reply.error_code == OK
    assert len(scene.written) == 1


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (ErrorCode.NOT_ENOUGH_REPLICAS, ErrorCode.COORDINATOR_NOT_AVAILABLE),
        (ErrorCode.REQUEST_TIMED_OUT, ErrorCode.COORDINATOR_NOT_AVAILABLE),
        (ErrorCode.NOT_LEADER_OR_FOLLOWER, NOT_COORDINATOR),
        (ErrorCode.KAFKA_STORAGE_ERROR, NOT_COORDINATOR),
    ],
)
def test_what_could_not_be_stored_has_not_happened(scene: Scene, code: int, told: int) -> None:
    scene.held = True
    opening = scene.init()
    scene.acknowledge(code)
    assert opening.reply.error_code == told
    assert scene.coordinator.describe(ID).error_code == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND
    opening = scene.init()
    scene.acknowledge()
    producer = opening.reply
    for _ in range(2):
        adding = scene.add(producer)
        scene.acknowledge(code)
        assert adding.reply == told
        assert scene.state() == "Empty"
    scene.held = False
    scene.add(producer)
    scene.held = True
    ending = scene.end(producer)
    scene.acknowledge(code)
    assert ending.reply == EndReply(told)
    assert scene.written == []
    assert scene.state() == "Ongoing"
    scene.held = False
    assert scene.end(producer).reply == EndReply(OK, 1001, 1)


@proves("T2")
@pytest.mark.parametrize(
    ("stored", "told"),
    [(OK, ErrorCode.PRODUCER_FENCED), (ErrorCode.NOT_LEADER_OR_FOLLOWER, NOT_COORDINATOR)],
)
def test_a_newer_epoch_than_was_handed_out_is_refused_only_by_who_is_still_the_coordinator(
    scene: Scene, stored: int, told: int
) -> None:
    """A later coordinator may have handed it out: its producer would give up."""
    producer = scene.init().reply
    later = replace(producer, epoch=producer.epoch + 1)
    scene.held = True
    asked = scene.add(later), scene.end(later), scene.init(producer_id=later.producer_id, epoch=later.epoch)
    assert not asked[0].answered
    scene.acknowledge(stored)
    assert asked[0].reply == told
    assert {asked[1].reply.error_code, asked[2].reply.error_code} <= {told, NOT_COORDINATOR}
    ending = scene.end(later)
    scene.acknowledge(stored)
    assert ending.reply.error_code == told
    verified = scene.verify(later)
    scene.acknowledge(stored)
    assert set(verified.reply.values()) == {told}
    assert scene.add(replace(producer, epoch=-1)).reply == ErrorCode.PRODUCER_FENCED
    assert set(scene.verify(replace(producer, epoch=-1)).reply.values()) == {ErrorCode.PRODUCER_FENCED}


@proves("T2")
@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize(
    ("stored", "told"),
    [(OK, ErrorCode.INVALID_PRODUCER_ID_MAPPING), (ErrorCode.NOT_LEADER_OR_FOLLOWER, NOT_COORDINATOR)],
)
def test_a_producer_id_that_was_not_handed_out_is_refused_only_by_who_is_still_the_coordinator(
    scene: Scene, stored: int, told: int, is_known: bool
) -> None:
    """A later coordinator may have handed it out, for a transactional id of which this one has never heard."""
    if is_known:
        scene.init()
    other = InitReply(OK, 5000, 0)
    scene.held = True
    asked = scene.add(other), scene.verify(other), scene.end(other)
    assert not asked[0].answered
    assert {*asked[1].reply.values(), asked[2].reply.error_code} == {NOT_COORDINATOR}, "one question at a time"
    scene.acknowledge(stored)
    assert asked[0].reply == told
    ending = scene.end(other)
    assert not ending.answered
    scene.acknowledge(stored)
    assert ending.reply.error_code == told
    verified = scene.verify(other)
    assert not verified.answered
    scene.acknowledge(stored)
    assert set(verified.reply.values()) == {told}
    if is_known:
        opening = scene.init(producer_id=other.producer_id, epoch=0)
        scene.acknowledge(stored)
        assert opening.reply.error_code == (told if stored else ErrorCode.PRODUCER_FENCED)
    scene.held = False
    assert scene.init().reply == InitReply(OK, 1000, 1 if is_known else 0)
    assert scene.take_over().describe(ID).epoch == (1 if is_known else 0)


def test_a_transactional_id_that_is_asked_for_while_it_is_not_known_is_handed_out_behind_the_answer(
    scene: Scene,
) -> None:
    scene.held = True
    adding, opening = scene.add(InitReply(OK, 5000, 0)), scene.init()
    assert not opening.answered
    scene.acknowledge()
    assert adding.reply == ErrorCode.INVALID_PRODUCER_ID_MAPPING
    scene.acknowledge()
    assert opening.reply == InitReply(OK, 1000, 0)
    scene.held = False
    assert scene.take_over().describe(ID).producer_id == 1000, "no record behind it says that there is none"


def test_nothing_is_kept_of_a_transactional_id_that_nobody_has_asked_for(scene: Scene) -> None:
    other = InitReply(OK, 5000, 0)
    for nth in range(5):
        assert scene.add(other, name=f"{nth}").reply == ErrorCode.INVALID_PRODUCER_ID_MAPPING
        assert scene.end(other, name=f"{nth}").reply.error_code == ErrorCode.INVALID_PRODUCER_ID_MAPPING
        assert set(scene.verify(other, name=f"{nth}").reply.values()) == {ErrorCode.INVALID_PRODUCER_ID_MAPPING}
    many = frozenset(("a", nth) for nth in range(PARTITIONS_MAX + 1))
    assert scene.add(other, many).reply == ErrorCode.POLICY_VIOLATION
    appended = len(scene.log[0])
    assert scene.add(other, name="x" * (ID_BYTES_MAX + 1)).reply == ErrorCode.INVALID_PRODUCER_ID_MAPPING, (
        "nobody can have it"
    )
    assert len(scene.log[0]) == appended
    assert not scene.coordinator._shards[0].live
    assert not scene.listed()


@proves("T2")
@pytest.mark.parametrize("ends", ["by its owner", "by its timeout", "with its last marker"])
def test_a_transaction_ends_though_others_are_refused_without_a_pause(scene: Scene, ends: str) -> None:
    """Two that have another producer id, and ask again as soon as they are answered: one always waits."""
    scene.markers_held = True
    producer, other = scene.begun(), InitReply(OK, 5000, 0)
    if ends == "with its last marker":
        assert scene.end(producer).reply.error_code == OK
    scene.held = True
    asking = [scene.add(other), scene.add(other)]
    ending = scene.end(producer) if ends == "by its owner" else None
    if ends == "with its last marker":
        scene.write_markers()
    rounds = 2 * TIMEOUT_MS // 100
    for _ in range(rounds):
        scene.acknowledge(most=1)
        asking = [scene.add(other) if each.answered else each for each in asking]
        scene.advance(0.1)
    assert ending is None or ending.reply.error_code == OK
    wanted = {
        "by its owner": "PrepareCommit",
        "by its timeout": "PrepareAbort",
        "with its last marker": "CompleteCommit",
    }
    assert scene.state() == wanted[ends]


@proves("T2")
def test_a_transaction_ends_though_its_producer_is_refused_while_the_last_marker_is_written(scene: Scene) -> None:
    scene.markers_held = True
    producer = scene.begun()
    assert scene.end(producer, version=1).reply.error_code == OK
    scene.held = True
    refused = scene.end(producer, committed=False, version=1)
    scene.write_markers()
    scene.acknowledge()
    assert refused.reply.error_code == ErrorCode.INVALID_TXN_STATE
    scene.held = scene.markers_held = False
    scene.advance(1)
    assert scene.state() == "CompleteCommit"


@proves("T2")
@pytest.mark.parametrize(
    ("stored", "told"),
    [(OK, ErrorCode.INVALID_TXN_STATE), (ErrorCode.NOT_LEADER_OR_FOLLOWER, NOT_COORDINATOR)],
)
def test_that_no_transaction_is_open_is_told_only_by_who_is_still_the_coordinator(
    scene: Scene, stored: int, told: int
) -> None:
    """A later coordinator may have heard of one: its producer would give up."""
    producer = scene.init().reply
    scene.held = True
    ending = scene.end(producer)
    assert not ending.answered
    scene.acknowledge(stored)
    assert ending.reply.error_code == told


def test_the_end_that_all_have_marked_is_stored_however_often_it_takes(scene: Scene) -> None:
    producer = scene.begun()
    scene.markers_held = True
    scene.end(producer)
    scene.held = True
    scene.write_markers()
    for _ in range(3):
        scene.acknowledge(ErrorCode.NOT_ENOUGH_REPLICAS)
        assert scene.state() == "PrepareCommit"
        scene.advance(PAUSE_SECONDS + 0.01)
    scene.acknowledge()
    assert scene.state() == "CompleteCommit"
    assert len(scene.written) == 1


def test_a_repeated_end_is_answered_as_the_first_was(scene: Scene) -> None:
    producer = scene.begun()
    scene.markers_held = True
    assert scene.end(producer).reply == EndReply(OK, 1000, 1)
    assert scene.end(producer).reply == EndReply(OK, 1000, 1)
    scene.write_markers()
    assert scene.end(producer).reply == EndReply(OK, 1000, 1)
    scene.take_over()
    assert scene.end(producer).reply == EndReply(OK, 1000, 1)
    assert scene.end(producer, committed=False).reply.error_code == ErrorCode.INVALID_TXN_STATE
    assert len(scene.written) == 1


# Waiting for each other


def test_a_request_waits_a_little_for_the_end_that_is_under_way(scene: Scene) -> None:
    scene.markers_held = True
    first = scene.end(scene.begun()).reply
    adding = scene.add(first)
    opening = scene.init()
    assert not adding.answered
    assert not opening.answered
    scene.write_markers()
    assert adding.reply == OK
    assert opening.reply == InitReply(OK, 1000, 3), "the transaction that was begun meanwhile is aborted first"
    assert [marker.committed for marker in scene.written] == [True, False]


def test_one_record_ends_a_transaction_and_begins_the_next_that_waits(scene: Scene) -> None:
    scene.markers_held = True
    first = scene.end(scene.begun()).reply
    adding, records = scene.add(first), len(scene.log[0])
    scene.held = True
    scene.write_markers()
    assert not adding.answered, "the log does not have it yet"
    assert scene.state() == "PrepareCommit"
    scene.acknowledge()
    assert adding.reply == OK
    assert scene.state() == "Ongoing"
    assert len(scene.log[0]) == records + 1
    scene.held = False
    assert scene.take_over().describe(ID).partitions == tuple(sorted(PLACES))
    assert scene.end(first).reply == EndReply(OK, 1000, 2)


def test_a_transaction_ends_though_what_waits_behind_it_cannot_be_stored(scene: Scene) -> None:
    scene.markers_held = True
    first = scene.end(scene.begun()).reply
    adding = scene.add(first)
    scene.held = True
    scene.write_markers()
    scene.acknowledge(ErrorCode.MESSAGE_TOO_LARGE)
    assert adding.reply == ErrorCode.POLICY_VIOLATION
    again = scene.add(first)
    assert scene.state() == "PrepareCommit"
    scene.advance(PAUSE_SECONDS + 0.01)
    assert again.reply == ErrorCode.CONCURRENT_TRANSACTIONS
    scene.add(first)
    scene.acknowledge()
    assert scene.state() == "Ongoing"
    assert len(scene.written) == 1


def test_more_transactional_ids_than_are_remembered_go_on_where_they_were(scene: Scene) -> None:
    names = [f"pay-{number}" for number in range(RECENT_MAX + 20)]
    producers = {name: scene.end(scene.begun(name), name).reply for name in names}
    for _ in range(2):
        for name, producer in producers.items():
            assert scene.add(producer, name=name).reply == OK
            producers[name] = scene.end(producer, name).reply
    assert {producer.epoch for producer in producers.values()} == {3}
    assert {marker.number for marker in scene.written} == {0, 1, 2}


def test_who_waited_long_enough_is_told_to_try_again(scene: Scene) -> None:
    scene.markers_held = True
    first = scene.end(scene.begun()).reply
    adding, opening = scene.add(first), scene.init()
    scene.advance(HELD_SECONDS + 0.01)
    assert adding.reply == ErrorCode.CONCURRENT_TRANSACTIONS
    assert opening.reply.error_code == ErrorCode.CONCURRENT_TRANSACTIONS
    scene.write_markers()
    assert scene.state() == "CompleteCommit"


def test_who_waits_behind_an_append_is_told_to_try_again(scene: Scene) -> None:
    scene.held = True
    scene.init()
    opening, adding = scene.init(), scene.add(InitReply(OK, 1000, 0))
    scene.advance(HELD_SECONDS + 0.01)
    assert opening.reply.error_code == ErrorCode.CONCURRENT_TRANSACTIONS
    assert adding.reply == ErrorCode.CONCURRENT_TRANSACTIONS


def test_what_is_stored_for_one_who_waited_behind_another_that_was_refused_is_not_forgotten(scene: Scene) -> None:
    scene.held = True
    scene.init()
    refused, opening = scene.end(InitReply(OK, 1000, -1)), scene.init()
    scene.acknowledge()
    assert refused.reply.error_code == ErrorCode.PRODUCER_FENCED
    assert opening.reply == InitReply(OK, 1000, 1)
    scene.held = False
    assert scene.init().reply == InitReply(OK, 1000, 2), "nobody gets an epoch that another has"


def test_only_so_many_wait(scene: Scene) -> None:
    scene.held = True
    scene.init()
    opening = [scene.init() for _ in range(HELD_MAX + 1)]
    adding = [scene.add(InitReply(OK, 1000, 0)) for _ in range(HELD_MAX + 1)]
    assert [one.answered for one in opening] == [False] * HELD_MAX + [True]
    assert [one.answered for one in adding] == [False] * HELD_MAX + [True]
    assert opening[-1].reply.error_code == ErrorCode.CONCURRENT_TRANSACTIONS
    assert adding[-1].reply == ErrorCode.CONCURRENT_TRANSACTIONS


def test_partitions_that_come_together_are_added_by_one_record(scene: Scene) -> None:
    """As leaders ask for the first records of a producer that writes to many partitions at once."""
    producer = scene.init().reply
    scene.held = True
    waiters = [scene.add(producer, frozenset({("t", number)})) for number in range(500)]
    scene.acknowledge()
    assert all(waiter.reply == OK for waiter in waiters)
    assert len(scene.log[0]) == 3
    assert len(scene.coordinator.describe(ID).partitions) == 500


def test_who_is_refused_may_ask_again_before_the_others_are_answered(scene: Scene) -> None:
    """A leader that is told to try again may do so in the same breath."""
    producer = scene.init().reply
    scene.held = True
    again: Waiter[int] = Waiter()
    stale = AddRequest(producer.producer_id, producer.epoch + 1, PLACES, 2)
    fresh = AddRequest(producer.producer_id, producer.epoch, frozenset({("again", 0)}), 2)
    first = scene.add(producer, frozenset({("first", 0)}))
    scene.coordinator.add(ID, stale, lambda _code: scene.coordinator.add(ID, fresh, again))
    second = scene.add(producer, frozenset({("second", 0)}))
    while scene.on_the_way:
        scene.acknowledge()
    assert [first.reply, second.reply, again.reply] == [OK] * 3
    places = {place for place, _ in scene.coordinator.describe(ID).partitions}
    assert places == {"first", "second", "again"}


def test_a_producer_that_takes_over_aborts_what_is_open_and_gets_its_epoch_when_that_has_ended(scene: Scene) -> None:
    old = scene.begun()
    scene.markers_held = True
    opening = scene.init()
    assert scene.state() == "PrepareAbort"
    assert not opening.answered
    scene.advance(HELD_SECONDS + 0.01)
    assert opening.reply.error_code == ErrorCode.CONCURRENT_TRANSACTIONS
    scene.write_markers()
    assert scene.written[0].committed is False
    assert scene.init().reply == InitReply(OK, 1000, 2)
    assert scene.end(old).reply.error_code == ErrorCode.PRODUCER_FENCED
    assert scene.add(old).reply == ErrorCode.PRODUCER_FENCED


# Failover


@proves("T2")
@pytest.mark.parametrize("committed", [True, False])
def test_the_next_coordinator_goes_on_with_what_was_decided(scene: Scene, committed: bool) -> None:
    producer = scene.begun()
    scene.markers_held = True
    scene.end(producer, committed=committed)
    stale = scene.markers.pop()
    scene.take_over()
    assert not stale[1](), "the markers of the last coordinator are not wanted any more"
    scene.write_markers()
    assert scene.written == [MarkerRequest(ID, 1000, 1, 1, committed, 0, 2, (("a", 0), ("b", 1)))]
    assert scene.state() == ("CompleteCommit" if committed else "CompleteAbort")
    stale[2]()
    assert scene.add(EndReply(OK, 1000, 1)).reply == OK


@proves("T2")
def test_the_next_coordinator_has_every_id_as_the_log_has_it() -> None:
    scene = Scene(partitions=5)
    for number in range(40):
        name = f"id-{number}"
        producer = scene.begun(name) if number % 2 else scene.init(name).reply
        if number % 4 == 1:
            scene.end(producer, name, committed=number % 8 == 1)
    before = scene.listed()
    described = {name: scene.coordinator.describe(name) for name in before}
    states = scene.coordinator.states()
    assert len(before) == 40
    after = scene.take_over()
    assert scene.listed() == before
    assert {name: after.describe(name) for name in before} == described
    assert +after.states() == +states


@proves("T2")
@pytest.mark.thorough
def test_ten_thousand_open_transactions_go_on_after_a_failover_a_slice_in_a_turn() -> None:
    scene = Scene(TransactionLimits(), markers_held=True)
    for number in range(10_000):
        producer = scene.begun(f"id-{number}")
        if number % 10 == 0:
            scene.end(producer, f"id-{number}")
    scene.markers.clear()
    scene.take_over()
    assert 0 < len(scene.markers) <= OPENED_PER_TURN
    scene.advance(0.001)
    assert len(scene.markers) == 1000
    assert +scene.coordinator.states() == {"Ongoing": 9000, "PrepareCommit": 1000}
    scene.write_markers()
    scene.advance(TIMEOUT_MS / 1000 + 0.1)
    scene.write_markers()
    assert +scene.coordinator.states() == {"CompleteCommit": 1000, "CompleteAbort": 9000}


def test_everyone_who_waits_hears_that_another_broker_coordinates(scene: Scene) -> None:
    producer = scene.begun()
    scene.markers_held = True
    ended = scene.end(producer).reply
    waiting: list[Waiter[int]] = [scene.add(ended)]
    opening = [scene.init()]
    scene.init("other")
    scene.held = True
    opening.append(scene.init("other"))
    waiting.append(scene.add(InitReply(OK, 1001, 0), name="other"))
    scene.ids_held = True
    opening.append(scene.init("third"))
    opening.append(scene.init("third"))
    scene.coordinator.resign(0)
    scene.acknowledge(ErrorCode.NOT_LEADER_OR_FOLLOWER)
    scene.hand_out_ids()
    assert [one.reply for one in waiting] == [NOT_COORDINATOR] * 2
    assert [one.reply.error_code for one in opening] == [NOT_COORDINATOR] * 4
    scene.write_markers()
    assert scene.written == []
    assert scene.init().reply.error_code == NOT_COORDINATOR
    assert scene.add(producer).reply == NOT_COORDINATOR
    assert scene.end(producer).reply.error_code == NOT_COORDINATOR
    assert scene.coordinator.describe(ID).error_code == NOT_COORDINATOR


def test_while_it_loads_its_ids_are_not_known(scene: Scene) -> None:
    producer = scene.begun()
    loading = scene.coordinator.lead(0, 1)
    for reply in (scene.init().reply, scene.end(producer).reply):
        assert reply.error_code == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    assert scene.add(producer).reply == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    assert scene.coordinator.list_transactions(EVERYTHING) == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    assert scene.coordinator.describe(ID).error_code == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    loading.replay(scene.log[0])
    loading.replay(scene.log[0])
    loading.ready()
    assert scene.state() == "Ongoing"


def test_a_record_that_cannot_be_read_keeps_its_partition_closed(scene: Scene) -> None:
    loading = scene.coordinator.lead(0, 1)
    loading.replay([(b"\0\x09\0\1x", b"of a kind that is not ours to know")])
    with pytest.raises(CorruptBatch):
        loading.replay([(encode_key(ID), b"\0\7")])
    with pytest.raises(CorruptBatch):
        loading.replay([(b"\0", b"")])


# Timeouts


def test_a_transaction_that_is_open_for_too_long_is_aborted_and_its_producer_fenced(scene: Scene) -> None:
    producer = scene.begun()
    scene.advance(TIMEOUT_MS / 1000 - 1)
    scene.add(producer, frozenset({("c", 0)}))
    assert scene.state() == "Ongoing"
    scene.advance(1.1)
    assert scene.state() == "CompleteAbort"
    assert [marker.committed for marker in scene.written] == [False]
    assert scene.end(producer).reply.error_code == ErrorCode.PRODUCER_FENCED
    scene.advance(100)
    assert len(scene.written) == 1


def test_a_timeout_counts_from_the_beginning_over_a_change_of_coordinators(scene: Scene) -> None:
    scene.begun()
    scene.advance(TIMEOUT_MS / 1000 - 1)
    scene.take_over()
    assert scene.state() == "Ongoing"
    scene.advance(1.1)
    assert scene.state() == "CompleteAbort"
    scene.begun("late")
    scene.coordinator.close()
    scene.advance(100)
    scene.take_over()
    scene.advance(0.01)
    assert scene.state("late") == "CompleteAbort"


def test_an_abort_that_could_not_be_stored_is_tried_again(scene: Scene) -> None:
    scene.begun()
    scene.held = True
    scene.advance(TIMEOUT_MS / 1000 + 0.1)
    scene.acknowledge(ErrorCode.NOT_ENOUGH_REPLICAS)
    assert scene.state() == "Ongoing"
    scene.held = False
    scene.advance(PAUSE_SECONDS + 0.1)
    assert scene.state() == "CompleteAbort"


def test_a_transaction_that_was_ended_in_time_is_left_alone(scene: Scene) -> None:
    scene.end(scene.begun())
    scene.advance(1)
    scene.begun()
    scene.advance(TIMEOUT_MS / 1000 - 0.5)
    assert scene.state() == "Ongoing"
    scene.advance(1)
    assert scene.state() == "CompleteAbort"


# Two phases


@proves("T4")
def test_a_two_phase_transaction_stays_open_through_time_and_failover_until_its_owner_ends_it(scene: Scene) -> None:
    producer = scene.begun(two_phase=True)
    for _ in range(3):
        scene.advance(86_400)
        scene.take_over()
    assert scene.coordinator.oldest_two_phase_ms() == 3 * 86_400_000
    found = scene.coordinator.describe(ID)
    assert (found.state, found.two_phase, found.owner.client_id) == ("Ongoing", True, "app")
    assert (found.producer_id, found.epoch) == (producer.producer_id, producer.epoch)
    assert scene.end(producer).reply.error_code == OK
    assert scene.coordinator.oldest_two_phase_ms() == 0
    assert scene.state() == "CompleteCommit"


@proves("T4")
def test_a_restarted_client_finds_its_two_phase_transaction_at_the_next_coordinator(scene: Scene) -> None:
    old = scene.begun(two_phase=True)
    scene.take_over()
    assert scene.init().reply.error_code == ErrorCode.INVALID_TXN_STATE
    new = scene.init(two_phase=True, keep=True, client_id="restarted").reply
    assert new == InitReply(OK, 1000, 1, 1000, 0)
    scene.take_over()
    assert scene.coordinator.describe(ID).owner.client_id == "restarted"
    assert scene.end(old).reply.error_code == ErrorCode.PRODUCER_FENCED
    assert scene.end(new).reply == EndReply(OK, 1000, 2)
    assert [(marker.epoch, marker.committed) for marker in scene.written] == [(1, True)]


def test_two_phases_may_be_switched_off() -> None:
    scene = Scene(TransactionLimits(two_phase=False))
    assert scene.init(two_phase=True).reply.error_code == ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    assert scene.init().reply.error_code == OK


# Limits


@pytest.mark.parametrize("timeout_ms", [0, -1, 900_001])
def test_a_timeout_out_of_bounds_is_refused(scene: Scene, timeout_ms: int) -> None:
    assert scene.init(timeout_ms=timeout_ms).reply.error_code == ErrorCode.INVALID_TRANSACTION_TIMEOUT
    assert scene.init(timeout_ms=900_000).reply.error_code == OK


def test_a_name_that_is_none_is_refused(scene: Scene) -> None:
    assert scene.init("").reply.error_code == ErrorCode.INVALID_REQUEST
    assert scene.init("x" * (ID_BYTES_MAX + 1)).reply.error_code == ErrorCode.INVALID_REQUEST
    assert scene.init("x" * ID_BYTES_MAX).reply.error_code == OK
    assert scene.add(InitReply(OK, 1, 1), name="").reply == ErrorCode.INVALID_REQUEST
    assert scene.end(InitReply(OK, 1, 1), "").reply.error_code == ErrorCode.INVALID_REQUEST
    assert scene.coordinator.describe("").error_code == ErrorCode.INVALID_REQUEST


def test_so_many_transactions_may_be_open_and_no_more() -> None:
    scene = Scene(TransactionLimits(open_max=3))
    producers = [scene.begun(f"id-{number}") for number in range(3)]
    more = scene.init("one-more").reply
    assert scene.add(more, name="one-more").reply == ErrorCode.CONCURRENT_TRANSACTIONS
    assert scene.add(producers[0], frozenset({("z", 0)}), "id-0").reply == OK
    scene.end(producers[0], "id-0")
    scene.held = True
    waiting = scene.add(more, name="one-more")
    other = scene.init("yet-another")
    scene.acknowledge()
    assert waiting.reply == OK
    assert scene.add(other.reply, name="yet-another").reply == ErrorCode.CONCURRENT_TRANSACTIONS


def test_so_many_transactional_ids_are_kept_and_no_more() -> None:
    scene = Scene(TransactionLimits(ids_max=2))
    assert [scene.init(f"id-{number}").reply.error_code for number in range(3)] == [OK, OK, ErrorCode.POLICY_VIOLATION]
    assert scene.init("id-0").reply.error_code == OK


def test_without_producer_ids_nobody_is_let_in(scene: Scene) -> None:
    scene.ids_held = True
    opening = scene.init()
    scene.hand_out_ids(none=True)
    assert opening.reply.error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE
    scene.ids_held = False
    assert scene.init().reply == InitReply(OK, 1000, 0)


# Expiry


def test_an_id_that_nobody_used_for_long_is_forgotten() -> None:
    scene = Scene(TransactionLimits(expiration_ms=100_000, expiry_check_ms=10_000, timeout_max_ms=10**9))
    for number in range(30):
        producer = scene.init(f"id-{number}").reply
        if number < 10:
            scene.add(producer, name=f"id-{number}")
        if number < 5:
            scene.end(producer, f"id-{number}")
    scene.coordinator.limits = TransactionLimits(
        expiration_ms=100_000, expiry_check_ms=10_000, timeout_max_ms=10**9, two_phase=True
    )
    scene.begun("prepared", two_phase=True)
    scene.advance(90)
    scene.init("id-7")  # has an open one, which is aborted
    scene.init("id-29")
    scene.advance(25)
    left = set(scene.listed())
    assert "prepared" in left
    assert "id-29" in left
    assert "id-12" not in left
    assert sum(scene.coordinator.states().values()) == len(left)
    tombstones = {key for key, value in scene.log[0] if value is None}
    assert encode_key("id-12") in tombstones
    scene.take_over()
    assert set(scene.listed()) == left


@proves("T4")
def test_an_id_of_two_phase_transactions_is_forgotten_sooner_but_never_while_one_is_open() -> None:
    scene = Scene(TransactionLimits(two_phase_expiration_ms=100_000, expiry_check_ms=10_000, timeout_max_ms=10**9))
    scene.init("plain")
    scene.init("empty", two_phase=True)
    scene.end(scene.begun("ended", two_phase=True), "ended")
    prepared = scene.begun("prepared", two_phase=True)
    scene.advance(90)
    assert set(scene.listed()) == {"plain", "empty", "ended", "prepared"}
    scene.advance(25)
    assert set(scene.listed()) == {"plain", "prepared"}
    scene.end(prepared, "prepared")
    scene.advance(115)
    assert set(scene.listed()) == {"plain"}
    scene.coordinator.limits = TransactionLimits(expiration_ms=1000, expiry_check_ms=10_000)
    scene.init("empty", two_phase=True)
    scene.advance(25)
    assert set(scene.listed()) == set(), "never longer than the others"


def test_an_id_whose_tombstone_is_on_its_way_answers_nobody() -> None:
    scene = Scene(TransactionLimits(expiration_ms=1000, expiry_check_ms=1000))
    producer = scene.init().reply
    scene.held = True
    scene.advance(2.5)
    assert scene.init().reply.error_code == ErrorCode.CONCURRENT_TRANSACTIONS
    assert scene.coordinator.describe(ID).error_code != OK
    scene.acknowledge(ErrorCode.NOT_ENOUGH_REPLICAS)
    scene.held = False
    assert scene.add(producer).reply == OK, "it was not forgotten after all"
    scene.end(producer)
    scene.advance(3)
    assert scene.add(EndReply(OK, 1000, 1)).reply == ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert scene.init().reply == InitReply(OK, 1001, 0)


# Metrics


@proves("T4")
def test_what_waits_is_told_by_its_age(scene: Scene) -> None:
    def told() -> dict[str, float]:
        samples = [one for one in scene.coordinator.samples() if one.value]
        return {f"{one.family.name}{list(one.labels)}": one.value for one in samples}

    scene.begun("plain")
    prepared = scene.begun("prepared", two_phase=True)
    scene.advance(5)
    assert told() == {
        "headrace_transactions['Ongoing']": 2,
        "headrace_two_phase_transaction_age_seconds[]": 5,
    }
    scene.markers_held = True
    scene.end(prepared, "prepared")
    scene.advance(3)
    assert told() == {
        "headrace_transactions['Ongoing']": 1,
        "headrace_transactions['PrepareCommit']": 1,
        "headrace_transaction_ending_age_seconds[]": 3,
    }


# Listing


def test_transactions_are_listed_by_state_producer_age_and_name(scene: Scene) -> None:
    scene.begun("old")
    scene.advance(5)
    young = scene.begun("young")
    scene.init("idle")

    def names(**filters: Any) -> set[str]:
        return set(scene.listed(ListFilter(**filters)))

    assert names() == {"old", "young", "idle"}
    assert names(states=frozenset({"Ongoing"})) == {"old", "young"}
    assert names(states=frozenset({"Empty", "CompleteAbort"})) == {"idle"}
    assert names(producer_ids={young.producer_id}) == {"young"}
    assert names(longer_than_ms=4000) == {"old"}
    assert names(longer_than_ms=0) == {"old"}
    assert names(matches=lambda name: name.startswith("y")) == {"young"}


def test_a_long_list_is_made_in_slices_while_others_are_served(scene: Scene) -> None:
    for number in range(LISTED_PER_TURN + 10):
        scene.init(f"id-{number}")
    slices = scene.coordinator.list_transactions(EVERYTHING)
    assert not isinstance(slices, int)
    first = next(slices)
    assert len(first) == LISTED_PER_TURN
    missing = {f"id-{number}" for number in range(LISTED_PER_TURN + 10)} - {one.transactional_id for one in first}
    scene.begun(min(missing))
    scene.begun("new")
    rest = [one for part in slices for one in part]
    assert {one.transactional_id: one.state for one in rest} == dict.fromkeys(missing, "Empty") | {
        min(missing): "Ongoing"
    }


def test_an_id_is_asked_for_at_the_leader_of_its_partition() -> None:
    scene = Scene(partitions=4)
    scene.coordinator.resign(partition_of(ID, 4))
    assert scene.init().reply.error_code == NOT_COORDINATOR
    scene.coordinator.partition_count = 0
    assert scene.init("x").reply.error_code == NOT_COORDINATOR


class FullScene(Scene):
    """Its log takes no record that is longer than the longest one until now."""

    full = False

    def append(self, partition: int, epoch: int, records: list[Record], done: AppendDone) -> None:
        longest = max((len(value or b"") for kept in self.log.values() for _, value in kept), default=0)
        if self.full and any(len(value or b"") > longest for _, value in records):
            done(ErrorCode.MESSAGE_TOO_LARGE)
        else:
            super().append(partition, epoch, records, done)


@proves("T2")
@pytest.mark.parametrize("version", [0, 2])
@pytest.mark.parametrize("how", ["commit", "timeout", "takeover", "epochs"])
def test_a_transaction_of_as_many_partitions_as_a_record_holds_can_be_ended(how: str, version: int) -> None:
    """Else its partitions would wait for their markers for ever."""
    scene = FullScene()
    producer = scene.init().reply
    if how == "epochs":  # the next producer gets another id
        producer = InitReply(OK, 1000, LAST_EPOCH)
        kept = Transaction(1000, LAST_EPOCH, timeout_ms=TIMEOUT_MS, update_ms=scene.clock.wall_ms())
        scene.log[0] = [(encode_key(ID), encode(kept))]
        scene.take_over()
    places = frozenset(("a-topic-with-a-name", index) for index in range(300))
    assert scene.add(producer, places, version=version).reply == ErrorCode.NONE
    scene.full = True
    if how == "timeout":
        scene.advance(TIMEOUT_MS / 1000 + 1)
    elif how == "takeover":
        scene.init(producer_id=producer.producer_id, epoch=producer.epoch)
    else:
        assert scene.end(producer, version=version).reply.error_code == ErrorCode.NONE
    assert [len(marker.partitions) for marker in scene.written] == [300]
    assert scene.state().startswith("Complete") or scene.state() == "Empty"
