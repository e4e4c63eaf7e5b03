"""What follows when a listener fails: another try in place, the retry topic, the dead-letter topic, or only the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

from headrace.client.admin import operations
from headrace.client.admin.cluster import Cluster
from headrace.client.consumer.options import ConsumerConfig
from headrace.client.consumer.redelivery import MAX_TRIES, OutgoingRecord, RetryRules
from headrace.client.consumer.workload import Job
from headrace.client.errors import Refusal
from headrace.errors import HeadraceError, SettingError
from headrace.records.consumer_records import ReceivedRecord

TOPIC_EXISTS: Final = 36
LARGEST_BYTES: Final = (1 << 31) - 1
"""What could be read can be put aside, whatever the limit of its topic: the brokers' own is left."""
RESEND_MOST_S: Final = 60.0

log = logging.getLogger(__name__)


class Verdict(Enum):
    """What a listener may return instead of raising."""

    LATER = "later"


LATER: Final = Verdict.LATER
"""Not done: try this record again later."""


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    ordered: bool
    rules: RetryRules | None
    """None: a record that fails is only logged."""
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
        """Try it again after so many seconds, or not here: then the job may have a record to be sent elsewhere."""
        record = job.record
        job.tries += 1
        log.warning(
            "%s-%d at offset %d failed for the %d. time: %s",
            record.topic, record.partition, record.offset, job.tries, error,
        )  # fmt: skip
        if self.ordered and (self.max_tries is None or job.tries <= self.max_tries):
            return self.pause_s
        if self.rules is not None:
            job.outgoing = self.rules.outgoing(record, job.tries, error, round(time.time() * 1000))
        return None

    def after_refusal(self, job: Job, outgoing: OutgoingRecord, error: HeadraceError) -> float:
        """How long to wait before the outgoing is sent again. Told once: until it is taken nothing is lost, as its
        progress stays where it is.
        """
        job.refused += 1
        if job.refused == 1:
            log.error(
                "%s-%d at offset %d failed and cannot be put into %s, which is tried until it can: %s",
                job.record.topic, job.record.partition, job.record.offset, outgoing.topic, error,
            )  # fmt: skip
        return min(self.pause_s * 2.0 ** min(job.refused - 1, 16), RESEND_MOST_S)


def failure_policy(
    options: ConsumerConfig, *, ordered: bool, max_tries: int | None, delays_ms: Sequence[int], pause_ms: int
) -> FailurePolicy:
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
    return FailurePolicy(ordered, rules, limit, pause_ms / 1000, options.decoder)


def make_topics(options: ConsumerConfig, rules: RetryRules, *, retry: bool) -> None:
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


def retry_options(options: ConsumerConfig, rules: RetryRules) -> ConsumerConfig:
    """For reading the retry topic as another member of the same group."""
    return replace(
        options,
        topics=(rules.retry_topic,),
        start="earliest",
        priority_header=None,
        decoder=None,
        instance_id=options.instance_id and f"{options.instance_id}.retry",
    )
