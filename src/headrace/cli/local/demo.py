"""`headrace cluster demo-loss`: brokers are killed and returned in turn under load, with an account of every record."""

from __future__ import annotations

import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import reduce
from itertools import cycle
from operator import add
from pathlib import Path
from typing import Final

import click

from headrace.cli.local import cluster_file, control, traffic
from headrace.cli.local.account import Totals
from headrace.cli.local.cluster_file import LocalNode
from headrace.cli.local.commands import folder_option
from headrace.cli.local.traffic import PartitionTraffic
from headrace.cli.options import json_option
from headrace.cli.output import show_json
from headrace.client.admin import operations
from headrace.client.connection.metadata import NO_LEADER, Partition
from headrace.errors import HeadraceError

LINE_SECONDS: Final = 0.2
LED_WITHIN_S: Final = 30.0
IN_SYNC_WITHIN_S: Final = 60.0
SETTLE_S: Final = 1.0
REPLICAS: Final = 3


@dataclass(frozen=True, slots=True)
class Kill:
    """One broker killed and returned; a time is None when it did not come about while this was watched."""

    broker: int
    led_after_s: float | None
    """From the kill until other brokers led all the partitions."""
    in_sync_after_s: float | None
    """From its start until it was in sync with all of them."""


class Kills:
    """Kills one broker after the other with SIGKILL; the next only when the last is in sync again."""

    def __init__(self, folder: Path, topic: str, down_s: float, say: Callable[[str], None]) -> None:
        self.done: list[Kill] = []
        self.down: int | None = None
        self.failures: list[str] = []
        self._folder = folder
        self._topic = topic
        self._down_s = down_s
        self._say = say
        self._stop = threading.Event()
        self._local = cluster_file.load(folder)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when every broker is up again."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            for node in cycle(self._local.brokers):
                if self._stop.wait(SETTLE_S):
                    return
                self._kill_and_return(node)
        except HeadraceError as error:
            self.failures.append(str(error))
            control.start(self._folder)

    def _kill_and_return(self, node: LocalNode) -> None:
        control.send(self._folder, node.name, signal.SIGKILL)
        self.down = node.number
        self._say(f"killed broker {node.number}")
        killed_at = time.monotonic()
        led = len(self._local.brokers) > 1 and self._until(
            lambda parts: all(part.leader_id not in (node.number, NO_LEADER) for part in parts), LED_WITHIN_S
        )
        led_after_s = time.monotonic() - killed_at if led else None
        if led_after_s is not None:
            self._say(f"other brokers lead after {led_after_s:.1f} s")
        self._stop.wait(self._down_s)
        self._return(node, led_after_s)

    def _return(self, node: LocalNode, led_after_s: float | None) -> None:
        control.start(self._folder, [node.name])
        control.wait_until_ready(cluster_file.load(self._folder), lambda text: None)
        self.down = None
        started_at = time.monotonic()
        in_sync = self._until(
            lambda parts: all(set(part.replicas) <= set(part.in_sync) for part in parts),
            IN_SYNC_WITHIN_S,
            to_the_end=True,
        )
        in_sync_after_s = time.monotonic() - started_at if in_sync else None
        told = "is not in sync yet" if in_sync_after_s is None else f"is back, in sync after {in_sync_after_s:.1f} s"
        self._say(f"broker {node.number} {told}")
        self.done.append(Kill(node.number, led_after_s, in_sync_after_s))

    def _until(self, holds: Callable[[tuple[Partition, ...]], bool], within_s: float, to_the_end: bool = False) -> bool:
        """Whether the topic came to be so in time; unless `to_the_end`, being stopped ends the wait."""
        end = time.monotonic() + within_s
        with traffic.connect(self._local.bootstrap) as cluster:
            while time.monotonic() < end and (to_the_end or not self._stop.is_set()):
                try:
                    topic = cluster.topology([self._topic]).topics.get(self._topic)
                    if topic is not None and holds(topic.partitions):
                        return True
                except HeadraceError:
                    pass
                time.sleep(control.PAUSE_S)
        return False


