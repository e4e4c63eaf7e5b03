"""The public admin client: `headrace.Admin`, and what its asynchronous face adds."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import socket
import threading
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

import headrace
import headrace.aio
from brokers import Broker
from headrace import Admin, Consumer, Producer
from proving import proves

DEADLINE_S = 30.0


@pytest.fixture
def admin(broker: Broker) -> Iterator[Admin]:
    with Admin(broker.bootstrap) as connected:
        yield connected


def new_name(kind: str = "admin") -> str:
    return f"{kind}-{uuid.uuid4().hex[:12]}"


def fill(broker: Broker, topic: str, count: int, partition: int = 0, start_ms: int = 1000) -> None:
    """Records at `start_ms`, one second later, and so on."""
    with Producer(broker.bootstrap) as producer:
        for number in range(count):
            producer.send_async(topic, b"%d" % number, partition=partition, timestamp_ms=start_ms + 1000 * number)


@proves("U2")
def test_a_topic_is_made_seen_enlarged_emptied_and_deleted(broker: Broker, admin: Admin) -> None:
    name = new_name()
    admin.create_topic(name, partitions=2, replicas=1, configs={"retention.ms": -1, "key.index": True})
    own = {config.name: config.value for config in admin.describe_configs("topic", name) if config.source == "topic"}
    assert own == {"retention.ms": "-1", "key.index": "true"}
    assert name in [topic.name for topic in admin.list_topics()]
    described = admin.describe_topic(name)
    assert [partition.index for partition in described.partitions] == [0, 1]
    assert all(partition.leader_id in partition.in_sync for partition in described.partitions)
    fill(broker, name, 5, partition=1)
    assert admin.offsets(name) == {0: 0, 1: 5}
    assert admin.offsets(name, datetime.fromtimestamp(3, UTC)) == {0: 0, 1: 2}
    assert admin.delete_records(name, {1: 3}) == {1: 3}
    assert admin.offsets(name, "earliest") == {0: 0, 1: 3}
    assert admin.offsets(name, "earliest", [1]) == {1: 3}
    admin.create_partitions(name, 3)
    assert len(admin.describe_topic(name).partitions) == 3
    admin.delete_topic(name)
    assert name not in [topic.name for topic in admin.list_topics(internal=True)]
    with pytest.raises(headrace.UnknownTopic):
        admin.describe_topic(name)


@proves("U2")
def test_what_was_changed_by_others_is_seen(broker: Broker, admin: Admin) -> None:
    name = new_name()
    admin.create_topic(name, partitions=1)
    assert admin.offsets(name) == {0: 0}
    with Admin(broker.bootstrap) as another:
        another.create_partitions(name, 2)
        assert admin.offsets(name, "latest", [1]) == {1: 0}
        another.delete_topic(name)
    with pytest.raises(headrace.UnknownTopic):
        admin.offsets(name)


@proves("U2")
def test_settings_of_topics_brokers_and_the_cluster_are_read_and_changed(admin: Admin) -> None:
    name = new_name()
    admin.create_topic(name)
    admin.alter_configs("topic", name, values={"segment.bytes": "1048576", "retention.ms": "5000"})
    admin.alter_configs("topic", name, unset=["retention.ms"])
    own = {config.name: config.value for config in admin.describe_configs("topic", name) if config.source == "topic"}
    assert own == {"segment.bytes": "1048576"}
    cluster = admin.describe_cluster()
    assert cluster.controller_id in [broker.broker_id for broker in cluster.brokers]
    assert any(config.name == "node.id" for config in admin.describe_configs("broker", cluster.brokers[0].broker_id))
    admin.alter_configs("cluster", values={"log.cleaner.threads": "1"})
    try:
        found = {config.name: config.value for config in admin.describe_configs("cluster")}
        assert found["log.cleaner.threads"] == "1"
    finally:
        admin.alter_configs("cluster", unset=["log.cleaner.threads"])


@proves("U2")
def test_a_group_is_described_reset_and_deleted(broker: Broker, admin: Admin) -> None:
    topic, group = new_name(), new_name("group")
    admin.create_topic(topic, partitions=2)
    fill(broker, topic, 4)
    with Consumer(topic, bootstrap=broker.bootstrap, group=group, commit_interval_ms=0) as consumer:
        assert consumer.position(topic, 0) == 0
        consumer.commit({(topic, 0): 1})
        assert group in [listed.group_id for listed in admin.list_groups()]
        (member,) = admin.describe_group(group).members
        assert member.assignment == {topic: (0, 1)}
        lags = {(lag.partition, lag.committed, lag.end, lag.lag, lag.member_id) for lag in admin.group_lag(group)}
        assert lags == {(0, 1, 4, 3, member.member_id), (1, None, 0, 0, member.member_id)}
        for refused in (lambda: admin.reset_group(group, "latest"), lambda: admin.delete_group(group)):
            with pytest.raises(headrace.GroupNotEmpty, match="stop its consumers first"):
                refused()
    assert admin.group_offsets(group) == {(topic, 0): 1}
    planned = admin.reset_group(group, "latest", dry_run=True)
    assert [(reset.partition, reset.committed, reset.offset) for reset in planned] == [(0, 1, 4), (1, None, 0)]
    assert admin.group_offsets(group) == {(topic, 0): 1}
    for to, offset in (("latest", 4), ("earliest", 0), (2, 2), (99, 4), (datetime.fromtimestamp(2, UTC), 1)):
        admin.reset_group(group, to, topics=[topic], partitions=[0])  # type: ignore[arg-type]
        assert admin.group_offsets(group)[topic, 0] == offset
    admin.set_group_offsets(group, {(topic, 0): 3, (topic, 1): 0})
    admin.delete_group_offsets(group, [(topic, 1)])
    assert admin.group_offsets(group) == {(topic, 0): 3}
    admin.delete_group(group)
    with pytest.raises(headrace.GroupNotFound):
        admin.describe_group(group)


@proves("U2")
def test_what_cannot_be_done_is_an_error_that_can_be_imported(admin: Admin) -> None:
    name = new_name()
    admin.create_topic(name)
    with pytest.raises(headrace.TopicAlreadyExists):
        admin.create_topic(name)
    with pytest.raises(headrace.UnknownTopic):
        admin.delete_topic(new_name())
    with pytest.raises(headrace.Refusal, match=r"no\.such\.setting"):
        admin.alter_configs("topic", name, values={"no.such.setting": "1"})
    for kind, of in (("topic", ""), ("broker", "first"), ("cluster", "c"), ("client", "c")):
        with pytest.raises(headrace.InvalidRequest):
            admin.describe_configs(kind, of)  # type: ignore[arg-type]
    with pytest.raises(headrace.InvalidRequest, match="datetime"):
        admin.offsets(name, "yesterday")  # type: ignore[arg-type]
    with pytest.raises(headrace.InvalidRequest, match="which topics"):
        admin.reset_group(new_name("group"), "earliest")


@proves("U2")
def test_results_cannot_be_changed(admin: Admin) -> None:
    name = new_name()
    admin.create_topic(name)
    with pytest.raises(dataclasses.FrozenInstanceError):
        admin.describe_topic(name).name = "another"  # type: ignore[misc]


@proves("U2")
def test_threads_share_an_admin_client(broker: Broker, admin: Admin) -> None:
    name = new_name()
    admin.create_topic(name)
    found: list[dict[int, int]] = []
    threads = [threading.Thread(target=lambda: found.append(admin.offsets(name))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert found == [{0: 0}] * 8


@proves("U2")
def test_a_call_under_way_ends_when_another_thread_closes(silent: socket.socket) -> None:
    admin = Admin(address_of(silent))
    failures: list[Exception] = []

    def ask() -> None:
        try:
            admin.list_topics()
        except headrace.HeadraceError as error:
            failures.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    with silent.accept()[0] as connection:
        connection.recv(1)
        admin.close()
        thread.join(DEADLINE_S)
    assert [type(failure) for failure in failures] == [headrace.EngineClosed]
    with pytest.raises(headrace.EngineClosed):
        admin.list_topics()


def address_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()
    return f"{host}:{port}"


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """Takes connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(DEADLINE_S)
        yield listening


