"""Delayed records of one partition on virtual time: when they come, what keeps them, and what is told of them."""

from __future__ import annotations

import errno

import pytest

from chosen_layout import log_path
from headrace.errors import CoordinatorLoading, HeadraceError, InvalidRecord, TooLate
from headrace.queues import delay_index, delayed_partition
from headrace.records.delayed import DELAYED_OFFSET
from headrace.storage.folder import PARTITIONED, SHARED
from partitions.led import DATA
from proving import proves
from queues.delay_scene import TOPIC, DelayScene, headers_of, record

HOUR_MS = 3_600_000
FOLDER = f"{DATA}/{TOPIC}/{TOPIC}-0"


@pytest.fixture(params=[PARTITIONED, SHARED])
def scene(request: pytest.FixtureRequest) -> DelayScene:
    return DelayScene(request.param)


@proves("R12")
def test_a_record_comes_at_its_millisecond(scene: DelayScene) -> None:
    scene.produce(record(b"slow", after=1234), record(b"quick", after=7))
    scene.clock.advance(0.006)
    assert scene.values() == []
    scene.clock.advance(0.001)
    assert scene.values() == [b"quick"]
    scene.advance(1.2)
    scene.clock.advance(0.026)
    assert scene.values() == [b"quick"]
    scene.clock.advance(0.001)
    assert scene.values() == [b"quick", b"slow"]
    assert [each.timestamp_ms for each in scene.seen()] == [scene.now_ms - 1227, scene.now_ms]


def test_the_wall_clock_says_what_is_due_whichever_way_it_is_set(scene: DelayScene) -> None:
    scene.produce(record(b"hour", after=HOUR_MS))
    scene.clock.stepped_ms -= HOUR_MS
    scene.advance(HOUR_MS / 1000 + 60)
    assert scene.values() == []
    scene.clock.stepped_ms += HOUR_MS
    scene.advance(0.1)
    assert scene.values() == [b"hour"]
    scene.clock.stepped_ms -= 2 * HOUR_MS
    scene.advance(3 * HOUR_MS / 1000)
    assert scene.values() == [b"hour"]


@proves("Q2")
def test_an_idempotent_producer_is_answered_as_before_and_a_retry_delays_nothing_twice(scene: DelayScene) -> None:
    batch = record(b"later", after=50), record(b"now")
    assert scene.produce(*batch, producer=(7, 0, 0)).offset == 0
    assert scene.produce(*batch, producer=(7, 0, 0)).offset == 0
    scene.advance(1)
    assert scene.produce(*batch, producer=(7, 0, 0)).offset == 0
    assert scene.values() == [b"now", b"later"]
    assert scene.produce(record(b"next"), producer=(7, 0, 2)).offset == 4
    scene.kill()
    assert scene.produce(*batch, producer=(7, 0, 0)).offset == 0
    scene.advance(1)
    assert scene.values() == [b"now", b"later", b"next"]


def test_a_batch_that_is_refused_leaves_nothing(scene: DelayScene) -> None:
    assert isinstance(scene.produce(record(b"a"), record(b"b", after=b"never")).error, InvalidRecord)
    assert scene.partition.log.end_offset == 0


@proves("Q2")
def test_a_recall_counts_when_it_is_below_the_watermark() -> None:
    scene = DelayScene(replicas=2)
    scene.produce(record(b"one", after=500), record(b"two", after=500))
    assert isinstance(scene.recall(0)[0], TooLate)  # nobody knows yet that it waits
    scene.follow()
    heard = scene.recall(0)
    assert heard == []
    assert isinstance(scene.recall(0)[0], CoordinatorLoading)
    scene.advance(1)
    scene.follow()
    assert heard == [None]
    assert scene.values() == [b"two"]
    assert isinstance(scene.recall(1)[0], TooLate)


