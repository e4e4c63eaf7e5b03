"""First batches of idempotent producers that came before this broker had a replica of their partition.

A broker may hear only a moment later that it leads: the topic was made just now, or moved here. What a producer sent
behind the refused batch must not come before it then, so the log hears of the refusal when it is first served (see
`storage.producers`). Until then it is kept here, for as long as a producer may have batches on their way.
"""

from __future__ import annotations

from typing import Final

from headrace.records.batch import BatchHeader
from headrace.storage.log import Log

EARLY_MAX: Final = 1000
"""Producers, counted anew in each partition; beyond these the oldest are forgotten."""
EARLY_SECONDS: Final = 600.0
"""Longer than a request waits anywhere. A partition that is not here for so long was asked for at the wrong broker, and
if it comes here later, its producers have gone on elsewhere."""

Asked = tuple[str | bytes, int]
"""Name or id of a topic, as the producer gave it, and a partition."""


class EarlyRefusals:
    __slots__ = ("_refused",)

    def __init__(self) -> None:
        self._refused: dict[tuple[Asked, int], tuple[float, BatchHeader]] = {}

    def __len__(self) -> int:
        return len(self._refused)

    def note(self, asked: Asked, header: BatchHeader, now: float) -> None:
        """Of several batches of a producer the first that is refused counts."""
        self._forget_old(now)
        key = asked, header.producer_id
        _, known = self._refused.get(key, (now, header))
        if header.producer_epoch == known.producer_epoch and header.base_sequence > known.base_sequence:
            return
        self._refused.pop(key, None)  # the oldest stand first
        if len(self._refused) >= EARLY_MAX:
            del self._refused[next(iter(self._refused))]
        self._refused[key] = now, header

    def tell(self, log: Log, now: float) -> None:
        """The partition is here now."""
        if not self._refused:
            return
        self._forget_old(now)
        where = log.topic_partition
        names = (where.topic, where.partition), (log.topic_id, where.partition)
        for key in [key for key in self._refused if key[0] in names]:
            log.producers.refused(self._refused.pop(key)[1])

    def _forget_old(self, now: float) -> None:
        while self._refused:
            oldest = next(iter(self._refused))
            if now - self._refused[oldest][0] <= EARLY_SECONDS:
                return
            del self._refused[oldest]