@proves("U2")
def test_the_asynchronous_client_does_the_same(broker: Broker) -> None:
    async def main() -> None:
        topic, group = new_name(), new_name("group")
        async with headrace.aio.Admin(broker.bootstrap) as admin:
            await admin.create_topic(topic, partitions=2)
            described, cluster, listed = await asyncio.gather(
                admin.describe_topic(topic), admin.describe_cluster(), admin.list_topics()
            )
            assert described in listed
            assert described.partitions[0].leader_id in {each.broker_id for each in cluster.brokers}
            await admin.set_group_offsets(group, {(topic, 0): 0})
            resets = await admin.reset_group(group, "latest")
            assert [reset.partition for reset in resets] == [0, 1]
            assert [lag.lag for lag in await admin.group_lag(group)] == [0, 0]
            with pytest.raises(headrace.aio.TopicAlreadyExists):
                await admin.create_topic(topic)
            await admin.delete_topic(topic)
        with pytest.raises(headrace.aio.EngineClosed):
            await admin.list_topics()

    asyncio.run(main())


@proves("U2")
def test_a_call_that_waits_holds_up_no_loop_and_can_be_cancelled(broker: Broker, silent: socket.socket) -> None:
    async def main() -> None:
        addresses = [address_of(silent), broker.bootstrap]
        async with headrace.aio.Admin(addresses) as admin:
            asking = asyncio.create_task(admin.list_topics())
            connection, _ = await asyncio.to_thread(silent.accept)
            with connection:
                # The loop has come this far, and the question is under way.
                await asyncio.to_thread(connection.recv, 1)
                asking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asking
            silent.close()
            async with asyncio.timeout(DEADLINE_S):
                assert (await admin.describe_cluster()).brokers

    asyncio.run(main())


@proves("U2")
def test_a_call_under_way_ends_when_the_asynchronous_client_is_closed(silent: socket.socket) -> None:
    async def main() -> None:
        admin = headrace.aio.Admin(address_of(silent))
        asking = asyncio.create_task(admin.list_topics())
        connection, _ = await asyncio.to_thread(silent.accept)
        with connection:
            await asyncio.to_thread(connection.recv, 1)
            async with asyncio.timeout(DEADLINE_S):
                await admin.close()
                with pytest.raises(headrace.EngineClosed):
                    await asking

    asyncio.run(main())


@proves("U2")
def test_a_client_leaves_the_programs_signal_handlers_alone(silent: socket.socket) -> None:
    async def main() -> None:
        before = signal.getsignal(signal.SIGINT)
        admin = headrace.aio.Admin(address_of(silent))
        asking = asyncio.create_task(admin.list_topics())
        connection, _ = await asyncio.to_thread(silent.accept)
        asking.cancel()
        with connection, pytest.raises(asyncio.CancelledError):
            await asking
        assert signal.getsignal(signal.SIGINT) is before
        await admin.close()
        assert signal.getsignal(signal.SIGINT) is before

    asyncio.run(main())
