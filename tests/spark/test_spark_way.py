"""The way of a task of Spark through the code does not grow unseen."""

from __future__ import annotations

import pyspark  # noqa: F401  the tool reads as its worker does

from ways import ways

FILES_MOST, CHANGES_MOST = 19, 90


def test_a_task_of_a_batch_read_passes_no_more_files_than_it_needs() -> None:
    ((files, changes),) = ways("spark")
    assert files <= FILES_MOST, "tools/way.py --files spark says where"
    assert changes <= CHANGES_MOST
