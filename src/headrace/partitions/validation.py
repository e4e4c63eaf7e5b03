"""What a topic asks of each record before its batch is taken: a key where it is compacted, a time in range, no
delay in a transaction.

A batch is taken whole or not at all. All of its records that are wrong are named (KIP-467), so that a producer can tell
them from the others, which it may send again. The kernel looks at the records, and only where a topic asks for it and
the batch's header does not say enough.
"""

from __future__ import annotations

from typing import Final

from headrace.errors import InvalidRecord, InvalidTimestamp
from headrace.records import kernel
from headrace.records.batch import BatchHeader
from headrace.records.delayed import due_times
from headrace.settings.values import FOREVER_MS, LogSettings
from headrace.storage.log import TopicPartition

NO_TIMESTAMP: Final = -1
WORDED_MAX: Final = 100
"""Records whose error has words of its own; those behind are named by their places alone."""
NO_KEY: Final = "no key, but the topic is compacted by key (cleanup.policy): give every record one"


def check_records(
    topic_partition: TopicPartition, header: BatchHeader, batch: memoryview, settings: LogSettings, now_ms: int
) -> None:
    """InvalidRecord or InvalidTimestamp names every record that is wrong; the first of them decides which it is."""
    if settings.delays and header.is_transactional:
        due_times(batch, header, now_ms, settings.delay_max_ms)  # which refuses every delay there
    earliest_ms, latest_ms = now_ms - settings.timestamp_before_max_ms, now_ms + settings.timestamp_after_max_ms
    in_time = settings.append_time or _all_in_time(header, earliest_ms, latest_ms, settings)
    if in_time and not settings.compact:
        return
    found = kernel.columns(batch)
    wrong: dict[int, str] = {}
    if not in_time and (min(found.timestamps_ms) < earliest_ms or max(found.timestamps_ms) > latest_ms):
        for place, timestamp_ms in enumerate(found.timestamps_ms):
            if not earliest_ms <= timestamp_ms <= latest_ms and timestamp_ms != NO_TIMESTAMP:
                wrong[place] = f"timestamp {timestamp_ms}, and the topic takes {earliest_ms} to {latest_ms}"
    if settings.compact and min(found.key_lengths) < 0:
        wrong |= {place: NO_KEY for place, length in enumerate(found.key_lengths) if length < 0}
    if not wrong:
        return
    places = sorted(wrong)
    first = wrong[places[0]]
    kind = InvalidRecord if first is NO_KEY else InvalidTimestamp
    more = "" if len(places) == 1 else f"; {len(places)} records are wrong"
    raise kind(
        f"{topic_partition}: record {places[0]} of the batch has {first}{more}",
        [(place, wrong[place] if nth < WORDED_MAX else None) for nth, place in enumerate(places)],
    )


def _all_in_time(header: BatchHeader, earliest_ms: int, latest_ms: int, settings: LogSettings) -> bool:
    """Whether the header alone says so. It gives the greatest time, and as the least one only that of a lone record."""
    if header.max_timestamp_ms > latest_ms:
        return False
    if settings.timestamp_before_max_ms == FOREVER_MS:
        return True
    return header.record_count == 1 and header.base_timestamp_ms >= earliest_ms
