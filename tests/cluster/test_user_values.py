"""Cluster-wide settings in the image, and plans of their changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.cluster import keys
from headrace.cluster.image import Image, StoredValue, apply
from headrace.cluster.user_values import NAME_MAX, VALUES_MAX, check_name, find, plan_delete, plan_put
from headrace.errors import ChangedMeanwhile, CoordinationError, InvalidRequest, PolicyViolation, UnknownValue
from headrace.placement.ring import Ring
from headrace.placement.spread import Site
from headrace.ports.coordination import Compare, Delete, Event, Put, WatchResponse
from proving import proves

PREFIX = "/headrace/c/"
KEY = PREFIX + "values/a"


def put(image: Image, name: str, value: bytes, revision: int) -> Image:
    event = Event("put", keys.value_key(PREFIX, name), value, revision)
    return apply(image, WatchResponse(revision, (event,)))


@proves("R1")
def test_values_are_folded_into_the_image_with_their_revisions() -> None:
    first = put(Image(PREFIX), "a", b'{"value":"1"}', 7)
    second = put(first, "b", b'{"value":"2"}', 8)
    assert dict(second.values) == {"a": StoredValue("1", 7), "b": StoredValue("2", 8)}
    assert set(first.values) == {"a"}, "an image is replaced, not edited"
    gone = apply(second, WatchResponse(9, (Event("delete", KEY, b"", 9),)))
    assert set(gone.values) == {"b"}
    with pytest.raises(CoordinationError, match="values/a does not hold what it should"):
        put(first, "a", b'{"text":"1"}', 10)


@proves("R1")
def test_a_plan_compares_the_revision_that_it_was_made_on() -> None:
    image = put(Image(PREFIX), "a", b'{"value":"1"}', 7)
    (changed,) = plan_put(image, "a", "2").steps
    assert changed.compares == (Compare(KEY, "mod_revision", "=", 7),)
    assert changed.actions == (Put(KEY, b'{"value":"2"}'),)
    (made,) = plan_put(image, "b", "2", 0).steps
    assert made.compares[0].number == 0
    (removed,) = plan_delete(image, "a", 7).steps
    assert removed.actions == (Delete(KEY),)
    for expected in (0, 6, 8):
        with pytest.raises(ChangedMeanwhile, match="has revision 7"):
            plan_put(image, "a", "2", expected)
    with pytest.raises(ChangedMeanwhile, match="is not there"):
        plan_delete(image, "b", 7)
    with pytest.raises(UnknownValue):
        plan_delete(image, "b")
    with pytest.raises(UnknownValue):
        find(image, "b")


def test_names_and_their_number_are_bounded() -> None:
    check_name("Mail.limit_of-the_day" + "x" * (NAME_MAX - 21))
    for name in ("", "a/b", "ä", "a b", "x" * (NAME_MAX + 1)):
        with pytest.raises(InvalidRequest):
            check_name(name)
    full = replace(Image(PREFIX), values={str(n): StoredValue("", 1) for n in range(VALUES_MAX)})
    assert plan_put(full, "0", "again").steps
    with pytest.raises(PolicyViolation, match="delete some"):
        plan_put(full, "one more", "x")


def test_the_shares_of_a_ring_are_what_its_marks_say() -> None:
    ring = Ring([Site(1), Site(2), Site(3)])
    assert sum(ring.shares().values()) == pytest.approx(1)
    assert all(0.2 < share < 0.5 for share in ring.shares().values())
    assert [mark for mark, _ in ring.marks()] == sorted(mark for mark, _ in ring.marks())
    assert Ring([]).shares() == {}
