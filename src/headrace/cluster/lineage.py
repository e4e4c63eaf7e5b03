"""Whether the metadata in coordination goes on from what this broker has seen of it, or was put back to an older copy.

    <data>/metadata.json      {"cluster": id, "lineage": number, "id": hex, "revision"}: the newest that this folder's
                              broker has seen. Replaced in one step and synced, at a start and every second if it has
                              changed; a crash leaves one that is a little older

After a restore revisions go back, newer topics vanish, epochs, in-sync sets and placement are old. Who acted on that
would lead in epochs that others have used, cut what is acknowledged, and hand out producers' ids twice. So a broker
that finds less than it has seen (a lower revision, a lower lineage, a log with an epoch above its key's) writes
`doubts/<broker>`. While there is such a key all brokers hold: roles stay as they are, a start takes none, nothing is
created, deleted or truncated, no in-sync set changes, the controller does nothing, and no task is taken.

An operator puts newer metadata back and restarts the brokers; or accepts what is there (`plan_accept`): every partition
is without a leader, in an epoch far above any that logs can know, until all its replicas have reported what they hold;
producers' ids go on far above those handed out; the lineage gets the next number, which tells a broker that was away
that somebody has decided. Logs of which the accepted metadata knows nothing, or that it has elsewhere, are set aside
and not deleted (cluster.assignment).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

from headrace.cluster import keys
from headrace.cluster.changes import Plan, Step, unchanged
from headrace.cluster.controller_state import Difference, Doubt, Lineage, encode_doubt
from headrace.cluster.image import NO_LEADER, Image, PartitionState, encode_partition
from headrace.cluster.view import SEEN_TIMEOUT_SECONDS, ClusterView
from headrace.coordination.waits import Bell, OwnedTask, pause
from headrace.errors import CoordinationError, DataFolderError, InvalidRequest, RequestTimedOut
from headrace.ports.clock import Clock
from headrace.ports.coordination import Coordination, Delete, Put
from headrace.ports.disk import Disk, File, read_whole, write_atomically
from headrace.storage.log import Log

log = logging.getLogger(__name__)

FILE_NAME: Final = "metadata.json"
INTERVAL_SECONDS: Final = 1.0
RETRY_SECONDS: Final = 0.5
DIFFERENCES_MAX: Final = 100
"""Differences that a doubt names; the others are counted."""
EPOCHS_ABOVE: Final = 1_000_000
"""How far above the epochs in accepted metadata elections go on: no log can have one in between."""
PRODUCER_IDS_ABOVE: Final = 1 << 50
"""The same of producers' ids: so many are some two million blocks, and what is left is enough for 8,000 such steps."""
PARTITIONS_A_STEP: Final = 60
VANISHED: Final = "vanished"
ELSEWHERE: Final = "elsewhere"
EPOCH: Final = "epoch"


@dataclass(frozen=True, slots=True)
class SeenMetadata:
    """The newest metadata that a broker has seen."""

    cluster: str
    lineage: Lineage
    revision: int


def read_seen(disk: Disk, folder: str) -> SeenMetadata | None:
    """None for a folder that has seen none. DataFolderError: the file is damaged."""
    path = f"{folder}/{FILE_NAME}"
    if not disk.exists(path):
        return None
    try:
        value = json.loads(read_whole(disk, path))
        lineage = Lineage(int(value["lineage"]), str(value["id"]))
        return SeenMetadata(str(value["cluster"]), lineage, int(value["revision"]))
    except (ValueError, KeyError, TypeError) as error:
        raise DataFolderError(
            f"{path} is damaged ({error!r}), so nobody can tell whether the cluster's metadata is older than this "
            "folder: make sure that it is not, then remove the file and start the broker again"
        ) from None


def encode_seen(seen: SeenMetadata) -> bytes:
    value = {"cluster": seen.cluster, "lineage": seen.lineage.number, "id": seen.lineage.id, "revision": seen.revision}
    return json.dumps(value).encode() + b"\n"


def is_older(image: Image, seen: SeenMetadata) -> bool:
    """Whether the image is of a history that had gone further when it was seen."""
    found, known = image.controls.lineage, seen.lineage
    if found.number != known.number:
        return found.number < known.number
    return found.id != known.id or image.revision < seen.revision


