"""The state table: each state and each event, for clients of both versions of transactions."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from headrace.errors import ErrorCode
from headrace.transactions.messages import AddRequest, EndReply, EndRequest, InitReply, InitRequest, Owner
from headrace.transactions.transaction import (
    COMPLETED,
    IDLE,
    LAST_EPOCH,
    NO_TIMEOUT_MS,
    PREPARED,
    Decision,
    Lack,
    State,
    Transaction,
    add,
    complete,
    end,
    end_reply,
    init,
    init_reply,
    time_out,
    verify,
)
from proving import proves

ID, EPOCH, NOW = 1000, 5, 1_700_000_000_000
FRESH = 2000
TIMEOUT_MS = 60_000
PLACES = frozenset({("a", 0), ("b", 3)})
V1, V2 = 1, 2
STATES = [state for state in State if state is not State.DEAD]
IDLE_STATES = [state for state in STATES if state in IDLE]
PREPARED_STATES = [state for state in STATES if state in PREPARED]
OPEN_INIT = InitRequest(TIMEOUT_MS)
TWO_PHASE = InitRequest(TIMEOUT_MS, two_phase=True)
KEEP = InitRequest(TIMEOUT_MS, two_phase=True, keep_prepared=True)


def kept_in(state: State, **changes: object) -> Transaction:
    """An id whose client has ID and EPOCH, with two partitions where a transaction is open."""
    partitions = frozenset() if state in IDLE else PLACES
    start_ms = -1 if state is State.EMPTY else NOW - 10
    number = -1 if state is State.EMPTY else 7
    made = Transaction(ID, EPOCH, state, TIMEOUT_MS, NOW - 5, start_ms, partitions, number, V1)
    return replace(made, **changes)  # type: ignore[arg-type]


def changed(decision: Decision) -> Transaction:
    assert isinstance(decision, Transaction), decision
    return decision


# InitProducerId


def test_a_new_id_gets_a_producer_id_and_epoch_zero() -> None:
    assert init(None, OPEN_INIT, NOW) is Lack.PRODUCER_ID
    owner = Owner("app", "10.0.0.1")
    made = changed(init(None, replace(OPEN_INIT, owner=owner), NOW, FRESH))
    assert made == Transaction(FRESH, 0, State.EMPTY, TIMEOUT_MS, NOW, owner=owner)
    assert init_reply(made) == InitReply(ErrorCode.NONE, FRESH, 0)


def test_who_names_an_id_that_is_not_known_any_more_gets_a_new_one() -> None:
    assert changed(init(None, InitRequest(TIMEOUT_MS, ID, EPOCH), NOW, FRESH)).client == (FRESH, 0)


@pytest.mark.parametrize("state", IDLE_STATES)
def test_a_producer_that_opens_the_id_gets_the_next_epoch_and_the_one_before_is_fenced(state: State) -> None:
    made = changed(init(kept_in(state), OPEN_INIT, NOW))
    assert (made.state, made.client, made.last, made.start_ms) == (State.EMPTY, (ID, EPOCH + 1), None, -1)
    assert end(made, EndRequest(ID, EPOCH, True, V2), NOW) == ErrorCode.PRODUCER_FENCED
    assert add(made, AddRequest(ID, EPOCH, PLACES), NOW) == ErrorCode.PRODUCER_FENCED
    assert init(made, InitRequest(TIMEOUT_MS, ID, EPOCH), NOW) == ErrorCode.PRODUCER_FENCED


@pytest.mark.parametrize("state", PREPARED_STATES)
def test_who_opens_the_id_while_its_transaction_is_being_ended_is_to_try_again(state: State) -> None:
    assert init(kept_in(state), OPEN_INIT, NOW) == ErrorCode.CONCURRENT_TRANSACTIONS


def test_who_opens_the_id_while_a_transaction_is_open_has_it_aborted_and_tries_again() -> None:
    fenced = changed(init(kept_in(State.ONGOING), OPEN_INIT, NOW))
    assert (fenced.state, fenced.client, fenced.partitions) == (State.PREPARE_ABORT, (ID, EPOCH + 1), PLACES)
    assert init_reply(fenced) == InitReply(ErrorCode.CONCURRENT_TRANSACTIONS)
    assert init(fenced, OPEN_INIT, NOW) == ErrorCode.CONCURRENT_TRANSACTIONS
    for version in (V1, V2):
        for committed in (True, False):
            assert end(fenced, EndRequest(ID, EPOCH, committed, version), NOW) == ErrorCode.PRODUCER_FENCED
    opened = changed(init(complete(fenced, NOW), OPEN_INIT, NOW))
    assert opened.client == (ID, EPOCH + 2)


@pytest.mark.parametrize("state", IDLE_STATES)
def test_a_producer_bumps_its_own_epoch_and_may_ask_again_when_it_was_not_answered(state: State) -> None:
    """KIP-360."""
    request = InitRequest(TIMEOUT_MS, ID, EPOCH)
    made = changed(init(kept_in(state), request, NOW))
    assert (made.client, made.last) == ((ID, EPOCH + 1), (ID, EPOCH))
    again = changed(init(made, request, NOW))
    assert again.client == (ID, EPOCH + 1)
    assert init(made, replace(request, epoch=EPOCH - 1), NOW) == ErrorCode.PRODUCER_FENCED
    assert init(made, replace(request, producer_id=ID + 1), NOW) == ErrorCode.PRODUCER_FENCED
    begun = changed(add(made, AddRequest(ID, EPOCH + 1, PLACES), NOW))
    assert init(begun, request, NOW) == ErrorCode.PRODUCER_FENCED  # by now it must have had the answer


def test_a_producer_that_asks_for_its_next_epoch_with_its_transaction_open_is_not_fenced_by_itself() -> None:
    request = InitRequest(TIMEOUT_MS, ID, EPOCH)
    aborting = changed(init(kept_in(State.ONGOING), request, NOW))
    assert aborting.state is State.PREPARE_ABORT
    assert init(aborting, request, NOW) == ErrorCode.CONCURRENT_TRANSACTIONS
    assert changed(init(complete(aborting, NOW), request, NOW)).client == (ID, EPOCH + 1)
    assert init(kept_in(State.ONGOING), replace(request, epoch=EPOCH - 1), NOW) == ErrorCode.PRODUCER_FENCED


def test_a_producer_whose_end_was_not_answered_may_go_on_with_its_next_epoch() -> None:
    ended = complete(changed(end(kept_in(State.ONGOING), EndRequest(ID, EPOCH, True, V2), NOW)), NOW)
    assert changed(init(ended, InitRequest(TIMEOUT_MS, ID, EPOCH), NOW)).client == (ID, EPOCH + 1)


@pytest.mark.parametrize("is_own", [False, True])
def test_when_epochs_are_used_up_the_next_producer_id_comes(is_own: bool) -> None:
    kept = kept_in(State.COMPLETE_COMMIT, epoch=LAST_EPOCH)
    request = InitRequest(TIMEOUT_MS, ID, LAST_EPOCH) if is_own else OPEN_INIT
    assert init(kept, request, NOW) is Lack.PRODUCER_ID
    made = changed(init(kept, request, NOW, FRESH))
    assert (made.client, made.last) == ((FRESH, 0), (ID, LAST_EPOCH) if is_own else None)
    if is_own:  # and the answer was lost
        assert changed(init(made, request, NOW)).client == (FRESH, 0)


def test_the_last_epoch_can_still_be_fenced_and_is_never_handed_out_above() -> None:
    for request in (OPEN_INIT, InitRequest(TIMEOUT_MS, ID, LAST_EPOCH)):
        fenced = changed(init(kept_in(State.ONGOING, epoch=LAST_EPOCH), request, NOW))
        assert fenced.epoch == LAST_EPOCH + 1
        ended = complete(fenced, NOW)
        assert init(ended, request, NOW) is Lack.PRODUCER_ID
        assert changed(init(ended, request, NOW, FRESH)).client == (FRESH, 0)
        assert end(ended, EndRequest(ID, LAST_EPOCH, False, V2), NOW) == ErrorCode.PRODUCER_FENCED


# Partitions


@pytest.mark.parametrize("state", IDLE_STATES)
def test_a_transaction_begins_with_its_first_partition(state: State) -> None:
    kept = kept_in(state)
    begun = changed(add(kept, AddRequest(ID, EPOCH, PLACES, V2), NOW))
    assert (begun.state, begun.partitions, begun.start_ms) == (State.ONGOING, PLACES, NOW)
    assert (begun.number, begun.transaction_version) == (kept.number + 1, V2)
    more = changed(add(begun, AddRequest(ID, EPOCH, frozenset({("c", 1)}), V2), NOW + 7))
    assert (more.partitions, more.start_ms, more.number) == (PLACES | {("c", 1)}, NOW, kept.number + 1)
    assert add(more, AddRequest(ID, EPOCH, PLACES, V2), NOW + 8) is more
    assert add(kept, AddRequest(ID, EPOCH, frozenset(), V2), NOW) is kept


@pytest.mark.parametrize("state", STATES)
def test_partitions_are_added_by_nobody_but_the_producer(state: State) -> None:
    kept = kept_in(state)
    assert add(None, AddRequest(ID, EPOCH, PLACES), NOW) == ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert add(kept, AddRequest(ID + 1, EPOCH, PLACES), NOW) == ErrorCode.INVALID_PRODUCER_ID_MAPPING
    for epoch in (EPOCH - 1, EPOCH + 1):
        assert add(kept, AddRequest(ID, epoch, PLACES), NOW) == ErrorCode.PRODUCER_FENCED
    if state in PREPARED:
        assert add(kept, AddRequest(ID, EPOCH, PLACES), NOW) == ErrorCode.CONCURRENT_TRANSACTIONS


@pytest.mark.parametrize("state", STATES)
def test_a_leader_hears_which_partitions_are_in_the_open_transaction(state: State) -> None:
    kept = kept_in(state)
    asked = AddRequest(ID, EPOCH, frozenset({("a", 0), ("z", 0)}))
    if state is State.ONGOING:
        assert verify(kept, asked) == {("a", 0): ErrorCode.NONE, ("z", 0): ErrorCode.TRANSACTION_ABORTABLE}
    else:
        expected = ErrorCode.CONCURRENT_TRANSACTIONS if state in PREPARED else ErrorCode.TRANSACTION_ABORTABLE
        assert set(verify(kept, asked).values()) == {expected}
    assert set(verify(kept, replace(asked, epoch=EPOCH - 1)).values()) == {ErrorCode.PRODUCER_FENCED}
    assert set(verify(kept, replace(asked, producer_id=1)).values()) == {ErrorCode.INVALID_PRODUCER_ID_MAPPING}
    assert set(verify(None, asked).values()) == {ErrorCode.INVALID_PRODUCER_ID_MAPPING}


# The end, version 1: the epoch stays


@pytest.mark.parametrize("committed", [True, False])
def test_version_one_ends_a_transaction_under_its_epoch(committed: bool) -> None:
    request = EndRequest(ID, EPOCH, committed, V1)
    ending = changed(end(kept_in(State.ONGOING), request, NOW))
    assert ending.state is (State.PREPARE_COMMIT if committed else State.PREPARE_ABORT)
    assert (ending.epoch, ending.client, ending.partitions) == (EPOCH, (ID, EPOCH), PLACES)
    assert end_reply(ending, request) == EndReply(ErrorCode.NONE)
    ended = complete(ending, NOW)
    assert ended.state is (State.COMPLETE_COMMIT if committed else State.COMPLETE_ABORT)
    assert (ended.client, ended.partitions) == ((ID, EPOCH), frozenset())
    for kept in (ending, ended):  # the answer was lost
        assert end(kept, request, NOW) is kept
        assert end(kept, replace(request, committed=not committed), NOW) == ErrorCode.INVALID_TXN_STATE


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("committed", [True, False])
def test_version_one_is_refused_by_kafkas_table(state: State, committed: bool) -> None:
    kept = kept_in(state)
    assert end(None, EndRequest(ID, EPOCH, committed), NOW) == ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert end(kept, EndRequest(ID + 1, EPOCH, committed), NOW) == ErrorCode.INVALID_PRODUCER_ID_MAPPING
    for epoch in (EPOCH - 1, EPOCH + 1):
        assert end(kept, EndRequest(ID, epoch, committed), NOW) == ErrorCode.PRODUCER_FENCED
    if state is State.EMPTY:
        assert end(kept, EndRequest(ID, EPOCH, committed), NOW) == ErrorCode.INVALID_TXN_STATE


# The end, version 2: each transaction has its epoch


@pytest.mark.parametrize("committed", [True, False])
def test_version_two_hands_out_the_next_epoch_with_each_end(committed: bool) -> None:
    """KIP-890: the markers have an epoch above that of the records, so that none can be taken for another's."""
    request = EndRequest(ID, EPOCH, committed, V2)
    ending = changed(end(kept_in(State.ONGOING), request, NOW))
    assert (ending.producer_id, ending.epoch, ending.transaction_version) == (ID, EPOCH + 1, V2)
    assert end_reply(ending, request) == EndReply(ErrorCode.NONE, ID, EPOCH + 1)
    ended = complete(ending, NOW)
    assert ended.client == (ID, EPOCH + 1)
    for kept in (ending, ended):
        assert end(kept, request, NOW) is kept
        assert end_reply(kept, request) == EndReply(ErrorCode.NONE, ID, EPOCH + 1)
        assert end(kept, replace(request, committed=not committed), NOW) == ErrorCode.INVALID_TXN_STATE
        assert end(kept, replace(request, epoch=EPOCH - 1), NOW) == ErrorCode.PRODUCER_FENCED
        fault = ErrorCode.CONCURRENT_TRANSACTIONS if kept is ending else ErrorCode.TRANSACTION_ABORTABLE
        assert set(verify(kept, AddRequest(ID, EPOCH + 1, PLACES)).values()) == {fault}
        assert set(verify(kept, AddRequest(ID, EPOCH, PLACES)).values()) == {ErrorCode.PRODUCER_FENCED}
    begun = changed(add(ended, AddRequest(ID, EPOCH + 1, PLACES, V2), NOW))
    assert end(begun, request, NOW) == ErrorCode.PRODUCER_FENCED  # a repetition that comes late


