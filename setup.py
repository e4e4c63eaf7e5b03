"""Compiles the record kernel where Cython and a C compiler are there; the install goes on without them.

Everything else about the package is in pyproject.toml.
"""

from __future__ import annotations

import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

KERNEL = "headrace.records.kernel"


def uncompiled(reason: object) -> None:
    print(f"headrace: {KERNEL} stays uncompiled (same answers, slower): {reason}", file=sys.stderr)


def extensions() -> list[Extension]:
    try:
        from Cython.Build import cythonize
    except ImportError as error:
        uncompiled(error)
        return []
    kernel = Extension(KERNEL, ["src/headrace/records/kernel.py"])
    # Annotations are for people and mypy here; the C types are in kernel.pxd.
    compiled: list[Extension] = cythonize(  # type: ignore[no-untyped-call]
        [kernel], build_dir="build/cython", quiet=True, compiler_directives={"annotation_typing": False}
    )
    return compiled


class BuildKernel(build_ext):
    """A compiler that is missing or fails costs one line, not the install."""

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except Exception as error:  # noqa: BLE001 - compilers fail in ways of their own
            uncompiled(error)
            # What is still listed is expected as a file by the steps that follow.
            self.extensions = [other for other in self.extensions if other is not ext]


setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildKernel},
    package_data={"headrace.records": ["*.pxd"]},
)
