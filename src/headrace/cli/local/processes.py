"""Processes that outlive the command that started them, found again by number and proven to be the same.

A process number is given to somebody else after its process has ended. So a process is remembered with the time of its
start in clock ticks since boot and the kernel's boot id, and signals go through a descriptor of the process that was
opened before both were compared: nobody else is ever signalled.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from headrace.errors import OperatorError
from headrace.system.boot import boot_id

_PAUSED: Final = "Tt"
_ENDED: Final = "ZX"
# What this program ignores or handles is not handed on.
_OWN_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)


class State(StrEnum):
    UP = "up"
    PAUSED = "paused"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class Process:
    """One run of a program on this machine."""

    pid: int
    started_ticks: int
    boot: str

    def state(self) -> State:
        _reap(self.pid)
        found = _stat(self.pid)
        if found is None or self.boot != boot_id():
            return State.DOWN
        letter, started_ticks = found
        if started_ticks != self.started_ticks or letter in _ENDED:
            return State.DOWN
        return State.PAUSED if letter in _PAUSED else State.UP

    def send(self, number: signal.Signals) -> bool:
        """Signal it; False if it has ended."""
        with _opened(self.pid) as descriptor:
            if descriptor is None or self.state() is State.DOWN:
                return False
            try:
                signal.pidfd_send_signal(descriptor, number)
            except ProcessLookupError:
                return False
            return True


def spawn(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Process:
    """Start a program in a session of its own, so that ctrl-C here is not for it; what it says goes to `log`."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), flags, 0o644),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    try:
        pid = os.posix_spawn(
            command[0],
            list(command),
            dict(environment),
            file_actions=actions,
            setsid=True,
            setsigmask=(),
            setsigdef=_OWN_SIGNALS,
        )
    except OSError as error:
        raise OperatorError(f"cannot start {command[0]}: {error.strerror}") from None
    found = _stat(pid)
    return Process(pid, found[1] if found else 0, boot_id())


def _stat(pid: int) -> tuple[str, int] | None:
    """State letter and start time of a process. Its name, in parentheses, may hold anything."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], int(fields[19])


def _reap(pid: int) -> None:
    """Take the exit status of a process that is this command's own child, so that it does not stay as a zombie."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


@contextlib.contextmanager
def _opened(pid: int) -> Iterator[int | None]:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)
