"""The rule for the name of a topic, for brokers and clients alike. It is also the name of the topic's folder."""

from __future__ import annotations

import re
from typing import Final

from headrace.errors import InvalidTopicName

TOPIC_NAME_MAX: Final = 249

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
