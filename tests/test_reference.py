"""The references in docs/ say what the code says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import api_reference
import protocol_reference
import pytest
from kio.schema.index import api_key_map

from headrace.wire.api import KAFKA_APIS

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("reference", "needs"),
    [("API.md", ("pyarrow", "pyspark")), ("CLI.md", ()), ("PROTOCOL.md", ()), ("SETTINGS.md", ())],
)
def test_a_reference_in_docs_is_current(reference: str, needs: tuple[str, ...]) -> None:
    for package in needs:
        pytest.importorskip(package)
    checked = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "reference.py"), "--check", reference],
        env={"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr


def test_what_the_reference_leaves_out_is_there() -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("pyspark")
    reference = api_reference.Reference()
    reference.text()
    assert sorted(api_reference.INTERNAL - reference.met) == []


def test_why_an_api_is_not_served_is_said_of_those_alone() -> None:
    served = {api_key_map[key] for key in KAFKA_APIS}
    planned, not_meant = protocol_reference.PLANNED.keys(), protocol_reference.NOT_MEANT.keys()
    assert planned | not_meant == set(api_key_map.values()) - served
    assert not planned & not_meant


def test_names_that_are_found_late_are_those_of_their_modules() -> None:
    pytest.importorskip("pyspark")
    import headrace.pipelines.job
    import headrace.spark.session

    assert headrace.spark.start is headrace.spark.session.start
    assert headrace.pipelines.Topics is headrace.pipelines.job.Topics
