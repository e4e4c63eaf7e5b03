"""What becomes of a record that a listener could not do: rules of the client's own, on plain topics.

It is written to `<group>.retry`, to the partition of its next delay, so that each partition comes due in its order;
the members of the group read it there and call the listener again when it is due. After `max_tries` such tries it is
written to `<group>.dead` and stays there (see `topic_part` for groups whose names no topic can have). Key, value and
headers stay as they were; headers are added, numbers as decimal text:

    headrace-topic, headrace-partition, headrace-offset, headrace-timestamp-ms    where it was first, and its time
    headrace-tries       how often it failed
    headrace-due-ms      wall time at which it is tried again
    headrace-error       what was raised last, shortened

The record is acknowledged there before its progress moves on here: if the process dies between the two it is tried
twice, and never lost. Pure.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from headrace.errors import SettingError
from headrace.records.consumer_records import ReceivedRecord
from headrace.records.record import Header

DELAYS_MS: Final = tuple(
    1000 * seconds for seconds in (10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
)
MAX_TRIES: Final = 16
ERROR_MAX_CHARS: Final = 300
PART_MAX_CHARS: Final = 249 - len(".retry")
HASH_CHARS: Final = 16
_NO_TOPIC: Final = re.compile(r"[^A-Za-z0-9._-]")

TOPIC: Final = "headrace-topic"
PARTITION: Final = "headrace-partition"
OFFSET: Final = "headrace-offset"
TIMESTAMP: Final = "headrace-timestamp-ms"
TRIES: Final = "headrace-tries"
DUE: Final = "headrace-due-ms"
ERROR: Final = "headrace-error"
_OURS: Final = frozenset((TOPIC, PARTITION, OFFSET, TIMESTAMP, TRIES, DUE, ERROR))


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
        return f"{topic_part(self.group)}.retry"

    @property
    def dead_topic(self) -> str:
        return f"{topic_part(self.group)}.dead"

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
