"""Transactions of the producer for threads: all or nothing, whatever happens in between."""

from __future__ import annotations

import pickle
import threading
import uuid
from collections.abc import Iterable

import pytest

import headrace
from brokers import Broker, wait_for
from client.conftest import MakeTopic
from client.wire_tap import Seen, WireTap
from headrace import (
    Admin,
    Consumer,
    NotHeld,
    NoTransaction,
    PreparedTransaction,
    Producer,
    SettingError,
    TransactionFailed,
    TransactionFenced,
    TransactionInDoubt,
    TransactionRefused,
    TransactionTimedOut,
    abort_prepared,
    commit_prepared,
)
from headrace.errors import InvalidRequest
from headrace.wire import api as apis
from headrace.wire.message import Message
from proving import proves

DEADLINE_S = 60.0


def new_id() -> str:
    return f"transactions-{uuid.uuid4().hex[:12]}"


def visible(bootstrap: str, topics: str | Iterable[str]) -> list[bytes]:
    """Values that a reader of committed records gets: all up to where each partition can be read now."""
    names = [topics] if isinstance(topics, str) else list(topics)
    with Consumer(names, bootstrap=bootstrap) as consumer:
        found: list[bytes] = []
        while sum(consumer.lag().values()):
            found += [record.value for record in consumer.poll(100)]
        return found


@proves("T3")
def test_a_block_commits_and_an_exception_in_it_aborts_and_goes_on(broker: Broker, topic: MakeTopic) -> None:
    name, other = topic(partitions=3), topic()
    with Producer(broker.bootstrap, transactional_id=new_id()) as producer:
        with producer.transaction() as t:
            kept = [t.send(name, b"kept %d" % nth, key=b"%d" % nth) for nth in range(50)]
            t.send(other, b"kept too")
        assert all(delivery.result().offset >= 0 for delivery in kept)
        with pytest.raises(KeyError, match="mine"), producer.transaction() as t:  # noqa: PT012
            written = t.send(name, b"written, and aborted", partition=0)
            producer.flush()
            assert written.result().offset >= 0
            late = t.send(name, b"never written", partition=1)
            raise KeyError("mine")
        assert isinstance(late.exception(), headrace.NotDelivered)
        with producer.transaction() as t:
            assert producer.send(name, b"again").offset >= 0
        with producer.transaction():
            pass
    assert sorted(visible(broker.bootstrap, name)) == sorted([*(b"kept %d" % nth for nth in range(50)), b"again"])
    assert visible(broker.bootstrap, other) == [b"kept too"]


@proves("T3")
def test_records_are_seen_when_their_transaction_is_committed_and_not_before(broker: Broker, topic: MakeTopic) -> None:
    name = topic()
    with Producer(broker.bootstrap, transactional_id=new_id()) as producer, Producer(broker.bootstrap) as plain:
        t = producer.transaction()
        t.begin()
        t.send(name, b"in it")
        producer.flush()
        plain.send(name, b"behind it")
        assert visible(broker.bootstrap, name) == []
        with Consumer(name, bootstrap=broker.bootstrap, isolation="uncommitted") as consumer:
            seen = [record.value for record in consumer.poll(10_000)]
        assert seen[:1] == [b"in it"]
        t.commit()
        wait_for("what was committed", lambda: visible(broker.bootstrap, name) == [b"in it", b"behind it"], DEADLINE_S)
        t = producer.transaction()
        t.begin()
        t.send(name, b"not this")
        t.abort()
    assert visible(broker.bootstrap, name) == [b"in it", b"behind it"]


def test_arrow_batches_leave_aborted_records_out_too(broker: Broker, topic: MakeTopic) -> None:
    name = topic()
    with Producer(broker.bootstrap, transactional_id=new_id()) as producer:
        for nth in range(6):
            t = producer.transaction()
            t.begin()
            for _ in range(10):
                t.send(name, b"%d" % nth)
            producer.flush()
            (t.commit if nth % 2 else t.abort)()
    with Consumer(name, bootstrap=broker.bootstrap) as consumer:
        rows: list[bytes] = []
        for batch in consumer.batches(columns=("value",), timeout_ms=10_000):
            rows += batch["value"].to_pylist()
            if len(rows) >= 30:
                break
    assert rows == [b"%d" % nth for nth in (1, 3, 5) for _ in range(10)]


