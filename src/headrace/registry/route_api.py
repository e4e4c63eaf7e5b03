"""The HTTP port of a registry: routes, placement and cluster-wide settings as JSON.

    GET  /brokers                  who is there, and at which addresses
    GET  /topics, /topics/{topic}  as at a broker, without what only a replica knows; POST, PATCH and DELETE as there
    GET  /ring                     the hash ring; with ?topic=T&partition=N&replicas=R where a partition falls on it
    GET  /placement/topics         every partition and its replicas
    GET  /placement/brokers        every broker and what it leads and follows
    GET  /settings, /settings/{name}
    PUT  /settings/{name}          the body is the value; ?revision=N only if that is its revision, 0 if it is new
    DEL  /settings/{name}          ?revision=N as above
    GET  /health, /ready, /metrics, /openapi.json

Everything that is read comes from the image in memory, and is encoded once for each image. /health says how long etcd
has been silent; /ready does not turn on that: routes are wanted most when etcd is away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

from headrace.cluster import user_values
from headrace.cluster.image import Broker, Endpoint, Image, StoredValue
from headrace.cluster.user_values import UserValues
from headrace.errors import InvalidRequest
from headrace.http import health, metrics, topic_changes, topics
from headrace.http.exchange import Exchange, Handler
from headrace.http.message import PARTITION_MAX, Request, Response, json_response
from headrace.http.openapi import with_document
from headrace.http.routes import Route
from headrace.metrics import BROKERS, ETCD_SILENT_SECONDS, IMAGE_REVISION, Sample
from headrace.placement import listing, ring
from headrace.placement.spread import open_sites
from headrace.registry import operations
from headrace.registry.pulse import Pulse

Describe = Callable[[Image], dict[str, Any]]


class RouteApi:
    """`image` is what clients are told, `values` carries changes of settings out."""

    def __init__(self, cluster_id: str, image: Callable[[], Image], values: UserValues, pulse: Pulse) -> None:
        self._cluster_id = cluster_id
        self._image = image
        self._values = values
        self._pulse = pulse
        self._kept: dict[str, asyncio.Task[Response]] = {}
        self._kept_of: Image | None = None

    @cached_property
    def routes(self) -> tuple[Route, ...]:
        return with_document(
            "Headrace registry",
            (
                Route("GET", "/", "http.index", self._index, operations.INDEX),
                Route("GET", "/health", "http.health", self._health, operations.HEALTH),
                Route("GET", "/ready", "http.ready", health.ready, health.READY),
                Route("GET", "/metrics", "http.metrics", metrics.exposition, metrics.EXPOSITION),
                Route("GET", "/brokers", "http.brokers", self._once_an_image(_brokers), operations.BROKERS),
                Route("GET", "/topics", "http.topics", topics.list_topics, topics.LIST),
                Route("POST", "/topics", "http.topic.create", topic_changes.create_topic, topic_changes.CREATE),
                Route("GET", "/topics/{topic}", "http.topic", topics.describe_topic, topics.DESCRIBE),
                Route("PATCH", "/topics/{topic}", "http.topic.alter", topic_changes.alter_topic, topic_changes.ALTER),
                Route(
                    "DELETE", "/topics/{topic}", "http.topic.delete", topic_changes.delete_topic, topic_changes.DELETE
                ),
                Route("GET", "/ring", "http.ring", self._ring, operations.RING),
                Route(
                    "GET",
                    "/placement/topics",
                    "http.placement.topics",
                    self._once_an_image(_by_topic),
                    operations.BY_TOPIC,
                ),
                Route(
                    "GET",
                    "/placement/brokers",
                    "http.placement.brokers",
                    self._once_an_image(_by_broker),
                    operations.BY_BROKER,
                ),
                Route("GET", "/settings", "http.settings", self._once_an_image(_settings), operations.SETTINGS),
                Route("GET", "/settings/{name}", "http.setting", self._setting, operations.SETTING),
                Route("PUT", "/settings/{name}", "http.setting.put", self._put_setting, operations.PUT_SETTING),
                Route(
                    "DELETE", "/settings/{name}", "http.setting.delete", self._delete_setting, operations.DELETE_SETTING
                ),
            ),
        )

    def samples(self) -> Iterable[Sample]:
        image = self._image()
        yield Sample(IMAGE_REVISION, (), image.revision)
        yield Sample(BROKERS, (), len(image.brokers))
        yield Sample(ETCD_SILENT_SECONDS, (), self._pulse.silent_seconds)

    def _index(self, _exchange: Exchange) -> Response:
        paths = [f"{route.method} {route.path}" for route in self.routes]
        return json_response({"registry_of": self._cluster_id, "paths": paths})

    def _health(self, _exchange: Exchange) -> Response:
        image, pulse = self._image(), self._pulse
        return json_response(
            {
                "status": "alive",
                "cluster": self._cluster_id,
                "revision": image.revision,
                "brokers": len(image.brokers),
                "etcd": {
                    "status": "silent" if pulse.silent else "heard",
                    "silent_ms": int(pulse.silent_seconds * 1000),
                    "trouble": pulse.trouble or None,
                },
            }
        )

    def _once_an_image(self, describe: Describe) -> Handler:
        """Encoded when first asked for, and kept until the image is replaced. In a thread: many partitions take a
        while, and the loop goes on.
        """

        def answer(exchange: Exchange) -> Response | None:
            image = self._image()
            if image is not self._kept_of:
                self._kept, self._kept_of = {}, image
            path = exchange.request.path
            kept = self._kept.get(path)
            if kept is None:
                work = asyncio.to_thread(_encoded, image, describe)
                kept = self._kept[path] = asyncio.get_running_loop().create_task(work)
            if kept.done():
                return kept.result()
            exchange.answer_later(_result(kept))
            return None

        return answer

    def _ring(self, exchange: Exchange) -> Response | None:
        request = exchange.request
        if not request.query:
            return self._once_an_image(_ring)(exchange)
        if not {"topic", "partition"} <= set(request.query):
            raise InvalidRequest("give topic and partition, and replicas if it is not 1")
        topic, partition = request.query["topic"], request.integer("partition", 0, 0, PARTITION_MAX)
        whole = ring.Ring(open_sites(self._image()))
        return json_response(
            {
                "topic": topic,
                "partition": partition,
                "point": _shown_point(ring.point_of(topic, partition)),
                "replicas": whole.replicas_of(
                    topic, partition, request.integer("replicas", 1, 1, operations.REPLICAS_MAX)
                ),
            }
        )

    # Settings.

    def _setting(self, exchange: Exchange) -> Response:
        name = exchange.request.parameters["name"]
        return json_response(_shown_setting(name, user_values.find(self._image(), name)))

    def _put_setting(self, exchange: Exchange) -> None:
        name, expected = exchange.request.parameters["name"], _revision(exchange.request)
        try:
            text = exchange.request.body.decode()
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"the value of a setting is text in UTF-8: {error.reason}") from None

        async def put() -> Response:
            return json_response(_shown_setting(name, await self._values.put(name, text, expected)))

        exchange.answer_later(put())

    def _delete_setting(self, exchange: Exchange) -> None:
        name, expected = exchange.request.parameters["name"], _revision(exchange.request)

        async def delete() -> Response:
            await self._values.delete(name, expected)
            return json_response({"name": name, "deleted": True})

        exchange.answer_later(delete())


def _encoded(image: Image, describe: Describe) -> Response:
    return json_response({"revision": image.revision, **describe(image)})


async def _result(kept: asyncio.Task[Response]) -> Response:
    """Others may wait for it too: none of them calls it off."""
    return await asyncio.shield(kept)


def _revision(request: Request) -> int | None:
    return request.integer("revision", 0, 0, operations.REVISION_MAX) if "revision" in request.query else None


def _brokers(image: Image) -> dict[str, Any]:
    controller = image.controller_id()
    return {"controller": controller, "brokers": [_broker(image, image.brokers[n]) for n in sorted(image.brokers)]}


def _broker(image: Image, broker: Broker) -> dict[str, Any]:
    return {
        "broker": broker.id,
        "listeners": {name: _shown_end(end) for name, end in broker.listeners.items()},
        "http": None if broker.http is None else _shown_end(broker.http),
        "rack": broker.rack,
        "state": broker.state,
        "draining": broker.id in image.controls.draining,
        "started_ms": broker.started_ms,
    }


def _shown_end(end: Endpoint) -> str:
    return f"[{end.host}]:{end.port}" if ":" in end.host else f"{end.host}:{end.port}"


def _by_topic(image: Image) -> dict[str, Any]:
    """Watermarks are not in the image: brokers tell them (`headrace partition list`)."""
    return {
        "partitions": [
            {
                "topic": row.topic,
                "partition": row.partition,
                "leader": row.leader,
                "leader_epoch": row.leader_epoch,
                "replicas": [{"broker": r.broker, "in_sync": r.in_sync, "live": r.live} for r in row.replicas],
                "target": row.target,
            }
            for row in listing.by_topic(image)
        ]
    }


def _by_broker(image: Image) -> dict[str, Any]:
    return {
        "brokers": [
            {
                "broker": row.broker,
                "live": row.live,
                "draining": row.draining,
                "rack": row.rack,
                "leads": _held(row.leads),
                "follows": _held(row.follows),
            }
            for row in listing.by_broker(image)
        ]
    }


def _held(rows: Iterable[listing.HeldRow]) -> list[dict[str, Any]]:
    return [{"topic": row.topic, "partition": row.partition, "in_sync": row.in_sync} for row in rows]


def _ring(image: Image) -> dict[str, Any]:
    """Points as text: JSON readers lose the last digits of numbers of 64 bits."""
    whole = ring.Ring(open_sites(image))
    return {
        "points_a_broker": ring.POINTS,
        "shares": {str(broker): round(share, 4) for broker, share in whole.shares().items()},
        "points": [[_shown_point(mark), broker] for mark, broker in whole.marks()],
    }


def _shown_point(mark: int) -> str:
    return f"{mark:016x}"


def _settings(image: Image) -> dict[str, Any]:
    return {"settings": [_shown_setting(name, image.values[name]) for name in sorted(image.values)]}


def _shown_setting(name: str, found: StoredValue) -> dict[str, Any]:
    return {"name": name, "value": found.text, "revision": found.revision}
