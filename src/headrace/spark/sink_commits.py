"""The driver's part of the sink: batches are committed as they were decided, once, whoever comes for them.

    take over     read the decision; take the query's transactional id, so that no other driver can decide any more;
                  read again, as the other may have decided before that; commit what is decided
    commit        if the batch is open: see that its transactions are, decide, commit them all; sweep. Of a batch of a
                  stream that has no rows nothing is decided, whatever its first run has left is ended
    abort         what is decided stays so; its run is over, so that no late attempt of it writes; sweep

A sweep aborts what attempts have left that Spark tells nobody of: of tasks that were run again, of speculative ones
that lost, of drivers that died. They are found by the prefix of their names. A task that has asked for its transaction,
and has not written yet, is among them: either its id is seen here, or, as it reads the decision after that, it sees
the decision.

Drivers are remembered in their process, which is a cache alone: while nobody has taken over from one, nobody can have
decided anything else. One that finds itself taken over takes over again, once, unless the query went on without it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from headrace.client.admin.cluster import Cluster
from headrace.client.admin.transactions import (
    TransactionDescription,
    describe_transactions,
    end_transactions,
    list_transactions,
)
from headrace.client.errors import TransactionFailed, TransactionFenced, TransactionRefused
from headrace.client.producer.transaction_requests import PreparedTransaction
from headrace.errors import HeadraceError
from headrace.spark import decision_log, faults
from headrace.spark.connections import cluster_at
from headrace.spark.decisions import (
    EVERY_ATTEMPT,
    EVERY_BATCH,
    NO_RUN,
    WRITE,
    Batch,
    Decision,
    Ended,
    Known,
    Verdict,
    attempts_pattern,
    decide,
    is_another,
    judge,
    query_of,
    retire,
    run_of,
)

log = logging.getLogger(__name__)

SWEEP_SHARE: Final = 0.05
"""Of a stream's time, that looking through all ids of its attempts may take: they are kept for an hour."""
TRUSTED_S: Final = 3600.0
"""How long a driver relies on its transactional id: brokers forget one that nobody uses for days."""
KILLED_WITHIN_S: Final = 3.0
"""Spark ends the Python process of a task that was killed after spark.python.task.killTimeout, 2 s."""
LOOK_AGAIN_S: Final = 0.25
ONGOING: Final = "Ongoing"
_COMMITTED: Final = frozenset({"PrepareCommit", "CompleteCommit"})
_OLDER: Final = (
    "is an older one, or was emptied in part; give it a new checkpoint, with the offsets from which to go on"
)
_OF_NAMED: Final = (
    "is another, or an older one, or was emptied in part; give the writes another writeId, with a checkpoint and the "
    "offsets from which to go on"
)


class AnotherDriver(HeadraceError):
    """The query is run by another driver, which has taken it over."""


class CommitLost(HeadraceError):
    """Rows of a batch that is decided were aborted by somebody who does not know of decisions."""


class DecisionLost(HeadraceError):
    """What was decided of a batch is gone from where it was written."""


class OtherRows(HeadraceError):
    """A batch has the number of one that is decided, and is another."""


