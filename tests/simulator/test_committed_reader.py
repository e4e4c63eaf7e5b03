"""What a simulated client makes of a fetch of what is committed, and of whole logs."""

from __future__ import annotations

from headrace.records import kernel
from headrace.records.batch import TRANSACTIONAL
from headrace.records.control import marker_batch
from headrace.records.record import NewRecord
from headrace.simulator.committed_reader import committed_records
from headrace.simulator.contents import content_of
from headrace.simulator.transaction_load import entries
from headrace.wire.message import Message


def batch(offset: int, producer_id: int, number: int, records: int = 1, *, attributes: int = TRANSACTIONAL) -> bytes:
    content: list[NewRecord] = [(0, None, content_of((producer_id, number), nth, 3), []) for nth in range(records)]
    return bytes(
        kernel.build(
            content,
            base_offset=offset,
            producer_id=producer_id,
            producer_epoch=0,
            base_sequence=number,
            attributes=attributes,
        )
    )


def marker(offset: int, producer_id: int, *, committed: bool) -> bytes:
    built, _ = marker_batch(producer_id, 0, 1, committed=committed, number=3, now_ms=0)
    built[:8] = offset.to_bytes(8, "big")
    return bytes(built)


def row(*parts: bytes, aborted: tuple[tuple[int, int], ...] = ()) -> Message:
    listed = [Message(producer_id=producer, first_offset=first) for producer, first in aborted]
    return Message(records=b"".join(parts), aborted_transactions=listed)


LOG = (
    batch(0, 1, 0, 2),
    batch(2, 2, 0),
    marker(3, 1, committed=False),
    batch(4, 1, 1),
    marker(5, 2, committed=True),
    batch(6, 3, 0, attributes=0),
    marker(7, 1, committed=True),
)


def test_records_of_aborted_transactions_are_left_out_up_to_their_marker() -> None:
    found, after = committed_records(row(*LOG, aborted=((1, 0),)), 0)
    assert [offset for offset, _, _ in found] == [2, 4, 6]
    assert after == 8


def test_a_fetch_in_the_middle_of_an_aborted_transaction_leaves_out_its_rest() -> None:
    found, after = committed_records(row(*LOG, aborted=((1, 0),)), 1)
    assert [offset for offset, _, _ in found] == [2, 4, 6]
    assert after == 8


def test_without_a_list_everything_but_markers_is_given() -> None:
    found, _ = committed_records(row(*LOG), 1)
    assert found[0] == (1, (1, 0), 1)
    assert [offset for offset, _, _ in found] == [1, 2, 4, 6]


def test_a_log_is_read_with_its_markers() -> None:
    found = entries(b"".join(LOG))
    assert [(each.offset, each.batch, each.nth, each.committed) for each in found] == [
        (0, (1, 0), 0, False),
        (1, (1, 0), 1, False),
        (2, (2, 0), 0, False),
        (3, None, 0, False),
        (4, (1, 1), 0, False),
        (5, None, 0, True),
        (6, (3, 0), 0, False),
        (7, None, 0, True),
    ]
