"""Watches of etcd that outlive its nodes.

A watch is one stream to one node. When it breaks, or calls turn away from that node, it is opened again at the next
one, after the last revision that was delivered. etcd is asked for the revision before that as well, and what was
delivered is passed over: a watch that begins exactly at the compacted revision may miss a deletion there, one that
begins before it is told. Large answers come in fragments, which may end within a revision: they are put together
before anything is delivered. An answer without events says how far the watch has seen, so that a quiet one does not
fall behind compaction. A node that does not know the revision before the one asked for is either late, or was restored
from a copy: who watches has to look. It has to as well where the last value that the watch has seen is not there at its
revision, to which a restored etcd may have come by other changes. A value whose revision is compacted tells nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable
from typing import Any, Final

import grpc
from aetcd import rpc

from headrace.coordination.etcd_connection import EtcdLink, Metadata, NoAnswer, Node
from headrace.coordination.etcd_messages import event_of, prefix_end
from headrace.coordination.waits import pause
from headrace.errors import CoordinationError
from headrace.ports.coordination import Behind, Compacted, Event, WatchResponse

log = logging.getLogger(__name__)

PAUSE_SECONDS_FIRST: Final = 0.02
PAUSE_SECONDS_MAX: Final = 0.5


class _Denied(Exception):
    """etcd does not let us watch these keys, or has forgotten our token: it says the same of both."""


async def watch(link: EtcdLink, prefix: str, from_revision: int) -> AsyncIterator[WatchResponse]:
    following, pause_seconds, broken, denied = from_revision, PAUSE_SECONDS_FIRST, False, False
    last_put: Event | None = None
    while not link.closed:
        node = link.node()
        stream = _Stream(link, node, prefix, following)
        try:
            await stream.open()
            if last_put is not None:
                await stream.look_for(last_put)
            if broken:
                log.info("watch of %s goes on at etcd %s from revision %d", prefix, node.address, following)
            broken = denied = False
            while True:
                revision, events = await stream.read()
                pause_seconds = PAUSE_SECONDS_FIRST
                following, last_put = max(following, revision + 1), stream.last_put or last_put
                if events:
                    yield WatchResponse(revision, events)
        except _Denied as error:
            if denied or not link.forget_token(stream.metadata):
                raise CoordinationError(
                    f"etcd at {node.address} does not let us watch {prefix}: {error}. "
                    "Give the user in etcd.user a role with read on these keys"
                ) from None
            denied = True
        except (grpc.aio.AioRpcError, NoAnswer, TimeoutError) as error:
            if link.closed:
                return
            if not broken:
                log.warning("watch of %s at etcd %s broke: %s", prefix, node.address, _reason(error))
            broken = True
            link.leave(node)
            await pause(link.clock, pause_seconds)
            pause_seconds = min(2 * pause_seconds, PAUSE_SECONDS_MAX)
        finally:
            stream.close()


class _Stream:
    """One watch on one stream to one node."""

    def __init__(self, link: EtcdLink, node: Node, prefix: str, following: int) -> None:
        self._link = link
        self._node = node
        self._prefix = prefix
        self._following = following
        self.last_put: Event | None = None
        """The last one that came, also if it was passed over."""
        self._call: Any = None
        self.metadata: Metadata = ()
        self._left: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def open(self) -> None:
        """Returns when the node has taken the watch."""
        self._link.on_leave.add(self._leave)
        seconds = self._link.attempt_seconds
        async with asyncio.timeout(seconds):
            self.metadata = await self._link.metadata(self._node, seconds)
            self._call = self._node.watch.Watch(metadata=self.metadata)
            key, end = self._prefix.encode() or b"\0", prefix_end(self._prefix)
            request = rpc.WatchCreateRequest(
                key=key,
                range_end=end,
                start_revision=max(1, self._following - 1),
                progress_notify=True,
                fragment=True,
            )
            await self._own(self._call.write(rpc.WatchRequest(create_request=request)))
            newest = (await self._receive()).header.revision
        if newest < self._following - 1:
            raise Behind(f"revision {self._following} is asked for, and etcd {self._node.address} knows {newest}")

    async def look_for(self, put: Event) -> None:
        """Raises Behind if the node does not have it at its revision: another history has come as far."""
        seconds, at = self._link.attempt_seconds, put.mod_revision
        request = rpc.RangeRequest(key=put.key.encode(), revision=at, serializable=True)
        try:
            answer = await self._own(self._node.kv.Range(request, timeout=seconds, metadata=self.metadata))
        except grpc.aio.AioRpcError as error:
            if "has been compacted" not in str(error.details()):
                raise
            return
        if [(found.mod_revision, found.value) for found in answer.kvs] != [(at, put.value)]:
            raise Behind(f"etcd {self._node.address} does not have {put.key} as it was seen at revision {at}")

    async def read(self) -> tuple[int, tuple[Event, ...]]:
        """The next whole answer: the revision up to which everything has now been seen, and what is new."""
        response = await self._receive()
        parts = list(response.events)
        while response.fragment:
            response = await self._receive()
            parts.extend(response.events)
        if not parts:
            return response.header.revision, ()
        came = [event_of(part) for part in parts]
        self.last_put = next((event for event in reversed(came) if event.kind == "put"), self.last_put)
        events = tuple(event for event in came if event.mod_revision >= self._following)
        # The header may name a newer revision, of which the events are still to come.
        return parts[-1].kv.mod_revision, events

    def close(self) -> None:
        self._link.on_leave.discard(self._leave)
        if self._call is not None:
            self._call.cancel()

    async def _receive(self) -> Any:
        response = await self._own(self._call.read())
        if response is grpc.aio.EOF:
            raise NoAnswer("the stream ended")
        if response.compact_revision:
            raise Compacted(f"revision {self._following} is gone; {response.compact_revision} is the oldest kept")
        if response.canceled:
            if "permission denied" in response.cancel_reason or "PermissionDenied" in response.cancel_reason:
                raise _Denied(response.cancel_reason)
            raise NoAnswer(response.cancel_reason or "the watch was called off by etcd")
        return response

    async def _own(self, awaited: Awaitable[Any]) -> Any:
        """Await it until we leave. gRPC raises CancelledError for a stream that was called off, which only a cancelled
        task may see.
        """
        task = asyncio.ensure_future(awaited)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may ask for it any more
        try:
            await asyncio.wait((task, self._left), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
        if self._left.done():
            raise NoAnswer("calls turned away from this node")
        if task.cancelled():
            raise NoAnswer("the stream was called off")
        try:
            return task.result()
        except asyncio.InvalidStateError:
            raise NoAnswer("the stream ended before it was used") from None

    def _leave(self, node: Node | None) -> None:
        if (node is None or node is self._node) and not self._left.done():
            self._left.set_result(None)


def _reason(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return str(error.details())
    return str(error) or "no answer in time"