class SinkDriver:
    """Of one run of a query. `known` is what is decided, while no other driver takes over."""

    def __init__(self, cluster: Cluster, batch: Batch, timeout_ms: int) -> None:
        """Takes the query over, and commits what is decided. AnotherDriver where it goes on without this run."""
        self._timeout_ms = timeout_ms
        self.took_over_at = time.monotonic()
        decision_log.make_topic(cluster)
        # Another one that died may have left something open, which is decided when the query is taken over.
        self.known: Known = self._read(cluster, batch, whole=False)
        self._writer = decision_log.DecisionWriter(cluster, batch.query, timeout_ms)
        self._next_whole_sweep = 0.0
        self._is_checked = False
        try:
            self.known = self._read(cluster, batch, whole=True)
            self.roll_forward(cluster)
        except BaseException:
            self.close()
            raise

    def _read(self, cluster: Cluster, batch: Batch, *, whole: bool) -> Known:
        known = decision_log.read(cluster, batch.query, self._timeout_ms, whole=whole)
        if judge(known, batch) is Verdict.SUPERSEDED:
            assert isinstance(known, Decision)
            raise AnotherDriver(_told(known, batch))
        return known

    def close(self) -> None:
        self._writer.close()

    def commit(
        self, cluster: Cluster, batch: Batch, prepared: Sequence[PreparedTransaction], plan: str, *, is_named: bool
    ) -> None:
        """The rows of the batch count when this returns: these, or those that were decided on before. That there are
        none is decided only of a write that has a name."""
        if is_another(self.known, batch, plan):
            raise OtherRows(
                f"batch {batch.number} of this query was committed before, with other offsets than it has now, so "
                f"nothing of it is written: its checkpoint {_advice(batch)}"
            )
        if judge(self.known, batch) is Verdict.OPEN:
            if not prepared and not is_named:
                return
            faults.reached("sink-written", batch.number)
            self._check_undecided(cluster, batch)
            _check_open(cluster, prepared)
            decision = decide(self.known, batch, prepared, plan)
            self._writer.write(decision)
            self.known = decision
            faults.reached("sink-decided", batch.number)
            end_transactions(cluster, prepared, commit=True)
            faults.reached("sink-ended", batch.number)
        else:
            log.warning("batch %d of %s was committed before: its rows stay as they are", batch.number, batch.query)
            self.roll_forward(cluster)

    def _check_undecided(self, cluster: Cluster, batch: Batch) -> None:
        """Of a batch that nothing is decided of, nothing can be committed. Once for each driver: whatever it does not
        find was decided by itself. Coordinators remember an hour of it."""
        if self._is_checked:
            return
        pattern = attempts_pattern(batch.query, batch.number)
        found = list_transactions(cluster, states=sorted(_COMMITTED), pattern=pattern)
        if found:
            raise DecisionLost(
                f"transactions of batch {batch.number} of {batch.query} are committed, as "
                f"{found[0].transactional_id!r}, and topic {decision_log.TOPIC!r} does not know of it: it has lost "
                "records, or was deleted. The batch would be written twice. If its rows are all there, go on with a "
                "new checkpoint behind it"
            )
        self._is_checked = True

    def drop(self) -> None:
        """No batch follows: nothing has to be remembered of the query."""
        self._writer.drop()

    def give_up(self, cluster: Cluster, batch: Batch, *, last: bool) -> None:
        """Let no late attempt of the run write, nor, where it is not known which that is, of those there are."""
        if last:
            if not isinstance(self.known, Ended):
                self.drop()
                self.known = Ended.ENDED
            return
        names = self._attempts(cluster, batch.query, whole=True)
        runs = {run_of(name) for name in names} - {None} if batch.run == NO_RUN else {batch.run}
        assert not isinstance(self.known, Ended), "only a write without a name is forgotten"
        if runs:
            self.known = retire(self.known, batch.query, sorted(run for run in runs if run is not None))
            self._writer.write(self.known)

    def outlast(self, cluster: Cluster, batch: Batch) -> None:
        """End what tasks begin that are killed, and not dead yet: of which run they are nobody told, so a first attempt
        that comes now is not refused by itself."""
        last_seen = began = time.monotonic()
        while (now := time.monotonic()) - last_seen < KILLED_WITHIN_S and now - began < 3 * KILLED_WITHIN_S:
            threading.Event().wait(LOOK_AGAIN_S)
            if self._attempts(cluster, batch.query, whole=True):
                last_seen = time.monotonic()
                self.give_up(cluster, batch, last=False)
                self.sweep(cluster, batch.query, whole=True)

    def roll_forward(self, cluster: Cluster) -> None:
        """Commit what is decided. Ids that are forgotten have been committed long since: an open transaction is never
        forgotten, and no driver aborts one that is decided."""
        if not isinstance(self.known, Decision) or not self.known.prepared:
            return
        found = describe_transactions(cluster, self.known.names, missing_ok=True)
        states = {each.transactional_id: each for each in found}
        left = [each for each in self.known.prepared if _is_open(states.get(each.transactional_id), each)]
        ended = [each for each in self.known.prepared if each not in left and each.transactional_id in states]
        lost = [each for each in ended if states[each.transactional_id].state not in _COMMITTED]
        end_transactions(cluster, left, commit=True)
        if lost:
            raise CommitLost(
                f"{len(lost)} of {len(self.known.prepared)} transactions of batch {self.known.batch.number} were "
                f"aborted by hand after the batch was decided, and their rows are lost: {lost[0].transactional_id!r}"
            )

    def sweep(self, cluster: Cluster, query: str, *, whole: bool) -> None:
        """Abort what is open of the query and not decided; with all that is not open yet, if `whole`, or if that takes
        little of the time."""
        began = time.monotonic()
        whole = whole or began >= self._next_whole_sweep
        abort_attempts(cluster, self._attempts(cluster, query, whole=whole))
        if whole:
            ended = time.monotonic()
            self._next_whole_sweep = ended + (ended - began) / SWEEP_SHARE

    def _attempts(self, cluster: Cluster, query: str, *, whole: bool) -> list[str]:
        """Those that are not decided, and not ended."""
        decided = self.known.names if isinstance(self.known, Decision) else frozenset()
        states = (ONGOING, "Empty") if whole else (ONGOING,)
        listed = list_transactions(cluster, states=states, pattern=attempts_pattern(query))
        return [each.transactional_id for each in listed if each.transactional_id not in decided]


