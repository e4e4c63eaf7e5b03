"""What the metadata file of a stopped broker says, read from a copy: nothing in the broker's folder is touched."""

from __future__ import annotations

import os
import shutil
from tempfile import TemporaryDirectory

from headrace.cluster import keys
from headrace.cluster.image import Image, from_listing
from headrace.coordination.choice import FILE
from headrace.coordination.embedded import EmbeddedCoordination
from headrace.ports.clock import Clock


async def stopped_image(folder: str, clock: Clock) -> Image | None:
    """None if the folder has no such file, as that of a broker on etcd, or nothing is in it. DataFolderError: it is
    damaged."""
    with TemporaryDirectory() as copy:
        if not _copy(folder, copy):
            return None
        coordination = EmbeddedCoordination(f"{copy}/{FILE}", clock)
        try:
            found = await coordination.get(keys.CLUSTER_ID)
            if found is None:
                return None
            prefix = keys.cluster_prefix(str(keys.decode(found.key, found.value)))
            return from_listing(prefix, await coordination.list(prefix))
        finally:
            await coordination.close()


def _copy(folder: str, target: str) -> bool:
    """With what is written ahead, as a kill leaves it. Answers whether there is anything."""
    there = [name for name in (FILE, f"{FILE}-wal") if os.path.exists(f"{folder}/{name}")]
    for name in there:
        shutil.copyfile(f"{folder}/{name}", f"{target}/{name}")
    return FILE in there
