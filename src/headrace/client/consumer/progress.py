"""How far a consumer has read, kept where the next one finds it: with the group's coordinator, or in a file here.

`GroupProgress` is OffsetFetch and OffsetCommit as a member of a generation. A commit of a generation that is over is
refused, so a member that was thought dead cannot undo what its successor has saved. What was answered is as durable as
the group's own log. Several may be under way, and each is tried again by itself: a later try carries what was asked to
be saved last, so that none undoes another, in whatever order they arrive.

`LocalProgress` is that of a consumer in broadcast mode, which reads everything for itself: one file per group and
client id, `<folder>/<group>/<client id>.json` with what is not a letter, digit, `_`, `.` or `-` percent-encoded:

    {"format": 1, "group": "...", "client_id": "...", "offsets": [[topic, partition, next offset], ...]}

It is written beside the old one, synced and renamed, so that a crash of the process or of the machine leaves the old
or the new one, whole. A save that was answered survives both. The file is held by a lock (`.lock` beside it) while a
consumer uses it. A file that cannot be read stops the consumer: going on without it would read everything anew.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import quote

from headrace.client.connection.reactor import Reactor
from headrace.client.consumer.coordinator import Coordinator, Identity, offset_commit_request, offset_fetch_request
from headrace.client.consumer.group_protocol import TopicPartition
from headrace.errors import ErrorCode, HeadraceError, OperatorError, ProtocolError
from headrace.ports.disk import Disk, File, read_whole, write_atomically
from headrace.wire import api as apis
from headrace.wire.message import Message

FORMAT: Final = 1
WITHIN_S: Final = 30.0

Offsets = dict[TopicPartition, int]
"""The next record to read in each partition."""
Loaded = Callable[[Offsets | HeadraceError], None]
Saved = Callable[[HeadraceError | None], None]


class Progress(Protocol):
    def load(self, places: Iterable[TopicPartition], on_loaded: Loaded) -> None:
        """What was saved of these partitions; those that nothing was saved of are left out."""
        ...

    def save(self, offsets: Mapping[TopicPartition, int], on_done: Saved) -> None:
        """Answered when it is where it outlives this process."""
        ...


class ProgressUnusable(OperatorError):
    """A progress file that cannot be read, written or had."""


def default_folder() -> Path:
    """Where users keep state that is to stay."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "headrace" / "progress"


class LocalProgress:
    """Files are written by a thread of their own, started for each save, so that a slow disk holds up nothing."""

    def __init__(self, reactor: Reactor, disk: Disk, folder: Path, group: str, client_id: str) -> None:
        self._reactor = reactor
        self._disk = disk
        self._names = {"group": group, "client_id": client_id}
        place = folder.absolute() / quote(group, safe="")
        self.path: Final = str(place / f"{quote(client_id, safe='')}.json")
        self._waiting: list[Saved] = []
        self._guard = threading.Lock()
        self._writing = False
        self._closed = False
        try:
            _make_folder(disk, place)
            self._lock: File | None = disk.lock(f"{self.path}.lock")
        except BlockingIOError:
            raise ProgressUnusable(
                f"another consumer of group {group!r} with client id {client_id!r} keeps its progress in {self.path}; "
                "give each a client_id of its own"
            ) from None
        except OSError as error:
            raise self._unusable("made", error) from None
        try:
            self._offsets = self._read()
        except HeadraceError:
            self.close()
            raise

    def load(self, places: Iterable[TopicPartition], on_loaded: Loaded) -> None:
        on_loaded({place: self._offsets[place] for place in places if place in self._offsets})

    def save(self, offsets: Mapping[TopicPartition, int], on_done: Saved) -> None:
        self._offsets.update(offsets)
        self._waiting.append(on_done)
        if not self._writing:
            self._write()

    def close(self) -> None:
        """Let another have the file, once the save that is under way is done."""
        with self._guard:
            self._closed = True
            self._release()

    def _release(self) -> None:
        if self._closed and not self._writing and self._lock is not None:
            self._lock.close()
            self._lock = None

    def _write(self) -> None:
        content = self._encode()
        waiting, self._waiting = self._waiting, []
        if self._lock is None:
            # Another may have the file by now.
            closed = ProgressUnusable(f"the progress file {self.path} was closed before this was saved")
            self._reactor.call_soon(lambda: self._written(waiting, closed))
            return
        self._writing = True

        def write() -> None:
            failure: HeadraceError | None = None
            try:
                write_atomically(self._disk, self.path, content)
            except OSError as error:
                failure = self._unusable("written", error)
            with self._guard:
                self._writing = False
                self._release()
            self._reactor.post(lambda: self._written(waiting, failure))

        threading.Thread(target=write, name="headrace-progress").start()

    def _written(self, waiting: list[Saved], failure: HeadraceError | None) -> None:
        if self._waiting and not self._writing:
            self._write()
        for on_done in waiting:
            on_done(failure)

    def _encode(self) -> bytes:
        offsets = [[topic, partition, offset] for (topic, partition), offset in sorted(self._offsets.items())]
        return json.dumps({"format": FORMAT, **self._names, "offsets": offsets}).encode()

    def _read(self) -> Offsets:
        try:
            content = read_whole(self._disk, self.path)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise self._unusable("read", error) from None
        try:
            found = json.loads(content)
            if found["format"] != FORMAT:
                raise ProgressUnusable(f"{self.path} has format {found['format']}, this version reads {FORMAT}")
            if {name: found[name] for name in self._names} != self._names:
                raise ProgressUnusable(f"{self.path} is the progress of {found['group']!r} {found['client_id']!r}")
            return {(_text(topic), _number(number)): _number(offset) for topic, number, offset in found["offsets"]}
        except (ValueError, KeyError, TypeError):
            raise ProgressUnusable(
                f"{self.path} is not a progress file any more; remove it to begin anew where `start` says"
            ) from None

    def _unusable(self, done: str, error: OSError) -> ProgressUnusable:
        return ProgressUnusable(f"the progress file {self.path} cannot be {done}: {error.strerror or error}")


