"""The file `incarnation.json` of a data folder: {"incarnation", "boot", "clean", "lost", "began"} of the last process
that ran on it.

A process draws its incarnation once. It reads what the file held, registers that as what it was before, and rewrites
the file just before it registers; so a broker that is killed in between counts as one that may have lost something.
One that gives up in between, because of an error or a signal, writes back what the file held: no log has changed.
`clean` is written at the very end of a stop in order, when everything is synced. `lost`, [[topic id in hex, partition],
...], names the logs that went offline while it ran, and those that the next start finds to hold less than they did.
`began` is the revision of the metadata that it began with; 0, or not there, if not all of its logs was synced then.
Writes replace the file in one step and are synced: after a crash there is the old file or the new one.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Final

from headrace.cluster.image import Previous, decode_previous, encode_previous
from headrace.ports.disk import Disk, read_whole, write_atomically
from headrace.storage.watermarks import Key

log = logging.getLogger(__name__)

FILE_NAME: Final = "incarnation.json"


def read_incarnation(disk: Disk, folder: str) -> Previous | None:
    """Who ran on this folder last; None for a new folder, and for a file that does not say."""
    path = f"{folder}/{FILE_NAME}"
    if not disk.exists(path):
        return None
    try:
        return decode_previous(json.loads(read_whole(disk, path)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s is damaged (%r): this broker joins in-sync sets anew, by catching up", path, error)
        return None


def write_incarnation(disk: Disk, folder: str, run: Previous) -> None:
    content = json.dumps(encode_previous(run))
    write_atomically(disk, f"{folder}/{FILE_NAME}", content.encode() + b"\n")


class IncarnationFile:
    """Keeps the file up to date: with the process that runs, and what its logs have lost."""

    def __init__(self, disk: Disk, folder: str) -> None:
        self._disk = disk
        self._folder = folder
        self.run = read_incarnation(disk, folder)
        """As the file has it."""

    def write(self, run: Previous) -> None:
        write_incarnation(self._disk, self._folder, run)
        self.run = run

    def lost(self, logs: frozenset[Key]) -> None:
        """These logs hold less than they did, or nobody can tell what they hold: who runs on this folder next must not
        count for what they held.
        """
        if self.run is not None and not logs <= self.run.lost:
            self.write(replace(self.run, lost=self.run.lost | logs))

    def tells_of(self, log: Key) -> bool:
        return self.run is None or log in self.run.lost