@proves("T3")
def test_offsets_of_a_consumer_are_saved_with_the_records_or_not_at_all(broker: Broker, topic: MakeTopic) -> None:
    source, target, group = topic(partitions=2), topic(), new_id()
    with Producer(broker.bootstrap) as plain:
        for nth in range(100):
            plain.send_async(source, b"%d" % nth, partition=nth % 2)
    with (
        Admin(broker.bootstrap) as admin,
        Producer(broker.bootstrap, transactional_id=new_id()) as producer,
        Consumer(source, bootstrap=broker.bootstrap, group=group, commit_interval_ms=0) as consumer,
    ):
        done = 0
        while done < 100:
            records = consumer.poll(1000, max_records=30)
            done += len(records)
            with producer.transaction() as t:
                for record in records:
                    t.send(target, b"made of " + (record.value or b""))
                t.send_offsets(consumer)
        assert admin.group_offsets(group) == {(source, 0): 50, (source, 1): 50}
        with pytest.raises(ZeroDivisionError), producer.transaction() as t:  # noqa: PT012
            t.send_offsets({(source, 0): 7}, group)
            raise ZeroDivisionError
        assert admin.group_offsets(group) == {(source, 0): 50, (source, 1): 50}
    assert sorted(visible(broker.bootstrap, target)) == sorted(b"made of %d" % nth for nth in range(100))


@proves("T3")
def test_a_member_that_the_group_has_given_up_cannot_commit_its_offsets(broker: Broker, topic: MakeTopic) -> None:
    source, group = topic(), new_id()
    with Producer(broker.bootstrap) as plain:
        plain.send(source, b"x")
    with (
        Admin(broker.bootstrap) as admin,
        Producer(broker.bootstrap, transactional_id=new_id()) as producer,
        Consumer(source, bootstrap=broker.bootstrap, group=group, commit_interval_ms=0) as consumer,
    ):
        assert consumer.poll(60_000)
        offsets, member = consumer.transactional_progress()
        assert offsets == {(source, 0): 1}
        zombie = type(member)(group, member.member_id, member.generation - 1)
        with pytest.raises(TransactionFailed, match="without this member"), producer.transaction() as t:
            t.send_offsets(offsets, zombie)
        stranger = type(member)(group, "nobody", member.generation)
        with pytest.raises(TransactionFailed, match="abort it"), producer.transaction() as t:
            t.send_offsets(offsets, stranger)
        assert admin.group_offsets(group) == {}
        with producer.transaction() as t:
            t.send_offsets(consumer)
        wait_for("the offset", lambda: admin.group_offsets(group) == {(source, 0): 1}, DEADLINE_S)


def test_a_consumer_that_saves_by_itself_or_has_no_group_is_refused(broker: Broker, topic: MakeTopic) -> None:
    name = topic()
    with Producer(broker.bootstrap, transactional_id=new_id()) as producer:
        with Consumer(name, bootstrap=broker.bootstrap, group=new_id()) as consumer:  # noqa: SIM117
            with pytest.raises(InvalidRequest, match="commit_interval_ms=0"), producer.transaction() as t:
                t.send_offsets(consumer)
        with Consumer(name, bootstrap=broker.bootstrap) as consumer:  # noqa: SIM117
            with pytest.raises(InvalidRequest, match="no group"), producer.transaction() as t:
                t.send_offsets(consumer)
        with pytest.raises(InvalidRequest, match="give its name"), producer.transaction() as t:
            t.send_offsets({(name, 0): 1})


@proves("T3")
def test_the_producer_that_begins_last_fences_the_one_before(broker: Broker, topic: MakeTopic) -> None:
    name, transactional_id = topic(), new_id()
    with (
        Producer(broker.bootstrap, transactional_id=transactional_id) as old,
        Producer(broker.bootstrap, transactional_id=transactional_id) as new,
    ):
        with (  # noqa: PT012
            pytest.raises(TransactionFenced, match="another producer has taken over") as fenced,
            old.transaction() as t,
        ):
            t.send(name, b"of the old one")
            old.flush()
            with new.transaction() as mine:
                mine.send(name, b"of the new one")
            t.send(name, b"of the old one again")
        assert "make a new Producer" in str(fenced.value)
        with pytest.raises(TransactionFenced), old.transaction():
            pass
        with pytest.raises(TransactionFenced):
            old.send(name, b"nor outside")
        with new.transaction() as mine:
            mine.send(name, b"of the new one")
    assert visible(broker.bootstrap, name) == [b"of the new one"] * 2


