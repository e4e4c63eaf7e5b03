"""A Spark driver as a process of its own, with the JVM and the Python workers below it: to be killed."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from brokers import DIES_WITH_PARENT, wait_for
from spark import process_tree

DEADLINE_S = 300.0


class DriverProcess:
    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        self.output, self.errors = folder / "stdout", folder / "stderr"
        with self.output.open("wb") as out, self.errors.open("wb") as err:
            self.process = subprocess.Popen([*DIES_WITH_PARENT, *command], stdout=out, stderr=err, env=environment)

    @property
    def runs(self) -> bool:
        return self.process.poll() is None

    def workers(self) -> list[int]:
        """The Python processes that plan, read, write and commit, without the one that forks them."""
        return [pid for pid in process_tree.below(self.process.pid) if process_tree.is_python_worker(pid)][1:]

    def kill(self) -> None:
        """The driver and its JVM; returns when their workers are gone too."""
        family = process_tree.below(self.process.pid)
        self.process.kill()
        process_tree.kill(pid for pid in family if "java" in process_tree.command(pid).split(" ")[0])
        self.process.wait()
        wait_for("the workers of a killed driver to end", lambda: not any(map(process_tree.lives, family)), DEADLINE_S)

    def wait(self, within_s: float = DEADLINE_S) -> int:
        family: set[int] = set()

        def ended() -> bool:
            family.update(process_tree.below(self.process.pid))
            return not self.runs and not any(map(process_tree.lives, family))

        wait_for("a driver and its workers to end", ended, within_s, pause_s=0.1)
        status: int = self.process.returncode
        return status

    def told(self) -> str:
        return self.errors.read_text()[-3000:]
