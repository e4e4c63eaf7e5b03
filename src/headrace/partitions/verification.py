"""First writes of transactions that are being verified with their coordinators.

A batch that would open a transaction in a partition is taken only when the transaction's coordinator has said that it
is going on there. That takes a while, and meanwhile the transaction may end: its marker must not be followed by a batch
that opens it again, because nothing would end it then. So whoever begins to verify is given a `Verification`, which the
transaction's marker, a newer epoch of the producer and the end of the partition's role make void. Of one that is void
nothing can come. Nothing here survives a crash: a new role verifies anew.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

VERIFICATIONS_MAX: Final = 10_000
"""In a partition; beyond these the oldest are void, and their producers have to be verified again."""


class Verification:
    """Of one producer's epoch in one partition."""

    __slots__ = ("is_void", "producer_epoch", "producer_id", "verified")

    def __init__(self, producer_id: int, producer_epoch: int) -> None:
        self.producer_id = producer_id
        self.producer_epoch = producer_epoch
        self.verified = False
        self.is_void = False


class Verifications:
    """Those of one partition in one role."""

    __slots__ = ("_by_producer",)

    def __init__(self) -> None:
        self._by_producer: OrderedDict[int, Verification] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_producer)

    def begin(self, producer_id: int, producer_epoch: int) -> Verification:
        """The one that is under way for this epoch, or a new one; it is void at once if a newer epoch has one."""
        known = self._by_producer.get(producer_id)
        if known is not None and known.producer_epoch == producer_epoch:
            return known
        verification = Verification(producer_id, producer_epoch)
        if known is not None and known.producer_epoch > producer_epoch:
            verification.is_void = True
            return verification
        self.void(producer_id, producer_epoch)
        self._by_producer[producer_id] = verification
        if len(self._by_producer) > VERIFICATIONS_MAX:
            self._by_producer.popitem(last=False)[1].is_void = True
        return verification

    def is_verified(self, producer_id: int, producer_epoch: int) -> bool:
        known = self._by_producer.get(producer_id)
        return known is not None and known.verified and known.producer_epoch == producer_epoch

    def used(self, producer_id: int) -> None:
        """The batch was appended: the transaction is open."""
        self._by_producer.pop(producer_id, None)

    def void(self, producer_id: int, last_epoch: int) -> None:
        """Nothing more comes from this epoch of the producer, and from those before."""
        known = self._by_producer.get(producer_id)
        if known is not None and known.producer_epoch <= last_epoch:
            del self._by_producer[producer_id]
            known.is_void = True

    def void_all(self) -> None:
        for verification in self._by_producer.values():
            verification.is_void = True
        self._by_producer.clear()
