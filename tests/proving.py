"""`@proves("G8")` ties a test to rows of the inventory; docs/INVENTORY.md is generated from what passed."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T", bound=Callable[..., object])


def proves(*ids: str) -> Callable[[T], T]:
    """Mark a test function or class with the inventory ids that it proves."""

    def mark(test: T) -> T:
        proven = (*getattr(test, "proven_ids", ()), *ids)
        test.proven_ids = proven  # type: ignore[attr-defined]
        return test

    return mark
