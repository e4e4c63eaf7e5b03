"""Who is controller: the candidate whose key under `election/` was created first, and is still there.

Each candidate waits for the deletion of the key just before its own, as its own view shows it; so a death wakes one
successor. Keys of a lease never come back, and a view that shows our own key shows every older one that is left: a
view that lags can make us wait, not elect two.

Winning raises the epoch in the key `controller` in one transaction that also finds our candidacy still there. Its
revision fences every later write: once somebody else has won, none of ours is taken. A controller that was paused does
not even try, by the local deadline of its lease. A view that has come to the revision of our win and shows another
`controller` ends the term, even of a lower epoch: coordination may have been put back to a copy from before it.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.cluster import keys
from headrace.cluster.changes import unchanged
from headrace.cluster.controller_state import ElectedController
from headrace.cluster.image import Image
from headrace.cluster.membership import Membership
from headrace.cluster.view import ClusterView
from headrace.ports.coordination import Compare, Coordination, Put


def predecessor(image: Image, lease: int) -> int | None:
    """Lease of the candidate just before this one; None when it is the first."""
    candidates = image.controls.candidates
    own = candidates[lease]
    earlier = [(revision, other) for other, revision in candidates.items() if revision < own]
    return max(earlier)[1] if earlier else None


def may_claim(image: Image, lease: int) -> bool:
    return lease in image.controls.candidates and predecessor(image, lease) is None


@dataclass(frozen=True, slots=True)
class Term:
    """One election that was won. `fence` has to hold for every write under it."""

    lease: int
    epoch: int
    revision: int
    fence: tuple[Compare, ...]


class Election:
    """This broker's candidacy. Without I/O but for `claim`, which its driver calls when the image has changed."""

    def __init__(self, coordination: Coordination, view: ClusterView, membership: Membership) -> None:
        self._coordination = coordination
        self._view = view
        self._membership = membership
        self._term: Term | None = None

    @property
    def term(self) -> Term | None:
        """The term, while we are controller for certain."""
        term = self._term
        if term is None or term.lease != self._membership.lease or not self._membership.standing:
            return None
        image = self._view.image
        if image.revision < term.revision:
            return term  # the view lags
        won = ElectedController(self._membership.broker.id, term.epoch, term.revision)
        return term if image.controls.controller == won else None

    def forget(self) -> None:
        """The store that the term was won in was put back to a time before it."""
        self._term = None

    @property
    def is_due(self) -> bool:
        """Whether it is our turn and `claim` has not been through. A lease that lapsed and stands again changes no
        image, so this has to be looked at from time to time."""
        return self.term is None and self.is_open

    @property
    def is_open(self) -> bool:
        """Whether it is our turn, and we stand."""
        return self._membership.standing and may_claim(self._view.image, self._membership.lease)

    async def claim(self) -> Term | None:
        """Become controller if it is our turn. Raises CoordinationError when the outcome is not known: ask again."""
        image, lease = self._view.image, self._membership.lease
        if not self.is_open:
            return None
        last = image.controls.controller
        epoch = 1 if last is None else last.epoch + 1
        key = keys.controller_key(image.prefix)
        candidacy = unchanged(keys.election_key(image.prefix, lease), image.controls.candidates[lease])
        value = keys.encode({"broker": self._membership.broker.id, "epoch": epoch})
        before = unchanged(key, 0 if last is None else last.revision)
        result = await self._coordination.transact([before, candidacy], [Put(key, value)])
        if result.succeeded:
            self._term = Term(lease, epoch, result.revision, (unchanged(key, result.revision), candidacy))
        return self.term
