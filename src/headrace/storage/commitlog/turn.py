"""What one log has staged in a turn of the loop, and how it will be found: its runs."""

from __future__ import annotations

from headrace.ports.disk import Buffer
from headrace.storage.commitlog.frames import FRAME_BYTES
from headrace.storage.commitlog.queue import Queue
from headrace.storage.commitlog.queuefile import GONE, NO_TIMESTAMP, Run


class Turn:
    """A run begins with the frame, at a gap between offsets, and when the one before it is long enough."""

    __slots__ = (
        "_runs",
        "_runs_ms",
        "base",
        "batches",
        "epochs_before",
        "gap",
        "next_run_at",
        "run_ms",
        "single",
        "size",
    )

    def __init__(self) -> None:
        self.batches: list[Buffer] = []
        self.epochs_before = 0
        self.base = self.next_run_at = 0
        self.single = True
        """Whether all of it is one run that begins with `base`; most turns are."""
        self._runs: list[tuple[int, int]] = []
        self._runs_ms: list[int] = []
        self.clear()

    def clear(self) -> None:
        self.batches.clear()
        self.size = 0
        self.gap = False
        self.run_ms = NO_TIMESTAMP
        if not self.single:
            self.single = True
            self._runs, self._runs_ms = [], []

    def begin(self, base: int, interval_bytes: int, *, gap: bool) -> None:
        self.base = base
        self.gap = gap
        self.next_run_at = interval_bytes
        if gap:
            self._several()

    def _several(self) -> None:
        self.single = False
        self._runs.append((0, self.base))

    def next_run(self, base: int, interval_bytes: int) -> None:
        """The batch about to be staged begins a run."""
        if self.single:
            self._several()
        self._runs_ms.append(self.run_ms)
        self.run_ms = NO_TIMESTAMP
        self._runs.append((self.size, base))
        self.next_run_at = self.size + interval_bytes

    def prepare(self, queue: Queue, first_offset: int) -> None:
        """Nothing more is staged in several runs: make room for the entries. OSError if there is none."""
        runs, runs_ms = self._runs, self._runs_ms
        runs_ms.append(self.run_ms)
        greatest_ms = max(runs_ms)
        fits = queue.ready(len(runs) + self.gap, first_offset, runs_ms[0], runs[-1][1], greatest_ms)
        if not fits and not self.gap:
            self.single, self.run_ms = True, greatest_ms
            self._runs, self._runs_ms = [], []

    def enter(self, queue: Queue, number: int, byte: int, first_offset: int, next_offset: int) -> None:
        """Several runs are in the commit log, from this byte on."""
        runs = self._runs
        if self.gap and runs[0][1] > first_offset:
            queue.add_roomy(Run(number, byte - FRAME_BYTES, GONE, first_offset, NO_TIMESTAMP), runs[0][1])
        ends = [*runs[1:], (self.size, next_offset)]
        for (at, base), (end, next_base), run_ms in zip(runs, ends, self._runs_ms, strict=True):
            queue.add_roomy(Run(number, byte + at, end - at, base, run_ms), next_base)
