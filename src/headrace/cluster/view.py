"""The live view of the cluster that a node holds: lists the keys, then follows the watch in one task of its own.

A listing that is older than the image tells that coordination was restored from a copy: `on_restored` hears of it
before the image is replaced by it. Since a restore may have been followed by as many changes as it took away, the keys
are listed each time that a watch has broken, and topics and partitions tell by revisions of their own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Protocol

from headrace.cluster.image import Image, apply, from_listing
from headrace.coordination.waits import OwnedTask, pause
from headrace.errors import CoordinationError, RequestTimedOut
from headrace.ports.clock import Clock
from headrace.ports.coordination import Behind, Compacted, Coordination

log = logging.getLogger(__name__)

ImageListener = Callable[[Image, Image], None]
Predicate = Callable[[Image], bool]

RETRY_SECONDS_MAX: Final = 1.0
"""Longest pause before coordination is asked again after a failure."""
RETRY_SECONDS_FIRST: Final = 0.05
BEHIND_SECONDS: Final = 0.2
"""Pause before the keys are listed because a node of coordination knows less than this one has seen."""
SEEN_TIMEOUT_SECONDS: Final = 10.0
"""How long a change that was made may take to arrive in this node's own view."""


class View(Protocol):
    """What a front end sees of the cluster."""

    @property
    def image(self) -> Image: ...

    async def wait_for(self, predicate: Predicate, timeout_seconds: float) -> Image: ...


class ClusterView:
    """Holds `image`; calls listeners with (old, new), on the loop, after each change.

    `failed` runs when the following task dies of something that it cannot mend; the node then has to stop.
    """

    def __init__(
        self, coordination: Coordination, prefix: str, clock: Clock, failed: Callable[[BaseException], None]
    ) -> None:
        self.image = Image(prefix)
        self._coordination = coordination
        self._clock = clock
        self.on_restored: ImageListener = lambda _old, _new: None
        self._listeners: list[ImageListener] = []
        self._waiting: dict[asyncio.Future[Image], Predicate] = {}
        self._task = OwnedTask(failed)

    async def start(self) -> None:
        """The first image is there when this returns; raises CoordinationError if it cannot be had."""
        await self._list()
        self._task.start(self._follow())

    def listen(self, listener: ImageListener) -> None:
        self._listeners.append(listener)

    async def wait_for(self, predicate: Predicate, timeout_seconds: float) -> Image:
        """The first image for which the predicate holds, or RequestTimedOut."""
        if predicate(self.image):
            return self.image
        waiter: asyncio.Future[Image] = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = predicate
        timer = self._clock.call_later(timeout_seconds, lambda: _give_up(waiter, timeout_seconds))
        try:
            return await waiter
        finally:
            timer.cancel()
            del self._waiting[waiter]

    async def wait_for_revision(self, revision: int) -> Image:
        """The first image that has what was changed at this revision, or RequestTimedOut."""
        return await self.wait_for(lambda image: image.revision >= revision, SEEN_TIMEOUT_SECONDS)

    async def close(self) -> None:
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(CoordinationError("the broker is stopping"))
        await self._task.close()

    async def _list(self) -> None:
        listing = await self._coordination.list(self.image.prefix)
        image = from_listing(self.image.prefix, listing, self.image)
        if is_put_back(self.image, image):
            self.on_restored(self.image, image)
        self._replace(image)

    async def _follow(self) -> None:
        pause_seconds = RETRY_SECONDS_FIRST
        is_behind, told = False, ""
        while True:
            try:
                if is_behind:
                    await self._list()
                    is_behind = False
                async for response in self._coordination.watch(self.image.prefix, self.image.revision + 1):
                    is_behind = True  # whatever cannot be applied: a listing has the keys as they are by then
                    self._replace(apply(self.image, response))
                    is_behind = False
                    pause_seconds, told = RETRY_SECONDS_FIRST, ""
                return
            except Compacted:
                is_behind = True
            except Behind:
                is_behind = True
                await pause(self._clock, BEHIND_SECONDS)
            except CoordinationError as error:
                is_behind = True
                if str(error) != told:
                    told = str(error)
                    log.warning("the cluster's metadata cannot be followed; tried again until it can: %s", error)
                await pause(self._clock, pause_seconds)
                pause_seconds = min(2 * pause_seconds, RETRY_SECONDS_MAX)

    def _replace(self, image: Image) -> None:
        old, self.image = self.image, image
        for listener in self._listeners:
            listener(old, image)
        for waiter, predicate in self._waiting.items():
            if not waiter.done() and predicate(image):
                waiter.set_result(image)


def is_put_back(old: Image, new: Image) -> bool:
    """Whether the new one is of a history that had gone further when the old one was seen: revisions of the store, and
    of a key, only rise."""
    if new.revision < old.revision:
        return True
    for name, topic in old.topics.items():
        found = new.topics.get(name)
        if found is None or found.id != topic.id:
            continue
        if 0 < found.revision < topic.revision:
            return True
        for before, after in zip(topic.partitions, found.partitions, strict=False):
            if not after.is_missing and after.revision < before.revision:
                return True
    return False


def _give_up(waiter: asyncio.Future[Image], timeout_seconds: float) -> None:
    if not waiter.done():
        waiter.set_exception(
            RequestTimedOut(f"the cluster's metadata did not change as awaited in {timeout_seconds:g} s")
        )
