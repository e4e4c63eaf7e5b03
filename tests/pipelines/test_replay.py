"""An archive written back into a topic: each record once, whatever happens to the process that does it."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headrace.arrow
from brokers import Broker
from clients.topics import create_topic
from headrace.arrow import history
from headrace.arrow.stored_table import WINDOW_BYTES
from headrace.arrow.write import write
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.operations import delete_topic
from headrace.client.admin.transactions import describe_transactions, list_transactions
from headrace.client.connection.metadata import MetadataSnapshot
from headrace.errors import OperatorError, SettingError
from headrace.pipelines import replay, replay_archive
from headrace.pipelines.replay_archive import ArchiveReplay
from headrace.spark import faults
from headrace.spark.faults import VARIABLE
from pipelines.archived_world import PARTITIONS, Rows, World
from proving import proves


@pytest.fixture
def world(broker: Broker, tmp_path: Path, seed: int) -> World:
    """All that was written is archived, and some of it deleted."""
    world = World(broker, tmp_path / "an archive", random.Random(seed))
    while any(len(world.written[n]) < 40 for n in range(PARTITIONS)):
        world.produce()
    while world.torn or any(world.archived[n] < len(world.written[n]) for n in range(PARTITIONS)):
        world.archive()
    world.delete()
    return world


def options(world: World, to: str, **more: Any) -> ArchiveReplay:
    return ArchiveReplay(world.folder, world.bootstrap, world.topic, to, **more)


def replayed(world: World, to: str) -> Rows:
    """By partition, in the order of the topic, without their new offsets."""
    found: Rows = {}
    columns = ("partition", "timestamp", "key", "value", "headers")
    for row in headrace.arrow.read(to, bootstrap=world.bootstrap, columns=columns).read_all().to_pylist():
        found.setdefault(row["partition"], []).append((row["timestamp"], row["key"], row["value"], str(row["headers"])))
    return found


def expected(world: World) -> Rows:
    return {partition: [row[1:] for row in rows] for partition, rows in world.written.items()}


@proves("S5")
def test_a_replay_has_every_record_in_its_partition_and_order_with_key_headers_and_timestamp(world: World) -> None:
    to = f"{world.topic}-again"
    summary = replay.run(options(world, to))
    assert summary.ok
    assert replayed(world, to) == expected(world)
    again = replay.run(options(world, to))
    assert (again.facts["records"], again.facts["went_on"]) == (0, True)
    more_archived(world)
    replay.run(options(world, to))
    assert replayed(world, to) == expected(world), "also what was archived since, of every partition"
    replay.run(options(world, to, name=f"another {to}"))
    assert sum(map(len, replayed(world, to).values())) == 2 * sum(map(len, world.written.values()))
    with Cluster(world.bootstrap) as cluster:
        delete_topic(cluster, to)
    replay.run(options(world, to))
    assert replayed(world, to) == expected(world), "a topic that was deleted has nothing of it"


def more_archived(world: World) -> None:
    """Of every partition."""
    counts = {n: len(world.written[n]) for n in range(PARTITIONS)}
    while any(len(world.written[n]) == counts[n] for n in range(PARTITIONS)):
        world.produce()
    while world.torn or any(world.archived[n] < len(world.written[n]) for n in range(PARTITIONS)):
        world.archive()


@proves("S5")
def test_a_topic_that_brokers_do_not_know_of_for_a_moment_does_not_begin_anew(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metadata comes late to a broker."""
    to, topology = f"{world.topic}-late", Cluster.topology
    left = 0

    def late(cluster: Cluster, topics: Sequence[str] | None = None, *, create: bool = False) -> MetadataSnapshot:
        nonlocal left
        answer = topology(cluster, topics, create=create)
        if to not in answer.topics or left == 0:
            return answer
        left -= 1
        del cluster._topics[to]
        return dataclasses.replace(answer, topics={name: each for name, each in answer.topics.items() if name != to})

    replay.run(options(world, to))
    monkeypatch.setattr(Cluster, "topology", late)
    for times in range(1, 5):
        left = times
        again = replay.run(options(world, to))
        assert (left, again.facts["records"], again.facts["went_on"]) == (0, 0, True)
    monkeypatch.setattr("headrace.client.admin.cluster.APPEAR_WITHIN_MS", 0)
    left = 3
    with pytest.raises(OperatorError, match=f"did not know of topic {to} at first, and now they do: run the replay"):
        replay.run(options(world, to))
    assert replayed(world, to) == expected(world)
    to = world.topic
    for times in range(3):
        left = times
        with pytest.raises(OperatorError, match=r"is the one that .* has records of"):
            replay.run(options(world, world.topic))


