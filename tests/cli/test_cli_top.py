"""`headrace top`: what goes through a cluster, once and live."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from brokers import Broker
from cli.conftest import Run, Running, Terminal
from headrace.cli import activity
from headrace.cli.top import share
from headrace.client.admin.cluster import Cluster
from proving import proves

MakeTopic = Callable[..., str]


@pytest.fixture
def read(inside: Run, topic: MakeTopic) -> str:
    """A topic with ten records, of which a group has read four."""
    name = topic()
    inside("produce", name, stdin="".join(f"{n}\n" for n in range(10)))
    inside("consume", name, "--group", f"group-of-{name}", "--count", "4")
    return name


@proves("U1")
def test_a_look_gives_brokers_topics_and_groups_with_their_lag(inside: Run, broker: Broker, read: str) -> None:
    shown = json.loads(inside("top", "--once", "--every", "10ms", "--json").stdout)
    (only,) = shown["brokers"]
    assert (only["address"], only["answers"], only["controller"]) == (broker.bootstrap, True, True)
    (topic,) = [row for row in shown["topics"] if row["topic"] == read]
    assert (topic["partitions"], topic["not_in_sync"], topic["records_in_per_s"]) == (1, 0, 0)
    assert topic["stored_bytes"] > 0
    (group,) = [row for row in shown["groups"] if row["group"] == f"group-of-{read}"]
    assert (group["state"], group["lag"], group["records_out_per_s"]) == ("Empty", 6, 0)
    assert not [row for row in shown["topics"] if row["topic"].startswith("__")]
    internal = json.loads(inside("top", "--once", "--every", "10ms", "--json", "--internal").stdout)
    assert [row for row in internal["topics"] if row["topic"] == "__consumer_offsets"]
    text = inside("top", "--once", "--every", "10ms").stdout
    assert [line.split()[0] for line in text.splitlines() if read in line] == [read, f"group-of-{read}"]


@proves("U1")
def test_rates_are_what_came_and_was_read_between_two_looks(inside: Run, broker: Broker, read: str) -> None:
    def connect(at: str | None = None, answer_ms: int = 10_000, kind: type[Cluster] = Cluster, **_: int) -> Cluster:
        return kind(at or broker.bootstrap, timeout_ms=answer_ms)

    before = activity.look(connect, internal=False)
    inside("produce", read, stdin="".join(f"{n}\n" for n in range(30)))
    inside("consume", read, "--group", f"group-of-{read}", "--count", "16")
    now = activity.look(connect, internal=False)
    found = activity.compare(replace(before, at_s=now.at_s - 2), now)
    (topic,) = [row for row in found.topics if row.topic == read]
    assert (topic.records_in_per_s, topic.records_out_per_s) == (15, 8)
    grown = sum(now.sizes[place] - before.sizes[place] for place in now.sizes if place[1] == read)
    assert topic.bytes_in_per_s == grown / 2 > 0
    (group,) = [row for row in found.groups if row.group == f"group-of-{read}"]
    assert (group.lag, group.records_out_per_s) == (20, 8)
    assert found.brokers[0].records_in_per_s == 15
    (first,) = [row for row in activity.compare(None, now).topics if row.topic == read]
    assert first.records_in_per_s is None, "there is no rate of one look"


@proves("U1")
@pytest.mark.parametrize(
    ("needs", "given"),
    [([3, 1, 0], [3, 1, 0]), ([3, 9, 0], [3, 4, 0]), ([9, 9, 9], [2, 2, 3]), ([1, 9, 9], [1, 3, 3])],
)
def test_a_table_leaves_the_lines_that_it_does_not_need_to_the_others(needs: list[int], given: list[int]) -> None:
    assert share(7, needs) == given


@proves("U1")
def test_it_is_live_on_a_terminal_until_q(inside: Run, terminal: Callable[..., Terminal], read: str) -> None:
    screen = terminal("top", "--every", "0.1")
    assert "\x1b[?1049h" in screen.until("(q ends it)")
    screen.until("bytes/s")
    screen.until("(q ends it)")
    screen.type(b"xq")
    assert screen.wait() == 0


def test_elsewhere_it_is_printed_again_and_again(start: Callable[..., Running], read: str) -> None:
    watching = start("top", "--every", "0.05")
    began = time.monotonic()
    heads = 0
    while heads < 2:
        heads += watching.lines(1)[0].startswith("--- ")
        assert time.monotonic() - began < 60
    assert watching.interrupt()[0] == 130
