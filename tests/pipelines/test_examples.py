"""The worked examples in examples/, run as they are."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from brokers import Broker
from headrace.pipelines import delta, run
from json_topics import create, fill, json_values, records
from proving import proves

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"


@pytest.fixture
def example(spark: SparkSession, fresh_broker: Callable[..., Broker], tmp_path: Path) -> Callable[..., Broker]:
    """`example("job.sql", {topic: values}, name=value)` runs a job on a broker of its own."""
    broker = fresh_broker()

    def play(name: str, topics: dict[str, list[Any]], **settings: str) -> Broker:
        for topic, values in topics.items():
            create(broker.bootstrap, topic, 2)
            fill(broker.bootstrap, topic, values)
        done = run.run(spark, run.JobOptions(EXAMPLES / name, broker.bootstrap, tmp_path / "checkpoint", settings))
        assert done.ok
        return broker

    return play


def order(number: int, minute: int) -> dict[str, Any]:
    return {
        "order": f"0-{number}",
        "customer": f"customer-{number % 7}",
        "country": ("SE", "DE", "FR")[number % 3],
        "item": "item-1",
        "quantity": 1 + number % 4,
        "price": round(0.1 * number, 2),
        "status": "refused" if number % 10 == 9 else "paid",
        "at": f"2026-11-16T12:{minute:02}:{number % 60:02}Z",
    }


@proves("S10")
def test_revenue_per_minute(example: Callable[..., Broker], spark: SparkSession, tmp_path: Path) -> None:
    orders = [order(number, minute) for minute in range(6) for number in range(60)]
    broker = example(
        "revenue_per_minute.sql", {"orders": [*orders, b"no order"]}, tables=str(tmp_path / "tables"), least="20"
    )
    expected: dict[tuple[str, str], list[Decimal]] = defaultdict(list)
    for each in orders:
        amount = each["quantity"] * Decimal(str(each["price"]))
        # The newest order is of 12:05:59, so with two minutes for late ones all up to 12:02 is final.
        if each["status"] == "paid" and amount > 0 and each["at"] < "2026-11-16T12:03":
            expected[each["country"], each["at"][:16]].append(amount)
    found = {
        (value["country"], value["minute"][:16]): (value["orders"], Decimal(str(value["revenue"])))
        for value in json_values(broker.bootstrap, "revenue-per-minute")
    }
    assert found == {key: (len(amounts), sum(amounts)) for key, amounts in expected.items()}
    large = delta.read(spark, tmp_path / "tables" / "large_orders").collect()
    assert sorted((row["order"], row["at"].minute) for row in large) == sorted(
        (each["order"], int(each["at"][14:16]))
        for each in orders
        if each["quantity"] * Decimal(str(each["price"])) >= 20
    )


@proves("S10")
def test_clean_clicks(example: Callable[..., Broker]) -> None:
    users = [{"user": "user-1", "country": "DE"}, {"user": "user-2", "country": "FR"}]
    clicks: list[Any] = [
        {"click": "0-1", "user": "user-1", "page": "/items/1", "spent_ms": 100},
        {"click": "0-2", "user": "user-2", "page": "/items/2", "spent_ms": 0},
        {"click": "0-3", "user": "user-9", "page": "/items/3", "spent_ms": 7},
        {"click": "0-4", "user": "user-1", "page": "/items/4", "spent_ms": 99_999},
        b"not a click",
    ]
    broker = example("clean_clicks.py", {"users": users, "clicks": clicks}, longest_ms="1000")
    clean = {value["click"]: value.get("country") for value in json_values(broker.bootstrap, "clean-clicks")}
    assert clean == {"0-1": "DE", "0-2": "FR", "0-3": None}
    dead = {message.value(): dict(message.headers()) for message in records(broker.bootstrap, "clicks-dead")}
    assert set(dead) == {b"not a click", json.dumps(clicks[3]).encode()}
    assert dead[b"not a click"]["reason"] == b"not a click: user and page are needed"
    assert dead[b"not a click"]["source"].startswith(b"clicks/")


@proves("S10", "S3")
def test_paid_orders(example: Callable[..., Broker]) -> None:
    orders = [order(number, 0) for number in range(40)]
    broker = example("paid_orders.sql", {"orders": [*orders, b"no order"]}, batch="25")
    found = sorted(message.value() for message in records(broker.bootstrap, "paid-orders"))
    expected = [json.dumps(each | {"customer": "***"}).encode() for each in orders if each["status"] == "paid"]
    assert found == sorted(expected)


@proves("S15")
def test_the_notebook_reads_draws_and_writes(
    spark: SparkSession, fresh_broker: Callable[..., Broker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cells one after the other; `start()` gives the session that is there."""
    broker = fresh_broker()
    create(broker.bootstrap, "orders", 2)
    orders = [order(number, 0) for number in range(60)]
    fill(broker.bootstrap, "orders", orders)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    cells = json.loads((EXAMPLES / "quick_start.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            text = "".join(cell["source"]).replace("127.0.0.1:9092", broker.bootstrap)
            # The JVM was started elsewhere.
            exec(text.replace("./checkpoints", str(tmp_path / "checkpoints")), names)
    paid = [each for each in orders if each["status"] == "paid"]
    assert names["bars"]["orders"].sum() == len(paid)
    assert sorted(bar.get_width() for bar in names["axes"].patches) == sorted(names["bars"]["orders"])
    copied = json_values(broker.bootstrap, "paid-orders")
    assert sorted(value["order"] for value in copied) == sorted(each["order"] for each in paid)