@pytest.mark.parametrize("state", IDLE_STATES)
def test_version_two_may_abort_what_the_coordinator_has_not_heard_of_and_commit_only_what_it_has(state: State) -> None:
    kept = kept_in(state)
    assert end(kept, EndRequest(ID, EPOCH, True, V2), NOW) == ErrorCode.INVALID_TXN_STATE
    request = EndRequest(ID, EPOCH, False, V2)
    ended = changed(end(kept, request, NOW))
    assert (ended.state, ended.client) == (State.COMPLETE_ABORT, (ID, EPOCH + 1))
    assert end(ended, request, NOW) is ended
    assert end(ended, replace(request, committed=True), NOW) == ErrorCode.INVALID_TXN_STATE


def test_version_two_gets_a_new_producer_id_when_epochs_are_used_up() -> None:
    for kept in (kept_in(State.ONGOING, epoch=LAST_EPOCH), kept_in(State.EMPTY, epoch=LAST_EPOCH)):
        request = EndRequest(ID, LAST_EPOCH, False, V2)
        assert end(kept, request, NOW) is Lack.PRODUCER_ID
        ending = changed(end(kept, request, NOW, FRESH))
        assert end_reply(ending, request) == EndReply(ErrorCode.NONE, FRESH, 0)
        if ending.state in PREPARED:
            assert (ending.producer_id, ending.epoch) == (ID, LAST_EPOCH + 1)  # of the markers
            assert end(ending, request, NOW) is ending
            ending = complete(ending, NOW)
        assert ending.state in COMPLETED
        assert ending.client == (FRESH, 0)
        assert end(ending, request, NOW) is ending
        assert end(ending, replace(request, epoch=LAST_EPOCH - 1), NOW) == ErrorCode.INVALID_PRODUCER_ID_MAPPING


