"""What a coordinator appends becomes one batch of its topic, and is looked at no more often than it must be."""

from __future__ import annotations

import pytest
from crc32c import crc32c

from chosen_layout import new_store
from headrace.cluster.names import OFFSETS_TOPIC
from headrace.coordinators.record_fields import Record
from headrace.coordinators.state_log import BYTES_PER_BATCH, RECORDS_PER_BATCH, AppendDone, StateLog, in_batches
from headrace.errors import BatchTooLarge, ErrorCode
from headrace.partitions import partition as partition_module
from headrace.partitions.partitions import Partitions
from headrace.records import batch, kernel
from headrace.settings.values import log_settings
from headrace.storage.log import TopicPartition
from headrace.virtual.clock import VirtualClock
from headrace.virtual.disk import VirtualDisk

BROKER, EPOCH = 1, 3
ONE: list[Record] = [(b"key", b"value")]


class Scene:
    """A broker that leads the one partition of the offsets topic."""

    def __init__(self, settings: dict[str, str]) -> None:
        self.clock = VirtualClock()
        disk = VirtualDisk(self.clock)
        disk.make_folder("/data")
        store = new_store(disk, self.clock, "/data")
        store.open({})
        self.log = store.create(TopicPartition(OFFSETS_TOPIC, 0), bytes(16), log_settings({}, settings))
        self.partitions = Partitions(store, self.clock, BROKER, "a")
        self.partitions.lead(self.log, EPOCH, {BROKER: "a"}, (BROKER,), revision=1)

    def append(self, records: list[Record], epoch: int = EPOCH) -> list[int]:
        heard: list[int] = []
        StateLog(self.partitions, OFFSETS_TOPIC).append(0, epoch, records, heard.append)
        self.clock.run_soon()
        return heard

    def stored(self) -> list[bytes]:
        return [bytes(piece.read()) for _, piece in self.log.headers(0)]


def test_a_batch_is_signed_once_and_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene({"cleanup.policy": "compact", "message.timestamp.before.max.ms": "1000"})
    signed: list[int] = []

    def counted(data: memoryview) -> int:
        signed.append(len(data))
        return int(crc32c(data))

    with monkeypatch.context() as patched:
        for module in (kernel, batch):
            patched.setattr(module, "crc32c", counted)
        patched.setattr(batch, "_unpack", lambda *_: pytest.fail("the header is known"))
        patched.setattr(partition_module, "check_records", lambda *_: pytest.fail("the records are known"))
        assert scene.append([*ONE, (b"other", None)]) == [ErrorCode.NONE]
    (stored,) = scene.stored()
    assert signed == [len(stored) - batch.ATTRIBUTES_AT]
    assert batch.check(stored).leader_epoch == EPOCH
    assert [(record.key, record.value) for record in kernel.records(stored)] == [*ONE, (b"other", None)]


def test_a_batch_that_is_too_large_is_refused() -> None:
    scene = Scene({"max.message.bytes": "100"})
    assert scene.append([(b"key", bytes(100))]) == [BatchTooLarge.mapping.kafka_code]
    assert scene.append(ONE) == [ErrorCode.NONE]


def test_records_bear_the_time_of_the_append_where_the_topic_says_so() -> None:
    scene = Scene({"message.timestamp.type": "LogAppendTime"})
    scene.append(ONE)
    (stored,) = scene.stored()
    assert batch.check(stored).append_time


def test_state_of_another_epoch_append_nothing() -> None:
    scene = Scene({})
    assert scene.append(ONE, EPOCH - 1) == [ErrorCode.NOT_COORDINATOR]
    assert scene.stored() == []


def test_a_batch_has_so_many_records_and_no_more() -> None:
    records: list[Record] = [(b"%d" % n, None) for n in range(2 * RECORDS_PER_BATCH + 1)]
    parts = list(in_batches(records))
    assert [len(part) for part in parts] == [RECORDS_PER_BATCH, RECORDS_PER_BATCH, 1]
    assert [record for part in parts for record in part] == records
    assert list(in_batches([])) == []


def test_a_batch_has_so_many_bytes_and_no_more_unless_one_record_is_larger() -> None:
    half = bytes(BYTES_PER_BATCH // 2 - 1)
    records: list[Record] = [(b"k", half), (b"k", half), (b"k", b""), (b"k", bytes(2 * BYTES_PER_BATCH)), (b"k", None)]
    assert [len(part) for part in in_batches(records)] == [2, 1, 1, 1]
    assert [len(part) for part in in_batches(records[3:])] == [1, 1]


@pytest.mark.parametrize("failed", [None, 0, 1, 2])
def test_all_batches_have_one_answer_the_first_error_if_there_was_one(
    failed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[AppendDone] = []
    heard: list[int] = []
    scene = Scene({})
    log = StateLog(scene.partitions, OFFSETS_TOPIC)
    monkeypatch.setattr(log, "_append", lambda _index, _epoch, _records, done: waiting.append(done))
    log.append(0, EPOCH, [(b"k", None)] * (2 * RECORDS_PER_BATCH + 1), heard.append)
    assert len(waiting) == 3
    for nth, done in enumerate(waiting):
        assert heard == []
        done(ErrorCode.KAFKA_STORAGE_ERROR if nth == failed else ErrorCode.NONE)
    assert heard == [ErrorCode.NONE if failed is None else ErrorCode.KAFKA_STORAGE_ERROR]


def test_what_does_not_fit_one_batch_is_stored_in_several() -> None:
    scene = Scene({})
    records: list[Record] = [(b"%d" % n, b"v") for n in range(RECORDS_PER_BATCH + 1)]
    assert scene.append(records) == [ErrorCode.NONE]
    assert [batch.check(stored).record_count for stored in scene.stored()] == [RECORDS_PER_BATCH, 1]
