"""Where Headrace's processor time goes under one load: `python bench/hotspots.py produce --cell 100x256`. Samples the
broker with py-spy (Python functions) and, where it may be used, perf (native code and the kernel), and prints the
twenty dearest of each.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import loads
from contestants import CONTESTANTS, Running, start
from loads import Topic
from report import table

TOP = 20
SAMPLES_PER_S = 500
WINDOW = 256
PROFILER_TIMEOUT_S = 60.0


def sampler() -> str:
    beside = Path(sys.executable).parent / "py-spy"
    if not beside.exists():
        subprocess.run((sys.executable, "-m", "pip", "install", "-q", "py-spy"), check=True)
    return str(beside)


def python_top(raw: str) -> str:
    """From py-spy's raw format, `frame;frame;frame count` a line: own and total share of each function."""
    own, total = Counter[str](), Counter[str]()
    for line in raw.splitlines():
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        own[frames[-1]] += int(count)
        for frame in set(frames):
            total[frame] += int(count)
    samples = max(1, sum(own.values()))
    rows = [[frame, f"{count / samples:.1%}", f"{total[frame] / samples:.1%}"] for frame, count in own.most_common(TOP)]
    return table(["Python function", "own", "with callees"], rows)


def native_top(folder: Path) -> str:
    command = ("perf", "report", "-i", str(folder / "perf.data"), "--stdio", "--no-children", "-g", "none")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PROFILER_TIMEOUT_S)
    lines = [line.rstrip() for line in done.stdout.splitlines() if line.strip() and not line.startswith("#")]
    return "\n".join(lines[:TOP]) or f"perf gave nothing: {done.stderr.strip()[-200:]}"


def load(broker: Running, mode: str, topic: Topic, count: int) -> float:
    """Runs the load; returns broker processor microseconds per message."""
    if mode == "consume":
        received = loads.receive(broker, topic, count)
        return received.cpu_s / received.messages * 1e6
    sent = loads.send(broker, mode, topic, count, WINDOW)
    return sent.cpu_s / sent.messages * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(prog="python bench/hotspots.py", description=__doc__)
    parser.add_argument("mode", choices=("produce", "pipelined", "sync", "consume"))
    parser.add_argument("--cell", default="100x1", help="BYTESxPARTITIONS")
    parser.add_argument("--count", type=int, default=1_000_000)
    options = parser.parse_args()
    size, partitions = (int(number) for number in options.cell.split("x"))
    folder = Path(tempfile.mkdtemp(prefix="headrace-hotspots-"))
    broker = start(CONTESTANTS["headrace"], folder / "node")
    profilers: list[subprocess.Popen[bytes]] = []
    try:
        topic = Topic("hot", partitions, size)
        loads.create(broker, topic)
        primed, count = loads.prime(broker, topic), options.count
        if options.mode == "consume":
            count = primed + loads.send(broker, "produce", topic, count).on_topic
        pid, raw = str(broker.process.pid), folder / "stacks.raw"
        spy = (sampler(), "record", "-p", pid, "-F", "-r", str(SAMPLES_PER_S), "-f", "raw", "-o", str(raw), "-d", "600")
        profilers.append(subprocess.Popen(spy, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        if shutil.which("perf"):
            perf = ("perf", "record", "-q", "-F", "999", "-p", pid, "-o", str(folder / "perf.data"))
            profilers.append(subprocess.Popen(perf, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        cost_us = load(broker, options.mode, topic, count)
        for profiler in profilers:
            profiler.send_signal(2)
            profiler.wait(PROFILER_TIMEOUT_S)
        print(
            f"{options.mode} {options.cell}, {count:,} messages: {cost_us:.3f} us of broker CPU each, while sampled\n"
        )
        print(python_top(raw.read_text()) if raw.exists() else "py-spy gave nothing")
        if len(profilers) > 1:
            print("\nnative code and kernel, share of samples:\n" + native_top(folder))
    finally:
        for profiler in profilers:
            profiler.kill()
        broker.stop()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