def test_the_next_transaction_is_not_ended_before_the_last_one_has_been() -> None:
    ending = changed(end(kept_in(State.ONGOING), EndRequest(ID, EPOCH, True, V2), NOW))
    assert end(ending, EndRequest(ID, EPOCH + 1, False, V2), NOW) == ErrorCode.CONCURRENT_TRANSACTIONS


# Timeouts


@pytest.mark.parametrize("state", STATES)
def test_a_timeout_aborts_an_open_transaction_and_fences_its_producer(state: State) -> None:
    aborted = time_out(kept_in(state), NOW)
    if state is not State.ONGOING:
        assert aborted is None
        return
    assert aborted is not None
    assert (aborted.state, aborted.epoch, aborted.last) == (State.PREPARE_ABORT, EPOCH + 1, None)
    for version in (V1, V2):
        assert end(aborted, EndRequest(ID, EPOCH, True, version), NOW) == ErrorCode.PRODUCER_FENCED
    assert end(complete(aborted, NOW), EndRequest(ID, EPOCH, False, V2), NOW) == ErrorCode.PRODUCER_FENCED


# Two phases


def prepared() -> Transaction:
    return kept_in(State.ONGOING, timeout_ms=NO_TIMEOUT_MS)


@proves("T4")
def test_no_timeout_ends_a_two_phase_transaction() -> None:
    made = changed(init(None, TWO_PHASE, NOW, FRESH))
    assert made.two_phase
    assert time_out(prepared(), NOW + 10**12) is None


