"""What a consumer makes of answers that real brokers give only now and then: scripted peers on real sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from brokers import wait_for
from client.connection_peer import Answer, Peer
from headrace.client.consumer.consumer import Consumer
from headrace.client.consumer.fetcher import Reset
from headrace.client.errors import Refusal
from headrace.records import kernel
from headrace.records.batch import sign
from headrace.wire import api as apis
from headrace.wire.message import Message
from proving import proves

TOPIC_ID = bytes(range(16))
END = 1000
EPOCH = 4
SILENCE = Message()
Script = Callable[[int, Message], Message | None]
"""What a broker answers about the partition, from its id and what was asked, maybe SILENCE; None: as the log is."""


def records(first: int, count: int, epoch: int = EPOCH) -> bytes:
    made = kernel.build(
        [(0, None, b"%d" % n, []) for n in range(first, first + count)], base_offset=first, leader_epoch=epoch
    )
    return bytes(made)


def partition(error_code: int = 0, found: bytes = b"", **fields: object) -> Message:
    given = {"high_watermark": END, "last_stable_offset": END, "log_start_offset": 0, "aborted_transactions": None}
    return Message(partition_index=0, error_code=error_code, records=found, **{**given, **fields})


class Scripted:
    """Two brokers, of which 1 leads; the log has END records in batches of ten."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.leader = 1
        self.asked: list[tuple[int, Message]] = []
        self._stack = ExitStack()
        self.peers: dict[int, Peer] = {}
        for broker_id in (1, 2):
            self.peers[broker_id] = self._stack.enter_context(Peer(self._replies(broker_id)))

    def close(self) -> None:
        self._stack.close()

    @property
    def bootstrap(self) -> str:
        return str(self.peers[1].address)

    def endpoint(self, broker_id: int) -> Message:
        address = self.peers[broker_id].address
        return Message(node_id=broker_id, host=address.host, port=address.port, rack=None)

    def _replies(self, broker_id: int) -> Callable[[int, Message], Answer]:
        def reply(api_key: int, request: Message) -> Answer:
            if api_key == apis.METADATA:
                return self._metadata()
            if api_key == apis.LIST_OFFSETS:
                part = Message(partition_index=0, error_code=0, timestamp=-1, offset=0, leader_epoch=EPOCH)
                return Message(topics=[Message(name="t", partitions=[part])])
            return self._fetch(broker_id, request)

        return reply

    def _metadata(self) -> Message:
        part = Message(
            error_code=0, partition_index=0, leader_id=self.leader, leader_epoch=EPOCH,
            replica_nodes=[1, 2], isr_nodes=[1, 2], offline_replicas=[],
        )  # fmt: skip
        topic = Message(error_code=0, name="t", topic_id=TOPIC_ID, is_internal=False, partitions=[part])
        brokers = [self.endpoint(broker_id) for broker_id in self.peers]
        return Message(brokers=brokers, cluster_id="c", controller_id=1, topics=[topic])

    def _fetch(self, broker_id: int, request: Message) -> Answer:
        (topic,) = request.topics
        (asked,) = topic.partitions
        assert topic.topic_id == TOPIC_ID
        self.asked.append((broker_id, asked))
        answer = self.script(broker_id, asked)
        if answer is SILENCE:
            return None
        if answer is None:
            at = asked.fetch_offset - asked.fetch_offset % 10
            answer = partition(found=records(at, 10) if at < END else b"")
        hinted = answer.error_code == 6 and hasattr(answer, "current_leader")
        return Message(
            error_code=0,
            session_id=0,
            responses=[Message(topic_id=TOPIC_ID, partitions=[answer])],
            node_endpoints=[self.endpoint(2)] if hinted else [],
        )

    def offsets(self, broker_id: int) -> list[int]:
        return [asked.fetch_offset for asker, asked in self.asked if asker == broker_id]


Play = Callable[..., tuple[Scripted, Consumer]]


@pytest.fixture
def play() -> Iterator[Play]:
    with ExitStack() as stack:

        def begin(script: Script, **options: object) -> tuple[Scripted, Consumer]:
            scripted = Scripted(script)
            stack.callback(scripted.close)
            # Little is read ahead, so that a script can tell what was asked when.
            given = {"buffer_bytes": 1, "max_wait_ms": 10, **options}
            consumer = Consumer("t", bootstrap=scripted.bootstrap, **given)  # type: ignore[arg-type]
            stack.callback(consumer.close)
            return scripted, consumer

        yield begin


def take(consumer: Consumer, count: int) -> list[int]:
    found: list[int] = []

    def more() -> bool:
        found.extend(int(record.value) for record in consumer.poll(200))
        return len(found) >= count

    wait_for(f"{count} records", more, pause_s=0.0)
    return found


