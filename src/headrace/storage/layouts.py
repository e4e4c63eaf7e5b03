"""The two layouts of a data folder, and which one it gets.

`partitioned`  files per partition (see `segments`): reads of one partition are sequential, a write and a sync touch
               as many files as partitions have arrived
`shared`       one commit log for all partitions (see `commitlog`): one write, one sync for all, whatever their number
"""

from __future__ import annotations

from typing import Final, Unpack

from headrace.ports.clock import Clock
from headrace.ports.disk import Disk
from headrace.storage import folder
from headrace.storage.commitlog.store import SharedStore
from headrace.storage.local_store import StoreOptions
from headrace.storage.segments.store import PartitionedStore

AUTO: Final = "auto"
"""That of the folder; `partitioned` for a new one."""

Store = PartitionedStore | SharedStore


def open_store(
    disk: Disk,
    clock: Clock,
    data: str,
    layout: str = AUTO,
    *,
    open_segments_max: int,
    commit_file_bytes: int,
    rewrite_share: float,
    **options: Unpack[StoreOptions],
) -> Store:
    """The store of a data folder, locked. DataFolderError: it is in use, or has another layout."""
    if layout == AUTO:
        layout = folder.layout_of(disk, data)
    if layout == folder.SHARED:
        return SharedStore(
            disk,
            clock,
            data,
            open_segments_max=open_segments_max,
            file_bytes=commit_file_bytes,
            rewrite_share=rewrite_share,
            **options,
        )
    return PartitionedStore(disk, clock, data, open_segments_max=open_segments_max, **options)
