"""What clients did in transactions, and whether what they were told and what the logs hold can both be true.

While it runs: a record is read as committed only when somebody has asked to commit its transaction; what a producer
sends after a later one of its transactional id was let in is never acknowledged; nobody is fenced without a reason; a
last stable offset is never above the watermark and never falls within an epoch. At the end, from the logs that all
replicas agree on: each transaction is ended in each partition by one marker, the same everywhere, the one that was
acknowledged, or any of the two if no answer came; one that nobody asked to commit is aborted. No last stable offset
that was seen was above the beginning of a transaction whose marker was not below the watermark then. Readers of what
is committed have read exactly that. Offsets belong to the transaction that they were sent in: where records are copied
from one topic to another, each is there once.

A session is one life of a program with a transactional id. Epochs tell which of two sessions is the later one: answers
of a coordinator that was replaced may come late.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.simulator.history import Batch, KeyOf, Violation
from headrace.storage.log import TopicPartition

Home = tuple[str, TopicPartition]
"""A group and a partition that it commits offsets of."""
CommittedRecord = tuple[int, Batch, int]
"""Offset, batch, and the place in it."""
View = Sequence[CommittedRecord]
"""What a replica gives to a reader of what is committed, from its start to its end."""


@dataclass(slots=True, eq=False)
class Session:
    number: int
    """The producer's number in its batches."""
    transactional_id: str
    timeout_seconds: float
    producer_id: int = -1
    epoch: int = -1
    fenced_at: float | None = None
    """Since when a later session of the same id has been let in."""
    asked_inits: int = 0
    answered_inits: int = 0
    begun: int = 0
    """Transactions."""

    def __str__(self) -> str:
        return f"{self.transactional_id}#{self.number}"


@dataclass(slots=True, eq=False)
class Transaction:
    session: Session
    number: int
    begun_at: float
    two_phase: bool = False
    """Nobody ends it but who owns it."""
    producer_id: int = -1
    epoch: int = -1
    """Under which its records are written."""
    sent: dict[TopicPartition, list[Batch]] = field(default_factory=dict)
    offsets: dict[Home, int] = field(default_factory=dict)
    commit_asked: bool = False
    abort_asked: bool = False
    commits_open: int = 0
    """Requests to commit it that may have been heard: all but those that were refused for certain."""
    told: bool | None = None
    """Whether it is committed, as a coordinator has acknowledged."""
    read: bool = False
    """Somebody was given something of it as committed."""
    may_linger: bool = False
    """Whether requests of it may still be on their way that nothing tells from those of the next transaction."""

    @property
    def is_asked_to_end(self) -> bool:
        return self.commit_asked or self.abort_asked

    def __str__(self) -> str:
        return f"transaction {self.number} of {self.session}"


class Entry(NamedTuple):
    """A record of the final log, or a marker."""

    offset: int
    producer_id: int
    epoch: int
    batch: Batch | None
    """None: it is a marker."""
    nth: int = 0
    committed: bool = False
    """Of a marker."""


class Span(NamedTuple):
    """A transaction in one partition."""

    transaction: Transaction
    first: int
    marker: int
    committed: bool


