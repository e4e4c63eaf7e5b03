"""Which names of topics are reserved or too much alike, and the rule for the names of groups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from headrace.errors import InvalidTopicName

GROUP_NAME_MAX: Final = 255
OFFSETS_TOPIC: Final = "__consumer_offsets"
TRANSACTIONS_TOPIC: Final = "__transaction_state"
SHARE_STATE_TOPIC: Final = "__share_group_state"
COORDINATORS_TOPICS: Final = frozenset({OFFSETS_TOPIC, TRANSACTIONS_TOPIC, SHARE_STATE_TOPIC})
"""Created when they are first needed."""
RESERVED_TOPICS: Final = COORDINATORS_TOPICS | {"__cluster_metadata"}
RESERVED_PREFIX: Final = "__headrace"


def is_reserved(name: str) -> bool:
    """Whether only the broker itself creates, alters and deletes this topic."""
    return name in RESERVED_TOPICS or name.startswith(RESERVED_PREFIX)


def check_not_reserved(name: str) -> None:
    if is_reserved(name):
        raise InvalidTopicName(
            f"topic {name!r} is the broker's own: "
            f"{', '.join(sorted(RESERVED_TOPICS))} and names that begin with {RESERVED_PREFIX} are reserved"
        )


def check_no_collision(name: str, existing: Iterable[str]) -> None:
    """Refuse a name that differs from another only in '.' and '_': metric names treat the two alike."""
    folded = name.replace(".", "_")
    for other in existing:
        if other != name and other.replace(".", "_") == folded:
            raise InvalidTopicName(
                f"topic name {name!r} differs from topic {other!r} only in '.' and '_': choose another"
            )


def group_name_fault(name: str) -> str | None:
    """What is wrong with a group's name, with the rule; None if nothing is."""
    rule = f"a group name is 1 to {GROUP_NAME_MAX} printable characters and does not begin with {RESERVED_PREFIX}"
    if not name:
        return f"the group name is empty; {rule}"
    if len(name) > GROUP_NAME_MAX:
        return f"group name of {len(name)} characters is too long; {rule}"
    if not name.isprintable():
        return f"group name {name!r} has characters that cannot be printed; {rule}"
    if name.startswith(RESERVED_PREFIX):
        return f"group name {name!r} is reserved for the broker; {rule}"
    return None
