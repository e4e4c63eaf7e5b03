"""What an operator looks at: health, readiness, topics, the status page, Prometheus' endpoint, and plain errors."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from headrace.coordinators.state_partitions import ClosedPartition
from headrace.groups.descriptions import Lag
from headrace.http import status
from headrace.metrics import LATENCY_BOUNDS_SECONDS, Family, Sample
from http_port import HttpPort

LINE = re.compile(r'([a-z_][a-z0-9_]*)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)*)\})? (-?[0-9.e+-]+)')


def exposition(port: HttpPort) -> dict[str, float]:
    """Every sample by its name with labels, checked against the format: each family once, help and kind first."""
    answer = port.get("/metrics")
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    text = answer.body.decode()
    assert text.endswith("\n")
    samples: dict[str, float] = {}
    seen: list[str] = []
    family = ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            family = line.split(" ")[2]
            assert family not in seen
            seen.append(family)
        elif line.startswith("# TYPE "):
            assert line.split(" ")[2] == family
            assert line.split(" ")[3] in ("counter", "gauge", "histogram")
        else:
            matched = LINE.fullmatch(line)
            assert matched, line
            assert matched[1].startswith(family)
            name = matched[1] + (f"{{{matched[2]}}}" if matched[2] else "")
            assert name not in samples
            samples[name] = float(matched[3])
    return samples


def test_health_and_readiness_are_two_things(port: HttpPort) -> None:
    assert port.get("/health").json == {"status": "alive"}
    assert port.get("/ready").json == {"status": "ready"}
    port.unready = "the logs are being recovered"
    assert port.get("/health").status == 200
    answer = port.get("/ready")
    assert (answer.status, answer.json) == (503, {"status": "not ready", "reason": "the logs are being recovered"})


def test_topics_are_listed_and_described(port: HttpPort) -> None:
    port.create("orders", 2, durability="disk")
    port.create("__consumer_offsets", internal=True)
    port.produce("/topics/orders/records?partition=1", b"v", "text/plain")
    assert port.get("/topics").json["topics"] == [
        {"name": "__consumer_offsets", "id": "5f5f636f-6e73-756d-6572-5f6f66667365", "partitions": 1, "internal": True},
        {"name": "orders", "id": "6f726465-7273-0000-0000-000000000000", "partitions": 2, "internal": False},
    ]
    described = port.get("/topics/orders").json
    assert described["overrides"] == {"durability": "disk"}
    assert (described["settings"]["durability"], described["settings"]["cleanup.policy"]) == ("disk", "delete")
    second = described["partition_list"][1]
    assert second.pop("size_bytes") > 60
    assert second == {
        "partition": 1,
        "leader": 7,
        "leader_epoch": 0,
        "in_sync": [7],
        "replicas": [7],
        "role": "leader",
        "start_offset": 0,
        "high_watermark": 1,
        "last_stable_offset": 1,
        "end_offset": 1,
        "durable_offset": 1,
        "durability": "disk",
        "offline": None,
    }
    assert port.get("/topics/other").status == 404


def test_metrics_have_what_an_operator_needs(port: HttpPort) -> None:
    port.produce("/topics/orders/records", b"v", "text/plain")
    port.get("/topics/other")
    port.lags = [Lag("billing", "orders", 0, 1, 41)]
    port.metrics.observe("Fetch", 0.003)
    port.metrics.observe("Fetch", 99.0)
    port.metrics.error("Fetch", 1)
    port.metrics.syncs.add(0.0004)
    port.metrics.bytes_in += 1 << 40
    samples = exposition(port)
    assert samples['headrace_request_seconds_count{api="http.produce"}'] == 1
    assert samples['headrace_request_seconds_bucket{api="Fetch",le="0.0025"}'] == 0
    assert samples['headrace_request_seconds_bucket{api="Fetch",le="0.005"}'] == 1
    assert samples['headrace_request_seconds_bucket{api="Fetch",le="10"}'] == 1
    assert samples['headrace_request_seconds_bucket{api="Fetch",le="+Inf"}'] == 2
    assert samples['headrace_request_seconds_sum{api="Fetch"}'] == pytest.approx(99.003)
    assert samples['headrace_request_errors_total{api="Fetch",code="1"}'] == 1
    assert samples['headrace_request_errors_total{api="http.topic",code="404"}'] == 1
    assert samples['headrace_sync_seconds_bucket{le="0.0005"}'] == 1
    assert samples['headrace_log_end_offset{topic="orders",partition="0"}'] == 1
    assert samples['headrace_log_bytes{topic="orders",partition="0"}'] > 60
    assert samples['headrace_group_lag{group="billing",topic="orders",partition="0"}'] == 41
    assert samples["headrace_received_bytes_total"] > 1 << 40
    assert samples["headrace_sent_bytes_total"] > 0
    assert samples["headrace_ready"] == 1
    assert samples["headrace_http_connections"] == 1
    assert samples["process_resident_memory_bytes"] > 1 << 20
    assert samples["process_cpu_seconds_total"] > 0
    assert samples["process_open_fds"] > 3
    for name in ("connections", "connections_accepted_total", "protocol_errors_total", "connections_held_back"):
        assert f"headrace_{name}" in samples


def test_the_buckets_of_a_histogram_never_fall(port: HttpPort) -> None:
    for bound in (*LATENCY_BOUNDS_SECONDS, 0.0, 1e-9, 11.0):
        port.metrics.observe("Produce", bound)
    samples = exposition(port)
    buckets = [value for name, value in samples.items() if name.startswith('headrace_request_seconds_bucket{api="Prod')]
    assert buckets == sorted(buckets)
    assert len(buckets) == len(LATENCY_BOUNDS_SECONDS) + 1
    assert samples['headrace_request_seconds_bucket{api="Produce",le="0.0005"}'] == 3
    assert buckets[-1] == samples['headrace_request_seconds_count{api="Produce"}'] == len(LATENCY_BOUNDS_SECONDS) + 3


def test_collected_samples_of_one_family_stand_together_and_labels_are_escaped(port: HttpPort) -> None:
    a_gauge = Family("a_gauge", "gauge", "A.", ("who",))

    def collect() -> list[Sample]:
        return [
            Sample(a_gauge, ('quo"te',), 1),
            Sample(Family("b_gauge", "gauge", "B."), (), 0.5),
            Sample(a_gauge, ("new\nline\\",), 2),
        ]

    port.metrics.collect(collect)
    samples = exposition(port)
    assert samples[r'a_gauge{who="quo\"te"}'] == 1
    assert samples[r'a_gauge{who="new\nline\\"}'] == 2
    assert samples["b_gauge"] == 0.5


class Page(HTMLParser):
    """The text of a page, checked for tags that do not close and for anything that runs."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.words: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        assert not any(name.startswith("on") or name == "src" for name, _ in attrs)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip() and self.open[-1] != "style":
            self.words.append(data.strip())

    @property
    def text(self) -> str:
        return " ".join(self.words)


