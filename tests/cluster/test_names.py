from __future__ import annotations

import pytest

from headrace.cluster.names import (
    check_no_collision,
    check_not_reserved,
    group_name_fault,
    is_reserved,
)
from headrace.errors import InvalidTopicName
from headrace.settings.topic_name import check_topic_name
from proving import proves


@proves("R15")
@pytest.mark.parametrize("name", ["a", "A.b_c-9", "x" * 249, "...", "__mine"])
def test_names_that_follow_the_rule_are_taken(name: str) -> None:
    check_topic_name(name)


@proves("R15")
@pytest.mark.parametrize("name", ["", ".", "..", "x" * 250, "a b", "a/b", "é", "a\n", "a\x00", "٣"])
def test_names_against_the_rule_are_refused_with_the_rule(name: str) -> None:
    with pytest.raises(InvalidTopicName, match="a-z A-Z 0-9"):
        check_topic_name(name)


@proves("R15")
@pytest.mark.parametrize("name", ["__consumer_offsets", "__transaction_state", "__headrace", "__headrace_delay"])
def test_reserved_names_are_refused_to_users(name: str) -> None:
    assert is_reserved(name)
    with pytest.raises(InvalidTopicName, match="reserved"):
        check_not_reserved(name)


@proves("R15")
def test_names_that_differ_only_in_dot_and_underscore_collide() -> None:
    with pytest.raises(InvalidTopicName, match=r"a\.b_c"):
        check_no_collision("a_b.c", ["other", "a.b_c"])
    check_no_collision("a_b", ["a_b", "a-b"])


@proves("R15")
@pytest.mark.parametrize("name", ["", "x" * 256, "a\tb", "__headrace-x"])
def test_group_names_against_the_rule_are_told_the_rule(name: str) -> None:
    assert "printable" in (group_name_fault(name) or "")


@proves("R15")
@pytest.mark.parametrize("name", ["g", "группа", "a b", "x" * 255])
def test_group_names_are_otherwise_free(name: str) -> None:
    assert group_name_fault(name) is None
