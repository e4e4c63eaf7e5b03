"""How the admin client for asyncio runs its calls: the name of `headrace.client.admin.calls`, with coroutines where
that blocks.

An operation of `headrace.client.admin` needs many answers in turn. It is written once, as code that waits for each, and
the command line and Spark use it as it is. Operations are rare, so here they run in a thread, of which each client has
one, and the loop is never held up; a second text of them for asyncio would save a thread and nothing else. One call
runs at a time, the others wait as tasks. A call that is cancelled has its connections closed: the thread is free as
soon as it notices, after the pause of a retry (1 s) at most, and the next call opens new ones. Whether the broker has
done what was sent before, nobody knows then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Concatenate, ParamSpec, TypeVar

from headrace.client.admin.calls import closed, fresh
from headrace.client.admin.cluster import Cluster

P = ParamSpec("P")
Result = TypeVar("Result")


class Calls:
    """Operations on one cluster, one after another, in a thread of their own."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._spent = False
        """Whether a call on the cluster was cancelled."""
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="headrace-admin")
        self._closed = False

    async def call(
        self, operation: Callable[Concatenate[Cluster, P], Result], *args: P.args, **options: P.kwargs
    ) -> Result:
        async with self._turn:
            if self._closed:
                raise closed()
            if self._spent:
                self._cluster, self._spent = self._cluster.again(), False
            cluster = self._cluster
            running = self._run(partial(fresh, cluster, operation, *args, **options))
            try:
                return await running
            except asyncio.CancelledError:
                self._spent = True
                cluster.interrupt()
                self._thread.submit(cluster.close)
                raise

    async def close(self) -> None:
        """What is under way raises EngineClosed where it is awaited."""
        if self._closed:
            return
        self._closed = True
        self._cluster.interrupt()
        try:
            await self._run(self._cluster.close)
        finally:
            self._thread.shutdown(wait=False)

    def _run(self, fn: Callable[[], Result]) -> asyncio.Future[Result]:
        return asyncio.get_running_loop().run_in_executor(self._thread, fn)