def test_a_producer_with_a_transactional_id_sends_in_transactions_only(broker: Broker, topic: MakeTopic) -> None:
    name = topic()
    with Producer(broker.bootstrap, transactional_id=new_id()) as producer:
        with pytest.raises(NoTransaction, match=r"with producer.transaction"):
            producer.send_async(name, b"x")
        with producer.transaction() as t:
            with pytest.raises(NoTransaction, match="one at a time"):
                producer.transaction().begin()
            with pytest.raises(SettingError, match="acks=-1"):
                producer.send_async(name, b"x", acks=1)
            with pytest.raises(SettingError, match="keep their order"):
                producer.send_ordered(name, b"x", b"key")
            t.send(name, b"kept")
        with pytest.raises(NoTransaction):
            t.commit()
    with Producer(broker.bootstrap) as plain, pytest.raises(NoTransaction, match=r"transactional_id='...'"):
        plain.transaction()
    assert visible(broker.bootstrap, name) == [b"kept"]
    with pytest.raises(SettingError, match="idempotent"):
        Producer(broker.bootstrap, transactional_id="x", acks=1)
    with pytest.raises(SettingError, match="give a name"):
        Producer(broker.bootstrap, transactional_id="")


@proves("T3")
def test_a_record_that_fails_aborts_its_transaction_and_the_next_one_works(broker: Broker, topic: MakeTopic) -> None:
    name = topic(max_message_bytes=2000)
    with Producer(broker.bootstrap, transactional_id=new_id()) as producer:
        with pytest.raises(TransactionFailed, match="begin again"), producer.transaction() as t:  # noqa: PT012
            t.send(name, b"small")
            producer.flush()
            large = t.send(name, b"x" * 5000)
        assert large.exception() is not None
        with pytest.raises(TransactionFailed), producer.transaction() as t:  # noqa: PT012
            t.send(name, b"x" * 5000).exception()
            t.send(name, b"refused at once")
        for nth in range(3):
            with producer.transaction() as t:
                t.send(name, b"after %d" % nth)
    assert visible(broker.bootstrap, name) == [b"after 0", b"after 1", b"after 2"]


def test_closing_a_producer_aborts_its_open_transaction(broker: Broker, topic: MakeTopic) -> None:
    name, transactional_id = topic(), new_id()
    producer = Producer(broker.bootstrap, transactional_id=transactional_id)
    t = producer.transaction()
    t.begin()
    t.send(name, b"left open")
    producer.flush()
    t.send(name, b"not even sent")
    producer.close()
    with Producer(broker.bootstrap) as plain:
        plain.send(name, b"readers come as far as this")
    wait_for("the marker", lambda: visible(broker.bootstrap, name) == [b"readers come as far as this"], DEADLINE_S)


