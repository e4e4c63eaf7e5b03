"""The client of test_connect.py: a batch, a stream and the sink by way of a Spark Connect server, without Java here.

Run as `python connect_client.py ADDRESS BOOTSTRAP TOPIC FOLDER`; what was read is written as JSON to FOLDER/result.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from headrace.spark import session


def main(address: str, bootstrap: str, topic: str, folder: str) -> None:
    spark = session.start("client", address)
    session.register(spark)
    from_topic = {"bootstrap": bootstrap, "subscribe": topic}
    rows = spark.read.format("headrace").options(**from_topic).load()
    found = [list(row) for row in rows.select("partition", "offset").collect()]
    kept = rows.select("key", "value").write.format("headrace").option("bootstrap", bootstrap)
    kept.option("topic", f"{topic}-batch").mode("append").save()
    stream = spark.readStream.format("headrace").options(**from_topic, startingOffsets="earliest").load()
    copy = stream.select("key", "value").writeStream.format("headrace").option("bootstrap", bootstrap)
    copy = copy.option("topic", f"{topic}-stream").option("checkpointLocation", f"{folder}/checkpoint")
    query = copy.trigger(availableNow=True).start()
    query.awaitTermination()
    Path(folder, "result").write_text(json.dumps({"version": spark.version, "rows": found}))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
