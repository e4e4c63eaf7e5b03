"""What may be answered of a value that is set again and again: calls that overlap may be seen in either order."""

from __future__ import annotations

from headrace.simulator.registers import Register


def test_before_anything_is_known_everything_may_be_answered() -> None:
    register = Register()
    register.begin(1)
    assert register.fault(register.ask(), None, 1) == ""


def test_a_write_under_way_may_be_seen_or_not() -> None:
    register = Register()
    old, new = register.begin(1), register.begin(2)
    register.acknowledged(old, 1)
    assert register.fault(register.ask(), old, 1) == ""
    assert register.fault(register.ask(), new, 1) == ""


def test_what_was_seen_once_is_not_taken_back() -> None:
    register = Register()
    old = register.begin(1)
    register.acknowledged(old, 1)
    new = register.begin(2)
    assert register.fault(register.ask(), new, 1) == ""
    assert "1, though a later" in register.fault(register.ask(), old, 1)


def test_writes_that_overlap_may_end_in_either_order() -> None:
    register = Register()
    one, other = register.begin(1), register.begin(2)
    register.acknowledged(other, 1)
    register.acknowledged(one, 1)
    assert register.fault(register.ask(), one, 1) == ""
    assert register.fault(register.ask(), other, 1) == ""


def test_a_question_asked_before_an_acknowledgement_need_not_see_it() -> None:
    register = Register()
    old = register.begin(1)
    register.acknowledged(old, 1)
    asked = register.ask()
    new = register.begin(2)
    register.acknowledged(new, 1)
    assert register.fault(asked, old, 1) == ""
    assert register.fault(register.ask(), old, 1) != ""


def test_an_earlier_epoch_need_not_know_of_a_later_one() -> None:
    register = Register()
    old = register.begin(1)
    register.acknowledged(old, 1)
    new = register.begin(2)
    register.acknowledged(new, 2)
    assert register.fault(register.ask(), old, 1) == ""
    assert register.fault(register.ask(), old, 2) != ""
    assert register.fault(register.ask(), None, 3) != ""


def test_the_last_is_the_one_that_began_last_of_those_that_are_known() -> None:
    register = Register()
    one, other, unknown = register.begin(1), register.begin(2), register.begin(3)
    register.acknowledged(other, 1)
    register.acknowledged(one, 1)
    assert register.last is register.writes[other]
    assert register.fault(register.ask(), unknown, 1) == ""
    assert register.last is register.writes[unknown]