def page(port: HttpPort) -> Page:
    answer = port.get("/")
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    shown = Page(answer.body.decode())
    assert "script" not in shown.tags
    return shown


def test_the_status_page_of_a_new_broker_says_what_to_do_next(port: HttpPort) -> None:
    text = page(port).text
    assert "Headrace broker 7" in text
    assert "State ready" in text
    assert "test-cluster, 1 brokers" in text
    assert "Uptime 1 d 01:01:0" in text
    assert "No topics yet. A producer that names one creates it, as does headrace topic create" in text
    assert "No consumer group has committed an offset." in text
    assert b'href="/openapi.json"' in port.get("/").body


def test_the_status_page_shows_topics_and_groups(port: HttpPort) -> None:
    port.create("orders", 3)
    port.produce("/topics/orders/records", {"records": [{"value": "v", "partition": 2}] * 1200})
    port.lags = [Lag("billing", "orders", 2, 100, 1100)]
    text = page(port).text
    assert "orders 3 1,200" in text
    assert "0 to 1,200" in text
    assert "billing orders 2 100 1,100" in text
    assert "archive" not in text
    port.create("kept", retention_archived="true")
    assert "live, 0 records archived, 0 B held for the archive" in page(port).text


def test_groups_that_cannot_be_served_for_damage_are_shown(port: HttpPort) -> None:
    port.closed = [ClosedPartition(7, 1234, "a <wrong> byte", is_damage=True)]
    assert "Partition 7 of __consumer_offsets cannot be read at offset 1,234" in page(port).text
    assert "a <wrong> byte" in page(port).text
    assert exposition(port)['headrace_group_partition_closed{partition="7"}'] == 1


def test_names_from_outside_are_only_text_on_the_status_page(port: HttpPort) -> None:
    port.lags = [Lag('<script>alert("x")</script>', "a&b", 0, 0, 0)]
    port.unready = "<b>"
    shown = page(port)
    assert '<script>alert("x")</script>' in shown.text
    assert "not ready: <b>" in shown.text
    assert "b" not in shown.tags


def test_the_status_page_stays_short(port: HttpPort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "ROWS_MAX", 10)
    port.lags = [Lag(f"group {n}", "orders", 0, 0, 0) for n in range(25)]
    text = page(port).text
    assert text.count("group ") == 10 + 0
    assert "and 15 more." in text


@pytest.mark.parametrize(
    "target", ["/nothing", "/topics/", "/topics/a/b", "//", "/health/", "*", "/topics/a/records/b"]
)
def test_a_path_that_is_not_there_lists_those_that_are(port: HttpPort, target: str) -> None:
    answer = port.get(target)
    assert answer.status == 404
    if target != "/topics/":
        assert "POST /topics/{topic}/records" in answer.error["message"]


@pytest.mark.parametrize(
    ("method", "target", "allowed"),
    [
        ("POST", "/health", "GET"),
        ("PUT", "/topics/orders", "DELETE, GET, PATCH"),
        ("PUT", "/topics/o/records", "GET, POST"),
    ],
)
def test_a_method_that_does_not_fit_names_the_one_that_does(
    port: HttpPort, method: str, target: str, allowed: str
) -> None:
    answer = port.ask(method, target)
    assert (answer.status, answer.headers["Allow"]) == (405, allowed)
    assert answer.error["message"] == f"{method} is not for {target}; use {allowed}"


def test_a_query_where_none_is_known_is_refused(port: HttpPort) -> None:
    answer = port.get("/health?verbose=1")
    assert answer.status == 400
    assert answer.error["message"] == "unknown query parameter 'verbose'; /health knows: none"
