"""Batches of the sink as their driver ends them, on a real broker: once, whoever dies, comes back or comes too late.

What tasks leave is written here by transactions under the names of attempts; `tests/spark/test_sink_exactly_once.py`
has the same from Spark.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.types import StringType, StructField, StructType

import headrace.arrow
from arrow.topics import make_topic
from brokers import Broker
from clusters import BrokerCluster
from headrace.cli.main import main
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.operations import delete_topic
from headrace.client.admin.transactions import describe_transactions, list_transactions
from headrace.client.errors import TransactionFailed, TransactionInDoubt
from headrace.client.producer.transaction_requests import PreparedTransaction
from headrace.errors import HeadraceError
from headrace.spark import decision_log, faults, sink_commits
from headrace.spark.decisions import NO_RUN, Batch, Decision, Ended, Known, Verdict, attempts_pattern, judge
from headrace.spark.sink import BatchWriter, StreamWriter, Written, parse
from headrace.spark.sink_commits import AnotherDriver, CommitLost, DecisionLost, OtherRows
from proving import proves

TIMEOUT_MS = 30_000
ROWS = StructType([StructField("value", StringType())])


class Died(Exception):
    """What a driver does at a named point."""


@dataclass
class Scene:
    """A query that writes numbers into a topic."""

    broker: Broker | BrokerCluster
    topic: str
    query: str = field(default_factory=lambda: str(uuid.uuid4()))
    _attempts: Iterator[int] = field(default_factory=lambda: iter(range(1000)))

    def batch(self, number: int, run: str = "first") -> Batch:
        return Batch(self.query, run, number)

    def attempt(self, batch: Batch, partition: int, values: list[str]) -> PreparedTransaction:
        """What an attempt at a task leaves behind."""
        name = batch.transactional_id(partition, next(self._attempts))
        with headrace.arrow.Transaction(name, bootstrap=self.broker.bootstrap) as t:
            t.write(self.topic, pa.RecordBatch.from_pydict({"value": values}))
            return t.prepare()

    def tasks(self, batch: Batch, mark: str = "") -> list[PreparedTransaction]:
        """Two tasks, done."""
        return [self.attempt(batch, n, [f"{batch.number}-{n}{mark}"]) for n in range(2)]

    def commit(self, batch: Batch, prepared: list[PreparedTransaction], *, last: bool = False) -> None:
        sink_commits.commit(self.broker.bootstrap, batch, prepared, last=last, timeout_ms=TIMEOUT_MS)

    def abort(self, batch: Batch, prepared: list[PreparedTransaction], *, last: bool = False) -> None:
        sink_commits.abort(self.broker.bootstrap, batch, prepared, last=last, timeout_ms=TIMEOUT_MS)

    def forget(self) -> None:
        """The process of the driver is gone, with all that it knew."""
        for driver in sink_commits._drivers.values():
            driver.close()
        sink_commits._drivers.clear()
        decision_log._decisions.seen.clear()

    def known(self) -> Known:
        with Cluster(self.broker.bootstrap) as cluster:
            return decision_log.read(cluster, self.query, TIMEOUT_MS)

    def seen(self) -> list[str]:
        rows = headrace.arrow.read(self.topic, bootstrap=self.broker.bootstrap, columns=["value"]).read_all()
        return sorted(value.decode() for value in rows["value"].to_pylist())

    def open_names(self) -> list[str]:
        """Attempts whose transactions can still come to something."""
        with Cluster(self.broker.bootstrap) as cluster:
            pattern = attempts_pattern(self.query)
            listed = list_transactions(cluster, states=["Ongoing", "Empty"], pattern=pattern)
        return [each.transactional_id for each in listed]

    def assert_done(self, *values: str) -> None:
        """These are seen, each once, and nothing holds readers back."""
        assert self.seen() == sorted(values)
        assert self.open_names() == []
        with Cluster(self.broker.bootstrap) as cluster:
            assert list_transactions(cluster, states=["Ongoing"], pattern=".*") == []


@pytest.fixture
def scene(broker: Broker) -> Iterator[Scene]:
    made = Scene(broker, make_topic(broker, 2))
    yield made
    made.forget()


def dies_at(patched: pytest.MonkeyPatch, point: str) -> None:
    def reached(name: str, _: int) -> None:
        if name == point:
            raise Died

    patched.setattr(faults, "reached", reached)


@proves("S3")
def test_batches_are_committed_one_after_the_other(scene: Scene) -> None:
    for number in range(3):
        batch = scene.batch(number)
        prepared = scene.tasks(batch)
        assert f"{number}-0" not in scene.seen()
        scene.commit(batch, prepared)
        assert f"{number}-0" in scene.seen()
        if number == 1:
            scene.forget()
    scene.assert_done("0-0", "0-1", "1-0", "1-1", "2-0", "2-1")
    known = scene.known()
    assert isinstance(known, Decision)
    assert known.batch == scene.batch(2)


@proves("S3")
def test_what_lost_attempts_left_is_aborted(scene: Scene) -> None:
    batch = scene.batch(0)
    scene.attempt(batch, 0, ["of a task that was run again"])
    prepared = scene.tasks(batch)
    late = headrace.arrow.Transaction(batch.transactional_id(1, 777), bootstrap=scene.broker.bootstrap)
    scene.commit(batch, prepared)
    with pytest.raises(TransactionFailed), late as t:  # noqa: PT012
        t.submit(scene.topic, pa.RecordBatch.from_pydict({"value": ["too late"]}))
        t.prepare()
    scene.assert_done("0-0", "0-1")


@proves("S3")
@pytest.mark.parametrize("point", ["sink-written", "sink-decided", "sink-ended"])
@pytest.mark.parametrize("aborted", [False, True], ids=["killed", "aborted"])
def test_a_driver_that_dies_leaves_a_batch_that_counts_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, point: str, aborted: bool
) -> None:
    """Its process is gone; or Spark calls abort, in another one. Then the batch is run again."""
    before = scene.batch(0)
    scene.commit(before, scene.tasks(before))
    batch = scene.batch(1)
    prepared = scene.tasks(batch, " of the first run")
    with monkeypatch.context() as patched:
        dies_at(patched, point)
        with pytest.raises(Died):
            scene.commit(batch, prepared)
    scene.forget()
    if aborted:
        scene.abort(batch, prepared)
        assert scene.open_names() == []
    again = scene.batch(1, "second")
    scene.commit(again, scene.tasks(again, " of the second run"))
    which = "second" if point == "sink-written" else "first"
    scene.assert_done("0-0", "0-1", f"1-0 of the {which} run", f"1-1 of the {which} run")


@proves("S3")
@pytest.mark.parametrize("point", ["sink-written", "sink-decided", "sink-ended"])
def test_a_batch_without_rows_when_it_is_run_again_ends_what_its_first_run_left(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """As was decided: its source has lost them meanwhile, or its filter is another. No other batch follows."""
    before, batch = scene.batch(0), scene.batch(1)
    scene.commit(before, scene.tasks(before))
    with monkeypatch.context() as patched:
        dies_at(patched, point)
        with pytest.raises(Died):
            scene.commit(batch, scene.tasks(batch))
    scene.forget()
    given = {"bootstrap": scene.broker.bootstrap, "topic": scene.topic}
    writer = StreamWriter(parse(given, streaming=True), ROWS, overwrite=False)
    for _ in range(2):
        writer.commit([Written(0, scene.batch(1, "second"))], 1)
        scene.assert_done("0-0", "0-1", *([] if point == "sink-written" else ["1-0", "1-1"]))
    scene.attempt(scene.batch(2, "second"), 0, ["of an attempt that had rows, and was run again without"])
    writer.commit([Written(0, scene.batch(2, "second"))], 2)
    scene.assert_done("0-0", "0-1", *([] if point == "sink-written" else ["1-0", "1-1"]))
    following = scene.batch(3, "second")
    writer.commit([Written(1, following, each) for each in scene.tasks(following)], 3)
    assert {"3-0", "3-1"} <= set(scene.seen())


@proves("S3")
def test_a_write_without_rows_leaves_nothing_of_its_attempts(scene: Scene) -> None:
    for named in ({}, {"writeId": scene.query}):
        writer = BatchWriter(
            parse({"bootstrap": scene.broker.bootstrap, "topic": scene.topic, **named}), ROWS, overwrite=False
        )
        batch = writer._batch
        assert batch is not None
        scene.attempt(batch, 0, ["of an attempt that had rows, and was run again without"])
        writer.commit([Written(0, batch)])
        scene.assert_done()


@proves("S3")
def test_a_driver_that_dies_between_two_ends_is_made_up_for(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = scene.batch(0)
    prepared = scene.tasks(batch)
    with monkeypatch.context() as patched:
        dies_at(patched, "sink-decided")
        with pytest.raises(Died):
            scene.commit(batch, prepared)
    headrace.commit_prepared(prepared[1], scene.broker.bootstrap)
    scene.forget()
    after = scene.batch(1, "second")
    scene.commit(after, scene.tasks(after))
    scene.assert_done("0-0", "0-1", "1-0", "1-1")


@proves("S3")
def test_a_decision_whose_answer_was_lost_is_found(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = scene.batch(0)
    prepared = scene.tasks(batch)

    def write_and_hear_nothing(writer: decision_log.DecisionWriter, decision: Decision) -> None:
        writer._write(decision.encode())
        raise TransactionInDoubt("nobody has answered")

    with monkeypatch.context() as patched:
        patched.setattr(decision_log.DecisionWriter, "write", write_and_hear_nothing)
        with pytest.raises(TransactionInDoubt):
            scene.commit(batch, prepared)
    scene.abort(batch, prepared)
    scene.assert_done("0-0", "0-1")
    again = scene.batch(0, "second")
    scene.commit(again, scene.tasks(again, " again"))
    scene.assert_done("0-0", "0-1")


@proves("S3")
def test_a_decision_that_was_never_ended_is_no_decision(scene: Scene) -> None:
    batch = scene.batch(0)
    prepared = scene.tasks(batch)
    with Cluster(scene.broker.bootstrap) as cluster:
        headrace.arrow.Transaction(batch.transactional_id(9, 9), cluster=cluster).abort()
        decision_log.make_topic(cluster)
    writer = decision_log.DecisionWriter(Cluster(scene.broker.bootstrap), scene.query, TIMEOUT_MS)
    t = writer._producer.transaction()
    t.begin()
    t.send(decision_log.TOPIC, Decision(batch, tuple(prepared)).encode(), key=writer._key, partition=writer._partition)
    writer._producer.flush()
    again = scene.batch(0, "second")
    scene.commit(again, scene.tasks(again, " again"))
    scene.assert_done("0-0 again", "0-1 again")


@proves("S3")
def test_a_driver_that_was_superseded_ends_its_own_attempts_and_stops(scene: Scene) -> None:
    old, new = scene.batch(0), scene.batch(1, "second")
    scene.commit(old, scene.tasks(old))
    scene.commit(new, scene.tasks(new))
    following = scene.batch(2, "second")
    running = scene.tasks(following)
    zombie = scene.batch(1)
    prepared = scene.tasks(zombie, " of the zombie")
    for end in (scene.commit, scene.commit):
        with pytest.raises(AnotherDriver, match="run second has committed batch 1"):
            end(zombie, prepared)
    scene.abort(zombie, prepared)
    assert len(scene.open_names()) == 2, "those of the other driver are its own"
    scene.commit(following, running)
    scene.assert_done("0-0", "0-1", "1-0", "1-1", "2-0", "2-1")


@proves("S3")
def test_two_drivers_at_one_batch_commit_it_once(scene: Scene) -> None:
    before = scene.batch(0)
    scene.commit(before, scene.tasks(before))
    one, two = scene.batch(1), scene.batch(1, "second")
    of_one, of_two = scene.tasks(one, " of one"), scene.tasks(two, " of two")
    scene.commit(two, of_two)
    with pytest.raises(AnotherDriver):
        scene.commit(one, of_one)
    scene.assert_done("0-0", "0-1", "1-0 of two", "1-1 of two")


@proves("S3")
def test_what_another_driver_has_aborted_is_never_decided(scene: Scene) -> None:
    """It has taken over and given up, and decided nothing."""
    before = scene.batch(0)
    scene.commit(before, scene.tasks(before))
    batch = scene.batch(1)
    prepared = scene.tasks(batch)
    scene.abort(scene.batch(1, "second"), [])
    with pytest.raises(TransactionFailed, match="aborted before it was committed"):
        scene.commit(batch, prepared)
    scene.abort(batch, prepared)
    third = scene.batch(1, "third")
    scene.commit(third, scene.tasks(third, " again"))
    scene.assert_done("0-0", "0-1", "1-0 again", "1-1 again")


@proves("S3")
@pytest.mark.parametrize("told", [True, False], ids=["its run is known", "its run is not known"])
def test_a_run_that_was_given_up_writes_nothing_more(scene: Scene, told: bool) -> None:
    """Tasks that are being killed may still begin; what they find decided says that their run is over."""
    batch = scene.batch(0)
    scene.attempt(batch, 0, ["of a task that was killed"])
    scene.abort(batch if told else scene.batch(0, NO_RUN), [])
    assert judge(scene.known(), batch) is Verdict.SUPERSEDED
    again = scene.batch(0, "second")
    assert judge(scene.known(), again) is Verdict.OPEN
    scene.commit(again, scene.tasks(again))
    assert judge(scene.known(), batch) is Verdict.SUPERSEDED
    scene.assert_done("0-0", "0-1")


@proves("S3")
def test_a_write_without_a_name_that_was_given_up_is_over(scene: Scene) -> None:
    batch = scene.batch(0)
    scene.abort(batch, scene.tasks(batch), last=True)
    assert judge(scene.known(), batch) is Verdict.PASSED
    scene.assert_done()


@proves("S3")
def test_a_batch_behind_the_last_one_is_refused_and_disturbs_nobody(scene: Scene) -> None:
    """Its number may stand for other rows: of a checkpoint that was restored, or emptied in part."""
    for number in range(3):
        scene.commit(scene.batch(number), scene.tasks(scene.batch(number)))
    following = scene.batch(3)
    running = scene.tasks(following)
    passed = scene.batch(1, "second")
    prepared = scene.tasks(passed, " of other rows")
    with pytest.raises(AnotherDriver, match="batch 1 comes after batch 2 of this query was committed"):
        scene.commit(passed, prepared)
    scene.abort(passed, prepared)
    assert len(scene.open_names()) == 2, "those of the driver that goes on are its own"
    scene.commit(following, running)
    scene.assert_done(*(f"{number}-{n}" for number in range(4) for n in range(2)))


@proves("S3")
@pytest.mark.parametrize("point", ["sink-decided", "sink-ended"])
def test_a_decision_that_is_lost_is_told_before_its_batch_is_written_twice(
    fresh_broker: Callable[..., Broker], monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """The topic of decisions was deleted. What is decided, and was not committed, is as if it never was."""
    broker = fresh_broker()
    scene = Scene(broker, make_topic(broker, 2))
    batch = scene.batch(0)
    with monkeypatch.context() as patched:
        dies_at(patched, point)
        with pytest.raises(Died):
            scene.commit(batch, scene.tasks(batch))
    scene.forget()
    with Cluster(broker.bootstrap) as cluster:
        delete_topic(cluster, decision_log.TOPIC)
    again = scene.batch(0, "second")
    prepared = scene.tasks(again, " again")
    if point == "sink-decided":
        scene.commit(again, prepared)
        scene.assert_done("0-0 again", "0-1 again")
    else:
        with pytest.raises(DecisionLost, match="'__spark_sink' does not know of it"):
            scene.commit(again, prepared)
        scene.abort(again, prepared)
        scene.assert_done("0-0", "0-1")
    scene.forget()


@proves("S3")
def test_a_write_that_has_no_name_is_forgotten_when_all_is_done(scene: Scene) -> None:
    batch = scene.batch(0)
    prepared = scene.tasks(batch)
    scene.commit(batch, prepared, last=True)
    assert scene.known() is Ended.ENDED
    scene.abort(batch, prepared, last=True)
    scene.assert_done("0-0", "0-1")


@proves("S3")
def test_committed_long_ago_and_forgotten_by_the_coordinator_is_committed(scene: Scene) -> None:
    batch = scene.batch(0)
    prepared = scene.tasks(batch)
    scene.commit(batch, prepared)
    known = scene.known()
    assert isinstance(known, Decision)
    gone = replace(prepared[0], transactional_id=batch.transactional_id(5, 5))
    writer = decision_log.DecisionWriter(Cluster(scene.broker.bootstrap), scene.query, TIMEOUT_MS)
    writer.write(replace(known, prepared=(*known.prepared, gone)))
    writer.close()
    scene.forget()
    scene.commit(scene.batch(1), scene.tasks(scene.batch(1)))
    scene.assert_done("0-0", "0-1", "1-0", "1-1")


def test_rows_that_were_aborted_by_hand_after_the_decision_are_told(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = scene.batch(0)
    prepared = scene.tasks(batch)
    with monkeypatch.context() as patched:
        dies_at(patched, "sink-decided")
        with pytest.raises(Died):
            scene.commit(batch, prepared)
    headrace.abort_prepared(prepared[0], scene.broker.bootstrap)
    with pytest.raises(CommitLost, match="1 of 2 transactions of batch 0 were aborted by hand"):
        scene.abort(batch, prepared)
    scene.assert_done("0-1")


@proves("S3")
def test_the_broker_dies_between_decision_and_ends(
    fresh_broker: Callable[..., Broker], monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = fresh_broker()
    scene = Scene(broker, make_topic(broker, 2))
    batch = scene.batch(0)
    prepared = scene.tasks(batch)

    def reached(name: str, _: int) -> None:
        if name == "sink-decided":
            broker.restart(clean=False)

    monkeypatch.setattr(faults, "reached", reached)
    scene.commit(batch, prepared)
    scene.assert_done("0-0", "0-1")
    scene.commit(scene.batch(1), scene.tasks(scene.batch(1)))
    scene.assert_done("0-0", "0-1", "1-0", "1-1")
    scene.forget()


@proves("S3")
def test_the_coordinator_of_a_transaction_dies_between_decision_and_ends_and_another_takes_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not started again: what is decided is committed by those that are left."""
    settings = {"broker.lease.ms": 3000, "offsets.topic.partitions": 2, "transaction.state.log.num.partitions": 2}
    with BrokerCluster(tmp_path, etcd=1, settings=settings) as cluster:
        cluster.create_topic("rows", 3, 3)
        scene = Scene(cluster, "rows")
        batch = scene.batch(0)
        prepared = scene.tasks(batch)

        def reached(name: str, _: int) -> None:
            if name == "sink-decided":
                with Cluster(cluster.bootstrap) as client:
                    listed = list_transactions(client, states=["Ongoing"], pattern=attempts_pattern(scene.query))
                cluster.brokers[listed[0].broker_id - 1].kill()

        with monkeypatch.context() as patched:
            patched.setattr(faults, "reached", reached)
            scene.commit(batch, prepared)
        scene.assert_done("0-0", "0-1")
        scene.forget()
        after = scene.batch(1, "second")
        scene.commit(after, scene.tasks(after))
        scene.assert_done("0-0", "0-1", "1-0", "1-1")
        scene.forget()


