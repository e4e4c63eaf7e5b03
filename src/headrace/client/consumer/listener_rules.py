"""How listeners are run, whichever way: what is called, and what follows from how it went. Waits for nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

from headrace.client.admin import operations
from headrace.client.admin.cluster import Cluster
from headrace.client.consumer.core import Keeper, Reading
from headrace.client.consumer.group_protocol import Place
from headrace.client.consumer.options import Options
from headrace.client.consumer.redelivery import MAX_TRIES, Parcel, RetryRules, returned
from headrace.client.consumer.workload import Job, Share, Workload
from headrace.client.errors import Refusal
from headrace.errors import HeadraceError, SettingError
from headrace.records.consumer_records import ReceivedRecord

TOPIC_EXISTS: Final = 36
LARGEST_BYTES: Final = (1 << 31) - 1
"""What could be read can be put aside, whatever the limit of its topic: the brokers' own is left."""
RESEND_MOST_S: Final = 60.0
QUEUED_PER_HAND: Final = 64
"""Records that wait for each thread or task, so that it never waits for the network."""
QUEUED_LEAST: Final = 8
"""Of each partition, however many there are."""
GRACE_S: Final = 30.0
"""How long a rebalance waits for what is being worked on, at most."""

log = logging.getLogger(__name__)


class Verdict(Enum):
    """What a listener may return instead of raising."""

    LATER = "later"


LATER: Final = Verdict.LATER
"""Not done: try this record again later."""


@dataclass(frozen=True, slots=True)
class Conduct:
    ordered: bool
    rules: RetryRules | None
    """None: a record that fails is only told of in the log."""
    max_tries: int | None
    """None: in place, until it is done."""
    pause_s: float
    """Before another try in place."""
    decoder: Callable[[bytes | None], Any] | None

    @property
    def retries_elsewhere(self) -> bool:
        return self.rules is not None and not self.ordered

    def shown(self, job: Job) -> ReceivedRecord:
        """The record as the listener gets it."""
        if self.decoder is None:
            return job.record
        shown = ReceivedRecord(*job.record.fields())
        shown.value = self.decoder(shown.value)
        return shown

    def after_failure(self, job: Job, error: str) -> float | None:
        """Try it again after so many seconds, or not here: then the job may have got a parcel to be sent."""
        record = job.record
        job.tries += 1
        log.warning(
            "%s-%d at offset %d failed for the %d. time: %s",
            record.topic, record.partition, record.offset, job.tries, error,
        )  # fmt: skip
        if self.ordered and (self.max_tries is None or job.tries <= self.max_tries):
            return self.pause_s
        if self.rules is not None:
            job.parcel = self.rules.parcel(record, job.tries, error, round(time.time() * 1000))
        return None

    def after_refusal(self, job: Job, parcel: Parcel, error: HeadraceError) -> float:
        """How long to wait before the parcel is sent again. Told once: until it is taken nothing is lost, as its
        progress stays where it is.
        """
        job.refused += 1
        if job.refused == 1:
            log.error(
                "%s-%d at offset %d failed and cannot be put into %s, which is tried until it can: %s",
                job.record.topic, job.record.partition, job.record.offset, parcel.topic, error,
            )  # fmt: skip
        return min(self.pause_s * 2.0 ** min(job.refused - 1, 16), RESEND_MOST_S)


def conduct(
    options: Options, *, ordered: bool, max_tries: int | None, delays_ms: Sequence[int], pause_ms: int
) -> Conduct:
    if pause_ms <= 0:
        raise SettingError(f"pause_ms is {pause_ms}, and has to be above 0")
    if options.group and not options.commit_interval_ms:
        raise SettingError(
            "commit_interval_ms is 0, and what listeners have done is saved by the clock alone: raise it"
        )
    shared = options.mode == "cluster" and options.group is not None
    limit = max_tries if max_tries is not None or ordered else MAX_TRIES
    rules = None
    if shared and limit is not None:
        # In order a record is tried in place so often, and is dead after that.
        rules = RetryRules(options.group or "", 0 if ordered else limit, delays_ms)
    return Conduct(ordered, rules, limit, pause_ms / 1000, options.decoder)


def make_topics(options: Options, rules: RetryRules, *, retry: bool) -> None:
    """The group's own topics, as far as they are not there. Blocks."""
    wanted = {rules.dead_topic: 1, **({rules.retry_topic: len(rules.delays_ms)} if retry else {})}
    with Cluster(
        options.bootstrap, client_id=options.client_id, timeout_ms=options.timeout_ms, tls=options.tls
    ) as cluster:
        for name, partitions in wanted.items():
            try:
                operations.create_topic(
                    cluster, name, partitions=partitions, configs={"max.message.bytes": str(LARGEST_BYTES)}
                )
            except Refusal as refusal:
                if refusal.kafka_code != TOPIC_EXISTS:
                    raise
                if len(cluster.topic(name, expected=True).partitions) < partitions:
                    operations.create_partitions(cluster, name, partitions)


def retry_options(options: Options, rules: RetryRules) -> Options:
    """For reading the retry topic as another member of the same group."""
    return replace(
        options,
        topics=(rules.retry_topic,),
        start="earliest",
        priority_header=None,
        decoder=None,
        instance_id=options.instance_id and f"{options.instance_id}.retry",
    )


def keep_by(reading: Reading, keeper: Keeper) -> None:
    """From now on records are the keeper's. Those that `records` has decoded and not given out are read again, as they
    are on the wire.
    """
    for place in reading.hand.first_unread():
        reading.seek(place, reading.position(place))
    reading.keep_by(keeper)


def tell_failures(reading: Reading, told: dict[Place, HeadraceError]) -> dict[Place, HeadraceError]:
    """The partitions that cannot be read on, and why; those that were not told yet go to the log."""
    failing = {place: failure for place in reading.assigned if (failure := reading.feed(place).failure) is not None}
    for place, failure in failing.items():
        if told.get(place) is not failure:
            log.error("%s-%d is read no further, others are: %s", *place, failure)
    return failing


def raise_for_good(reading: Reading) -> None:
    """What keeps partitions from being assigned for ever; what may pass is told in the log."""
    try:
        reading.raise_error()
    except HeadraceError as error:
        if reading.error is not None:
            raise
        log.warning("listening goes on and waits: %s", error)


def share_of(hands: int, reading: Reading, *, retried: bool) -> Share:
    """What of a partition is taken in before it waits: among them they have the bytes of the consumer's buffer. Of a
    retry partition nothing while there is one that is not done: those behind it are due later.
    """
    places = max(1, len(reading.assigned))
    most = 1 if retried else max(QUEUED_LEAST, hands * QUEUED_PER_HAND // places)
    return Share(most, max(1, reading.options.buffer_bytes // places))


def jobs(load: Workload, records: Sequence[ReceivedRecord]) -> list[Job]:
    return [
        Job(record, place, record.offset, load.track(place), size_bytes=record.size_bytes)
        for record in records
        for place in ((record.topic, record.partition),)
    ]


def retry_jobs(load: Workload, records: Sequence[ReceivedRecord], now: float) -> list[Job]:
    """Records of the retry topic as they were first, to wait until they are due."""
    now_ms = time.time() * 1000
    found = []
    for read in records:
        place = read.topic, read.partition
        back = returned(read)
        wait_s = max(0.0, (back.due_ms - now_ms) / 1000)
        not_before = now + wait_s if wait_s else 0.0
        job = Job(back.record, place, read.offset, load.track(place), not_before, back.record.size_bytes, back.tries)
        found.append(job)
    return found
