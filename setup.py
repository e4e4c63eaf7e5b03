"""Compiles the record kernels where Cython and a C compiler are there; the install goes on without them.

All of them, unless the environment's RECORD_KERNELS names some ("kernel routing") or none (""). A kernel that is newer
than its source is kept. Everything else about the package is in pyproject.toml.
"""

from __future__ import annotations

import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import version

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

KERNELS = ("kernel", "building", "key_hashing", "routing", "received", "decoding", "encoding")
# What Cython otherwise writes into every module with typed memory views, and that is more than the module itself.
SUPPORT = "headrace.records.cython_support"


def extensions() -> list[Extension]:
    chosen = os.environ.get("RECORD_KERNELS", " ".join(KERNELS)).split()
    # Debug symbols of generated C take a third of the time; the support is no place where optimising shows.
    kernels = [extension(f"headrace.records.{name}", ".py", "-g0") for name in chosen]
    return [extension(SUPPORT, ".c", "-g0", "-O1"), *kernels] if kernels else []


def extension(name: str, suffix: str, *flags: str) -> Extension:
    source = f"src/{name.replace('.', '/')}{suffix}"
    return Extension(name, [source], depends=["setup.py"], extra_compile_args=[*flags])


class BuildKernels(build_ext):
    """All or none, since they use each other. A compiler that is missing or fails costs one line, not the install."""

    def build_extensions(self) -> None:
        try:
            self.compile_side_by_side()
        except Exception as error:  # noqa: BLE001 - compilers fail in ways of their own
            print(f"headrace: the record kernels stay uncompiled (same answers, slower): {error}", file=sys.stderr)
            for file in self.files():
                with suppress(FileNotFoundError):
                    os.unlink(f"src/{file}")
            # What is still listed is expected as a file by the steps that follow.
            self.extensions = []

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
        """Whoever imports a kernel meanwhile finds all of it or its source."""
        for file in self.files():
            shutil.copy(f"{self.build_lib}/{file}", f"src/{file}.new")
            os.replace(f"src/{file}.new", f"src/{file}")

    def files(self) -> list[str]:
        return [self.get_ext_filename(extension.name) for extension in self.extensions]  # type: ignore[no-untyped-call]


setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildKernels},
    package_data={"headrace.records": ["*.pxd"]},
)
