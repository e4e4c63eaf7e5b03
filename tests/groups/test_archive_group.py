"""The group whose offsets tell what is archived: they never expire, and none is left over for a new topic."""

from __future__ import annotations

from dataclasses import replace

from groups.scene import LIMITS, Scene
from headrace.errors import ErrorCode
from headrace.groups.limits import limits_from
from headrace.settings.values import load
from proving import proves

ARCHIVE = "the-archive"
NAMED = replace(LIMITS, archive_group=ARCHIVE)
LONG_SECONDS = 3 * LIMITS.retention_ms / 1000


def archived(scene: Scene, topic: str = "t", partition: int = 0) -> int | None:
    return scene.coordinator.committed_offset(ARCHIVE, topic, partition)


@proves("S4")
def test_offsets_of_the_archive_never_expire_also_when_a_client_set_an_end() -> None:
    scene = Scene(limits=NAMED)
    scene.commit({("t", 0): 5}, group_id=ARCHIVE)
    scene.commit({("t", 1): 6}, group_id=ARCHIVE, retention_ms=1000)
    scene.commit({("t", 0): 7}, group_id="other")
    scene.advance(LONG_SECONDS)
    assert (archived(scene), archived(scene, partition=1)) == (5, 6)
    assert scene.committed("other") == {}
    scene.take_over()
    assert archived(scene) == 5


def test_an_archive_that_was_renamed_expires_as_any_group() -> None:
    scene = Scene(limits=NAMED)
    scene.commit({("t", 0): 5}, group_id=ARCHIVE)
    scene.coordinator.limits = replace(NAMED, archive_group="another")
    scene.advance(LONG_SECONDS)
    assert archived(scene) is None


@proves("S4")
def test_nothing_counts_as_archived_before_the_log_was_replayed_whole() -> None:
    scene = Scene(limits=NAMED)
    scene.commit({("t", 0): 5}, group_id=ARCHIVE)
    coordinator = scene.coordinator
    coordinator.resign(0)
    assert archived(scene) is None
    loading = coordinator.lead(0, 0)
    loading.replay(scene.log[0])
    assert archived(scene) is None
    loading.ready()
    assert archived(scene) == 5


@proves("S4")
def test_a_commit_counts_once_it_is_stored_and_one_that_goes_back_counts_too() -> None:
    scene = Scene(limits=NAMED, held=True)
    scene.commit({("t", 0): 5}, group_id=ARCHIVE)
    assert archived(scene) is None
    scene.acknowledge()
    scene.commit({("t", 0): 2}, group_id=ARCHIVE)
    assert archived(scene) == 5
    scene.acknowledge()
    assert archived(scene) == 2
    scene.commit({("t", 0): 9}, group_id=ARCHIVE)
    scene.acknowledge(ErrorCode.REQUEST_TIMED_OUT)
    assert archived(scene) == 2


def test_a_group_that_was_deleted_has_archived_nothing() -> None:
    scene = Scene(limits=NAMED)
    scene.commit({("t", 0): 5}, group_id=ARCHIVE)
    scene.coordinator.delete(ARCHIVE, lambda _: None)
    assert archived(scene) is None


@proves("S4")
def test_what_was_archived_of_a_topic_says_nothing_of_a_new_one_of_that_name() -> None:
    scene = Scene(limits=NAMED)
    scene.commit({("gone", 0): 5, ("kept", 0): 6}, group_id=ARCHIVE)
    scene.topics["gone"] = None
    assert archived(scene, "gone") is None
    scene.topics["gone"] = b"made anew......."
    scene.take_over()
    assert (archived(scene, "gone"), archived(scene, "kept")) == (None, 6)
    assert scene.committed(ARCHIVE) == {("kept", 0): 6}


def test_the_name_of_the_group_is_a_setting() -> None:
    assert limits_from(load(environment={"HEADRACE_ARCHIVE_GROUP": "mine"})).archive_group == "mine"
