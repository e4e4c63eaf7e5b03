"""What is published: what the package says of itself, the sdist, and the wheel where nothing else is."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
import venv
import zipfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import distribution
from pathlib import Path
from typing import NamedTuple

import dist
import pytest
from packaging.requirements import Requirement

from brokers import Broker
from headrace import __version__

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Run where no part of the clone can be imported: writes and reads, and tells where everything came from.
CLIENT = """
import json, sys
from importlib import import_module
import headrace

bootstrap, *kernels = sys.argv[1:]
with headrace.Producer(bootstrap, codec="zstd") as producer:
    deliveries = [producer.send_async("published", b"%d" % n, key=b"k") for n in range(100)]
    producer.flush()
    offsets = [delivery.result().offset for delivery in deliveries]
with headrace.Consumer("published", bootstrap=bootstrap) as consumer:
    values = [int(record.value) for _, record in zip(offsets, consumer)]
files = [import_module(kernel).__file__ for kernel in kernels]
print(json.dumps({"offsets": offsets, "values": values, "package": headrace.__file__, "kernels": files}))
"""
# Checked by a type checker, not run.
TYPED = """
from headrace import Consumer, Producer, Record, Report

def send(producer: Producer) -> Report:
    return producer.send("topic", b"value", key=b"value")

def values(consumer: Consumer) -> list[Record]:
    return consumer.poll(timeout_ms=10)
"""


class Built(NamedTuple):
    sdist: Path
    wheel: Path

    def kernels(self) -> list[str]:
        """Modules that are compiled in the wheel."""
        with zipfile.ZipFile(self.wheel) as packed:
            return sorted(name.partition(".")[0].replace("/", ".") for name in packed.namelist() if ".so" in name)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("dist")
    return Built(*dist.build(folder))


def run(command: Sequence[str | Path], environment: Mapping[str, str] | None = None, cwd: Path = ROOT) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **(environment or {})}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_licence_is_declared_and_there() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    assert PROJECT["license-files"] == ["LICENSE"]
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_version_stands_in_one_place() -> None:
    assert "version" not in PROJECT
    assigned = re.compile(rf"^[^#\n]*version[^#\n]*\b{re.escape(__version__)}\b", re.IGNORECASE | re.MULTILINE)
    files = [ROOT / "pyproject.toml", ROOT / "setup.py", *(ROOT / "src").rglob("*.py")]
    named = [str(file.relative_to(ROOT)) for file in files if assigned.search(file.read_text())]
    assert named == ["src/headrace/__init__.py"]


def test_every_extra_brings_something() -> None:
    assert [name for name, needed in PROJECT["optional-dependencies"].items() if not needed] == []


def test_an_sdist_is_the_whole_clone(built: Built) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git clone")
    with tarfile.open(built.sdist) as packed:
        files = {file.name.partition("/")[2] for file in packed if not file.isdir()}
    expected = {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}
    assert files == {*expected, "PKG-INFO", "setup.cfg"}


def test_a_wheel_is_the_package_compiled(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as packed:
        files = set(packed.namelist())
    source = ROOT / "src"
    modules = {str(file.relative_to(source)) for file in source.rglob("*.py")}
    assert {name for name in files if name.endswith(".py")} == modules
    assert {"headrace/py.typed", f"headrace-{__version__}.dist-info/licenses/LICENSE"} <= files
    assert dist.kernels_missing(built.wheel) == []


def test_a_wheel_that_lacks_a_kernel_is_noticed(built: Built, tmp_path: Path) -> None:
    lost, *rest = built.kernels()
    other = tmp_path / "other.whl"
    with zipfile.ZipFile(built.wheel) as packed, zipfile.ZipFile(other, "w") as copied:
        for name in packed.namelist():
            if not (name.endswith(".so") and lost.replace(".", "/") in name):
                copied.writestr(name, b"")
    assert rest
    assert dist.kernels_missing(other) == [lost]


def test_a_wheel_serves_and_reads_where_nothing_else_is(
    built: Built, tmp_path: Path, fresh_broker: Callable[..., Broker]
) -> None:
    """No clone, no compiler, no index: the wheel, and what it declares that it needs."""
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    packages = copy_needed(home)
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", home, "--disable-pip-version-check"]
    run([*pip, "install", "--quiet", "--no-index", "--no-deps", built.wheel], {"PATH": str(home / "bin")})
    run([*pip, "check"])
    check_installed(home, built, packages, fresh_broker)


@pytest.mark.long
def test_an_sdist_builds_serves_and_reads_where_nothing_else_is(
    built: Built, tmp_path: Path, fresh_broker: Callable[..., Broker], proof_report: Callable[..., None]
) -> None:
    """As a user installs it: the build's tools and what the package needs come from the index, in whatever versions."""
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    pip: list[str | Path] = [home / "bin" / "python", "-I", "-m", "pip", "--disable-pip-version-check"]
    began = time.monotonic()
    run([*pip, "install", "--quiet", built.sdist], cwd=tmp_path)
    took_s = time.monotonic() - began
    run([*pip, "check"])
    (packages,) = home.glob("lib/python*/site-packages")
    check_installed(home, built, packages, fresh_broker)
    check_types(home, tmp_path)
    sizes = {"sdist_bytes": built.sdist.stat().st_size, "wheel_bytes": built.wheel.stat().st_size}
    proof_report(build_and_install_s=round(took_s), kernels=len(built.kernels()), **sizes)


def check_types(home: Path, folder: Path) -> None:
    """A type checker takes a user's program, and finds what is wrong in it, by what is installed there."""
    program = folder / "program.py"
    program.write_text(TYPED)
    mypy: list[str | Path] = [
        sys.executable,
        "-I",
        "-m",
        "mypy",
        "--strict",
        "--python-executable",
        home / "bin" / "python",
        program,
    ]
    run(mypy, cwd=folder)
    program.write_text(TYPED.replace('b"value"', "17.5"))
    judged = subprocess.run(mypy, cwd=folder, capture_output=True, text=True, check=False)
    assert 'Argument "key" to "send" of "Producer" has incompatible type "float"' in judged.stdout


def copy_needed(home: Path) -> Path:
    """Puts what the package declares, and what that declares, from this environment there; nothing else of it."""
    (packages,) = home.glob("lib/python*/site-packages")
    waiting, known = [*PROJECT["dependencies"]], set[str]()
    while waiting:
        requirement = Requirement(waiting.pop())
        if requirement.name in known or not (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            continue
        known.add(requirement.name)
        found = distribution(requirement.name)
        waiting += found.requires or ()
        for file in found.files or ():
            if ".." not in file.parts and file.suffix != ".pyc":
                target = packages / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(str(file.locate()), target)
    return packages


def check_installed(home: Path, built: Built, packages: Path, fresh_broker: Callable[..., Broker]) -> None:
    """A broker and a client of that environment talk to each other; all they run is from there, and compiled."""
    program = home / "bin" / "headrace"
    broker = fresh_broker(program=program, environment={"PYTHONPATH": ""})
    assert Path(f"/proc/{broker.pid}/cmdline").read_bytes().startswith(str(home).encode())
    told = json.loads(run([home / "bin" / "python", "-I", "-c", CLIENT, broker.bootstrap, *built.kernels()], cwd=home))
    assert told["offsets"] == told["values"] == list(range(100))
    for file in (told["package"], *told["kernels"]):
        assert Path(file).is_relative_to(packages)
    assert {Path(file).suffix for file in told["kernels"]} == {".so"}
    assert run([program, "--version"], {"PYTHONPATH": ""}, cwd=home) == f"headrace {__version__}\n"
    assert broker.stop() == 0
