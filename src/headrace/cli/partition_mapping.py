"""Where records go that were copied from a topic with perhaps another number of partitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

FIT: Final = "fit"
KEEP: Final = "keep"
BY_KEY: Final = "by-key"
ROUND_ROBIN: Final = "round-robin"


def partitions_option(command: F) -> F:
    """--partitions, as `partitions`."""
    return click.option(
        "--partitions",
        type=click.Choice([FIT, KEEP, BY_KEY, ROUND_ROBIN]),
        default=FIT,
        show_default=True,
        help="Where records go: fit is copies to their own partition, by key if the topic has none such; keep refuses "
        "those; by-key and round-robin are for all, whatever partition they name.",
    )(command)


class PartitionMapping:
    """Maps the partition that a record had to one of a topic with `count`."""

    def __init__(self, choice: str, topic: str, count: int) -> None:
        self.count = count
        self.choice = choice
        self.moved = 0
        """Records whose own partition the topic does not have."""
        self._topic = topic
        self._turn = 0

    def holds_for(self, is_copy: bool) -> bool:
        """Whether a record goes where `place` says: `fit` is about copies alone."""
        return is_copy or self.choice != FIT

    def keeps(self, is_copy: bool) -> bool:
        """Whether a record goes to the partition that it names, or nowhere."""
        return self.choice == KEEP or not self.holds_for(is_copy)

    def place(self, partition: int | None) -> int | None:
        """None is by key, or spread where there is no key. With `keep` it may be one that the topic does not have."""
        if self.choice == BY_KEY:
            return None
        if self.choice == ROUND_ROBIN:
            self._turn += 1
            return (self._turn - 1) % self.count
        if self.choice == FIT and partition is not None and partition >= self.count:
            self.moved += 1
            return None
        return partition

    def refusal(self, partition: int) -> str:
        """Why a record of that partition cannot be kept in it."""
        return (
            f"{self._topic} has {self.count} partitions, and none {partition}: --partitions {FIT} sends it by its key"
        )

    def tell(self) -> None:
        """Say how many did not stay in their partitions, if that was not asked for."""
        if self.moved:
            click.echo(
                f"headrace: {self.moved} records were in partitions that {self._topic} does not have, and went by "
                "their keys; --partitions says otherwise",
                err=True,
            )
