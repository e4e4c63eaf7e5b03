"""The cluster as a registry's clients are told of it.

A broker is dropped with its lease. With `registry.drop.after.ms` it stays named for so long after that, so that one
that comes back in time never went away for clients; one that said that it leaves is dropped at once. Nothing is planned
on this image: new replicas go to brokers that are there.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.cluster.image import LIVE, Broker, Image
from headrace.cluster.view import ClusterView, Predicate
from headrace.ports.clock import Clock, Timer


class AdvertisedView:
    """`image` is replaced whole, never edited: who reads it takes no lock."""

    def __init__(self, view: ClusterView, clock: Clock, drop_after_seconds: float = 0.0) -> None:
        self.image = view.image
        self._view = view
        self._clock = clock
        self._drop_after_seconds = drop_after_seconds
        self._gone: dict[int, tuple[float, Broker]] = {}
        """Brokers without a lease that are still named, and until when."""
        self._timer: Timer | None = None
        view.listen(self._follow)

    async def wait_for(self, predicate: Predicate, timeout_seconds: float) -> Image:
        return await self._view.wait_for(predicate, timeout_seconds)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _follow(self, old: Image, new: Image) -> None:
        if self._drop_after_seconds and old.brokers is not new.brokers:
            until = self._clock.now() + self._drop_after_seconds
            for broker in old.brokers.values():
                if broker.id not in new.brokers and broker.state == LIVE:
                    self._gone[broker.id] = until, broker
            for number in new.brokers:
                self._gone.pop(number, None)
        self._tell()

    def _tell(self) -> None:
        self.close()
        now, image = self._clock.now(), self._view.image
        self._gone = {number: kept for number, kept in self._gone.items() if kept[0] > now}
        if self._gone:
            image = replace(image, brokers={**image.brokers, **{n: broker for n, (_, broker) in self._gone.items()}})
            first = min(until for until, _ in self._gone.values())
            self._timer = self._clock.call_later(first - now, self._tell)
        self.image = image
