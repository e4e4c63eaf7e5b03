"""What does not match gets a name. Pure: the leftovers of a comparison and the claims they touch in, verdicts out.

    lost             claimed, and nowhere
    duplicated       a copy too many: the same place twice, or a claimed record once more where nobody claims one
    out_of_order     claimed here, found there; or a producer's offsets fall while its sequence rises
    corrupted        something else at the place, and the record sent nowhere; or another timestamp than was sent
    deleted          below the first offset that the store keeps, or superseded in a compacted topic
    perhaps_deleted  claimed without an offset, and nowhere in a store that has deleted records of that partition
    pending          at or above the offset that the store has reached, and still to be had where it gets its records
    unclaimed        a copy of which no ledger knows: from another producer

Copies are matched by count, so a message that was sent twice on purpose may be there twice. A claim without an offset
(the broker had the record already) is satisfied by any copy of its content in its partition that nobody else claims.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pandas as pd

FAULTS: Final = ("lost", "duplicated", "out_of_order", "corrupted")
PLACE: Final = ("topic", "partition", "offset")
CONTENT: Final = ("topic", "digest")
NO_OFFSET: Final = -1

VERDICT: Final = ("what", "producer", "sequence", *PLACE, "found_partition", "found_offset", "detail")
"""Columns of a verdict. The place is the one claimed; for a copy that nobody claims it is where the copy lies."""


@dataclass(frozen=True, slots=True)
class Bound:
    """What one partition of a store can be expected to hold."""

    topic: str
    partition: int
    first_offset: int = 0
    """Below it, records were deleted by retention."""
    next_offset: int | None = None
    """From it on, records have not come yet."""
    compacted: bool = False
    """Any record may have been superseded and removed."""
    complete: bool = False
    """All has come that there was, so that not even a record without an offset is still to come."""

    def if_lost(self, has_offset: bool) -> str:
        """What to call a record that is nowhere, when its place alone does not excuse it."""
        if self.compacted:
            return "deleted"
        if has_offset:
            return "lost"
        if self.first_offset > 0:
            return "perhaps_deleted"
        return "pending" if self.next_offset is not None and not self.complete else "lost"


def judge(claims: pd.DataFrame, leftovers: pd.DataFrame, bounds: Sequence[Bound]) -> pd.DataFrame:
    """Verdicts on all claims that are missing and all copies that are too many.

    `claims`: producer, sequence, place and digest of every ledger row that shares its place with a leftover, of the
    earliest that shares its content, and of every one without an offset (NO_OFFSET). `leftovers`: place, digest,
    claims, copies, sent_at, kept_at.
    """
    missing = _missing(claims, leftovers)
    extra = _extra(leftovers)
    moved, missing, extra = _pair_by_content(missing, extra)
    corrupted, missing, extra = _pair_by_place(missing, extra)
    satisfied = _without(claims, pd.concat([moved, corrupted, missing]))
    return pd.concat(
        [
            _told(
                moved[(moved["offset"] != NO_OFFSET) | (moved["partition"] != moved["found_partition"])], "out_of_order"
            ),
            _told(corrupted, "corrupted", "another record is at its place"),
            _lost(missing, bounds),
            _retimed(claims, leftovers),
            _spare(extra, claims, satisfied),
        ],
        ignore_index=True,
    )


def _missing(claims: pd.DataFrame, leftovers: pd.DataFrame) -> pd.DataFrame:
    """Claims for which there is no copy at their place; of several for one copy, the earliest sent has it."""
    short = leftovers[leftovers["claims"] > leftovers["copies"]]
    of_short = claims.merge(short[[*PLACE, "digest", "copies"]], on=[*PLACE, "digest"])
    of_short = of_short.sort_values(["sequence", "producer"])
    nth = of_short.groupby([*PLACE, "digest"]).cumcount()
    return pd.concat(
        [of_short[nth >= of_short["copies"]].drop(columns="copies"), claims[claims["offset"] == NO_OFFSET]]
    )


def _extra(leftovers: pd.DataFrame) -> pd.DataFrame:
    """A row for each copy beyond the claims of its place."""
    spare = (leftovers["copies"] - leftovers["claims"]).clip(lower=0)
    return leftovers.loc[leftovers.index.repeat(spare), [*PLACE, "digest"]].reset_index(drop=True)


def _pair_by_content(missing: pd.DataFrame, extra: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Claims and copies of the same content, one to one: pairs, claims left over, copies left over."""
    # In one partition first, so that a claim without an offset takes the copy that is its own.
    near = _pair(missing, extra, [*CONTENT, "partition"], ["offset", "sequence"], ["offset"])
    far = _pair(near[1], near[2], [*CONTENT], ["partition", "offset", "sequence"], ["partition", "offset"])
    return pd.concat([near[0], far[0]]), far[1], far[2]


