"""Verdicts on what does not match, without Spark: a store and a ledger as plain lists."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pandas as pd

from headrace.pipelines.judgement import NO_OFFSET, Bound, judge
from proving import proves

Claim = tuple[str, int, int, int, int]
"""Producer, sequence, partition, offset, digest."""
Copy = tuple[int, int, int]
"""Partition, offset, digest."""
Verdict = tuple[str, object, object, int, int]


def leftovers_of(claims: Sequence[Claim], copies: Sequence[Copy]) -> pd.DataFrame:
    claimed = Counter((partition, offset, digest) for _, _, partition, offset, digest in claims if offset != NO_OFFSET)
    kept = Counter(copies)
    rows = [
        ("t", *place, claimed[place], kept[place], None, None)
        for place in claimed | kept
        if claimed[place] != kept[place]
    ]
    names = ["topic", "partition", "offset", "digest", "claims", "copies", "sent_at", "kept_at"]
    return pd.DataFrame(rows, columns=names).astype({"partition": "int32", "offset": "int64", "digest": "int64"})


def verdicts(claims: Sequence[Claim], copies: Sequence[Copy], bounds: Sequence[Bound] = ()) -> list[Verdict]:
    names = ["producer", "sequence", "topic", "partition", "offset", "digest"]
    rows = [(producer, sequence, "t", *place) for producer, sequence, *place in claims]
    ledger = pd.DataFrame(rows, columns=names).astype({"partition": "int32", "offset": "int64", "digest": "int64"})
    found = judge(ledger, leftovers_of(claims, copies), bounds)
    columns = ["what", "producer", "sequence", "partition", "offset"]
    plain = found[columns].astype(object).where(found[columns].notna(), None)
    return sorted(plain.itertuples(index=False, name=None), key=str)


def sent(count: int, producer: str = "p") -> list[Claim]:
    return [(producer, n, 0, n, 1000 + n) for n in range(count)]


def kept(claims: Sequence[Claim]) -> list[Copy]:
    return [(partition, offset, digest) for _, _, partition, offset, digest in claims]


@proves("S6")
def test_everything_in_its_place_gives_no_verdict() -> None:
    assert verdicts(sent(5), kept(sent(5))) == []


@proves("S6")
def test_each_kind_of_fault_has_its_name() -> None:
    claims = sent(10)
    copies = kept(claims)
    del copies[1]
    assert verdicts(claims, copies) == [("lost", "p", 1, 0, 1)]
    copies = [*kept(claims), (0, 2, 1002)]
    assert verdicts(claims, copies) == [("duplicated", "p", 2, 0, 2)]
    copies = [*kept(claims), (0, 10, 1002)]
    assert verdicts(claims, copies) == [("duplicated", "p", 2, 0, 10)]
    copies = kept(claims)
    copies[3:5] = [(0, 3, 1004), (0, 4, 1003)]
    assert verdicts(claims, copies) == [("out_of_order", "p", 3, 0, 3), ("out_of_order", "p", 4, 0, 4)]
    copies = kept(claims)
    copies[6] = (0, 6, 77)
    assert verdicts(claims, copies) == [("corrupted", "p", 6, 0, 6)]


@proves("S6")
def test_a_message_sent_twice_on_purpose_is_no_duplicate() -> None:
    claims: list[Claim] = [("p", 0, 0, 0, 5), ("p", 1, 0, 1, 5), ("q", 0, 1, 0, 5)]
    assert verdicts(claims, kept(claims)) == []
    assert verdicts(claims, [(0, 0, 5), (1, 0, 5)]) == [("lost", "p", 1, 0, 1)]
    assert verdicts(claims, [*kept(claims), (0, 2, 5)]) == [("duplicated", "p", 0, 0, 2)]


def test_records_of_other_producers_are_unclaimed() -> None:
    assert verdicts(sent(2), [*kept(sent(2)), (0, 2, 9), (1, 0, 9)]) == [
        ("unclaimed", None, None, 0, 2),
        ("unclaimed", None, None, 1, 0),
    ]


def test_a_place_taken_twice_is_a_duplicate_whatever_is_in_it() -> None:
    assert verdicts(sent(2), [*kept(sent(2)), (0, 1, 9)]) == [("duplicated", "p", 1, 0, 1)]
    assert verdicts(sent(1), [(0, 0, 1000), (0, 7, 8), (0, 7, 9)]) == [
        ("duplicated", None, None, 0, 7),
        ("unclaimed", None, None, 0, 7),
    ]


def test_a_moved_record_does_not_make_its_successor_a_duplicate() -> None:
    """The record sent to offset 1 lies at 2, and an unknown one at 1."""
    assert verdicts(sent(2), [(0, 0, 1000), (0, 1, 9), (0, 2, 1001)]) == [
        ("out_of_order", "p", 1, 0, 1),
        ("unclaimed", None, None, 0, 1),
    ]


def test_two_claims_for_one_copy_leave_one_lost() -> None:
    claims: list[Claim] = [("p", 0, 0, 0, 5), ("p", 1, 0, 0, 5)]
    assert verdicts(claims, [(0, 0, 5)]) == [("lost", "p", 1, 0, 0)]
    assert verdicts([("p", 0, 0, 0, 5), ("q", 0, 0, 0, 6)], [(0, 0, 5)]) == [("lost", "q", 0, 0, 0)]


def test_a_claim_without_an_offset_is_found_by_its_content() -> None:
    claims: list[Claim] = [("p", 0, 0, NO_OFFSET, 5), ("p", 1, 1, NO_OFFSET, 5)]
    assert verdicts(claims, [(0, 3, 5), (1, 8, 5)]) == []
    assert verdicts(claims, [(1, 8, 5)]) == [("lost", "p", 0, 0, NO_OFFSET)]
    assert verdicts(claims[:1], [(1, 8, 5)]) == [("out_of_order", "p", 0, 0, NO_OFFSET)]


def test_what_may_be_gone_is_not_lost() -> None:
    unknown: list[Claim] = [("p", 0, 0, NO_OFFSET, 5)]
    assert verdicts(unknown, [], [Bound("t", 0, first_offset=4)])[0][0] == "perhaps_deleted"
    assert verdicts(unknown, [], [Bound("t", 0, next_offset=4)])[0][0] == "pending"
    assert verdicts(unknown, [], [Bound("t", 0, next_offset=4, complete=True)])[0][0] == "lost"
    assert verdicts(sent(1), [], [Bound("t", 0, compacted=True)])[0][0] == "deleted"


def test_another_timestamp_than_was_sent_is_a_corruption() -> None:
    table = leftovers_of(sent(1), [])
    table = table.assign(copies=1, sent_at=pd.Timestamp(5, unit="s"), kept_at=pd.Timestamp(6, unit="s"))
    names = ["producer", "sequence", "topic", "partition", "offset", "digest"]
    (found,) = judge(pd.DataFrame([("p", 0, "t", 0, 0, 1000)], columns=names), table, []).to_dict("records")
    assert (found["what"], found["producer"], found["sequence"]) == ("corrupted", "p", 0)
    assert "1970-01-01 00:00:06" in found["detail"]


@proves("S6")
def test_random_faults_are_all_counted(seed: int) -> None:
    """However the faults meet: missing claims, copies too many and the verdicts on them always add up."""
    chance = random.Random(seed)
    for _ in range(30):
        claims: list[Claim] = []
        ends = [0, 0]
        for sequence in range(chance.randrange(1, 12)):
            partition = chance.randrange(2)
            claims.append(("p", sequence, partition, ends[partition], chance.randrange(6)))
            ends[partition] += 1
        copies = [each for each in kept(claims) if chance.random() > 0.2]
        copies += [chance.choice(kept(claims)) for _ in range(chance.randrange(2))]
        copies += [(chance.randrange(2), chance.randrange(15), chance.randrange(8)) for _ in range(chance.randrange(3))]
        table = leftovers_of(claims, copies)
        missing = int((table["claims"] - table["copies"]).clip(lower=0).sum())
        extra = int((table["copies"] - table["claims"]).clip(lower=0).sum())
        found = Counter(what for what, *_ in verdicts(claims, copies))
        assert found["lost"] + found["out_of_order"] + found["corrupted"] == missing
        assert found["duplicated"] + found["unclaimed"] + found["out_of_order"] + found["corrupted"] == extra
        # Content that is there as often as it was claimed is never lost.
        short = Counter(digest for *_, digest in claims) - Counter(digest for *_, digest in copies)
        assert found["lost"] + found["corrupted"] == sum(short.values())
