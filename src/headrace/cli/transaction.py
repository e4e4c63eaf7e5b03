"""`headrace transaction`: which there are, what holds up readers of committed records, and how to end it."""

from __future__ import annotations

import time
from typing import Any, Final

import click

from headrace.cli.completers import topic_names, transactional_ids
from headrace.cli.options import Duration, json_option, with_cluster
from headrace.cli.output import counted, show_json, show_rows, show_table
from headrace.cli.times import format_duration_ms, format_time_ms
from headrace.cli.watch import watch_option
from headrace.client.admin import transactions
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.transactions import HangingTransaction, TransactionDescription
from headrace.errors import InvalidRequest

_COLUMNS = ("transactional_id", "state", "open_for", "partitions", "two_phase", "owner", "producer_id", "coordinator")
_FINISHED_COLUMNS = ("query", "transactions", "open_for", "committed", "aborted")
FINISHED_AFTER_MS: Final = 3_600_000
_HANGING_COLUMNS = ("topic", "partition", "start_offset", "silent_for", "producer_id", "epoch", "transactional_id")


@click.group()
def transaction() -> None:
    """List, describe and end transactions; find those that hang."""


@transaction.command("list")
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice(transactions.STATES, case_sensitive=False),
    help="Only in this state; repeat.",
)
@click.option("--open", "is_open", is_flag=True, help="Only those that are not ended: Ongoing, or about to be.")
@click.option("--longer-than", "longer_than_ms", type=Duration("s"), help="Only those that are open for so long.")
@click.option("--two-phase", is_flag=True, help="Only those that no timeout ends.")
@click.option("--producer-id", "producer_ids", type=click.IntRange(0), multiple=True, help="Only of this one; repeat.")
@click.option("--match", "pattern", metavar="REGEX", help="Only names that it describes as a whole.")
@json_option
@watch_option
@with_cluster
def list_transactions(
    cluster: Cluster,
    states: tuple[str, ...],
    is_open: bool,
    longer_than_ms: int | None,
    two_phase: bool,
    producer_ids: tuple[int, ...],
    pattern: str | None,
    as_json: bool,
) -> None:
    """List transactional ids, and how long their transactions are open.

    OPEN FOR, PARTITIONS and OWNER are of those that are not ended.
    """
    if is_open or two_phase or longer_than_ms is not None:
        states = states or transactions.OPEN_STATES
    listed = transactions.list_transactions(
        cluster, states=states, producer_ids=producer_ids, longer_than_ms=longer_than_ms, pattern=pattern
    )
    wanted = [each.transactional_id for each in listed if each.state in transactions.OPEN_STATES]
    described = transactions.describe_transactions(cluster, wanted, missing_ok=True)
    known = {each.transactional_id: each for each in described}
    now_ms = _now_ms()
    rows = []
    for each in listed:
        found = known.get(each.transactional_id)
        if two_phase and (found is None or not found.two_phase):
            continue
        rows.append(
            {
                "transactional_id": each.transactional_id,
                "state": each.state if found is None else found.state,
                **_open_cells(found, now_ms, as_json),
                "producer_id": each.producer_id,
                "coordinator": each.broker_id,
            }
        )
    show_rows(rows, _COLUMNS, as_json)


def _open_cells(found: TransactionDescription | None, now_ms: int, as_json: bool) -> dict[str, Any]:
    if found is None:
        empty: dict[str, Any] = dict.fromkeys(("partitions", "two_phase", "owner"))
        return {"open_ms" if as_json else "open_for": None, **empty}
    age_ms = found.age_ms(now_ms)
    return {
        **({"open_ms": age_ms} if as_json else {"open_for": _duration(age_ms)}),
        "partitions": len(found.partitions),
        "two_phase": found.two_phase,
        "owner": _owner(found),
    }


def _owner(found: TransactionDescription) -> str | None:
    given = [part for part in (found.owner_client_id, found.owner_host) if part]
    return " at ".join(given) if given else None


