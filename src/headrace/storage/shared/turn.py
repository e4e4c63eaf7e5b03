"""What one log has staged in a turn of the loop, and how it will be found: its runs."""

from __future__ import annotations

from headrace.ports.disk import Buffer
from headrace.storage.shared.frames import FRAME_BYTES
from headrace.storage.shared.queue import Queue, Run
from headrace.storage.shared.queuefile import GONE, NO_TIMESTAMP


class Turn:
    """A run begins with the frame, at a gap between offsets, and when the one before it is long enough."""

    __slots__ = ("_runs", "_runs_ms", "batches", "epochs_before", "gap", "next_run_at", "run_ms", "size")

    def __init__(self) -> None:
        self.epochs_before = 0
        self.clear()

    def clear(self) -> None:
        self.batches: list[Buffer] = []
        self.size = 0
        self.gap = False
        self.next_run_at = 0
        self.run_ms = NO_TIMESTAMP
        self._runs: list[tuple[int, int]] = []
        self._runs_ms: list[int] = []

    def begin(self, base: int, interval_bytes: int, *, gap: bool) -> None:
        self.gap = gap
        self._runs.append((0, base))
        self.next_run_at = interval_bytes

    def next_run(self, base: int, interval_bytes: int) -> None:
        """The batch about to be staged begins a run."""
        self._runs_ms.append(self.run_ms)
        self.run_ms = NO_TIMESTAMP
        self._runs.append((self.size, base))
        self.next_run_at = self.size + interval_bytes

    def prepare(self, queue: Queue, first_offset: int) -> None:
        """Nothing more is staged: make room for the entries. OSError if there is none."""
        runs, runs_ms = self._runs, self._runs_ms
        runs_ms.append(self.run_ms)
        greatest_ms = self.run_ms if len(runs) == 1 else max(runs_ms)
        fits = queue.ready(len(runs) + self.gap, first_offset, runs_ms[0], runs[-1][1], greatest_ms)
        if not fits and not self.gap:
            self._runs, self._runs_ms = runs[:1], [greatest_ms]

    def enter(self, queue: Queue, number: int, byte: int, first_offset: int, next_offset: int) -> None:
        """The batches are in the commit log, from this byte on."""
        runs = self._runs
        if len(runs) == 1 and not self.gap:
            queue.add(Run(number, byte, self.size, runs[0][1], self._runs_ms[0]), next_offset)
            return
        if self.gap and runs[0][1] > first_offset:
            queue.add_roomy(Run(number, byte - FRAME_BYTES, GONE, first_offset, NO_TIMESTAMP), runs[0][1])
        ends = [*runs[1:], (self.size, next_offset)]
        for (at, base), (end, next_base), run_ms in zip(runs, ends, self._runs_ms, strict=True):
            queue.add_roomy(Run(number, byte + at, end - at, base, run_ms), next_base)
