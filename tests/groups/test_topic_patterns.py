from __future__ import annotations

import random
import re
import string
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cluster.image import Image, PartitionState, Topic
from headrace.errors import ErrorCode, InvalidPattern
from headrace.groups import topic_patterns
from headrace.groups.topic_catalog import TopicCatalog
from headrace.groups.topic_patterns import TopicPattern
from hypotheses import examples
from proving import proves


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("orders", ["orders"], ["orders2", "order", "Orders"]),
        ("orders.*", ["orders", "orders-2"], ["my-orders"]),
        (r"orders\.(eu|us)", ["orders.eu", "orders.us"], ["orders-eu", "orders.eus"]),
        ("^t[0-9]{2,3}$", ["t12", "t123"], ["t1", "t1234"]),
        ("a{2}b?", ["aa", "aab"], ["a", "aabb"]),
        ("(?i)abc", ["ABC", "abc"], ["abd"]),
        ("(?i:a)b", ["Ab", "ab"], ["aB"]),
        (r"\w+-\d+", ["a_b-1"], ["a.b-1", "a-b"]),
        (r"[^a-c.]+", ["xyz", "-_"], ["xa", "x.y"]),
        (r"[[:alpha:]]+[]x-]", ["abx", "ab-"], ["1x"]),
        (r"\Qa.b\E.*", ["a.b", "a.bc"], ["axb"]),
        (r"\p{Lu}\pL*", ["Abc"], ["abc"]),
        (r".*\bfoo\b.*", ["a.foo-b", "foo"], ["afoo"]),
        (r"\x61\x{62}\s*", ["ab"], ["abc"]),
        ("(?P<one>a)|(?:b)|", ["a", "b"], ["c"]),
        ("", [], ["a"]),
        ("a{,2}", [], ["a"]),
    ],
)
def test_a_pattern_describes_whole_names(pattern: str, matching: list[str], others: list[str]) -> None:
    compiled = TopicPattern(pattern)
    assert [name for name in matching + others if compiled.matches(name)] == matching


@pytest.mark.parametrize(
    "pattern",
    ["(", ")", "a**", "*", "[a", r"\1", "(?=a)", "(?!a)", "(?<=a)b", "(?>a)", r"\Z", r"\C", "[z-a]", "a{1001}",
     "[[:no:]]", r"\p{Greek}", "\\", "(?P<a", "x" * 4097, "(((a{100}){100}){100})", "(" * 200 + ")" * 200, 
     r"\x{110000}", "(" * 60 + "){1000}" * 60],
)  # fmt: skip
def test_what_is_no_expression_or_cannot_be_had_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidPattern) as refused:
        TopicPattern(pattern)
    assert refused.value.kafka_code == ErrorCode.INVALID_REGULAR_EXPRESSION


@proves("N1")
@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|a)*b", "(.*a){20}", "a?" * 50 + "a" * 50, "(a*)*(a*)*b"])
def test_no_pattern_takes_long(pattern: str) -> None:
    began = time.process_time()
    TopicPattern(pattern).matches("a" * 240)
    assert time.process_time() - began < 2.0


def test_states_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_patterns, "KEPT_MAX", 3)
    pattern = TopicPattern("(a|b)*a(a|b){3}")
    assert [pattern.matches(f"{n:08b}".replace("0", "a").replace("1", "b")) for n in range(256)] == [
        not n & 8 for n in range(256)
    ]
    assert len(pattern._kept) <= 3


ATOMS = st.sampled_from(["a", "b", "-", ".", "[ab]", "[^a]", r"\w", r"\d", r"\.", "^", "$", r"\b"])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{0,}", "*?"])).map(
            lambda p: f"(?:{p[0]}){p[1]}"
        ),
    ),
    max_leaves=8,
)


@examples(100)
@given(PATTERNS, st.lists(st.text("ab-._1", max_size=6), max_size=10))
def test_it_says_what_pythons_expressions_say(pattern: str, names: list[str]) -> None:
    ours, theirs = TopicPattern(pattern), re.compile(pattern)
    for name in names:
        assert ours.matches(name) == (theirs.fullmatch(name) is not None), name


def catalog_of(names: list[str]) -> TopicCatalog:
    topics = {
        name: Topic(name, number.to_bytes(16, "big"), (PartitionState(0, 1, 1, (1,), (1,)),))
        for number, name in enumerate(names)
    }
    catalog = TopicCatalog()
    catalog.follow(Image(""), Image("", topics=topics))
    return catalog


@proves("N1")
def test_a_pattern_that_remembers_much_of_each_name_is_refused_before_it_holds_up_the_loop() -> None:
    letters = random.Random(7)
    names = ["".join(letters.choices(string.ascii_lowercase, k=40)) for _ in range(2000)]
    catalog = catalog_of(names)
    bomb = "|".join(f".*[{''.join(letters.sample(string.ascii_lowercase, 8))}].{{38}}" for _ in range(80))
    with pytest.raises(InvalidPattern, match="takes too long"):
        catalog.matching(bomb)
    assert catalog.matching(".*") == frozenset(names)
    literal = "|".join(names[:90])
    assert catalog.matching(literal) == frozenset(names[:90])
    assert catalog.matching(".*(abc|xyz)[^q]*") <= frozenset(names)


def test_who_has_many_names_hears_when_a_pattern_has_cost_too_much() -> None:
    """So ListTransactions asks it of transactional ids."""
    letters = random.Random(7)
    bomb = "|".join(f".*[{''.join(letters.sample(string.ascii_lowercase, 8))}].{{38}}" for _ in range(80))
    pattern = TopicPattern(bomb)
    names = ["".join(letters.choices(string.ascii_lowercase, k=40)) for _ in range(2000)]
    with pytest.raises(InvalidPattern, match="takes too long"):
        list(map(pattern.matches_in_time, names))