@proves("T4")
@pytest.mark.parametrize("committed", [True, False])
def test_a_producer_comes_back_for_its_two_phase_transaction_and_ends_it(committed: bool) -> None:
    """KIP-939: it hears which transaction is open, and gets an identity of its own to end it with."""
    kept = changed(init(prepared(), KEEP, NOW))
    assert init_reply(kept) == InitReply(ErrorCode.NONE, ID, EPOCH + 1, ID, EPOCH)
    assert end(kept, EndRequest(ID, EPOCH, committed, V2), NOW) == ErrorCode.PRODUCER_FENCED
    again = changed(init(kept, KEEP, NOW))
    assert init_reply(again) == InitReply(ErrorCode.NONE, ID, EPOCH + 2, ID, EPOCH)
    request = EndRequest(ID, EPOCH + 2, committed, V2)
    ending = changed(end(again, request, NOW))
    assert (ending.producer_id, ending.epoch, ending.number) == (ID, EPOCH + 1, 7)  # of the markers
    assert end_reply(ending, request) == EndReply(ErrorCode.NONE, ID, EPOCH + 3)
    ended = complete(ending, NOW)
    assert (ended.client, ended.next_producer_id) == ((ID, EPOCH + 3), -1)
    assert end(ended, request, NOW) is ended


