"""What a share consumer holds and says: offsets in runs, and its sessions. No broker."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.client.share.deliveries import Deliveries, Said, settled
from headrace.client.share.offset_runs import OffsetRuns, Run
from headrace.client.share.share_collector import runs_of
from headrace.client.share.share_session import EPOCH_MAX, ShareSession
from headrace.errors import InvalidRequest
from headrace.queues.messages import AcknowledgeType

ACCEPT, RELEASE, RENEW = AcknowledgeType.ACCEPT, AcknowledgeType.RELEASE, AcknowledgeType.RENEW
PLACE = ("orders", 0)
spans = st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda span: Run(span[0], span[0] + span[1]))


def offsets_of(runs: OffsetRuns) -> set[int]:
    return {offset for run in runs for offset in range(run.first, run.last + 1)}


@given(st.lists(st.tuples(st.sampled_from(["add", "remove"]), spans), max_size=20), spans)
def test_runs_are_a_set_of_offsets(steps: list[tuple[str, Run]], asked: Run) -> None:
    runs, model = OffsetRuns(), set[int]()
    for step, run in steps:
        members = set(range(run.first, run.last + 1))
        if step == "add":
            runs.add(*run)
            model |= members
        else:
            runs.remove(*run)
            model -= members
        assert offsets_of(runs) == model
        assert len(runs) == len(model)
        listed = list(runs)
        assert all(before.last + 1 < after.first for before, after in pairwise(listed))
    wanted = set(range(asked.first, asked.last + 1))
    assert runs.has(*asked) == (wanted <= model)
    outside = [offset for run in runs.outside(*asked) for offset in range(run.first, run.last + 1)]
    assert outside == sorted(wanted - model)
    assert runs_of(sorted(model)) == list(runs)


@given(st.lists(st.tuples(spans, st.sampled_from([ACCEPT, RELEASE, RENEW])), max_size=12))
def test_what_is_said_last_of_an_offset_counts_and_each_is_named_once(steps: list[tuple[Run, AcknowledgeType]]) -> None:
    model: dict[int, AcknowledgeType] = {}
    for run, type in steps:
        model |= dict.fromkeys(range(run.first, run.last + 1), type)
    said = settled([Said(*run, type) for run, type in steps])
    named = [(offset, each.type) for each in said for offset in range(each.first, each.last + 1)]
    assert named == sorted(model.items())


def test_what_is_not_held_cannot_be_acknowledged() -> None:
    deliveries = Deliveries()
    deliveries.hand_out(PLACE, [Run(3, 7)])
    for run in (Run(2, 3), Run(7, 8), Run(10, 10)):
        with pytest.raises(InvalidRequest, match="orders-0"):
            deliveries.acknowledge(PLACE, run, ACCEPT)
    with pytest.raises(InvalidRequest, match="ends before it begins"):
        deliveries.acknowledge(PLACE, Run(5, 4), ACCEPT)
    deliveries.acknowledge(PLACE, Run(4, 5), ACCEPT)
    with pytest.raises(InvalidRequest, match="offset 4"):
        deliveries.acknowledge(PLACE, Run(4, 4), RELEASE)
    assert deliveries.take_said() == {PLACE: [Said(4, 5, ACCEPT)]}
    assert deliveries.unacknowledged == 3


def test_a_renewed_record_is_still_held_and_counts_as_acknowledged() -> None:
    deliveries = Deliveries()
    deliveries.hand_out(PLACE, [Run(0, 1)])
    deliveries.acknowledge(PLACE, Run(0, 1), RENEW)
    assert deliveries.unacknowledged == 0
    assert deliveries.take_said() == {PLACE: [Said(0, 1, RENEW)]}
    deliveries.acknowledge(PLACE, Run(0, 0), ACCEPT)
    deliveries.acknowledge(PLACE, Run(1, 1), RENEW)
    deliveries.acknowledge(PLACE, Run(1, 1), RELEASE)
    assert deliveries.take_said() == {PLACE: [Said(0, 0, ACCEPT), Said(1, 1, RELEASE)]}


def test_a_session_names_what_differs_and_counts_its_epochs() -> None:
    session, one, two = ShareSession(), (b"t", 0), (b"t", 1)
    assert not session.is_open
    assert session.changes([one]) == (0, (one,), ())
    assert session.changes([one, two]) == (1, (two,), ())
    assert session.next_epoch() == 2
    assert session.changes([two]) == (3, (), (one,))
    session.lose()
    assert session.changes([two]) == (0, (two,), ())


def test_epochs_begin_again_at_one() -> None:
    session = ShareSession()
    session._epoch = EPOCH_MAX
    assert [session.next_epoch(), session.next_epoch()] == [EPOCH_MAX, 1]
