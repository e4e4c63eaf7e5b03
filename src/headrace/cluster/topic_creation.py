"""Creation of topics that somebody named and that are not there: one task per name, however many ask."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.cluster.image import Topic
from headrace.cluster.names import OFFSETS_TOPIC
from headrace.cluster.topics import CreateTopic, Topics
from headrace.cluster.view import ClusterView
from headrace.errors import TopicExists, UnknownPartition
from headrace.placement.internal_topics import INTERNAL_REPLICAS
from headrace.placement.spread import open_sites
from headrace.settings.values import BrokerSettings

OFFSETS_OVERRIDES = {"cleanup.policy": "compact", "segment.bytes": str(100 << 20), "max.message.bytes": str(32 << 20)}


class TopicCreation:
    def __init__(self, view: ClusterView, topics: Topics, settings: Callable[[], BrokerSettings]) -> None:
        self._view = view
        self._topics = topics
        self._settings = settings
        self._under_way: dict[str, asyncio.Task[None]] = {}

    async def ensure(self, name: str) -> Topic:
        """The topic of that name; created with the defaults if it may be."""
        found = self._view.image.topics.get(name)
        if found is not None:
            return found
        if name == OFFSETS_TOPIC:
            settings = self._settings()
            # Where nobody says how many, it begins with the brokers there are and grows (placement.internal_topics).
            replicas = settings["offsets.topic.replication.factor"]
            there = max(1, len(open_sites(self._view.image)))
            request = CreateTopic(
                name,
                settings["offsets.topic.partitions"],
                replicas or min(INTERNAL_REPLICAS, there),
                OFFSETS_OVERRIDES,
                internal=True,
            )
        elif not self._settings()["auto.create.topics.enable"]:
            raise UnknownPartition(f"there is no topic {name!r}, and auto.create.topics.enable is off")
        else:
            request = CreateTopic(name)
        task = self._under_way.get(name)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._create_once(request))
            self._under_way[name] = task
            task.add_done_callback(lambda _: self._under_way.pop(name, None))
        await asyncio.shield(task)
        found = self._view.image.topics.get(name)
        if found is None:
            raise UnknownPartition(f"there is no topic {name!r}")
        return found

    async def _create_once(self, request: CreateTopic) -> None:
        try:
            await self._topics.create(request)
        except TopicExists:
            await self._view.wait_for(lambda image: request.name in image.topics, 5.0)
