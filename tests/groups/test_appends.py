"""Records on their way to the log: bounded appends, and one answer for all of them."""

from __future__ import annotations

import pytest

from headrace.errors import Code
from headrace.groups.appends import BYTES_PER_APPEND, RECORDS_PER_APPEND, AppendDone, Appends, in_appends
from headrace.groups.offsets import Record
from headrace.groups.shard import Shard


def test_an_append_has_so_many_records_and_no_more() -> None:
    records: list[Record] = [(b"%d" % n, None) for n in range(2 * RECORDS_PER_APPEND + 1)]
    parts = list(in_appends(records))
    assert [len(part) for part in parts] == [RECORDS_PER_APPEND, RECORDS_PER_APPEND, 1]
    assert [record for part in parts for record in part] == records
    assert list(in_appends([])) == []


def test_an_append_has_so_many_bytes_and_no_more_unless_one_record_is_larger() -> None:
    half = bytes(BYTES_PER_APPEND // 2 - 1)
    records: list[Record] = [(b"k", half), (b"k", half), (b"k", b""), (b"k", bytes(2 * BYTES_PER_APPEND)), (b"k", None)]
    assert [len(part) for part in in_appends(records)] == [2, 1, 1, 1]
    assert [len(part) for part in in_appends(records[3:])] == [1, 1]


@pytest.mark.parametrize("failed", [None, 0, 1, 2])
def test_all_parts_have_one_answer_the_first_error_if_there_was_one(failed: int | None) -> None:
    waiting: list[AppendDone] = []
    heard: list[int] = []
    appends = Appends(lambda _partition, _epoch, _records, done: waiting.append(done))
    appends.add(Shard(0, 0), [(b"k", None)] * (2 * RECORDS_PER_APPEND + 1), heard.append)
    for nth, done in enumerate(waiting):
        assert heard == []
        done(Code.STORAGE_ERROR if nth == failed else Code.NONE)
    assert heard == [Code.NONE if failed is None else Code.STORAGE_ERROR]


@pytest.mark.parametrize(("gone", "code"), [(False, Code.NONE), (True, Code.NOT_COORDINATOR)])
def test_what_has_no_part_is_answered_at_once(gone: bool, code: int) -> None:
    heard: list[int] = []
    shard = Shard(0, 0)
    shard.gone = gone
    appends = Appends(lambda *_: pytest.fail("nothing is appended"))
    appends.add(shard, [(b"k", None)] if gone else [], heard.append)
    assert heard == [code]
