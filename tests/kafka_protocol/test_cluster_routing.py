"""What clients hear from the brokers of a cluster about where partitions are, on the wire."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.wire import api as apis
from headrace.wire.message import Message
from kafka_protocol.clustered import SharedCluster
from kafka_protocol.raw import Raw, batch_of
from proving import proves

NOT_LEADER, UNKNOWN, NOT_AVAILABLE = 6, 3, 78


def fetch(raw: Raw, topic: str, topic_id: bytes, version: int, offset: int = 0, **more: Any) -> Any:
    """The whole answer; `rack` and `partition` can be given."""
    partition = Message(
        partition=more.pop("partition", 0),
        current_leader_epoch=more.pop("epoch", -1),
        fetch_offset=offset,
        last_fetched_epoch=-1,
        log_start_offset=-1,
        partition_max_bytes=1 << 20,
    )
    return raw.call(
        apis.FETCH,
        version,
        replica_id=-1,
        max_wait_ms=more.pop("wait_ms", 0),
        min_bytes=1,
        max_bytes=1 << 20,
        isolation_level=0,
        session_id=0,
        session_epoch=-1,
        topics=[Message(topic=topic, topic_id=topic_id, partitions=[partition])],
        forgotten_topics_data=[],
        rack_id=more.pop("rack", ""),
    )


def produce(raw: Raw, topic: str, topic_id: bytes, version: int, partition: int = 0) -> Any:
    row = Message(index=partition, records=batch_of([b"v"]))
    return raw.call(
        apis.PRODUCE,
        version,
        transactional_id=None,
        acks=-1,
        timeout_ms=5000,
        topic_data=[Message(name=topic, topic_id=topic_id, partition_data=[row])],
    )


@proves("G15", "L2", "R1")
def test_every_broker_tells_the_whole_cluster(cluster: SharedCluster, topic: str) -> None:
    cluster.create(topic, [[1, 2], [2, 3], [3, 1]])
    for number in (1, 2, 3):
        told = cluster.metadata(number, topic)
        assert {(each.node_id, each.rack) for each in told.brokers} == {(n, f"rack-{n}") for n in (1, 2, 3)}
        assert {each.port for each in told.brokers} == {cluster.broker(n).host_port[1] for n in (1, 2, 3)}
        assert told.controller_id in (1, 2, 3)
        assert [each.leader for each in cluster.state(topic, number)] == [1, 2, 3]
        described = cluster.raw(number).call(apis.DESCRIBE_CLUSTER, 1, endpoint_type=1)
        assert (described.controller_id, len(described.brokers)) == (told.controller_id, 3)
        paged = cluster.raw(number).call(
            apis.DESCRIBE_TOPIC_PARTITIONS, 0,
            topics=[Message(name=topic)], response_partition_limit=100, cursor=None,
        )  # fmt: skip
        assert [each.leader_id for each in paged.topics[0].partitions] == [1, 2, 3]
        dirs = cluster.raw(number).call(apis.DESCRIBE_LOG_DIRS, 4, topics=None).results[0]
        held = [{p.partition_index for p in each.partitions} for each in dirs.topics if each.name == topic]
        assert held == [{n for n, replicas in enumerate([[1, 2], [2, 3], [3, 1]]) if number in replicas}]


@proves("G15")
@pytest.mark.parametrize("version", [9, 10, 12, 13])
def test_a_producer_at_the_wrong_broker_hears_where_the_leader_is(
    cluster: SharedCluster, topic: str, version: int
) -> None:
    cluster.create(topic, [[1, 2, 3]])
    topic_id = cluster.topic_id(topic)
    answer = produce(cluster.raw(2), topic, topic_id, version)
    row = answer.responses[0].partition_responses[0]
    assert row.error_code == NOT_LEADER
    if version >= 10:
        assert (row.current_leader.leader_id, row.current_leader.leader_epoch) == (1, cluster.state(topic)[0].epoch)
        ends = [(end.node_id, end.host, end.port, end.rack) for end in answer.node_endpoints]
        assert ends == [(1, *cluster.broker(1).host_port, "rack-1")]
    elsewhere = produce(cluster.raw(2), topic, topic_id, version, partition=7)
    assert elsewhere.responses[0].partition_responses[0].error_code == UNKNOWN
    assert produce(cluster.raw(1), topic, topic_id, version).responses[0].partition_responses[0].error_code == 0


@proves("G15")
def test_requests_that_only_a_leader_answers_say_so(cluster: SharedCluster, topic: str) -> None:
    cluster.create(topic, [[1, 2]])
    for number in (2, 3):
        raw = cluster.raw(number)
        asked = Message(partition_index=0, current_leader_epoch=-1, timestamp=-1)
        listed = raw.call(
            apis.LIST_OFFSETS, 7, replica_id=-1, isolation_level=0, topics=[Message(name=topic, partitions=[asked])]
        )
        assert listed.topics[0].partitions[0].error_code == NOT_LEADER
        deleted = raw.call(
            apis.DELETE_RECORDS,
            2,
            topics=[Message(name=topic, partitions=[Message(partition_index=0, offset=0)])],
            timeout_ms=1000,
        )
        assert deleted.topics[0].partitions[0].error_code == NOT_LEADER
        ended = raw.call(
            apis.OFFSET_FOR_LEADER_EPOCH,
            4,
            replica_id=-1,
            topics=[Message(topic=topic, partitions=[Message(partition=0, current_leader_epoch=-1, leader_epoch=0)])],
        )
        assert ended.topics[0].partitions[0].error_code == NOT_LEADER


@proves("F11", "G15")
@pytest.mark.parametrize("version", [10, 11, 12, 16, 17])
def test_a_follower_serves_consumers_that_know_of_followers_up_to_its_watermark(
    cluster: SharedCluster, topic: str, version: int
) -> None:
    cluster.create(topic, [[1, 2]])
    topic_id = cluster.topic_id(topic)
    assert produce(cluster.raw(1), topic, topic_id, 13).responses[0].partition_responses[0].error_code == 0
    follower = cluster.raw(2)
    row = fetch(follower, topic, topic_id, version, wait_ms=5000).responses[0].partitions[0]
    if version < 11:
        assert row.error_code == NOT_LEADER
    else:
        assert (row.error_code, row.high_watermark, bool(row.records)) == (0, 1, True)
        beyond = fetch(follower, topic, topic_id, version, offset=5).responses[0].partitions[0]
        assert beyond.error_code == NOT_AVAILABLE, "the leader may have it: never out of range"
    answer = fetch(cluster.raw(3), topic, topic_id, version)
    row = answer.responses[0].partitions[0]
    assert row.error_code == NOT_LEADER
    if version >= 12:
        assert row.current_leader.leader_id == 1
    if version >= 16:
        assert [end.node_id for end in answer.node_endpoints] == [1]


@proves("G15")
def test_a_consumer_is_sent_to_the_follower_of_its_rack(cluster: SharedCluster, topic: str) -> None:
    cluster.create(topic, [[1, 2]])
    topic_id = cluster.topic_id(topic)
    leader = cluster.raw(1)
    produce(leader, topic, topic_id, 13)
    sent = fetch(leader, topic, topic_id, 17, rack="rack-2").responses[0].partitions[0]
    assert (sent.error_code, sent.preferred_read_replica, bool(sent.records)) == (0, 2, False)
    for rack in ("rack-1", "rack-3", "nowhere"):
        kept = fetch(leader, topic, topic_id, 17, rack=rack).responses[0].partitions[0]
        assert (kept.preferred_read_replica, bool(kept.records)) == (-1, True)


@proves("J10")
def test_producer_ids_of_all_brokers_differ(cluster: SharedCluster) -> None:
    ids = [
        cluster.raw(number).call(apis.INIT_PRODUCER_ID, 4, transactional_id=None, transaction_timeout_ms=0).producer_id
        for number in (1, 2, 3, 1, 2, 3)
    ]
    assert len(set(ids)) == len(ids)