@proves("T3")
def test_threads_send_into_one_transaction(broker: Broker, topic: MakeTopic) -> None:
    name = topic(partitions=4)
    with Producer(broker.bootstrap, transactional_id=new_id(), batch_bytes=2000) as producer:
        for turn in range(3):
            with producer.transaction() as t:

                def send(of: int, turn: int = turn) -> None:
                    for nth in range(500):
                        producer.send_async(name, b"%d-%d-%d" % (turn, of, nth), key=b"%d" % nth)

                threads = [threading.Thread(target=send, args=(of,)) for of in range(3)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                if turn == 1:
                    t.abort()
    wanted = {b"%d-%d-%d" % (turn, of, nth) for turn in (0, 2) for of in range(3) for nth in range(500)}
    found = visible(broker.bootstrap, name)
    assert len(found) == len(wanted)
    assert set(found) == wanted


@proves("T4")
def test_a_prepared_transaction_is_ended_by_whoever_has_it(broker: Broker, topic: MakeTopic) -> None:
    name = topic(partitions=2)
    prepared: list[PreparedTransaction] = []
    for nth in range(6):
        with Producer(broker.bootstrap, transactional_id=f"{new_id()}-{nth}") as producer:
            with producer.transaction(two_phase=True) as t:
                t.send(name, b"%d" % nth)
                prepared.append(t.prepare())
                with pytest.raises(NoTransaction, match="prepared"):
                    producer.send_async(name, b"late")
            with pytest.raises(NoTransaction, match="not ended yet"):
                producer.transaction(two_phase=True).begin()
    assert visible(broker.bootstrap, name) == []
    again = [PreparedTransaction.parse(str(each)) for each in pickle.loads(pickle.dumps(prepared))]
    assert again == prepared
    commit_prepared(again[:4], broker.bootstrap)
    commit_prepared(again[:2], broker.bootstrap)
    abort_prepared(again[4], broker.bootstrap)
    with pytest.raises(TransactionRefused, match=r"1 of 2 transactions could not be committed.*aborted before"):
        commit_prepared(again[4:], broker.bootstrap)
    wanted = [b"0", b"1", b"2", b"3", b"5"]
    wait_for("all that was committed", lambda: sorted(visible(broker.bootstrap, name)) == wanted, DEADLINE_S)
    with pytest.raises(InvalidRequest, match="no prepared transaction"):
        PreparedTransaction.parse('{"transactional_id": 7}')


@proves("T4")
def test_a_producer_goes_on_when_another_has_ended_what_it_prepared(broker: Broker, topic: MakeTopic) -> None:
    name = topic()
    with Producer(broker.bootstrap, transactional_id=new_id()) as producer:
        for nth in range(3):
            with producer.transaction(two_phase=True) as t:
                t.send(name, b"%d" % nth)
                prepared = t.prepare()
            commit_prepared(prepared, broker.bootstrap)
        with producer.transaction(two_phase=True) as t:
            t.send(name, b"3")
            t.prepare()
            t.commit()
        with producer.transaction() as t:
            t.send(name, b"4")
        with pytest.raises(NoTransaction, match="two_phase=True"), producer.transaction() as t:
            t.prepare()
    wait_for("all", lambda: visible(broker.bootstrap, name) == [b"%d" % nth for nth in range(5)], DEADLINE_S)


@proves("T3")
def test_coordinators_that_are_not_ready_are_asked_again(
    tapped: tuple[WireTap, Broker], tap: WireTap, topic: MakeTopic
) -> None:
    refused = {apis.INIT_PRODUCER_ID: [14, 51], apis.END_TXN: [51, 16, 15], apis.TXN_OFFSET_COMMIT: [14, 16]}
    broker = tapped[1]

    def change(seen: Seen, answer: Message) -> None:
        # The broker has done it: what is asked again must count once.
        if refused.get(seen.api_key):
            code = refused[seen.api_key].pop()
            if seen.api_key == apis.TXN_OFFSET_COMMIT:
                answer.topics[0].partitions[0].error_code = code
            else:
                answer.error_code = code

    name, group = f"tapped-{uuid.uuid4().hex[:8]}", new_id()
    with Admin(broker.bootstrap) as admin:
        admin.create_topic(name)
        tap.change = change
        with Producer(broker.bootstrap, transactional_id=new_id()) as producer:
            for nth in range(2):
                with producer.transaction() as t:
                    t.send(name, b"%d" % nth)
                    t.send_offsets({(name, 0): nth}, group)
        assert not any(refused.values())
        wait_for("the offset", lambda: admin.group_offsets(group) == {(name, 0): 1}, DEADLINE_S)
    assert visible(broker.bootstrap, name) == [b"0", b"1"]


def test_partitions_that_went_with_what_was_handed_out_are_not_in_any_transaction(
    broker: Broker, topic: MakeTopic
) -> None:
    source, group = topic(), new_id()
    with Producer(broker.bootstrap) as plain:
        plain.send(source, b"x")
    with Consumer(
        source, bootstrap=broker.bootstrap, group=group, commit_interval_ms=0, rebalance_timeout_ms=1000
    ) as consumer:
        assert consumer.poll(60_000)

        def given_up() -> bool:
            try:
                consumer.transactional_progress()
            except NotHeld:
                return True
            return False

        # Who does not poll for so long leaves the group.
        wait_for("the group to go on without it", given_up, DEADLINE_S)


@proves("T3")
@pytest.mark.parametrize("commit", [True, False])
def test_an_end_whose_answer_is_lost_is_asked_for_again_and_counts_once(
    tapped: tuple[WireTap, Broker], tap: WireTap, commit: bool
) -> None:
    broker, name, left = tapped[1], f"tapped-{uuid.uuid4().hex[:8]}", [1, 1]
    with Admin(broker.bootstrap) as admin:
        admin.create_topic(name)
    tap.lost = lambda seen: seen.api_key == apis.END_TXN and bool(left) and bool(left.pop())
    with Producer(broker.bootstrap, transactional_id=new_id()) as producer:
        t = producer.transaction()
        t.begin()
        t.send(name, b"lost and found")
        producer.flush()
        if commit:
            t.commit()
        else:
            t.abort()
        with producer.transaction() as t:
            t.send(name, b"next")
    assert (left, len(tap.of(apis.END_TXN))) == ([], 4)
    expected = [b"lost and found", b"next"] if commit else [b"next"]
    wait_for("the end", lambda: visible(broker.bootstrap, name) == expected, DEADLINE_S)


@proves("T3")
def test_a_commit_that_nobody_answers_is_in_doubt_until_it_is_asked_for_again(
    tapped: tuple[WireTap, Broker], tap: WireTap
) -> None:
    broker, name = tapped[1], f"tapped-{uuid.uuid4().hex[:8]}"
    with Admin(broker.bootstrap) as admin:
        admin.create_topic(name)
    with Producer(broker.bootstrap, transactional_id=new_id(), delivery_timeout_ms=1500) as producer:
        tap.lost = lambda seen: seen.api_key == apis.END_TXN
        with pytest.raises(TransactionInDoubt, match="call commit"), producer.transaction() as t:
            t.send(name, b"in doubt")
        wait_for("what the broker has done", lambda: visible(broker.bootstrap, name) == [b"in doubt"], DEADLINE_S)
        with pytest.raises(NoTransaction, match="is not known"):
            producer.transaction().begin()
        with pytest.raises(NoTransaction, match="is not known"):
            t.abort()
        tap.lost = lambda seen: False
        t.commit()
        with producer.transaction() as t:
            t.send(name, b"next")
    wait_for("the next", lambda: visible(broker.bootstrap, name) == [b"in doubt", b"next"], DEADLINE_S)


@proves("T3")
def test_a_transaction_that_was_open_for_too_long_says_so_and_the_next_one_works(
    broker: Broker, topic: MakeTopic
) -> None:
    name, transactional_id = topic(), new_id()
    with (
        Admin(broker.bootstrap) as admin,
        Producer(broker.bootstrap, transactional_id=transactional_id, transaction_timeout_ms=100) as producer,
    ):

        def aborted() -> bool:
            (found,) = admin.describe_transactions([transactional_id])
            return found.state == "CompleteAbort"

        t = producer.transaction()
        t.begin()
        t.send(name, b"too late")
        producer.flush()
        wait_for("the broker to abort it", aborted, DEADLINE_S)
        with pytest.raises(TransactionTimedOut, match="transaction_timeout_ms"):
            t.commit()
        with producer.transaction() as t:
            t.send(name, b"next")
    wait_for("the next", lambda: visible(broker.bootstrap, name) == [b"next"], DEADLINE_S)


@proves("T3")
def test_a_transaction_that_was_open_for_too_long_takes_its_id_from_nobody(broker: Broker, topic: MakeTopic) -> None:
    name, transactional_id = topic(), new_id()
    with (
        Producer(broker.bootstrap, transactional_id=transactional_id, transaction_timeout_ms=100) as first,
        Producer(broker.bootstrap, transactional_id=transactional_id) as second,
    ):
        t = first.transaction()
        t.begin()
        t.send(name, b"too late")
        first.flush()
        other = second.transaction()
        other.begin()
        other.send(name, b"of the other")
        with pytest.raises(TransactionFenced):
            t.commit()
        other.commit()
    wait_for("the other", lambda: visible(broker.bootstrap, name) == [b"of the other"], DEADLINE_S)
