# Made by tools/unasync.py of src/headrace/client/producer/transaction.py: change that one, then run `make unasync`.
"""A transaction, for tasks: all its records and offsets count, or none.

    async with Producer(transactional_id="billing-1") as producer:
        async with producer.transaction() as t:
            t.send("invoices", b"...")
            await t.send_offsets(consumer)

The end of the block commits; an exception in it aborts, and goes on. Records of an aborted transaction are given to no
reader of committed records, whatever was written before.

With `producer.transaction(wait=False)` the end of the block does not wait for the commit: the next transaction is
filled meanwhile. If one is not committed, the next, which may have begun by then, comes to nothing with it, and says
so; `t.wait()` waits for one. What went wrong is raised in any case: by that, by the next transaction, or by the close
of the producer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from headrace.client.errors import (
    NoTransaction,
    TransactionError,
    TransactionFailed,
    TransactionFenced,
    TransactionInDoubt,
    TransactionRefused,
    TransactionTimedOut,
)
from headrace.client.producer.transaction_core import Step, TransactionCore
from headrace.client.producer.transaction_requests import GroupMember, Offsets, PreparedTransaction
from headrace.errors import HeadraceError, InvalidRequest
from headrace.records.builder import Delivery
from headrace.records.record import GivenHeaders

if TYPE_CHECKING:
    from headrace.aio.consumer import Consumer
    from headrace.aio.producer import Producer

log = logging.getLogger(__name__)


class Transaction:
    """One transaction of a producer, from `Producer.transaction`; use it with `async with`, or `begin` and end it.

    What it raises says whether the producer can go on: TransactionFailed, and TransactionTimedOut, that the transaction
    came to nothing and another may be begun; TransactionFenced and TransactionRefused that this producer can have none;
    TransactionInDoubt that nobody has answered whether it is committed, and `commit` may be called again.
    """

    def __init__(self, producer: Producer, core: TransactionCore, *, two_phase: bool, wait: bool) -> None:
        self._producer = producer
        self._core = core
        self._two_phase = two_phase
        self._waits = wait
        self._before: Transaction | None = None
        """The one before it, which is committed while this one takes records."""
        self._commit: Step | None = None
        """Its commit, which nobody has waited for yet."""
        self._has_begun = self._is_over = False
        self._read_by: list[tuple[Consumer, Offsets]] = []
        """What consumers have handed out that is saved with it."""
        # Without a call in between.
        self.send = producer.send_async  # type: ignore[method-assign]

    async def __aenter__(self) -> Self:
        await self.begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_over or self._commit is not None or isinstance(error, TransactionInDoubt):
            return
        if error is not None:
            await self._abort_after(error)
            return
        try:
            await self.commit(wait=self._waits)
        except TransactionFailed as failed:
            if not self._is_over:
                await self._abort_after(failed)
            raise

    async def begin(self) -> None:
        """Open it. The first one of a producer takes over its transactional id: what an earlier instance has left
        open is aborted, and that one can do nothing more."""
        if self._has_begun:
            raise NoTransaction("a transaction is begun once: ask the producer for another one")
        before = self._producer._committing
        if before is not None and (before.is_settled or before._two_phase or self._two_phase):
            await before.wait()
            before = None
        try:
            await self._producer._transact(partial(self._core.begin, two_phase=self._two_phase))
        except TransactionFailed:
            if before is not None:
                await before.wait()
            raise
        self._before = before
        self._has_begun = True

    def send(
        self,
        topic: str,
        value: Any,
        *,
        key: bytes | str | None = None,
        headers: GivenHeaders | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        callback: Callable[[Delivery], object] | None = None,
    ) -> Delivery:
        """Put a record into its batch, as `Producer.send_async`; the commit waits for all of them."""
        return self._producer.send_async(
            topic,
            value,
            key=key,
            headers=headers,
            partition=partition,
            timestamp_ms=timestamp_ms,
            callback=callback,
        )

    async def send_offsets(self, offsets: Consumer | Offsets, group: str | GroupMember | None = None) -> None:
        """Let a group go on from these offsets if the transaction is committed: those of all that a consumer has handed
        out, or offsets by topic and partition, and the group's name.

        A consumer's membership is sent along: one that the group has given up is refused, as its partitions are read by
        another by then. It must not save progress by itself: give it `commit_interval_ms=0`.
        """
        self._check_open()
        await self._go_on_after_the_one_before()
        given: Offsets
        if isinstance(offsets, Mapping):
            if group is None:
                raise InvalidRequest("offsets are those of a group: give its name, or a consumer in their place")
            given, member = offsets, GroupMember(group) if isinstance(group, str) else group
        else:
            given, member = offsets.transactional_progress()
            self._read_by.append((offsets, given))
        await self._producer._transact(lambda: self._core.send_offsets(given, member))

    async def commit(self, *, wait: bool = True) -> None:
        """Wait until all of it is written, and make it count. With `wait=False` that is done while the program goes on,
        and may fill the next one: see `wait`."""
        self._check_begun()
        self._check_not_committing()
        await self._go_on_after_the_one_before()
        if wait:
            await self._producer.flush()
            await self._end(commit=True)
            self._commit = None
            self._has_said()
            self._is_committed()
            return
        self._commit = await self._producer._commit_when_written(self._core)
        self._producer._committing = self

    @property
    def is_settled(self) -> bool:
        """What became of a commit that was not waited for is known: `wait` says it at once."""
        return self._commit is not None and self._commit.done

    async def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it is committed, after `commit(wait=False)`; raises what it ended with instead."""
        error = await self._settle(timeout_s)
        self._has_said()
        if error is not None:
            raise error

    async def _settle(self, timeout_s: float | None = None) -> HeadraceError | None:
        """Wait until its commit is answered, and abort it if it failed; gives why it did not come to be committed."""
        step = self._commit
        if step is None:
            raise NoTransaction("the transaction was not committed with wait=False: there is nothing to wait for")
        await self._producer._wait_for(step, timeout_s)
        if self._is_over or isinstance(step.error, TransactionInDoubt):
            return step.error
        if step.error is None:
            self._is_committed()
        elif isinstance(step.error, TransactionTimedOut | TransactionFenced | TransactionRefused):
            self._is_over = True
        else:
            try:
                await self._abort_after(step.error)
            except TransactionError as failure:
                step.error = failure
            self._is_over = True
        return step.error

    def _has_said(self) -> None:
        """What became of it was told."""
        if self._producer._committing is self:
            self._producer._committing = None

    def _is_committed(self) -> None:
        self._is_over = True
        for consumer, offsets in self._read_by:
            consumer.saved_elsewhere(offsets)

    async def _go_on_after_the_one_before(self) -> None:
        """Wait until the one before it is committed. If it is not, this one has come to nothing."""
        before = self._before
        error = await before._settle() if before is not None else None
        if before is not None and error is not None:
            self._is_over = True
            before._has_said()
            words = f"the transaction came to nothing, as the one before it was not committed: {error}"
            raise TransactionFailed(words, error)
        self._before = None

    async def abort(self) -> None:
        """Let nothing of it count. What has not left fails, and is not sent."""
        self._check_begun()
        self._check_not_committing()
        before, self._before = self._before, None
        if before is not None and await before._settle() is not None:
            # It came to nothing with that one, which will be told.
            self._is_over = True
            return
        with self._core.lock:
            self._core.begin_abort()
        await self._producer.flush()
        await self._end(commit=False)

    async def prepare(self) -> PreparedTransaction:
        """Wait until all of it is written, and leave it open, for whoever has what this gives to commit or abort.

        Of a transaction that was begun with `two_phase=True`. It survives the end of this process, and restarts of
        brokers; no timeout ends it. `headrace.transactions.commit` and `abort` end it from any process.
        """
        self._check_open()
        await self._go_on_after_the_one_before()
        await self._producer.flush()
        with self._core.lock:
            prepared = self._core.prepare()
        self._is_over = True
        return prepared

    async def _end(self, *, commit: bool) -> None:
        try:
            await self._producer._transact(partial(self._core.end, commit=commit))
        except (TransactionTimedOut, TransactionFenced, TransactionRefused):
            self._is_over = True
            raise
        self._is_over = True

    async def _abort_after(self, error: BaseException) -> None:
        """Abort because of something that goes on. Where that only said that the transaction failed, and it turns out
        now that there can be no other, this is raised; else what goes wrong here is logged."""
        try:
            await self.abort()
        except HeadraceError as failure:
            if isinstance(error, TransactionFailed) and isinstance(failure, TransactionError):
                raise failure from error
            log.warning("after %r the transaction of %r: %s", error, self._core.transactional_id, failure)

    def _check_begun(self) -> None:
        if not self._has_begun:
            raise NoTransaction("the transaction has not begun: use it with `async with`, or call begin()")

    def _check_not_committing(self) -> None:
        """Unless its commit has failed, or nobody knows."""
        if self._commit is not None and (self._is_over or not self._commit.done):
            raise NoTransaction("this transaction was committed with wait=False: wait() says what becomes of it")

    def _check_open(self) -> None:
        self._check_begun()
        if self._is_over:
            raise NoTransaction("this transaction is over: begin another one")
