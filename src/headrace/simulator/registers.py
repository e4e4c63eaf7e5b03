"""Values that a cluster keeps for its clients, and whether what it answers can be what it holds.

Calls overlap, so a rule speaks only of those that do not: what was acknowledged before a question was asked must be
seen by its answer. A leader that does not know yet that another has followed it answers from what it has; so a rule
compares only with what was answered in the same leader epoch or an earlier one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

NEVER: Final = 1 << 62


class Floor:
    """A value that only rises: a start or an end. What was told in an epoch holds for that and all later ones."""

    def __init__(self) -> None:
        self._told: dict[int, int] = {}

    def told(self, epoch: int, value: int) -> None:
        self._told[epoch] = max(value, self._told.get(epoch, value))

    def known(self) -> dict[int, int]:
        """As of now; to be taken when a question is asked."""
        return dict(self._told)

    @property
    def highest(self) -> int:
        return max(self._told.values(), default=0)


def floor_of(known: dict[int, int], epoch: int) -> int:
    """The least that an answer in that epoch may say."""
    return max((value for told, value in known.items() if told <= epoch), default=0)


@dataclass(slots=True)
class Write:
    value: int
    begun: int
    done: int = NEVER
    """When it is known to have been made: acknowledged, or seen."""


@dataclass(slots=True)
class Register:
    """A value that is set again and again, each time under a number of its own by which an answer can be told."""

    writes: list[Write] = field(default_factory=list)
    clock: int = 0
    """Counts what happens, so that no two things happen at once."""
    last: Write | None = None
    """The one that began last of those that are known to have been made."""
    _newest: dict[int, int] = field(default_factory=dict)
    """By epoch: when the newest began of the writes that are known in it."""

    def begin(self, value: int) -> int:
        """The number of a new write."""
        self.clock += 1
        self.writes.append(Write(value, self.clock))
        return len(self.writes) - 1

    def ask(self) -> dict[int, int]:
        """A question is asked: what its answer is to be compared with."""
        self.clock += 1
        return dict(self._newest)

    def fault(self, asked: dict[int, int], number: int | None, epoch: int) -> str:
        """What is wrong with the answer: the write of that number, None for no value at all. Empty if nothing is."""
        newest = floor_of(asked, epoch)
        if number is None:
            return "nothing, though a value was acknowledged" if newest else ""
        write = self.writes[number]
        if write.done < newest:
            return f"{write.value}, though a later value was acknowledged or seen"
        self.acknowledged(number, epoch)
        return ""

    def acknowledged(self, number: int, epoch: int) -> None:
        """The write is known to have been made: it was acknowledged, or seen."""
        self.clock += 1
        write = self.writes[number]
        write.done = min(write.done, self.clock)
        self._newest[epoch] = max(self._newest.get(epoch, 0), write.begun)
        if self.last is None or self.last.begun < write.begun:
            self.last = write
