"""What clients hear when brokers or the coordination of a cluster are away."""

from __future__ import annotations

from functools import partial

import pytest

from brokers import wait_for
from headrace.wire import api as apis
from headrace.wire.message import Message
from kafka_protocol.clustered import SharedCluster
from kafka_protocol.raw import Raw, batch_of, values
from proving import proves

LEADER_AWAY, NOT_LEADER, TIMED_OUT, NOT_ENOUGH, NOT_ENOUGH_AFTER = 5, 6, 7, 19, 20
OUT_OF_RANGE, OFFSET_NOT_AVAILABLE = 1, 78
LATEST, EARLIEST = -1, -2
COORDINATION_AWAY = 15


def deleted(raw: Raw, topic: str, before: int, timeout_ms: int = 30_000) -> tuple[int, int]:
    """Error and start, as DeleteRecords tells them."""
    asked = Message(name=topic, partitions=[Message(partition_index=0, offset=before)])
    row = raw.call(apis.DELETE_RECORDS, 2, topics=[asked], timeout_ms=timeout_ms).topics[0].partitions[0]
    return row.error_code, row.low_watermark


def latest(raw: Raw, topic: str, version: int = 7) -> tuple[int, int]:
    return listed(raw, topic, LATEST, version)


def listed(raw: Raw, topic: str, timestamp: int, version: int = 7) -> tuple[int, int]:
    """Error and offset, as ListOffsets tells them."""
    asked = Message(name=topic, partitions=[Message(partition_index=0, current_leader_epoch=-1, timestamp=timestamp)])
    row = raw.call(apis.LIST_OFFSETS, version, replica_id=-1, isolation_level=0, topics=[asked]).topics[0].partitions[0]
    return row.error_code, row.offset


@proves("G5")
def test_too_few_in_sync_is_an_error_before_and_after_the_append(cluster: SharedCluster, topic: str) -> None:
    cluster.create(topic, [[1, 2]], min_insync_replicas="2")
    leader = cluster.raw(1)
    assert leader.produce(topic, batch_of([b"a"]), acks=-1).error_code == 0
    cluster.broker(2).kill()
    answer = leader.produce(topic, batch_of([b"b"]), acks=-1)
    assert answer.error_code == NOT_ENOUGH_AFTER, answer.error_message
    assert leader.produce(topic, batch_of([b"c"]), acks=-1).error_code == NOT_ENOUGH
    assert leader.produce(topic, batch_of([b"d"]), acks=1).error_code == 0
    # What is not committed is not read, and is no error to ask for.
    assert (leader.fetch(topic, 0).high_watermark, leader.fetch(topic, 1).error_code) == (1, 0)
    assert leader.fetch(topic, 1).records in (None, b"")
    assert cluster.state(topic)[0].in_sync == (1,)
    wait_for("the end of its lease", lambda: cluster.state(topic)[0].offline == (2,))
    # A leader that begins anew does not know yet what of its log is committed (KIP-207).
    cluster.broker(1).restart(clean=False)
    leader = cluster.raw(1)
    wait_for("its return", lambda: cluster.state(topic)[0].leader == 1)
    assert (latest(leader, topic), latest(leader, topic, 4)) == ((OFFSET_NOT_AVAILABLE, -1), (LEADER_AWAY, -1))
    assert leader.fetch(topic, 2).error_code == 0
    cluster.broker(2).start()
    cluster.wait_in_sync(topic)
    wait_for("what had waited", lambda: latest(leader, topic) == (0, 3))
    assert leader.produce(topic, batch_of([b"e"]), acks=-1).error_code == 0


@proves("G5")
def test_an_append_that_is_not_committed_in_time_says_so_and_may_be_later(cluster: SharedCluster, topic: str) -> None:
    cluster.create(topic, [[1, 2]])
    leader = cluster.raw(1)
    cluster.pause(2)
    try:
        answer = leader.call(
            apis.PRODUCE,
            9,
            transactional_id=None,
            acks=-1,
            timeout_ms=100,
            topic_data=[Message(name=topic, partition_data=[Message(index=0, records=batch_of([b"v"]))])],
        )
    finally:
        cluster.resume(2)
    assert answer.responses[0].partition_responses[0].error_code == TIMED_OUT
    wait_for("the follower", lambda: latest(leader, topic) == (0, 1))