def _make_folder(disk: Disk, folder: Path) -> None:
    """With what is above it, and so that it is there after a crash."""
    missing = [path for path in (folder, *folder.parents) if not disk.exists(str(path))]
    disk.make_folder(str(folder))
    for path in reversed(missing):
        disk.sync_folder(str(path.parent))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError
    return value


class NotHeld(HeadraceError):
    """Progress of partitions that the group has not given to this member, or not any more."""

    def __init__(self, places: Iterable[TopicPartition]) -> None:
        names = ", ".join(f"{topic}-{partition}" for topic, partition in sorted(places))
        super().__init__(
            f"progress of {names} was not saved: the group has not given it to this member, or to another since; "
            "whoever has it goes on from what was last saved"
        )


class GroupProgress:
    def __init__(self, coordinator: Coordinator, identity: Callable[[], Identity]) -> None:
        self._coordinator = coordinator
        self._identity = identity
        self._newest: dict[TopicPartition, tuple[Identity, int]] = {}
        """What was asked to be saved last of each partition, and as whom."""

    def load(self, places: Iterable[TopicPartition], on_loaded: Loaded) -> None:
        wanted = list(places)
        if not wanted:
            on_loaded({})
            return
        request = offset_fetch_request(self._coordinator.group, wanted)

        def loaded(answer: Message | HeadraceError) -> None:
            if isinstance(answer, HeadraceError):
                on_loaded(answer)
                return
            (group,) = answer.groups
            found = _by_partition(group.topics)
            offsets = {place: part.committed_offset for place, part in found.items() if part.committed_offset >= 0}
            # Taken for one without progress, it would be begun by the start rule, maybe behind records not read yet.
            on_loaded(self._left_out(wanted, found) or offsets)

        self._coordinator.persist(apis.OFFSET_FETCH, lambda: request, _fetch_code, loaded, within_s=WITHIN_S)

    def save(self, offsets: Mapping[TopicPartition, int], on_done: Saved, *, within_s: float = WITHIN_S) -> None:
        if not offsets:
            on_done(None)
            return
        # Signed once: a later try of a generation that is over must not pass for one of the next.
        who = self._identity()
        self._newest.update({place: (who, offset) for place, offset in offsets.items()})

        def request() -> Message:
            newest = {place: self._newest[place] for place in offsets}
            mine = {place: offset if by == who else offsets[place] for place, (by, offset) in newest.items()}
            return offset_commit_request(self._coordinator.group, who, mine)

        def done(answer: Message | HeadraceError) -> None:
            if isinstance(answer, HeadraceError):
                on_done(answer)
            else:
                on_done(self._left_out(offsets, _by_partition(answer.topics)))

        self._coordinator.persist(apis.OFFSET_COMMIT, request, _commit_code, done, within_s=within_s)

    def _left_out(
        self, asked: Iterable[TopicPartition], answered: Mapping[TopicPartition, Message]
    ) -> ProtocolError | None:
        """What an answer says nothing of is neither saved nor without progress."""
        missing = [f"{topic}-{partition}" for topic, partition in asked if (topic, partition) not in answered]
        if not missing:
            return None
        return ProtocolError(f"group {self._coordinator.group!r}: the answer leaves out {', '.join(missing)}")


def _fetch_code(answer: Message) -> int:
    (group,) = answer.groups
    codes = [group.error_code, *(part.error_code for topic in group.topics for part in topic.partitions)]
    return next((int(code) for code in codes if code), ErrorCode.NONE)


def _commit_code(answer: Message) -> int:
    codes = (part.error_code for topic in answer.topics for part in topic.partitions)
    return next((int(code) for code in codes if code), ErrorCode.NONE)


def _by_partition(topics: Iterable[Message]) -> dict[TopicPartition, Message]:
    return {(topic.name, part.partition_index): part for topic in topics for part in topic.partitions}
