"""When offsets are no longer kept, to the millisecond; each group is as a coordinator had it."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from groups.scene import GROUP, TOPIC_ID, Scene
from headrace.groups.messages import Leaver
from headrace.groups.offsets import expired
from headrace.groups.records import OffsetAndMetadata, OffsetKey

RETENTION_MS = 1000
PLACE = ("t", 0)
KEY = OffsetKey(GROUP, *PLACE)
COMMITTED = OffsetAndMetadata(5, 0, "", 0, topic_id=TOPIC_ID)
OTHER = struct.pack(">hih", 0, 1, 1) + b"u"
"""The metadata of a consumer that subscribes to another topic."""


def at(scene: Scene, committed: OffsetAndMetadata, age_ms: int) -> list[OffsetKey]:
    """What has expired at this age."""
    now_ms = scene.clock.wall_ms()
    known = {PLACE: replace(committed, commit_ms=now_ms - age_ms)}
    return expired(scene.group(), known, now_ms, RETENTION_MS, scene.topic_id)


def empty() -> Scene:
    """A group that never had members."""
    scene = Scene()
    scene.commit({PLACE: 1})
    return scene


def formed(kind: str, metadata: bytes) -> Scene:
    scene = Scene()
    joined = scene.join(kind=kind, protocols=(("range", metadata),)).reply
    scene.sync(joined, {joined.member_id: b"a"})
    return scene


@pytest.mark.parametrize("scene", [empty(), formed("consumer", OTHER)])
def test_what_nobody_uses_is_kept_for_its_time_and_no_longer(scene: Scene) -> None:
    assert at(scene, COMMITTED, RETENTION_MS - 1) == []
    assert at(scene, COMMITTED, RETENTION_MS) == [KEY]


@pytest.mark.parametrize("kind", ["consumer", "connect"])
def test_what_a_member_may_use_does_not_expire(kind: str) -> None:
    metadata = OTHER.replace(b"u", b"t") if kind == "consumer" else OTHER
    assert at(formed(kind, metadata), COMMITTED, 9 * RETENTION_MS) == []
    assert at(formed(kind, b"none of ours"), COMMITTED, 9 * RETENTION_MS) == []


def test_what_was_committed_to_an_earlier_topic_expires_by_its_commit_in_any_group() -> None:
    scene = formed("consumer", OTHER.replace(b"u", b"t"))
    earlier = replace(COMMITTED, topic_id=b"of another topic")
    assert at(scene, earlier, RETENTION_MS - 1) == []
    assert at(scene, earlier, RETENTION_MS) == [KEY]
    assert at(scene, replace(COMMITTED, topic_id=None), 9 * RETENTION_MS) == [], "nobody knows of which topic"


def test_an_end_that_a_client_set_holds_whatever_the_retention() -> None:
    scene = empty()
    now_ms = scene.clock.wall_ms()
    assert at(scene, replace(COMMITTED, expiry_ms=now_ms + 1), 9 * RETENTION_MS) == []
    assert at(scene, replace(COMMITTED, expiry_ms=now_ms), 0) == [KEY]


def test_a_group_that_had_members_keeps_offsets_from_when_it_became_empty() -> None:
    scene = Scene()
    (member,) = scene.stable(1)
    scene.coordinator.leave(GROUP, [Leaver(member.member_id)])
    scene.advance((RETENTION_MS - 1) / 1000)
    assert at(scene, COMMITTED, 9 * RETENTION_MS) == []
    scene.advance(0.001)
    assert at(scene, COMMITTED, 0) == [KEY]
