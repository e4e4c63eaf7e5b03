"""Many partitions on one node: `python bench/many_partitions.py`. Creates them, stops the broker cleanly, starts it
again on the same folder, and prints the times, the idle memory and the idle processor time before and after.
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import loads
from contestants import CONTESTANTS, Recipe, Running, start
from loads import Topic
from report import table

IDLE_S = 10.0
TOPIC_PARTITIONS = 200
PROBE_BYTES = 100


def observe(broker: Running, step: str, took_s: float) -> list[str]:
    loads.await_quiet(broker)
    before_s = broker.cpu_seconds()
    time.sleep(IDLE_S)
    cpu_percent = (broker.cpu_seconds() - before_s) / IDLE_S * 100
    memory = broker.memory()
    figures = (memory.rss_bytes / 1e6, memory.pss_bytes / 1e6)
    return [step, f"{took_s:.2f}", *(f"{figure:.0f}" for figure in figures), f"{cpu_percent:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python bench/many_partitions.py", description=__doc__)
    parser.add_argument("--partitions", type=int, default=2000)
    parser.add_argument("--contestant", default="headrace", choices=("headrace", "kafka"))
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="headrace-partitions-"))
    counts = [TOPIC_PARTITIONS] * (options.partitions // TOPIC_PARTITIONS)
    if options.partitions % TOPIC_PARTITIONS:
        counts.append(options.partitions % TOPIC_PARTITIONS)
    topics = [Topic(f"many-{i}", count, PROBE_BYTES) for i, count in enumerate(counts)]
    broker = start(CONTESTANTS[options.contestant], folder / "node")
    try:
        rows = [observe(broker, "start, no topic", broker.start_s)]
        began = time.monotonic()
        for topic in topics:
            loads.create(broker, topic)
        created_s = time.monotonic() - began
        # A message to each partition: what is started again holds data, and what was created answers.
        on_topic = {topic.name: loads.send(broker, "produce", topic, topic.partitions).on_topic for topic in topics}
        rows.append(observe(broker, f"create {options.partitions} partitions", created_s))
        stop_s = broker.stop()
        rows.append(["clean stop", f"{stop_s:.2f}", "-", "-", "-"])
        broker = restart(broker)
        rows.append(observe(broker, "start again", broker.start_s))
        for topic in topics:
            loads.receive(broker, topic, on_topic[topic.name])
    finally:
        broker.stop()
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{broker.recipe.name} {broker.recipe.version}: {options.partitions} partitions in {len(topics)} topics")
    print(table(["step", "seconds", "RSS MB", "PSS MB", f"idle CPU % of a core over {IDLE_S:.0f} s"], rows))
    print(f"every record counted on the way out after the restart: {sum(on_topic.values()):,}")


def restart(broker: Running) -> Running:
    """The same command on the same data, in a new log folder."""

    def same(_folder: Path, _port: int) -> Recipe:
        return broker.recipe

    return start(same, broker.folder.with_name("again"), broker.port)


if __name__ == "__main__":
    main()
