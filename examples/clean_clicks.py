"""Clicks, parted into good ones with the user's country and dead letters with the reason.

    headrace load clicks --kind clicks --records 10000
    headrace pipeline run examples/clean_clicks.py --follow

Reads topic  clicks          {"click": "0-1", "user": "user-0007", "page": "/items/9", "spent_ms": 1200}
Reads topic  users           key: user, value: {"user": "user-0007", "country": "SE"}; the newest of a user counts
Writes topic clean-clicks    key: user, value: {"click", "user", "page", "spent_ms", "country"}
Writes topic clicks-dead     the click as it came, with "reason" and "source" added to its headers
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F

if TYPE_CHECKING:
    from headrace.pipelines import Topics

LONGEST_MS = 600_000
HEADERS = "array<struct<key: string, value: string>>"


def job(topics: Topics) -> None:
    clicks = topics.read_stream("clicks", "click string, user string, page string, spent_ms bigint")
    newest = F.max_by("country", F.struct("_timestamp", "_offset")).alias("country")
    users = topics.read("users", "user string, country string").groupBy("user").agg(newest)

    longest_ms = int(topics.settings.get("longest_ms", LONGEST_MS))
    reason = (
        F.when(F.col("user").isNull() | F.col("page").isNull(), "not a click: user and page are needed")
        .when(~F.col("spent_ms").between(0, longest_ms), f"spent_ms is not between 0 and {longest_ms}")
        .alias("reason")
    )
    judged = clicks.select("*", reason)

    good = judged.where("reason is null").join(users, "user", "left")
    key = F.col("user").alias("_key")
    topics.write(good.select(key, "click", "user", "page", "spent_ms", "country"), "clean-clicks")

    source = F.concat_ws("/", F.lit("clicks"), "_partition", "_offset")
    added = F.array(
        F.struct(F.lit("reason").alias("key"), F.col("reason").alias("value")),
        F.struct(F.lit("source").alias("key"), source.alias("value")),
    )
    headers = F.concat(F.coalesce("_headers", F.array().cast(HEADERS)), added).alias("_headers")
    topics.write(judged.where("reason is not null").select("_key", "_value", headers), "clicks-dead")
