"""Rules for the names of topics and groups. A topic's name is also the name of its folder."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from headrace.errors import InvalidTopicName

TOPIC_NAME_MAX: Final = 249
GROUP_NAME_MAX: Final = 255
OFFSETS_TOPIC: Final = "__consumer_offsets"
RESERVED_TOPICS: Final = frozenset({OFFSETS_TOPIC, "__transaction_state", "__cluster_metadata"})
RESERVED_PREFIX: Final = "__headrace"

_TOPIC_NAME: Final = re.compile(r"[a-zA-Z0-9._-]+", re.ASCII)
_TOPIC_RULE: Final = f"1 to {TOPIC_NAME_MAX} of a-z A-Z 0-9 . _ - and not '.' or '..'"


def check_topic_name(name: str) -> None:
    """InvalidTopicName, with the rule, unless the name could be a topic's."""
    if not name:
        raise InvalidTopicName(f"the topic name is empty; a topic name is {_TOPIC_RULE}")
    if name in (".", ".."):
        raise InvalidTopicName(f"topic name {name!r} is a folder's; a topic name is {_TOPIC_RULE}")
    if len(name) > TOPIC_NAME_MAX:
        raise InvalidTopicName(f"topic name of {len(name)} characters is too long; a topic name is {_TOPIC_RULE}")
    if not _TOPIC_NAME.fullmatch(name):
        raise InvalidTopicName(
            f"topic name {name!r} has characters that are not allowed; a topic name is {_TOPIC_RULE}"
        )


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
