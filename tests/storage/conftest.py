"""Every storage test that asks for `harness` runs on the fault-injecting disk and on the real one.

A test class with an attribute `layout` gets stores of that layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.storage.folder import PARTITIONED, SHARED
from storage.harness import Harness, real_harness, sim_harness


@pytest.fixture(params=["sim", pytest.param("real", marks=pytest.mark.thorough)])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    layout = getattr(request.cls, "layout", PARTITIONED)
    if request.param == "sim":
        yield sim_harness(layout)
    else:
        yield from real_harness(str(tmp_path / "data"), layout)


@pytest.fixture
def sim(request: pytest.FixtureRequest) -> Harness:
    return sim_harness(getattr(request.cls, "layout", PARTITIONED))


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Harness]:
    yield from real_harness(str(tmp_path / "data"))


@pytest.fixture
def shared() -> Harness:
    return sim_harness(SHARED)