def _pair_by_place(missing: pd.DataFrame, extra: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Claims and the copies of something else at their place, one to one."""
    return _pair(missing, extra, list(PLACE), ["sequence"], ["digest"])


def _pair(
    missing: pd.DataFrame, extra: pd.DataFrame, on: list[str], missing_order: list[str], extra_order: list[str]
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    missing = missing.sort_values([*missing_order, "producer"]).reset_index(drop=True)
    extra = extra.sort_values(extra_order).reset_index(drop=True)
    left = missing.assign(nth=missing.groupby(on).cumcount(), claim=missing.index)
    right = extra.assign(nth=extra.groupby(on).cumcount(), copy=extra.index)
    right = right.assign(found_partition=right["partition"], found_offset=right["offset"])
    pairs = left.merge(right[[*on, "nth", "copy", "found_partition", "found_offset"]], on=[*on, "nth"])
    found = pairs.drop(columns=["nth", "claim", "copy"])
    return found, missing.drop(index=pairs["claim"]), extra.drop(index=pairs["copy"])


def _without(claims: pd.DataFrame, others: pd.DataFrame) -> pd.DataFrame:
    known = pd.MultiIndex.from_frame(others[["producer", "sequence"]])
    return claims[~pd.MultiIndex.from_frame(claims[["producer", "sequence"]]).isin(known)]


def _lost(missing: pd.DataFrame, bounds: Sequence[Bound]) -> pd.DataFrame:
    known = {(bound.topic, bound.partition): bound for bound in bounds}
    unbounded = Bound("", 0)
    what = [
        known.get((topic, partition), unbounded).if_lost(offset != NO_OFFSET)
        for topic, partition, offset in missing[list(PLACE)].itertuples(index=False)
    ]
    return _told(missing, what, missing["offset"].map({NO_OFFSET: "acknowledged without an offset"}))


def _retimed(claims: pd.DataFrame, leftovers: pd.DataFrame) -> pd.DataFrame:
    changed = claims.merge(leftovers[leftovers["claims"] == leftovers["copies"]], on=[*PLACE, "digest"])
    detail = "its timestamp is " + changed["kept_at"].astype(str) + ", sent was " + changed["sent_at"].astype(str)
    return _told(changed, "corrupted", detail)


def _spare(extra: pd.DataFrame, claims: pd.DataFrame, satisfied: pd.DataFrame) -> pd.DataFrame:
    """Copies that stand for no claim: a claimed record once more, a place taken twice, or simply unclaimed."""
    named = extra.assign(copy=extra.groupby(list(PLACE)).cumcount())
    named = named.merge(_first(claims, CONTENT, "twin"), on=list(CONTENT), how="left")
    named = named.merge(_first(satisfied, PLACE, "holder"), on=list(PLACE), how="left")
    is_twin, has_holder = named["twin_producer"].notna(), named["holder_producer"].notna()
    detail = np.select(
        [is_twin & has_holder, is_twin, has_holder, named["copy"] > 0],
        [
            "twice at its place",
            "once more, where nobody claims it",
            "a second record at its place",
            "a place taken twice",
        ],
        "",
    )
    named["producer"] = named["twin_producer"].where(is_twin, named["holder_producer"])
    named["sequence"] = named["twin_sequence"].where(is_twin, named["holder_sequence"])
    return _told(named, np.where(detail != "", "duplicated", "unclaimed"), detail)


def _first(claims: pd.DataFrame, on: Sequence[str], name: str) -> pd.DataFrame:
    first = claims.sort_values(["sequence", "producer"]).drop_duplicates(list(on))
    renamed = {"producer": f"{name}_producer", "sequence": f"{name}_sequence"}
    return first[[*on, *renamed]].rename(columns=renamed)


def _told(rows: pd.DataFrame, what: Any, detail: Any = None) -> pd.DataFrame:
    told = rows.assign(what=what, detail=detail)
    for column in ("found_partition", "found_offset"):
        if column not in told.columns:
            told[column] = None
    return told[list(VERDICT)].astype(
        {"sequence": "Int64", "found_partition": "Int64", "found_offset": "Int64", "what": "object", "detail": "object"}
    )
