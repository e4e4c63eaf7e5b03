"""The way of a record to its batch: partitions as every client has them, bounds, and threads, compiled and not."""

import threading
from collections import Counter
from types import ModuleType
from typing import Any

import pytest

from headrace.errors import BatchTooLarge, HeadraceError, InvalidRecord, UnknownPartition
from headrace.records import kernel
from headrace.records.partitioner import partition_for_key
from proving import proves

NOW_MS = 1_700_000_000_000
PARTITIONS = 4


class Sender:
    """Keeps full batches; knows one topic."""

    def __init__(self, routing: ModuleType, building: ModuleType, *, room: int = 2000, **settings: Any) -> None:
        self.building, self.routing, self.room = building, routing, room
        self.lock = threading.RLock()
        self.quota = routing.Quota(settings.pop("max_bytes", 1 << 30), settings.pop("max_records", 1 << 30))
        self.settings = settings
        self.routers = {-1: routing.Router(self, self.lock, self.quota, -1, **settings)}
        self.full: list[Any] = []
        self.refusals: list[tuple[str, int]] = []
        self.refused: Any = None

    def router(self, acks: int) -> Any:
        if acks not in self.routers:
            self.routers[acks] = self.routing.Router(self, self.lock, self.quota, acks, **self.settings)
        return self.routers[acks]

    def find(self, topic: str, partition: int) -> None:
        if topic != "orders" or partition >= PARTITIONS:
            raise UnknownPartition(f"{topic}-{partition}")
        for router in (router for router in self.routers.values() if topic not in router.topics):
            slots = [self.routing.PartitionSlot(topic, nth) for nth in range(PARTITIONS)]
            router.topics[topic] = self.routing.TopicSlots(topic, slots)

    def roll_batch(self, slot: Any, batch: Any) -> None:
        with self.lock:
            if slot.batch is not batch:
                return
            if batch is not None:
                self.full.append(batch)
            sent = self.building.SentBatch(slot.topic, slot.partition, self)
            slot.batch = self.building.OpenBatch(sent, 0, self.room)
            slots = self.router(-1).topics[slot.topic]
            if batch is not None and slots.sticky is slot:
                slots.sticky = slots.slots[(slot.partition + 1) % PARTITIONS]

    def when_full(self, topic: str, needed_bytes: int) -> Any:
        self.refusals.append((topic, needed_bytes))
        if self.refused is not None:
            return self.refused
        with self.lock:
            for batch in self.all_batches():
                self.quota.give_back(batch)
            self.full.clear()
            for slot in self.router(-1).topics[topic].slots:
                slot.batch = None
        return None

    def all_batches(self) -> list[Any]:
        slots = [slot for router in self.routers.values() for slot in router.topics["orders"].slots]
        return self.full + [slot.batch for slot in slots if slot.batch is not None]


@pytest.fixture
def sender(routing: ModuleType, building: ModuleType) -> Sender:
    return Sender(routing, building)


@proves("G17")
def test_a_key_goes_to_the_partition_that_every_client_gives_it(sender: Sender) -> None:
    send = sender.router(-1).send_async
    keys = [b"", b"k", b"\xff\x80\x7f", *(f"key-{nth}".encode() for nth in range(1000))]
    for key in keys:
        assert send("orders", b"v", key=key).sent.partition == partition_for_key(key, PARTITIONS)
    assert all(batch.pinned for batch in sender.all_batches())


@proves("G17")
def test_a_named_partition_goes_before_the_key_and_must_be_there(sender: Sender) -> None:
    send = sender.router(-1).send_async
    assert send("orders", b"v", key=b"key-1", partition=2).sent.partition == 2
    with pytest.raises(UnknownPartition):
        send("orders", b"v", partition=PARTITIONS)
    with pytest.raises(InvalidRecord, match="-1"):
        send("orders", b"v", partition=-1)
    with pytest.raises(UnknownPartition):
        send("other", b"v")


