"""Bugs that a front end can have: see `planted`. What they break is seen by clients alone."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from headrace.cluster.producer_ids import ProducerIds
from headrace.coordinators import state_log, state_partitions
from headrace.coordinators.state_partitions import StatePartitions
from headrace.errors import ErrorCode
from headrace.groups.coordinator import GroupCoordinator
from headrace.groups.group import Group
from headrace.kafka.api import delete_records, fetch, list_offsets, produce
from headrace.kafka.connection import Connection
from headrace.partitions.leader_core import LeaderCore
from headrace.partitions.partition import Partition
from headrace.storage.producers import ProducerTable
from headrace.wire import produce as wire
from simulator.planted import found_by, plant, swap

LEADER_ALONE = 1


# Producing.


@plant
def produce_answered_by_the_leader_alone(stack: ExitStack) -> None:
    """The handler takes acks=-1 for acks=1."""
    decode = wire.decode

    def decoded(*args: Any) -> Any:
        request = decode(*args)
        return request._replace(acks=LEADER_ALONE) if request.acks == -1 else request

    swap(stack, wire, "decode", decoded)


@plant
def overdue_produce_answered_as_done(stack: ExitStack) -> None:
    """A produce that was not committed in time is answered as if it had been."""
    swap(stack, produce.PendingProduce, "expire", produce.PendingProduce._answer)


@plant
def failed_wait_answered_as_done(stack: ExitStack) -> None:
    """Who waits for replicas when the broker ceases to lead hears that all is well."""
    swap(stack, produce.PendingProduce, "failed", lambda self, *_: self.passed())


@plant
def duplicate_answered_with_the_end(stack: ExitStack) -> None:
    """A batch that is sent again is told the offset that it would get now."""
    append = Partition.append

    def appended(self: Partition, *args: Any) -> Any:
        end = self.log.end_offset
        found = append(self, *args)
        return (end, end, found[2]) if self.log.end_offset == end else found

    swap(stack, Partition, "append", appended)


@plant
def forget_a_refused_first_batch(stack: ExitStack) -> None:
    """The second batch of a producer is taken though the first was refused."""
    swap(stack, ProducerTable, "refused", lambda *_: None)


@plant
def take_any_sequence(stack: ExitStack) -> None:
    """Sequences are not compared at all."""
    swap(stack, ProducerTable, "check", lambda *_: None)


@plant
def the_same_producer_id_for_all(stack: ExitStack) -> None:
    """Every block of producer ids begins anew."""

    async def drawn(_: ProducerIds) -> int:
        return 7

    swap(stack, ProducerIds, "next", drawn)


@plant
def answers_as_they_come(stack: ExitStack) -> None:
    """What is ready is sent, though an earlier request is not answered."""
    send = Connection._send_ready

    def sent(self: Connection) -> None:
        ready = sorted(self._responses, key=lambda response: response.parts is None)
        self._responses.clear()
        self._responses.extend(ready)
        send(self)

    swap(stack, Connection, "_send_ready", sent)


# Reading.


@plant
def follower_says_out_of_range(stack: ExitStack) -> None:
    """A follower that is behind says that the offset is not there."""
    swap(
        stack, fetch, "ErrorCode", type("Codes", (ErrorCode,), {"OFFSET_NOT_AVAILABLE": ErrorCode.OFFSET_OUT_OF_RANGE})
    )


@plant
@found_by("tests/partitions/test_partitions.py::test_an_epoch_of_another_time_is_refused")
def read_in_any_epoch(stack: ExitStack) -> None:
    """The leader epoch that a consumer knows is not compared."""
    swap(stack, Partition, "check_epoch", lambda *_: None)


@plant
def end_told_too_early(stack: ExitStack) -> None:
    """A new leader tells its watermark as the end before it has reached what its epoch began with."""
    swap(stack, list_offsets, "_end_known", lambda _: True)


@plant
@found_by("tests/replication/test_starts.py::test_a_new_leader_tells_no_start_before_all_members_have_it")
def start_told_too_early(stack: ExitStack) -> None:
    """A start is told as soon as this replica has it."""
    swap(stack, Partition, "first_offset", lambda self: self.log.start_offset)


@plant
def deletion_answered_at_once(stack: ExitStack) -> None:
    """DeleteRecords is answered with what was asked for, when it was asked for."""
    delete = delete_records._Deletion._delete

    def deleted(self: Any, topic: str, asked: int, start: Any) -> None:
        delete(self, topic, asked, start)
        if not start.answered:
            start.answered = True
            start.answer.low_watermark = asked
            self.ended(start)

    swap(stack, delete_records._Deletion, "_delete", deleted)


@plant
def start_raised_without_the_followers(stack: ExitStack) -> None:
    """The leader begins where it wants to, wherever its followers do."""
    swap(stack, LeaderCore, "agreed_start", lambda self: self.wanted_start)


# Groups.


@plant
def commit_answered_by_the_leader_alone(stack: ExitStack) -> None:
    """What groups append is answered when the coordinator has written it."""
    swap(stack, state_log, "ALL_IN_SYNC", LEADER_ALONE)


@plant
def commit_seen_before_it_is_in_the_log(stack: ExitStack) -> None:
    """A commit is answered to others while it is on its way."""
    append = GroupCoordinator._append

    def appended(self: GroupCoordinator, shard: Any, records: Any, done: Any) -> None:
        if getattr(done, "func", None) is not None and done.func.__name__ == "_committed":
            _, group_id, _, _, accepted, _ = done.args
            for (topic, partition), offset in accepted.items():
                shard.offsets.put(group_id, topic, partition, offset)
        append(self, shard, records, done)

    swap(stack, GroupCoordinator, "_append", appended)


@plant
def commit_refused_and_kept(stack: ExitStack) -> None:
    """A commit that could not be appended is answered as done."""
    committed: Any = GroupCoordinator._committed

    def always(self: GroupCoordinator, *args: Any) -> None:
        committed(self, *args[:-1], ErrorCode.NONE)

    swap(stack, GroupCoordinator, "_committed", always)


@plant
def groups_open_before_the_watermark(stack: ExitStack) -> None:
    """A new coordinator loads what it knows to be committed, though its epoch began with more."""
    begun = state_partitions._Load.__init__

    def built(self: Any, owner: Any, partition: Partition, *rest: Any) -> None:
        begun(self, owner, partition, *rest)
        self._needed = self._end = partition.high_watermark

    swap(stack, state_partitions._Load, "__init__", built)


@plant
def groups_open_without_a_load(stack: ExitStack) -> None:
    """A new coordinator answers from nothing."""
    read = state_partitions._Load._read_piece

    def nothing(self: Any, *, warm: bool) -> None:
        self._offset = self._end
        read(self, warm=warm)

    swap(stack, state_partitions._Load, "_read_piece", nothing)


@plant
def coordinator_does_not_resign(stack: ExitStack) -> None:
    """A broker that leads no more goes on answering for its groups."""
    swap(stack, StatePartitions, "_resign", lambda *_: None)


@plant
def commit_of_any_generation(stack: ExitStack) -> None:
    """Members that were left behind may commit."""
    swap(stack, Group, "commit_fault", lambda *_: ErrorCode.NONE)


@plant
def assignment_told_before_it_is_kept(stack: ExitStack) -> None:
    """Members get their partitions before the record of them is in the log."""
    append = GroupCoordinator._append

    def appended(self: GroupCoordinator, shard: Any, records: Any, done: Any) -> None:
        if getattr(done, "func", None) is None or done.func.__name__ != "_stored":
            append(self, shard, records, done)
            return
        append(self, shard, records, lambda _: None)
        done(ErrorCode.NONE)

    swap(stack, GroupCoordinator, "_append", appended)