def _told(known: Decision, batch: Batch) -> str:
    if batch.run in known.before:
        return (
            f"this run of the query is over, or another driver runs it now: run {known.batch.run} has committed "
            f"batch {known.batch.number}; stop this one"
        )
    return (
        f"batch {batch.number} comes after batch {known.batch.number} of this query was committed, so nothing of it is "
        f"written: another driver runs the query, or its checkpoint {_advice(batch)}"
    )


def _advice(batch: Batch) -> str:
    return _OF_NAMED if batch.query.startswith(WRITE) else _OLDER


def _check_open(cluster: Cluster, prepared: Sequence[PreparedTransaction]) -> None:
    """What is decided must be there to be committed: another driver's sweep, or an operator, may have ended it."""
    names = [each.transactional_id for each in prepared]
    found = {each.transactional_id: each for each in describe_transactions(cluster, names, missing_ok=True)}
    gone = [each for each in prepared if not _is_open(found.get(each.transactional_id), each)]
    if gone:
        raise TransactionFailed(
            f"{len(gone)} of {len(prepared)} transactions of this batch were aborted before it was committed, as "
            f"{gone[0].transactional_id!r}: by another driver of this query, or by hand; the batch has to be run again"
        )


def _is_open(found: TransactionDescription | None, prepared: PreparedTransaction) -> bool:
    return found is not None and found.state == ONGOING and found.prepared == prepared


def abort_attempts(cluster: Cluster, names: Iterable[str]) -> None:
    """Also of those that have written nothing yet: their epoch is used up, so they cannot any more."""
    found = describe_transactions(cluster, names, missing_ok=True)
    _abort(cluster, [each.prepared for each in found if each.state in (ONGOING, "Empty")])


def _abort(cluster: Cluster, prepared: Sequence[PreparedTransaction]) -> None:
    """Those that their task has aborted meanwhile, or another driver, have ended too."""
    if not prepared:
        return
    try:
        end_transactions(cluster, prepared, commit=False)
    except TransactionRefused as refused:
        log.info("%s", refused)


_drivers: Final[dict[tuple[int, str, str, str], SinkDriver]] = {}


def _driver(cluster: Cluster, bootstrap: str, batch: Batch, timeout_ms: int) -> tuple[SinkDriver, bool]:
    """The driver of this process, and whether it has just taken over."""
    key = os.getpid(), bootstrap, batch.query, batch.run
    driver = _drivers.get(key)
    if driver is not None and time.monotonic() - driver.took_over_at < TRUSTED_S:
        return driver, False
    if driver is not None:
        let_go(bootstrap, batch)
    driver = _drivers[key] = SinkDriver(cluster, batch, timeout_ms)
    return driver, True


def is_driven(bootstrap: str, batch: Batch) -> bool:
    """Whether this process has a driver of the run."""
    return (os.getpid(), bootstrap, batch.query, batch.run) in _drivers


def let_go(bootstrap: str, batch: Batch) -> None:
    """The driver of a run in this process, if there is one, with its connections."""
    driver = _drivers.pop((os.getpid(), bootstrap, batch.query, batch.run), None)
    if driver is not None:
        driver.close()


