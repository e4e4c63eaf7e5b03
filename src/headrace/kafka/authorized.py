"""What a client may do (KIP-430): everything that a resource knows, as a Kafka broker without an authorizer answers.

A set of operations is an int32 with the bit of each operation's number; what was not asked for is the least int32.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

NOT_ASKED: Final = -(2**31)


class AclOperation(IntEnum):
    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12


def _bits(*operations: AclOperation) -> int:
    return sum(1 << operation for operation in operations)


_SETTINGS: Final = _bits(AclOperation.DESCRIBE_CONFIGS, AclOperation.ALTER_CONFIGS)
ON_GROUP: Final = _SETTINGS | _bits(AclOperation.READ, AclOperation.DESCRIBE, AclOperation.DELETE)
ON_TOPIC: Final = ON_GROUP | _bits(AclOperation.WRITE, AclOperation.CREATE, AclOperation.ALTER)
ON_CLUSTER: Final = _SETTINGS | _bits(
    AclOperation.CREATE,
    AclOperation.ALTER,
    AclOperation.DESCRIBE,
    AclOperation.CLUSTER_ACTION,
    AclOperation.IDEMPOTENT_WRITE,
)


def operations(known: int, asked: bool) -> int:
    return known if asked else NOT_ASKED
