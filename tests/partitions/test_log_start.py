"""The start of one log on its way to disk: raised at once, told when it is safe, asked for again when it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from headrace.errors import HeadraceError, StorageFailed
from headrace.partitions.log_start import LogStart
from headrace.storage.log import Log, TopicPartition


class Held:
    """A log from 2 to 9 whose checkpoints are in the test's hand."""

    def __init__(self) -> None:
        self.topic_partition = TopicPartition("t", 0)
        self.start_offset = self.safe_start_offset = 2
        self.written_offset = 9
        self.offline: HeadraceError | None = None
        self.asked: list[tuple[int, Callable[[HeadraceError | None], None]]] = []
        self.fails: list[Exception] = []

    def delete_before(self, offset: int, done: Callable[[HeadraceError | None], None]) -> None:
        if self.fails:
            error = self.fails.pop(0)
            if isinstance(error, OSError):
                self.start_offset = offset
            raise error
        self.start_offset = offset
        self.asked.append((offset, done))

    def checkpointed(self, error: HeadraceError | None = None) -> None:
        offset, done = self.asked.pop(0)
        if error is None:
            self.safe_start_offset = offset
        done(error)

    @property
    def offsets(self) -> list[int]:
        return [offset for offset, _ in self.asked]


def begun() -> tuple[Held, LogStart, list[HeadraceError | None]]:
    held = Held()
    told: list[HeadraceError | None] = []
    return held, LogStart(cast("Log", held), told.append), told


def test_a_start_is_asked_for_once_and_told_when_it_is_safe() -> None:
    held, start, told = begun()
    start.raise_to(5)
    start.raise_to(5)
    start.raise_to(4)
    assert (held.start_offset, held.offsets, told) == (5, [5], [])
    held.checkpointed()
    assert told == [None]
    start.raise_to(5)
    assert held.offsets == []
    start.raise_to(6)
    assert held.offsets == [6]


def test_a_start_is_never_lowered_nor_raised_above_what_is_written() -> None:
    held, start, _ = begun()
    start.raise_to(1)
    start.raise_to(2)
    assert held.offsets == []
    start.raise_to(20)
    assert held.offsets == [9]


def test_a_start_that_lies_above_what_is_safe_is_made_safe_though_nothing_is_to_be_deleted() -> None:
    held, start, _ = begun()
    held.start_offset = 4
    start.raise_to(0)
    assert held.offsets == [4]


def test_a_log_that_is_offline_is_left_alone() -> None:
    held, start, told = begun()
    held.offline = StorageFailed("broken")
    start.raise_to(5)
    assert (held.start_offset, held.offsets, told) == (2, [], [])


def test_an_older_checkpoint_does_not_end_the_wait_for_a_newer_one() -> None:
    held, start, told = begun()
    start.raise_to(4)
    start.raise_to(6)
    held.checkpointed()
    start.raise_to(6)
    assert (held.offsets, told) == ([6], [None])
    held.checkpointed()
    assert told == [None, None]


def test_a_start_that_could_not_be_made_safe_is_told_and_asked_for_again() -> None:
    held, start, told = begun()
    start.raise_to(5)
    error = StorageFailed("no room for a checkpoint")
    held.checkpointed(error)
    assert (told, held.offsets) == ([error], [5])
    held.checkpointed()
    assert (told, held.offsets, held.safe_start_offset) == ([error, None], [], 5)


def test_files_that_cannot_be_removed_do_not_hold_up_the_start() -> None:
    held, start, told = begun()
    held.fails = [OSError("a folder that cannot be written")]
    start.raise_to(5)
    assert (held.start_offset, held.offsets, told) == (5, [5], [])


@pytest.mark.parametrize("error", [StorageFailed("offline by now"), OSError("broken")])
def test_a_start_that_cannot_be_raised_is_told_and_can_be_asked_for_again(error: Exception) -> None:
    held, start, told = begun()
    held.fails = [error, error]
    start.raise_to(5)
    assert (held.offsets, [str(each) for each in told]) == ([], [str(error)])
    assert isinstance(told[0], StorageFailed)
    held.fails = []
    start.raise_to(5)
    assert held.offsets == [5]