@proves("T4")
@pytest.mark.parametrize("version", [V1, V2])
def test_a_two_phase_transaction_is_ended_from_anywhere_by_its_producer_id_and_epoch(version: int) -> None:
    assert changed(end(prepared(), EndRequest(ID, EPOCH, True, version), NOW)).state is State.PREPARE_COMMIT
    kept = changed(init(prepared(), KEEP, NOW))
    ending = changed(end(kept, EndRequest(ID, EPOCH + 1, True, version), NOW))
    assert (ending.state, ending.epoch, ending.transaction_version) == (State.PREPARE_COMMIT, EPOCH + 1, V2)
    assert complete(ending, NOW).client == (ID, EPOCH + (1 if version == V1 else 2))


@proves("T4")
def test_nothing_is_added_to_a_transaction_that_was_kept() -> None:
    kept = changed(init(prepared(), KEEP, NOW))
    asked = AddRequest(ID, EPOCH + 1, frozenset({("a", 0)}), V2)
    assert add(kept, asked, NOW) == ErrorCode.INVALID_TXN_STATE
    assert verify(kept, asked) == {("a", 0): ErrorCode.TRANSACTION_ABORTABLE}
    assert add(kept, replace(asked, epoch=EPOCH), NOW) == ErrorCode.PRODUCER_FENCED


