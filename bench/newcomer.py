"""A new user's path, timed: `python bench/newcomer.py`. Clones into an empty folder, runs `make serve` there, sends a
first message with kcat and reads it back. Prints the seconds of each step.

The clone's `make serve` is given a free port and a folder of its own, so that it neither meets a broker on the usual
port nor writes outside the temporary folder.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import processes
from contestants import HOST, ROOT, answers_kafka, free_port
from report import table

SERVE_TIMEOUT_S = 600.0
KCAT_TIMEOUT_S = 60.0
POLL_S = 0.02
TOPIC = "first"
MESSAGE = "hello from a newcomer\n"


def run(*command: str, **options: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=KCAT_TIMEOUT_S, input=options.get("text")
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")
    return done.stdout


def answers(port: int) -> bool:
    try:
        return answers_kafka(port)
    except OSError:
        return False


def clean_environment() -> dict[str, str]:
    """Without the virtual environment this script itself may run in: a newcomer has none."""
    gone = {"VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME"}
    kept = {key: value for key, value in os.environ.items() if key not in gone}
    kept["PATH"] = ":".join(p for p in kept["PATH"].split(":") if not p.startswith(sys.prefix + "/"))
    return kept


def serve(clone: Path, port: int, log: Path) -> subprocess.Popen[bytes]:
    arguments = f"ARGS=--data {clone.parent / 'data'} --listen {HOST}:{port}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ("make", "serve", arguments), cwd=clone, env=clean_environment(), stdout=output, stderr=output
        )
    deadline = time.monotonic() + SERVE_TIMEOUT_S
    while not answers(port):
        if process.poll() is not None or time.monotonic() > deadline:
            processes.stop(process)
            raise SystemExit(f"make serve did not come up:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(POLL_S)
    return process


def main() -> None:
    parser = argparse.ArgumentParser(prog="python bench/newcomer.py", description=__doc__)
    parser.add_argument("--source", default=str(ROOT), help="what to clone (this clone)")
    options = parser.parse_args()
    if shutil.which("kcat") is None:
        raise SystemExit("there is no kcat: apt-get install kcat")
    folder = Path(tempfile.mkdtemp(prefix="headrace-newcomer-"))
    port, rows, began = free_port(), list[list[str]](), time.monotonic()
    last = began

    def passed(step: str) -> None:
        nonlocal last
        now = time.monotonic()
        rows.append([step, f"{now - last:.2f}"])
        last = now

    process = None
    try:
        run("git", "clone", "-q", "--no-hardlinks", options.source, str(folder / "clone"))
        passed("git clone")
        process = serve(folder / "clone", port, folder / "serve.log")
        passed("make serve, until it answers")
        run("kcat", "-b", f"{HOST}:{port}", "-P", "-t", TOPIC, text=MESSAGE)
        passed("first message in")
        read = run("kcat", "-b", f"{HOST}:{port}", "-C", "-t", TOPIC, "-o", "beginning", "-c", "1", "-e", "-q")
        if read != MESSAGE:
            raise SystemExit(f"what came out is not what went in: {read!r}")
        passed("first message out")
    finally:
        if process is not None:
            processes.stop(process)
            # What `make serve` still compiles would write into the folder that goes.
            compiled = ("make", ".venv/.compiled")
            subprocess.run(
                compiled,
                cwd=folder / "clone",
                env=clean_environment(),
                capture_output=True,
                check=False,
                timeout=SERVE_TIMEOUT_S,
            )
        shutil.rmtree(folder, ignore_errors=True)
    rows.append(["all of it", f"{last - began:.2f}"])
    print(table(["step", "seconds"], rows))


if __name__ == "__main__":
    main()
