"""The kernels in both their forms: as Python, and compiled (by the install, or else here, once a run)."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.machinery import ExtensionFileLoader, SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

import headrace.records.arrow
import headrace.records.arrow_decoder
import headrace.records.arrow_encoder
import headrace.records.builder
import headrace.records.consumer_records
import headrace.records.kernel
import headrace.records.key_hashes
import headrace.records.router

ROOT = Path(__file__).parents[2]
BUILD_TIMEOUT_S = 300


def load(loader: SourceFileLoader | ExtensionFileLoader) -> ModuleType:
    spec = importlib.util.spec_from_file_location(loader.name, loader.path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def source_of(installed: ModuleType) -> Path:
    assert installed.__file__ is not None
    return Path(installed.__file__).with_name(installed.__name__.rpartition(".")[2] + ".py")


def as_python(installed: ModuleType) -> ModuleType:
    if not installed.compiled:
        return installed
    source = source_of(installed)
    return load(SourceFileLoader(f"headrace.records.uncompiled_{source.stem}", str(source)))


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Compiles the kernels here, once a run and only where the install did not."""

    @cache
    def build() -> Path:
        out = tmp_path_factory.mktemp("kernel")
        command = ["setup.py", "-q", "build_ext", "--build-lib", str(out), "--build-temp", str(out / "temp")]
        ran = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env={**os.environ, "CFLAGS": "-O0 -g0"},
            capture_output=True,
            text=True,
            timeout=BUILD_TIMEOUT_S,
            check=False,
        )
        if not list(out.glob("headrace/records/*")):
            pytest.skip(f"no Cython or no C compiler here: {ran.stderr[-300:]}")
        # Where they find what they share.
        headrace.records.__path__.append(str(out / "headrace" / "records"))
        return out / "headrace" / "records"

    return build


def as_c(installed: ModuleType, built: Callable[[], Path]) -> ModuleType:
    source = source_of(installed)
    if installed.compiled:
        if source.stat().st_mtime > Path(str(installed.__file__)).stat().st_mtime:
            pytest.fail(f"{source.name} is newer than its compiled form: run `pip install -e .` again")
        return installed
    (found,) = built().glob(f"{source.stem}.*")
    return load(ExtensionFileLoader(installed.__name__, str(found)))


@pytest.fixture(scope="session")
def uncompiled_kernel() -> ModuleType:
    return as_python(headrace.records.kernel)


@pytest.fixture(scope="session")
def compiled_kernel(built: Callable[[], Path]) -> ModuleType:
    return as_c(headrace.records.kernel, built)


@pytest.fixture(scope="session", params=["compiled", "uncompiled"])
def kernel(request: pytest.FixtureRequest) -> ModuleType:
    module: ModuleType = request.getfixturevalue(f"{request.param}_kernel")
    assert module.compiled == (request.param == "compiled")
    return module


def arrow_on(**kernels: ModuleType) -> ModuleType:
    """`records.arrow` over the given forms of its kernels."""
    module = load(SourceFileLoader("headrace.records.arrow", str(headrace.records.arrow.__file__)))
    for name, kernel in kernels.items():
        assert hasattr(module, name)
        setattr(module, name, kernel)
    return module


@pytest.fixture(scope="session")
def compiled_arrow(built: Callable[[], Path]) -> ModuleType:
    return arrow_on(
        arrow_decoder=as_c(headrace.records.arrow_decoder, built),
        arrow_encoder=as_c(headrace.records.arrow_encoder, built),
    )


@pytest.fixture(scope="session")
def uncompiled_arrow() -> ModuleType:
    return arrow_on(
        arrow_decoder=as_python(headrace.records.arrow_decoder), arrow_encoder=as_python(headrace.records.arrow_encoder)
    )


@pytest.fixture(scope="session", params=["compiled", "uncompiled"])
def arrow(request: pytest.FixtureRequest) -> ModuleType:
    module: ModuleType = request.getfixturevalue(f"{request.param}_arrow")
    assert module.arrow_decoder.compiled == module.arrow_encoder.compiled == (request.param == "compiled")
    return module


@pytest.fixture(scope="session", params=["compiled", "uncompiled"])
def key_hashing(request: pytest.FixtureRequest, built: Callable[[], Path]) -> ModuleType:
    installed = headrace.records.key_hashes
    return as_c(installed, built) if request.param == "compiled" else as_python(installed)


@pytest.fixture(scope="session", params=["compiled", "uncompiled"])
def building(request: pytest.FixtureRequest, built: Callable[[], Path]) -> ModuleType:
    installed = headrace.records.builder
    return as_c(installed, built) if request.param == "compiled" else as_python(installed)


@pytest.fixture(scope="session")
def routing(building: ModuleType, built: Callable[[], Path]) -> ModuleType:
    """The router over the same form of batches."""
    installed = headrace.records.router
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, building.__name__.replace("uncompiled_", ""), building)
        return as_c(installed, built) if building.compiled else as_python(installed)


@pytest.fixture(scope="session", params=["compiled", "uncompiled"])
def received(request: pytest.FixtureRequest, built: Callable[[], Path]) -> ModuleType:
    installed = headrace.records.consumer_records
    return as_c(installed, built) if request.param == "compiled" else as_python(installed)