def differences(image: Image, logs: Iterable[Log], broker: int) -> list[Difference]:
    """What these logs of a broker tell that the image does not know."""
    found = []
    for each in logs:
        where, topic = each.topic_partition, image.topics.get(each.topic_partition.topic)
        state = image.partition(where.topic, where.partition)
        held = f"offsets {each.start_offset} to {each.end_offset}"
        if topic is None or topic.id != each.topic_id or state is None:
            found.append((VANISHED, each, f"{held}: no key has it"))
        elif broker not in state.replicas:
            found.append((ELSEWHERE, each, f"{held}: its key has replicas {list(state.replicas)}"))
        elif each.last_epoch() > state.leader_epoch:
            told = f"{held}: the log is of epoch {each.last_epoch()}, its key of {state.leader_epoch}"
            found.append((EPOCH, each, told))
    return [
        Difference(kind, each.topic_partition.topic, each.topic_partition.partition, each.topic_id, detail)
        for kind, each, detail in found
    ]


def plan_accept(image: Image, lineage_id: str, producer_ids: int) -> Plan:
    """The metadata holds as it is in the image. `producer_ids` is the next that it would hand out."""
    doubts = image.controls.doubts
    if not doubts:
        raise InvalidRequest("no broker doubts the cluster's metadata: there is nothing to accept")
    numbers = [image.controls.lineage.number, *(doubt.lineage for doubt in doubts.values())]
    lineage = keys.encode({"number": max(numbers) + 1, "id": lineage_id})
    puts = [
        (unchanged(key, state.revision), Put(key, encode_partition(topic.id, _open(state))))
        for topic in image.topics.values()
        for state in topic.partitions
        if not state.is_missing
        for key in [keys.partition_key(image.prefix, topic.name, state.index)]
    ]
    parts = [puts[first : first + PARTITIONS_A_STEP] for first in range(0, len(puts), PARTITIONS_A_STEP)]
    steps = [Step(tuple(same for same, _ in part), tuple(put for _, put in part)) for part in parts]
    next_ids = keys.encode({"next": producer_ids + PRODUCER_IDS_ABOVE})
    last = Step(
        (),
        (
            Put(keys.lineage_key(image.prefix), lineage),
            Put(keys.producer_ids_key(image.prefix), next_ids),
            Delete(keys.doubts_prefix(image.prefix), prefix=True),
        ),
    )
    return Plan((*steps, last))


def _open(state: PartitionState) -> PartitionState:
    """Nobody leads, and no member counts: the replicas have to say what they hold."""
    return replace(
        state, leader=NO_LEADER, leader_epoch=state.leader_epoch + EPOCHS_ABOVE, isr=state.replicas, incarnations={}
    )


