"""A batch's CRC does not cover its epoch. One that changed on disk is damage of that batch, and no epoch of the log."""

from __future__ import annotations

import pytest

from headrace.errors import CorruptBatch
from headrace.records.batch import batches
from headrace.storage.checkpoint import seal
from headrace.storage.commitlog.frames import EPOCH, FRAME_BYTES
from headrace.storage.commitlog.log import SharedLog
from headrace.storage.folder import PARTITIONED, SHARED
from headrace.storage.log import Log, Tail, TopicPartition
from headrace.virtual.disk import VirtualDisk
from proving import proves
from storage.harness import Harness, append, batch, content, sim_harness
from storage.test_compaction import COMPACTED, compact
from storage.test_rewriting import rest, store_of

LAYOUTS = pytest.mark.parametrize("layout", [PARTITIONED, SHARED])
EPOCH_AT = 12
BATCHES = 8
STARTS = [(2, 0), (3, 4)]


def filled(layout: str, batches_a_write: int) -> tuple[Harness, Log]:
    """Nothing of it is in a checkpoint."""
    sim = sim_harness(layout)
    sim.file_bytes = 1 << 20
    log = sim.log(durability="disk")
    for n in range(BATCHES):
        append(log, batch(b"%d" % n), epoch=2 if n < 4 else 3)
        if (n + 1) % batches_a_write == 0:
            assert not sim.write()
            sim.settle()
    assert log.durable_offset == BATCHES
    return sim, log


def flip_epoch(sim: Harness, log: Log, offset: int, byte: int, mask: int) -> None:
    piece = log.read(offset, 1, log.written_offset, warm=True).slices[0]
    assert isinstance(sim.disk, VirtualDisk)
    sim.disk.flip(piece.file.path, piece.position + EPOCH_AT + byte, mask)


def open_again(sim: Harness, same_boot: bool) -> Log:
    assert sim.store is not None
    sim.store.abandon()
    sim.store = sim.new_store()
    sim.store.open(sim.expected, same_boot=same_boot)
    sim.commit()
    return sim.log()


def sound_offsets(log: Log) -> list[int]:
    found = []
    for offset in range(log.start_offset, log.end_offset):
        try:
            piece = log.read(offset, 1, log.written_offset, warm=True)
        except CorruptBatch:
            continue
        found += [header.base_offset for header, _ in batches(memoryview(content(piece)))]
    return sorted(set(found))


@proves("J6")
@LAYOUTS
@pytest.mark.parametrize("batches_a_write", [1, 4, 8])
@pytest.mark.parametrize(
    ("byte", "mask"), [(1, 4), (3, 1), (0, 0x80)], ids=["far above", "the other epoch", "negative"]
)
@pytest.mark.parametrize("offset", [0, 2, 4, BATCHES - 1])
@pytest.mark.parametrize("same_boot", [True, False], ids=["killed", "after a loss of power"])
def test_a_wrong_epoch_is_damage_of_its_own_batch(
    layout: str, batches_a_write: int, byte: int, mask: int, offset: int, same_boot: bool
) -> None:
    sim, log = filled(layout, batches_a_write)
    flip_epoch(sim, log, offset, byte, mask)
    log = open_again(sim, same_boot)
    assert [entry for entry in STARTS if entry[1] < offset] == [
        entry for entry in log.epoch_starts() if entry[1] < offset
    ]
    assert log.last_epoch() <= 3
    others = [n for n in range(BATCHES) if n != offset]
    if layout == PARTITIONED and not same_boot:  # above the recovery point it looks like a torn write
        others = others[:offset]
        assert (log.end_offset, log.tail) == (offset, Tail.HOLED if offset < BATCHES - 1 else Tail.TORN)
    assert sound_offsets(log) == others
    log = open_again(sim, same_boot)
    assert (log.last_epoch() <= 3, sound_offsets(log)) == (True, others)


@LAYOUTS
@pytest.mark.parametrize("number", range(20))
def test_epochs_that_a_loss_of_power_took_from_their_file_are_in_the_log(layout: str, number: int) -> None:
    sim, _ = filled(layout, 1)
    log = sim.kill(number)
    assert (sound_offsets(log), log.epoch_starts()) == (list(range(BATCHES)), STARTS)


def remove(sim: Harness, *endings: str) -> None:
    folder = "/data/orders/orders-0"
    for name in sim.disk.list(folder):
        if name.endswith(endings):
            sim.disk.remove(f"{folder}/{name}")


FAR_ABOVE = (1, 4)
LOSSES = pytest.mark.parametrize(
    "lost", [("leader-epochs",), (".queue",), ("leader-epochs", ".queue", ".snapshot")], ids=["epochs", "queue", "all"]
)


