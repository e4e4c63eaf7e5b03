"""What the end of an attempt tells of a batch: written, not written, or unknown; worth another try or not.

Only the codes in `_NOT_WRITTEN` are taken as a promise that nothing was written. A leader that steps down while a batch
waits for its followers answers NOT_LEADER_OR_FOLLOWER, and the batch may be in the next leader's log: that code, and
every other that a try may change, leaves it open.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from headrace.errors import Code, HeadraceError, Unsupported
from headrace.wire import schema

OUT_OF_ORDER: Final = 45
DUPLICATE: Final = 46
INVALID_EPOCH: Final = 47
UNKNOWN_PRODUCER: Final = 59
PRODUCER_FENCED: Final = 90
SIZES: Final = (10, 18)
"""MESSAGE_TOO_LARGE, RECORD_LIST_TOO_LARGE."""


class Outcome(Enum):
    WRITTEN = auto()
    """Acknowledged."""
    KNOWN = auto()
    """The log has had this sequence; where is not told."""
    REFUSED = auto()
    """Not written, worth another try."""
    UNSURE = auto()
    """May be written, worth another try."""
    NEVER_SENT = auto()
    """No byte of it left."""
    GAP = auto()
    """Not written in this attempt: the log has not had the sequence before it, or has forgotten this producer."""
    FENCED = auto()
    """Not written in this attempt: the log has seen a newer epoch of this producer."""
    DENIED = auto()
    """Not written, and no try will change that."""
    TOO_LARGE = auto()
    """Not written: fewer records at once may be."""
    LOST = auto()
    """May be written, and no try makes sense."""


_NOT_WRITTEN: Final = frozenset({2, Code.LEADER_NOT_AVAILABLE, Code.NOT_ENOUGH_REPLICAS, Code.UNKNOWN_TOPIC_ID})
_OF_SEQUENCES: Final = {
    DUPLICATE: Outcome.KNOWN,
    OUT_OF_ORDER: Outcome.GAP,
    UNKNOWN_PRODUCER: Outcome.GAP,
    INVALID_EPOCH: Outcome.FENCED,
    PRODUCER_FENCED: Outcome.FENCED,
}


def of_code(code: int) -> Outcome:
    """What a broker's answer for one partition says."""
    if code == Code.NONE:
        return Outcome.WRITTEN
    if code in _OF_SEQUENCES:
        return _OF_SEQUENCES[code]
    if code in _NOT_WRITTEN:
        return Outcome.REFUSED
    if code in SIZES:
        return Outcome.TOO_LARGE
    _, retriable = schema.error_codes().get(code, ("", False))
    if retriable:
        return Outcome.UNSURE
    return Outcome.DENIED if code in schema.error_codes() and code != Code.UNKNOWN else Outcome.LOST


def of_error(error: HeadraceError, sent: bool) -> Outcome:
    """What it says when no answer came; `sent` tells whether a byte of the request left."""
    if isinstance(error, Unsupported):
        return Outcome.DENIED
    return Outcome.UNSURE if sent else Outcome.NEVER_SENT
