"""`headrace queue`: share groups as queues: how much waits, what is in flight, what comes next, and dead letters. And
records that are delivered later."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from itertools import islice
from typing import Any, Final

import click

from headrace.cli import EXIT_FAILED
from headrace.cli.completers import group_names, topic_names
from headrace.cli.formats import make_format
from headrace.cli.options import json_option, time_ms, with_cluster
from headrace.cli.output import counted, show_json, show_rows, show_table
from headrace.cli.progress import Progress
from headrace.cli.times import EXPECTED, format_time_ms
from headrace.cli.watch import watch_option
from headrace.client.admin import groups, operations, share_groups
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.redrive import PER_TRANSACTION, REASONS, DeadLetter, Redrive, Selection, count_letters
from headrace.client.admin.share_groups import ShareProgress, StartChange
from headrace.client.fetch_requests import LATEST, MOMENTS
from headrace.errors import InvalidRequest, TooLate
from headrace.queues.messages import DeliveryState

_LIST_COLUMNS = ("queue", "state", "members", "depth", "in_flight", "again", "letters_waiting", "dead_letters")
_PARTITION_COLUMNS = (
    "topic", "partition", "start", "end", "depth", "in_flight", "again", "letters_waiting", "deliveries",
)  # fmt: skip
_LETTER_COLUMNS = ("partition", "offset", "written", "source", "reason", "deliveries", "key")
SHOWN: Final = "%p:%o %T %k %v"
PEEK_DEFAULT: Final = 10
LETTER_TOPIC: Final = "errors.deadletterqueue.topic.name"
LETTER_COPIES: Final = "errors.deadletterqueue.copy.record.enable"

_to_option = click.option(
    "--to", "target", required=True, metavar="earliest|latest|OFFSET|TIME", help=f"TIME is {EXPECTED}."
)
_topic_option = click.option(
    "--topic", "topics", multiple=True, shell_complete=topic_names,
    help="Only this topic; repeat. Else all the group has read.",
)  # fmt: skip
_partition_option = click.option(
    "--partition", "only", type=click.IntRange(0), multiple=True, help="Only this partition; repeat."
)


@click.group()
def queue() -> None:
    """List, describe, peek into, purge and reset share groups; send dead letters again; recall delayed records."""


@queue.command("list")
@json_option
@watch_option
@with_cluster
def list_queues(cluster: Cluster, as_json: bool) -> None:
    """List share groups, and how much waits in each.

    DEPTH counts records that are not done with, IN FLIGHT those that members have, AGAIN
    those that were given back, LETTERS WAITING those whose dead letter is not written yet,
    DEAD LETTERS all records of the group's topic of them.
    """
    rows = [_listed(cluster, found) for found in groups.list_groups(cluster) if found.type == groups.SHARE]
    show_rows(rows, _LIST_COLUMNS, as_json)


def _listed(cluster: Cluster, found: groups.GroupListing) -> dict[str, Any]:
    progress = share_groups.share_progress(cluster, found.group_id)
    topic = _letter_settings(cluster, found.group_id)[0]
    return {
        "queue": found.group_id,
        "state": found.state,
        "members": len(groups.describe_group(cluster, found.group_id).members),
        "depth": sum(each.depth or 0 for each in progress),
        **_held(progress),
        "dead_letters": count_letters(cluster, topic) if topic else None,
    }


def _held(progress: Sequence[ShareProgress]) -> dict[str, int]:
    return {
        "in_flight": sum(each.in_state(DeliveryState.ACQUIRED) for each in progress),
        "again": sum(each.in_state(DeliveryState.AVAILABLE) for each in progress),
        "letters_waiting": sum(each.in_state(DeliveryState.ARCHIVING) for each in progress),
    }


def _letter_settings(cluster: Cluster, group: str) -> tuple[str, bool]:
    """The topic of dead letters, and whether they are copies."""
    found = {config.name: config.value for config in operations.describe_configs(cluster, "group", group)}
    return found.get(LETTER_TOPIC) or "", found.get(LETTER_COPIES) == "true"


@queue.command()
@click.argument("name", shell_complete=group_names)
@json_option
@watch_option
@with_cluster
def describe(cluster: Cluster, name: str, as_json: bool) -> None:
    """Show share group NAME in each partition: what waits, what is in flight, how often it was delivered."""
    described = _share_group(cluster, name)
    progress = share_groups.share_progress(cluster, name)
    topic, copies = _letter_settings(cluster, name)
    letters = count_letters(cluster, topic) if topic else None
    rows = [
        {
            "topic": each.topic,
            "partition": each.partition,
            "start": each.start,
            "end": each.end,
            "depth": each.depth,
            **_held([each]),
            "deliveries": each.deliveries_max,
        }
        for each in progress
    ]
    depth = sum(each.depth or 0 for each in progress)
    if as_json:
        head = {"queue": name, "state": described.state, "members": len(described.members), "depth": depth}
        dead = {"dead_letter_topic": topic or None, "dead_letter_copies": copies, "dead_letters": letters}
        show_json({**head, **dead, "partitions": rows})
        return
    click.echo(f"queue {name}, {described.state}, {counted(len(described.members), 'member')}, depth {depth}")
    if topic:
        there = "which is not there" if letters is None else f"with {counted(letters, 'record')}"
        click.echo(f"dead letters go to {topic}, {there}, {'as copies' if copies else 'without keys and values'}")
    show_table(rows, _PARTITION_COLUMNS)


def _share_group(cluster: Cluster, name: str) -> groups.GroupDescription:
    described = groups.describe_group(cluster, name)
    if described.type != groups.SHARE:
        raise InvalidRequest(f"{name!r} is not a share group but a {described.type} one: see `headrace group`")
    return described


@queue.command()
@click.argument("name", shell_complete=group_names)
@click.option("--limit", "-n", type=click.IntRange(1), default=PEEK_DEFAULT, show_default=True, help="So many at most.")
@_topic_option
@click.option("--format", "format_name", default=SHOWN, show_default=True, help="As of `headrace consume`.")
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
@with_cluster
def peek(cluster: Cluster, name: str, limit: int, topics: tuple[str, ...], format_name: str, as_json: bool) -> None:
    """Print the records that members of share group NAME would get next, of each partition in its order.

    Nothing is acquired: members get them all the same. What was given back and waits for its
    time (share.retry.backoff.ms) is not among them.
    """
    try:
        format_record = make_format("json" if as_json else format_name)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--format") from None
    _share_group(cluster, name)
    found = (
        each
        for progress in share_groups.share_progress(cluster, name, topics)
        for each in share_groups.next_records(cluster, progress, round(time.time() * 1000))
    )
    for each in islice(found, limit):
        sys.stdout.buffer.write(format_record(each.topic, each.partition, each.record))
    sys.stdout.buffer.flush()


@queue.command()
@click.argument("name", shell_complete=group_names)
@click.option("--reason", type=click.Choice(sorted(REASONS)), help="Only those that were given up for this.")
@click.option("--from", "from_time", metavar="TIME", help=f"Only those written from this time on: {EXPECTED}.")
@click.option("--until", "until_time", metavar="TIME", help="Only those written before this time.")
@click.option("--key", help="Only copies with this key, as UTF-8.")
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="Records a second; else as fast as it goes.")
@click.option("--topic", "letter_topic", shell_complete=topic_names, help="Of dead letters; else the group's.")
@click.option("--again", is_flag=True, help="Also those that a redrive with the same options has sent before.")
@click.option("--dry-run", is_flag=True, help="Show the dead letters that would be sent, and send none.")
@json_option
@with_cluster
def redrive(
    cluster: Cluster,
    name: str,
    reason: str | None,
    from_time: str | None,
    until_time: str | None,
    key: str | None,
    rate: float | None,
    letter_topic: str | None,
    again: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Send dead letters of share group NAME again, to the topics and partitions that they came from.

    Broken off, it goes on where it was when it is begun again with the same options, and
    sends nothing twice. What other options select too is sent by them too.
    """
    topic = letter_topic or _letter_settings(cluster, name)[0]
    if not topic:
        raise InvalidRequest(f"share group {name!r} has no topic of dead letters ({LETTER_TOPIC}): give --topic")
    from_ms = None if from_time is None else time_ms(from_time, "--from")
    until_ms = None if until_time is None else time_ms(until_time, "--until")
    selection = Selection(name, reason, from_ms, until_ms, None if key is None else key.encode())
    most = PER_TRANSACTION if rate is None else max(1, min(PER_TRANSACTION, int(rate)))
    work = Redrive(cluster, topic, selection, again=again, per_transaction=most, pace=_Pace(rate))
    spans = work.spans()
    if dry_run:
        rows = [_letter_row(letter) for span in spans for letters, _ in work.letters(span) for letter in letters]
        show_rows(rows, _LETTER_COLUMNS, as_json)
        return
    with Progress("letters", sum(span.next_offset - span.first_offset for span in spans)) as progress:
        for span in spans:
            work.run(span, progress.advance)
    done = work.done
    if as_json:
        show_json({"queue": name, "topic": topic, "sent": done.sent, "gone": done.gone, "passed": done.passed_over})
        return
    click.echo(f"sent {counted(done.sent, 'record')} again, passed over {done.passed_over}")
    if done.gone:
        click.echo(f"headrace: {counted(done.gone, 'letter')} without a copy, whose records are gone", err=True)