@proves("J6")
@LOSSES
@pytest.mark.parametrize("offset", [0, 5, BATCHES - 1])
@pytest.mark.parametrize("stopped", [False, True], ids=["killed", "stopped"])
def test_a_wrong_epoch_is_not_believed_where_all_but_the_commit_log_is_lost(
    lost: tuple[str, ...], offset: int, stopped: bool
) -> None:
    sim, log = filled(SHARED, 1)
    flip_epoch(sim, log, offset, *FAR_ABOVE)
    if stopped:
        assert sim.store is not None
        assert sim.store.close()
    remove(sim, *lost)
    log = open_again(sim, same_boot=False)
    assert log.last_epoch() == 3
    assert sound_offsets(log) == [n for n in range(BATCHES) if n != offset]


@proves("J6")
@pytest.mark.parametrize("offset", range(BATCHES, BATCHES + 3))
@pytest.mark.parametrize("epoch", [3, 4], ids=["the epoch of before", "a new epoch"])
def test_a_wrong_epoch_behind_a_checkpoint_is_not_believed_after_a_loss_of_power(offset: int, epoch: int) -> None:
    sim, log = filled(SHARED, 1)
    sim.advance(61)
    for n in range(BATCHES, BATCHES + 3):
        append(log, batch(b"%d" % n), epoch=epoch)
        assert not sim.write()
        sim.settle()
    flip_epoch(sim, log, offset, *FAR_ABOVE)
    assert isinstance(sim.disk, VirtualDisk)
    sim.disk.crash(offset)
    log = open_again(sim, same_boot=False)
    assert log.last_epoch() == epoch
    assert sound_offsets(log) == [n for n in range(BATCHES + 3) if n != offset]


@proves("J6")
@pytest.mark.parametrize("offset", [55, 59])
def test_a_wrong_epoch_in_a_file_behind_the_first_is_not_believed(offset: int) -> None:
    """Each file tells the last epoch again: what the removed ones told is not missed."""
    sim = sim_harness(SHARED)
    log = sim.log(durability="disk")
    for n in range(60):
        append(log, batch(b"%d" % n * 100), epoch=2 if n < 4 else 3)
        assert not sim.write()
        sim.settle()
    log.delete_before(55)
    sim.advance(61)
    assert f"{0:020d}.log" not in sim.disk.list("/data/@commitlog")
    flip_epoch(sim, log, offset, *FAR_ABOVE)
    remove(sim, "leader-epochs", ".queue")
    log = open_again(sim, same_boot=False)
    assert log.last_epoch() == 3
    assert sound_offsets(log) == [n for n in range(55, 60) if n != offset]


@proves("J6")
@pytest.mark.parametrize("lost", [(".queue",), (".queue", "leader-epochs")], ids=["queue", "epochs too"])
def test_a_wrong_epoch_of_a_batch_that_compaction_wrote_is_not_believed(lost: tuple[str, ...]) -> None:
    sim = sim_harness(SHARED)
    log = sim.log(**COMPACTED)
    for n in range(40):
        append(log, batch(b"%d" % n * 50, key=b"%d" % (n % 7)), epoch=2 if n < 20 else 3)
        assert not sim.write()
    compact(sim)
    left = [header.base_offset for header, _ in log.headers(0)]
    assert left[0] > 0
    sim.advance(61)
    flip_epoch(sim, log, left[0], *FAR_ABOVE)
    remove(sim, *lost)
    log = open_again(sim, same_boot=False)
    assert log.last_epoch() == 3
    assert sound_offsets(log) == left[1:]


@pytest.mark.parametrize("same_boot", [True, False])
def test_a_broken_frame_of_an_epoch_damages_no_batch(same_boot: bool) -> None:
    sim, log = filled(SHARED, 1)
    sim.advance(61)
    _, piece = next(log.headers(4))
    at = piece.position - 2 * FRAME_BYTES
    assert isinstance(sim.disk, VirtualDisk)
    assert sim.disk.open(piece.file.path).pread(4, at) == EPOCH
    sim.disk.flip(piece.file.path, at + 40)
    remove(sim, ".queue")
    log = open_again(sim, same_boot)
    assert (sound_offsets(log), log.epoch_starts()) == (list(range(BATCHES)), STARTS)


