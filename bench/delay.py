"""Delayed records of one broker: what millions that wait cost, and how late those come that are due.

    python bench/delay.py --waiting 10000000 --due 1000000 --rate 1000 --kills 3
    python bench/delay.py                                                         the short form

First so many records wait, due over the next month: the rate at which they are taken, memory before and after, disk,
and how long a start takes until all of them are known again, after a clean stop and after SIGKILL. Then, with those
waiting, so many are due at an even rate, and a consumer notes how late each came by the broker's own clock. Then again,
and the broker is killed meanwhile. Of every record it is seen that it came once, and not early. Prints a line of JSON
per step.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any, Final

from confluent_kafka import Consumer, Producer, TopicPartition

from headrace.client.admin import operations
from headrace.client.admin.cluster import Cluster

WAITING: Final = "waiting"
DUE: Final = "due"
PARTITIONS: Final = 4
MONTH_MS: Final = 30 * 86_400_000
DEADLINE_S: Final = 3600.0
LEAD_MS: Final = 3000
"""Between what is sent last and what is due first."""


class Serving:
    """A broker on a folder, which listens at the same place after each start."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._listen = self._http = "127.0.0.1:0"
        self.start()

    def start(self) -> float:
        """Seconds until it is ready."""
        began = time.monotonic()
        program = str(Path(sys.executable).parent / "headrace")
        command = [program, "serve", "--data", str(self._folder), "--listen", self._listen]
        command += ["--set", f"http.listen={self._http}"]
        with (self._folder.parent / "broker.stderr").open("ab") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        if not line.startswith("ready "):
            raise SystemExit("the broker did not start")
        addresses = dict(part.split("=", 1) for part in line.split()[1:])
        self._listen, self._http = self.bootstrap, _ = addresses["kafka"], addresses["http"]
        return time.monotonic() - began

    def stop(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        self.process.wait(120)

    def memory_mb(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/status").read_text().split()
        return round(int(fields[fields.index("RssAnon:") + 1]) / 1024, 1)

    def waiting(self, topic: str) -> int:
        with urllib.request.urlopen(f"http://{self._http}/metrics", timeout=30) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith(f'headrace_delayed_records_waiting{{topic="{topic}"}}'):
                    return int(float(line.split()[-1]))
        return 0

    def wait_known(self, topic: str, count: int) -> float:
        """Seconds until the timer has so many."""
        began = time.monotonic()
        while self.waiting(topic) < count:
            if time.monotonic() - began > DEADLINE_S:
                raise SystemExit(f"{self.waiting(topic)} of {count} records wait")
            time.sleep(0.02)
        return time.monotonic() - began


def send(bootstrap: str, topic: str, dues_ms: list[int]) -> float:
    """Seconds that it took."""
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 20})
    began = time.monotonic()
    for number, due_ms in enumerate(dues_ms):
        headers: Any = [("headrace.deliver.at", b"%d" % due_ms)]
        while True:
            try:
                producer.produce(topic, b"%0100d" % number, partition=number % PARTITIONS, headers=headers)
                break
            except BufferError:
                producer.poll(0.05)
    if producer.flush(600):
        raise SystemExit("not all records were taken")
    return time.monotonic() - began


class Reader(threading.Thread):
    """Notes what was delivered, and how late."""

    def __init__(self, bootstrap: str, topic: str, count: int) -> None:
        super().__init__(daemon=True)
        self._consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "unused", "enable.auto.commit": False})
        self._consumer.assign([TopicPartition(topic, each, 0) for each in range(PARTITIONS)])
        self._count = count
        self.seen: Counter[int] = Counter()
        self.late_ms: list[int] = []
        self.start()

    def run(self) -> None:
        end = time.monotonic() + DEADLINE_S
        while len(self.seen) < self._count and time.monotonic() < end:
            for message in self._consumer.consume(1000, 0.5):
                if message.error() is None:
                    self.seen[int(message.value() or b"-1")] += 1
                    due = dict(message.headers() or [])["headrace.delayed.due"]
                    self.late_ms.append(message.timestamp()[1] - int(due or b"0"))
        for message in self._consumer.consume(1000, 2.0):
            if message.error() is None:
                self.seen[int(message.value() or b"-1")] += 1
        self._consumer.close()


def wait_step(serving: Serving, count: int, folder: Path, seed: int) -> None:
    drawn = random.Random(seed)
    before_mb, now_ms = serving.memory_mb(), int(time.time() * 1000)
    dues = [now_ms + 3_600_000 + drawn.randrange(MONTH_MS) for _ in range(count)]
    seconds = send(serving.bootstrap, WAITING, dues)
    serving.wait_known(WAITING, count)
    files = sum(path.stat().st_size for path in folder.rglob("*.delays"))
    tell("waiting", records=count, taken_per_s=round(count / seconds), memory_before_mb=before_mb,
         memory_mb=serving.memory_mb(), timer_files_mb=round(files / 1e6, 1))  # fmt: skip
    for name, number in (("clean", signal.SIGTERM), ("killed", signal.SIGKILL)):
        serving.stop(number)
        ready_s = serving.start()
        tell(f"start, {name}", ready_s=round(ready_s, 2), all_known_s=round(serving.wait_known(WAITING, count), 2),
             memory_mb=serving.memory_mb())  # fmt: skip


def due_step(serving: Serving, topic: str, count: int, rate: int, kills: int) -> None:
    with Cluster(serving.bootstrap) as client:
        operations.create_topic(client, topic, partitions=PARTITIONS, configs={"headrace.delay.enable": True})
    first_ms = int(time.time() * 1000) + LEAD_MS + count // 50
    send(serving.bootstrap, topic, [first_ms + number * 1000 // rate for number in range(count)])
    sent_before_ms = first_ms - int(time.time() * 1000)
    reader = Reader(serving.bootstrap, topic, count)
    for nth in range(kills):
        at_ms = first_ms + (nth + 1) * (count * 1000 // rate) // (kills + 1)
        time.sleep(max(0.0, at_ms / 1000 - time.time()))
        serving.stop(signal.SIGKILL)
        serving.start()
    reader.join()
    late = sorted(reader.late_ms)
    tell("due", records=count, per_s=rate, kills=kills, sent_before_ms=sent_before_ms, delivered=len(reader.seen),
         twice=sum(each > 1 for each in reader.seen.values()), early=sum(each < 0 for each in late),
         late_p50_ms=late[len(late) // 2], late_p99_ms=late[len(late) * 99 // 100], late_max_ms=late[-1],
         memory_mb=serving.memory_mb())  # fmt: skip


def tell(step: str, **figures: object) -> None:
    print(json.dumps({"step": step, **figures}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, default=200_000)
    parser.add_argument("--due", type=int, default=20_000)
    parser.add_argument("--rate", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="delay-"))
    (place / "data").mkdir()
    serving = Serving(place / "data")
    try:
        with Cluster(serving.bootstrap) as client:
            operations.create_topic(client, WAITING, partitions=PARTITIONS, configs={"headrace.delay.enable": True})
        wait_step(serving, asked.waiting, place / "data", asked.seed)
        due_step(serving, DUE, asked.due, asked.rate, 0)
        due_step(serving, f"{DUE}-killed", asked.due, asked.rate, asked.kills)
    finally:
        serving.stop(signal.SIGKILL)
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