@pytest.mark.parametrize("fields", [{}, {"key": b"k"}, {"partition": 0}])
def test_a_topic_that_lost_its_partitions_is_looked_for_again(sender: Sender, fields: dict[str, Any]) -> None:
    router = sender.router(-1)
    router.send_async("orders", b"v")
    del router.topics["orders"].slots[:]
    asked: list[tuple[str, int]] = []

    def find(topic: str, partition: int) -> None:
        asked.append((topic, partition))
        raise UnknownPartition(topic)

    sender.find = find  # type: ignore[method-assign]
    with pytest.raises(UnknownPartition):
        router.send_async("orders", b"v", **fields)
    assert asked == [("orders", fields.get("partition", -1))]


@pytest.mark.parametrize("fields", [{"timestamp_ms": 2**70}, {"partition": 2**70}], ids=str)
def test_numbers_that_no_record_can_have_are_refused(sender: Sender, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRecord, match=r"timestamp_ms|partition"):
        sender.router(-1).send_async("orders", b"v", **fields)


@proves("G17")
def test_records_without_a_key_fill_one_batch_after_the_other(sender: Sender) -> None:
    send = sender.router(-1).send_async
    partitions = [send("orders", bytes(100)).sent.partition for _ in range(100)]
    runs = [partition for nth, partition in enumerate(partitions) if nth == 0 or partitions[nth - 1] != partition]
    assert runs == [nth % PARTITIONS for nth in range(len(runs))]
    assert len(runs) == 6
    assert not any(batch.pinned for batch in sender.all_batches())


def test_a_record_is_in_its_batch_as_it_was_sent(sender: Sender) -> None:
    send = sender.router(-1).send_async
    headers = [("trace", b"1"), ("none", None)]
    first = send("orders", b"v", key=b"k", headers=headers, partition=1, timestamp_ms=NOW_MS)
    second = send("orders", None, partition=1, timestamp_ms=NOW_MS + 3)
    third = send("orders", bytearray(b"w"), key=memoryview(b"l"), partition=1)
    batch = first.sent and sender.router(-1).topics["orders"].slots[1].batch
    found = kernel.records(batch.seal())
    assert [tuple(record) for record in found[:2]] == [
        (0, NOW_MS, b"k", b"v", headers),
        (1, NOW_MS + 3, None, None, []),
    ]
    assert found[2][2:4] == (b"l", b"w")
    assert (first.place, second.place, third.place) == (0, 1, 2)
    assert found[2].timestamp_ms == third.timestamp_ms > NOW_MS


def test_only_bytes_and_text_are_sent_unless_there_is_an_encoder(
    sender: Sender, routing: ModuleType, building: ModuleType
) -> None:
    with pytest.raises(TypeError, match="value is bytes, str or None, not dict: give the producer an encoder"):
        sender.router(-1).send_async("orders", {"a": 1})
    with pytest.raises(TypeError, match="key is bytes"):
        sender.router(-1).send_async("orders", b"v", key=5)
    encoding = Sender(routing, building, encoder=lambda value: repr(value).encode())
    delivery = encoding.router(-1).send_async("orders", {"a": 1}, partition=0)
    batch = encoding.router(-1).topics["orders"].slots[0].batch
    assert kernel.records(batch.seal())[delivery.place].value == b"{'a': 1}"


def test_a_record_above_the_limit_is_refused_before_it_is_queued(routing: ModuleType, building: ModuleType) -> None:
    sender = Sender(routing, building, max_record_bytes=1000)
    with pytest.raises(BatchTooLarge, match="max_record_bytes"):
        sender.router(-1).send_async("orders", bytes(1000))
    assert (sender.quota.bytes, sender.quota.records) == (0, 0)
    sender.router(-1).send_async("orders", bytes(900))
    assert sender.quota.records == 1


