"""Why a log takes nothing: a shortage, which passes by itself, or a failure, which takes it offline.

After a shortage (of room, descriptors, memory) nothing has changed on disk and the next try may succeed. After any
other error nobody knows what the files hold.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from headrace.errors import HeadraceError, StorageFailed, StorageFull
from headrace.storage.log import TopicPartition

log = logging.getLogger(__name__)

NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_RESOURCES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def passes(error: OSError) -> bool:
    return error.errno in NO_ROOM or error.errno in NO_RESOURCES


def failure(topic_partition: TopicPartition, path: str, error: OSError) -> StorageFailed:
    return StorageFailed(
        f"{topic_partition}: {error.filename or path}: {error.strerror}: the log is offline; "
        "mend the disk and restart the broker"
    )


def unreadable(topic_partition: TopicPartition, error: OSError) -> StorageFailed:
    return StorageFailed(f"{topic_partition}: {error.filename}: {error.strerror}")


@contextmanager
def reading(topic_partition: TopicPartition) -> Iterator[None]:
    """An error of the disk while reading becomes one of ours; the log stays as it is."""
    try:
        yield
    except OSError as error:
        raise unreadable(topic_partition, error) from error


class Shortage:
    """Says once when a log can no longer be written for want of something, and once when it can again."""

    __slots__ = ("_topic_partition", "lasts")

    def __init__(self, topic_partition: TopicPartition) -> None:
        self._topic_partition = topic_partition
        self.lasts = False

    def met(self, path: str, error: OSError) -> HeadraceError:
        refusal: HeadraceError
        if error.errno in NO_ROOM:
            refusal = StorageFull(
                f"{self._topic_partition}: no room to write {path}: free some space on its file system; "
                "nothing is lost, and writing goes on when there is room"
            )
        else:
            refusal = StorageFailed(
                f"{self._topic_partition}: {error.filename or path}: {error.strerror}: raise the limit of open files "
                "or give the broker more memory; nothing is lost, and writing goes on when there is some"
            )
        if not self.lasts:
            self.lasts = True
            log.warning("%s", refusal)
        return refusal

    def ended(self) -> None:
        self.lasts = False
        log.warning("%s: can be written again", self._topic_partition)
