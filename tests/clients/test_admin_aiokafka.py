"""The admin calls of aiokafka."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource

from brokers import Broker
from clients.records import Client, Record
from clients.topics import MakeTopic
from proving import proves


def with_admin(broker: Broker, work: Callable[[AIOKafkaAdminClient], Awaitable[None]]) -> None:
    async def run() -> None:
        admin = AIOKafkaAdminClient(bootstrap_servers=broker.bootstrap)
        await admin.start()
        try:
            await work(admin)
        finally:
            await admin.close()

    asyncio.run(run())


@proves("J7")
def test_topics_with_aiokafka(broker: Broker) -> None:
    name = f"admin-{uuid.uuid4()}"

    async def work(admin: Any) -> None:
        created = await admin.create_topics([NewTopic(name, 3, 1)])
        assert [error[1] for error in created.topic_errors] == [0]
        again = await admin.create_topics([NewTopic(name, 3, 1)])
        assert [error[1] for error in again.topic_errors] == [36]
        assert name in await admin.list_topics()
        await admin.create_partitions({name: NewPartitions(5)})
        partitions: list[int] = []
        while partitions != [0, 1, 2, 3, 4]:
            (described,) = await admin.describe_topics([name])
            partitions = sorted(part["partition"] for part in described["partitions"])
        deleted = await admin.delete_topics([name])
        assert [error[1] for error in deleted.topic_error_codes] == [0]
        listed = [name]
        while name in listed:
            listed = await admin.list_topics()

    with_admin(broker, work)


def test_settings_and_cluster_with_aiokafka(broker: Broker, topic: MakeTopic) -> None:
    name = topic()

    async def setting(admin: Any, key: str) -> str:
        (answer,) = await admin.describe_configs([ConfigResource("topic", name)])
        entries = answer.resources[0][4]
        return str(next(entry[1] for entry in entries if entry[0] == key))

    async def work(admin: Any) -> None:
        assert await setting(admin, "cleanup.policy") == "delete"
        await admin.alter_configs([ConfigResource("topic", name, {"cleanup.policy": "compact"})])
        assert await setting(admin, "cleanup.policy") == "compact"
        cluster = await admin.describe_cluster()
        assert [(node["host"], node["port"]) for node in cluster["brokers"]] == [broker.host_port]

    with_admin(broker, work)


def test_groups_and_records_with_aiokafka(broker: Broker, clients: dict[str, Client], topic: MakeTopic) -> None:
    name, group = topic(), f"group-{uuid.uuid4()}"
    partition = TopicPartition(name, 0)
    clients["aiokafka"].produce(broker.bootstrap, name, [Record(b"%d" % n) for n in range(10)])

    async def work(admin: Any) -> None:
        consumer = AIOKafkaConsumer(bootstrap_servers=broker.bootstrap, group_id=group, enable_auto_commit=False)
        await consumer.start()
        consumer.assign([partition])
        await consumer.commit({partition: 7})
        await consumer.stop()
        assert group in {listed[0] for listed in await admin.list_consumer_groups()}
        (described,) = await admin.describe_consumer_groups([group])
        assert [found[2] for found in described.groups] == ["Empty"]
        assert (await admin.list_consumer_group_offsets(group))[partition].offset == 7
        assert await admin.delete_records({partition: RecordsToDelete(4)}) == {partition: 4}

    with_admin(broker, work)