@proves("S5")
@pytest.mark.parametrize("mixed", [False, True], ids=["as archived", "out of order"])
def test_a_window_has_no_more_bytes_than_may_be_held(
    world: World, monkeypatch: pytest.MonkeyPatch, mixed: bool
) -> None:
    if mixed:
        world.compact()
    to, most = f"{world.topic}-bounded-{mixed}", 1000
    monkeypatch.setattr(replay_archive, "WINDOW_BYTES", most)
    monkeypatch.setattr(history, "BATCH_BYTES", 200)
    windows = list(options(world, to).source().windows(replay.WINDOW_ROWS))
    assert max(window.rows.nbytes for window in windows) <= most
    assert sum(window.passed for window in windows) == sum(map(len, world.written.values()))
    summary = replay.run(options(world, to))
    assert summary.facts["transactions"] == len(windows) > PARTITIONS
    assert replayed(world, to) == expected(world)


@proves("S5")
def test_large_records_are_replayed_a_few_at_a_time(broker: Broker, tmp_path: Path, seed: int) -> None:
    """Twenty thousand of them would fill the memory: so many offsets are a window of small ones."""
    world, large, count = World(broker, tmp_path / "a", random.Random(seed)), 900_000, 60
    rows = pa.RecordBatch.from_pydict(
        {"value": [b"%d-" % n + bytes(large) for n in range(count)], "partition": pa.array([0] * count, pa.int32())}
    )
    write(world.topic, rows, bootstrap=world.bootstrap)
    world.written[0] = [(n,) for n in range(count)]
    while world.torn or world.archived[0] < count:
        world.archive()
    windows = list(options(world, "nowhere").source().windows(replay.WINDOW_ROWS))
    assert len(windows) >= 2
    assert max(window.rows.nbytes for window in windows) <= WINDOW_BYTES
    values = [value for window in windows for value in window.rows["value"].to_pylist()]
    assert [int(value[: value.index(b"-")]) for value in values] == list(range(count))


@proves("S5")
def test_a_name_is_of_one_replay(world: World) -> None:
    to, name = f"{world.topic}-named", f"named {uuid.uuid4()}"
    replay.run(options(world, to, name=name, key=b"k7"))
    with pytest.raises(OperatorError, match="was begun with another archive, topic or choice of records"):
        replay.run(options(world, to, name=name, key=b"k8"))
    assert [row[1] for rows in replayed(world, to).values() for row in rows] == [b"k7"]