@transaction.command()
@click.argument("transactional_id", shell_complete=transactional_ids)
@json_option
@watch_option
@with_cluster
def describe(cluster: Cluster, transactional_id: str, as_json: bool) -> None:
    """Show the state of TRANSACTIONAL_ID, and the partitions of its open transaction."""
    (found,) = transactions.describe_transactions(cluster, [transactional_id])
    age_ms = found.age_ms(_now_ms())
    partitions = [{"topic": topic, "partition": number} for topic, number in found.partitions]
    if as_json:
        show_json(
            {
                "transactional_id": found.transactional_id,
                "state": found.state,
                "producer_id": found.producer_id,
                "producer_epoch": found.producer_epoch,
                "timeout_ms": None if found.two_phase else found.timeout_ms,
                "two_phase": found.two_phase,
                "start_ms": found.start_ms,
                "open_ms": age_ms,
                "owner": _owner(found),
                "partitions": partitions,
            }
        )
        return
    ends = "no timeout ends it" if found.two_phase else f"aborted after {_duration(found.timeout_ms)}"
    click.echo(
        f"transactional id {transactional_id}, {found.state}, producer {found.producer_id} epoch "
        f"{found.producer_epoch}, {ends}"
    )
    if age_ms is not None:
        by = _owner(found)
        since = format_time_ms(found.start_ms or 0)
        click.echo(f"open for {_duration(age_ms)}, since {since}{f', by {by}' if by else ''}")
    if partitions:
        show_table(partitions, ("topic", "partition"))


@transaction.command()
@click.argument("transactional_id", required=False, shell_complete=transactional_ids)
@click.option("--topic", shell_complete=topic_names, help="Of a hanging one: its topic, as find-hanging shows it.")
@click.option("--partition", type=click.IntRange(0), help="Of a hanging one: its partition.")
@click.option("--start-offset", type=click.IntRange(0), help="Of a hanging one: its first offset.")
@click.option("--dry-run", is_flag=True, help="Show what would be aborted, and change nothing.")
@with_cluster
def abort(
    cluster: Cluster,
    transactional_id: str | None,
    topic: str | None,
    partition: int | None,
    start_offset: int | None,
    dry_run: bool,
) -> None:
    """Abort the open transaction of TRANSACTIONAL_ID, or a hanging one.

    Its producer can commit nothing of it any more. A hanging one, which no coordinator
    knows of, is given by --topic, --partition and --start-offset: the marker of an abort
    is written into that partition.
    """
    hanging = (topic, partition, start_offset)
    if transactional_id is not None and hanging == (None, None, None):
        _end(cluster, transactional_id, commit=False, dry_run=dry_run)
        return
    if transactional_id is not None or topic is None or partition is None or start_offset is None:
        raise click.UsageError("give a transactional id, or --topic, --partition and --start-offset of a hanging one")
    _abort_hanging(cluster, topic, partition, start_offset, dry_run)


@transaction.command()
@click.argument("transactional_id", shell_complete=transactional_ids)
@click.option("--dry-run", is_flag=True, help="Show what would be committed, and change nothing.")
@with_cluster
def commit(cluster: Cluster, transactional_id: str, dry_run: bool) -> None:
    """Commit the prepared two-phase transaction of TRANSACTIONAL_ID.

    Only if you know that its owner has prepared it, and wanted it committed.
    """
    _end(cluster, transactional_id, commit=True, dry_run=dry_run)


@transaction.command()
@click.option(
    "--older-than",
    "older_than_ms",
    type=Duration("s"),
    default=FINISHED_AFTER_MS,
    show_default="1h",
    help="Only of writes of which a transaction is open for so long.",
)
@click.option("--dry-run", is_flag=True, help="Show what is open, and change nothing.")
@json_option
@with_cluster
def finish(cluster: Cluster, older_than_ms: int, dry_run: bool, as_json: bool) -> None:
    """End what streams and writes of Spark have left open, whose drivers are gone.

    What they had decided to commit is committed, the rest aborted. A stream does that
    itself when it goes on from its checkpoint. One that still runs has to be started again.
    """
    from headrace.spark import sink_commits

    rows = []
    for left in sink_commits.unfinished(cluster, older_than_ms, _now_ms()):
        row: dict[str, Any] = {"query": left.query, "transactions": len(left.names)}
        row |= {"open_ms": left.oldest_ms} if as_json else {"open_for": _duration(left.oldest_ms)}
        if not dry_run:
            row["committed"], row["aborted"] = sink_commits.finish(cluster, left, cluster.timeout_ms)
        rows.append(row)
    if not rows and not as_json:
        click.echo("no write of Spark has left anything open")
        return
    show_rows(rows, _FINISHED_COLUMNS[: 3 if dry_run else None], as_json)


