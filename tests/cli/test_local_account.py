"""The account of a partition: every way in which what is read can differ from what was acknowledged."""

from __future__ import annotations

import pytest

from headrace.cli.local.account import Account, Totals


def account_of(sent: int, acknowledged: int, read: list[tuple[int, int]]) -> Account:
    account = Account()
    account.sent = sent
    account.was_acknowledged(0, acknowledged, 0)
    for offset, number in read:
        account.was_read(offset, number)
    return account


def in_order(count: int) -> list[tuple[int, int]]:
    return [(n, n) for n in range(count)]


def test_what_was_sent_and_read_once_is_whole() -> None:
    account = account_of(5, 4, in_order(5))
    assert account.totals(final=True) == Totals(5, 4, 5)
    assert account.totals(final=True).is_whole
    assert account.all_read


@pytest.mark.parametrize(
    ("read", "told"),
    [
        ([(0, 0), (1, 1), (2, 3), (3, 4)], {"lost": 1}),
        ([(0, 0), (1, 1), (2, 1), (3, 2), (4, 3), (5, 4)], {"duplicated": 1}),
        ([(0, 0), (1, 2), (2, 1), (3, 3), (4, 4)], {"reordered": 1}),
        ([(n + 1, n) for n in range(5)], {"misplaced": 5}),
    ],
)
def test_every_difference_is_told(read: list[tuple[int, int]], told: dict[str, int]) -> None:
    totals = account_of(5, 5, read).totals(final=True)
    found = {name: getattr(totals, name) for name in ("lost", "duplicated", "reordered", "misplaced")}
    assert {name: count for name, count in found.items() if count} == told
    assert not totals.is_whole


def test_what_was_acknowledged_and_never_read_is_lost_at_the_end_alone() -> None:
    account = account_of(5, 5, in_order(3))
    assert account.totals().lost == 0
    assert account.totals(final=True).lost == 2
    assert not account.all_read


def test_an_acknowledgement_at_another_offset_is_told() -> None:
    account = Account()
    account.was_acknowledged(0, 3, 0)
    account.was_acknowledged(3, 2, None)
    account.was_acknowledged(5, 4, 6)
    assert account.totals().misplaced == 4


def test_totals_add_up() -> None:
    assert Totals(1, 1, 1, 0, 1) + Totals(2, 1, 0, 1) == Totals(3, 2, 1, 1, 1)
