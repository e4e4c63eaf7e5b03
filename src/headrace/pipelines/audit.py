"""Audit: every acknowledged record accounted for, in each store that is given.

Ledgers say what was acknowledged (`headrace.arrow.ledger`); topics, data folders and an archive say what is there. What
does not agree gets a verdict (`headrace.pipelines.accounting`), per producer. Run it when the producers of the ledgers
have stopped: what they send in between is unclaimed. Topics that were made of others, by a sink or a replay, are held
against the ledger of those (`headrace.pipelines.copies`), when whoever makes them is done.

Nothing is written but the file of findings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pandas as pd
from pyspark.sql import functions as F

from headrace.errors import OperatorError
from headrace.pipelines import accounting, copies, stores
from headrace.pipelines.archive_group import DEFAULT_GROUP
from headrace.pipelines.copies import Making
from headrace.pipelines.judgement import FAULTS, VERDICT, Bound, judge
from headrace.pipelines.summary import Progress, Summary, Table, rate

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LEDGER_STORE: Final = "ledger"
ROWS_PER_TASK: Final = 250_000
TASKS_MAX: Final = 2_000
COLLECTED_MAX: Final = 1_000_000
"""What the driver looks at one by one, of each store, places that miss a record first; faults beyond that many are
counted, and not told apart."""
SHOWN: Final = 20

ABSENT: Final = ("deleted", "perhaps_deleted", "pending")
"""Not there, and no fault."""
COUNTED: Final = (*FAULTS, *ABSENT)
_PRODUCER_COLUMNS: Final = ("store", "producer", "acknowledged", "found", *COUNTED)
_STORE_COLUMNS: Final = ("store", "records", "unclaimed", "faults", "not_told_apart")
_FINDING_COLUMNS: Final = ("store", *VERDICT)


@dataclass(frozen=True, slots=True)
class AuditOptions:
    ledgers: tuple[str, ...]
    bootstrap: str | None = None
    """Topics are looked into when a broker is given, and it says how far the archive has come."""
    topics: tuple[str, ...] = ()
    """Those of the ledgers, if none is named."""
    data: tuple[str, ...] = ()
    archive: str | None = None
    archive_group: str = DEFAULT_GROUP
    copies: tuple[tuple[str, str], ...] = ()
    """Topic of the ledger, and topic that was made of it."""
    making: Making = field(default_factory=Making)
    isolation: str = stores.COMMITTED
    """Whether what is looked for in topics is what is committed, or all that readers may see."""
    shown: int = SHOWN
    """Findings in the summary."""
    findings: str | None = None
    """A file for all of them: .parquet or .jsonl."""


@dataclass(slots=True)
class _Account:
    """What one store came to."""

    store: str
    records: int = 0
    unclaimed: int = 0
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    """(producer, verdict) to how many."""
    findings: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=list(VERDICT)))
    not_told_apart: int = 0
    """Places where claims and copies differ, beyond those that were looked at."""

    @property
    def faults(self) -> int:
        return len(self.findings) + self.not_told_apart

    claimed: dict[str, int] | None = None
    """Per producer, if it is not all that was acknowledged to it."""

    def add(self, verdicts: pd.DataFrame) -> None:
        for (producer, what), count in verdicts.groupby(["producer", "what"]).size().items():
            self.counts[producer, what] = self.counts.get((producer, what), 0) + int(count)
        faulty = verdicts[verdicts["what"].isin(FAULTS)]
        self.findings = faulty.sort_values(["producer", "sequence", "topic", "partition", "offset"])


def run(spark: SparkSession, options: AuditOptions, progress: Progress) -> Summary:
    ledger = read_ledgers(spark, options.ledgers)
    if options.topics:
        ledger = ledger.where(F.col("topic").isin(*options.topics))
    progress.say("reading the ledger")
    claims = _claims(ledger)
    if not claims.acknowledged:
        raise OperatorError(f"the ledger in {', '.join(options.ledgers)} has no acknowledged records: nothing to audit")
    if claims.without_offset > COLLECTED_MAX:
        raise OperatorError(
            f"{claims.without_offset:,} records of the ledger were acknowledged without an offset, and no more than "
            f"{COLLECTED_MAX:,} can be looked for by content; audit some topics at a time with --topics"
        )
    accounts = [_order_of(ledger, claims)]
    for store in _stores(spark, options, options.topics or claims.topics):
        progress.say(f"comparing {claims.total:,} acknowledged records with {store.name}")
        accounts.append(_compare(spark, ledger, claims, store))
    for source, target in options.copies:
        progress.say(f"comparing what was made of {source} with {target}")
        accounts.append(_compare_copy(spark, ledger, claims, options, source, target))
    if options.findings:
        _write_findings(options.findings, _findings(accounts))
    progress.done()
    return _summary(claims.acknowledged, accounts, options, progress.elapsed_s)


def read_ledgers(spark: SparkSession, folders: Sequence[str]) -> DataFrame:
    for folder in folders:
        if not any(Path(folder).glob("*.parquet")):
            raise OperatorError(f"{folder} has no ledger: no *.parquet files in it")
    once = dict.fromkeys(str(Path(folder).resolve()) for folder in folders)
    # Files without their final name are not whole.
    return spark.read.option("pathGlobFilter", "*.parquet").parquet(*once).select(*accounting.LEDGER_COLUMNS)


def _stores(spark: SparkSession, options: AuditOptions, topics: Sequence[str]) -> Iterator[stores.Store]:
    if options.bootstrap:
        yield stores.topics_at_broker(spark, options.bootstrap, topics, options.isolation)
    for folder in dict.fromkeys(options.data):
        yield stores.data_folder(spark, folder, topics)
    if options.archive:
        yield stores.archive(spark, options.archive, topics, options.bootstrap, options.archive_group)


@dataclass(frozen=True, slots=True)
class _Claims:
    """How much is claimed."""

    acknowledged: dict[str, int]
    """Per producer."""
    topics: tuple[str, ...]
    total: int
    without_offset: int


def _claims(ledger: DataFrame) -> _Claims:
    rows = ledger.groupBy("producer", "topic").agg(F.count("*"), F.count("offset")).collect()
    acknowledged: dict[str, int] = {}
    for producer, _, count, _ in rows:
        acknowledged[producer] = acknowledged.get(producer, 0) + count
    total = sum(acknowledged.values())
    topics = tuple(sorted({topic for _, topic, _, _ in rows}))
    return _Claims(acknowledged, topics, total, total - sum(row[3] for row in rows))


def _order_of(ledger: DataFrame, claims: _Claims) -> _Account:
    """The ledger by itself: whether what a producer sent in order was acknowledged in order."""
    disordered = accounting.disordered(ledger)
    rows = disordered.limit(COLLECTED_MAX).toArrow().to_pandas()
    detail = (
        "behind sequence " + rows["sequence_before"].astype(str) + " at offset " + rows["offset_before"].astype(str)
    )
    verdicts = rows.assign(what="out_of_order", found_partition=None, found_offset=None, detail=detail)
    account = _Account(LEDGER_STORE, records=claims.total)
    if len(rows) == COLLECTED_MAX:
        account.not_told_apart = disordered.count() - len(rows)
    account.add(verdicts[list(VERDICT)])
    return account


def _tasks(spark: SparkSession, claims: int) -> int:
    return min(max(2 * claims // ROWS_PER_TASK, spark.sparkContext.defaultParallelism), TASKS_MAX)


def _compare(spark: SparkSession, ledger: DataFrame, claims: _Claims, store: stores.Store) -> _Account:
    account = _Account(store.name)
    with _persisted(accounting.settle(ledger, store.rows, _tasks(spark, claims.total))) as leftovers:
        count = leftovers.agg(
            F.count("*"), F.sum(F.expr("greatest(claims - copies, 0)")), F.sum(F.expr("greatest(copies - claims, 0)"))
        ).first()
        assert count is not None
        left, missing, spare = (int(number or 0) for number in count)
        account.records = claims.total - claims.without_offset - missing + spare
        if left or claims.without_offset:
            _judge(spark, ledger, leftovers, left, spare, store.bounds(), account)
    return account


def _compare_copy(
    spark: SparkSession, ledger: DataFrame, claims: _Claims, options: AuditOptions, source: str, target: str
) -> _Account:
    if source not in claims.topics:
        raise OperatorError(f"the ledger has no records of topic {source!r}, only of {', '.join(claims.topics)}")
    assert options.bootstrap is not None, "who asks for copies gives a broker"
    store = stores.topics_at_broker(spark, options.bootstrap, [target], options.isolation, f"copy {target}")
    making, archive = options.making, options.archive
    if making.dead_letters and archive is None:
        raise OperatorError("dead letters are those of an archive: give it")
    records = None if making.is_plain else copies.source_of(spark, options.bootstrap, source, archive)
    aside = stores.put_aside(spark, archive) if making.dead_letters and archive is not None else None
    expected = copies.claims_of(ledger.where(F.col("topic") == source), records, making, aside)
    bounds = store.bounds()
    gone = [bound.if_lost(has_offset=False) for bound in bounds]
    if_missing = next((what for what in ("deleted", "perhaps_deleted") if what in gone), "lost")
    found = copies.compare(expected, store.rows, _tasks(spark, claims.total), COLLECTED_MAX, if_missing)
    account = _Account(store.name, found.records, found.unclaimed, claimed=found.claimed)
    account.not_told_apart = found.not_told_apart
    account.add(found.verdicts)
    return account


def _judge(
    spark: SparkSession,
    ledger: DataFrame,
    leftovers: DataFrame,
    left: int,
    spare: int,
    bounds: Sequence[Bound],
    account: _Account,
) -> None:
    too_many = left > COLLECTED_MAX
    # The driver would call them deleted as well, but they would leave it no room for faults.
    superseded = too_many and any(bound.compacted for bound in bounds)
    if superseded or any(bound.first_offset > 0 or bound.next_offset is not None for bound in bounds):
        leftovers = accounting.excuse(spark, leftovers, bounds, superseded=superseded)
        for producer, reason, count in accounting.excused(ledger, leftovers).collect():
            account.counts[producer, reason] = count
        leftovers = leftovers.where("excuse is null").drop("excuse")
    if too_many:
        leftovers = accounting.touching(leftovers, accounting.touched(ledger, leftovers))
    with _persisted(leftovers) as all_looked_at:
        count = all_looked_at.agg(F.count("*"), F.sum(F.expr("greatest(copies - claims, 0)"))).first()
        assert count is not None
        # Copies that touch no claim may not be among them.
        account.unclaimed = spare - int(count[1] or 0)
        account.not_told_apart = max(0, count[0] - COLLECTED_MAX)
        some = all_looked_at
        if account.not_told_apart:
            some = accounting.missing_first(all_looked_at).limit(COLLECTED_MAX)
        claims = accounting.touched(ledger, some).toArrow().to_pandas()
        verdicts = judge(claims, some.toArrow().to_pandas(), bounds)
    account.add(verdicts)
    account.unclaimed += int((verdicts["what"] == "unclaimed").sum())


@contextmanager
def _persisted(rows: DataFrame) -> Iterator[DataFrame]:
    rows.persist()
    try:
        yield rows
    finally:
        rows.unpersist()


def _findings(accounts: Sequence[_Account]) -> pd.DataFrame:
    """All faults of all stores, with the name of the store."""
    found = [
        account.findings.assign(store=account.store).astype(object) for account in accounts if len(account.findings)
    ]
    return pd.concat(found)[list(_FINDING_COLUMNS)] if found else pd.DataFrame(columns=list(_FINDING_COLUMNS))


def _write_findings(path: str, findings: pd.DataFrame) -> None:
    try:
        if path.endswith(".parquet"):
            findings.to_parquet(path, index=False)
        else:
            findings.to_json(path, orient="records", lines=True, force_ascii=False)
    except OSError as error:
        raise OperatorError(f"cannot write {path}: {error.strerror or error}") from None


def _summary(
    acknowledged: Mapping[str, int], accounts: Sequence[_Account], options: AuditOptions, elapsed_s: float
) -> Summary:
    by_producer = [
        _producer_row(account, producer, count)
        for account in accounts
        if account.store != LEDGER_STORE or account.faults
        for producer, count in sorted((acknowledged if account.claimed is None else account.claimed).items())
    ]
    by_store = [
        {name: getattr(account, name) for name in _STORE_COLUMNS}
        for account in accounts
        if account.store != LEDGER_STORE or account.not_told_apart
    ]
    tables = [Table("producers", _PRODUCER_COLUMNS, by_producer), Table("stores", _STORE_COLUMNS, by_store)]
    faults = sum(account.faults for account in accounts)
    shown = _rows(_findings(accounts).head(options.shown))
    if shown:
        tables.append(Table("findings", _FINDING_COLUMNS, shown))
    total = sum(acknowledged.values())
    facts = {
        "verdict": _verdict(
            faults, *(sum(row[name] for row in by_producer) for name in ("pending", "perhaps_deleted"))
        ),
        "acknowledged_records": total,
        **({"isolation": options.isolation} if options.isolation != stores.COMMITTED else {}),
        "rate": rate(total * (len(accounts) - 1), elapsed_s),
    }
    if faults > len(shown):
        facts["findings_not_shown"] = faults - len(shown)
    return Summary("audit", facts, tables, ok=not faults)


def _verdict(faults: int, pending: int, perhaps_deleted: int) -> str:
    found = f"{faults} findings" if faults else "clean"
    if pending:
        found += f", {pending} records not archived yet"
    if perhaps_deleted:
        found += f", {perhaps_deleted} records without an offset perhaps deleted"
    return found


def _rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows of plain Python values; what is missing is None."""
    plain = frame.astype(object).where(frame.notna(), None)
    return [{str(name): value for name, value in row.items()} for row in plain.to_dict("records")]


def _producer_row(account: _Account, producer: str, acknowledged: int) -> dict[str, Any]:
    counts = {what: account.counts.get((producer, what), 0) for what in COUNTED}
    absent = sum(counts[what] for what in ("lost", "corrupted", *ABSENT))
    return {
        "store": account.store,
        "producer": producer,
        "acknowledged": acknowledged,
        # Nobody knows how many of those that were not told apart are of this producer.
        "found": None if account.not_told_apart else acknowledged - absent,
        **counts,
    }
