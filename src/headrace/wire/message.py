"""A message of the Kafka protocol: plain attributes, made by keyword, the same for every version.

Field names are those of `wire.schema`. A decoded message is an instance of a class made for its struct, which
also answers for the fields that its version does not carry: with their default, or with None or [] where the
schema declares none. Those answers are not part of the message: `repr` and the encoder do not see them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from headrace.wire.schema import ZERO_UUID

__all__ = ["ZERO_UUID", "FreshDefault", "Message"]

_ABSENT: Final = object()


class Message:
    """`Message(name="t", partitions=[...])`: any fields; the encoder takes those that its version has."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__ = fields

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    def __eq__(self, other: object) -> bool:
        """Equal when every field that either of them carries has the same value in both."""
        if not isinstance(other, Message):
            return NotImplemented
        names = self.__dict__.keys() | other.__dict__.keys()
        return all(getattr(self, name, _ABSENT) == getattr(other, name, _ABSENT) for name in names)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items())
        return f"{type(self).__name__}({fields})"


class FreshDefault:
    """A class attribute that answers a new list, or a new message, each time, so that no two messages share it."""

    __slots__ = ("_make",)

    def __init__(self, make: type[list[Any]] | type[Message]) -> None:
        self._make = make

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self._make()
