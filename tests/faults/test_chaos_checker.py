"""The checker of the chaos runs finds what it is there to find."""

from __future__ import annotations

from array import array

import pytest

from faults.chaos_load import Failures, Seen, code_of, differences


def log(*values: str) -> array[int]:
    return array("q", [code_of(value.encode()) for value in values])


def test_what_was_acknowledged_is_there() -> None:
    offsets = [array("q", [0, 2, 3]), array("q", [1])]
    assert list(differences(log("0-0", "1-0", "0-1", "0-2", "1-1"), offsets)) == []


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (log("0-0", "0-1"), "the last 1 acknowledged"),
        (log("0-0", "0-2"), "are lost"),
        (log("0-0", "0-1", "0-1", "0-2"), "twice"),
        (log("0-0", "0-2", "0-1"), "out of order"),
        (log("1-0", "0-0", "0-1", "0-2"), "was acknowledged at 0 and is at 1"),
    ],
)
def test_every_difference_is_told(found: array[int], told: str) -> None:
    assert any(told in difference for difference in differences(found, [array("q", [0, 1, 2]), array("q")]))


def test_a_record_that_changes_after_it_was_read_is_told() -> None:
    failures = Failures()
    seen = Seen(1, failures)
    seen.add(0, 3, code_of(b"0-3"))
    seen.add(0, 3, code_of(b"0-3"))
    assert (failures.count, seen.again) == (0, 1)
    seen.add(0, 3, code_of(b"1-0"))
    assert failures.found == ["offset 0:3 was 0-3, then 1-0"]
