"""The two layouts of a data folder, and which one it gets.

`partitioned`  files per partition (see `segments`): reads of one partition are sequential, a write and a sync touch
               as many files as partitions have arrived
`shared`       one commit log for all partitions (see `commitlog`): one write, one sync for all, whatever their number
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from headrace.ports.clock import Clock
from headrace.ports.disk import Disk
from headrace.storage import folder
from headrace.storage.commitlog.store import SharedStore
from headrace.storage.log import TopicPartition
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
    retention_check_ms: int = 300_000,
    cleaner_backoff_ms: int = 15_000,
    checkpoint_ms: int = 60_000,
    producer_expire_ms: int = 86_400_000,
    archived_offset: Callable[[TopicPartition], int] = lambda _: 0,
    open_segments_max: int,
    sync_files_max: int,
    commit_file_bytes: int,
    rewrite_share: float,
) -> Store:
    """The store of a data folder, locked. DataFolderError: it is in use, or has another layout."""
    if layout == AUTO:
        layout = folder.layout_of(disk, data)
    if layout == folder.SHARED:
        return SharedStore(
            disk,
            clock,
            data,
            retention_check_ms=retention_check_ms,
            cleaner_backoff_ms=cleaner_backoff_ms,
            checkpoint_ms=checkpoint_ms,
            producer_expire_ms=producer_expire_ms,
            archived_offset=archived_offset,
            open_segments_max=open_segments_max,
            sync_files_max=sync_files_max,
            file_bytes=commit_file_bytes,
            rewrite_share=rewrite_share,
        )
    return PartitionedStore(
        disk,
        clock,
        data,
        retention_check_ms=retention_check_ms,
        cleaner_backoff_ms=cleaner_backoff_ms,
        checkpoint_ms=checkpoint_ms,
        producer_expire_ms=producer_expire_ms,
        archived_offset=archived_offset,
        open_segments_max=open_segments_max,
        sync_files_max=sync_files_max,
    )