@pytest.mark.parametrize("same_boot", [True, False])
def test_a_folder_from_before_there_were_epoch_frames_is_read_as_it_is(
    same_boot: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        before.setattr(SharedLog, "_epochs_of_turn", lambda _: [])
        before.setattr(SharedLog, "_epoch_frames", lambda *_: [])
        before.setattr(
            "headrace.storage.commitlog.checkpoint.seal", lambda content: seal(content | {"epoch_frames": False})
        )
        sim, log = filled(SHARED, 1)
        sim.advance(61)
        for n in range(BATCHES, BATCHES + 3):
            append(log, batch(b"%d" % n), epoch=4)
            assert not sim.write()
            sim.settle()
        assert sim.store is not None
        sim.store.abandon()
    if not same_boot:
        remove(sim, "leader-epochs")
    for _ in range(2):
        log = open_again(sim, same_boot)
        assert sound_offsets(log) == list(range(BATCHES + 3))
        assert log.epoch_starts() == [*STARTS, (4, BATCHES)]


@pytest.mark.parametrize("lost", [(".queue",), (".queue", "leader-epochs")], ids=["queue", "epochs too"])
@pytest.mark.parametrize("same_boot", [True, False])
def test_epochs_that_a_removed_file_told_are_believed_of_what_was_moved_from_it(
    lost: tuple[str, ...], same_boot: bool
) -> None:
    """The files before it and behind it are there, and tell of other epochs."""
    sim = sim_harness(SHARED)
    kept = sim.log(durability="disk", retention_ms=-1, file_delete_delay_ms=0)
    passing = sim.log(TopicPartition("passing", 0), durability="disk", file_delete_delay_ms=0)
    commit_log = store_of(sim).commit_log

    def fill(log: Log, epoch: int, file: int) -> None:
        while commit_log.number == file:
            append(log, batch(b"." * 500), epoch=epoch)
            assert not sim.write()
            sim.settle()

    fill(kept, 2, 0)
    for epoch in (3, 4):
        append(kept, batch(b"%d" % epoch), epoch=epoch)
        assert not sim.write()
        sim.settle()
    starts = list(kept.epoch_starts())
    fill(passing, 0, 1)
    fill(kept, 4, 2)
    assert [epoch for epoch, _ in starts] == [2, 3, 4]
    passing.delete_before(passing.written_offset)
    for _ in range(10):
        sim.advance(61)
        rest(sim)
    assert sorted(commit_log.sizes)[:2] == [0, 2]
    remove(sim, *lost)
    log = open_again(sim, same_boot)
    assert sound_offsets(log) == list(range(log.end_offset))
    assert log.epoch_starts() == starts


def test_an_epoch_that_broken_bytes_told_is_believed_of_what_compaction_wrote() -> None:
    sim = sim_harness(SHARED)
    log = sim.log(**COMPACTED)
    for n in range(40):
        epoch = 2 if n < 20 else 3 if n == 20 else 4
        append(log, batch(*[b"%d" % n * 50] * 2, key=b"%d" % min(n, 30)), epoch=epoch)  # one of the two will go
        assert not sim.write()
        if n == 20:
            _, piece = next(log.headers(40))
    starts = list(log.epoch_starts())
    compact(sim)
    left = [header.base_offset for header, _ in log.headers(0)]
    assert 40 in left
    assert isinstance(sim.disk, VirtualDisk)
    for at in (piece.position - 2 * FRAME_BYTES, piece.position - FRAME_BYTES):
        sim.disk.flip(piece.file.path, at)
    assert piece.file.path in [f"/data/@commitlog/{each}" for each in sim.disk.list("/data/@commitlog")]
    remove(sim, ".queue")
    log = open_again(sim, same_boot=False)
    assert (sound_offsets(log), log.epoch_starts()) == (left, starts)


@pytest.mark.parametrize("lost", [(".queue",), (".queue", "leader-epochs")], ids=["queue", "epochs too"])
def test_epochs_that_were_cut_stay_away_though_the_file_that_told_it_is_removed(lost: tuple[str, ...]) -> None:
    sim = sim_harness(SHARED)
    log = sim.log(durability="disk", retention_ms=-1, file_delete_delay_ms=0)
    other, passing = (
        sim.log(TopicPartition(name, 0), durability="disk", file_delete_delay_ms=0) for name in ("other", "passing")
    )
    commit_log = store_of(sim).commit_log

    def write(to: Log, value: bytes, epoch: int) -> None:
        append(to, batch(value), epoch=epoch)
        assert not sim.write()
        sim.settle()

    for epoch in (2, 3, 4):
        write(log, b"%d" % epoch, epoch)
    while commit_log.number == 0:
        write(other, b"." * 500, 0)
    log.truncate(1)
    sim.commit()
    for epoch in (6, 6, 6, 7):
        write(log, b"%d" % epoch, epoch)
    while commit_log.number == 1:
        write(passing, b"." * 500, 0)
    passing.delete_before(passing.written_offset)
    for _ in range(10):
        sim.advance(61)
        rest(sim)
    assert sorted(commit_log.sizes)[:2] == [0, 2]
    remove(sim, *lost)
    log = open_again(sim, same_boot=False)
    assert (sound_offsets(log), log.epoch_starts()) == ([0, 1, 2, 3, 4], [(2, 0), (6, 1), (7, 4)])
