"""One topic among many, read from its beginning when nothing is in memory: the consumer that comes back late.

Both layouts get the same messages, dealt to all topics in turn. Then the brokers stop, everything is synced and put out
of the page cache, and fresh brokers serve one topic after another, evicted again before each. A sample whose bytes did
not come from the disk is refused.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import processes
from contestants import Running
from layout_report import ColdFigures
from loads import Invalid, await_quiet
from topic_loads import TopicLoad

PROC = Path("/proc")


def evict(folder: Path) -> None:
    """Out of the page cache with every file of a data folder; pages that someone has mapped stay."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def bytes_from_disk(broker: Running) -> int:
    total = 0
    for pid in processes.process_tree(broker.process.pid):
        for line in (PROC / str(pid) / "io").read_text().splitlines():
            if line.startswith("read_bytes:"):
                total += int(line.split()[1])
    return total


def sample(broker: Running, load: TopicLoad, topic: int) -> ColdFigures:
    """Reads one topic, by its number in the plan."""
    evict(broker.folder / "data")
    await_quiet(broker)
    before_bytes = bytes_from_disk(broker)
    answer = load.tell(f"read {topic} {topic + 1}")
    disk_bytes = bytes_from_disk(broker) - before_bytes
    size, seconds = answer.counted["bytes"], answer.counted["seconds"]
    if disk_bytes < size:
        raise Invalid(f"read {topic}: only {disk_bytes:,} of {size:,.0f} bytes came from the disk: it was not cold")
    return ColdFigures(
        topic_mb=size / 1e6,
        seconds=seconds,
        mb_per_s=size / seconds / 1e6,
        cpu_s=answer.broker_cpu_s,
        disk_mb=disk_bytes / 1e6,
    )


def chosen_topics(count: int, samples: int) -> Sequence[int]:
    """Spread over all topics, the first one left out: it was created first and may lie apart."""
    return [(nth * count // samples + count // (2 * samples)) % count for nth in range(samples)]
