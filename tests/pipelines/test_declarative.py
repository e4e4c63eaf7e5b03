"""The declarative pipeline in examples/, run as its readers do: by Spark's own command `spark-pipelines`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyspark

from brokers import Broker
from headrace.arrow.stored_table import StoredTable
from json_topics import create, fill, json_values, records
from proving import proves
from spark.standalone import SHORT_LIVED

EXAMPLE = Path(__file__).resolve().parent.parent.parent / "examples" / "declarative"
PROGRAM = Path(pyspark.__file__).parent / "bin" / "spark-pipelines"
DEADLINE_S = 500


def order(number: int) -> dict[str, Any]:
    return {
        "order": f"0-{number}",
        "customer": f"customer-{number % 7}",
        "country": ("SE", "DE", "FR")[number % 3],
        "quantity": 1 + number % 4,
        "price": 0.5 * number,
        "status": "refused" if number % 10 == 9 else "paid",
        "at": "2026-11-16T12:00:00Z",
    }


def rows(table: Path) -> list[dict[str, Any]]:
    stored = StoredTable(table)
    return [row for _, window in stored.windows(0, stored.schema.names, 1000) for row in window.to_pylist()]


@proves("S15")
def test_topics_go_through_bronze_silver_and_gold(fresh_broker: Callable[..., Broker], tmp_path: Path) -> None:
    broker = fresh_broker()
    orders = [order(number) for number in range(60)]
    create(broker.bootstrap, "orders", 2)
    fill(broker.bootstrap, "orders", [*orders, b"no order"])
    project = tmp_path / "project"
    shutil.copytree(EXAMPLE, project, ignore=shutil.ignore_patterns("__pycache__"))
    spec = project / "spark-pipeline.yml"
    text = spec.read_text().replace("127.0.0.1:9092", broker.bootstrap)
    spec.write_text(text.replace("file:///tmp/headrace-orders", tmp_path.as_uri()))
    environment = {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1", "JAVA_TOOL_OPTIONS": SHORT_LIVED}
    ran = subprocess.run(
        [PROGRAM, "run", "--spec", spec, "--remote", "local[2]", "--conf", "spark.ui.enabled=false"],
        env={**os.environ, **environment},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-6000:]

    paid = [each for each in orders if each["status"] == "paid"]
    bronze = rows(tmp_path / "spark-warehouse" / "bronze_orders")
    assert len(bronze) == 61
    assert len({(row["partition"], row["offset"]) for row in bronze}) == 61
    silver = rows(tmp_path / "spark-warehouse" / "silver_orders")
    assert sorted(row["order"] for row in silver) == sorted(each["order"] for each in orders)
    earned: Counter[str] = Counter()
    for each in paid:
        earned[each["country"]] += each["quantity"] * Decimal(str(each["price"]))
    gold = rows(tmp_path / "spark-warehouse" / "gold_revenue")
    assert {row["country"]: row["revenue"] for row in gold} == earned
    sent = json_values(broker.bootstrap, "paid-orders")
    assert sorted(value["order"] for value in sent) == sorted(each["order"] for each in paid)
    keys = {each["order"]: each["customer"].encode() for each in paid}
    assert Counter(message.key() for message in records(broker.bootstrap, "paid-orders")) == Counter(keys.values())
