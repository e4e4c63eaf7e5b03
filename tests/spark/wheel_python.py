"""A Python that has the wheel of this tree and what it needs, and nothing of the tree, as machines of a cluster do."""

from __future__ import annotations

import venv
import zipfile
from pathlib import Path

import dist
import pyspark


def make(folder: Path) -> Path:
    """The program of an environment in the folder; the package is in it, what it needs is that of the tests."""
    _, wheel = dist.build(folder / "dist")
    home = folder / "environment"
    venv.create(home, with_pip=False)
    (packages,) = home.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(packages)
    # A line adds one folder to the path, and does not look for such lines there: no link to the tree is followed.
    (packages / "needed.pth").write_text(f"{Path(pyspark.__file__).parent.parent}\n")
    return home / "bin" / "python"
