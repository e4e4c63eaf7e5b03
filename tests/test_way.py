"""The way of a message through the code does not grow unseen."""

from __future__ import annotations

from ways import ways

MOST = {"produce": (14, 40), "fetch": (22, 95), "commit": (23, 65), "send": (10, 70)}
"""Files and changes of file. The files are those that it takes; on a busy machine a read more may come in between. A
fetch reads what is committed, and one that comes to its deadline goes on from there (94, else 71); the coordinator of
groups stands on what coordinators have in common."""


def test_a_message_passes_no_more_files_than_it_needs() -> None:
    found = dict(zip(MOST, ways(*MOST), strict=True))
    longer = {name: way for name, way in found.items() if way[0] > MOST[name][0] or way[1] > MOST[name][1]}
    assert not longer, f"tools/way.py --files says where; at most {MOST}"
