"""An HTTP port for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from http_port import HttpPort


@pytest.fixture
def port(tmp_path: Path) -> Iterator[HttpPort]:
    port = HttpPort(tmp_path / "data", http_body_max_bytes=200_000)
    yield port
    port.close()
    assert port.failures == [], "something was raised on the loop"


@pytest.fixture
def faulty_port() -> Iterator[HttpPort]:
    port = HttpPort(Path("/data"), faulty=True)
    yield port
    port.close()
    assert port.failures == [], "something was raised on the loop"
