"""Members of consumer groups, each a process, seen from the test: their partitions, their records, how they end."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from brokers import DIES_WITH_PARENT, Broker, wait_for
from clients import with_kafkajs

PROGRAM = Path(__file__).parent / "member.py"
REBALANCED = re.compile(r"% Group \S+ rebalanced .*: (assigned|revoked): (.*)")
NAMED_PARTITION = re.compile(r"\[(\d+)\]")
JOIN_DEADLINE_S = 120.0


class Member:
    """One member; a thread follows what it says."""

    def __init__(
        self,
        client: str,
        broker: Broker,
        group: str,
        topic: str,
        strategy: str = "range",
        session_ms: int = 3000,
        instance: str | None = None,
    ) -> None:
        self.client = client
        self.partitions: list[int] = []
        self.changes = 0
        self.records: list[tuple[int, int, bytes]] = []
        self.fatal = ""
        self.ending = False
        self.complaints: deque[str] = deque(maxlen=20)
        given = {
            "bootstrap": broker.bootstrap,
            "group": group,
            "topic": topic,
            "strategy": strategy,
            "session_ms": session_ms,
            "instance": instance,
        }
        self.process = self._start(given)
        self._follow(self.process.stdout, self._told_by_kcat if client == "kcat" else self._told)
        self._follow(self.process.stderr, self._told_of_rebalance if client == "kcat" else self.complaints.append)

    def _start(self, given: dict[str, object]) -> subprocess.Popen[str]:
        environment = None
        if self.client == "kafkajs":
            command, environment = with_kafkajs.command(), with_kafkajs.environment()
        elif self.client == "kcat":
            settings = {
                "session.timeout.ms": given["session_ms"],
                "heartbeat.interval.ms": int(str(given["session_ms"])) // 6,
                "partition.assignment.strategy": given["strategy"],
                "auto.offset.reset": "earliest",
                "auto.commit.interval.ms": 50,
            }
            command = [*DIES_WITH_PARENT, "kcat", "-b", str(given["bootstrap"]), "-G", str(given["group"])]
            for name, value in settings.items():
                command += ["-X", f"{name}={value}"]
            command += ["-u", "-f", "%p %o %s\\n", str(given["topic"])]
        else:
            command = [*DIES_WITH_PARENT, sys.executable, str(PROGRAM), self.client, json.dumps(given)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
        )
        if self.client == "kafkajs":
            assert process.stdin is not None
            join = {"id": 1, "do": "join", "sessionMs": given["session_ms"], **given}
            process.stdin.write(json.dumps(join) + "\n")
            process.stdin.flush()
        return process

    def _follow(self, pipe: IO[str] | None, told: Callable[[str], None]) -> None:
        assert pipe is not None

        def read() -> None:
            for line in pipe:
                told(line)

        threading.Thread(target=read, daemon=True).start()

    def _told(self, line: str) -> None:
        said = json.loads(line)
        match said.get("event"):
            case "assigned":
                self._assigned(said["partitions"])
            case "record":
                self.records.append((said["partition"], said["offset"], base64.b64decode(said["value"] or "")))
            case "fatal":
                self.fatal = said["error"]

    def _told_by_kcat(self, line: str) -> None:
        partition, offset, value = line.rstrip("\n").split(" ", 2)
        self.records.append((int(partition), int(offset), value.encode()))

    def _told_of_rebalance(self, line: str) -> None:
        said = REBALANCED.match(line)
        if said:
            named = {int(number) for number in NAMED_PARTITION.findall(said[2])}
            self._assigned(sorted(named) if said[1] == "assigned" else [])

    def _assigned(self, partitions: list[int]) -> None:
        self.partitions = sorted(partitions)
        self.changes += 1

    def check_alive(self) -> None:
        if not self.ending and not self.fatal and self.process.poll() is not None:
            raise AssertionError(f"a member with {self.client} died: {''.join(self.complaints)}")

    def leave(self) -> None:
        """Leave the group in good order; returns when the process has ended."""
        self.ending = True
        assert self.process.stdin is not None
        if self.client == "kcat":
            self.process.terminate()
        else:
            self.process.stdin.write('{"id": 2, "do": "leave"}\n')
            self.process.stdin.flush()
        self.process.wait(JOIN_DEADLINE_S)
        self.partitions = []

    def kill(self) -> None:
        """SIGKILL: the broker learns of it by silence alone."""
        self.ending = True
        self.process.kill()
        self.process.wait()
        self.partitions = []


def wait_shared(members: list[Member], partitions: int) -> None:
    """Wait until the members have all partitions between them, none twice, as evenly as can be."""
    least = partitions // len(members)

    def shared() -> bool:
        for member in members:
            member.check_alive()
        held = [partition for member in members for partition in member.partitions]
        even = all(least <= len(member.partitions) <= least + 1 for member in members)
        return even and sorted(held) == list(range(partitions))

    try:
        wait_for("the partitions to be shared", shared, JOIN_DEADLINE_S)
    except AssertionError as error:
        state = {f"{member.client} {n}": (member.partitions, member.fatal) for n, member in enumerate(members)}
        raise AssertionError(f"{error}: {state}") from None


def wait_values(members: list[Member], values: set[bytes]) -> None:
    """Wait until every one of these values has come to some member."""

    def missing() -> set[bytes]:
        for member in members:
            member.check_alive()
        return values - {value for member in members for _, _, value in list(member.records)}

    try:
        wait_for("the records", lambda: not missing(), JOIN_DEADLINE_S)
    except AssertionError as error:
        raise AssertionError(f"{error}: {sorted(missing())[:10]} did not come") from None


Join = Callable[..., Member]


def joining() -> Iterator[Join]:
    """For a fixture that starts members which do not outlive the test: `join(client, broker, group, topic, ...)`."""
    started: list[Member] = []

    def start(client: str, broker: Broker, group: str, topic: str, **how: object) -> Member:
        started.append(Member(client, broker, group, topic, **how))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for member in started:
        member.kill()
