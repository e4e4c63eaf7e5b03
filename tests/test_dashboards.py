"""The files in deploy/ for Prometheus and Grafana ask for metrics and labels that there are, as kinds they are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import yaml

from headrace.metrics import FAMILIES, Family
from proving import proves

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
DASHBOARD = DEPLOY / "grafana" / "headrace.json"
RULES = DEPLOY / "prometheus" / "headrace.rules.yml"
SCRAPED_LABELS = {"job", "instance"}
"""Prometheus adds them to what it scrapes."""
OWN = {"up": Family("up", "gauge", "Of Prometheus itself.")}
RATES = {"rate", "irate", "increase"}
LABEL_VALUES = re.compile(r"label_values\((.*), (\w+)\)")
IN_TEXT = re.compile(r"\$labels\.(\w+)")
IN_LEGEND = re.compile(r"{{(\w+)}}")


def families() -> dict[str, Family]:
    """By the names of their samples."""
    found = dict(OWN)
    for family in FAMILIES:
        if family.kind == "histogram":
            bucket = Family(f"{family.name}_bucket", "counter", family.meaning, (*family.labels, "le"))
            sums = [
                Family(f"{family.name}_{end}", "counter", family.meaning, family.labels) for end in ("sum", "count")
            ]
            found |= {each.name: each for each in (bucket, *sums)}
        else:
            found[family.name] = family
    return found


def faults(expression: str) -> list[str]:
    """What is wrong with an expression: unknown metrics and labels, rates of gauges, counters without a rate."""
    known, found = families(), list[str]()
    labels, rated = set[str](), set[str]()
    selectors: list[Any] = []

    def look(node: Any) -> None:
        match node:
            case promql.Call() if node.func.name in RATES:
                rated.update(each.vector_selector.name for each in node.args)
            case promql.VectorSelector():
                selectors.append(node)
            case promql.AggregateExpr() if node.modifier is not None:
                labels.update(node.modifier.labels)

    promql.walk(promql.parse(expression), look)
    for selector in selectors:
        family = known.get(selector.name)
        if family is None:
            found.append(f"there is no metric {selector.name}")
            continue
        asked = {matcher.name for matcher in selector.matchers.matchers} | labels
        found += [f"{family.name} has no label {name}" for name in asked - {*family.labels} - SCRAPED_LABELS]
        if (family.kind == "counter") != (family.name in rated):
            found.append(f"{family.name} is a {family.kind}")
    return found


def panels() -> Iterator[dict[str, Any]]:
    yield from (panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row")


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def as_prometheus_sees(expression: str) -> str:
    """With Grafana's variables replaced."""
    return re.sub(r"\$\w+", "x", expression.replace("$__rate_interval", "5m"))


@proves("U4")
def test_panels_ask_for_metrics_that_there_are() -> None:
    asked = {
        f"{panel['title']}: {target['expr']}": faults(as_prometheus_sees(target["expr"]))
        for panel in panels()
        for target in panel["targets"]
    }
    assert len(asked) > 20
    assert {expression: found for expression, found in asked.items() if found} == {}


@proves("U4")
def test_legends_name_labels_that_the_expression_leaves() -> None:
    for panel in panels():
        for target in panel["targets"]:
            grouped = re.search(r"by \(([^)]*)\)", target["expr"])
            left = set(grouped[1].split(", ")) if grouped else SCRAPED_LABELS
            assert set(IN_LEGEND.findall(target["legendFormat"])) <= left, target


@proves("U4")
def test_variables_of_the_dashboard_are_labels_and_all_that_are_used_are_declared() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    declared = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$(\w+)", json.dumps(dashboard["panels"]))) - {"__rate_interval"}
    assert used <= declared | {"datasource"}
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            asked = LABEL_VALUES.fullmatch(variable["definition"])
            assert asked is not None
            family = families()[asked[1].partition("{")[0]]
            assert asked[2] in {*family.labels, *SCRAPED_LABELS}


@proves("U4")
def test_panels_do_not_lie_on_each_other() -> None:
    places = [panel["gridPos"] for panel in json.loads(DASHBOARD.read_text())["panels"]]
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


@proves("U4")
def test_alerts_ask_for_metrics_that_there_are_and_say_what_to_do() -> None:
    known = {label for family in families().values() for label in family.labels} | SCRAPED_LABELS
    for rule in rules():
        assert faults(rule["expr"]) == [], rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "action"}
        assert set(IN_TEXT.findall(json.dumps(rule["annotations"]))) <= known


@proves("U4")
def test_what_is_not_there_is_found() -> None:
    assert faults("rate(headrace_no_such_total[5m])") == ["there is no metric headrace_no_such_total"]
    assert faults("sum by (colour) (headrace_log_bytes)") == ["headrace_log_bytes has no label colour"]
    assert faults("rate(headrace_log_bytes[5m])") == ["headrace_log_bytes is a gauge"]
    assert faults("headrace_batches_total > 5") == ["headrace_batches_total is a counter"]
