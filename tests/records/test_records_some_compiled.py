"""A client that starts while `make serve` is still compiling: some kernels are compiled, the others run as Python."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import headrace.records
from headrace.records import kernel

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120
SENT_AND_READ = """
import importlib, sys
from headrace.records.consumer_records import receive
from headrace.records.kernel import build
read = []
assert receive(bytes(build([(1, b"key", b"value", ())])), "orders", 0, 0, 1, read) == 1
assert (read[0].key, read[0].value) == (b"key", b"value")
print(*(name for name in sys.argv[1:] if importlib.import_module(f"headrace.records.{name}").compiled))
"""


def test_kernels_work_when_only_those_that_serving_waits_for_are_compiled(tmp_path: Path) -> None:
    if not kernel.compiled:
        pytest.skip("nothing is compiled here")
    (named,) = re.findall(r"^FIRST_KERNELS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    shutil.copytree(ROOT / "src" / "headrace", tmp_path / "headrace", ignore=shutil.ignore_patterns("__pycache__"))
    first = {*named.split(), "cython_support"}
    for compiled in (tmp_path / "headrace" / "records").glob("*.so"):
        if compiled.name.partition(".")[0] not in first:
            compiled.unlink()
    (shared,) = re.findall(r"^SHARED = \((.*)\)$", (ROOT / "setup.py").read_text(), re.MULTILINE)
    types = {types.stem for types in Path(headrace.records.__path__[0]).glob("*.pxd")}
    every = sorted(types - set(re.findall(r"\w+", shared)))
    ran = subprocess.run(
        [sys.executable, "-c", SENT_AND_READ, *every],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert set(ran.stdout.split()) == set(named.split()) < set(every)
