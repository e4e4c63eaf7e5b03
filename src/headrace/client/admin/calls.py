"""How the admin client for threads runs its calls. `headrace.aio.calls` has the same name for asyncio:
`tools/unasync.py` makes the asynchronous admin client of the one that uses this module.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from headrace.client.admin.cluster import Cluster
from headrace.client.errors import EngineClosed

P = ParamSpec("P")
Result = TypeVar("Result")


class Calls:
    """Operations on one cluster, one after another, in the thread that asks for them."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._turn = threading.Lock()
        self._closed = False

    def call(self, operation: Callable[Concatenate[Cluster, P], Result], *args: P.args, **options: P.kwargs) -> Result:
        with self._turn:
            if self._closed:
                raise closed()
            return fresh(self._cluster, operation, *args, **options)

    def close(self) -> None:
        """From any thread; what is under way in another one raises EngineClosed there."""
        self._closed = True
        self._cluster.interrupt()
        with self._turn:
            self._cluster.close()


def fresh(
    cluster: Cluster, operation: Callable[Concatenate[Cluster, P], Result], *args: P.args, **options: P.kwargs
) -> Result:
    """The operation on what the brokers say now, not on what they said at an earlier call."""
    cluster.forget()
    return operation(cluster, *args, **options)


def closed() -> EngineClosed:
    return EngineClosed("this admin client is closed; make a new one")
