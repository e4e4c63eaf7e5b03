"""`make demo`: a broker, traffic, an archive, topic to topic exactly once, a plot, and an audit of it all.

One step's driver is killed in the middle (`headrace.spark.faults`), and runs again.

Every step shows the command that a person would type. Those that need Spark run in this process, so that they share one
JVM, which starts while the orders come in; typed one by one each would wait for its own. Everything lives in a
temporary folder and is removed at the end, but for the plot; KEEP=1 in the environment keeps it. The exit code is 0
only if every step succeeded.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any, Final

from headrace.cli.main import main as main_of_headrace
from headrace.errors import HeadraceError
from headrace.spark import java, session
from headrace.spark.faults import VARIABLE

ROOT: Final = Path(__file__).resolve().parent.parent
HEADRACE: Final = str(Path(sys.executable).parent / "headrace")
PLOT: Final = ROOT / ".work" / "demo" / "revenue.png"
SECONDS: Final = 10
RATE: Final = 6000
BATCH: Final = 20_000
SHORT_LIVED: Final = {"spark.driver.extraJavaOptions": java.SHORT_LIVED}
STOP_WITHIN_S: Final = 30.0
BAR: Final = 44
BOLD, GREEN, RED, DIM, PLAIN = ("\x1b[1m", "\x1b[32m", "\x1b[31m", "\x1b[2m", "\x1b[0m")
if not sys.stdout.isatty():
    BOLD = GREEN = RED = DIM = PLAIN = ""

KILLED_AT: Final = "sink-written:1"
HOW_MADE: Final = (
    "--key", "sha2(key, 256)",
    "--value", "regexp_replace(cast(value as string), 'customer-[0-9]+', '***')",
    "--where", "get_json_object(cast(value as string), '$.status') = 'paid'",
)  # fmt: skip
"""What examples/paid_orders.sql makes of an order, for the audit."""
PER_COUNTRY: Final = (
    "select country, sum(orders) as orders, round(sum(revenue), 2) as revenue "
    "from `revenue-per-minute` group by country order by revenue desc"
)
PER_SECOND: Final = "select minute as second, country, revenue from `revenue-per-minute` order by second, country"


class StepFailed(Exception):
    """A step's command did not end well."""


