"""The small files of a partition that both layouts have, written for a folder that is being built."""

from __future__ import annotations

from headrace.ports.disk import Disk, write_atomically
from headrace.storage import folder, producers
from headrace.storage.epochs import EpochHistory
from headrace.storage.offline.content import Content
from headrace.storage.segments.segment import SNAPSHOT, stem


def write(disk: Disk, data: str, content: Content) -> None:
    """Epochs, producers and, last, the file that makes the folder a partition's."""
    path = folder.partition_folder(data, content.topic_partition)
    disk.make_folder(path)
    write_epochs(disk, data, content)
    if content.producers:
        write_atomically(disk, stem(path, content.end_offset) + SNAPSHOT, producers.encode(content.producers))
    disk.open(folder.write_partition_file(disk, path, content.topic_id)).sync()
    for each in (path, path.rpartition("/")[0], data):
        disk.sync_folder(each)


def write_epochs(disk: Disk, data: str, content: Content) -> None:
    """The whole history, of offsets below the start as well."""
    history = EpochHistory(disk, folder.partition_folder(data, content.topic_partition), fresh=True)
    for epoch, offset in content.epochs:
        history.begin(epoch, offset)
    file = history.save()
    if file is not None:
        file.sync()
        file.close()
