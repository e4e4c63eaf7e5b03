"""The coordinator of the groups whose partition of `__consumer_offsets` this broker leads.

A request is answered through its `reply` callback once what it changes is below the high watermark: commits, the
assignment before the first SyncGroup that carries it, deletions. Memory changes in the order of the log, when the log
has it, so a coordinator that takes over by replaying the partition arrives at the same groups and offsets. Joins that
wait, heartbeats and rebalances under way are not kept: members find the new coordinator and join again.

One deadline heap serves all groups; a group stands in it once, at a time not later than its earliest deadline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, cast

from headrace.cluster.names import group_name_fault
from headrace.coordinators.alarms import NEVER, Alarms
from headrace.coordinators.record_fields import Record
from headrace.coordinators.state_log import (
    Append,
    AppendDone,
    AppendInTransaction,
    ProducerEpoch,
    Settled,
    partition_of,
)
from headrace.coordinators.wall import Wall
from headrace.errors import ErrorCode
from headrace.groups import descriptions, offsets
from headrace.groups.consumer_group import ConsumerGroup
from headrace.groups.consumer_messages import JOINING, ConsumerHeartbeat, ConsumerReply, DescribedConsumerGroup
from headrace.groups.consumer_records import GroupEpoch, GroupPieces
from headrace.groups.descriptions import Lag
from headrace.groups.group import Action, Answer, Group, Moment, State, Store
from headrace.groups.limits import ConsumerLimits, CoordinatorLimits, ShareLimits
from headrace.groups.messages import (
    NO_GENERATION,
    CommitRequest,
    DescribedGroup,
    JoinReply,
    JoinRequest,
    Leaver,
    LeaveReply,
    LeftMember,
    ListReply,
    OffsetDeleteReply,
    OffsetFetchReply,
    PartitionResult,
    SyncReply,
    SyncRequest,
    TransactionalCommit,
)
from headrace.groups.migration import downgraded, may_downgrade, may_upgrade, upgrade
from headrace.groups.modern_group import ModernGroup, Timing, Write
from headrace.groups.offsets import NO_TOPIC_ID, TopicId, expired
from headrace.groups.records import (
    OffsetAndMetadata,
    OffsetKey,
    encode_group,
    encode_group_key,
    encode_offset_key,
)
from headrace.groups.shard import AnyGroup, Shard, ShardLoad
from headrace.groups.share_group import ShareGroup
from headrace.groups.share_groups import Codes, Host, NoPersister, ShareGroups
from headrace.groups.share_records import SharePieces
from headrace.groups.topic_catalog import TopicCatalog
from headrace.ports.clock import Clock
from headrace.queues.messages import Persister, ShareGroupConfig

GROUPS_PER_TURN: Final = 200
"""Groups that one turn of the loop looks through for what has expired."""

GroupSettings = Callable[[str], Mapping[str, str]]
"""The settings that a group has of its own."""
ConsumerPorts = tuple[TopicCatalog, Callable[[], ConsumerLimits], Callable[[], Timing], Callable[[], str]]
SharePorts = tuple[TopicCatalog, Callable[[], ShareLimits], Callable[[], Timing], Callable[[], str]]


class GroupCoordinator:
    def __init__(
        self,
        clock: Clock,
        append: Append,
        partition_count: int,
        draw_id: Callable[[], str],
        limits: CoordinatorLimits,
        topic_id: TopicId = lambda _name: NO_TOPIC_ID,
        append_in_transaction: AppendInTransaction | None = None,
        group_settings: GroupSettings = lambda _group: {},
        persister: Persister | None = None,
    ) -> None:
        self._clock = clock
        self._append_records = append
        self._append_in_transaction = append_in_transaction or _no_transactions
        self.partition_count = partition_count
        """Of the offsets topic; whoever sees the cluster keeps it up to date, and the limits too."""
        self.limits = limits
        self._draw_id = draw_id
        self._topic_id = topic_id
        self._group_settings = group_settings
        self.catalog = TopicCatalog()
        """Whoever sees the cluster has it follow, and then calls `topics_changed`."""
        host = Host(self._find, self._creation_fault, self._make_share_group, self._follow, self._now)
        self.share = ShareGroups(host, persister or NoPersister())
        self._settling: set[ModernGroup] = set()
        """Groups that settle at the end of this turn."""
        self._wall = Wall(clock)
        self._alarms = Alarms(clock)
        self._shards: dict[int, Shard] = {}
        self._closed = False
        self._schedule_expiry()

    # Leadership of partitions

    def lead(self, partition: int, epoch: int) -> ShardLoad:
        """This broker leads the partition in this epoch: its groups answer COORDINATOR_LOAD_IN_PROGRESS until they are
        loaded."""
        self.resign(partition)
        shard = self._shards[partition] = Shard(partition, epoch)
        return ShardLoad(shard, self._open)

    def resign(self, partition: int) -> None:
        """This broker does not lead the partition any more; everyone who waits looks for the new coordinator."""
        shard = self._shards.pop(partition, None)
        if shard is None:
            return
        shard.gone = True
        for group in list(shard.groups.values()):
            if not group.is_dead:
                self._end(shard, group, ErrorCode.NOT_COORDINATOR)

    def close(self) -> None:
        self._closed = True
        self._schedule_expiry()
        for partition in list(self._shards):
            self.resign(partition)

    def _open(self, shard: Shard) -> None:
        now = self._now()

        def restored(group_id: str, pieces: GroupPieces) -> ConsumerGroup | ShareGroup:
            if isinstance(pieces, SharePieces):
                return ShareGroup.restored(group_id, pieces, *self._share_ports(group_id), now)
            return ConsumerGroup.restored(group_id, pieces, *self._consumer_ports(group_id), now)

        shard.open(self.limits.group, self._draw_id, now, restored)
        self._append(shard, shard.give_ids(self._topic_id), _unheard)
        for group in shard.groups.values():
            if isinstance(group, ModernGroup):
                self._follow(shard, group)
            else:
                self._set_alarm(shard, group)

    # Membership

    def join(self, group_id: str, request: JoinRequest, reply: Callable[[JoinReply], None]) -> None:
        shard = self._find(group_id)
        if isinstance(shard, int):
            reply(JoinReply(shard, request.member_id))
            return
        group = shard.groups.get(group_id)
        if group is None:
            fault = ErrorCode.UNKNOWN_MEMBER_ID if request.member_id else self._creation_fault(group_id)
            if fault != ErrorCode.NONE:
                reply(JoinReply(fault, request.member_id))
                return
            group = self._create(shard, group_id)
        if isinstance(group, ConsumerGroup) and group.is_empty:
            group = self._downgrade(shard, group)
        if isinstance(group, ShareGroup):
            reply(JoinReply(ErrorCode.INCONSISTENT_GROUP_PROTOCOL, request.member_id))
        elif isinstance(group, ConsumerGroup):
            group.join(reply, request, self._now())
            self._follow(shard, group)
        else:
            self._act(shard, group, group.join(reply, request, self._now()))

    def sync(self, group_id: str, request: SyncRequest, reply: Callable[[SyncReply], None]) -> None:
        shard = self._find(group_id)
        group = None if isinstance(shard, int) else shard.groups.get(group_id)
        if isinstance(shard, int) or group is None or isinstance(group, ShareGroup):
            reply(SyncReply(shard if isinstance(shard, int) else ErrorCode.UNKNOWN_MEMBER_ID))
        elif isinstance(group, ConsumerGroup):
            group.sync(reply, request, self._now())
            self._follow(shard, group)
        else:
            self._act(shard, group, group.sync(reply, request, self._now()))

    def heartbeat(self, group_id: str, member_id: str, generation_id: int, group_instance_id: str | None = None) -> int:
        """The error code."""
        shard = self._find(group_id)
        if isinstance(shard, int):
            return shard
        group = shard.groups.get(group_id)
        if group is None or isinstance(group, ShareGroup):
            return ErrorCode.UNKNOWN_MEMBER_ID
        if isinstance(group, ConsumerGroup):
            code = group.beat(member_id, group_instance_id, generation_id, self._now())
        else:
            code = group.heartbeat(member_id, group_instance_id, generation_id, self._now())
        self._set_alarm(shard, group)
        return code

    def leave(self, group_id: str, leavers: Sequence[Leaver]) -> LeaveReply:
        shard = self._find(group_id)
        if isinstance(shard, int):
            return LeaveReply(shard)
        group = shard.groups.get(group_id)
        if group is None or isinstance(group, ShareGroup):
            unknown = (LeftMember(one.member_id, one.group_instance_id, ErrorCode.UNKNOWN_MEMBER_ID) for one in leavers)
            return LeaveReply(ErrorCode.NONE, tuple(unknown))
        if isinstance(group, ConsumerGroup):
            reply = group.leave(leavers, self._now())
            self._follow(shard, group)
            return reply
        reply, actions = group.leave(leavers, self._now())
        self._act(shard, group, actions)
        return reply

    def consumer_heartbeat(
        self, group_id: str, request: ConsumerHeartbeat, reply: Callable[[ConsumerReply], None]
    ) -> None:
        """A member of the consumer protocol (KIP-848) joins, goes on or leaves."""
        shard = self._find(group_id)
        if isinstance(shard, int):
            reply(ConsumerReply(shard, member_id=request.member_id))
            return
        group = self._consumer_group(shard, group_id, is_joining=request.member_epoch == JOINING)
        if isinstance(group, int):
            reply(ConsumerReply(group, member_id=request.member_id))
            return
        group.heartbeat(reply, request, self._now())
        self._follow(shard, group)

    def _consumer_group(self, shard: Shard, group_id: str, *, is_joining: bool) -> ConsumerGroup | int:
        """The group of the consumer protocol of this name, made or brought over for one who joins; or why not."""
        group = shard.groups.get(group_id)
        if group is not None and group.is_dead:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        if isinstance(group, ConsumerGroup):
            return group
        if isinstance(group, ShareGroup):
            return ErrorCode.GROUP_ID_NOT_FOUND
        if not is_joining:
            return ErrorCode.UNKNOWN_MEMBER_ID
        fault = self._creation_fault(group_id) if group is None else ErrorCode.NONE
        if fault != ErrorCode.NONE:
            return fault
        now = self._now()
        made = ConsumerGroup(group_id, *self._consumer_ports(group_id), now)
        if group is not None:
            if not may_upgrade(group, self.limits.consumer) or not upgrade(group, made, self.catalog, now):
                return ErrorCode.GROUP_ID_NOT_FOUND
            self._end(shard, group, ErrorCode.REBALANCE_IN_PROGRESS)
        shard.groups[group_id] = made
        return made

    def _consumer_ports(self, group_id: str) -> ConsumerPorts:
        def timing() -> Timing:
            own, limits = self._group_settings(group_id), self.limits.consumer
            session_ms = limits.session_ms(own.get("consumer.session.timeout.ms"))
            return Timing(session_ms, limits.heartbeat_ms(own.get("consumer.heartbeat.interval.ms")))

        return self.catalog, lambda: self.limits.consumer, timing, self._draw_id

    def _share_ports(self, group_id: str) -> SharePorts:
        def timing() -> Timing:
            own, limits = self._group_settings(group_id), self.limits.share
            session_ms = limits.session_ms(own.get("share.session.timeout.ms"))
            return Timing(session_ms, limits.heartbeat_ms(own.get("share.heartbeat.interval.ms")))

        return self.catalog, lambda: self.limits.share, timing, self._draw_id

    def _make_share_group(self, group_id: str) -> ShareGroup:
        return ShareGroup(group_id, *self._share_ports(group_id), self._now())

    def share_config(self, group_id: str) -> ShareGroupConfig:
        """What holds for the deliveries of a share group, whether it is here or not."""
        return self.limits.share.config(self._group_settings(group_id))

    def _downgrade(self, shard: Shard, group: ConsumerGroup) -> Group:
        """The group goes on as a classic one. The consumer protocol's records go, and the classic one is written, at
        once: whoever left hears of it when that is in the log."""
        classic = downgraded(group, self.limits.group, self._draw_id, self._now())
        records = group.tombstones()
        records.append((encode_group_key(group.group_id), encode_group(classic.snapshot())))
        left = group.departed()
        self._end(shard, group, ErrorCode.REBALANCE_IN_PROGRESS)
        shard.groups[group.group_id] = classic

        def stored(code: int) -> None:
            for ticket, reply in left:
                failed = ConsumerReply(offsets.FAULTS.get(code, code), member_id=reply.member_id)
                cast(Callable[[object], None], ticket)(reply if code == ErrorCode.NONE else failed)

        self._append(shard, records, stored)
        return classic

    def _follow(self, shard: Shard, group: ConsumerGroup | ShareGroup) -> None:
        """Answer who can be answered, and see that the rest goes on."""
        for answer in group.answers():
            cast(Callable[[object], None], answer.ticket)(answer.reply)
        if group.is_dead:
            self._set_alarm(shard, group)
            return
        if isinstance(group, ShareGroup):
            self.share.initialize(shard, group)
        elif may_downgrade(group, self.limits.consumer, self.limits.group):
            classic = self._downgrade(shard, group)
            self._act(shard, classic, classic.rebalance(self._now()))
            return
        if group.unsettled and group.settle_at <= self._clock.now() and group not in self._settling:
            self._settling.add(group)
            self._clock.call_soon(partial(self._settle, shard, group))
        self._set_alarm(shard, group)
        kept = shard.offsets.of(group.group_id) or shard.offsets.transactional.of(group.group_id)
        if group.never_used and not kept:
            shard.forget(group, ())

    def _settle(self, shard: Shard, group: ConsumerGroup | ShareGroup) -> None:
        self._settling.discard(group)
        if group.is_dead:
            return
        write = group.settle(self._now())
        if write is not None:
            self._append(shard, write.records, partial(self._written, shard, group, write))
        self._follow(shard, group)

    def _written(self, shard: Shard, group: ConsumerGroup | ShareGroup, write: Write, code: int) -> None:
        group.written(write, offsets.FAULTS.get(code, code), self._now())
        self._follow(shard, group)

    def topics_changed(self, names: frozenset[str]) -> None:
        """Topics of these names came, went or changed, as the catalog says by now."""
        if not names:
            return
        now = self._now()
        for shard in self._open_shards():
            for group in list(shard.groups.values()):
                if isinstance(group, ModernGroup):
                    group.topics_changed(names, now)
                    self._follow(shard, group)

    # Offsets

    def commit(
        self, group_id: str, request: CommitRequest, reply: Callable[[tuple[PartitionResult, ...]], None]
    ) -> None:
        shard, now = self._find(group_id), self._now()
        fault = shard if isinstance(shard, int) else self._commit_fault(shard, group_id, request, now)
        if isinstance(shard, int) or fault != ErrorCode.NONE:
            reply(offsets.all_failed(request, fault))
            return
        refused, accepted = offsets.accept(request, self.limits.metadata_max_bytes, now.wall_ms)
        records = offsets.records_of(group_id, accepted)
        shard.offsets.pending[group_id].update(accepted.keys())
        self._append(shard, records, partial(self._committed, shard, group_id, request, refused, accepted, reply))

    def commit_in_transaction(
        self, group_id: str, request: TransactionalCommit, reply: Callable[[tuple[PartitionResult, ...]], None]
    ) -> None:
        """Offsets that count when the producer's transaction is committed. It must be open in the group's partition of
        the offsets topic, or verified to be."""
        shard, now, commit = self._find(group_id), self._now(), request.commit
        fault = shard if isinstance(shard, int) else self._commit_fault(shard, group_id, commit, now, True)
        if isinstance(shard, int) or fault != ErrorCode.NONE or shard.gone:
            reply(offsets.all_failed(commit, fault or ErrorCode.NOT_COORDINATOR))
            return
        refused, accepted = offsets.accept(commit, self.limits.metadata_max_bytes, now.wall_ms)
        if not accepted:
            reply(offsets.results(commit, refused, ErrorCode.NONE))
            return
        by_key = {OffsetKey(group_id, *place): committed for place, committed in accepted.items()}
        transactional = shard.offsets.transactional
        transactional.appending(by_key)
        producer = ProducerEpoch(request.producer_id, request.producer_epoch)

        def settled(counts: bool) -> None:
            if counts:
                transactional.appended(producer, by_key)
            else:
                transactional.lost(by_key)

        def done(code: int) -> None:
            reply(offsets.results(commit, refused, offsets.FAULTS.get(code, code)))

        records = offsets.records_of(group_id, accepted)
        self._append_in_transaction(shard.partition, shard.epoch, producer, records, settled, done)

    def end_transaction(self, partition: int, epoch: int, producer_id: int, *, committed: bool) -> None:
        """The marker of a producer has passed the watermark of the partition, led in this epoch. Told in the order of
        the log."""
        shard = self._shards.get(partition)
        if shard is None or shard.epoch != epoch or shard.loading:
            return  # a load reads it from the log
        for key in shard.offsets.end_transaction(producer_id, committed=committed):
            if key.group not in shard.groups:
                self._create(shard, key.group)

    def _commit_fault(
        self, shard: Shard, group_id: str, request: CommitRequest, now: Moment, in_transaction: bool = False
    ) -> int:
        group = shard.groups.get(group_id)
        if group is None:
            fault = ErrorCode.ILLEGAL_GENERATION if request.generation_id >= 0 else self._creation_fault(group_id)
            if fault != ErrorCode.NONE:
                return fault
            group = self._create(shard, group_id)
        if isinstance(group, ShareGroup):
            return ErrorCode.GROUP_ID_NOT_FOUND
        fault = group.commit_fault(request, now, in_transaction=in_transaction)
        self._set_alarm(shard, group)
        return fault

    def _committed(
        self,
        shard: Shard,
        group_id: str,
        request: CommitRequest,
        refused: Mapping[tuple[str, int], int],
        accepted: Mapping[tuple[str, int], OffsetAndMetadata],
        reply: Callable[[tuple[PartitionResult, ...]], None],
        code: int,
    ) -> None:
        shard.offsets.answered(group_id, accepted.keys())
        if code == ErrorCode.NONE:
            if group_id not in shard.groups:
                self._create(shard, group_id)
            for (topic, partition), committed in accepted.items():
                shard.offsets.put(group_id, topic, partition, committed)
        reply(offsets.results(request, refused, offsets.FAULTS.get(code, code)))

    def fetch_offsets(
        self,
        group_id: str,
        wanted: Iterable[tuple[str, int]] | None,
        require_stable: bool = False,
        *,
        member_id: str | None = None,
        member_epoch: int = NO_GENERATION,
    ) -> OffsetFetchReply:
        """Committed offsets of these partitions, or of all; of none that a transaction may replace, if they have to be
        stable."""
        shard = self._find(group_id)
        if isinstance(shard, int):
            return OffsetFetchReply(shard)
        group = shard.groups.get(group_id)
        if isinstance(group, ShareGroup):
            return OffsetFetchReply(ErrorCode.GROUP_ID_NOT_FOUND)
        if isinstance(group, ConsumerGroup) and (member_id or member_epoch >= 0):
            fault = group.epoch_fault(member_id or "", member_epoch)
            if fault != ErrorCode.NONE:
                return OffsetFetchReply(fault)
        unstable = shard.offsets.transactional.of(group_id) if require_stable else ()
        found = offsets.fetched(shard.offsets.of(group_id), wanted, self._topic_id, unstable)
        return OffsetFetchReply(ErrorCode.NONE, found)

    def delete_offsets(
        self, group_id: str, wanted: Sequence[tuple[str, int]], reply: Callable[[OffsetDeleteReply], None]
    ) -> None:
        shard = self._find(group_id)
        group = None if isinstance(shard, int) else shard.groups.get(group_id)
        if isinstance(shard, int) or group is None or group.is_dead or isinstance(group, ShareGroup):
            reply(OffsetDeleteReply(shard if isinstance(shard, int) else ErrorCode.GROUP_ID_NOT_FOUND))
            return
        fault, in_use = offsets.deletion_faults(group)
        if fault != ErrorCode.NONE:
            reply(OffsetDeleteReply(fault))
            return
        known = shard.offsets.places(group_id)
        free = [OffsetKey(group_id, *one) for one in wanted if one in known and one[0] not in in_use]

        def deleted(code: int) -> None:
            fault = offsets.FAULTS.get(code, code)
            codes = [
                (topic, n, ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC if topic in in_use else fault) for topic, n in wanted
            ]
            reply(OffsetDeleteReply(ErrorCode.NONE, tuple(PartitionResult(*one) for one in codes)))

        self._drop_offsets(shard, free, deleted)

    def committed_offset(self, group_id: str, topic: str, partition: int) -> int | None:
        """None when there is none for the topic that has this name, or the group cannot be asked now."""
        shard = self._find(group_id)
        committed = None if isinstance(shard, int) else shard.offsets.of(group_id).get((topic, partition))
        known = self._topic_id(topic)
        return None if committed is None or known is None or not committed.is_of(known) else committed.offset

    def drop_topics(self, ids: Collection[bytes]) -> None:
        """Topics with these ids were deleted: nobody can come back to their offsets."""
        for shard in self._open_shards():
            self._drop_offsets(shard, shard.offsets.of_topics(ids), _unheard)
            for group in list(shard.groups.values()):
                if isinstance(group, ShareGroup):
                    group.forget_topics(ids)
                    self._follow(shard, group)

    # Groups as a whole

    def describe(self, group_id: str) -> DescribedGroup:
        """A group that is not here is Dead; whether that is an error depends on the version asked."""
        shard = self._find(group_id)
        if isinstance(shard, int):
            return DescribedGroup(shard, group_id)
        group = shard.groups.get(group_id)
        if group is None:
            return DescribedGroup(ErrorCode.NONE, group_id, State.DEAD.value)
        return descriptions.description(group)

    def describe_consumer(self, group_id: str) -> DescribedConsumerGroup:
        """A group of the consumer protocol; others are not found."""
        shard = self._find(group_id)
        if isinstance(shard, int):
            return DescribedConsumerGroup(shard, group_id)
        group = shard.groups.get(group_id)
        if not isinstance(group, ConsumerGroup) or group.is_dead:
            what = "there is no group" if group is None else "of another protocol is group"
            return DescribedConsumerGroup(ErrorCode.GROUP_ID_NOT_FOUND, group_id, f"{what} {group_id!r}")
        return descriptions.modern_description(group)

    def list_groups(self, states: Collection[str] = (), types: Collection[str] = ()) -> ListReply:
        """Groups in any of these states and types; empty for all. While one partition loads, the list has a gap."""
        loading = any(shard.loading for shard in self._shards.values())
        groups = descriptions.listed(self._open_shards(), states, types)
        return ListReply(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS if loading else ErrorCode.NONE, groups)

    def delete(self, group_id: str, reply: Callable[[int], None]) -> None:
        shard = self._find(group_id)
        if isinstance(shard, int):
            reply(shard)
            return
        group = shard.groups.get(group_id)
        if group is None or group.is_dead:
            reply(ErrorCode.GROUP_ID_NOT_FOUND)
        elif not group.is_vacant:
            reply(ErrorCode.NON_EMPTY_GROUP)
        elif isinstance(group, ShareGroup):
            self._delete_share_group(shard, group, reply)
        else:
            self._bury(shard, group, reply)

    def _delete_share_group(self, shard: Shard, group: ShareGroup, reply: Callable[[int], None]) -> None:
        """Its states first: when its records are gone nobody knows of them."""
        if group.is_changing_states or group.is_initializing:
            reply(ErrorCode.COORDINATOR_NOT_AVAILABLE)
            return

        def deleted(fault: int, codes: Codes) -> None:
            code = fault or next((code for code in codes.values() if code != ErrorCode.NONE), ErrorCode.NONE)
            if code == ErrorCode.NONE and not group.is_vacant:
                code = ErrorCode.NOT_COORDINATOR if group.is_dead else ErrorCode.NON_EMPTY_GROUP
            if code == ErrorCode.NONE:
                self._bury(shard, group, reply)
            else:
                reply(code)

        self.share.delete_states(shard, group, group.states(), deleted)

    def lags(self, end_offset_of: Callable[[str, int], int | None]) -> Iterator[Lag]:
        """How far each group is behind the ends of the partitions that it committed to."""
        return descriptions.lags(self._open_shards(), end_offset_of, self._topic_id)

    def states(self) -> Counter[str]:
        """How many groups are in each state."""
        return Counter(group.state_name for shard in self._open_shards() for group in shard.groups.values())

    # Expiry

    def _schedule_expiry(self) -> None:
        at = NEVER if self._closed else self._clock.now() + self.limits.expiry_check_ms / 1000
        self._alarms.keep(self, at, self._begin_expiry)

    def _begin_expiry(self) -> None:
        groups = [(shard, group) for shard in self._open_shards() for group in shard.groups.values()]
        self._expire_some(groups)
        self._schedule_expiry()

    def _expire_some(self, groups: list[tuple[Shard, AnyGroup]]) -> None:
        """A slice of the groups in this turn, the rest in later ones: the loop is not held up."""
        limits = self.limits
        for shard, group in groups[-GROUPS_PER_TURN:]:
            if isinstance(group, ShareGroup):
                continue  # it has no offsets, and where it begins is kept as long as it is
            if not group.is_dead and group.group_id != limits.archive_group:
                self._expire_offsets(shard, group, limits.retention_ms)
        del groups[-GROUPS_PER_TURN:]
        if groups:
            self._clock.call_soon(partial(self._expire_some, groups))

    def _expire_offsets(self, shard: Shard, group: Group | ConsumerGroup, retention_ms: int) -> None:
        """A commit that is on its way is not in memory yet, and must not be taken for the old one that it replaces."""
        known, pending = shard.offsets.of(group.group_id), shard.offsets.unsettled(group.group_id)
        found = expired(group, known, self._wall.earliest_ms(), retention_ms, self._topic_id)
        keys = [key for key in found if (key.topic, key.partition) not in pending]
        if len(keys) == len(known) and not pending and group.is_vacant:
            self._bury(shard, group, _unheard)
        else:
            self._drop_offsets(shard, keys, _unheard)

    # Storing

    def _append(self, shard: Shard, records: list[Record], done: AppendDone) -> None:
        """Groups that were dropped have no say any more: who loads them from the log must not miss anything."""
        if shard.gone:
            done(ErrorCode.NOT_COORDINATOR)
        elif not records:
            done(ErrorCode.NONE)
        else:
            self._append_records(shard.partition, shard.epoch, records, done)

    def _bury(self, shard: Shard, group: AnyGroup, done: AppendDone) -> None:
        """Remove an empty group with its offsets. It answers nobody while its tombstones are on their way."""
        keys = [OffsetKey(group.group_id, *one) for one in shard.offsets.places(group.group_id)]
        records: list[Record] = [(encode_offset_key(key), None) for key in keys]
        records += group.tombstones()
        revived = self._reviver(group)
        self._end(shard, group, ErrorCode.COORDINATOR_NOT_AVAILABLE)

        def buried(code: int) -> None:
            if code == ErrorCode.NONE:
                shard.forget(group, keys)
            else:
                shard.groups[group.group_id] = revived()
            done(offsets.FAULTS.get(code, code))

        self._append(shard, records, buried)

    def _reviver(self, group: AnyGroup) -> Callable[[], AnyGroup]:
        """What makes an empty group again that could not be removed."""
        if isinstance(group, ShareGroup):
            shared, own_ports = group.pieces(), self._share_ports(group.group_id)
            return lambda: ShareGroup.restored(group.group_id, shared, *own_ports, self._now())
        if isinstance(group, ConsumerGroup):
            pieces = GroupPieces(GroupEpoch(group.epoch, empty_since_ms=group.empty_since_ms), group.target_epoch)
            ports = self._consumer_ports(group.group_id)
            return lambda: ConsumerGroup.restored(group.group_id, pieces, *ports, self._now())
        kept = group.snapshot()
        return lambda: Group.restored(kept, self.limits.group, self._draw_id, self._now())

    def _end(self, shard: Shard, group: AnyGroup, code: int) -> None:
        """The group ends here; everyone who waits is told this code."""
        if isinstance(group, ModernGroup):
            group.remove(code, self._now())
            self._follow(shard, group)
        else:
            self._act(shard, group, group.remove(code, self._now()))

    def _drop_offsets(self, shard: Shard, keys: Sequence[OffsetKey], done: AppendDone) -> None:
        def dropped(code: int) -> None:
            if code == ErrorCode.NONE:
                for key in keys:
                    shard.offsets.drop(key)
            done(code)

        self._append(shard, [(encode_offset_key(key), None) for key in keys], dropped)

    def _stored(self, shard: Shard, group: Group, store: Store, code: int) -> None:
        self._act(shard, group, group.stored(store, offsets.FAULTS.get(code, code), self._now()))

    # Groups and their alarms

    def _act(self, shard: Shard, group: Group, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Answer):
                cast(Callable[[object], None], action.ticket)(action.reply)
            else:
                record = (encode_group_key(group.group_id), encode_group(action.snapshot))
                self._append(shard, [record], partial(self._stored, shard, group, action))
        self._set_alarm(shard, group)
        kept = shard.offsets.of(group.group_id) or shard.offsets.transactional.of(group.group_id)
        if group.never_used and not kept:
            shard.forget(group, ())

    def _set_alarm(self, shard: Shard, group: AnyGroup) -> None:
        self._alarms.keep(group, group.next_deadline, partial(self._ring, shard, group))

    def _ring(self, shard: Shard, group: AnyGroup) -> None:
        if isinstance(group, ModernGroup):
            group.expire(self._now())
            self._follow(shard, group)
        else:
            self._act(shard, group, group.expire(self._now()))

    def _create(self, shard: Shard, group_id: str) -> Group:
        group = shard.groups[group_id] = Group(group_id, self.limits.group, self._draw_id, self._now())
        return group

    def _creation_fault(self, group_id: str) -> int:
        if group_name_fault(group_id) is not None:
            return ErrorCode.INVALID_GROUP_ID
        count = sum(len(shard.groups) for shard in self._shards.values())
        return ErrorCode.GROUP_MAX_SIZE_REACHED if count >= self.limits.groups_max else ErrorCode.NONE

    def _find(self, group_id: str) -> Shard | int:
        """The shard of this group, or the code that says why it cannot be asked."""
        count = self.partition_count
        shard = self._shards.get(partition_of(group_id, count)) if count else None
        if shard is None:
            return ErrorCode.NOT_COORDINATOR
        return ErrorCode.COORDINATOR_LOAD_IN_PROGRESS if shard.loading else shard

    def _open_shards(self) -> Iterator[Shard]:
        return (shard for shard in self._shards.values() if not shard.loading)

    def _now(self) -> Moment:
        return Moment(self._clock.now(), self._wall.latest_ms())


def _no_transactions(
    _index: int, _epoch: int, _producer: ProducerEpoch, _records: list[Record], settled: Settled, done: AppendDone
) -> None:
    settled(False)
    done(ErrorCode.NOT_COORDINATOR)


def _unheard(_code: int) -> None:
    """Nobody waits: what could not be dropped now is found again by the next check."""