def commit(
    bootstrap: str,
    batch: Batch,
    prepared: Sequence[PreparedTransaction],
    *,
    last: bool,
    timeout_ms: int,
    plan: str = "",
    is_named: bool = False,
) -> None:
    """Let a batch count. `last` if its query has no other one: then nothing is remembered of it, unless it is named."""
    commit_ = partial(_commit, bootstrap, batch, prepared, plan, last=last, timeout_ms=timeout_ms, is_named=is_named)
    try:
        try:
            commit_()
        except (TransactionFenced, TransactionFailed):
            # Taken over by another one, or too slow: who takes over again knows which.
            let_go(bootstrap, batch)
            commit_()
    except BaseException:
        let_go(bootstrap, batch)
        raise


def _commit(
    bootstrap: str,
    batch: Batch,
    prepared: Sequence[PreparedTransaction],
    plan: str,
    *,
    last: bool,
    timeout_ms: int,
    is_named: bool,
) -> None:
    with cluster_at(bootstrap, timeout_ms, patient=True) as cluster:
        try:
            driver, is_new = _driver(cluster, bootstrap, batch, timeout_ms)
        except AnotherDriver:
            _abort_own(cluster, batch, prepared, timeout_ms)
            raise
        driver.commit(cluster, batch, prepared, plan, is_named=is_named)
        driver.sweep(cluster, batch.query, whole=is_new or last)
        if last:
            driver.drop()
    if last:
        let_go(bootstrap, batch)


def abort(
    bootstrap: str, batch: Batch, prepared: Sequence[PreparedTransaction], *, last: bool, timeout_ms: int
) -> None:
    """End what attempts at a batch have left, and the run with it. What is decided is committed, whoever gave up: a
    commit that failed is followed by this. A run of NO_RUN is any that there is."""
    let_go(bootstrap, batch)
    try:
        with cluster_at(bootstrap, timeout_ms, patient=True) as cluster:
            try:
                driver, _ = _driver(cluster, bootstrap, batch, timeout_ms)
            except AnotherDriver as error:
                log.warning("batch %d of %s: %s", batch.number, batch.query, error)
                _abort_own(cluster, batch, prepared, timeout_ms)
                return
            driver.give_up(cluster, batch, last=last)
            driver.sweep(cluster, batch.query, whole=True)
            if batch.run == NO_RUN:
                driver.outlast(cluster, batch)
    finally:
        let_go(bootstrap, batch)


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A query of which transactions are open."""

    query: str
    names: tuple[str, ...]
    oldest_ms: int
    """How long the first of them is open."""


def unfinished(cluster: Cluster, older_than_ms: int, now_ms: int) -> list[Unfinished]:
    """Queries of which a transaction is open for longer than that, by name."""
    listed = list_transactions(cluster, states=[ONGOING], pattern=EVERY_ATTEMPT)
    found: dict[str, list[tuple[str, int]]] = {}
    for each in describe_transactions(cluster, [one.transactional_id for one in listed], missing_ok=True):
        query, age_ms = query_of(each.transactional_id), each.age_ms(now_ms)
        if query is not None and age_ms is not None:
            found.setdefault(query, []).append((each.transactional_id, age_ms))
    queries = [
        Unfinished(query, tuple(name for name, _ in ages), max(age_ms for _, age_ms in ages))
        for query, ages in sorted(found.items())
    ]
    return [each for each in queries if each.oldest_ms > older_than_ms]


def finish(cluster: Cluster, left: Unfinished, timeout_ms: int) -> tuple[int, int]:
    """Take a query over whose driver is gone, commit what is decided, and abort the rest; how many were committed and
    aborted. A driver that is not gone finds its batch aborted, and nothing of it is committed in part."""
    driver = SinkDriver(cluster, Batch(left.query, f"finish-{uuid.uuid4()}", EVERY_BATCH), timeout_ms)
    try:
        driver.sweep(cluster, left.query, whole=True)
    finally:
        driver.close()
    decided = driver.known.names if isinstance(driver.known, Decision) else frozenset()
    committed = len(decided.intersection(left.names))
    return committed, len(left.names) - committed


def _abort_own(cluster: Cluster, batch: Batch, prepared: Sequence[PreparedTransaction], timeout_ms: int) -> None:
    """Of a driver that is not the query's any more."""
    known = decision_log.read(cluster, batch.query, timeout_ms)
    decided = known.names if isinstance(known, Decision) else frozenset()
    _abort(cluster, [each for each in prepared if each.transactional_id not in decided])
