"""What a broker does about deleted topics once its logs of them are gone: it takes itself off `deleted/<topic id>`.

The key is written by whoever deletes a topic, in the transaction that deletes its keys, and names the brokers that had
replicas. Assignment deletes the logs when it sees the key, a start those that it finds. Folders in which no log is open
go here, on every broker: those that were set aside, and those whose deletion failed. A broker is taken off when no
folder of the topic is left under a partition's name and that is synced; with the last one the key goes. What is there
for a broker that does not come is removed by the controller after `KEPT_MS`. A broker that was away for longer finds
logs without a key: it sets them aside, and deletes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Final

from headrace.cluster import keys
from headrace.cluster.changes import Step, unchanged
from headrace.cluster.image import Deletion, Image, encode_deletion
from headrace.cluster.membership import ClusterAccess
from headrace.coordination.waits import Bell, OwnedTask, pause
from headrace.errors import CoordinationError, DataFolderError, RequestTimedOut
from headrace.ports.coordination import Delete, Put
from headrace.ports.disk import Disk
from headrace.storage import folder
from headrace.storage.log import LogStore

log = logging.getLogger(__name__)

KEPT_MS: Final = 30 * 86_400_000
"""How long the deletion of a topic is kept for a broker that does not come."""
RETRY_SECONDS: Final = 1.0


def taken_off(image: Image, topic_id: bytes, broker: int) -> Step | None:
    """The broker has deleted what it had of the topic; None if that is known."""
    deletion = image.deleted.get(topic_id)
    if deletion is None or broker not in deletion.brokers:
        return None
    key = keys.deleted_key(image.prefix, topic_id)
    left = tuple(other for other in deletion.brokers if other != broker)
    action = Put(key, encode_deletion(replace(deletion, brokers=left))) if left else Delete(key)
    return Step((unchanged(key, deletion.revision),), (action,))


def overdue(image: Image, now_ms: int) -> dict[bytes, Deletion]:
    """Deletions that are not kept any longer."""
    return {topic_id: found for topic_id, found in image.deleted.items() if now_ms >= found.at_ms + KEPT_MS}


class Deletions:
    """One task; looks at every image with deletions."""

    def __init__(self, cluster: ClusterAccess, disk: Disk, data: str, store: LogStore) -> None:
        self._cluster = cluster
        self._disk = disk
        self._data = data
        self._store = store
        self._settled: set[bytes] = set()
        """Deletions that do not name this broker, and of which it has nothing."""
        self._bell = Bell()
        self._task = OwnedTask(cluster.failed)

    def start(self) -> None:
        self._cluster.view.listen(self._follow)
        self._task.start(self._run())
        self._bell.ring()

    async def close(self) -> None:
        await self._task.close()

    def _follow(self, old: Image, new: Image) -> None:
        if old.deleted is not new.deleted or old.controls.lineage is not new.controls.lineage:
            self._bell.ring()

    async def _run(self) -> None:
        while True:
            await self._bell.rung()
            try:
                done = [await self._finish(topic_id, found) for topic_id, found in self._open().items()]
            except (CoordinationError, RequestTimedOut, DataFolderError, OSError) as error:
                log.info("that logs of deleted topics are gone is told again: %s", error)
                done = [False]
            if not all(done):
                await pause(self._cluster.clock, RETRY_SECONDS)
                self._bell.ring()

    def _open(self) -> dict[bytes, Deletion]:
        if self._cluster.is_held():
            return {}
        deleted = self._cluster.view.image.deleted
        self._settled.intersection_update(deleted)
        return {topic_id: found for topic_id, found in deleted.items() if topic_id not in self._settled}

    async def _finish(self, topic_id: bytes, deletion: Deletion) -> bool:
        """Whether this broker has nothing more to do for the topic."""
        if not self._cluster.membership.standing:
            return False
        self._store.delete_left(deletion.topic, topic_id)
        if self._is_there(deletion.topic, topic_id):
            return False
        if self._cluster.membership.broker.id not in deletion.brokers:
            self._settled.add(topic_id)
            return True
        await self._synced(deletion.topic)
        step = taken_off(self._cluster.view.image, topic_id, self._cluster.membership.broker.id)
        if step is None:
            return True
        result = await self._cluster.coordination.transact(step.compares, step.actions)
        await self._cluster.view.wait_for_revision(result.revision)
        return result.succeeded

    def _is_there(self, topic: str, topic_id: bytes) -> bool:
        path = f"{self._data}/{topic}"
        if not self._disk.exists(path):
            return False
        found = folder.partitions_of(self._disk, self._data, topic)
        return any(folder.read_topic_id(self._disk, each) == topic_id for _, each in found)

    async def _synced(self, topic: str) -> None:
        """That the folders have no partition's name any more is safe."""
        path = f"{self._data}/{topic}"
        if not self._disk.exists(path):
            return
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(error: OSError | None) -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(None)

        opened = self._disk.open(path)
        try:
            self._disk.request_sync([opened], done)
            await answer
        finally:
            opened.close()