def _end(cluster: Cluster, transactional_id: str, *, commit: bool, dry_run: bool) -> None:
    (found,) = transactions.describe_transactions(cluster, [transactional_id])
    if found.state != "Ongoing":
        raise InvalidRequest(f"transactional id {transactional_id!r} has no open transaction: it is {found.state}")
    if commit and not found.two_phase:
        raise InvalidRequest(
            f"the transaction of {transactional_id!r} is not a two-phase one: only its producer knows whether all of "
            "it is written, and commits it"
        )
    if not dry_run:
        transactions.end_transactions(cluster, [found.prepared], commit=commit)
    done = "committed" if commit else "aborted"
    told = f"would be {done}" if dry_run else done
    age = _duration(found.age_ms(_now_ms()))
    where = counted(len(found.partitions), "partition")
    click.echo(f"{told}: the transaction of {transactional_id}, open for {age}, in {where}")


def _abort_hanging(cluster: Cluster, topic: str, partition: int, start_offset: int, dry_run: bool) -> None:
    found = [
        producer
        for producer in transactions.describe_producers(cluster, [(topic, partition)])
        if producer.transaction_start == start_offset
    ]
    place = f"{topic}-{partition}"
    if not found:
        raise InvalidRequest(f"no open transaction in {place} begins at offset {start_offset}; see find-hanging")
    if not dry_run:
        transactions.abort_hanging(cluster, found[0])
    told = "would be aborted" if dry_run else "aborted"
    click.echo(f"{told}: the transaction of producer {found[0].producer_id} in {place} from offset {start_offset} on")


@transaction.command("find-hanging")
@click.option("--topic", "topics", multiple=True, shell_complete=topic_names, help="Only in this topic; repeat.")
@click.option("--broker", "broker_id", type=click.IntRange(0), help="Only in partitions that this broker leads.")
@click.option(
    "--silent-for",
    "older_than_ms",
    type=Duration("s"),
    default=transactions.HANGING_AFTER_MS,
    show_default="15m",
    help="Only those without a record for so long: more than any timeout of transactions.",
)
@json_option
@with_cluster
def find_hanging(
    cluster: Cluster, topics: tuple[str, ...], broker_id: int | None, older_than_ms: int, as_json: bool
) -> None:
    """Find open transactions in logs that no coordinator knows of.

    Readers of committed records wait for them for ever. `headrace transaction abort
    --topic ... --partition ... --start-offset ...` ends one.
    """
    now_ms = _now_ms()
    found = transactions.find_hanging(
        cluster, topics=topics, broker_id=broker_id, older_than_ms=older_than_ms, now_ms=now_ms
    )
    rows = [_hanging_row(each, now_ms, as_json) for each in found]
    if not rows and not as_json:
        click.echo("no transaction hangs")
        return
    show_rows(rows, _HANGING_COLUMNS, as_json)


def _hanging_row(found: HangingTransaction, now_ms: int, as_json: bool) -> dict[str, Any]:
    producer = found.producer
    silent_ms = max(0, now_ms - producer.last_timestamp_ms)
    return {
        "topic": producer.topic,
        "partition": producer.partition,
        "start_offset": producer.transaction_start,
        **({"silent_ms": silent_ms} if as_json else {"silent_for": _duration(silent_ms)}),
        "producer_id": producer.producer_id,
        "epoch": producer.producer_epoch,
        "transactional_id": found.transactional_id,
    }


def _now_ms() -> int:
    return int(time.time() * 1000)


def _duration(ms: int | None) -> str | None:
    return None if ms is None else format_duration_ms(ms)