@proves("R8", "G6")
def test_a_leader_that_is_named_in_a_refusal_is_asked_at_once(play: Play) -> None:
    def script(broker_id: int, asked: Message) -> Message | None:
        if broker_id == 1 and asked.fetch_offset >= 20:
            return partition(6, current_leader=Message(leader_id=2, leader_epoch=EPOCH + 1))
        return None

    scripted, consumer = play(script)
    asked_before = scripted.peers[1].asked.count(apis.METADATA)
    assert take(consumer, 60)[:60] == list(range(60))
    assert scripted.offsets(1) == [0, 10, 20]
    assert scripted.offsets(2)[:3] == [20, 30, 40]
    assert scripted.peers[1].asked.count(apis.METADATA) <= asked_before + 1
    epochs = [asked.current_leader_epoch for _, asked in scripted.asked]
    assert epochs[:4] == [EPOCH, EPOCH, EPOCH, EPOCH + 1]


@proves("R8")
@pytest.mark.parametrize("code", [3, 5, 6, 9, 56, 74, 75, 78, 100])
def test_what_passes_is_waited_out_and_never_seen(play: Play, code: int) -> None:
    refusals = iter(range(3))

    def script(_: int, asked: Message) -> Message | None:
        return partition(code) if asked.fetch_offset == 20 and next(refusals, None) is not None else None

    told: list[Reset] = []
    scripted, consumer = play(script, on_reset=told.append)
    assert take(consumer, 40)[:40] == list(range(40))
    assert scripted.offsets(1)[:6] == [0, 10, 20, 20, 20, 20]
    assert told == []


@proves("R8", "F11")
@pytest.mark.parametrize("code", [1, 6, 9])
def test_a_follower_that_lags_behind_is_left_for_the_leader(play: Play, code: int) -> None:
    def script(broker_id: int, asked: Message) -> Message | None:
        if broker_id == 2:
            return partition(code) if asked.fetch_offset == 30 else None
        return partition(preferred_read_replica=2) if asked.fetch_offset < 20 else None

    told: list[Reset] = []
    scripted, consumer = play(script, rack="room-2", on_reset=told.append)
    assert take(consumer, 50)[:50] == list(range(50))
    assert scripted.offsets(2) == [0, 10, 20, 30]
    assert scripted.offsets(1)[:3] == [0, 30, 40]
    assert told == []


@proves("R8")
def test_a_log_that_was_cut_below_what_was_read_is_told(play: Play) -> None:
    """KIP-320, KIP-595: the leader compares the epoch of what was read last with its own."""
    cut = iter([True])

    def script(_: int, asked: Message) -> Message | None:
        if asked.fetch_offset == 30 and next(cut, False):
            assert asked.last_fetched_epoch == EPOCH
            return partition(diverging_epoch=Message(epoch=EPOCH - 1, end_offset=20))
        return None

    told: list[Reset] = []
    scripted, consumer = play(script, on_reset=told.append)
    assert take(consumer, 50)[:50] == [*range(30), *range(20, 40)]
    wait_for("the reset to be told", lambda: told)
    assert told == [Reset("t", 0, 30, 20, "a new leader's log ends before what was read")]
    assert [asked.last_fetched_epoch for _, asked in scripted.asked][:6] == [-1, EPOCH, EPOCH, EPOCH, -1, EPOCH]


def test_what_does_not_pass_is_raised_with_its_place_until_a_seek(play: Play) -> None:
    _, consumer = play(lambda _, asked: partition(29) if asked.fetch_offset == 10 else None)
    assert take(consumer, 10) == list(range(10))
    for _ in range(2):
        with pytest.raises(Refusal, match=r"fetch of t-0 at offset 10: .*code 29"):
            consumer.poll(5000)
    consumer.seek("t", 0, 20)
    assert take(consumer, 10)[:10] == list(range(20, 30))


def test_a_batch_that_is_cut_is_asked_for_with_more_room(play: Play) -> None:
    whole = records(0, 10)

    def script(_: int, asked: Message) -> Message | None:
        return partition(found=whole[: asked.partition_max_bytes]) if asked.fetch_offset == 0 else None

    scripted, consumer = play(script, partition_fetch_bytes=80)
    assert take(consumer, 10)[:10] == list(range(10))
    rooms = [asked.partition_max_bytes for _, asked in scripted.asked]
    assert rooms[:2] == [80, max(160, len(whole))]


def test_each_stretch_is_asked_for_once_and_in_order(play: Play) -> None:
    held: list[int] = []

    def script(_: int, asked: Message) -> Message | None:
        held.append(asked.fetch_offset)
        return None

    scripted, consumer = play(script, buffer_bytes=1 << 20)
    assert take(consumer, END) == list(range(END))
    assert held[:100] == list(range(0, END, 10))
    scripted.peers[1].drop()
    consumer.seek("t", 0, 990)
    assert take(consumer, 10) == list(range(990, 1000))