def test_a_recall_that_is_lost_with_its_leader_recalls_nothing() -> None:
    scene = DelayScene(replicas=2)
    scene.produce(record(b"one", after=500))
    scene.follow()
    heard = scene.recall(0)
    scene.lead_again(cut_to=scene.partition.high_watermark)
    assert all(isinstance(each, HeadraceError) for each in heard)
    scene.advance(1)
    scene.follow()
    assert scene.values() == [b"one"]


def test_a_delivery_that_cannot_be_written_is_made_again(scene: DelayScene) -> None:
    scene.produce(record(b"one", after=50))
    scene.disk.fail_write(log_path(DATA, scene.partition.topic_partition, scene.layout), errno.ENOSPC)
    scene.clock.advance(0.05)
    assert scene.values() == []
    scene.advance(1)
    assert scene.values() == [b"one"]
    assert len(scene.delays) == 0


def test_many_that_are_due_at_once_come_in_batches_of_bounded_size(
    scene: DelayScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delayed_partition, "RECORDS_PER_DELIVERY", 10)
    monkeypatch.setattr(delayed_partition, "BYTES_PER_DELIVERY", 100)
    monkeypatch.setattr(delay_index.DelayIndex.__init__, "__defaults__", (0, 8))
    for number in range(20):
        scene.produce(*(record(b"%d" % (5 * number + each), after=100) for each in range(5)))
    assert len(scene.delays) == 100
    scene.advance(0.2)
    assert sorted(map(int, filter(None, scene.values()))) == list(range(100))
    sizes = [header.record_count for header, _ in scene.batches() if not header.is_control]
    assert max(sizes) <= 10


@proves("R12")
def test_few_that_wait_for_long_do_not_keep_the_log(scene: DelayScene) -> None:
    kept = DelayScene(scene.layout, retention_bytes=20_000, segment_bytes=10_000)
    kept.produce(record(b"far", after=HOUR_MS), record(b"farther", after=2 * HOUR_MS))
    for _ in range(100):
        kept.produce(record(bytes(1000)))
        kept.advance(0.2)
        kept.store.tick()
    assert kept.partition.log.start_offset > 50
    assert len(kept.delays) == 2
    kept.kill()
    assert kept.recall(1) == [None]
    kept.advance(HOUR_MS / 1000)
    assert [headers_of(each).get(DELAYED_OFFSET) for each in kept.seen()][-1] == b"0"
    assert len(kept.delays) == 0


def test_what_is_deleted_by_hand_is_not_delivered(scene: DelayScene, caplog: pytest.LogCaptureFixture) -> None:
    scene.produce(record(b"deleted", after=1000), record(b"kept", after=1000))
    scene.partitions.delete_before(scene.partition, 1)
    scene.clock.run_soon()
    scene.advance(2)
    assert scene.values() == [b"kept"]
    assert "deleted from the log before they were due" in caplog.text


@pytest.mark.parametrize("name", ["delays", "0.delays"])
def test_a_timer_that_cannot_be_believed_is_made_again_from_the_log(scene: DelayScene, name: str) -> None:
    scene.produce(*(record(b"%d" % each, after=1000 + each) for each in range(300)))
    scene.delays.close()
    scene.disk.flip(f"{FOLDER}/{name}", 40)
    scene.kill()
    scene.clock.run_soon()
    assert len(scene.delays) == 300
    scene.advance(2)
    assert len(scene.values()) == 300


def test_an_error_at_any_call_of_the_disk_costs_no_record(scene: DelayScene) -> None:
    for number in range(6):
        scene.produce(*(record(b"%d" % (50 * number + each), after=500 + each) for each in range(50)))
        for name in ("delays.tmp", "0.delays", "1.delays"):
            scene.disk.fail_write(f"{FOLDER}/{name}", errno.EIO)
            scene.disk.fail_open(f"{FOLDER}/{name}", errno.EMFILE)
        scene.delays.close()
        scene.disk.mend()
        scene.kill()
    scene.advance(3)
    assert sorted(map(int, filter(None, scene.values()))) == list(range(300))