class _Pace:
    """Lets so many a second pass."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._free_at = time.monotonic()

    def __call__(self, count: int) -> None:
        if self._rate is None:
            return
        now = time.monotonic()
        if self._free_at > now:
            time.sleep(self._free_at - now)
        self._free_at = max(now, self._free_at) + count / self._rate


def _letter_row(letter: DeadLetter) -> dict[str, Any]:
    return {
        "partition": letter.partition,
        "offset": letter.offset,
        "written": format_time_ms(letter.written_ms),
        "source": f"{letter.topic}-{letter.source_partition}:{letter.source_offset}",
        "reason": letter.reason,
        "deliveries": letter.delivery_count,
        "key": None if letter.key is None else letter.key.decode(errors="replace"),
    }


@queue.command()
@click.argument("name", shell_complete=group_names)
@click.option("--until", "until_time", metavar="TIME", help=f"Only records before this time: {EXPECTED}.")
@_topic_option
@_partition_option
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@with_cluster
def purge(
    cluster: Cluster,
    name: str,
    until_time: str | None,
    topics: tuple[str, ...],
    only: tuple[int, ...],
    yes: bool,
    as_json: bool,
) -> int:
    """Let share group NAME pass over all records that wait. It must have no members at the time.

    The records stay in their topics: other groups read them, and `headrace queue reset` brings them back.
    """
    moment = LATEST if until_time is None else time_ms(until_time, "--until")
    _share_group(cluster, name)
    changes = share_groups.plan_starts(cluster, name, moment=moment, topics=topics, partitions=only)
    changes = [change for change in changes if change.start is None or change.offset > change.start]
    count = sum(change.offset - (change.start or 0) for change in changes if change.start is not None)
    asked = f"pass over up to {counted(count, 'record')} in {counted(len(changes), 'partition')}?"
    if changes and not yes and not click.confirm(asked, err=True):
        click.echo("nothing was changed", err=True)
        return EXIT_FAILED
    _alter(cluster, name, changes, dry_run=False, as_json=as_json)
    return 0


@queue.command()
@click.argument("name", shell_complete=group_names)
@_to_option
@_topic_option
@_partition_option
@click.option("--dry-run", is_flag=True, help="Show where it would begin, and change nothing.")
@json_option
@with_cluster
def reset(
    cluster: Cluster,
    name: str,
    target: str,
    topics: tuple[str, ...],
    only: tuple[int, ...],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Let share group NAME begin elsewhere. It must have no members at the time.

    What it has acknowledged behind that is delivered again, and delivery counts begin anew.
    """
    moment, offset = None, None
    if target in MOMENTS:
        moment = MOMENTS[target]
    elif target.isdigit():
        offset = int(target)
    else:
        moment = time_ms(target, "--to", ", nor earliest, latest or an offset")
    _share_group(cluster, name)
    changes = share_groups.plan_starts(cluster, name, moment=moment, offset=offset, topics=topics, partitions=only)
    _alter(cluster, name, changes, dry_run=dry_run, as_json=as_json)


def _alter(cluster: Cluster, name: str, changes: Sequence[StartChange], *, dry_run: bool, as_json: bool) -> None:
    if changes and not dry_run:
        share_groups.alter_starts(cluster, name, changes)
    rows = [
        {"topic": each.topic, "partition": each.partition, "start": each.start, "new": each.offset} for each in changes
    ]
    if as_json:
        show_json({"queue": name, "dry_run": dry_run, "partitions": rows})
    else:
        show_table(rows, ("topic", "partition", "start", "new"))


@queue.command()
@click.argument("topic", shell_complete=topic_names)
@click.argument("partition", type=click.IntRange(0))
@click.argument("offset", type=click.IntRange(0))
@with_cluster
def recall(cluster: Cluster, topic: str, partition: int, offset: int) -> None:
    """Have a delayed record of TOPIC never delivered: the one whose producer was told PARTITION and OFFSET.

    Fails with exit code 1 if it is too late: it is due, or was delivered.
    """
    if not operations.recall(cluster, topic, partition, offset):
        raise TooLate(f"offset {offset} of {topic}-{partition} does not wait: it is due, or was not delayed")
    click.echo(f"recalled offset {offset} of {topic}-{partition}")
