"""Giving a data folder the other layout, offline.

    <data>/@convert/journal     sealed like a checkpoint: how far it is, of which checkpoint, and what is to be moved
    <data>/@convert/new/        the folder in its new layout, while it is built
    <data>/@convert/old/        what it replaces, once that is decided
    <data>/@kept-<layout>-<k>/  the same, for who wants to keep it

The new form is built beside the old one, which is not touched; then it is verified, and compared with the old one byte
for byte. From the journal's state `swap` on, everything is moved by renames, first the old form away, then the new one
to its place; the folders of the first are synced before the second begins, and those of the second before the file
`layout` says so. Who runs this again goes on where a kill or a loss of power interrupted it: what has arrived stays,
and all folders are synced, whoever moved something there. That needs a file system which loses no name to a rename
between two folders: ext4 with its journal, XFS and Btrfs are such; POSIX does not promise it. While things are moved,
`layout` names neither layout, so no broker starts. A folder that was not stopped cleanly is first recovered, as a
broker's start does it. Key indexes are not taken along: a broker builds them anew.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from crc32c import crc32c

from headrace.errors import DataFolderError
from headrace.ports.clock import Clock
from headrace.ports.disk import Disk, File, read_whole, write_atomically
from headrace.settings.values import LogSettings, log_settings
from headrace.storage import checkpoint, folder, rewritten, shortfall, watermarks
from headrace.storage.commitlog.commitlog import FILE_BYTES
from headrace.storage.commitlog.commitlog import FOLDER as COMMIT_LOG
from headrace.storage.commitlog.store import SharedStore
from headrace.storage.log import LogStore
from headrace.storage.offline import builders, content, verify
from headrace.storage.offline.content import Content
from headrace.storage.offline.report import PartitionReport, Problem
from headrace.storage.segments.store import PartitionedStore
from headrace.storage.shortfall import Held
from headrace.storage.watermarks import Key

FOLDER: Final = "@convert"
KEPT: Final = "@kept-"
BUILD: Final = "build"
SWAP: Final = "swap"
SWAPPED: Final = "swapped"
VERSION: Final = 1
PROBLEMS_SHOWN_MAX: Final = 3
NAMED_MAX: Final = 10
ROOM_SHARE: Final = 1.01
ROOM_PER_PARTITION_BYTES: Final = 1 << 15
ROOM_BYTES: Final = 1 << 20

Tell = Callable[[str, int, int], None]
"""A step, and how many bytes of how many are done."""


@dataclass(frozen=True, slots=True)
class Summary:
    data: str
    source: str
    target: str
    partitions: int
    records: int
    size_bytes: int
    seconds: float
    was_clean: bool
    resumed: bool
    dry_run: bool
    kept: str | None
    set_aside: tuple[str, ...]


@dataclass(slots=True)
class _Journal:
    state: str
    source: str
    target: str
    checkpoint: int
    keep: bool
    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class ConversionOptions:
    target: str
    keep: bool = False
    dry_run: bool = False
    commit_file_bytes: int = FILE_BYTES
    settings: Callable[[str], LogSettings] = lambda _: log_settings({}, {})
    """Of a topic, for the size of its segments and the distance of index entries."""


class Conversion:
    """One run. It holds the folder's lock, except while a recovery does."""

    def __init__(self, disk: Disk, clock: Clock, data: str, options: ConversionOptions, tell: Tell) -> None:
        self._disk = disk
        self._clock = clock
        self._data = data
        self._options = options
        self._tell = tell
        self._at = f"{data}/{FOLDER}"
        self._new = f"{self._at}/new"
        self._old = f"{self._at}/old"
        self._began = time.monotonic()
        self._reports: list[PartitionReport] = []
        self._was_clean = True

    def run(self) -> Summary:
        if self._options.dry_run:
            return self._dry_run()
        try:
            return self._run()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise DataFolderError(
                f"{error.filename or self._data}: {error.strerror}: free some room and run this again, it goes on "
                f"where it stopped; or remove {self._at} to give up"
            ) from error

    def _run(self) -> Summary:
        lock = self._lock()
        try:
            journal = self._read_journal()
            if journal is not None and journal.state != BUILD:
                return self._finish(journal, resumed=True)
            source = verify.layout_of(self._disk, self._data)
            if source == self._options.target:
                raise DataFolderError(f"data folder {self._data} has the layout {source!r} already")
            if not content.is_clean(self._disk, self._data):
                lock.close()
                self._recover(source)
                lock = self._lock()
            self._check(source)
            resumed = journal is not None
            journal = self._begin(journal, source)
            self._build(source, fresh=not resumed)
            return self._finish(journal, resumed=resumed)
        finally:
            lock.close()

    def _lock(self) -> File:
        return folder.lock(self._disk, self._data, folder.layout_of(self._disk, self._data))

    # The old form.

    def _dry_run(self) -> Summary:
        holder = folder.holder(self._disk, self._data)
        if holder is not None:
            raise DataFolderError(f"data folder {self._data} is in use by the broker with process id {holder}: stop it")
        source = verify.layout_of(self._disk, self._data)
        if source == self._options.target:
            raise DataFolderError(f"data folder {self._data} has the layout {source!r} already")
        self._was_clean = content.is_clean(self._disk, self._data)
        self._check(source)
        return self._summary(source, resumed=self._read_journal() is not None, kept=None)

    def _recover(self, layout: str) -> None:
        """Open and close the folder as a broker does."""
        self._was_clean = False
        self._tell("recover", 0, 0)
        disk, clock, data = self._disk, self._clock, self._data
        store = SharedStore(disk, clock, data) if layout == folder.SHARED else PartitionedStore(disk, clock, data)
        try:
            expected: dict[Any, tuple[bytes, LogSettings]] = {}
            for where, path in folder.partitions(disk, data):
                topic_id = folder.read_topic_id(disk, path)
                if isinstance(topic_id, str):
                    raise DataFolderError(f"{path}: {topic_id}: start a broker on the folder, it sets that one aside")
                expected[where] = (topic_id, self._options.settings(where.topic))
            held, committed = shortfall.held(disk, data), watermarks.read(disk, data)
            store.open(expected, lambda: self._refuse_shortfall(store, held, committed))
            if not store.close():
                raise DataFolderError(f"{data} could not be stopped in order: the log says why; nothing was changed")
        except BaseException:
            store.abandon()
            raise

    def _refuse_shortfall(self, store: LogStore, held: Mapping[Key, Held] | None, committed: Mapping[Key, int]) -> None:
        """Only a broker can keep for its cluster that a log holds less than it did: nothing of that is forgotten
        here."""
        lost = shortfall.short(store.logs(), held, committed) | shortfall.doubtful(store.logs(), same_boot=True)
        names = [str(each.topic_partition) for each in store.logs() if shortfall.key_of(each) in lost]
        if names:
            raise DataFolderError(
                f"{self._data}: {', '.join(names[:NAMED_MAX])} may hold less than before the last broker died: start "
                "a broker on the folder, so that its cluster hears of it, stop it in order, and convert it then"
            )

    def _check(self, layout: str) -> None:
        """DataFolderError if the folder is not whole, or its disk has not enough room."""
        found = verify.inspect_folder(self._disk, self._data)
        self._set_aside = found.strays
        self._reports = self._verified(self._data, "check", list(found.problems) if self._was_clean else [])
        if self._options.target == folder.SHARED:
            self._refuse_one_id_for_two()
        wanted = sum(report.size_bytes for report in self._reports)
        wanted = int(wanted * ROOM_SHARE) + len(self._reports) * ROOM_PER_PARTITION_BYTES + ROOM_BYTES
        built = sum(self._disk.size(each) for _, files in _tree(self._disk, self._new) for each in files)
        free = self._disk.free_bytes(self._data)
        if free < wanted - built:
            raise DataFolderError(
                f"{self._data} has {free} bytes free, and the new form takes {wanted - built} more beside the old one: "
                "free some room first; nothing was changed"
            )

    def _refuse_one_id_for_two(self) -> None:
        """In a commit log topics are told apart by their ids alone."""
        topics: dict[bytes | None, str] = {}
        for report in self._reports:
            topic = topics.setdefault(report.topic_id, report.topic_partition.topic)
            if topic != report.topic_partition.topic:
                raise DataFolderError(
                    f"data folder {self._data}: both {topic} and {report.topic_partition.topic} have the topic id "
                    f"{report.topic_id.hex() if report.topic_id else None}: one of them is not this cluster's"
                )

    def _verified(self, data: str, step: str, problems: list[Problem]) -> list[PartitionReport]:
        """DataFolderError unless the folder is whole."""
        reports: list[PartitionReport] = []
        done = 0
        torn_is_right = self._options.dry_run and not self._was_clean
        for report in verify.reports(self._disk, data):
            problems += report.problems if not torn_is_right else ()
            done += report.size_bytes
            self._tell(step, done, 0)
            if isinstance(report, PartitionReport):
                reports.append(report)
        if problems:
            shown = "; ".join(map(str, problems[:PROBLEMS_SHOWN_MAX]))
            raise DataFolderError(
                f"data folder {data} is not whole, problems: {len(problems)}: {shown}; `headrace log verify` lists all"
            )
        return reports

    # The new form.

    def _read_journal(self) -> _Journal | None:
        path = f"{self._at}/journal"
        if not self._disk.exists(path):
            return None
        try:
            return _Journal(**checkpoint.unseal(read_whole(self._disk, path)))
        except (ValueError, TypeError) as error:
            raise DataFolderError(
                f"{path} is damaged ({error}): remove {self._at} if nothing was swapped yet"
            ) from None

    def _write_journal(self, journal: _Journal) -> None:
        write_atomically(self._disk, f"{self._at}/journal", checkpoint.seal(asdict(journal)))

    def _begin(self, journal: _Journal | None, source: str) -> _Journal:
        """Go on with what was built if it is of this very folder; else begin anew."""
        path = f"{self._data}/{checkpoint.FILE_NAME}"
        of = crc32c(read_whole(self._disk, path)) if self._disk.exists(path) else 0
        if journal is None or (journal.checkpoint, journal.target) != (of, self._options.target):
            self._clear()
        elif any(rewritten.is_noted(self._disk, path) for path, _ in _tree(self._disk, self._new)):
            self._clear()  # what is read there may be in the page cache alone
        journal = _Journal(BUILD, source, self._options.target, of, self._options.keep)
        self._disk.make_folder(self._new)
        self._write_journal(journal)
        return journal

    def _clear(self) -> None:
        if self._disk.exists(self._at):
            self._disk.remove_folder(self._at)
            self._disk.sync_folder(self._data)

    def _build(self, source: str, *, fresh: bool) -> None:
        contents = content.contents(self._disk, self._data, self._clock.wall_ms())
        total = sum(report.size_bytes for report in self._reports)
        try:
            self._build_once(contents, total)
            self._compare(contents, total)
            if not fresh:
                self._sync_built()
        except DataFolderError:
            if fresh:
                raise
            # What an earlier run left behind may have been lost with the power: once more from the beginning.
            self._disk.remove_folder(self._new)
            self._disk.make_folder(self._new)
            self._build_once(contents, total)
            self._compare(contents, total)

    def _build_once(self, contents: list[Content], total: int) -> None:
        done = _Counter("write", total, self._tell)
        options = self._options
        write_atomically(self._disk, f"{self._new}/{folder.LAYOUT_FILE}", options.target.encode() + b"\n")
        if options.target == folder.SHARED:
            size = options.commit_file_bytes
            builders.build_shared(self._disk, self._clock, self._new, contents, options.settings, size, done.add)
        else:
            builders.build_partitioned(self._disk, self._new, contents, options.settings, done.add)
        self._tell("written", total, total)

    def _sync_built(self) -> None:
        """An earlier run may have been killed between a write and its sync."""
        for path, files in _tree(self._disk, self._new):
            for each in files:
                file = self._disk.open(each)
                try:
                    file.sync()
                finally:
                    file.close()
            self._disk.sync_folder(path)

    def _compare(self, contents: list[Content], total: int) -> None:
        """DataFolderError unless the new form is whole and holds the same."""
        problems = list(verify.inspect_folder(self._disk, self._new).problems)
        self._verified(self._new, "recheck", problems)
        done = _Counter("compare", total, self._tell)
        found = {each.topic_partition: each for each in content.contents(self._disk, self._new, self._clock.wall_ms())}
        for old in contents:
            new = found.pop(old.topic_partition, None)
            if new is None:
                raise DataFolderError(f"{self._new} lacks {old.topic_partition}")
            wrong = list(content.differences(old, new))
            byte = content.compare_bytes(old, new, done.add)
            if byte is not None:
                wrong.append(f"batches differ from byte {byte} on")
            if wrong:
                raise DataFolderError(f"{self._new}: {old.topic_partition} is not the same: {'; '.join(wrong)}")
        if found:
            raise DataFolderError(f"{self._new} has {', '.join(map(str, found))}, which the old form has not")

    # From one to the other.

    def _finish(self, journal: _Journal, *, resumed: bool) -> Summary:
        disk = self._disk
        if journal.state == BUILD:
            journal.old, journal.new = _items(disk, self._data), _items(disk, self._new)
            journal.state = SWAP
            self._write_journal(journal)
        if journal.state == SWAP:
            self._swap(journal)
            journal.state = SWAPPED
            self._write_journal(journal)
        kept = self._keep(journal.source) if journal.keep else None
        self._tell("remove", 0, 0)
        self._clear()
        return self._summary(journal.source, resumed=resumed, kept=kept, target=journal.target)

    def _swap(self, journal: _Journal) -> None:
        layout = f"{self._data}/{folder.LAYOUT_FILE}"
        write_atomically(self._disk, layout, f"between {journal.source} and {journal.target}\n".encode())
        self._tell("swap", 0, 0)
        self._move(journal.old, self._data, self._old)
        self._tell("swap", 1, 0)
        self._move(journal.new, self._new, self._data)
        self._tell("swap", 2, 0)
        write_atomically(self._disk, layout, journal.target.encode() + b"\n")
        self._tell("swapped", 0, 0)

    def _move(self, items: list[str], source: str, target: str) -> None:
        """Move what has not arrived yet, and make it last. In the place of the new form there may still be an old
        checkpoint, if a crash left that in both folders: it is replaced."""
        disk = self._disk
        for item in items:
            arrived = disk.exists(f"{target}/{item}")
            if disk.exists(f"{source}/{item}") and not (arrived and target == self._old):
                disk.make_folder(_parent(f"{target}/{item}"))
                disk.rename(f"{source}/{item}", f"{target}/{item}")
                self._tell("move", 0, 0)
            elif not arrived:
                raise DataFolderError(
                    f"{item} is neither in {source} nor in {target}: the file system lost it when it was moved; "
                    f"nothing else of {self._data} was removed"
                )
        # The targets first: a name that is in both folders does no harm, one that is in neither does.
        for root in (target, source):
            folders = {_parent(f"{root}/{item}") for item in items} | {root, self._at}
            for path in sorted(folders, reverse=True):
                if disk.exists(path):
                    disk.sync_folder(path)

    def _keep(self, source: str) -> str | None:
        if not self._disk.exists(self._old):
            return None
        number = 0
        while self._disk.exists(f"{self._data}/{KEPT}{source}-{number}"):
            number += 1
        kept = f"{self._data}/{KEPT}{source}-{number}"
        self._disk.rename(self._old, kept)
        self._disk.sync_folder(self._data)
        return kept

    _set_aside: tuple[str, ...] = ()

    def _summary(self, source: str, *, resumed: bool, kept: str | None, target: str = "") -> Summary:
        return Summary(
            self._data,
            source,
            target or self._options.target,
            len(self._reports),
            sum(report.records for report in self._reports),
            sum(report.size_bytes for report in self._reports),
            round(time.monotonic() - self._began, 3),
            self._was_clean,
            resumed,
            self._options.dry_run,
            kept,
            self._set_aside,
        )


