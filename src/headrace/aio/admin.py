# Made by tools/unasync.py of src/headrace/client/admin/admin.py: change that one, then run `make unasync`.
"""The public admin client, for asyncio: topics, groups, offsets, settings, the cluster.

    async with Admin("127.0.0.1:9092") as admin:
        await admin.create_topic("orders", partitions=6)
        print(await admin.group_lag("billing"))

It speaks Kafka's protocol, to Headrace or to Apache Kafka. Nothing is remembered between calls but connections.
Any task of its loop may use it; calls run one after another, in a thread of the client's own, so that the loop goes on
meanwhile (`headrace.aio.calls` says why). A call that is cancelled is given up; the broker may have done it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

from headrace.aio.calls import Calls
from headrace.client import DEFAULT_BOOTSTRAP
from headrace.client.admin import groups, operations, transactions
from headrace.client.admin.cluster import Cluster, Retry
from headrace.client.admin.fetch import Moment, moment_of, offsets_at
from headrace.client.admin.groups import GroupDescription, GroupListing, OffsetReset, PartitionLag
from headrace.client.admin.operations import ClusterDescription, Config, ConfigValue, ResourceKind
from headrace.client.admin.transactions import (
    ActiveProducer,
    HangingTransaction,
    TransactionDescription,
    TransactionListing,
)
from headrace.client.connection.metadata import Topic
from headrace.client.connection.tls import Tls
from headrace.client.consumer.group_protocol import TopicPartition
from headrace.client.producer.transaction_requests import PreparedTransaction


class Admin:
    """Asks and changes what a cluster has. Use it as a context manager, or close it.

    Errors that may pass (a leader that moves, a broker that is restarted) are waited out for `timeout_ms`. Others say
    what is wrong: UnknownTopic, TopicAlreadyExists, GroupNotFound, GroupNotEmpty, InvalidRequest, or a Refusal that has
    the broker's words, and its `kafka_code`.

    bootstrap: `host:port` of some brokers, with commas between or in a list.
    client_id: what brokers log and set quotas by.
    timeout_ms: how long each answer is waited for, and how long what may pass is tried again.
    tls: speak TLS with the brokers: True trusts the system's authorities, the path of a PEM file those in it; or an
        ssl.SSLContext.
    """

    def __init__(
        self,
        bootstrap: str | Iterable[str] = DEFAULT_BOOTSTRAP,
        *,
        client_id: str = "headrace",
        timeout_ms: int = 30_000,
        tls: Tls = None,
    ) -> None:
        self._timeout_ms = timeout_ms
        retry = Retry(within_ms=timeout_ms)
        self._calls = Calls(Cluster(bootstrap, client_id=client_id, timeout_ms=timeout_ms, retry=retry, tls=tls))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Let the connections go. A call that is under way elsewhere raises EngineClosed."""
        await self._calls.close()

    # The cluster

    async def describe_cluster(self) -> ClusterDescription:
        """Its id, its brokers that are up, and which of them is the controller."""
        return await self._calls.call(operations.describe_cluster)

    # Topics

    async def list_topics(self, *, internal: bool = False) -> list[Topic]:
        """All topics, by name, with their partitions; `internal`: also those that brokers keep for themselves."""
        return await self._calls.call(operations.list_topics, internal=internal)

    async def describe_topic(self, name: str) -> Topic:
        """A topic with its partitions: leader, replicas, who is in sync."""
        return await self._calls.call(Cluster.topic, name)

    async def create_topic(
        self,
        name: str,
        *,
        partitions: int | None = None,
        replicas: int | None = None,
        configs: Mapping[str, ConfigValue] | None = None,
    ) -> None:
        """Create a topic and wait until it can be used. Counts not given are those of the broker's settings."""
        await self._calls.call(
            operations.create_topic,
            name,
            partitions=operations.DEFAULT_COUNT if partitions is None else partitions,
            replicas=operations.DEFAULT_COUNT if replicas is None else replicas,
            configs=configs,
            timeout_ms=self._timeout_ms,
        )

    async def delete_topic(self, name: str) -> None:
        """Delete a topic with all that is in it."""
        await self._calls.call(operations.delete_topic, name, timeout_ms=self._timeout_ms)

    async def create_partitions(self, topic: str, count: int) -> None:
        """Raise the number of partitions of a topic to `count`; they never become fewer."""
        await self._calls.call(operations.create_partitions, topic, count, timeout_ms=self._timeout_ms)

    async def delete_records(self, topic: str, before: Mapping[int, int]) -> dict[int, int]:
        """Delete the records of partitions that are before an offset (-1: all); answers where each begins now."""
        return await self._calls.call(operations.delete_records, topic, before, timeout_ms=self._timeout_ms)

    async def recall(self, topic: str, partition: int, offset: int) -> bool:
        """Have a delayed record never delivered, by the offset that its producer was told. False: it is too late, or no
        record with this offset was delayed. Brokers of Headrace only.
        """
        return await self._calls.call(operations.recall, topic, partition, offset)

    async def offsets(
        self, topic: str, at: Moment = "latest", partitions: Iterable[int] | None = None
    ) -> dict[int, int]:
        """Partition to offset: of the first record, of the next one to come, or of the first that is not before a time;
        where there is none, of the next one to come. Of these partitions, or of all.
        """
        moment = moment_of(at)
        if partitions is None:
            described = await self.describe_topic(topic)
            partitions = range(len(described.partitions))
        return await self._calls.call(offsets_at, topic, list(partitions), moment)

    # Groups

    async def list_groups(self) -> list[GroupListing]:
        """The groups of all brokers, by name."""
        return await self._calls.call(groups.list_groups)

    async def describe_group(self, group: str) -> GroupDescription:
        """A group with its members, and the partitions of each."""
        return await self._calls.call(groups.describe_group, group)

    async def group_lag(self, group: str) -> list[PartitionLag]:
        """How far the group is behind in each partition that it has committed, or that a member has."""
        described = await self.describe_group(group)
        return await self._calls.call(groups.group_lag, described)

    async def group_offsets(self, group: str) -> dict[TopicPartition, int]:
        """(topic, partition) to the offset of the next record to read, of all that the group has committed."""
        return await self._calls.call(groups.fetch_offsets, group)

    async def set_group_offsets(self, group: str, offsets: Mapping[TopicPartition, int]) -> None:
        """Commit these offsets, as they are, into a group without members; a group that is not there is made."""
        await self._calls.call(groups.commit_offsets, group, offsets)

    async def reset_group(
        self,
        group: str,
        to: Moment | int,
        *,
        topics: Sequence[str] = (),
        partitions: Sequence[int] = (),
        dry_run: bool = False,
    ) -> list[OffsetReset]:
        """Let a group without members go on elsewhere: at the beginning, at the end, at a time, or at an offset (or as
        near to it as the log reaches). In all topics that it has read, or in these; in all partitions, or in these.
        Answers what was committed, or with `dry_run` what would be.
        """
        moment, offset = (None, to) if isinstance(to, int) else (moment_of(to), None)
        resets = await self._calls.call(
            groups.plan_reset, group, moment=moment, offset=offset, topics=topics, partitions=partitions
        )
        if not dry_run:
            await self.set_group_offsets(group, {(found.topic, found.partition): found.offset for found in resets})
        return resets

    async def delete_group_offsets(self, group: str, partitions: Iterable[TopicPartition]) -> None:
        """Forget what a group has committed of these partitions, of which no member reads the topic."""
        await self._calls.call(groups.delete_offsets, group, list(partitions))

    async def delete_group(self, group: str) -> None:
        """Delete a group without members, with all that it has committed."""
        await self._calls.call(groups.delete_group, group)

    # Transactions

    async def list_transactions(
        self,
        *,
        states: Sequence[str] = (),
        producer_ids: Sequence[int] = (),
        longer_than_ms: int | None = None,
        pattern: str | None = None,
    ) -> list[TransactionListing]:
        """The transactional ids that brokers know, by name: all, or those in these states (`Ongoing`, `Empty`, ...), of
        these producers, open for longer than so long, with a name that the regular expression describes.
        """
        return await self._calls.call(
            transactions.list_transactions,
            states=states,
            producer_ids=producer_ids,
            longer_than_ms=longer_than_ms,
            pattern=pattern,
        )

    async def describe_transactions(self, transactional_ids: Iterable[str]) -> list[TransactionDescription]:
        """What the coordinator knows of each: state, since when it is open, its partitions, and who opened it."""
        return await self._calls.call(transactions.describe_transactions, list(transactional_ids))

    async def end_transactions(self, prepared: Iterable[PreparedTransaction], *, commit: bool) -> None:
        """Commit or abort prepared transactions, many at once; each may have been ended so before. All are tried;
        TransactionRefused names those that were ended otherwise.
        """
        await self._calls.call(transactions.end_transactions, list(prepared), commit=commit)

    async def describe_producers(self, topic: str, partitions: Iterable[int] | None = None) -> list[ActiveProducer]:
        """The producers that the leaders of a topic's partitions remember, and where their transactions began."""
        if partitions is None:
            described = await self.describe_topic(topic)
            partitions = range(len(described.partitions))
        return await self._calls.call(transactions.describe_producers, [(topic, number) for number in partitions])

    async def find_hanging_transactions(
        self, topics: Sequence[str] = (), *, older_than_ms: int = transactions.HANGING_AFTER_MS
    ) -> list[HangingTransaction]:
        """Open transactions in logs that no coordinator knows of: readers of committed records wait for them."""
        return await self._calls.call(transactions.find_hanging, topics=topics, older_than_ms=older_than_ms)

    async def abort_hanging_transaction(self, hanging: HangingTransaction) -> None:
        """Write the marker of an abort into its partition, past its coordinator."""
        await self._calls.call(transactions.abort_hanging, hanging.producer)

    # Settings

    async def describe_configs(self, kind: ResourceKind, name: str | int = "") -> list[Config]:
        """All settings in force of a topic or a group (by name) or a broker (by id), with where each comes from; of the
        cluster, those that were set for all brokers.
        """
        return await self._calls.call(operations.describe_configs, kind, str(name))

    async def alter_configs(
        self,
        kind: ResourceKind,
        name: str | int = "",
        *,
        values: Mapping[str, ConfigValue] | None = None,
        unset: Iterable[str] = (),
    ) -> None:
        """Set some settings, and bring others back to their defaults; the rest stays. `cluster`: of all brokers."""
        await self._calls.call(operations.alter_configs, kind, str(name), values=values, unset=list(unset))
