from __future__ import annotations

import pytest

from headrace.cluster.image import Previous
from headrace.cluster.incarnation import FILE_NAME, read_incarnation, write_incarnation
from headrace.ports.disk import write_atomically
from headrace.virtual.clock import VirtualClock
from headrace.virtual.disk import VirtualDisk

FOLDER = "/data"
WITH_LOST = b'{"incarnation":"i","boot":"b","clean":true,"lost":[["no hex",0]]}'
LOST = frozenset({(b"t" * 16, 3)})


def made() -> VirtualDisk:
    disk = VirtualDisk(VirtualClock())
    disk.make_folder(FOLDER)
    disk.sync_folder("/")
    return disk


def test_a_new_folder_was_nobody() -> None:
    assert read_incarnation(made(), FOLDER) is None


def test_what_was_written_outlives_a_crash() -> None:
    disk = made()
    write_incarnation(disk, FOLDER, Previous("i1", "boot", False))
    disk.crash(1)
    assert read_incarnation(disk, FOLDER) == Previous("i1", "boot", False)
    write_incarnation(disk, FOLDER, Previous("i1", "boot", True, LOST))
    disk.crash(2)
    assert read_incarnation(disk, FOLDER) == Previous("i1", "boot", True, LOST)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"incarnation":"i"}', WITH_LOST])
def test_a_damaged_file_counts_as_none(content: bytes) -> None:
    disk = made()
    write_atomically(disk, f"{FOLDER}/{FILE_NAME}", content)
    assert read_incarnation(disk, FOLDER) is None