@pytest.mark.parametrize("limit", [{"max_records": 5}, {"max_bytes": 600}])
@proves("R6")
def test_what_waits_is_bounded_by_records_and_by_bytes(
    routing: ModuleType, building: ModuleType, limit: dict[str, int]
) -> None:
    sender = Sender(routing, building, **limit)
    send = sender.router(-1).send_async
    for _ in range(5):
        send("orders", bytes(100))
    assert sender.quota.records == 5
    assert sender.quota.bytes == sum(batch.record_bytes for batch in sender.all_batches())
    assert sender.refusals == []
    send("orders", bytes(100))
    assert sender.refusals == [("orders", 132)]
    assert sender.quota.records == 1
    for _ in range(4):
        send("orders", bytes(100))
    dropped = building.Delivery(building.SentBatch("orders", -1, sender), 0, 0)
    dropped.sent.fail(HeadraceError("queue is full"))
    sender.refused = dropped
    heard: list[Any] = []
    assert send("orders", bytes(100), callback=heard.append) is dropped
    assert heard == [dropped]
    assert sender.quota.records == 5


def test_one_record_larger_than_the_whole_quota_goes_through_alone(routing: ModuleType, building: ModuleType) -> None:
    sender = Sender(routing, building, max_bytes=100)
    assert sender.router(-1).send_async("orders", bytes(500)).place == 0


def test_other_acks_take_another_way(sender: Sender) -> None:
    sender.router(-1).send_async("orders", b"v", partition=0)
    sender.router(-1).send_async("orders", b"w", partition=0, acks=1)
    kept = [sender.router(acks).topics["orders"].slots[0].batch for acks in (-1, 1)]
    assert [kernel.records(batch.seal())[0].value for batch in kept] == [b"v", b"w"]
    assert sender.quota.records == 2


def test_nothing_is_sent_once_closed(sender: Sender) -> None:
    sender.router(-1).closed = HeadraceError("the producer is closed")
    with pytest.raises(HeadraceError, match="closed"):
        sender.router(-1).send_async("orders", b"v")


def test_a_callback_hears_of_its_record(sender: Sender) -> None:
    heard: list[Any] = []
    delivery = sender.router(-1).send_async("orders", b"v", callback=heard.append)
    assert delivery.sent.finish(3)
    delivery.sent.run_callbacks()
    assert heard == [delivery]


@proves("R6")
def test_threads_that_send_at_once_lose_and_double_nothing(sender: Sender) -> None:
    """Four threads send while a fifth takes open batches away: every delivery points at its own record."""
    threads, each = 4, 1500
    deliveries: list[list[Any]] = [[] for _ in range(threads)]
    ready = threading.Barrier(threads + 1)
    over = threading.Event()

    def send(nth: int) -> None:
        ready.wait(10)
        for count in range(each):
            key = b"%d" % count if count % 3 else None
            deliveries[nth].append(sender.router(-1).send_async("orders", b"%d:%d" % (nth, count), key=key))

    def take() -> None:
        ready.wait(10)
        while not over.is_set():
            for slot in sender.router(-1).topics["orders"].slots:
                if slot.batch is not None and slot.batch.count:
                    sender.roll_batch(slot, slot.batch)

    sender.find("orders", -1)
    workers = [threading.Thread(target=send, args=(nth,)) for nth in range(threads)]
    taker = threading.Thread(target=take)
    for thread in (*workers, taker):
        thread.start()
    for thread in workers:
        thread.join(30)
    over.set()
    taker.join(30)

    values: dict[Any, list[bytes | None]] = {}
    for batch in sender.all_batches():
        if batch.count:
            values[id(batch.sent)] = [record.value for record in kernel.records(batch.seal())]
    for nth in range(threads):
        for count, delivery in enumerate(deliveries[nth]):
            assert values[id(delivery.sent)][delivery.place] == b"%d:%d" % (nth, count)
    sent = Counter(value for batch in values.values() for value in batch)
    assert len(sent) == threads * each
    assert set(sent.values()) == {1}
    assert sender.quota.records == threads * each
