"""What becomes of a record that a listener could not do: another try in place, the retry topic, the dead-letter topic,
or only the log. Rules of the client's own, on plain topics.

It is written to `<group>.retry`, to the partition of its next delay, so that each partition comes due in its order;
the members of the group read it there and call the listener again when it is due. After `max_tries` such tries it is
written to `<group>.dead` and stays there (see `topic_part` for groups whose names no topic can have). Key, value and
headers stay as they were; headers are added, numbers as decimal text:

    headrace-topic, headrace-partition, headrace-offset, headrace-timestamp-ms    where it was first, and its time
    headrace-tries       how often it failed
    headrace-due-ms      wall time at which it is tried again
    headrace-error       what was raised last, shortened

The record is acknowledged there before its progress moves on here: if the process dies between the two it is tried
twice, and never lost. Each of the two topics is made when the first record needs it; members that wait for the retry
topic find it within a second or so, and read it from its first record. Pure, but for `make_topic`.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from headrace.client.admin import operations
from headrace.client.admin.cluster import Cluster, Retry
from headrace.client.consumer.options import ConsumerConfig
from headrace.client.errors import Refusal
from headrace.errors import ErrorCode, HeadraceError, SettingError
from headrace.records.consumer_records import ReceivedRecord
from headrace.records.record import Header

if TYPE_CHECKING:
    from headrace.client.consumer.workload import Job

DELAYS_MS: Final = tuple(
    1000 * seconds for seconds in (10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
)
MAX_TRIES: Final = 16
ERROR_MAX_CHARS: Final = 300
RETRY: Final = "retry"
DEAD: Final = "dead"
PART_MAX_CHARS: Final = 249 - len(f".{RETRY}")
HASH_CHARS: Final = 16
LARGEST_BYTES: Final = (1 << 31) - 1
"""What could be read can be put aside, whatever the limit of its topic: the brokers' own is left."""
RESEND_MOST_S: Final = 60.0
_NO_TOPIC: Final = re.compile(r"[^A-Za-z0-9._-]")

TOPIC: Final = "headrace-topic"
PARTITION: Final = "headrace-partition"
OFFSET: Final = "headrace-offset"
TIMESTAMP: Final = "headrace-timestamp-ms"
TRIES: Final = "headrace-tries"
DUE: Final = "headrace-due-ms"
ERROR: Final = "headrace-error"
_OURS: Final = frozenset((TOPIC, PARTITION, OFFSET, TIMESTAMP, TRIES, DUE, ERROR))

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OutgoingRecord:
    """A record to be sent; without a partition its key decides."""

    topic: str
    partition: int | None
    key: bytes | None
    value: bytes | None
    headers: list[Header]


@dataclass(frozen=True, slots=True)
class RetriedRecord:
    """A record from the retry topic: as it was first, with how often it failed and when it is due."""

    record: ReceivedRecord
    tries: int
    due_ms: int


@dataclass(frozen=True, slots=True)
class RetryRules:
    group: str
    max_tries: int = MAX_TRIES
    delays_ms: Sequence[int] = DELAYS_MS

    def __post_init__(self) -> None:
        if self.max_tries < 0:
            raise SettingError(f"max_tries is {self.max_tries}, and may not be below 0; 0 tries nothing again")
        if not self.delays_ms or any(delay_ms < 0 for delay_ms in self.delays_ms):
            raise SettingError("delays_ms needs one delay at least, and none below 0")

    @property
    def retry_topic(self) -> str:
        return f"{topic_part(self.group)}.{RETRY}"

    @property
    def dead_topic(self) -> str:
        return f"{topic_part(self.group)}.{DEAD}"

    def outgoing(self, record: ReceivedRecord, failed: int, error: str, now_ms: int) -> OutgoingRecord:
        """Where a record goes that has failed so often, this time included."""
        level = min(failed, len(self.delays_ms)) - 1
        is_dead = failed > self.max_tries
        added: list[Header] = [
            (TOPIC, record.topic.encode()),
            (PARTITION, b"%d" % record.partition),
            (OFFSET, b"%d" % record.offset),
            (TIMESTAMP, b"%d" % record.timestamp_ms),
            (TRIES, b"%d" % failed),
            (ERROR, error[:ERROR_MAX_CHARS].encode(errors="replace")),
        ]
        if not is_dead:
            added.append((DUE, b"%d" % (now_ms + self.delays_ms[level])))
        headers = [*_own(record), *added]
        topic = self.dead_topic if is_dead else self.retry_topic
        return OutgoingRecord(topic, None if is_dead else level, record.key, record.value, headers)


