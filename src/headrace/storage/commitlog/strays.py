"""Partition folders that were set aside: in this layout they hold queues only, their batches lie in the commit log.

While there is one whose topic is known, no commit file is emptied or removed: a broker that has lost its metadata would
else remove everything. They go with the deletion of their topic; else a person decides about them, as about those of
the other layout.
"""

from __future__ import annotations

from headrace.ports.disk import Disk
from headrace.storage import folder

NAMED_MAX = 10


def with_topics(disk: Disk, data: str) -> list[str]:
    """Those that say which topic they belong to."""
    found = [path for topic in folder.topic_folders(disk, data) for _, path in folder.strays_of(disk, data, topic)]
    return [path for path in found if isinstance(folder.read_topic_id(disk, path), bytes)]


def advice(data: str, found: list[str]) -> str:
    named = ", ".join(found[:NAMED_MAX]) + (f" and {len(found) - NAMED_MAX} more" if len(found) > NAMED_MAX else "")
    return (
        f"no commit file of {data} is removed, because batches of folders that are set aside may be in it: {named}. "
        "If they are not wanted, remove these folders and restart the broker. If they are, stop it, mend the cluster's "
        "metadata, give the folders back their names, and start it"
    )
