"""Cluster-wide settings that users keep beside the cluster's metadata: names and texts, below the key `values/`.

Brokers carry them in their image and do not heed them. A change can name the revision that it was made for (0 for a
name that is not there); when the name has another one by then, nothing is changed and the error names it. A change that
was answered is in this node's image.
"""

from __future__ import annotations

import re
from typing import Final

from headrace.cluster import keys
from headrace.cluster.changes import Changes, Plan, Step, unchanged
from headrace.cluster.image import Image, StoredValue
from headrace.errors import ChangedMeanwhile, InvalidRequest, PolicyViolation, RequestTimedOut, UnknownValue
from headrace.ports.coordination import Delete, Put

NAME_MAX: Final = 200
VALUE_MAX_BYTES: Final = 64 << 10
VALUES_MAX: Final = 1000
CATCH_UP_SECONDS: Final = 2.0
"""How long a change waits for this node to see the revision that it names: it may have been read elsewhere."""
_NAME: Final = re.compile(rf"[a-zA-Z0-9._-]{{1,{NAME_MAX}}}", re.ASCII)


def check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidRequest(f"{name[:40]!r} is no name of a setting: that is 1 to {NAME_MAX} of a-z A-Z 0-9 . _ -")


def find(image: Image, name: str) -> StoredValue:
    found = image.values.get(name)
    if found is None:
        check_name(name)
        raise UnknownValue(f"there is no setting {name!r}")
    return found


def plan_put(image: Image, name: str, text: str, expected: int | None = None) -> Plan:
    revision = _expected(image, name, expected)
    if not revision and len(image.values) >= VALUES_MAX:
        raise PolicyViolation(f"there are {len(image.values)} settings, and {VALUES_MAX} is the most: delete some")
    key = keys.value_key(image.prefix, name)
    return Plan((Step((unchanged(key, revision),), (Put(key, keys.encode({"value": text})),)),))


def plan_delete(image: Image, name: str, expected: int | None = None) -> Plan:
    revision = _expected(image, name, expected)
    find(image, name)
    key = keys.value_key(image.prefix, name)
    return Plan((Step((unchanged(key, revision),), (Delete(key),)),))


def _expected(image: Image, name: str, expected: int | None) -> int:
    """The revision that the name has now; an error if another one was expected."""
    found = image.values.get(name)
    revision = 0 if found is None else found.revision
    if expected is not None and expected != revision:
        now = f"has revision {revision}" if revision else "is not there"
        raise ChangedMeanwhile(
            f"setting {name!r} {now}, and the change was made for revision {expected}: read it, and decide again"
        )
    return revision


class UserValues:
    """Carries changes out."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes

    async def put(self, name: str, text: str, expected: int | None = None) -> StoredValue:
        """The value as it stands in the image after this change; somebody may have changed it again."""
        check_name(name)
        size_bytes = len(text.encode())
        if size_bytes > VALUE_MAX_BYTES:
            raise InvalidRequest(f"setting {name!r} has {size_bytes} bytes; {VALUE_MAX_BYTES} is the most")
        await self._catch_up(expected)
        return find(await self._changes.run(lambda image: plan_put(image, name, text, expected)), name)

    async def delete(self, name: str, expected: int | None = None) -> None:
        check_name(name)
        await self._catch_up(expected)
        await self._changes.run(lambda image: plan_delete(image, name, expected))

    async def _catch_up(self, revision: int | None) -> None:
        if revision is not None:
            try:
                await self._changes.view.wait_for(lambda image: image.revision >= revision, CATCH_UP_SECONDS)
            except RequestTimedOut:
                return  # a revision that never was: the plan says so
