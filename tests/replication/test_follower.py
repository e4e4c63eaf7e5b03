"""What a follower decides, one decision at a time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from headrace.errors import CorruptBatch
from headrace.partitions.log_start import LogStart
from headrace.replication.follower import MEND_AGAIN_SECONDS, RETRY_MAX_SECONDS, RETRY_SECONDS, FollowedPartition, Stage
from headrace.replication.frames import Subscribe, Truncate
from replication.peer import at
from replication.scene import Broker, Scene

LAYOUTS = pytest.mark.parametrize("layout", ["partitioned", "shared"])
EPOCHS = ((4, 1), (5, 1), (6, 3), (7, 3), (8, 5))


def following(
    layout: str = "", held: Sequence[tuple[int, int]] = EPOCHS, **topic: object
) -> tuple[Broker, FollowedPartition]:
    """A follower in epoch 6 with these batches, each an offset and an epoch; its log begins at 4."""
    broker = Scene(brokers=(1,), layout=layout, topic=topic).alive[1]
    log = broker.log()
    log.restart_at(4)
    for offset, epoch in held:
        log.append_copied(memoryview(at(offset, epoch)))
        broker.store.write_staged()
    partition = broker.partitions.follow(log, 6, 9)
    return broker, FollowedPartition(partition, LogStart(log, lambda _: None))


def stage(each: FollowedPartition) -> Stage:
    return each.stage


def mended_from(each: FollowedPartition) -> int | None:
    return each.mend_from


@LAYOUTS
@pytest.mark.parametrize(
    ("mend_from", "last_epoch", "end"),
    [(None, 5, 9), (8, 3, 8), (7, 3, 7), (6, 1, 6), (5, 1, 5), (4, -1, 4), (2, -1, 4), (20, 5, 9)],
)
def test_it_asks_by_its_end_and_the_epoch_of_what_lies_before_it(
    layout: str, mend_from: int | None, last_epoch: int, end: int
) -> None:
    _, each = following(layout)
    assert each.position() is None
    each.stage, each.mend_from = Stage.COPYING, mend_from
    assert each.position() is not None
    assert each.ask(7) == Subscribe(7, bytes(16), 0, 6, last_epoch, end, 9)
    assert (stage(each), each.subscription, each.asked_end) == (Stage.ASKING, 7, end)
    each.stage = Stage.COPYING
    assert each.position() is not None, "nothing was told in this subscription"


@LAYOUTS
def test_who_holds_nothing_tells_no_epoch(layout: str) -> None:
    """It has nothing that could differ, so there is nothing that it could cut."""
    broker, each = following(layout)
    broker.log().delete_before(9)
    assert broker.log().epoch_starts()
    assert each.ask(7) == Subscribe(7, bytes(16), 0, 6, -1, 9, 9)


def test_it_asks_again_ever_later_until_it_is_served() -> None:
    _, each = following()
    waited: list[float] = []
    for _ in range(7):
        each.ask(7)
        each.wait(100.0)
        assert (stage(each), each.subscription) == (Stage.WAITING, 0)
        waited.append(each.retry_at - 100.0)
    doubled = [RETRY_SECONDS * 2**nth for nth in range(7)]
    assert waited == pytest.approx([min(pause, RETRY_MAX_SECONDS) for pause in doubled])
    each.failed_at = 9
    each.ask(8)
    assert each.begin(9)
    assert each.pause == RETRY_MAX_SECONDS  # what could not be taken then comes again
    each.failed_at = 8
    each.ask(9)
    assert each.begin(9)
    assert each.pause == RETRY_SECONDS


def test_it_copies_only_where_its_log_ends() -> None:
    _, each = following()
    each.ask(7)
    assert not each.begin(8)
    assert stage(each) is Stage.ASKING
    assert each.begin(9)
    assert stage(each) is Stage.COPYING


@LAYOUTS
def test_damage_is_cut_only_where_it_was_asked_for(layout: str) -> None:
    broker, each = following(layout)
    each.partition.found_damage(7)
    each.partition.high_watermark, each.mend_from = 9, 7
    each.ask(7)
    assert not each.begin(6)
    assert (broker.log().end_offset, mended_from(each)) == (9, 7)
    assert broker.partitions.damaged
    assert each.begin(7)
    assert (broker.log().end_offset, mended_from(each)) == (7, None)
    assert each.partition.high_watermark == 7, "a position that the log does not reach"
    assert not broker.partitions.damaged


def test_damage_that_cannot_be_cut_is_cut_lower_and_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    broker, each = following()
    log = broker.log()
    truncate = type(log).truncate

    def cut(held: object, offset: int) -> None:
        raise CorruptBatch(f"not at {offset}")

    monkeypatch.setattr(type(log), "truncate", cut)
    each.mend_from = 9
    for lower in (8, 6, 4, 4):
        end = each.ask(7).end
        assert not each.begin(end) or end == 9
        assert (log.end_offset, mended_from(each)) == (9, lower)
    monkeypatch.setattr(type(log), "truncate", truncate)
    each.ask(7)
    assert each.begin(4)
    assert (log.end_offset, mended_from(each)) == (4, None)
    # The next damage is cut close to where it is.
    for offset, epoch in EPOCHS:
        log.append_copied(memoryview(at(offset, epoch)))
    broker.store.write_staged()
    monkeypatch.setattr(type(log), "truncate", cut)
    each.mend_from = 8
    each.ask(7)
    assert not each.begin(8)
    assert mended_from(each) == 7


def test_mending_that_the_leader_cannot_help_with_waits() -> None:
    _, each = following()
    each.mend_from = 7
    each.put_off_mending(100.0)
    assert (mended_from(each), each.mend_after) == (None, 100.0 + MEND_AGAIN_SECONDS)


@LAYOUTS
@pytest.mark.parametrize(
    ("epoch", "end", "cut_to"),
    [
        (5, 9, None), (5, 12, None), (5, 8, 8),  # the same epoch: whoever has less of it
        (3, 8, 8), (3, 7, 7), (3, 9, 8),
        (2, 7, 6), (2, 5, 5), (1, 6, 6), (1, 9, 6),
        (0, 9, 4), (0, 4, 4),  # nothing of ours is known there
    ],
)  # fmt: skip
def test_it_cuts_to_the_lower_end_of_the_greatest_common_epoch(
    layout: str, epoch: int, end: int, cut_to: int | None
) -> None:
    broker, each = following(layout)
    each.partition.high_watermark = 9
    assert each.cut(Truncate(7, 6, epoch, end)) == (cut_to is not None)
    assert broker.log().end_offset == (9 if cut_to is None else cut_to)
    assert each.partition.high_watermark == broker.log().end_offset


@LAYOUTS
def test_it_begins_anew_where_the_leader_can_go_on(layout: str) -> None:
    broker, each = following(layout)
    each.partition.high_watermark = 8
    assert each.reset(6)
    log = broker.log()
    assert (log.start_offset, log.end_offset, list(log.epoch_starts())) == (6, 6, [])
    assert each.partition.high_watermark == 6


@pytest.mark.parametrize(
    ("watermark", "anew", "said"),
    [
        (
            9,
            False,
            [
                "offsets 8 to 8 were committed once",
            ],
        ),
        (8, False, ["cut from offset 9 to 8"]),
        (8, True, ["the leader begins at offset 6 and cannot continue ours, 4 to 8", "offsets 6 to 7 were committed"]),
        (6, True, ["the leader begins at offset 6 and cannot continue ours, 4 to 8", "cut from offset 9 to 6"]),
    ],
)
def test_it_says_what_was_lost_and_calls_nothing_lost_that_was_not_committed(
    watermark: int, anew: bool, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    _, each = following()
    each.partition.high_watermark = watermark
    caplog.set_level("INFO", "headrace.replication.follower")
    if anew:
        each.reset(6)
    else:
        each.cut(Truncate(7, 6, 5, 8))
    assert len(caplog.messages) == len(said)
    assert all(part in line for part, line in zip(said, caplog.messages, strict=True))


def test_a_log_that_begins_anew_behind_its_end_was_not_cut(caplog: pytest.LogCaptureFixture) -> None:
    _, each = following()
    caplog.set_level("INFO", "headrace.replication.follower")
    each.reset(9)
    assert len(caplog.messages) == 1


def test_nothing_goes_that_is_not_known_to_be_committed() -> None:
    _, each = following()
    each.leader_start, each.partition.high_watermark = 7, 6
    assert each.wanted_start() == 6
    each.partition.high_watermark = 8
    assert each.wanted_start() == 7


def test_it_tells_its_position_once_and_only_while_it_copies() -> None:
    broker, each = following()
    log = broker.log()
    each.ask(7)
    assert each.position() is None
    assert each.begin(9)
    assert each.position() == (7, 6, 9, log.written_offset, log.durable_offset, log.safe_start_offset)
    assert each.position() is None
    log.append_copied(memoryview(at(9, 6)))
    broker.store.write_staged()
    told = each.position()
    assert told is not None
    assert told[2:4] == (10, 10)
    each.stage = Stage.WAITING
    each.told = None
    assert each.position() is None


@pytest.mark.parametrize(
    ("durability", "point", "waits"),
    [
        ("disk", "auto", True),
        ("disk", "flushed", True),
        ("disk", "written", False),
        ("os", "auto", False),
        ("os", "flushed", False),
    ],
)
def test_only_a_position_that_counts_when_it_is_flushed_waits_for_that(
    durability: str, point: str, waits: bool
) -> None:
    broker, each = following("", EPOCHS[:2], durability=durability, replication_point=point)
    each.ask(7)
    assert each.begin(6)
    assert not each.may_wait()  # the leader knows nothing yet
    assert each.position() is not None
    log = broker.log()
    log.append_copied(memoryview(at(6, 6)))
    broker.store.write_staged()
    assert each.may_wait() == waits
    before = log.durable_offset, log.safe_start_offset
    log.durable_offset = before[0] + 1
    assert not each.may_wait()
    log.durable_offset = before[0]
    assert each.may_wait() == waits
    log.safe_start_offset = before[1] - 1
    assert not each.may_wait()
