"""How a batch is shared out, cut and judged, without Spark and without a broker."""

from __future__ import annotations

import json
import random

import pytest

from headrace.client.admin.cluster import Cluster, Retry
from headrace.spark import loss, plan
from headrace.spark.loss import DataLoss
from headrace.spark.options import Topics
from headrace.spark.plan import Place, TopicsFound
from headrace.spark.progress import Position, default_group_id
from headrace.spark.screen import Quiet
from headrace.spark.stream import share
from proving import proves

NOBODY = Cluster("127.0.0.1:1", retry=Retry(within_ms=0))
A0, A1, B0 = ("a", 0), ("a", 1), ("b", 0)
FOUND = TopicsFound({"a": "1a", "b": "1b"}, (A0, A1, B0))


@proves("S2")
def test_a_limit_is_shared_in_proportion_to_what_waits(seed: int) -> None:
    assert share({A0: 0, A1: 10, B0: 5}, {A0: 300, A1: 110, B0: 5}, 100) == {A0: 75, A1: 35, B0: 5}
    draw = random.Random(seed)
    for _ in range(500):
        offsets = {("t", n): draw.randrange(50) for n in range(draw.randrange(1, 6))}
        ends = {place: at + draw.choice([0, 1, draw.randrange(1000)]) for place, at in offsets.items()}
        limit = draw.randrange(1, 500)
        taken = share(offsets, ends, limit)
        assert all(offsets[place] <= taken[place] <= ends[place] for place in offsets)
        lag = sum(ends.values()) - sum(offsets.values())
        assert sum(taken.values()) - sum(offsets.values()) == min(limit, lag)