@proves("S3", "T5")
def test_what_drivers_that_are_gone_have_left_is_finished_on_the_command_line(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def finish(*flags: str) -> str:
        capsys.readouterr()
        assert main(["transaction", "finish", "--bootstrap", scene.broker.bootstrap, *flags]) == 0
        return capsys.readouterr().out

    assert finish() == "no write of Spark has left anything open\n"
    decided, undecided = scene.batch(0), Batch("write-nightly 7", "first", 0)
    prepared = scene.tasks(decided)
    scene.attempt(decided, 0, ["lost"])
    scene.attempt(undecided, 0, ["undecided"])
    with monkeypatch.context() as patched:
        dies_at(patched, "sink-decided")
        with pytest.raises(Died):
            scene.commit(decided, prepared)
    scene.forget()
    assert finish() == "no write of Spark has left anything open\n", "for an hour they may be under way"
    shown = json.loads(finish("--older-than", "1ms", "--dry-run", "--json"))
    assert sorted((row["query"], row["transactions"]) for row in shown) == sorted(
        [(scene.query, 3), ("write-nightly 7", 1)]
    )
    done = {row["query"]: row for row in json.loads(finish("--older-than", "1ms", "--json"))}
    assert [(row["committed"], row["aborted"]) for row in (done[scene.query], done["write-nightly 7"])] == [
        (2, 1),
        (0, 1),
    ]
    scene.assert_done("0-0", "0-1")
    again = scene.batch(0, "second")
    scene.commit(again, scene.tasks(again, " again"))
    scene.assert_done("0-0", "0-1")


def test_ended_ids_of_attempts_are_ended_for_good(scene: Scene) -> None:
    batch = scene.batch(0)
    prepared = scene.tasks(batch)
    left = scene.attempt(batch, 0, ["lost"])
    scene.commit(batch, prepared)
    with Cluster(scene.broker.bootstrap) as cluster:
        names = [each.transactional_id for each in (*prepared, left)]
        found = [each.state for each in describe_transactions(cluster, names)]
    assert found == ["CompleteCommit", "CompleteCommit", "CompleteAbort"]


def test_a_process_keeps_no_driver_of_writes_that_are_done(scene: Scene, tmp_path: Path) -> None:
    """Of a stream whose batches are written under a name: each has a run of its own."""
    (tmp_path / "offsets").mkdir()
    (tmp_path / "metadata").write_text('{"id": "of a stream"}')
    for number in range(3):
        (tmp_path / "offsets" / str(number)).write_text(f"v1\n{{}}\n{number}\n")
        given = {"bootstrap": scene.broker.bootstrap, "topic": scene.topic, "writeId": scene.query}
        numbered = {"batchId": str(number), "checkpointLocation": str(tmp_path)}
        writer = BatchWriter(parse({**given, **numbered}), ROWS, overwrite=False)
        batch = writer._batch
        assert batch is not None
        writer.commit([Written(1, batch, scene.attempt(batch, 0, [f"{number}"]))])
    assert sink_commits._drivers == {}
    assert scene.seen() == ["0", "1", "2"]


@proves("S3")
@pytest.mark.parametrize("changed", ["metadata", "offsets/0"])
def test_a_name_that_comes_with_another_checkpoint_is_refused(scene: Scene, tmp_path: Path, changed: str) -> None:
    """Its first batch has the number of that which was written."""
    (tmp_path / "offsets").mkdir()
    (tmp_path / "metadata").write_text('{"id": "of a stream"}')
    (tmp_path / "offsets" / "0").write_text('v1\n{}\n{"orders": {"0": 100}}\n')
    given = {"bootstrap": scene.broker.bootstrap, "topic": scene.topic, "writeId": scene.query}
    numbered = {"batchId": "0", "checkpointLocation": f"file:{tmp_path}"}

    def write(value: str) -> None:
        writer = BatchWriter(parse({**given, **numbered}), ROWS, overwrite=False)
        batch = writer._batch
        assert batch is not None
        messages = [Written(1, batch, scene.attempt(batch, 0, [value]))]
        try:
            writer.commit(list(messages))
        except HeadraceError:
            writer.abort(list(messages))
            raise

    write("once")
    write("again")
    (tmp_path / changed).write_text((tmp_path / changed).read_text().replace("stream", "nother").replace("100", "101"))
    with pytest.raises(OtherRows, match=r"other offsets than it has now, .* give the writes another writeId"):
        write("other rows")
    scene.assert_done("once")