@proves("S5")
def test_of_two_processes_that_run_one_replay_the_later_goes_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second begins when the first has written a window, and is done before the first writes the next."""
    to = f"{world.topic}-twice"

    def reached(point: str, number: int) -> None:
        if (point, number) == ("replay-committed", 0):
            patched.undo()
            assert replay.run(options(world, to)).ok

    with monkeypatch.context() as patched:
        patched.setattr(faults, "reached", reached)
        with pytest.raises(OperatorError, match="another process runs the replay"):
            replay.run(options(world, to, rate=25))
    assert replayed(world, to) == expected(world)


@proves("S5")
def test_times_are_meant_from_when_a_replay_began(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Typed as so long ago, they are others when the command is run again."""
    to, every = f"{world.topic}-times", sorted(row[1] for rows in world.written.values() for row in rows)
    middle = every[len(every) // 2]
    at_ms, typed = round(middle.timestamp() * 1000), ("2h", None)

    def reached(point: str, number: int) -> None:
        if (point, number) == ("replay-committed", 0):
            raise InterruptedError

    with monkeypatch.context() as patched:
        patched.setattr(faults, "reached", reached)
        with pytest.raises(InterruptedError):
            replay.run(options(world, to, from_ms=at_ms, period=typed, rate=10_000))
    replay.run(options(world, to, from_ms=at_ms + 3_600_000, period=typed))
    found = sorted(row[0] for rows in replayed(world, to).values() for row in rows)
    assert found == [at for at in every if at >= middle]


@proves("S5")
@pytest.mark.parametrize("point", ["replay-written:0", "replay-committed:1", "replay-written:3"])
def test_a_replay_that_is_killed_goes_on_and_has_each_record_once(world: World, point: str) -> None:
    to = f"{world.topic}-{uuid.uuid4().hex[:6]}"
    arguments = ["--archive", str(world.folder), "--topic", world.topic, "--to", to, "--bootstrap", world.bootstrap]
    command = [str(Path(sys.executable).with_name("headrace")), "pipeline", "replay", *arguments]
    env = {**os.environ, VARIABLE: point}
    killed = subprocess.run([*command, "--rate", "25"], env=env, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    with Cluster(world.bootstrap) as cluster:
        left = [each.transactional_id for each in list_transactions(cluster) if world.topic in each.transactional_id]
        found = {each.timeout_ms for each in describe_transactions(cluster, left)}
    assert found == {replay.WINDOW_OPEN_MAX_MS}, "it ends by itself if nobody comes"
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert replayed(world, to) == expected(world)
    with Cluster(world.bootstrap) as cluster:
        ids = [each for each in list_transactions(cluster) if to in each.transactional_id]
    assert not [each for each in ids if each.state == "Ongoing"]


@proves("S5")
def test_a_replay_may_be_of_some_records(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the folder is named as people do, from where they are."""
    monkeypatch.chdir(world.folder.parent)
    world.folder = Path(world.folder.name)
    every = [row for rows in world.written.values() for row in rows]
    middle = sorted(row[1] for row in every)[len(every) // 2]
    at_ms = round(middle.timestamp() * 1000)

    def keys(**more: Any) -> list[bytes]:
        to = f"{world.topic}-{uuid.uuid4().hex[:6]}"
        replay.run(options(world, to, **more))
        return sorted(row[1] for rows in replayed(world, to).values() for row in rows)

    assert keys(from_ms=at_ms) == sorted(row[2] for row in every if row[1] >= middle)
    assert keys(until_ms=at_ms) == sorted(row[2] for row in every if row[1] < middle)
    assert keys(key=b"k7") == [b"k7"]
    aside = keys(dead_letters=True)
    assert 0 < len(aside) < len(every)
    late = {row[2] for rows in world.written.values() for row in rows[10:]}
    assert set(keys(dead_letters=True, where="\"offset\" >= 10 and reason = 'bad'")) == late & set(aside)
    found = keys(where='"offset" < 10 and "partition" = 1')
    assert set(found) == {row[2] for row in world.written[1][:10]} - set(aside)
    with pytest.raises(SettingError, match="cannot be asked"):
        keys(where="no such column")


def test_keys_may_decide_the_partition_anew(world: World, broker: Broker) -> None:
    to = create_topic(broker, f"{world.topic}-one", 1)
    with pytest.raises(OperatorError, match="--partition key"):
        replay.run(options(world, to))
    replay.run(options(world, to, partition="key"))
    assert sorted(row[1] for row in replayed(world, to)[0]) == sorted(
        row[2] for rows in world.written.values() for row in rows
    )


def test_what_cannot_be_replayed_is_told(world: World, tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="would be archived, and replayed again"):
        replay.run(options(world, ""))
    with pytest.raises(OperatorError, match="no records of a topic 'other'"):
        replay.run(ArchiveReplay(world.folder, world.bootstrap, "other"))
    with pytest.raises(OperatorError, match="has no archive"):
        replay.run(ArchiveReplay(tmp_path / "nothing", world.bootstrap, world.topic))