class _Counter:
    def __init__(self, step: str, total: int, tell: Tell) -> None:
        self._step, self._total, self._tell = step, total, tell
        self._done = 0

    def add(self, count: int) -> None:
        self._done += count
        self._tell(self._step, self._done, self._total)


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def _items(disk: Disk, data: str) -> list[str]:
    """What a layout has of its own, relative to the folder."""
    found = [name for name in (checkpoint.FILE_NAME, COMMIT_LOG) if disk.exists(f"{data}/{name}")]
    return found + [path.removeprefix(f"{data}/") for _, path in folder.partitions(disk, data)]


def _tree(disk: Disk, path: str) -> Iterator[tuple[str, list[str]]]:
    """Every folder from there on with its files; nothing if it is not there."""
    if not disk.exists(path):
        return
    files = []
    for name in disk.list(path):
        try:
            disk.list(f"{path}/{name}")
        except NotADirectoryError:
            files.append(f"{path}/{name}")
        else:
            yield from _tree(disk, f"{path}/{name}")
    yield path, files


def convert(disk: Disk, clock: Clock, data: str, options: ConversionOptions, tell: Tell = lambda *_: None) -> Summary:
    """Give the folder the layout that the options name. DataFolderError: it is in use, not whole, or lacks room."""
    return Conversion(disk, clock, data, options, tell).run()
