"""Arrow rows in a two-phase transaction, over any topics: all of them count, or none.

    with headrace.arrow.Transaction("load-7", bootstrap="127.0.0.1:9092") as t:
        t.write("orders", rows)
        prepared = t.prepare()

What is prepared stays open, over the end of this process and restarts of brokers, until whoever has it calls
`headrace.commit_prepared` or `abort_prepared`; `commit` does both at once. A block that ends otherwise aborts. No
timeout ends the transaction: a process that dies in the middle leaves it open, and the next one that takes its
transactional id aborts it. Until then readers of committed records wait before it. Whoever commits in the same process
needs none of that, and gives `open_max_ms`: the broker aborts what is open for longer.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import pyarrow as pa

from headrace.arrow.write import BATCH_BYTES, Pending, TransactionIdentity, Writer
from headrace.client import DEFAULT_BOOTSTRAP
from headrace.client.admin.cluster import Cluster, Retry
from headrace.client.admin.produce import ProducerId, open_transaction
from headrace.client.admin.transactions import end_transactions, send_offsets
from headrace.client.connection.tls import Tls
from headrace.client.errors import NoTransaction, TransactionFailed
from headrace.client.producer.transaction_requests import Offsets, PreparedTransaction
from headrace.errors import HeadraceError
from headrace.records.codecs import Codec

log = logging.getLogger(__name__)


class Transaction:
    """One transaction, from its beginning to its end; for one thread at a time."""

    def __init__(
        self,
        transactional_id: str,
        *,
        bootstrap: str = DEFAULT_BOOTSTRAP,
        codec: Codec = Codec.NONE,
        batch_bytes: int = BATCH_BYTES,
        timeout_ms: int = 30_000,
        tls: Tls = None,
        cluster: Cluster | None = None,
        for_rows: Cluster | None = None,
        open_max_ms: int | None = None,
        previous: ProducerId | None = None,
    ) -> None:
        """Takes over the transactional id: what is open under it is aborted, and who had it can write nothing more.

        A `cluster` that is given in place of its address is not closed here, nor one that is given `for_rows`, which
        has those of the first topic; each other one has connections of its own. With the `producer` of a transaction as
        the `previous` one, only if nobody has taken over since: else it is refused with PRODUCER_FENCED.
        """
        self._codec = codec
        self._batch_bytes = batch_bytes
        self._timeout_ms = timeout_ms
        self._writers: dict[str, Writer] = {}
        self._for_rows = for_rows
        self._is_over = False
        with ExitStack() as opened:
            if cluster is None:
                retry = Retry(within_ms=timeout_ms)
                cluster = opened.enter_context(Cluster(bootstrap, timeout_ms=timeout_ms, retry=retry, tls=tls))
                cluster.reach()
            self._cluster = cluster
            self.producer = open_transaction(cluster, transactional_id, timeout_ms=open_max_ms, previous=previous)
            self._identity = TransactionIdentity(transactional_id, self.producer)
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not self._is_over:
                self.abort()
        except HeadraceError as failure:
            if error is None:
                raise
            log.warning("after %r the transaction of %r: %s", error, self._identity.transactional_id, failure)
        finally:
            self.close()

    def close(self) -> None:
        """Let the connections go. What was not ended stays open."""
        for writer in self._writers.values():
            writer.close()
        self._opened.close()

    def write(self, topic: str, rows: pa.RecordBatch | pa.Table) -> pa.RecordBatch:
        """Send rows, as `Writer.write`."""
        return self.submit(topic, rows).result()

    def submit(self, topic: str, rows: pa.RecordBatch | pa.Table) -> Pending:
        """Send rows without waiting for the answers, as `Writer.submit`."""
        self._check_open()
        if topic not in self._writers:
            lent, self._for_rows = self._for_rows, None
            self._writers[topic] = Writer(
                topic,
                codec=self._codec,
                batch_bytes=self._batch_bytes,
                timeout_ms=self._timeout_ms,
                cluster=lent or self._cluster.again(),
                is_lent=lent is not None,
                transaction=self._identity,
            )
        return self._writers[topic].submit(rows)

    def send_offsets(self, offsets: Offsets, group: str, *, metadata: str = "") -> None:
        """Let a group without members go on from these offsets if the transaction is committed: how far a program has
        come is saved with what it wrote."""
        self._check_open()
        send_offsets(self._cluster, self._prepared, offsets, group, metadata=metadata)

    def prepare(self) -> PreparedTransaction:
        """Wait until all rows are acknowledged, and leave the transaction open, for whoever has what this gives."""
        self._check_open()
        if not self._writers:
            raise NoTransaction("nothing was written: there is no transaction to prepare")
        for writer in self._writers.values():
            writer.flush()
        for writer in self._writers.values():
            if writer.failure is not None:
                raise TransactionFailed(f"the transaction can only be aborted: {writer.failure}", writer.failure)
        self._is_over = True
        return self._prepared

    def commit(self) -> None:
        """Wait until all rows are acknowledged, and let them count. Nothing that was written is nothing to commit."""
        if self._writers or self._is_over:
            prepared = self.prepare()
            end_transactions(self._cluster, [prepared], commit=True)
        else:
            self.abort()

    def abort(self) -> None:
        """Let nothing of it count; what is on its way can come to nothing any more."""
        self._check_open()
        for writer in self._writers.values():
            writer.flush()
        end_transactions(self._cluster, [self._prepared], commit=False)
        self._is_over = True

    @property
    def _prepared(self) -> PreparedTransaction:
        name, producer = self._identity.transactional_id, self.producer
        return PreparedTransaction(name, producer.producer_id, producer.producer_epoch)

    def _check_open(self) -> None:
        if self._is_over:
            raise NoTransaction("this transaction is over: begin another one")
