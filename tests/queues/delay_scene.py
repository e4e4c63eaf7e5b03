"""Delayed records of one partition, on a virtual clock that can be set, a store in memory and a follower that has
what the test says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from chosen_layout import chosen_layout
from headrace.errors import HeadraceError
from headrace.partitions.partition import Partition
from headrace.partitions.partitions import Partitions
from headrace.queues.delays import Delays
from headrace.records import delayed, kernel
from headrace.records.batch import BatchHeader
from headrace.records.record import NewRecord, Record
from headrace.settings.values import log_settings
from headrace.storage.commitlog.store import SharedStore
from headrace.storage.folder import SHARED
from headrace.storage.log import Log, TopicPartition
from headrace.storage.segments.store import PartitionedStore
from headrace.virtual.clock import VirtualClock
from headrace.virtual.disk import VirtualDisk
from partitions.led import BROKER, DATA, Outcome, topic_id

FOLLOWER = 2
TOPIC = "reminders"
TICK_SECONDS = 0.1
AT, AFTER = delayed.DELIVER_AT, delayed.DELIVER_AFTER


class SteppedClock(VirtualClock):
    """Its wall time can be set back and forth."""

    stepped_ms = 0

    def wall_ms(self) -> int:
        return super().wall_ms() + self.stepped_ms


def record(value: bytes, **headers: int | bytes | str) -> NewRecord:
    """Headers by `at` and `after`, others by their names."""
    names = {"at": AT, "after": AFTER}
    given = [
        (names.get(name, name), text if isinstance(text, bytes) else str(text).encode())
        for name, text in headers.items()
    ]
    return 1_700_000_000_000, b"key of " + value, value, given


class DelayScene:
    """`replicas` 2: what is written counts when the test says that the follower has it (`follow`)."""

    def __init__(self, layout: str = "", replicas: int = 1, **overrides: object) -> None:
        self.layout = layout
        self.clock = SteppedClock()
        self.disk = VirtualDisk(self.clock)
        self.disk.make_folder(DATA)
        self.isr = {BROKER: ""} | ({FOLLOWER: "run"} if replicas > 1 else {})
        given = {"headrace.delay.enable": "true", **{name.replace("_", "."): str(v) for name, v in overrides.items()}}
        self.settings = log_settings({}, given)
        self.epoch = 0
        self.open()

    def open(self, watermark: int = 0) -> None:
        """A broker on what the disk has."""
        kind = SharedStore if (self.layout or chosen_layout()) == SHARED else PartitionedStore
        self.store = kind(self.disk, self.clock, DATA, retention_check_ms=100)
        where = TopicPartition(TOPIC, 0)
        is_there = self.disk.exists(f"{DATA}/{TOPIC}")
        self.store.open({where: (topic_id(TOPIC), self.settings)} if is_there else {})
        log = self.store.get(where) or self.store.create(where, topic_id(TOPIC), self.settings)
        kept = {(topic_id(TOPIC), 0): watermark}
        self.partitions = Partitions(self.store, self.clock, BROKER, watermarks=kept)
        self.partition = self.lead_log(log)
        self.delays = Delays(self.partitions, self.disk, DATA)
        self.delays.follow()
        self.clock.run_soon()

    def lead_log(self, log: Log) -> Partition:
        self.epoch += 1
        partition = self.partitions.lead(log, self.epoch, self.isr, replicas=tuple(self.isr))
        if FOLLOWER in self.isr:
            assert partition.core is not None
            self.follower = partition.core.subscribed(FOLLOWER, "run", log.start_offset, self.clock.now())
        return partition

    def kill(self, *, clean: bool = False) -> None:
        """The process ends; with `clean` it could write what it has in memory."""
        if clean:
            self.delays.close()
        else:
            for each in list(self.delays._delayed.values()):
                each.close(save=False)
            self.delays._delayed.clear()
        assert self.store.close()
        self.open(self.partition.high_watermark)

    def lead_again(self, cut_to: int | None = None) -> None:
        """Another has led meanwhile, who had the log up to this offset."""
        log = self.partition.log
        self.epoch += 1
        self.partitions.follow(log, self.epoch, FOLLOWER)
        if cut_to is not None and cut_to < log.end_offset:
            log.truncate(cut_to)
            followed = self.partitions.find_replica(TOPIC, 0)
            assert followed is not None
            followed.truncated()
        self.partition = self.lead_log(log)
        self.delays.follow()
        self.clock.run_soon()

    def follow(self, offset: int | None = None) -> None:
        """The follower has everything below this offset."""
        core = self.partition.core
        assert core is not None
        end = self.partition.log.written_offset if offset is None else offset
        log = self.partition.log
        core.position_reported(self.follower, end, end, end, log.end_offset, self.clock.now(), core.wanted_start)
        self.partitions.settle(self.partition)
        self.clock.run_soon()

    def produce(
        self,
        *records: NewRecord,
        codec: int = 0,
        producer: tuple[int, int, int] = (-1, -1, -1),
        acks: int = -1,
        attributes: int = 0,
    ) -> Outcome:
        producer_id, epoch, sequence = producer
        batch = kernel.build(
            records, codec, producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence, attributes=attributes
        )
        outcome = Outcome()
        self.partitions.submit(self.partition, batch, acks, 1000, outcome)
        self.partitions.end_turn()
        self.clock.run_soon()
        return outcome

    def recall(self, handle: int) -> list[HeadraceError | None]:
        heard: list[HeadraceError | None] = []
        try:
            self.delays.recall(self.partition, handle, heard.append)
        except HeadraceError as error:
            heard.append(error)
        self.clock.run_soon()
        return heard

    def advance(self, seconds: float) -> None:
        """In ticks."""
        left = seconds
        while left > 0:
            self.clock.advance(min(left, TICK_SECONDS))
            left -= TICK_SECONDS
            self.delays.tick()
            self.clock.run_soon()

    @property
    def now_ms(self) -> int:
        return self.clock.wall_ms()

    # What the log has.

    def batches(self) -> list[tuple[BatchHeader, bytes]]:
        log = self.partition.log
        return [(header, place.read()) for header, place in log.headers(log.start_offset)]

    def seen(self) -> list[Record]:
        """What a consumer sees."""
        return [
            record
            for header, view in self.batches()
            if not header.is_control
            for record in kernel.records(view)
            if record.offset < self.partition.high_watermark
        ]

    def values(self) -> list[bytes | None]:
        return [each.value for each in self.seen()]

    def deliveries(self) -> Counter[int]:
        """How often each handle was delivered."""
        return Counter(int(headers_of(each).get(delayed.DELAYED_OFFSET) or -1) for each in self.seen())


def headers_of(found: Record) -> dict[str, bytes | None]:
    return dict(found.headers)


def in_order(values: Sequence[bytes | None]) -> list[bytes | None]:
    return sorted(values, key=lambda value: value or b"")
