"""A compile that fails or is interrupted leaves kernels that can be imported, of one build or none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.records import kernel

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120
LATER = ("consumer_records", "arrow_decoder", "arrow_encoder")

pytestmark = pytest.mark.skipif(not kernel.compiled, reason="nothing is compiled here")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    shutil.copytree(
        ROOT / "src" / "headrace", tmp_path / "src" / "headrace", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(ROOT / "setup.py", tmp_path)
    for compiled in tmp_path.rglob("*.so"):
        os.utime(compiled)
    return tmp_path


def compiled_in(checkout: Path) -> set[str]:
    return {file.name.partition(".")[0] for file in (checkout / "src" / "headrace" / "records").glob("*.so*")}


def compile_in_vain(checkout: Path, how_it_ends: str, where: str = "--inplace") -> str:
    """With a Cython that ends the compile, if it comes so far; what was said."""
    (checkout / "ends" / "Cython").mkdir(parents=True)
    (checkout / "ends" / "Cython" / "Build.py").write_text(f"raise {how_it_ends}('for the test')\n")
    (checkout / "ends" / "Cython" / "__init__.py").touch()
    environment = {**os.environ, "PYTHONPATH": str(checkout / "ends")}
    environment.pop("RECORD_KERNELS", None)
    command = [sys.executable, "setup.py", "--quiet", "build_ext", where]
    ended = subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    return ended.stderr


def is_cut_short(said: str) -> bool:
    return "for the test" in said or "interrupted" in said


def import_all(checkout: Path) -> None:
    script = "import headrace.cli.main, headrace.client, headrace.records.arrow, headrace.records.router"
    subprocess.run(
        [sys.executable, "-c", script], env={"PYTHONPATH": str(checkout / "src")}, timeout=TIMEOUT_S, check=True
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("changed", "how_it_ends"), [("builder.py", "KeyboardInterrupt"), ("builder.pxd", "RuntimeError")]
)
def test_kernels_of_changed_sources_all_go(checkout: Path, changed: str, how_it_ends: str) -> None:
    records = checkout / "src" / "headrace" / "records"
    after = max(file.stat().st_mtime for file in records.iterdir()) + 10
    os.utime(records / changed, (after, after))
    (records / "kernel.cut-short.so.new").touch()
    assert is_cut_short(compile_in_vain(checkout, how_it_ends))
    assert compiled_in(checkout) == set()
    import_all(checkout)


@pytest.mark.thorough
def test_kernels_that_serve_stay_when_the_later_ones_cannot_be_compiled(checkout: Path) -> None:
    for name in LATER:
        for file in (checkout / "src" / "headrace" / "records").glob(f"{name}.*.so"):
            file.unlink()
    first = compiled_in(checkout)
    assert is_cut_short(compile_in_vain(checkout, "RuntimeError"))
    assert compiled_in(checkout) == first
    import_all(checkout)


@pytest.mark.thorough
def test_a_wheel_takes_the_kernels_beside_their_sources(checkout: Path) -> None:
    assert not is_cut_short(compile_in_vain(checkout, "RuntimeError", "--build-lib=taken"))
    taken = {file.name: file.read_bytes() for file in (checkout / "taken").rglob("*.so")}
    assert taken == {file.name: file.read_bytes() for file in (checkout / "src").rglob("*.so")}


@pytest.mark.thorough
@pytest.mark.parametrize("one", ["missing", "older than its source"])
def test_a_wheel_takes_no_kernels_beside_their_sources_if_one_is(checkout: Path, one: str) -> None:
    (file,) = (checkout / "src" / "headrace" / "records").glob("router.*.so")
    if one == "missing":
        file.unlink()
    else:
        os.utime(file, (0, 0))
    assert is_cut_short(compile_in_vain(checkout, "RuntimeError", "--build-lib=taken"))
    assert list((checkout / "taken").rglob("*.so")) == []
