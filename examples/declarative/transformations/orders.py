"""Orders in three steps: bronze as they came, silver as columns, gold as what people ask for.

Reads topic   orders          {"order": "0-17", "customer": "customer-0042", "country": "SE", "item": "item-7",
                               "quantity": 2, "price": 19.90, "status": "paid", "at": "2026-11-16T12:00:03Z"}
Keeps table   bronze_orders   every record, with the place that it came from
Keeps table   silver_orders   orders with their fields as columns, without what is no order
Keeps table   gold_revenue    orders and revenue per country, of all that was paid
Writes topic  paid-orders     key: customer, value: {"order", "country", "amount"}, each once
"""

from __future__ import annotations

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

spark = SparkSession.active()
BOOTSTRAP = spark.conf.get("spark.headrace.bootstrap", None) or "127.0.0.1:9092"
FIELDS = (
    "order string, customer string, country string, quantity int, price decimal(10, 2), status string, at timestamp"
)

dp.create_sink("paid_orders", "headrace", {"bootstrap": BOOTSTRAP, "topic": "paid-orders"})


@dp.table(comment="Records of the topic as they came")
def bronze_orders() -> DataFrame:
    topic = spark.readStream.format("headrace").option("bootstrap", BOOTSTRAP).option("subscribe", "orders")
    return topic.option("startingOffsets", "earliest").option("columns", "key,value,partition,offset,timestamp").load()


@dp.table(comment="Orders with their fields as columns")
def silver_orders() -> DataFrame:
    fields = F.from_json(F.col("value").cast("string"), FIELDS).alias("o")
    orders = (
        spark.readStream.table("bronze_orders")
        .select(fields, "partition", "offset")
        .select("o.*", "partition", "offset")
    )
    return orders.where("order is not null").withColumn("amount", F.expr("quantity * price"))


@dp.materialized_view(comment="What was earned in each country")
def gold_revenue() -> DataFrame:
    paid = spark.read.table("silver_orders").where("status = 'paid'")
    return paid.groupBy("country").agg(F.count("*").alias("orders"), F.sum("amount").alias("revenue"))


@dp.append_flow(target="paid_orders")
def send_paid_orders() -> DataFrame:
    paid = spark.readStream.table("silver_orders").where("status = 'paid'")
    return paid.select(F.col("customer").alias("key"), F.to_json(F.struct("order", "country", "amount")).alias("value"))