class MetadataWatch:
    """Keeps the file, looks whether metadata goes back, and tells it. `logs` answers what this broker holds."""

    def __init__(
        self,
        coordination: Coordination,
        view: ClusterView,
        clock: Clock,
        disk: Disk,
        folder: str,
        broker: int,
        cluster: str,
        failed: Callable[[BaseException], None],
    ) -> None:
        self.logs: Callable[[], Iterable[Log]] = lambda: ()
        self._coordination = coordination
        self._view = view
        self._clock = clock
        self._disk = disk
        self._path = f"{folder}/{FILE_NAME}"
        self._broker = broker
        known = read_seen(disk, folder)
        if known is not None and known.cluster != cluster:
            raise DataFolderError(
                f"data folder {folder} belongs to cluster {known.cluster!r}, and coordination holds cluster "
                f"{cluster!r}: correct the setting coordination, or put its metadata back; if the folder's logs are "
                f"not wanted, use another one"
            )
        self._seen = known or SeenMetadata(cluster, Lineage(), 0)
        self._kept = known
        """What the file says."""
        self._doubt: Doubt | None = None
        self._closed = self._running = False
        self._next = 0.0
        self._bell = Bell()
        self._task = OwnedTask(failed)

    @property
    def is_held(self) -> bool:
        """Whether nothing may be changed now."""
        return self._doubt is not None or bool(self._view.image.controls.doubts)

    def start(self) -> None:
        """The view has its first image. Not before this has returned may anything be done that follows from it."""
        image = self._view.image
        self._view.on_restored = self._restored
        self._view.listen(self._follow)
        if is_older(image, self._seen):
            self._raise_doubt(image)
        else:
            self._keep(replace(self._seen, lineage=image.controls.lineage, revision=image.revision))
        self._task.start(self._run())

    def compare_logs(self) -> None:
        """When the store is open, and when somebody has seen one: a log of an epoch that its key has not reached yet
        tells of a restore too.
        """
        image = self._view.image
        if not self.is_held and any(each.kind == EPOCH for each in differences(image, self.logs(), self._broker)):
            self._raise_doubt(image)

    async def close(self) -> None:
        self._closed = True
        await self._task.close()

    def tick(self) -> None:
        image, now = self._view.image, self._clock.now()
        if self.is_held or self._running or self._closed or now < self._next:
            return
        seen = replace(self._seen, lineage=image.controls.lineage, revision=max(image.revision, self._seen.revision))
        if seen == self._kept:
            return
        self._next = now + INTERVAL_SECONDS
        try:
            file = self._disk.open(self._path + ".tmp", create=True, writable=True)
        except OSError as error:
            self._not_kept(error)
            return
        before = self._seen
        self._running = True
        try:
            file.truncate(0)
            file.pwritev([encode_seen(seen)], 0)
            self._disk.request_sync([file], lambda error: self._synced(file, before, seen, error))
        except OSError as error:
            self._synced(file, before, seen, error)

    def _synced(self, file: File, before: SeenMetadata, seen: SeenMetadata, error: OSError | None) -> None:
        file.close()
        self._running = False
        if self._closed or self.is_held or self._seen is not before:
            return  # what was to be kept does not hold any more
        try:
            if error is not None:
                raise error
            # Its name is not synced: a crash may leave the one before, which only knows a little less.
            self._disk.rename(self._path + ".tmp", self._path)
        except OSError as failure:
            self._not_kept(failure)
        else:
            self._seen = self._kept = seen

    def _keep(self, seen: SeenMetadata) -> None:
        """Now, and safely."""
        self._seen = seen
        write_atomically(self._disk, self._path, encode_seen(seen))
        self._kept = seen

    def _not_kept(self, error: OSError) -> None:
        log.warning("%s not written, the old one stays; tried again soon: %s", self._path, error)

    def _restored(self, old: Image, new: Image) -> None:
        self._seen = replace(self._seen, lineage=old.controls.lineage, revision=max(old.revision, self._seen.revision))
        self._raise_doubt(new)

    def _raise_doubt(self, image: Image) -> None:
        seen = self._seen
        self._doubt = Doubt(self._broker, seen.lineage.number, seen.revision, image.revision, self._clock.wall_ms())
        log.error(
            "the cluster's metadata is older than what this broker has seen of it: revision %d of lineage %d, and %d "
            "of %d before. It was restored from a copy, or this is not the cluster's coordination. Nothing is changed "
            "until an operator has decided: put newer metadata back and restart all brokers, or look at `headrace "
            "cluster accept-metadata --dry-run` and accept what is there",
            image.revision, image.controls.lineage.number, seen.revision, seen.lineage.number,
        )  # fmt: skip
        self._bell.ring()

    def _follow(self, old: Image, new: Image) -> None:
        accepted = new.controls.lineage.number > self._seen.lineage.number and not new.controls.doubts
        if accepted:
            if self._doubt is not None:
                log.warning("the cluster's metadata was accepted as lineage %d", new.controls.lineage.number)
            self._doubt = None
            try:
                self._keep(replace(self._seen, lineage=new.controls.lineage, revision=new.revision))
            except OSError as error:
                self._not_kept(error)
        elif self._doubt is not None:
            self._bell.ring()

    async def _run(self) -> None:
        while True:
            await self._bell.rung()
            doubt = self._doubt
            if doubt is None or self._broker in self._view.image.controls.doubts:
                continue
            found = differences(self._view.image, self.logs(), self._broker)
            doubt = replace(doubt, count=len(found), differences=tuple(found[:DIFFERENCES_MAX]))
            try:
                key = keys.doubt_key(self._view.image.prefix, self._broker)
                await self._coordination.put(key, encode_doubt(doubt))
                await self._view.wait_for(lambda image: self._broker in image.controls.doubts, SEEN_TIMEOUT_SECONDS)
            except (CoordinationError, RequestTimedOut) as error:
                log.info("the doubt about the metadata is told again: %s", error)
                await pause(self._clock, RETRY_SECONDS)
                self._bell.ring()
