"""First batches that came too early: the first of a producer counts, for a while, and so many of them."""

from __future__ import annotations

from headrace.partitions.early_refusals import EARLY_MAX, EARLY_SECONDS, Asked, EarlyRefusals
from headrace.records.batch import BatchHeader, read_header
from headrace.storage.log import TopicPartition
from partitions.led import batch

ASKED = ("orders", 0)


def header(producer_id: int = 1, epoch: int = 0, sequence: int = 0) -> BatchHeader:
    return read_header(memoryview(batch(b"value", producer=(producer_id, epoch, sequence))))


class Told:
    """A log that keeps what it hears of its producers."""

    topic_partition = TopicPartition("orders", 0)
    topic_id = bytes(16)

    def __init__(self) -> None:
        self.heard: list[tuple[int, int, int]] = []
        self.producers = self

    def refused(self, header: BatchHeader) -> None:
        self.heard.append((header.producer_id, header.producer_epoch, header.base_sequence))


def told(early: EarlyRefusals, now: float = 0.0) -> list[tuple[int, int, int]]:
    log = Told()
    early.tell(log, now)  # type: ignore[arg-type]
    return log.heard


def test_of_several_batches_the_first_counts_and_of_several_epochs_the_last() -> None:
    for noted, kept in (
        ([(0, 5), (0, 7)], (0, 5)),
        ([(0, 5), (0, 3)], (0, 3)),
        ([(0, 5), (0, 5)], (0, 5)),
        ([(0, 5), (1, 7)], (1, 7)),
        ([(0, 5), (1, 3)], (1, 3)),
    ):
        early = EarlyRefusals()
        for epoch, sequence in noted:
            early.note(ASKED, header(1, epoch, sequence), 0.0)
        assert told(early) == [(1, *kept)]
        assert len(early) == 0
        assert told(early) == []


def test_a_log_hears_of_its_own_partition_by_name_and_by_id() -> None:
    early = EarlyRefusals()
    asked: list[Asked] = [("orders", 0), (bytes(16), 0), ("orders", 1), ("other", 0), (b"x" * 16, 0)]
    for nth, each in enumerate(asked):
        early.note(each, header(nth), 0.0)
    assert told(early) == [(0, 0, 0), (1, 0, 0)]
    assert len(early) == 3


def test_a_refusal_is_forgotten_after_a_while_and_not_before() -> None:
    early = EarlyRefusals()
    early.note(ASKED, header(1), 0.0)
    early.note(ASKED, header(2), 1.0)
    early.note(ASKED, header(3), EARLY_SECONDS)
    assert len(early) == 3
    early.note(ASKED, header(4), EARLY_SECONDS + 0.5)
    assert len(early) == 3, "the first is gone"
    assert told(early, EARLY_SECONDS + 1.5) == [(3, 0, 0), (4, 0, 0)]


def test_so_many_refusals_are_kept_and_the_oldest_go() -> None:
    early = EarlyRefusals()
    for producer in range(EARLY_MAX):
        early.note(ASKED, header(producer), 0.0)
    early.note(ASKED, header(1), 1.0)
    assert len(early) == EARLY_MAX
    early.note(ASKED, header(EARLY_MAX), 2.0)
    assert len(early) == EARLY_MAX
    assert [producer for producer, _, _ in told(early)] == [*range(2, EARLY_MAX), 1, EARLY_MAX]