@pytest.mark.parametrize("priority_header", [None, "priority"])
def test_offsets_without_records_are_passed_over(play: Play, priority_header: str | None) -> None:
    """As compaction leaves them: within a batch, a whole batch, and a batch that has lost all its records."""

    def script(_: int, asked: Message) -> Message | None:
        if asked.fetch_offset >= 40:
            return None
        thinned = kernel.filter_batch(records(0, 10), [n in (1, 4) for n in range(10)])
        emptied = bytearray(records(20, 10)[:61])
        emptied[8:12], emptied[57:61] = (49).to_bytes(4, "big"), bytes(4)
        sign(emptied)
        return partition(found=bytes(thinned or b"") + bytes(emptied) + records(35, 5))

    _, consumer = play(script, priority_header=priority_header)
    assert take(consumer, 17)[:17] == [1, 4, *range(35, 50)]
    assert consumer.position("t", 0) >= 50
    consumer.seek("t", 0, 0)
    rows = next(consumer.batches(("offset",)))
    assert rows["offset"].to_pylist() == [1, 4, *range(35, 40)]
    assert consumer.position("t", 0) == 40


@proves("R8", "G6")
def test_a_leader_that_falls_silent_is_left_when_another_has_taken_over(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.client.consumer.fetcher.SLOW_S", 0.1)

    def script(broker_id: int, asked: Message) -> Message | None:
        if broker_id == 1 and asked.fetch_offset >= 20:
            scripted.leader = 2
            return SILENCE
        return None

    scripted, consumer = play(script)
    assert take(consumer, 50)[:50] == list(range(50))
    assert scripted.offsets(1) == [0, 10, 20]
    assert scripted.offsets(2)[:2] == [20, 30]


@proves("R8")
def test_what_was_fetched_ahead_is_not_skipped_when_the_log_is_cut_behind_it(play: Play) -> None:
    cut = iter([True])

    def script(_: int, asked: Message) -> Message | None:
        if asked.fetch_offset == 100 and next(cut, False):
            return partition(diverging_epoch=Message(epoch=EPOCH - 1, end_offset=90))
        return None

    told: list[Reset] = []
    scripted, consumer = play(script, buffer_bytes=1 << 20, on_reset=told.append)
    found = [int(record.value) for record in consumer.poll(5000, max_records=5)]
    wait_for("the cut", lambda: 100 in scripted.offsets(1))
    wait_for("what comes after it", lambda: scripted.offsets(1).count(100) == 2)
    assert found + take(consumer, END - 5) == list(range(END))
    assert told == []


@proves("R8")
@pytest.mark.parametrize("priority_header", [None, "priority"])
def test_what_was_fetched_ahead_is_handed_out_before_an_offset_that_is_gone_is_left(
    play: Play, priority_header: str | None
) -> None:
    gone = iter([True])

    def script(_: int, asked: Message) -> Message | None:
        return partition(1) if asked.fetch_offset == 100 and next(gone, False) else None

    told: list[Reset] = []
    scripted, consumer = play(script, buffer_bytes=1 << 20, on_reset=told.append, priority_header=priority_header)
    found = [int(record.value) for record in consumer.poll(5000, max_records=5)]
    wait_for("the offset that is gone", lambda: 100 in scripted.offsets(1))
    found += take(consumer, 105)
    assert found[:110] == [*range(100), *range(10)]
    wait_for("the reset to be told", lambda: told)
    assert told == [Reset("t", 0, 100, 0, "offset 100 is not in the log")]


@proves("R8")
@pytest.mark.parametrize("way", ["poll", "batches"])
def test_of_a_log_that_was_cut_nothing_is_handed_out_of_what_stood_open(play: Play, way: str) -> None:
    cut = iter([True])

    def script(_: int, asked: Message) -> Message | None:
        if asked.fetch_offset == 10 and next(cut, False):
            return partition(diverging_epoch=Message(epoch=EPOCH - 1, end_offset=2))
        return None

    def offsets(consumer: Consumer) -> list[int]:
        if way == "poll":
            return [record.offset for record in consumer.poll(5000, max_records=4)]
        return list(next(consumer.batches(("offset",), batch_rows=4, timeout_ms=5000))["offset"].to_pylist())

    told: list[Reset] = []
    _, consumer = play(script, on_reset=told.append)
    assert offsets(consumer) == [0, 1, 2, 3]
    wait_for("the cut to be told", lambda: told)
    assert told == [Reset("t", 0, 4, 2, "a new leader's log ends before what was read")]
    assert offsets(consumer)[0] == 2
    assert consumer.position("t", 0) <= 6