class TransactionHistory:
    def __init__(
        self,
        note: Callable[[str], None],
        now: Callable[[], float],
        clocks_differ: Callable[[], bool] = lambda: False,
        state_is_doubted: Callable[[], bool] = lambda: False,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._note = note
        self._now = now
        self._clocks_differ = clocks_differ
        """Whether a coordinator may find a transaction older than it is."""
        self._state_is_doubted = state_is_doubted
        """Whether an election of a coordinator may have cost records, for all that the metadata says: then it lets
        nobody go on whom it knew before."""
        self._sessions: dict[str, list[Session]] = {}
        self._numbers = 0
        self._transactions: list[Transaction] = []
        self._of_batch: dict[Batch, Transaction] = {}
        self._copies: dict[Batch, list[tuple[TopicPartition, int]]] = {}
        """By batch: where each of its records was copied from."""
        self._late: set[Batch] = set()
        self._stable: dict[tuple[TopicPartition, str, int], int] = {}
        self._seen: dict[TopicPartition, dict[int, int]] = {}
        """By last stable offset that was seen: the lowest watermark beside it."""
        self._read: dict[TopicPartition, dict[str, set[CommittedRecord]]] = {}

    # Sessions.

    def session(self, transactional_id: str, timeout_seconds: float, first_number: int = 5000) -> Session:
        self._numbers += 1
        made = Session(first_number + self._numbers, transactional_id, timeout_seconds)
        self._sessions.setdefault(transactional_id, []).append(made)
        return made

    def asks_to_init(self, session: Session) -> None:
        session.asked_inits += 1

    def initialized(self, session: Session, producer_id: int, epoch: int, *, again: bool = False) -> None:
        """A coordinator lets it in; `again`: by the id and epoch that it had."""
        self._note(f"{session} is {producer_id} epoch {epoch}")
        session.answered_inits += 1
        for other in self._sessions[session.transactional_id]:
            if other is session or other.producer_id != producer_id:
                continue
            if other.epoch == epoch:
                raise Violation(f"{session} and {other} both have epoch {epoch} of producer {producer_id}")
            if again and session.epoch < other.epoch < epoch:
                raise Violation(f"{session} was fenced by {other}, and is let in again with epoch {epoch}")
            early = other if other.epoch < epoch else session
            if early.fenced_at is None:
                self._note(f"{early} is fenced")
                early.fenced_at = self._now()
        self.bumped(session, producer_id, epoch)

    def bumped(self, session: Session, producer_id: int, epoch: int) -> None:
        """It goes on with another epoch."""
        if session.producer_id != producer_id or epoch > session.epoch:
            session.producer_id, session.epoch = producer_id, epoch

    def told_fenced(self, session: Session, transaction: Transaction | None, code: int) -> None:
        """It is told that it is out: another session has begun, or its transaction took too long."""
        self._note(f"{session} is told {code}")
        self.counts["fenced"] += 1
        others = self._sessions[session.transactional_id]
        is_timed = session.timeout_seconds < float("inf")
        if session.fenced_at is not None or session.asked_inits > session.answered_inits:
            return
        if self._state_is_doubted() or (self._clocks_differ() and is_timed):
            return
        if any(other.asked_inits and other.number > session.number for other in others):
            return
        if transaction is not None and self._now() - transaction.begun_at >= session.timeout_seconds:
            return
        raise Violation(f"{session} is told {code}, though nobody has followed it and nothing took too long")

    # Transactions.

    def begin(
        self, session: Session, *, two_phase: bool = False, producer_id: int = -1, epoch: int = -1
    ) -> Transaction:
        session.begun += 1
        made = Transaction(session, session.begun, self._now(), two_phase, producer_id, epoch)
        self._transactions.append(made)
        return made

    def last(self, count: int) -> list[Transaction]:
        """The latest that were begun."""
        return self._transactions[-count:]

    def sends(
        self,
        transaction: Transaction,
        where: TopicPartition,
        batch: Batch,
        copied: Sequence[tuple[TopicPartition, int]] = (),
    ) -> None:
        transaction.sent.setdefault(where, []).append(batch)
        self._of_batch[batch] = transaction
        if copied:
            self._copies[batch] = list(copied)
        if transaction.session.fenced_at is not None:
            self._late.add(batch)

    def acknowledged(self, batch: Batch, by: str) -> None:
        self.counts["written in transactions"] += 1
        if batch in self._late:
            raise Violation(f"{by} takes batch {batch} of {self._of_batch[batch]}, which was sent after it was fenced")

    def sends_offsets(self, transaction: Transaction, offsets: dict[Home, int]) -> None:
        transaction.offsets |= offsets

    def asks_to_end(self, transaction: Transaction, *, committed: bool) -> None:
        if committed:
            transaction.commit_asked = True
            transaction.commits_open += 1
        else:
            transaction.abort_asked = True

    def end_refused(self, transaction: Transaction, *, committed: bool) -> None:
        """A coordinator answers that it has not done it, for certain."""
        transaction.commits_open -= committed

    def ended(self, transaction: Transaction, by: str, *, committed: bool) -> None:
        """A coordinator acknowledges the end."""
        word = "committed" if committed else "aborted"
        self._note(f"{transaction} is {word} by {by}")
        self.counts[word] += 1
        if transaction.told not in (None, committed):
            raise Violation(f"{by} tells that {transaction} is {word}, after the opposite was told")
        transaction.told = committed

    def add_reader(self, where: TopicPartition, reader: str) -> None:
        """Who reads what is committed, from the beginning to the end."""
        self._read.setdefault(where, {})[reader] = set()

    def read(self, where: TopicPartition, record: CommittedRecord, reader: str, by: str) -> None:
        """Somebody who reads what is committed is given a record."""
        offset, batch, _ = record
        transaction = self._of_batch.get(batch)
        if transaction is None:
            raise Violation(f"{where}: {by} gives {batch} at {offset}, which nobody has sent")
        if not transaction.commit_asked:
            raise Violation(f"{where}: {by} gives {offset} of {transaction}, which nobody has asked to commit")
        if transaction.told is False:
            raise Violation(f"{where}: {by} gives {offset} of {transaction}, which is aborted")
        transaction.read = True
        self.counts["read as committed"] += 1
        self._read[where][reader].add(record)

    def offset_told(self, home: Home, offset: int, by: str) -> None:
        """A group's coordinator answers a stable offset that was sent in a transaction."""
        owners = [each for each in self._transactions if each.offsets.get(home) == offset]
        if not any(each.commit_asked and each.told is not False for each in owners):
            raise Violation(f"{home}: {by} answers {offset}, which no transaction has committed")

    def stable(self, where: TopicPartition, epoch: int, who: str, stable: int, watermark: int, start: int = 0) -> None:
        """Where a replica has its last stable offset, in an epoch. That of one that begins with an open transaction is
        its start, which says nothing of what is decided: a loss of power may take it back."""
        known = self._stable.get((where, who, epoch), 0)
        if stable < known:
            raise Violation(f"{where}: the last stable offset of {who} fell from {known} to {stable} in epoch {epoch}")
        self._stable[where, who, epoch] = stable
        if stable > start or stable > watermark:
            self.stable_told(where, stable, watermark, who)

    def stable_told(self, where: TopicPartition, stable: int, watermark: int, by: str) -> None:
        if stable > watermark:
            raise Violation(f"{where}: {by} has the last stable offset {stable} above the watermark {watermark}")
        seen = self._seen.setdefault(where, {})
        seen[stable] = min(watermark, seen.get(stable, watermark))

    # At the end.

    def judge(
        self,
        logs: Mapping[TopicPartition, Sequence[Entry]],
        offsets: dict[Home, int],
        *,
        copied: Collection[TopicPartition] = (),
        copies: Collection[TopicPartition] = (),
        starts: Mapping[TopicPartition, int] | None = None,
    ) -> None:
        """Compare with the final logs and with what groups have committed. What is in the partitions `copied` is in
        `copies`, once. `starts`: where logs begin whose front was deleted."""
        starts = starts or {}
        spans = {where: self._spans(where, entries) for where, entries in logs.items()}
        outcomes = self._outcomes(spans)
        for transaction in self._transactions:
            self._check_outcome(transaction, outcomes.get(transaction))
        for where, found in spans.items():
            self._check_stable(where, found)
            self._check_read(where, found, logs[where], starts.get(where, 0))
        self._check_offsets(offsets, outcomes)
        self._check_copies(copied, copies, spans, logs, starts)
        self.counts["transactions"] += len(self._transactions)

    def judge_compacted(self, views: Mapping[tuple[TopicPartition, str], View], key_of: KeyOf) -> None:
        """What is committed as each replica has it in the end, where topics are compacted: nothing that is not, and the
        last of each key."""
        latest: dict[tuple[TopicPartition, bytes], int] = {}
        for where, readers in self._read.items():
            for offset, batch, nth in {each for found in readers.values() for each in found}:
                place = where, key_of(batch, nth)
                latest[place] = max(offset, latest.get(place, offset))
        for (where, who), view in views.items():
            for offset, batch, _ in view:
                transaction = self._of_batch[batch]
                if not (transaction.told or (transaction.told is None and transaction.commits_open > 0)):
                    raise Violation(f"{where}: {who} gives {offset} of {transaction}, which is not committed")
            there = {offset for offset, _, _ in view}
            for (of, key), offset in latest.items():
                if (
                    of == where
                    and offset not in there
                    and not any(at > offset and key_of(batch, nth) == key for at, batch, nth in view)
                ):
                    raise Violation(f"{where}: {who} does not have {offset}, the last of {key!r} that is committed")

    def _spans(self, where: TopicPartition, entries: Iterable[Entry]) -> list[Span]:
        spans: list[Span] = []
        pending: dict[int, list[Entry]] = {}
        epochs: dict[int, int] = {}
        ended: dict[Transaction, int] = {}
        for entry in entries:
            if entry.epoch < epochs.get(entry.producer_id, -1):
                raise Violation(
                    f"{where}: epoch {entry.epoch} of producer {entry.producer_id} at {entry.offset} "
                    f"follows its epoch {epochs[entry.producer_id]}"
                )
            epochs[entry.producer_id] = entry.epoch
            if entry.batch is not None:
                if entry.batch in self._late:
                    owner = self._of_batch[entry.batch]
                    raise Violation(f"{where}: {entry.offset} is of {owner}, and was sent after it was fenced")
                pending.setdefault(entry.producer_id, []).append(entry)
                continue
            taken = pending.pop(entry.producer_id, [])
            owners = {self._of_batch[each.batch]: None for each in reversed(taken) if each.batch is not None}
            if len(owners) > 1:
                raise Violation(f"{where}: the marker at {entry.offset} ends {', '.join(map(str, owners))}")
            for owner in owners:
                if owner in ended and not (owner.may_linger and not entry.committed):
                    raise Violation(f"{where}: {owner} is ended at {ended[owner]} and again at {entry.offset}")
                ended[owner] = entry.offset
                spans.append(Span(owner, taken[0].offset, entry.offset, entry.committed))
        for left in pending.values():
            owner = self._of_batch[left[0].batch or (0, 0)]
            raise Violation(f"{where}: {owner}, from {left[0].offset} on, is never ended")
        return spans

    def _outcomes(self, spans: dict[TopicPartition, list[Span]]) -> dict[Transaction, bool]:
        outcomes: dict[Transaction, bool] = {}
        for where, found in spans.items():
            for span in found:
                known = outcomes.setdefault(span.transaction, span.committed)
                if known != span.committed:
                    words = ("aborted", "committed")
                    raise Violation(
                        f"{span.transaction} is {words[span.committed]} in {where} and {words[known]} elsewhere"
                    )
        return outcomes

    def _check_outcome(self, transaction: Transaction, committed: bool | None) -> None:
        """`committed`: as the logs have it, None if they have nothing of it."""
        if committed is None:
            if transaction.read and transaction.told is False:
                raise Violation(f"{transaction} was read as committed, and was told aborted")
            return
        if transaction.told is not None and transaction.told != committed:
            words = ("aborted", "committed")
            raise Violation(f"{transaction} was told {words[transaction.told]}, and is {words[committed]}")
        if committed and transaction.told is None and transaction.commits_open <= 0:
            raise Violation(f"{transaction} is committed, though everybody who asked for that was refused")
        if transaction.read and not committed:
            raise Violation(f"{transaction} was read as committed, and is aborted")
        if transaction.two_phase and not committed and not transaction.abort_asked:
            raise Violation(f"{transaction} was prepared, and is aborted though its owner has not asked for that")

    def _check_stable(self, where: TopicPartition, spans: list[Span]) -> None:
        for span in spans:
            for stable, watermark in self._seen.get(where, {}).items():
                if stable > span.first and watermark <= span.marker:
                    raise Violation(
                        f"{where}: the last stable offset was {stable} with the watermark {watermark}, though "
                        f"{span.transaction} begins at {span.first} and ends at {span.marker}"
                    )

    def _check_read(self, where: TopicPartition, spans: list[Span], entries: Sequence[Entry], start: int) -> None:
        committed = {span.transaction for span in spans if span.committed}
        wanted = {each.offset for each in entries if each.batch is not None and self._of_batch[each.batch] in committed}
        for reader, found in self._read.get(where, {}).items():
            seen = {offset for offset, _, _ in found if offset >= start}
            if missing := sorted(wanted - seen):
                raise Violation(f"{where}: {reader} was never given {missing[:5]}, which are committed")
            if surplus := sorted(seen - wanted):
                raise Violation(f"{where}: {reader} was given {surplus[:5]}, which are not committed")

    def _check_offsets(self, offsets: dict[Home, int], outcomes: dict[Transaction, bool]) -> None:
        """One that has offsets alone is in no log that is seen here: without an answer it may have been committed."""
        for home, offset in offsets.items():
            wanted, perhaps = -1, set()
            for each in self._transactions:
                if outcomes.get(each, each.told):
                    wanted = max(wanted, each.offsets.get(home, -1))
                elif each not in outcomes and each.told is None and each.commits_open > 0:
                    perhaps.add(each.offsets.get(home, -1))
            if offset != wanted and not (offset > wanted and offset in perhaps):
                raise Violation(f"{home}: {offset} is committed at the end, and transactions have committed {wanted}")

    def _check_copies(
        self,
        copied: Collection[TopicPartition],
        copies: Collection[TopicPartition],
        spans: dict[TopicPartition, list[Span]],
        logs: Mapping[TopicPartition, Sequence[Entry]],
        starts: Mapping[TopicPartition, int],
    ) -> None:
        found: Counter[tuple[TopicPartition, int]] = Counter()
        for where in copies:
            committed = {span.transaction for span in spans[where] if span.committed}
            for entry in logs[where]:
                if entry.batch is not None and self._of_batch[entry.batch] in committed:
                    found[self._copies[entry.batch][entry.nth]] += 1
        for where in copied:
            committed = {span.transaction for span in spans[where] if span.committed}
            for entry in logs[where]:
                if entry.batch is None or self._of_batch[entry.batch] not in committed:
                    continue
                if (count := found.pop((where, entry.offset), 0)) != 1:
                    raise Violation(f"{where}: {entry.offset} is committed, and copied {count} times")
        for (where, offset), count in found.items():
            if offset >= starts.get(where, 0):
                raise Violation(f"copies were committed of {(where, offset)}, which is not committed itself")
            if count > 1:
                raise Violation(f"{where}: {offset}, which is deleted now, is copied {count} times")
