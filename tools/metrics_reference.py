"""docs/METRICS.md: every metric, from the table that declares it."""

from __future__ import annotations

from headrace.metrics import FAMILIES, LATENCY_BOUNDS_SECONDS

HEAD = """# Metrics

Generated from the table in `src/headrace/metrics.py` by `make reference`; do not edit.

`GET /metrics` on a broker's HTTP port (`--http`, 127.0.0.1:8082 unless said otherwise) and on a registry's, in
Prometheus' text format. A metric is told when there is something to tell: that of a topic where a replica is held, that
of an archive where a topic waits for one.

`deploy/prometheus/` has a scrape configuration and alert rules, `deploy/grafana/headrace.json` a dashboard to import. A
test compares both with this table.
"""


def reference() -> str:
    rows = ["| name | kind | labels | meaning |", "|---|---|---|---|"]
    for family in FAMILIES:
        labels = ", ".join(f"`{label}`" for label in family.labels)
        rows.append(f"| `{family.name}` | {family.kind} | {labels} | {family.meaning} |")
    bounds = ", ".join(f"{bound:g}" for bound in LATENCY_BOUNDS_SECONDS)
    return f"{HEAD}\n" + "\n".join(rows) + f"\n\nBuckets of the histograms, in seconds: {bounds}.\n"
