"""Compiles the record kernels where Cython and a C compiler are there; the install goes on without them.

Everything else about the package is in pyproject.toml.
"""

from __future__ import annotations

import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

KERNELS = (
    "headrace.records.kernel",
    "headrace.records.decoding",
    "headrace.records.encoding",
    "headrace.records.key_hashing",
    "headrace.records.building",
    "headrace.records.received",
    "headrace.records.routing",
)


def uncompiled(name: str, reason: object) -> None:
    print(f"headrace: {name} stays uncompiled (same answers, slower): {reason}", file=sys.stderr)


def extensions() -> list[Extension]:
    try:
        from Cython.Build import cythonize
    except ImportError as error:
        uncompiled(" and ".join(KERNELS), error)
        return []
    kernels = [Extension(name, [f"src/{name.replace('.', '/')}.py"]) for name in KERNELS]
    # Annotations are for people and mypy here; the C types are in the .pxd files.
    compiled: list[Extension] = cythonize(  # type: ignore[no-untyped-call]
        kernels, build_dir="build/cython", quiet=True, compiler_directives={"annotation_typing": False}
    )
    return compiled


class BuildKernel(build_ext):
    """A compiler that is missing or fails costs one line, not the install."""

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except Exception as error:  # noqa: BLE001 - compilers fail in ways of their own
            uncompiled(ext.name, error)
            # What is still listed is expected as a file by the steps that follow.
            self.extensions = [other for other in self.extensions if other is not ext]


setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildKernel},
    package_data={"headrace.records": ["*.pxd"]},
)