@proves("F6")
def test_a_deletion_that_not_all_in_sync_have_in_time_says_so_and_goes_on(cluster: SharedCluster, topic: str) -> None:
    cluster.create(topic, [[1, 2]])
    leader = cluster.raw(1)
    assert leader.produce(topic, batch_of([b"a", b"b", b"c"]), acks=-1).error_code == 0
    cluster.pause(2)
    try:
        assert deleted(leader, topic, 2, timeout_ms=100) == (TIMED_OUT, -1)
        assert listed(leader, topic, EARLIEST) == (0, 0), "consumers are told what all replicas in sync have"
    finally:
        cluster.resume(2)
    wait_for("the follower", lambda: listed(leader, topic, EARLIEST) == (0, 2))
    assert deleted(leader, topic, 2) == (0, 2)
    assert deleted(leader, topic, 4) == (OUT_OF_RANGE, -1)
    assert deleted(leader, topic, -1) == (0, 3)
    assert deleted(cluster.raw(2), topic, -1) == (NOT_LEADER, -1)


@proves("F11", "F4")
def test_readers_go_on_at_a_follower_where_the_topic_lets_them(cluster: SharedCluster, topic: str) -> None:
    strict = f"{topic}-strict"
    for name, allowed in ((topic, "true"), (strict, "false")):
        cluster.create(name, [[1, 2]], min_insync_replicas="1", follower_reads=allowed)
        assert cluster.raw(1).produce(name, batch_of([b"a"]), acks=-1).error_code == 0
    # The follower misses what the leader then takes alone; with the leader gone nobody holds everything.
    assert cluster.broker(2).stop() == 0
    leader = cluster.raw(1)
    for name in (topic, strict):
        wait_for("a set of one", partial(_in_sync, cluster, name, (1,)))
        assert leader.produce(name, batch_of([b"b"]), acks=-1).error_code == 0
    cluster.broker(1).kill()
    cluster.broker(2).start()
    wait_for("no leader", lambda: cluster.state(strict, 2)[0].leader == -1)
    assert cluster.state(strict, 2)[0].error == 5
    wait_for("the replica that can be read", lambda: cluster.state(topic, 2)[0].leader == 2)
    follower = cluster.raw(2)
    read = wait_for("its watermark", lambda: (row := follower.fetch(topic, 0)).high_watermark == 1 and row)
    assert (read.error_code, bool(read.records)) == (0, True)
    assert follower.fetch(strict, 0).error_code == NOT_LEADER
    assert follower.produce(topic, batch_of([b"c"]), acks=-1).error_code == NOT_LEADER
    assert latest(follower, topic) == (0, 1)
    # An operator gives up what only the old leader holds; it takes over what there is now when it returns.
    asked = [Message(topic=strict, partitions=[0])]
    elected = follower.call(apis.ELECT_LEADERS, 2, election_type=1, topic_partitions=asked, timeout_ms=15_000)
    assert elected.replica_election_results[0].partition_result[0].error_code == 0
    wait_for("the leader that was elected", lambda: cluster.state(strict, 2)[0].leader == 2)
    assert follower.produce(strict, batch_of([b"instead"]), acks=-1).base_offset == 1
    cluster.broker(1).start()
    cluster.wait_in_sync(topic)
    cluster.wait_in_sync(strict)
    assert [values(cluster.raw(1).fetch(name, 0, wait_ms=5000, min_bytes=100).records) for name in (topic, strict)] == [
        [b"a", b"b"],
        [b"a", b"instead"],
    ]


@pytest.mark.long
@proves("L2", "G5")
def test_without_coordination_records_flow_and_changes_of_metadata_are_refused(
    cluster: SharedCluster, topic: str
) -> None:
    cluster.create(topic, [[1, 2, 3]])
    leader = cluster.raw(1)
    assert leader.produce(topic, batch_of([b"a"]), acks=-1).error_code == 0
    cluster.etcd.kill_all()
    try:
        for n in range(5):
            assert leader.produce(topic, batch_of([b"%d" % n]), acks=-1).error_code == 0
        assert leader.fetch(topic, 0).high_watermark == 6
        assert cluster.state(topic, 2)[0].leader == 1
        asked = Message(name="never", num_partitions=1, replication_factor=1, assignments=[], configs=[])
        refused = leader.call(apis.CREATE_TOPICS, 7, topics=[asked], timeout_ms=5000, validate_only=False).topics[0]
        assert (refused.error_code, bool(refused.error_message)) == (COORDINATION_AWAY, True)
    finally:
        cluster.etcd.start_all()
    wait_for("registrations", lambda: len(cluster.metadata(1, topic).brokers) == 3)
    cluster.create(f"{topic}-after", [[3, 2]])
    assert leader.produce(topic, batch_of([b"z"]), acks=-1).error_code == 0
    assert leader.fetch(topic, 0).high_watermark == 7


def _in_sync(cluster: SharedCluster, topic: str, wanted: tuple[int, ...]) -> bool:
    return cluster.state(topic)[0].in_sync == wanted
