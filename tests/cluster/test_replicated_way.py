"""The way of an append to three replicas does not grow unseen."""

from __future__ import annotations

import etcd_nodes  # noqa: F401  the tool starts one
from ways import ways

FILES_MOST, CHANGES_MOST = 31, 190
"""In the leader and a follower; pings and ticks may fall into it."""


def test_an_append_to_three_replicas_passes_no_more_files_than_it_needs() -> None:
    ((files, changes),) = ways("replicated")
    assert files <= FILES_MOST, "tools/way.py --files replicated says where"
    assert changes <= CHANGES_MOST
