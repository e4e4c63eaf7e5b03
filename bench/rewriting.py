"""What the shared layout's rewriting costs and saves: `python bench/rewriting.py` from the clone's root.

Topics that keep their records for long lie in the same commit files as topics that keep them for seconds. On a
simulated disk and clock, for several `commitlog.rewrite.share`: the folder's size over what is still wanted, and the
bytes copied per byte appended. Nothing is timed, so a busy machine does not matter.
"""

import logging
import sys
from dataclasses import dataclass
from pathlib import Path

from report import table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from headrace.storage.commitlog.frames import FRAME_BYTES
from headrace.storage.commitlog.store import SharedStore
from headrace.storage.log import TopicPartition
from headrace.virtual.clock import VirtualClock
from headrace.virtual.disk import VirtualDisk
from storage.harness import Harness, append, batch

TURNS = 600
STEPS_A_TURN = 5
STEP_SECONDS = 0.1
RECORD_BYTES = 1000
FILE_BYTES = 256 << 10
SHORT_MS = 10_000
FOREVER = -1


@dataclass(frozen=True, slots=True)
class Case:
    long_topics: int
    short_topics: int
    long_ms: int
    share: float


CASES = (
    Case(1, 31, FOREVER, 0.0),
    Case(1, 31, FOREVER, 0.25),
    Case(1, 31, FOREVER, 0.5),
    Case(1, 31, 150_000, 0.25),
    Case(1, 31, 150_000, 0.5),
    Case(4, 12, 150_000, 0.25),
    Case(4, 12, 150_000, 0.5),
)


def measure(case: Case) -> list[str]:
    clock = VirtualClock()
    harness = Harness(
        VirtualDisk(clock), clock, "/data", layout="shared", file_bytes=FILE_BYTES, rewrite_share=case.share
    )
    kept = {TopicPartition("long", n): case.long_ms for n in range(case.long_topics)}
    kept |= {TopicPartition("short", n): SHORT_MS for n in range(case.short_topics)}
    for where, retention_ms in kept.items():
        harness.log(where, retention_ms=retention_ms, file_delete_delay_ms=0, durability="os")
    appended = used_sum = wanted_sum = 0
    worst = 0.0
    for turn in range(TURNS):
        for where in kept:
            record = batch(b"x" * RECORD_BYTES, timestamp_ms=clock.wall_ms())
            appended += len(record) + FRAME_BYTES
            append(harness.log(where), record)
        harness.write()
        harness.settle()
        for _ in range(STEPS_A_TURN):
            harness.advance(STEP_SECONDS)
        if turn > TURNS // 2:
            assert isinstance(harness.store, SharedStore)
            used = sum(harness.store.commit_log.sizes.values())
            wanted = sum(harness.store.live_bytes().values())
            used_sum, wanted_sum, worst = used_sum + used, wanted_sum + wanted, max(worst, used / wanted)
    assert isinstance(harness.store, SharedStore)
    copied = harness.store.rewriter.copied_bytes
    kept_for = "ever" if case.long_ms == FOREVER else f"{case.long_ms / 1000:.0f} s"
    return [
        f"{case.long_topics} for {kept_for}, {case.short_topics} for {SHORT_MS / 1000:.0f} s",
        f"{case.share}",
        f"{used_sum / wanted_sum:.2f}",
        f"{worst:.2f}",
        f"{copied / appended:.2f}",
    ]


def main() -> int:
    logging.disable(logging.CRITICAL)
    rows = [measure(case) for case in CASES]
    print(table(["topics kept", "share", "used / wanted", "worst", "copied / appended"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