class Demo:
    """One run: its folder, its broker, and what each step took."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.broker: subprocess.Popen[str] | None = None
        self.took: list[tuple[str, float]] = []
        self._step = 0
        self._jvm: Future[None] | None = None

    def _start_jvm(self) -> None:
        """In the background; commands wait for it."""
        starter = ThreadPoolExecutor(1)
        self._jvm = starter.submit(start_jvm)
        starter.shutdown(wait=False)

    def step(self, title: str) -> None:
        self._step += 1
        print(f"\n{BOLD}{self._step}. {title}{PLAIN}", flush=True)

    def command(self, *arguments: str, shown: bool = True) -> str:
        """Run a command of headrace; what it prints is shown, and answered."""
        typed = shlex.join(["headrace", *arguments])
        print(f"{DIM}$ {typed}{PLAIN}", flush=True)
        began = time.monotonic()
        code, output = self._run(arguments)
        if shown:
            print("\n".join(f"  {line}" for line in output.strip().splitlines()), flush=True)
        if code:
            raise StepFailed(f"{typed} ended with exit code {code}")
        self.took.append((" ".join(arguments[: 2 if arguments[0] == "pipeline" else 1]), time.monotonic() - began))
        return output

    def _run(self, arguments: Sequence[str]) -> tuple[int, str]:
        """Exit code and output. The first command is a process of its own, and the JVM starts beside it."""
        if self._jvm is None:
            with subprocess.Popen([HEADRACE, *arguments], stdout=subprocess.PIPE, text=True) as process:
                self._start_jvm()
                output, _ = process.communicate()
            return process.returncode, output
        self._jvm.result()
        with redirect_stdout(io.StringIO()) as printed:
            code = main_of_headrace(list(arguments))
        return code, printed.getvalue()

    def killed(self, *arguments: str, at: str) -> None:
        """Run a command in a process of its own, which kills itself and its JVM with SIGKILL at a named point."""
        print(f"{DIM}$ {VARIABLE}={at} {shlex.join(['headrace', *arguments])}{PLAIN}", flush=True)
        began = time.monotonic()
        known = os.environ | {VARIABLE: at}
        ran = subprocess.run([HEADRACE, *arguments], env=known, capture_output=True, text=True, check=False)
        if ran.returncode != -signal.SIGKILL:
            raise StepFailed(f"the driver was to be killed, and ended with {ran.returncode}: {ran.stderr[-2000:]}")
        print("  Killed", flush=True)
        self.took.append(("killed run", time.monotonic() - began))

    def serve(self) -> None:
        arguments = ["serve", "--data", "data", "--listen", "127.0.0.1:0"]
        print(f"{DIM}$ {shlex.join(['headrace', *arguments])}{PLAIN}", flush=True)
        began = time.monotonic()
        errors = (self.folder / "broker.log").open("w")
        self.broker = subprocess.Popen(
            [HEADRACE, *arguments, "--set", "http.listen=127.0.0.1:0"],
            stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
        errors.close()
        assert self.broker.stdout is not None
        line = self.broker.stdout.readline()
        if not line.startswith("ready "):
            raise StepFailed(f"the broker did not start: {(self.folder / 'broker.log').read_text()[-2000:]}")
        address = dict(part.split("=", 1) for part in line.split()[1:])["kafka"]
        print(f"  {line.strip()}\n{DIM}$ export HEADRACE_BOOTSTRAP={address}{PLAIN}")
        os.environ["HEADRACE_BOOTSTRAP"] = address
        self.took.append(("serve", time.monotonic() - began))

    def stop(self) -> None:
        """A clean stop; a broker that hangs is a failure, and is ended all the same."""
        if self.broker is None:
            return
        broker, self.broker = self.broker, None
        if broker.poll() is not None:
            raise StepFailed(f"the broker died with exit code {broker.returncode}")
        broker.send_signal(signal.SIGTERM)
        try:
            if broker.wait(STOP_WITHIN_S):
                raise StepFailed(f"the broker stopped with exit code {broker.returncode}")
        except subprocess.TimeoutExpired:
            broker.kill()
            broker.wait()
            raise StepFailed(f"the broker did not stop within {STOP_WITHIN_S:.0f} s") from None


def start_jvm() -> None:
    """The JVM stays when its first session ends, and knows its way by then."""
    spark = session.start("demo", settings=SHORT_LIVED)
    spark.range(1).collect()
    spark.stop()


def play(demo: Demo) -> None:
    demo.step("A broker, on a folder and a port of its own")
    demo.serve()

    demo.step(f"Orders from two producers for {SECONDS} seconds; each notes in a ledger what the broker acknowledged")
    demo.command(
        "load", "orders", "--kind", "orders", "--duration", str(SECONDS), "--rate", str(RATE), "--partitions", "4",
        "--producers", "2", "--compression", "lz4", "--ledger", "ledger",
    )  # fmt: skip

    demo.step("The topic into an archive: a Delta table by topic and date, each record once")
    demo.command("pipeline", "archive", "--topic", "orders", "--to", "archive")

    demo.step("Paid orders to another topic, by Spark; its driver dies by kill -9 when all rows of a batch are written")
    paid = "paid_orders.sql"
    shutil.copyfile(ROOT / "examples" / paid, demo.folder / paid)
    demo.killed("pipeline", "run", paid, "--set", f"batch={BATCH}", at=KILLED_AT)

    demo.step("What it has left open is seen by nobody who reads committed records")
    demo.command("transaction", "list", "--two-phase")

    demo.step("Run again, it goes on: what was not decided is aborted, and written once more")
    demo.command("pipeline", "run", paid, "--set", f"batch={BATCH}")

    demo.step("A SQL job: revenue per country and second to a topic, large orders to a table")
    job = "revenue_per_minute.sql"
    shutil.copyfile(ROOT / "examples" / job, demo.folder / job)
    demo.command("pipeline", "run", job, "--set", "window=1 second", "--set", "lateness=1 second", "--set", "least=300")

    demo.step("What a person wants to see")
    lines = demo.command("sql", "--json", f"{PER_COUNTRY}; {PER_SECOND}", shown=False).splitlines()
    rows = [json.loads(line) for line in lines]
    countries = [row for row in rows if "second" not in row]
    if not countries:
        raise StepFailed("the job has written no revenue")
    bars(countries)
    plot([row for row in rows if "second" in row], [row["country"] for row in countries])

    demo.step("Audit: every acknowledged order is in topic and archive, and every paid one in the other topic, once")
    demo.command(
        "pipeline", "audit", "--ledger", "ledger", "--archive", "archive", "--copy", "orders=paid-orders", *HOW_MADE
    )

    demo.step("The broker stops cleanly")
    demo.stop()


def bars(countries: list[dict[str, Any]]) -> None:
    most = max(float(row["revenue"]) for row in countries)
    for row in countries:
        revenue = float(row["revenue"])
        bar = "█" * max(1, round(BAR * revenue / most))
        print(f"  {row['country']}  {GREEN}{bar:<{BAR}}{PLAIN} {revenue:>14,.2f} from {row['orders']:>6,} orders")


def plot(rows: list[dict[str, Any]], countries: list[str]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    seconds = sorted({row["second"] for row in rows})
    revenue = {(row["second"], row["country"]): float(row["revenue"]) for row in rows}
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    layers = [[revenue.get((second, country), 0.0) for second in seconds] for country in countries]
    axes.stackplot(range(len(seconds)), layers, labels=countries)
    axes.set(xlabel="second", ylabel="revenue", title="Paid orders: revenue per second and country", xlim=(0, None))
    axes.legend(loc="upper left", ncols=len(countries), fontsize="small")
    axes.margins(y=0.15)
    PLOT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PLOT, dpi=120)
    print(f"  the same over time, as a picture: {PLOT.relative_to(ROOT)}")


def main() -> int:
    keep = os.environ.get("KEEP", "") not in ("", "0")
    folder = Path(tempfile.mkdtemp(prefix="headrace-demo-"))
    demo, failure, began = Demo(folder), "", time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ["PYTHONUNBUFFERED"] = "1"
    os.chdir(folder)
    try:
        play(demo)
    except (StepFailed, HeadraceError) as error:
        failure = str(error)
    except KeyboardInterrupt:
        failure = "interrupted"
    finally:
        with suppress(StepFailed):
            demo.stop()
        os.chdir(ROOT)
        if keep:
            print(f"\n{DIM}kept: {folder}{PLAIN}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    seconds = ", ".join(f"{name} {took_s:.0f} s" for name, took_s in demo.took)
    print(f"\n{DIM}{seconds}; {time.monotonic() - began:.0f} s in all{PLAIN}")
    if failure:
        print(f"{RED}failed: {failure}{PLAIN}")
        return 1
    print(f"{GREEN}all green{PLAIN}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
