"""Bugs in how replicas deal with bytes that flip: see `planted`."""

from __future__ import annotations

from contextlib import ExitStack

from headrace.records.batch import read_header
from headrace.replication.leader_session import Inspection, LeaderSession
from headrace.storage import local_log
from simulator.planted import found_by, plant, swap


@found_by("tests/storage/test_copied.py")
@plant
def copy_without_a_look_at_crcs(stack: ExitStack) -> None:
    """A replica takes what its leader has as it is, and that one does not look before another drops its own."""
    swap(stack, local_log, "check", read_header)
    swap(stack, LeaderSession, "_inspect", lambda *_: Inspection.WHOLE)


@found_by("tests/cluster/test_damaged_leader.py")
@plant
def drop_what_the_leader_cannot_read(stack: ExitStack) -> None:
    """A follower that mends its log drops all of it behind the damage, whatever of that its leader can read."""
    swap(stack, LeaderSession, "_inspect", lambda *_: Inspection.WHOLE)
