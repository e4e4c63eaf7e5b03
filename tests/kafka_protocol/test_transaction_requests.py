"""Transactions on the wire: every API of their coordinator in each version, and bad input by Kafka's codes."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest

from brokers import Broker, wait_for
from headrace.errors import ErrorCode
from headrace.kafka.api.add_partitions_to_txn import TRANSACTIONS_MAX
from headrace.transactions.markers import PLACES_PER_REQUEST
from headrace.wire import api as apis
from headrace.wire.message import Message
from kafka_protocol.raw import Raw
from proving import proves

Connect = Callable[[Broker], Raw]
LOADING = (ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, ErrorCode.COORDINATOR_NOT_AVAILABLE, ErrorCode.NOT_COORDINATOR)
TIMEOUT_MS = 60_000
NO_PID, NO_EPOCH = -1, -1


@pytest.fixture
def name() -> str:
    return f"id-{uuid.uuid4()}"


def find(raw: Raw, name: str, version: int = 4) -> Any:
    if version >= 4:
        return raw.call(apis.FIND_COORDINATOR, version, key_type=1, coordinator_keys=[name]).coordinators[0]
    return raw.call(apis.FIND_COORDINATOR, version, key_type=1, key=name)


def init(raw: Raw, name: str, version: int = 6, **fields: Any) -> Any:
    """The answer, once the id has its coordinator."""

    def answered() -> Any:
        assert find(raw, name).error_code == ErrorCode.NONE
        body = {"transaction_timeout_ms": TIMEOUT_MS, "producer_id": NO_PID, "producer_epoch": NO_EPOCH, **fields}
        answer = raw.call(apis.INIT_PRODUCER_ID, version, transactional_id=name, **body)
        return answer if answer.error_code not in LOADING else None

    return wait_for("the coordinator", answered)


def add(raw: Raw, name: str, who: Any, topic: str, partitions: list[int], version: int = 3) -> list[int]:
    """The codes of the partitions."""
    topics = [Message(name=topic, partitions=partitions)]
    if version < 4:
        answer = raw.call(
            apis.ADD_PARTITIONS_TO_TXN,
            version,
            v3_and_below_transactional_id=name,
            v3_and_below_producer_id=who.producer_id,
            v3_and_below_producer_epoch=who.producer_epoch,
            v3_and_below_topics=topics,
        )
        found = answer.results_by_topic_v3_and_below
    else:
        asked = Message(
            transactional_id=name,
            producer_id=who.producer_id,
            producer_epoch=who.producer_epoch,
            verify_only=False,
            topics=topics,
        )
        answer = raw.call(apis.ADD_PARTITIONS_TO_TXN, version, transactions=[asked])
        assert answer.error_code == ErrorCode.NONE
        assert [one.transactional_id for one in answer.results_by_transaction] == [name]
        found = answer.results_by_transaction[0].topic_results
    return [row.partition_error_code for one in found for row in one.results_by_partition]


def end(raw: Raw, name: str, who: Any, version: int = 5, *, committed: bool = True) -> Any:
    return raw.call(
        apis.END_TXN,
        version,
        transactional_id=name,
        producer_id=who.producer_id,
        producer_epoch=who.producer_epoch,
        committed=committed,
    )


def described(raw: Raw, name: str) -> Any:
    (found,) = raw.call(apis.DESCRIBE_TRANSACTIONS, 0, transactional_ids=[name]).transaction_states
    return found


def verified(raw: Raw, name: str, who: Any, topic: str, partitions: list[int], version: int = 5) -> list[int]:
    asked = Message(
        transactional_id=name,
        producer_id=who.producer_id,
        producer_epoch=who.producer_epoch,
        verify_only=True,
        topics=[Message(name=topic, partitions=partitions)],
    )
    answer = raw.call(apis.ADD_PARTITIONS_TO_TXN, version, transactions=[asked])
    (found,) = answer.results_by_transaction
    return [row.partition_error_code for one in found.topic_results for row in one.results_by_partition]


@proves("T1")
@pytest.mark.parametrize("version", range(1, 7))
def test_the_coordinator_of_a_transactional_id_is_found(
    broker: Broker, connect: Connect, name: str, version: int
) -> None:
    raw = connect(broker)
    found = find(raw, name, version)
    assert (found.error_code, found.port) == (ErrorCode.NONE, broker.host_port[1])
    assert find(raw, "", version).error_code == ErrorCode.INVALID_REQUEST


@proves("T1")
@pytest.mark.parametrize("version", range(7))
def test_each_producer_that_opens_an_id_gets_its_next_epoch(
    broker: Broker, connect: Connect, name: str, version: int
) -> None:
    raw = connect(broker)
    first = init(raw, name, version)
    assert (first.error_code, first.producer_epoch) == (ErrorCode.NONE, 0)
    second = init(raw, name, version)
    assert (second.producer_id, second.producer_epoch) == (first.producer_id, 1)
    if version >= 3:
        old = init(raw, name, version, producer_id=first.producer_id, producer_epoch=0)
        assert old.error_code == (ErrorCode.PRODUCER_FENCED if version >= 4 else ErrorCode.INVALID_PRODUCER_EPOCH)
        own = init(raw, name, version, producer_id=first.producer_id, producer_epoch=1)
        assert (own.error_code, own.producer_epoch) == (ErrorCode.NONE, 2)
        half = init(raw, name, version, producer_id=first.producer_id)
        assert half.error_code == ErrorCode.INVALID_REQUEST
    assert init(raw, name, version, transaction_timeout_ms=0).error_code == ErrorCode.INVALID_TRANSACTION_TIMEOUT


@proves("T1")
@pytest.mark.parametrize("version", range(6))
def test_partitions_are_added_all_or_none(
    broker: Broker, connect: Connect, topic: str, name: str, version: int
) -> None:
    raw = connect(broker)
    raw.create(topic, 3)
    producer = init(raw, name)
    unknown, left = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.OPERATION_NOT_ATTEMPTED
    assert add(raw, name, producer, topic, [0, 1, 3], version) == [left, left, unknown]
    assert described(raw, name).transaction_state == "Empty"
    assert add(raw, name, producer, topic, [0, 2], version) == [ErrorCode.NONE] * 2
    found = described(raw, name)
    assert (found.error_code, found.transaction_state) == (ErrorCode.NONE, "Ongoing")
    assert [(one.topic, one.partitions) for one in found.topics] == [(topic, [0, 2])]
    assert (found.producer_id, found.producer_epoch) == (producer.producer_id, producer.producer_epoch)
    assert found.transaction_timeout_ms == TIMEOUT_MS
    other = Message(producer_id=producer.producer_id, producer_epoch=producer.producer_epoch + 1)
    fenced = ErrorCode.PRODUCER_FENCED if version >= 2 else ErrorCode.INVALID_PRODUCER_EPOCH
    assert add(raw, name, other, topic, [0], version) == [fenced]
    other = Message(producer_id=producer.producer_id + 1, producer_epoch=0)
    assert add(raw, name, other, topic, [0], version) == [ErrorCode.INVALID_PRODUCER_ID_MAPPING]
    assert add(raw, f"{name}-other", producer, topic, [0], version) == [ErrorCode.INVALID_PRODUCER_ID_MAPPING]
    assert add(raw, "", producer, topic, [0], version) == [ErrorCode.INVALID_REQUEST]


def test_an_id_that_is_named_again_and_again_is_described_once(broker: Broker, connect: Connect, name: str) -> None:
    raw = connect(broker)
    init(raw, name)
    answer = raw.call(apis.DESCRIBE_TRANSACTIONS, 0, transactional_ids=[name] * 1000)
    assert [found.transactional_id for found in answer.transaction_states] == [name]
    answer = raw.call(apis.CONSUMER_GROUP_DESCRIBE, 1, group_ids=[name] * 1000, include_authorized_operations=False)
    assert [found.group_id for found in answer.groups] == [name]


@proves("T1")
def test_other_brokers_ask_for_many_transactions_at_once_and_whether_a_partition_is_in_one(
    broker: Broker, connect: Connect, topic: str, name: str
) -> None:
    raw = connect(broker)
    raw.create(topic, 3)
    names = [f"{name}-{number}" for number in range(3)]
    producers = [init(raw, one) for one in names]
    asked = [
        Message(
            transactional_id=one,
            producer_id=producer.producer_id,
            producer_epoch=producer.producer_epoch,
            verify_only=False,
            topics=[Message(name=topic, partitions=[number])],
        )
        for number, (one, producer) in enumerate(zip(names, producers, strict=True))
    ]
    answer = raw.call(apis.ADD_PARTITIONS_TO_TXN, 5, transactions=asked)
    assert sorted(one.transactional_id for one in answer.results_by_transaction) == names
    assert verified(raw, names[1], producers[1], topic, [0, 1]) == [ErrorCode.TRANSACTION_ABORTABLE, ErrorCode.NONE]
    assert verified(raw, names[1], producers[1], topic, [0], 4) == [ErrorCode.INVALID_TXN_STATE]
    assert raw.call(apis.ADD_PARTITIONS_TO_TXN, 5, transactions=[]).results_by_transaction == []


@proves("T1")
@pytest.mark.parametrize("verify_only", [False, True])
def test_more_transactions_than_a_broker_asks_for_at_once_are_refused(
    broker: Broker, connect: Connect, name: str, verify_only: bool
) -> None:
    """Each would cost an append: a megabyte of them held up everybody for ten seconds."""
    raw = connect(broker)
    init(raw, name)
    places = [Message(name="any", partitions=[0])] if verify_only else []
    given = {"producer_id": 1 << 40, "producer_epoch": 0, "verify_only": verify_only, "topics": places}
    asked = [Message(transactional_id=f"{name}-{nth}", **given) for nth in range(TRANSACTIONS_MAX + 1)]
    answer = raw.call(apis.ADD_PARTITIONS_TO_TXN, 5, transactions=asked)
    assert (answer.error_code, answer.results_by_transaction) == (ErrorCode.INVALID_REQUEST, [])
    answer = raw.call(apis.ADD_PARTITIONS_TO_TXN, 5, transactions=asked[:-1])
    assert (answer.error_code, len(answer.results_by_transaction)) == (ErrorCode.NONE, TRANSACTIONS_MAX)


@proves("T1")
@pytest.mark.parametrize("version", range(5))
def test_the_partition_of_a_groups_offsets_is_added(broker: Broker, connect: Connect, name: str, version: int) -> None:
    raw = connect(broker)
    producer = init(raw, name)

    def add_offsets(group: str, epoch: int = 0) -> int:
        answer = raw.call(
            apis.ADD_OFFSETS_TO_TXN,
            version,
            transactional_id=name,
            producer_id=producer.producer_id,
            producer_epoch=epoch,
            group_id=group,
        )
        code: int = answer.error_code
        return code

    assert add_offsets("some-group") == ErrorCode.NONE
    (found,) = described(raw, name).topics
    assert (found.topic, len(found.partitions)) == ("__consumer_offsets", 1)
    assert add_offsets("") == ErrorCode.INVALID_GROUP_ID
    fenced = ErrorCode.PRODUCER_FENCED if version >= 2 else ErrorCode.INVALID_PRODUCER_EPOCH
    assert add_offsets("some-group", 7) == fenced


@proves("T1")
@pytest.mark.parametrize("version", range(6))
def test_a_transaction_is_ended_by_its_producer_alone(
    broker: Broker, connect: Connect, topic: str, name: str, version: int
) -> None:
    raw = connect(broker)
    raw.create(topic, 2)
    producer = init(raw, name)
    if version < 5:
        assert end(raw, name, producer, version).error_code == ErrorCode.INVALID_TXN_STATE
    assert end(raw, f"{name}-other", producer, version).error_code == ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert end(raw, "", producer, version).error_code == ErrorCode.INVALID_REQUEST
    add(raw, name, producer, topic, [0, 1])
    old = Message(producer_id=producer.producer_id, producer_epoch=producer.producer_epoch - 1)
    fenced = ErrorCode.PRODUCER_FENCED if version >= 2 else ErrorCode.INVALID_PRODUCER_EPOCH
    assert end(raw, name, old, version).error_code == fenced
    ended = end(raw, name, producer, version)
    assert ended.error_code == ErrorCode.NONE
    if version >= 5:
        assert (ended.producer_id, ended.producer_epoch) == (producer.producer_id, producer.producer_epoch + 1)
    again = end(raw, name, producer, version)
    assert again == ended
    assert end(raw, name, producer, version, committed=False).error_code == ErrorCode.INVALID_TXN_STATE


@proves("T1")
@pytest.mark.parametrize("version", range(3))
def test_transactions_are_listed(broker: Broker, connect: Connect, topic: str, name: str, version: int) -> None:
    raw = connect(broker)
    raw.create(topic, 2)
    producer = init(raw, name)

    def listed(**filters: Any) -> dict[str, str]:
        body = {"state_filters": [], "producer_id_filters": [], **filters}
        answer = raw.call(apis.LIST_TRANSACTIONS, version, **body)
        assert answer.error_code == ErrorCode.NONE
        return {one.transactional_id: one.transaction_state for one in answer.transaction_states}

    assert listed()[name] == "Empty"
    assert name not in listed(state_filters=["Ongoing"])
    add(raw, name, producer, topic, [0])
    assert listed(state_filters=["Ongoing", "Empty"])[name] == "Ongoing"
    assert listed(producer_id_filters=[producer.producer_id]) == {name: "Ongoing"}
    strange = raw.call(apis.LIST_TRANSACTIONS, version, state_filters=["Odd"], producer_id_filters=[])
    assert (strange.unknown_state_filters, strange.transaction_states) == (["Odd"], [])
    if version >= 1:
        assert name not in listed(duration_filter=600_000)
        assert wait_for("a millisecond to pass", lambda: name in listed(duration_filter=0))
    if version >= 2:
        assert listed(transactional_id_pattern=f"{name[:-1]}.") == {name: "Ongoing"}
        wrong = raw.call(
            apis.LIST_TRANSACTIONS, version, state_filters=[], producer_id_filters=[], transactional_id_pattern="("
        )
        assert wrong.error_code == ErrorCode.INVALID_REGULAR_EXPRESSION
        odd = f"{name} Kasse №7/é:+"
        init(raw, odd)
        for pattern in (f"{name} .*", f"{name}\\s.+[№]\\d/[à-ÿ][[:punct:]]+", rf"{name} Kasse \x{{2116}}7.é:\+"):
            assert listed(transactional_id_pattern=pattern) == {odd: "Empty"}, pattern
        assert listed(transactional_id_pattern=f"{name} Kasse .7/[а-я].+") == {}


def test_an_id_that_is_not_known_is_described_as_such(broker: Broker, connect: Connect, name: str) -> None:
    raw = connect(broker)
    init(raw, name)
    assert described(raw, f"{name}-other").error_code == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND
    assert described(raw, "").error_code == ErrorCode.INVALID_REQUEST


@proves("T4")
def test_a_two_phase_transaction_is_kept_for_the_producer_that_comes_back(
    broker: Broker, connect: Connect, topic: str, name: str
) -> None:
    raw = connect(broker)
    raw.create(topic, 2)
    producer = init(raw, name, enable2_pc=True)
    add(raw, name, producer, topic, [0])
    assert described(raw, name).transaction_timeout_ms == 2**31 - 1
    kept = init(raw, name, enable2_pc=True, keep_prepared_txn=True)
    assert (kept.ongoing_txn_producer_id, kept.ongoing_txn_producer_epoch) == (producer.producer_id, 0)
    assert end(raw, name, producer).error_code == ErrorCode.PRODUCER_FENCED
    ended = end(raw, name, kept)
    assert (ended.error_code, ended.producer_epoch) == (ErrorCode.NONE, kept.producer_epoch + 1)


@proves("T1")
def test_clients_are_told_that_transactions_have_version_two(broker: Broker, connect: Connect) -> None:
    raw = connect(broker)
    answer = raw.call(apis.API_VERSIONS, 3, client_software_name="x", client_software_version="1")
    assert answer.finalized_features_epoch >= 0
    finalized = {one.name: one.max_version_level for one in answer.finalized_features}
    assert finalized["transaction.version"] == 2


def test_a_marker_without_a_producer_is_refused(broker: Broker, connect: Connect, topic: str) -> None:
    raw = connect(broker)
    raw.create(topic, 2)
    given = {"coordinator_epoch": 0, "transaction_result": False, "number": -1, "transaction_version": 2}
    rows = [Message(name=topic, partition_indexes=[0, 1])]
    markers = [
        Message(producer_id=producer_id, producer_epoch=epoch, topics=rows, **given)
        for producer_id, epoch in ((-1, 0), (-(2**62), 0), (1 << 40, -1))
    ]
    answer = raw.call(apis.WRITE_TXN_MARKERS, 2, markers=markers)
    codes = [row.error_code for one in answer.markers for each in one.topics for row in each.partitions]
    assert codes == [ErrorCode.INVALID_REQUEST] * 6
    assert raw.fetch(topic).high_watermark == 0


@pytest.mark.parametrize("one_marker", [False, True])
def test_more_markers_than_a_broker_asks_for_at_once_are_refused(
    broker: Broker, connect: Connect, topic: str, one_marker: bool
) -> None:
    """Each is a batch, and all of a request are written in one turn."""
    raw = connect(broker)
    raw.create(topic)
    given = {"coordinator_epoch": 0, "transaction_result": False, "number": -1, "transaction_version": 2}
    times = PLACES_PER_REQUEST + 1
    rows = [Message(name=topic, partition_indexes=[0] * (times if one_marker else 1))]
    markers = [
        Message(producer_id=(1 << 40) + nth, producer_epoch=1, topics=rows, **given)
        for nth in range(1 if one_marker else times)
    ]
    answer = raw.call(apis.WRITE_TXN_MARKERS, 2, markers=markers)
    codes = [row.error_code for one in answer.markers for each in one.topics for row in each.partitions]
    assert codes == [ErrorCode.INVALID_REQUEST] * times
    assert raw.fetch(topic).high_watermark == 0
