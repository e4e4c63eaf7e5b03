"""The kernel in both its forms: as Python, and compiled (by the install, or else here, once a run)."""

import importlib.util
import os
import subprocess
import sys
from importlib.machinery import ExtensionFileLoader, SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from headrace.records import kernel as installed

ROOT = Path(__file__).parents[2]
BUILD_TIMEOUT_S = 150


def load(loader: SourceFileLoader | ExtensionFileLoader) -> ModuleType:
    spec = importlib.util.spec_from_file_location(loader.name, loader.path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def uncompiled_kernel() -> ModuleType:
    if not installed.compiled:
        return installed
    source = Path(installed.__file__).with_name("kernel.py")
    return load(SourceFileLoader("headrace.records.uncompiled_kernel", str(source)))


@pytest.fixture(scope="session")
def compiled_kernel(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    if installed.compiled:
        source = Path(installed.__file__).with_name("kernel.py")
        if source.stat().st_mtime > Path(installed.__file__).stat().st_mtime:
            pytest.fail("kernel.py is newer than the compiled kernel: run `pip install -e .` again")
        return installed
    out = tmp_path_factory.mktemp("kernel")
    command = ["setup.py", "-q", "build_ext", "--build-lib", str(out), "--build-temp", str(out / "temp")]
    built = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "CFLAGS": "-O0 -g0"},
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_S,
        check=False,
    )
    found = list(out.glob("headrace/records/kernel.*"))
    if not found:
        pytest.skip(f"no Cython or no C compiler here: {built.stderr[-300:]}")
    return load(ExtensionFileLoader("headrace.records.kernel", str(found[0])))


@pytest.fixture(scope="session", params=["compiled", "uncompiled"])
def kernel(request: pytest.FixtureRequest) -> ModuleType:
    module: ModuleType = request.getfixturevalue(f"{request.param}_kernel")
    assert module.compiled == (request.param == "compiled")
    return module