def topic_part(group: str) -> str:
    """The name of a group as a topic's name may have it: itself, or what is left of it with a hash of the whole."""
    if len(group) <= PART_MAX_CHARS and not _NO_TOPIC.search(group):
        return group
    mark = hashlib.sha256(group.encode(errors="surrogatepass")).hexdigest()[:HASH_CHARS]
    return f"{_NO_TOPIC.sub('_', group)[: PART_MAX_CHARS - 1 - HASH_CHARS]}-{mark}"


def retried_record(record: ReceivedRecord) -> RetriedRecord:
    """A record of the retry topic; one that somebody else put there is due at once, as a first try of its own."""
    found = {name: value for name, value in record.headers if name in _OURS and value is not None}
    try:
        first = ReceivedRecord(
            found[TOPIC].decode(),
            int(found[PARTITION]),
            int(found[OFFSET]),
            int(found[TIMESTAMP]),
            record.key,
            record.value,
            _own(record),
            record.leader_epoch,
        )
        return RetriedRecord(first, int(found[TRIES]), int(found[DUE]))
    except (KeyError, ValueError):
        return RetriedRecord(record, 0, 0)


def _own(record: ReceivedRecord) -> list[Header]:
    """The headers that it had at first."""
    return [header for header in record.headers if header[0] not in _OURS]


class Verdict(Enum):
    """What a listener may return instead of raising."""

    LATER = "later"


LATER: Final = Verdict.LATER
"""Not done: try this record again later."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a record is not done."""

    told: str
    raised: BaseException | None = None
    """By the listener, with where: that is logged."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        # What stands above the listener is ours, and tells nobody anything.
        inner = error.__traceback__ and error.__traceback__.tb_next
        return cls(f"{type(error).__name__}: {error}", error.with_traceback(inner or error.__traceback__))


ASKED_LATER: Final = Failure("the listener asked for it later")


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

    def after_failure(self, job: Job, failure: Failure) -> float | None:
        """Try it again after so many seconds, or not here: then the job may have a record to be sent elsewhere."""
        record = job.record
        job.tries += 1
        log.warning(
            "%s-%d at offset %d failed for the %d. time: %s",
            record.topic, record.partition, record.offset, job.tries, failure.told, exc_info=failure.raised,
        )  # fmt: skip
        if self.ordered and (self.max_tries is None or job.tries <= self.max_tries):
            return self.pause_s
        if self.rules is not None:
            job.outgoing = self.rules.outgoing(record, job.tries, failure.told, round(time.time() * 1000))
        return None

    def after_refusal(self, job: Job, outgoing: OutgoingRecord, error: HeadraceError) -> float:
        """How long to wait before it is sent again. Logged once: until it is taken nothing is lost, as its
        progress stays where it is.
        """
        job.refused += 1
        if job.refused == 1:
            log.error(
                "%s-%d at offset %d failed and cannot be put into %s, which is tried until it can: %s",
                job.record.topic, job.record.partition, job.record.offset, outgoing.topic, error,
            )  # fmt: skip
        return min(self.pause_s * 2.0 ** min(job.refused - 1, 16), RESEND_MOST_S)


def own_topics(group: str | None) -> frozenset[str]:
    """Where a group's listeners put what failed."""
    return frozenset() if group is None else frozenset(f"{topic_part(group)}.{kind}" for kind in (RETRY, DEAD))


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


def make_topic(options: ConsumerConfig, rules: RetryRules, name: str) -> None:
    """One of the group's own topics, if it is not there. Blocks."""
    partitions = len(rules.delays_ms) if name == rules.retry_topic else 1
    with Cluster(
        options.bootstrap,
        client_id=options.client_id,
        timeout_ms=options.timeout_ms,
        retry=Retry(within_ms=options.timeout_ms),
        tls=options.tls,
    ) as cluster:
        try:
            operations.create_topic(
                cluster,
                name,
                partitions=partitions,
                configs={"max.message.bytes": LARGEST_BYTES},
                timeout_ms=options.timeout_ms,
            )
        except Refusal as refusal:
            if refusal.kafka_code != ErrorCode.TOPIC_ALREADY_EXISTS:
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
        on_assigned=None,
        on_revoked=None,
        on_lost=None,
        instance_id=options.instance_id and f"{options.instance_id}.retry",
    )
