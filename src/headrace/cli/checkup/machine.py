"""The machine: versions of what runs here, open files, the clock."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import headrace
from headrace import __version__
from headrace.cli.checkup.finding import Finding, ok, warn
from headrace.coordination.choice import on_etcd
from headrace.settings.values import BrokerSettings
from headrace.system import descriptors

KERNELS: Final = ("kernel", "key_hashes", "builder", "router", "consumer_records", "arrow_decoder", "arrow_encoder")
"""What setup.py compiles."""
COMPILED: Final = ".so"
JAVA_SECONDS: Final = 20.0
TIMEX_BYTES: Final = 512
"""More than struct timex has on any machine; it begins with `modes`, which stays 0: nothing is set."""
TIME_ERROR: Final = 5
FULL_LIMIT: Final = 131_072


def look(settings: BrokerSettings, broker: int | None) -> Iterator[Finding]:
    """`broker` is the process of the broker that runs, whose limits count then."""
    yield from _versions()
    yield from _open_files(settings, broker)
    yield from _clock(settings)


def _versions() -> Iterator[Finding]:
    yield ok("version", f"headrace {__version__}, Python {platform.python_version()}, Linux {platform.release()}")
    slow = [name for name in KERNELS if not _is_compiled(f"headrace.records.{name}")]
    if slow:
        yield warn(
            "kernels",
            f"{len(slow)} of {len(KERNELS)} record kernels run as Python: {', '.join(slow)}",
            "install a wheel, or a C compiler and headrace once more; answers are the same, clients are slower",
        )
    else:
        yield ok("kernels", f"all {len(KERNELS)} record kernels are compiled")
    yield from _spark()


def _is_compiled(module: str) -> bool:
    found = importlib.util.find_spec(module)
    return found is not None and (found.origin or "").endswith(COMPILED)


def _spark() -> Iterator[Finding]:
    """A broker needs none of it."""
    try:
        version = importlib.metadata.version("pyspark")
    except importlib.metadata.PackageNotFoundError:
        return
    java = shutil.which("java", path=os.pathsep.join([f"{os.environ.get('JAVA_HOME', '')}/bin", os.environ["PATH"]]))
    if java is None:
        yield warn("spark", f"pyspark {version} without Java", "install a Java runtime, 17 or newer, for pipelines")
        return
    said = subprocess.run([java, "-version"], capture_output=True, text=True, check=False, timeout=JAVA_SECONDS)
    yield ok("spark", f"pyspark {version}, {(said.stderr.splitlines() or ['a Java that does not say'])[0]}")


def _open_files(settings: BrokerSettings, broker: int | None) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE) if broker is None else _limits_of(broker)
    allowed, wanted = descriptors.shared_out(soft), settings["connections.max"]
    whose = "here" if broker is None else f"of the broker, process {broker}"
    text = f"{soft} open files {whose} leave room for {allowed.kafka_connections} connections"
    if allowed.kafka_connections < wanted:
        most = f" (ulimit -n {hard} is allowed here)" if hard > soft else ""
        yield warn(
            "open files",
            f"{text}, and connections.max is {wanted}",
            f"raise the limit: LimitNOFILE={FULL_LIMIT} in a unit, ulimit -n in a shell{most}",
        )
    else:
        yield ok("open files", text)


def _limits_of(pid: int) -> tuple[int, int]:
    try:
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    except (PermissionError, ProcessLookupError):
        return resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft, hard


def _clock(settings: BrokerSettings) -> Iterator[Finding]:
    built = Path(headrace.__file__).stat().st_mtime
    now = time.time()
    if now < built:
        yield warn(
            "clock",
            f"it is {_day(now)} here, and this package was installed on {_day(built)}",
            "set the clock: records get their times from it, and retention goes by them",
        )
    elif not _is_synchronised() and on_etcd(settings):
        yield warn(
            "clock",
            "no NTP client keeps this clock right, as far as the kernel knows",
            "run one (systemd-timesyncd, chrony): retention, times of records and reads by time go by it",
        )
    else:
        yield ok("clock", f"{_day(now)}" + (", kept right by NTP" if _is_synchronised() else ""))


def _day(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _is_synchronised() -> bool:
    """adjtimex(2) with nothing to set answers the state of the kernel's clock."""
    timex = ctypes.create_string_buffer(TIMEX_BYTES)
    state: int = ctypes.CDLL(None, use_errno=True).adjtimex(timex)
    return state not in (-1, TIME_ERROR)
