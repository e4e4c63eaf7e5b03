"""Who takes part in the faults of an archive: drivers that are killed, producers with a ledger, and the audit."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from brokers import DIES_WITH_PARENT, Broker
from cli.conftest import COMMAND, environment
from headrace.spark.faults import VARIABLE
from spark.driver_process import DEADLINE_S, DriverProcess
from spark.standalone import LOOPBACK, SETTINGS

TOPIC = "orders"
SCHEMA = "country string, quantity int"
# A broker that is killed is back long before.
PATIENT = ("--timeout", "120")
CLEAN = ("lost", "duplicated", "out_of_order", "corrupted", "deleted", "perhaps_deleted", "pending")


class Driver(DriverProcess):
    """`headrace pipeline archive`."""

    def __init__(
        self, broker: Broker, to: Path, *arguments: str, master: str = "local[2]", die_at: str = "", batch: int = 1000
    ) -> None:
        command = [
            *COMMAND, "pipeline", "archive", "--topic", TOPIC, "--to", str(to), "--bootstrap", broker.bootstrap,
            "--decode", "json", "--schema", SCHEMA, "--max-offsets-per-trigger", str(batch), "--master", master,
            "--json", *arguments,
        ]  # fmt: skip
        for name, value in SETTINGS.items():
            command += ["--spark-conf", f"{name}={value}"]
        known = {**environment(None), **({VARIABLE: die_at} if die_at else {})}
        if not master.startswith("local"):
            known["SPARK_LOCAL_IP"] = LOOPBACK["SPARK_LOCAL_IP"]
        super().__init__(command, known, to.parent)


def lines(first: int, count: int) -> list[bytes]:
    """Input of `headrace produce --json-lines`: over several days, and one in seven does not decode."""
    made = []
    for n in range(first, first + count):
        good = {"country": "NO", "quantity": n, "note": f"number {n}"}
        bad = [f"no JSON {n}", json.dumps([n]), json.dumps({"quantity": f"many {n}"})][n % 3]
        record: dict[str, Any] = {"value": bad if n % 7 == 0 else good, "timestamp": 1_700_000_000_000 + n * 60_000}
        if n % 5:
            record["key"] = f"key {n % 100}"
        if n % 11 == 0:
            record["headers"] = [{"name": "n", "value": str(n)}, {"name": "n", "value": None}]
        made.append(json.dumps(record).encode() + b"\n")
    return made


def send(broker: Broker, ledger: Path, given: Iterable[bytes]) -> None:
    """All of it acknowledged, and in the ledger, when this returns."""
    done = subprocess.run(
        [*COMMAND, "produce", TOPIC, "--json-lines", "--ledger", str(ledger), *PATIENT],
        env=environment(broker.bootstrap), input=b"".join(given), capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()


class Senders:
    """Traffic that goes on whatever is killed: `headrace load` at a pace, and lines for `headrace produce`."""

    def __init__(self, broker: Broker, ledger: Path, rate: int) -> None:
        self._errors = ledger.parent / "senders"
        self._sent = 0
        known, common = environment(broker.bootstrap), ("--ledger", str(ledger), *PATIENT)
        with self._errors.open("wb") as err:
            self._load = subprocess.Popen(
                [*DIES_WITH_PARENT, *COMMAND, "load", TOPIC, "--rate", str(rate), "--duration",
                 "100000", "--compression", "lz4", *common],
                env=known, stdout=subprocess.DEVNULL, stderr=err,
            )  # fmt: skip
            self._produce = subprocess.Popen(
                [*DIES_WITH_PARENT, *COMMAND, "produce", TOPIC, "--json-lines", *common],
                env=known, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=err,
            )  # fmt: skip

    def send(self, count: int) -> None:
        """More lines; they are sent when the broker is there to take them."""
        assert self._produce.stdin is not None
        self._produce.stdin.write(b"".join(lines(self._sent, count)))
        self._produce.stdin.flush()
        self._sent += count

    def stop(self) -> None:
        """Everything that was taken is acknowledged and in the ledger when this returns."""
        assert self._produce.stdin is not None
        self._produce.stdin.close()
        self._load.send_signal(signal.SIGINT)
        told = f"{self._load.wait(DEADLINE_S)} of load, {self._produce.wait(DEADLINE_S)} of produce"
        # Ctrl-C is the only end that load has here.
        assert told == "130 of load, 0 of produce", told + self._errors.read_text()[-3000:]


def audited(broker: Broker, ledger: Path, archive: Path) -> dict[str, int]:
    """`headrace pipeline audit` over ledger, topic and archive: exit code 0 and no fault; what it counted."""
    done = subprocess.run(
        [*DIES_WITH_PARENT, *COMMAND, *audit_command(broker, ledger, archive), "--master", "local[2]"],
        env=environment(None), capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return counted(done.stdout)


def audit_command(broker: Broker, ledger: Path, archive: Path) -> list[str]:
    where = ["--ledger", str(ledger), "--bootstrap", broker.bootstrap, "--archive", str(archive)]
    return ["pipeline", "audit", *where, "--json"]


def counted(output: str) -> dict[str, int]:
    """The counts of an audit's JSON, all producers and both stores together; an error where it is not clean."""
    told = json.loads(output)
    assert told["ok"], told
    assert told["verdict"] == "clean"
    assert {row["store"].split()[0] for row in told["stores"]} == {"topics", "archive"}
    assert [row["faults"] for row in told["stores"]] == [0, 0]
    counts = {name: sum(row[name] for row in told["producers"]) for name in CLEAN}
    assert not any(counts.values()), counts
    acknowledged = told["acknowledged_records"]
    assert sum(row["found"] for row in told["producers"]) == 2 * acknowledged
    unclaimed = max(row["unclaimed"] for row in told["stores"])
    return {"acknowledged": acknowledged, "unclaimed": unclaimed, **counts}
