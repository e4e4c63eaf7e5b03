"""A transaction, for threads: all its records and offsets count, or none.

    with Producer(transactional_id="billing-1") as producer:
        with producer.transaction() as t:
            t.send("invoices", b"...")
            t.send_offsets(consumer)

The end of the block commits; an exception in it aborts, and goes on. Records of an aborted transaction are given to no
reader of committed records, whatever was written before.
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
from headrace.client.producer.transaction_core import TransactionCore
from headrace.client.producer.transaction_requests import GroupMember, Offsets, PreparedTransaction
from headrace.errors import HeadraceError, InvalidRequest
from headrace.records.builder import Delivery
from headrace.records.record import GivenHeaders

if TYPE_CHECKING:
    from headrace.client.consumer.consumer import Consumer
    from headrace.client.producer.producer import Producer

log = logging.getLogger(__name__)


class Transaction:
    """One transaction of a producer, from `Producer.transaction`; use it with `with`, or `begin` and end it.

    What it raises says whether the producer can go on: TransactionFailed, and TransactionTimedOut, that the transaction
    came to nothing and another may be begun; TransactionFenced and TransactionRefused that this producer can have none;
    TransactionInDoubt that nobody has answered whether it is committed, and `commit` may be called again.
    """

    def __init__(self, producer: Producer, core: TransactionCore, *, two_phase: bool) -> None:
        self._producer = producer
        self._core = core
        self._two_phase = two_phase
        self._has_begun = self._is_over = False
        self._read_by: list[tuple[Consumer, Offsets]] = []
        """What consumers have handed out that is saved with it."""
        # Without a call in between.
        self.send = producer.send_async  # type: ignore[method-assign]

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_over or isinstance(error, TransactionInDoubt):
            return
        if error is not None:
            self._abort_after(error)
            return
        try:
            self.commit()
        except TransactionFailed as failed:
            if not self._is_over:
                self._abort_after(failed)
            raise

    def begin(self) -> None:
        """Open it. The first one of a producer takes over its transactional id: what an earlier instance has left
        open is aborted, and that one can do nothing more."""
        if self._has_begun:
            raise NoTransaction("a transaction is begun once: ask the producer for another one")
        self._producer._transact(partial(self._core.begin, two_phase=self._two_phase))
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

    def send_offsets(self, offsets: Consumer | Offsets, group: str | GroupMember | None = None) -> None:
        """Let a group go on from these offsets if the transaction is committed: those of all that a consumer has handed
        out, or offsets by topic and partition, and the group's name.

        A consumer's membership is sent along: one that the group has given up is refused, as its partitions are read by
        another by then. It must not save progress by itself: give it `commit_interval_ms=0`.
        """
        self._check_open()
        given: Offsets
        if isinstance(offsets, Mapping):
            if group is None:
                raise InvalidRequest("offsets are those of a group: give its name, or a consumer in their place")
            given, member = offsets, GroupMember(group) if isinstance(group, str) else group
        else:
            given, member = offsets.transactional_progress()
            self._read_by.append((offsets, given))
        self._producer._transact(lambda: self._core.send_offsets(given, member))

    def commit(self) -> None:
        """Wait until all of it is written, and make it count."""
        self._check_begun()
        self._producer.flush()
        self._end(commit=True)
        for consumer, offsets in self._read_by:
            consumer.saved_elsewhere(offsets)

    def abort(self) -> None:
        """Let nothing of it count. What has not left fails, and is not sent."""
        self._check_begun()
        with self._core.lock:
            self._core.begin_abort()
        self._producer.flush()
        self._end(commit=False)

    def prepare(self) -> PreparedTransaction:
        """Wait until all of it is written, and leave it open, for whoever has what this gives to commit or abort.

        Of a transaction that was begun with `two_phase=True`. It survives the end of this process, and restarts of
        brokers; no timeout ends it. `headrace.transactions.commit` and `abort` end it from any process.
        """
        self._check_open()
        self._producer.flush()
        with self._core.lock:
            prepared = self._core.prepare()
        self._is_over = True
        return prepared

    def _end(self, *, commit: bool) -> None:
        try:
            self._producer._transact(partial(self._core.end, commit=commit))
        except (TransactionTimedOut, TransactionFenced, TransactionRefused):
            self._is_over = True
            raise
        self._is_over = True

    def _abort_after(self, error: BaseException) -> None:
        """Abort because of something that goes on. Where that only said that the transaction failed, and it turns out
        now that there can be no other, this is raised; else what goes wrong here is logged."""
        try:
            self.abort()
        except HeadraceError as failure:
            if isinstance(error, TransactionFailed) and isinstance(failure, TransactionError):
                raise failure from error
            log.warning("after %r the transaction of %r: %s", error, self._core.transactional_id, failure)

    def _check_begun(self) -> None:
        if not self._has_begun:
            raise NoTransaction("the transaction has not begun: use it with `with`, or call begin()")

    def _check_open(self) -> None:
        self._check_begun()
        if self._is_over:
            raise NoTransaction("this transaction is over: begin another one")