@click.command("demo-loss")
@folder_option
@click.option("--seconds", type=click.FloatRange(1), default=60.0, show_default=True, help="How long to kill brokers.")
@click.option("--rate", type=click.FloatRange(1, 100_000), default=3000.0, show_default=True, help="Records a second.")
@click.option("--partitions", type=click.IntRange(1, 16), default=3, show_default=True, help="Of the demo's topic.")
@click.option(
    "--down", "down_s", type=click.FloatRange(0), default=3.0, show_default=True, metavar="SECONDS",
    help="How long a broker stays away after others have taken over.",
)  # fmt: skip
@json_option
def demo_loss(folder: Path, seconds: float, rate: float, partitions: int, down_s: float, as_json: bool) -> int:
    """Kill brokers (kill -9) and return them in turn while records are written and read.

    Producers are idempotent and wait for acks=-1. The exit code is 0 only if no
    acknowledged record was lost, duplicated or moved.
    """
    local = cluster_file.load(folder)
    topic = f"demo-loss-{secrets.token_hex(4)}"
    with traffic.connect(local.bootstrap) as cluster:
        operations.create_topic(cluster, topic, partitions=partitions, replicas=min(REPLICAS, len(local.brokers)))
    running = [PartitionTraffic(local.bootstrap, topic, n, rate / partitions) for n in range(partitions)]
    screen = _Screen(running)
    kills = Kills(folder, topic, down_s, screen.say)
    screen.kills = kills
    stop = threading.Event()

    def interrupt(*_: object) -> None:
        """Ctrl-C: brokers are returned and the account is closed. A second one ends it at once."""
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    signal.signal(signal.SIGINT, interrupt)
    began = time.monotonic()
    for each in running:
        each.start()
    kills.start()
    screen.watch(lambda: stop.is_set() or time.monotonic() - began > seconds or bool(kills.failures))
    kills.stop()
    for each in running:
        each.stop_sending()
    screen.watch(lambda: all(each.finished for each in running))
    for each in running:
        each.close()
    screen.clear()
    whole = _verdict(topic, running, kills, time.monotonic() - began, as_json)
    if whole:
        with traffic.connect(local.bootstrap) as cluster:
            operations.delete_topic(cluster, topic)
    return 0 if whole else 1


class _Screen:
    """The live line on a terminal; events are lines of their own, also where there is no terminal."""

    def __init__(self, running: list[PartitionTraffic]) -> None:
        self.kills: Kills | None = None
        self._running = running
        self._began = time.monotonic()
        self._is_terminal = sys.stderr.isatty()
        self._lock = threading.Lock()

    def say(self, event: str) -> None:
        with self._lock:
            self.clear()
            click.echo(f"{time.monotonic() - self._began:6.1f} s  {event}", err=True)

    def watch(self, done: Callable[[], bool]) -> None:
        pause = threading.Event()
        while not done():
            pause.wait(LINE_SECONDS)
            if self._is_terminal:
                with self._lock:
                    click.echo(f"\r\x1b[K{self._line()}", nl=False, err=True)

    def clear(self) -> None:
        if self._is_terminal:
            click.echo("\r\x1b[K", nl=False, err=True)

    def _line(self) -> str:
        now = totals(self._running)
        down = self.kills.down if self.kills is not None else None
        return (
            f"{time.monotonic() - self._began:6.1f} s  sent {now.sent:,}  acknowledged {now.acknowledged:,}  "
            f"read {now.read:,}  lost {now.lost}  duplicated {now.duplicated}  "
            + ("all brokers up" if down is None else f"broker {down} is down")
        )


def totals(running: list[PartitionTraffic], final: bool = False) -> Totals:
    return reduce(add, (each.account.totals(final) for each in running), Totals())


def _verdict(topic: str, running: list[PartitionTraffic], kills: Kills, took_s: float, as_json: bool) -> bool:
    final = totals(running, final=True)
    failures = [*dict.fromkeys(text for each in running for text in each.failures), *kills.failures]
    whole = final.is_whole and not failures and final.acknowledged > 0
    longest_s = max(each.longest_wait_s for each in running)
    for failure in failures:
        click.echo(f"headrace: {failure}", err=True)
    if as_json:
        show_json(
            {
                "topic": topic,
                "seconds": round(took_s, 1),
                **asdict(final),
                "longest_acknowledgement_s": round(longest_s, 2),
                "kills": [asdict(kill) for kill in kills.done],
                "whole": whole,
            }
        )
        return whole
    click.echo(
        f"{took_s:.0f} s, {len(kills.done)} kills (brokers {', '.join(str(kill.broker) for kill in kills.done) or '-'})"
    )
    click.echo(f"sent {final.sent:,}, acknowledged {final.acknowledged:,}, read {final.read:,}")
    click.echo(
        f"lost {final.lost}, duplicated {final.duplicated}, out of order {final.reordered}, "
        f"at another offset {final.misplaced}"
    )
    click.echo(f"longest wait for an acknowledgement: {longest_s:.1f} s")
    click.echo("nothing acknowledged was lost" if whole else f"NOT as it should be; topic {topic} is kept")
    return whole