@proves("T4")
def test_a_producer_without_two_phases_does_not_take_a_two_phase_transaction_away() -> None:
    assert init(prepared(), OPEN_INIT, NOW) == ErrorCode.INVALID_TXN_STATE
    assert init(prepared(), InitRequest(TIMEOUT_MS, ID, EPOCH), NOW) == ErrorCode.INVALID_TXN_STATE
    assert changed(init(prepared(), TWO_PHASE, NOW)).state is State.PREPARE_ABORT
    assert init(prepared(), InitRequest(TIMEOUT_MS, keep_prepared=True), NOW) == ErrorCode.INVALID_REQUEST


@proves("T4")
def test_keeping_a_transaction_at_the_last_epoch_takes_a_new_producer_id() -> None:
    open_one = prepared()
    open_one = replace(open_one, epoch=LAST_EPOCH)
    assert init(open_one, KEEP, NOW) is Lack.PRODUCER_ID
    kept = changed(init(open_one, KEEP, NOW, FRESH))
    assert init_reply(kept) == InitReply(ErrorCode.NONE, FRESH, 0, ID, LAST_EPOCH)
    fenced = changed(init(kept, TWO_PHASE, NOW))
    assert (fenced.producer_id, fenced.epoch, fenced.client) == (ID, LAST_EPOCH + 1, (FRESH, 1))
    assert complete(fenced, NOW).client == (FRESH, 1)


def test_a_kept_transaction_is_opened_as_one_where_none_is_open() -> None:
    assert init_reply(changed(init(kept_in(State.EMPTY), KEEP, NOW))) == InitReply(ErrorCode.NONE, ID, EPOCH + 1)


# Everything at once


@proves("T1")
def test_no_identity_is_handed_out_twice_and_epochs_of_markers_are_above_those_of_records(seed: int) -> None:
    """A random walk of producers of both versions, that take over from each other and repeat what they asked."""
    random_ = random.Random(seed)
    kept: Transaction | None = None
    handed: dict[tuple[int, int], int] = {}
    producers: list[tuple[int, int, int]] = []  # who, id, epoch
    for step in range(4000):
        fresh = step + 1
        who, producer_id, epoch = random_.choice(producers) if producers else (0, -1, -1)
        version = V2 if who % 2 else V1
        match random_.randrange(6):
            case 0:
                decision = init(kept, OPEN_INIT, step, fresh)
                if isinstance(decision, Transaction) and decision.state is State.EMPTY:
                    assert decision.client not in handed
                    handed[decision.client] = step
                    producers = [*producers[-3:], (step, *decision.client)]
            case 1:
                decision = init(kept, InitRequest(1, producer_id, epoch), step, fresh)
                if isinstance(decision, Transaction) and decision.state is State.EMPTY:
                    assert (
                        handed.setdefault(decision.client, who) == who or kept is None or decision.client == kept.client
                    )
                    producers.append((who, *decision.client))
            case 2 | 3:
                decision = add(kept, AddRequest(producer_id, epoch, frozenset({("t", step % 9)}), version), step)
            case 4:
                request = EndRequest(producer_id, epoch, random_.random() < 0.5, version)
                decision = end(kept, request, step, fresh)
                if isinstance(decision, Transaction) and version == V2:
                    assert handed.setdefault(decision.client, who) == who
                    producers.append((who, *decision.client))
            case _:
                decision = ErrorCode.NONE if kept is None else (time_out(kept, step) or ErrorCode.NONE)
        if isinstance(decision, Transaction):
            if kept is not None and kept.state is State.ONGOING and decision.state in PREPARED:
                bumps = decision.transaction_version >= V2
                assert (decision.producer_id, decision.epoch) == (kept.producer_id, kept.epoch + bumps)
                assert decision.partitions == kept.partitions
            kept = decision
        if kept is not None and kept.state in PREPARED and random_.random() < 0.6:
            kept = complete(kept, step)
        if kept is not None and random_.random() < 0.01 and kept.state in IDLE:
            kept = replace(kept, epoch=LAST_EPOCH - 2, producer_id=10**6 + step, last_epoch=-1)
    assert len(handed) > 50
