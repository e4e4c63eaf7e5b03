"""Compiles the record kernels where Cython and a C compiler are there; the install goes on without them.

All of them, unless the environment's RECORD_KERNELS names some ("kernel router") or none (""). A kernel that is newer
than its source is kept. Everything else about the package is in pyproject.toml.

They know each other's C types, so beside their sources they are of one build, or not there: if one is older than a
source, all go before anything is compiled. A build that fails or is interrupted leaves the others, or Python. A wheel
takes them as they are, if all are there and none is older than a source: they are what the tests ran with.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# Each uses none that comes after it.
KERNELS = ("kernel", "key_hashes", "builder", "router", "consumer_records", "arrow_decoder", "arrow_encoder")
# What Cython otherwise writes into every module with typed memory views, and that is more than the module itself.
SUPPORT = "headrace.records.cython_support"
RECORDS = Path("src/headrace/records")
# What they share: numbers and inlined functions of C, beside the same in Python.
SHARED = ("batch", "memory", "varints", "partitioner")


def extensions() -> list[Extension]:
    chosen = os.environ.get("RECORD_KERNELS", " ".join(KERNELS)).split()
    # Debug symbols of generated C take a third of the time; the support is no place where optimising shows.
    kernels = [extension(f"headrace.records.{name}", ".py", "-g0") for name in chosen]
    return [extension(SUPPORT, ".c", "-g0", "-O1"), *kernels] if kernels else []


def extension(name: str, suffix: str, *flags: str) -> Extension:
    source = f"src/{name.replace('.', '/')}{suffix}"
    return Extension(name, [source], depends=["setup.py"], extra_compile_args=[*flags])


def compiled_beside_sources() -> list[Path]:
    """In the order in which they can go, one by one: what is left can be imported."""
    names = (*reversed(KERNELS), SUPPORT.rpartition(".")[2])
    return [file for name in names for file in RECORDS.glob(f"{name}.*.so")]


def remove_compiled() -> None:
    for file in compiled_beside_sources():
        file.unlink()


def remove_stale() -> None:
    for cut_short in RECORDS.glob("*.so.new"):
        cut_short.unlink()
    if is_stale(compiled_beside_sources()):
        remove_compiled()


def is_stale(compiled: Iterable[Path]) -> bool:
    sources = [RECORDS / f"{name}{suffix}" for name in (*KERNELS, *SHARED) for suffix in (".py", ".pxd")]
    newest = max(source.stat().st_mtime for source in sources)
    return any(file.stat().st_mtime < newest for file in compiled)


class BuildKernels(build_ext):
    """A compiler that is missing or fails costs one line, not the install."""

    def run(self) -> None:
        if self.inplace:
            remove_stale()
        self.beside_sources = bool(self.inplace)
        super().run()

    def build_extensions(self) -> None:
        try:
            if self.beside_sources or not self.take_compiled():
                self.compile_side_by_side()
        except Exception as error:  # noqa: BLE001 - compilers fail in ways of their own
            print(f"headrace: record kernels stay uncompiled (same answers, slower): {error}", file=sys.stderr)
            for file in self.files():  # a wheel would take those that were compiled
                with suppress(FileNotFoundError):
                    os.unlink(f"{self.build_lib}/{file}")
            # What is still listed is expected as a file by the steps that follow.
            self.extensions = []

    def take_compiled(self) -> bool:
        placed = [Path("src", file) for file in self.files()]
        if not all(file.exists() for file in placed) or is_stale(placed):
            return False
        for file in placed:
            taken = Path(self.build_lib, file.relative_to("src"))
            taken.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, taken)
        return True

    def compile_side_by_side(self) -> None:
        from Cython.Build import cythonize

        with ThreadPoolExecutor(os.cpu_count()) as compilers:
            compiling = []
            for extension in self.extensions:
                # Annotations are for people and mypy here; the C types are in the .pxd files.
                (written,) = cythonize(  # type: ignore[no-untyped-call]
                    [extension],
                    # What two versions of Cython wrote does not run together.
                    build_dir=f"build/cython-{version('cython')}",
                    quiet=True,
                    compiler_directives={"annotation_typing": False, "warn.unreachable": False},
                    shared_utility_qualified_name=SUPPORT,
                )
                extension.sources = written.sources
                compiling.append(compilers.submit(self.build_extension, extension))
            for each in compiling:
                each.result()

    def copy_extensions_to_source(self) -> None:
        """Whoever imports a kernel meanwhile finds all of it or its source, and none of another build."""
        files = [file for file in self.files() if not is_same(f"{self.build_lib}/{file}", f"src/{file}")]
        of_another = any(os.path.exists(f"src/{file}") for file in files)
        if of_another:
            files = self.files()
        for file in files:
            shutil.copy(f"{self.build_lib}/{file}", f"src/{file}.new")
        if of_another:
            remove_compiled()
        for file in files:
            os.replace(f"src/{file}.new", f"src/{file}")

    def files(self) -> list[str]:
        return [self.get_ext_filename(extension.name) for extension in self.extensions]  # type: ignore[no-untyped-call]


def is_same(built: str, placed: str) -> bool:
    return os.path.exists(placed) and filecmp.cmp(built, placed, shallow=False)


setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildKernels},
)
