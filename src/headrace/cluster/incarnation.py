"""The file `incarnation.json` of a data folder: {"incarnation", "boot", "clean"} of the last process that ran on it.

A process draws its incarnation once. It reads what the file held, registers that as what it was before, and rewrites
the file just before it registers; so a broker that is killed in between counts as one that may have lost something.
`clean` is written at the very end of a stop in order, when everything is synced. Writes replace the file in one step
and are synced: after a crash there is the old file or the new one.
"""

from __future__ import annotations

import json
import logging
from typing import Final

from headrace.cluster.image import Previous, decode_previous, encode_previous
from headrace.ports.disk import Disk, read_whole, write_atomically

log = logging.getLogger(__name__)

FILE_NAME: Final = "incarnation.json"


def read_incarnation(disk: Disk, folder: str) -> Previous | None:
    """Who ran on this folder last; None for a new folder, and for a file that does not say."""
    path = f"{folder}/{FILE_NAME}"
    if not disk.exists(path):
        return None
    try:
        return decode_previous(json.loads(read_whole(disk, path)))
    except (ValueError, KeyError, TypeError) as error:
        log.warning("%s is damaged (%r): this broker joins in-sync sets anew, by catching up", path, error)
        return None


def write_incarnation(disk: Disk, folder: str, incarnation: str, boot: str, *, clean: bool) -> None:
    content = json.dumps(encode_previous(Previous(incarnation, boot, clean)))
    write_atomically(disk, f"{folder}/{FILE_NAME}", content.encode() + b"\n")
