"""Command blocks of the docs that need Spark; the others are read by tests/test_pages.py."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from pages import ROOT, pages_with
from proving import proves
from spark.standalone import SHORT_LIVED

DEADLINE_S = 550


@proves("U8")
def test_pages_with_spark_print_what_they_say() -> None:
    read("spark")


@pytest.mark.long
def test_pages_with_pipelines_print_what_they_say(proof_report: Callable[..., None]) -> None:
    """tests/pipelines runs each of these commands in `make test`; here they are typed as a page has them."""
    proof_report(pages=read("pipelines"))


def read(group: str) -> int:
    """In a process of its own, with one JVM for all: commands end the session that they find."""
    named = [str(page.relative_to(ROOT)) for page in pages_with(group)]
    ran = subprocess.run(
        [sys.executable, ROOT / "tests" / "pages.py", "--with", group, *named],
        env={**os.environ, "SPARK_SUBMIT_OPTS": SHORT_LIVED},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-6000:]
    assert ran.stdout.count(" blocks in ") == len(named)
    return len(named)
