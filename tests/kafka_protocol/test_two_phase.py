"""Two-phase transactions outlive every process but their decision: kill -9 of the broker, which coordinates them and
leads what they wrote to, and another client that ends them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from brokers import Broker, wait_for
from headrace.errors import ErrorCode
from headrace.records import kernel
from headrace.records.batch import TRANSACTIONAL, batches
from headrace.wire import api as apis
from headrace.wire.message import Message
from kafka_protocol.raw import NOW_MS, Raw
from kafka_protocol.test_transaction_requests import described, end, init
from proving import proves

Connect = Callable[[Broker], Raw]
NAME = "sink-7"
PRODUCE_VERSION = 12
COMMITTED = 1


def produce(raw: Raw, topic: str, who: Any, value: bytes, sequence: int = 0) -> int:
    batch, _ = kernel.build_with_header(
        [(NOW_MS, None, value, ())], TRANSACTIONAL, producer=(who.producer_id, who.producer_epoch, sequence)
    )
    answer = raw.call(
        apis.PRODUCE,
        PRODUCE_VERSION,
        transactional_id=NAME,
        acks=-1,
        timeout_ms=10_000,
        topic_data=[Message(name=topic, partition_data=[Message(index=0, records=bytes(batch))])],
    )
    code: int = answer.responses[0].partition_responses[0].error_code
    return code


def committed_values(raw: Raw, topic: str) -> list[bytes | None]:
    """What a consumer with read_committed gets."""
    partition = Message(
        partition=0,
        current_leader_epoch=-1,
        fetch_offset=0,
        last_fetched_epoch=-1,
        log_start_offset=-1,
        partition_max_bytes=1 << 20,
    )
    answer = raw.call(
        apis.FETCH,
        12,
        replica_id=-1,
        max_wait_ms=0,
        min_bytes=1,
        max_bytes=1 << 24,
        isolation_level=COMMITTED,
        session_id=0,
        session_epoch=-1,
        topics=[Message(topic=topic, partitions=[partition])],
        forgotten_topics_data=[],
        rack_id="",
    )
    found = answer.responses[0].partitions[0]
    assert found.error_code == ErrorCode.NONE
    aborted = {(one.producer_id, one.first_offset) for one in found.aborted_transactions or []}
    values: list[bytes | None] = []
    for header, view in batches(memoryview(found.records or b"")):
        if not header.is_control and not any(
            header.producer_id == producer_id and header.base_offset >= first for producer_id, first in aborted
        ):
            values += [record.value for record in kernel.records(view)]
    return values


def serving(raw: Raw) -> Any:
    """The transaction, once its coordinator has loaded it after a restart."""

    def loaded() -> Any:
        found = described(raw, NAME)
        return found if found.error_code == ErrorCode.NONE else None

    return wait_for("the coordinator", loaded)


@proves("T4")
@pytest.mark.parametrize("layout", ["partitioned", "shared"])
@pytest.mark.parametrize("committed", [True, False])
def test_a_two_phase_transaction_survives_kills_and_is_ended_from_another_process(
    fresh_broker: Callable[..., Broker], connect: Connect, layout: str, committed: bool
) -> None:
    broker = fresh_broker(settings={"log.layout": layout, "transaction.max.timeout.ms": 1000})
    raw = connect(broker)
    raw.create("orders", 1)
    producer = init(raw, NAME, enable2_pc=True, transaction_timeout_ms=0)
    assert produce(raw, "orders", producer, b"prepared") == ErrorCode.NONE
    for _ in range(2):
        broker.kill()
        broker.start()
    other = connect(broker)
    found = serving(other)
    assert (found.transaction_state, found.producer_id, found.producer_epoch) == ("Ongoing", producer.producer_id, 0)
    assert found.transaction_timeout_ms == 2**31 - 1
    assert committed_values(other, "orders") == []
    assert end(other, NAME, found, committed=committed).error_code == ErrorCode.NONE
    broker.kill()
    broker.start()
    last = connect(broker)
    wait_for("the markers", lambda: serving(last).transaction_state.startswith("Complete"))
    assert committed_values(last, "orders") == ([b"prepared"] if committed else [])


@proves("T4")
def test_a_restarted_client_finds_what_it_had_prepared_and_the_one_before_is_fenced(
    fresh_broker: Callable[..., Broker], connect: Connect
) -> None:
    broker = fresh_broker()
    raw = connect(broker)
    raw.create("orders", 1)
    producer = init(raw, NAME, enable2_pc=True)
    assert produce(raw, "orders", producer, b"prepared") == ErrorCode.NONE
    broker.kill()
    broker.start()
    again = connect(broker)
    serving(again)
    kept = init(again, NAME, enable2_pc=True, keep_prepared_txn=True)
    assert (kept.ongoing_txn_producer_id, kept.ongoing_txn_producer_epoch) == (producer.producer_id, 0)
    assert end(again, NAME, producer).error_code == ErrorCode.PRODUCER_FENCED
    ended = end(again, NAME, kept)
    assert ended.error_code == ErrorCode.NONE
    wait_for("the record", lambda: committed_values(again, "orders") == [b"prepared"])
    assert produce(again, "orders", producer, b"late", 1) != ErrorCode.NONE
    assert produce(again, "orders", ended, b"next") == ErrorCode.NONE
    assert end(again, NAME, ended).error_code == ErrorCode.NONE
    wait_for("the next", lambda: committed_values(again, "orders") == [b"prepared", b"next"])


@proves("T1")
def test_a_transaction_that_is_open_for_too_long_is_aborted_and_lets_its_readers_go_on(
    fresh_broker: Callable[..., Broker], connect: Connect
) -> None:
    broker = fresh_broker()
    raw = connect(broker)
    raw.create("orders", 1)
    producer = init(raw, NAME, transaction_timeout_ms=200)
    assert produce(raw, "orders", producer, b"too late") == ErrorCode.NONE
    batch = bytes(kernel.build([(NOW_MS, None, b"plain", ())]))
    assert raw.produce("orders", batch).error_code == ErrorCode.NONE
    wait_for("the timeout", lambda: committed_values(raw, "orders") == [b"plain"])
    assert end(raw, NAME, producer).error_code == ErrorCode.PRODUCER_FENCED
    assert produce(raw, "orders", producer, b"later still", 1) == ErrorCode.INVALID_PRODUCER_EPOCH
    assert serving(raw).transaction_state == "CompleteAbort"
