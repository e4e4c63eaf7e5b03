"""Builds what is published: `dist.py [FOLDER]` puts an sdist and a compiled wheel of this tree into dist, or FOLDER.

Nothing of an earlier build gets into them. The wheel takes the kernels that are compiled beside their sources, if they
are current (see setup.py), and compiles them otherwise. One without all of them is refused: it would be right, but
slow. It is for this machine's kind of Python, system and C library; all others build from the sdist.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOOKS = """
import sys
from setuptools import build_meta
folder = sys.argv[1]
build_meta.build_sdist(folder)
build_meta.build_wheel(folder)
"""
EXTENSIONS = """
import setuptools
from distutils.core import run_setup
print(*(extension.name for extension in run_setup("setup.py", stop_after="init").ext_modules))
"""


class BuildFailed(Exception):
    """Carries what the build said."""


def build(folder: Path) -> tuple[Path, Path]:
    """The sdist and the wheel; files of the same name are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        settings, made = Path(work, "build.cfg"), Path(work, "made")
        settings.write_text(f"[build]\nbuild_base = {work}/build\n[egg_info]\negg_base = {work}\n")
        made.mkdir()
        said = run(HOOKS, str(made), DIST_EXTRA_CONFIG=str(settings))
        (sdist,), (wheel,) = made.glob("*.tar.gz"), made.glob("*.whl")
        if missing := kernels_missing(wheel):
            raise BuildFailed(f"{said}\nthe wheel lacks the compiled {', '.join(missing)}")
        return Path(shutil.copy(sdist, folder)), Path(shutil.copy(wheel, folder))


def kernels_missing(wheel: Path) -> list[str]:
    """Of all that setup.py compiles."""
    with zipfile.ZipFile(wheel) as packed:
        compiled = {name.partition(".")[0].replace("/", ".") for name in packed.namelist() if name.endswith(".so")}
    return [name for name in run(EXTENSIONS).split() if name not in compiled]


def run(program: str, *arguments: str, **environment: str) -> str:
    """Runs it in the tree, with the packages of this environment; what it said."""
    # What a user asked of another build does not count here.
    inherited = {name: value for name, value in os.environ.items() if name != "RECORD_KERNELS"}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env={**inherited, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise BuildFailed(done.stdout)
    return done.stdout


if __name__ == "__main__":
    try:
        for file in build(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dist"):
            print(file)
    except BuildFailed as error:
        sys.exit(f"dist: {error}")