@proves("S1")
def test_splits_cover_what_is_read_once_and_are_as_many_as_asked_for(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(300):
        spans: dict[Place, tuple[int, int]] = {}
        for n in range(draw.randrange(1, 5)):
            start = draw.randrange(100)
            spans["a", n] = (start, start + draw.randrange(400))
        least, most = draw.choice([None, draw.randrange(1, 20)]), draw.choice([None, draw.randrange(1, 90)])
        splits = plan.cut(NOBODY, {"a": "1a"}, spans, min_partitions=least, max_records=most)
        covered = [(s.partition, offset) for s in splits for offset in range(s.first_offset, s.next_offset)]
        assert covered == [(n, offset) for (_, n), (start, end) in spans.items() for offset in range(start, end)]
        assert all(s.next_offset > s.first_offset for s in splits)
        assert most is None or all(s.next_offset - s.first_offset <= most for s in splits)
        assert least is None or len(splits) >= min(least, len(covered))


def test_an_offset_is_that_of_sparks_kafka_source_with_more_beside_it() -> None:
    position = Position({A1: 17, A0: 42, B0: 3}, {"a": "1a", "b": "1b"}, {A1: 3})
    told = position.to_json()
    assert told["a"] == {"0": 42, "1": 17}
    assert list(told) == ["a", "b", "topic ids", "lost offsets"]
    assert Position.from_json(told) == position
    assert Position.from_json(json.dumps(told)) == position
    assert Position.from_json({"a": {"0": 42}}) == Position({A0: 42})


def test_a_group_of_its_own_for_each_set_of_topics_the_same_after_a_restart() -> None:
    assert default_group_id(Topics(names=("a",))) == default_group_id(Topics(names=("a",)))
    assert default_group_id(Topics(names=("a",))) != default_group_id(Topics(names=("a", "b")))
    assert default_group_id(Topics(names=("a",)), "mine").startswith("mine-")


@proves("S2")
def test_nothing_lost_is_nothing_told(caplog: pytest.LogCaptureFixture) -> None:
    before = Position({A0: 5, B0: 0}, {"a": "1a", "b": "1b"})
    begin = loss.settle(before, FOUND, {A0: 5, A1: 0, B0: 0}, {A0: 9, A1: 4, B0: 0}, fail=True)
    assert begin.offsets == {A0: 5, A1: 0, B0: 0}
    assert begin.lost == {}
    assert caplog.text == ""


@proves("S2")
@pytest.mark.parametrize(
    ("before", "starts", "ends", "told", "begin", "lost"),
    [
        (
            Position({A0: 5}, {"a": "1a"}, {A0: 2}),
            {A0: 8},
            {A0: 20},
            "a-0: offsets 5 to 7 were deleted before they were read; the log begins at 8",
            {A0: 8},
            {A0: 5},
        ),
        (
            Position({A0: 30}, {"a": "1a"}),
            {A0: 0},
            {A0: 20},
            "a-0: the log ends at offset 20, before 30 where the query was",
            {A0: 20},
            {},
        ),
        (
            Position({A0: 5}, {"a": "0f"}),
            {A0: 0},
            {A0: 20},
            "topic 'a' was deleted and created again (id 0f, now 1a); the query was at offsets {0: 5}",
            {A0: 0},
            {},
        ),
        (
            Position({A0: 5, ("gone", 0): 9}, {"a": "1a", "gone": "99"}),
            {A0: 0},
            {A0: 20},
            "topic 'gone' was deleted; the query was at offsets {0: 9}",
            {A0: 5},
            {},
        ),
        (
            Position({A0: 5}, {"a": "1a"}),
            {A0: 0, A1: 3},
            {A0: 20, A1: 7},
            "a-1: offsets 0 to 2 were deleted before they were read",
            {A0: 5, A1: 3},
            {A1: 3},
        ),
    ],
)
def test_each_loss_is_told_counted_and_passed_or_fails_the_query(
    caplog: pytest.LogCaptureFixture,
    before: Position,
    starts: dict[Place, int],
    ends: dict[Place, int],
    told: str,
    begin: dict[Place, int],
    lost: dict[Place, int],
) -> None:
    with pytest.raises(DataLoss) as error:
        loss.settle(before, FOUND, starts, ends, fail=True)
    assert told in str(error.value)
    assert "set option failOnDataLoss to false" in str(error.value)
    passed = loss.settle(before, FOUND, starts, ends, fail=False)
    assert (passed.offsets, passed.lost) == (begin, lost)
    assert f"headrace: data loss: {told}" in caplog.text
    caplog.clear()
    after = Position({place: ends[place] for place in begin}, FOUND.ids, passed.lost)
    spans = loss.spans(before, after, FOUND, starts, fail=True)
    assert spans == {place: (at, ends[place]) for place, at in begin.items() if at < ends[place]}
    assert caplog.text == ""


def test_what_goes_between_planning_and_reading_is_told_too(caplog: pytest.LogCaptureFixture) -> None:
    before, after = Position({A0: 0}, {"a": "1a"}), Position({A0: 10}, {"a": "1a"})
    with pytest.raises(DataLoss, match="a-0: offsets 0 to 3 were deleted before they were read; the log begins at 4"):
        loss.spans(before, after, FOUND, {A0: 4}, fail=True)
    assert loss.spans(before, after, FOUND, {A0: 4}, fail=False) == {A0: (4, 10)}
    with pytest.raises(DataLoss, match="a-0: offsets 0 to 9 were deleted before they were read; the log begins at 40"):
        loss.spans(before, after, FOUND, {A0: 40}, fail=True)
    made_anew = TopicsFound({"a": "2a"}, (A0,))
    with pytest.raises(DataLoss, match="a-0: offsets 0 to 9 are gone; topic 'a' was created again"):
        loss.spans(before, after, made_anew, {A0: 0}, fail=True)
    assert loss.spans(before, after, TopicsFound({}, ()), {}, fail=False) == {}
    assert "a-0: offsets 0 to 9 are gone; topic 'a' was deleted" in caplog.text


def test_a_workers_broken_pipe_and_the_incubator_warning_are_not_shown() -> None:
    noise = (
        b"Traceback (most recent call last):\n"
        b'  File "/x/pyspark.zip/pyspark/daemon.py", line 264, in manager\n'
        b'  File "/x/pyspark.zip/pyspark/daemon.py", line 95, in worker\n'
        b"BrokenPipeError: [Errno 32] Broken pipe\n"
    )
    other = b'Traceback (most recent call last):\n  File "job.py", line 1\nKeyError: 1\n'
    warning = b"WARNING: Using incubator modules: jdk.incubator.vector\n"
    with_program = noise.replace(b"in worker\n", b"in worker\n    outfile.flush()\n    ^^^^\n")
    assert with_program != noise
    said = b"one\n" + noise + other + warning + with_program + b"two\n"
    for size in (1, 7, 50, len(said)):
        quiet = Quiet()
        shown = b"".join(quiet.take(said[at : at + size]) for at in range(0, len(said), size)) + quiet.let_go()
        assert shown == b"one\n" + other + b"two\n"
