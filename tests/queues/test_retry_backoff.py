"""Records that were given back, and wait before they are delivered again."""

from __future__ import annotations

import pytest

from headrace.errors import ErrorCode, SettingError
from headrace.groups.limits import ShareLimits
from headrace.queues.messages import DeliveryState
from headrace.queues.retry_backoff import backoff_table
from headrace.settings.values import GROUP_BY_NAME
from headrace.storage.folder import PARTITIONED, SHARED
from proving import proves
from queues.scene import RELEASE, Scene

SETTING = GROUP_BY_NAME["share.retry.backoff.ms"]


@pytest.fixture(params=[PARTITIONED, SHARED])
def scene(request: pytest.FixtureRequest) -> Scene:
    return Scene(request.param, retry_backoff_ms=(10_000, 60_000), delivery_count_limit=4)


@proves("R10")
def test_a_released_record_comes_again_when_it_has_waited_by_its_deliveries(scene: Scene) -> None:
    partition = scene.lead(records=2)
    scene.fetch(partition)
    scene.acknowledge(partition, 0, 0, RELEASE)
    assert scene.acknowledge(partition, 1, 1).code == ErrorCode.NONE
    for count, wait_s in ((2, 10), (3, 60), (4, 60)):
        waiting = scene.fetch(partition, member="b")
        scene.clock.advance(wait_s - 0.01)
        assert not waiting.replies
        scene.clock.advance(0.01)
        assert waiting.ranges(partition) == [(0, 0, count)]
        scene.acknowledge(partition, 0, 0, RELEASE, member="b")
    assert scene.kept(partition).start == 2, "it was delivered as often as may be"


@proves("R10")
def test_a_record_whose_lock_has_expired_waits_too(scene: Scene) -> None:
    partition = scene.lead(records=1)
    scene.fetch(partition)
    waiting = scene.fetch(partition, member="b")
    scene.clock.advance(30)
    assert scene.kept(partition).offsets[0].state == DeliveryState.AVAILABLE
    scene.clock.advance(9.99)
    assert not waiting.replies
    scene.clock.advance(0.01)
    assert waiting.ranges(partition) == [(0, 0, 2)]


def test_what_a_member_had_at_the_end_of_its_session_does_not_wait(scene: Scene) -> None:
    partition = scene.lead(records=1)
    scene.fetch(partition)
    scene.shares.release("workers", "a")
    assert scene.fetch(partition, member="b").ranges(partition) == [(0, 0, 1)]


@proves("R10")
def test_a_wait_goes_on_at_the_next_leader(scene: Scene) -> None:
    partition = scene.lead(records=1)
    scene.fetch(partition)
    scene.acknowledge(partition, 0, 0, RELEASE)
    scene.clock.advance(4)
    partition = scene.lead_again(partition)
    scene.shares.follow()
    waiting = scene.fetch(partition, member="b")
    scene.clock.advance(5.99)
    assert not waiting.replies
    scene.clock.advance(0.02)
    assert waiting.ranges(partition) == [(0, 0, 2)]


def test_a_wait_that_was_kept_by_a_wrong_clock_ends_all_the_same(scene: Scene) -> None:
    partition = scene.lead(records=1)
    scene.fetch(partition)
    scene.acknowledge(partition, 0, 0, RELEASE)
    kept = scene.kept(partition).offsets
    kept[0] = type(kept[0])(DeliveryState.AVAILABLE, 1, until_ms=1 << 60)
    partition = scene.lead_again(partition)
    scene.shares.follow()
    waiting = scene.fetch(partition, member="b")
    scene.clock.advance(61)
    assert waiting.ranges(partition) == [(0, 0, 2)]


def test_records_that_wait_hold_up_no_others_until_there_are_too_many() -> None:
    scene = Scene(retry_backoff_ms=(3_600_000,), record_locks_max=10)
    partition = scene.lead()
    for _ in range(20):
        scene.produce(partition, 5)
    for _ in range(9):
        ((first, last, _),) = scene.fetch(partition, most=5).ranges(partition)
        scene.acknowledge(partition, first, first, RELEASE)
        assert scene.acknowledge(partition, first + 1, last).code == ErrorCode.NONE
    scene.fetch(partition, most=5)
    assert not scene.fetch(partition, member="b", most=5).replies


def test_a_group_has_no_table_its_own_or_that_of_rocketmq() -> None:
    limits = ShareLimits()
    assert limits.config({}).backoff_ms(3) == 0
    assert limits.config({"share.retry.backoff.ms": "100, 2000"}).retry_backoff_ms == (100, 2000)
    table = backoff_table("rocketmq")
    assert (len(table), table[0], table[-1], sum(table)) == (16, 10_000, 7_200_000, 17_140_000)


@pytest.mark.parametrize("given", ["", "rocketmq", "0", "1,2,3", "10 , 20"])
def test_tables_that_can_be(given: str) -> None:
    assert SETTING.parse(given) == given
    backoff_table(given)


@pytest.mark.parametrize("given", ["soon", "1,", "1;2", "-1", "99999999999", ",".join(["1"] * 101)])
def test_tables_that_cannot_be_are_refused(given: str) -> None:
    with pytest.raises(SettingError, match="rocketmq"):
        SETTING.parse(given)
